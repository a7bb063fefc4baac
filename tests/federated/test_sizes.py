"""How large messages are, exactly."""

import numpy as np
import pytest

import mocha_jax as mj
from tests.federated import world

D = world.D
WAYS = {
    "dual": (mj.Mocha(server="dual", sigma_prime="per_task"), mj.regularizers.MeanRegularized(0.2, 0.05)),
    "proximal": (mj.Mocha(server="proximal"), mj.regularizers.Probabilistic(0.05)),
    "cocoa": (mj.Cocoa(0.3), mj.regularizers.MeanRegularized(0.2, 0.05)),
}
# Floats and 32-bit integers that come on top of what is counted as costs.
MORE = {"DualDown": (D + 1, 1), "DualUp": (6, 1)}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_a_message_has_so_many_numbers_more_than_are_counted(way, dtype, key):
    algorithm, regularizer = WAYS[way]
    xs, ys = world.tables(dtype=dtype)
    problem = world.problem_of(xs, ys, mj.losses.Hinge(), regularizer)
    server = world.server_of(algorithm, regularizer, dtype=dtype)
    (node, *_) = world.nodes_of(xs, ys, mj.losses.Hinge(), algorithm)
    down = server.down(server.init(), 0)
    up = node.step(key, node.init(), down)[1]
    request, name = algorithm.request(problem), np.dtype(dtype).name
    table = mj.federated.message_numbers(server)
    assert set(table) == {down.kind, up.kind}
    for message, counted in ((down, request.down), (up, request.up)):
        floats, integers = MORE[message.kind]
        assert table[message.kind] == {name: int(counted) + floats, "int32": integers}
        assert message.nbytes == np.dtype(dtype).itemsize * (int(counted) + floats) + 4 * integers
        kinds = [np.asarray(array).dtype.name for array in message.arrays.values() for _ in np.ravel(array)]
        assert {kind: kinds.count(kind) for kind in kinds} == table[message.kind]
    assert f"| `{up.kind}` |" in mj.federated.as_table(table)
    assert f" {up.nbytes} |" in mj.federated.as_table(table)
