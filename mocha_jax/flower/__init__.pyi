from mocha_jax.flower._client_app import client_app as client_app
from mocha_jax.flower._server_app import server_app as server_app
from mocha_jax.flower._server_loop import Served as Served
from mocha_jax.flower._server_loop import serve as serve
