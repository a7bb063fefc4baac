"""Counters of a run, and its records."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mocha_jax._algorithms.base import Algorithm, Kind, State
from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Pytree
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.problem import Federated
from mocha_jax._problem.quality import Quality
from mocha_jax.costs import Cost
from mocha_jax.systems._work import Info, Request, Work


class Watch(Pytree):
    r"""Asks for records of every node: ``run(..., watch=Watch())`` fills ``history.nodes``.

    Args:
      theta: measure $\theta_t^h$ of eq. (5) in every round, to within this; needs ``record_every=1``. It
        takes many passes over the data. Default: not.
    """

    theta: Hyperparameter | None = None

    def __post_init__(self) -> None:
        if self.theta is not None:
            check.positive("Watch", theta=self.theta)
            check.scalar("Watch", theta=self.theta)


class Nodes(Pytree):
    """The work of every node since the previous record; in a history every field has a leading axis."""

    steps: Array  # [m] int32
    seconds: Array  # [m] simulated time spent computing and communicating
    answered: Array  # [m] int32 rounds in which the node took part
    theta: Array | Any  # [m] accuracy of its last round, eq. (5), NaN where there was nothing to gain; or None
    theta_error: Array | Any  # [m] bound on the error of theta


class History(Pytree):
    """Recorded rounds; in a run every field has a leading axis, one entry per record.

    What the algorithm reports of its answers, its `quality`, can be read as if it were the history's own. Of a convex
    problem: ``history.primal dual gap relative_gap joint_primal joint_dual joint_gap relative_joint_gap gap_before``,
    see `Certificate`; ``joint_dual`` is the best bound up to there, and where the problem is not convex in W and Omega
    together it is minus infinity and ``joint_gap`` infinite. Of networks: ``history.loss test_loss error diverged``,
    see `Evaluation`.
    Of all: ``history.residual``, what `solve` compares with its tolerance.
    """

    round: Array  # rounds done so far
    quality: Quality  # `Certificate`, without the shares of tasks, or `Evaluation`
    simulated_time: Array  # seconds since the start, equation (30)
    bytes_down: Array  # received by all nodes since the start
    bytes_up: Array  # sent by all nodes since the start
    utilisation: Array  # share of the simulated time in which the average node with data was busy
    steps: Array  # int32 steps of all nodes since the previous record
    active: Array  # int32 nodes that took part in the last round
    capped: Array  # int32 how often, since the previous record, a node ran out of work before the accuracy asked for
    nodes: Nodes | Any = None  # None unless `Watch` asked for it

    @property
    def primal(self) -> Array:
        """The objective, of every record."""
        return self._of_quality("primal")

    @property
    def dual(self) -> Array:
        """A lower bound on the optimum, of every record."""
        return self._of_quality("dual")

    @property
    def gap(self) -> Array:
        """Their distance, at least, of every record."""
        return self._of_quality("gap")

    @property
    def relative_gap(self) -> Array:
        """The gap over the size of the objective, of every record."""
        return self._of_quality("relative_gap")

    @property
    def joint_primal(self) -> Array:
        """The objective minimised over Omega, of every record."""
        return self._of_quality("joint_primal")

    @property
    def joint_dual(self) -> Array:
        """The best lower bound on the joint optimum so far, of every record."""
        return self._of_quality("joint_dual")

    @property
    def joint_gap(self) -> Array:
        """Their distance, at least, of every record."""
        return self._of_quality("joint_gap")

    @property
    def relative_joint_gap(self) -> Array:
        """The joint gap over the size of the objective, of every record."""
        return self._of_quality("relative_joint_gap")

    @property
    def gap_before(self) -> Array:
        """The gap just before Omega was last replaced, of every record."""
        return self._of_quality("gap_before")

    @property
    def residual(self) -> Array:
        """The number that a solve compares with its tolerance, of every record."""
        return self._of_quality("residual")

    @property
    def loss(self) -> Array:
        """The mean training loss of networks, of every record."""
        return self._of_quality("loss")

    @property
    def test_loss(self) -> Array:
        """The mean loss of networks on held-out samples, of every record."""
        return self._of_quality("test_loss")

    @property
    def error(self) -> Array:
        """The error of networks on held-out samples, of every record."""
        return self._of_quality("error")

    @property
    def diverged(self) -> Array:
        """The updates of networks left out so far because they were not finite, of every record."""
        return self._of_quality("diverged")

    def _of_quality(self, name: str) -> Array:
        if not hasattr(self.quality, name):
            raise AttributeError(f"a history of {type(self.quality).__name__}s has no {name!r}")
        return getattr(self.quality, name)


class Progress(Pytree):
    """The progress of a run: the algorithm's state and the driver's counters."""

    state: State
    time: Array  # [] simulated seconds
    lag: Array  # [] what rounding has kept from them
    bytes_down: Array  # []
    bytes_up: Array  # []
    busy: Array  # [m] simulated seconds of each node
    answered: Array  # [m] int32 rounds in which a node took part
    bound: Array  # [] the best lower bound on the optimum so far, see `Quality.bound`
    steps: Array  # [] int32 since the last record
    active: Array  # [] int32 in the last round
    capped: Array  # [] int32 since the last record
    nodes: Nodes | None  # since the last record


def start(
    algorithm: Algorithm[Kind], problem: Kind, state: State | None = None, watch: Watch | None = None
) -> Progress:
    """Nothing done yet, or nothing since `state`."""
    m, dtype = problem.data.num_nodes, problem.data.dtype
    zero, nothing = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
    counts, reals = jnp.zeros((m,), jnp.int32), jnp.zeros((m,), dtype)
    nodes = None
    if watch is not None:
        theta = None if watch.theta is None else jnp.ones_like(reals)  # no dual has changed
        nodes = Nodes(counts, reals, counts, theta, theta)
    state = algorithm.init(problem) if state is None else algorithm.resume(state, problem)
    check.instance(f"{type(algorithm).__name__}.init", "what it returns", state, State, "a subclass of mocha_jax.State")
    return Progress(
        state=state,
        time=zero, lag=zero, bytes_down=zero, bytes_up=zero, busy=reals, answered=counts,
        bound=jnp.full((), -jnp.inf, dtype), steps=nothing, active=nothing, capped=nothing, nodes=nodes,
    )  # fmt: skip


def count(
    progress: Progress, problem: Federated, cost: Cost, request: Request, work: Work, info: Info,
    theta: tuple[Array, Array] | None,
) -> Progress:  # fmt: skip
    """Add up a round: what the nodes did, how long it took and what went over the network."""
    present = (work.budget(request.steps) > 0) & (problem.data.sizes > 0)
    seconds = jnp.where(present, cost.seconds(info.flops, request.down, request.up), 0.0)
    took_part = present.astype(jnp.int32)
    width = jnp.sum(jnp.where(present, jnp.asarray(cost.bytes_per_number), 0.0))
    # What adding a round's seconds to a long time rounds off is kept and added later.
    spent = progress.lag + cost.round_seconds(seconds)
    time = progress.time + spent
    nodes = progress.nodes
    if nodes is not None:
        nodes = nodes.replace(
            steps=nodes.steps + info.steps, seconds=nodes.seconds + seconds, answered=nodes.answered + took_part
        )
        if theta is not None:
            nodes = nodes.replace(theta=theta[0], theta_error=theta[1])
    return progress.replace(
        time=time,
        lag=spent - (time - progress.time),
        bytes_down=progress.bytes_down + width * request.down,
        bytes_up=progress.bytes_up + width * request.up,
        busy=progress.busy + seconds,
        answered=progress.answered + took_part,
        steps=progress.steps + jnp.sum(info.steps, dtype=jnp.int32),
        active=jnp.sum(took_part, dtype=jnp.int32),
        capped=progress.capped + jnp.sum(info.capped, dtype=jnp.int32),
        nodes=nodes,
    )


def record(progress: Progress, problem: Federated, quality: Quality) -> tuple[Progress, History]:
    """Write down where the run stands, and begin to count anew what is counted between records."""
    present = problem.data.sizes > 0
    total = jnp.sum(jnp.where(present, progress.busy, 0.0))
    busy = total / jnp.maximum(jnp.sum(present), 1).astype(total.dtype)
    utilisation = jnp.minimum(safe_ratio(busy, progress.time), 1.0)
    history = History(
        progress.state.round, quality.summary(), progress.time, progress.bytes_down, progress.bytes_up, utilisation,
        progress.steps, progress.active, progress.capped, progress.nodes,
    )  # fmt: skip
    zero = jnp.zeros_like(progress.steps)
    nodes = progress.nodes
    if nodes is not None:
        empty = jnp.zeros_like(nodes.steps)
        nodes = nodes.replace(steps=empty, seconds=jnp.zeros_like(nodes.seconds), answered=empty)
    return progress.replace(steps=zero, capped=zero, nodes=nodes, bound=quality.bound), history
