"""Numerical methods that know of no federation: lasso, graphical lasso, MINRES, products in two floats,
convolutions.

It may import `_core`.
"""
