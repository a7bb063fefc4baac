"""Federated training of networks: FedAvg, FedProx, separate networks, VIRTUAL.

It may import `_core`, `_numerics`, `likelihoods`, `_data`, `networks`, `systems`, `_model`, `_problem` and
`_algorithms`.
"""
