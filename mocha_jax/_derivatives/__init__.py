"""Derivatives of an optimum: its conditions, linearised, and Newton steps to the point at which they hold.

It may import `_core`, `_numerics`, `_problem`, `regularizers` and `_algorithms`.
"""
