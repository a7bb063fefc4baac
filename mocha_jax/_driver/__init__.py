"""The loops over rounds: `run` and `solve`, histories, checkpoints, and the derivatives of a solve.

It may import `_core`, `_files`, `_numerics`, `_data`, `costs`, `networks`, `systems`, `coupling`, `_model`,
`_problem`, `_node`, `_algorithms` and `_derivatives`.
"""
