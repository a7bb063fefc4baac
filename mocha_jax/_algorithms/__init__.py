"""The contract `Algorithm`, and the convex methods: MOCHA, CoCoA, mini-batch SDCA and mini-batch SGD.

It may import `_core`, `_numerics`, `_data`, `networks`, `systems`, `coupling`, `regularizers`, `_problem`, `_node`
and `servers`.
"""
