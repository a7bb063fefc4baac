"""Numerical methods that know of no federation: lasso, graphical lasso, MINRES, two-float products, convolutions.

It may import `_core`.
"""
