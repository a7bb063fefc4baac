"""Numerical methods that know of no federation: lasso, graphical lasso, MINRES, products in two floats.

It may import `_core`.
"""
