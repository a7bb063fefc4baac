"""The work of the central node in a round: aggregating the nodes' updates, and Omega.

It may import `_core`, `_numerics`, `_data`, `losses`, `systems`, `coupling` and `_problem`.
"""
