"""Numerical methods that know of no federation: spectral functions, lasso, graphical lasso, MINRES, convolutions.

It may import `_core`.
"""
