"""What a round costs in simulated time, equation (30)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mocha_jax import _check
from mocha_jax._data import TaskData
from mocha_jax._pytree import Hyperparameter, Pytree
from mocha_jax.systems import Work


class Cost(Pytree):
    r"""Seconds per node and round: FLOPs / clock rate + latency + bytes / bandwidth.

    A node that answers receives its weights and sends its dual vector, d numbers each way.
    A coordinate step costs 6d FLOPs: a product with ``w + q u`` formed on the way
    (4d) and one scaled addition (2d).

    Args:
      flops_per_second: of a node; a number, or one per node ``[m]``. The default is a phone of
        1 GFLOP/s.
      latency: seconds per round trip.
      bytes_per_second: of the link, the same both ways. The default is 10 Mbit/s.
    """

    flops_per_second: Hyperparameter = 1e9
    latency: Hyperparameter = 0.05
    bytes_per_second: Hyperparameter = 1.25e6

    def __post_init__(self) -> None:
        _check.positive("Cost", flops_per_second=self.flops_per_second, bytes_per_second=self.bytes_per_second)
        _check.nonnegative("Cost", latency=self.latency)

    def node_seconds(self, data: TaskData, work: Work) -> Array:
        """Seconds each node takes, ``[m]``; 0 for a node that does not take part.

        >>> import numpy as np, jax.numpy as jnp, mocha_jax as mj
        >>> data = mj.pack_tasks([np.ones((5, 100), "f")], [np.ones(5)])
        >>> cost = Cost(flops_per_second=600.0, latency=1.0, bytes_per_second=400.0)
        >>> cost.node_seconds(data, mj.systems.Work(jnp.array([2]), jnp.array([True]))).tolist()
        [5.0]
        """
        dtype, d = data.x.dtype, data.num_features
        compute = work.steps.astype(dtype) * (6.0 * d / jnp.asarray(self.flops_per_second, dtype))
        message = 2.0 * d * dtype.itemsize / jnp.asarray(self.bytes_per_second, dtype)
        return jnp.where(work.active & (data.sizes > 0), compute + jnp.asarray(self.latency, dtype) + message, 0.0)

    def round_seconds(self, data: TaskData, work: Work) -> Array:
        """A round lasts as long as its slowest active node."""
        return jnp.max(self.node_seconds(data, work))
