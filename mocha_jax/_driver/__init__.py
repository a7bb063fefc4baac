"""The loops over rounds: `run` and `solve`, histories, checkpoints, and the derivatives of a solve.

It may import `_core`, `_numerics`, `_data`, `costs`, `networks`, `systems`, `coupling`, `regularizers`, `_model`,
`_problem`, `_node` and `_algorithms`.
"""
