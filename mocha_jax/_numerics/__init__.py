"""Numerical methods that know of no federation: tall matrices, lasso, graphical lasso, MINRES.

It may import `_core`.
"""
