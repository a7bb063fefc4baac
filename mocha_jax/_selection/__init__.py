"""Many solves: grids, regularization paths, cross-validation, tuning by gradients.

It may import `_core`, `_data`, `losses`, `regularizers`, `metrics`, `_problem`, `_algorithms` and `_driver`.
"""
