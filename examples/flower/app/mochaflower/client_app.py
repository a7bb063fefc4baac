"""The ClientApp. Flower imports this file anew for every message, so nothing in it needs JAX."""

from mocha_jax.flower import client_app

app = client_app("mochaflower.node:make_node")
