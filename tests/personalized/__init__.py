"""Methods of personalised federated learning against oracles in NumPy, each written from its paper alone."""
