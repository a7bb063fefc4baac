"""The work of a node in a round: its subproblem (4), and dual coordinate ascent on it by loops or by a kernel.

It may import `_core`, `_numerics`, `_data`, `losses` and `_problem`.
"""
