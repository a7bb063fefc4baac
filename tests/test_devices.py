"""The same problem on one device and on several: the suite runs with eight CPU devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mocha_jax as mj
from tests import zoo


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("model", ["mean", "graph"])
def test_the_number_of_devices_does_not_matter(count, model, key):
    assert len(jax.devices()) >= 8
    data = zoo.data(m=6, loss_scaling="task_mean")
    regularizer = zoo.regularizers(6)[model]
    systems = mj.systems.Dropout(0.3)
    state, history = mj.run(
        key, mj.Mocha(), mj.Problem(data, mj.losses.Hinge(), regularizer), num_rounds=30, systems=systems
    )

    mesh = jax.make_mesh((count,), ("nodes",), axis_types=(AxisType.Auto,))
    padded = data.pad(nodes=8)
    by_node = NamedSharding(mesh, PartitionSpec("nodes"))
    sharded = jax.tree.map(lambda leaf: jax.device_put(leaf, by_node), padded)
    problem = mj.Problem(sharded, mj.losses.Hinge(), regularizer)
    assert len(problem.data.x.sharding.device_set) == count
    other, record = mj.run(key, mj.Mocha(), problem, num_rounds=30, systems=systems)
    np.testing.assert_allclose(state.w, other.w, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(history.gap, record.gap, rtol=1e-6)
    solution = mj.solve(problem, tol=1e-4, max_rounds=2000)
    assert solution.status == mj.Status.CONVERGED
