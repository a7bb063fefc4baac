"""Counters of a run, and its records."""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._algorithms.base import Algorithm, Kind, State
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Hyperparameter, Pytree, fields_of, summary
from mocha_jax._data.names import DataFrame
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.problem import Federated, Quality
from mocha_jax.costs import Cost
from mocha_jax.systems._base import Info, Request, Work

# Rounds without a gain before a reason is looked for.
_PATIENCE = 25


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
    capped: Array  # [m] int32 rounds in which it ran out of work before the accuracy asked for
    bytes_down: Array  # [m] received
    bytes_up: Array  # [m] sent
    theta: Array | Any  # [m] accuracy of its last round, eq. (5), NaN where there was nothing to gain; or None
    theta_error: Array | Any  # [m] bound on the error of theta


class History(Pytree):
    """Recorded rounds; in a run every field has a leading axis, one entry per record.

    What the algorithm reports of its answers, its `quality`, can be read as if it were the history's own. Of a convex
    problem: ``history.primal dual gap relative_gap joint_primal joint_dual joint_gap relative_joint_gap gap_before``,
    see `Certificate`; ``joint_dual`` is the best bound up to there, and where the problem is not convex in W and Omega
    together it is minus infinity and ``joint_gap`` infinite. Of networks: ``history.loss test_loss error sample_error
    diverged exhausted``, see `Evaluation`.
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
    def sample_error(self) -> Array:
        """The error of networks over all held-out samples, of every record."""
        return self._of_quality("sample_error")

    @property
    def diverged(self) -> Array:
        """The updates of networks left out so far because they were not finite, of every record."""
        return self._of_quality("diverged")

    @property
    def exhausted(self) -> Array:
        """Clients whose privacy allows them no more steps, of every record of a training."""
        return self._of_quality("exhausted")

    @on_purpose
    def to_dict(self) -> dict[str, np.ndarray]:
        """Return the records as columns by name, each with a number for every record; not those of single nodes.

        Examples:
          >>> import jax, mocha_jax as mj
          >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
          >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
          >>> columns = mj.solve(problem, max_rounds=6, record_every=2, tol=None).history.to_dict()
          >>> columns["round"].tolist(), columns["gap"].shape
          ([2, 4, 6], (3,))

          As JSON, which has lists and no arrays:

          >>> import json
          >>> text = json.dumps({name: column.tolist() for name, column in columns.items()})
          >>> json.loads(text)["round"]
          [2, 4, 6]
        """
        columns = {"round": self.round, **fields_of(self.quality), **fields_of(self)}
        return {
            name: np.asarray(value)
            for name, value in columns.items()
            if value is not None and not isinstance(value, Pytree) and np.shape(value) == np.shape(self.round)
        }

    def to_frame(self) -> DataFrame:
        """Return the records as a data frame of pandas, one row each."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ImportError("to_frame: needs pandas (pip install pandas); to_dict needs nothing.") from error
        return pandas.DataFrame(self.to_dict())

    def __repr__(self) -> str:
        rounds, residuals = (check.concrete(a) for a in (self.round, self.quality.residual))
        if rounds is None or residuals is None or rounds.ndim != 1 or not len(rounds):
            return summary(self, {"round": self.round, "residual": self.quality.residual})
        nodes = "" if self.nodes is None else ", also of every node"
        return (
            f"History({len(rounds)} records up to round {rounds[-1]}, residual {residuals[0]:.2g} to "
            f"{residuals[-1]:.2g}{nodes}; see to_dict and to_frame)"
        )

    def _of_quality(self, name: str) -> Array:
        if not hasattr(self.quality, name):
            raise AttributeError(f"a history of {type(self.quality).__name__}s has no {name!r}")
        return getattr(self.quality, name)


class Best(Pytree):
    """The best record of a run, to notice when rounds stop gaining."""

    residual: Array  # [] the least, or not much more than that
    round: Array  # [] int32 in which it was reached
    first: Array  # [] int32 from which the run began
    last: Array  # [] int32 of the last record
    settled: Array  # [] bool whether the state says that rounds gain no more

    def updated(self, residual: Array, state: State) -> Best:
        """Remember a residual that is less by a quarter."""
        better, settled = residual < 0.75 * self.residual, jnp.asarray(state.settled)
        least, round = (jnp.where(better, *pair) for pair in ((residual, self.residual), (state.round, self.round)))
        return Best(least, round, self.first, state.round, settled)

    def stays(self, problem: Federated, aim: Array | np.ndarray) -> Array:
        """Tell whether rounding explains that more rounds have gained nothing than had led there, or that none will.

        A run without a tolerance (`aim` is negative) ends at its number of rounds alone.
        """
        idle = self.last - self.round
        enough = (idle > _PATIENCE) & (idle > self.round - self.first)
        return (enough & (self.residual <= problem.rounding_level) | self.settled) & (aim >= 0)


class Progress(Pytree):
    """The progress of a run: the algorithm's state and the driver's counters.

    Within a round only `time` needs numbers of all nodes at once. Everything else is counted node by node, `since` the
    last record, and added up there: on an accelerator every sum in the loop of rounds were a kernel more.
    """

    state: State
    time: Array  # [] simulated seconds
    lag: Array  # [] what rounding has kept from them
    since: Nodes  # the last record
    active: Array  # [m] bool nodes that took part in the last round
    bytes_down: Array  # [] up to the last record
    bytes_up: Array  # [] up to the last record
    busy: Array  # [m] simulated seconds of each node up to the last record
    answered: Array  # [m] int32 rounds up to the last record in which a node took part
    bound: Array  # [] the best lower bound on the optimum so far, see `Quality.bound`
    best: Best


def start(
    algorithm: Algorithm[Kind], problem: Kind, state: State | None = None, watch: Watch | None = None
) -> Progress:
    """The progress before the first round, from `state` or from none."""
    m, dtype = problem.data.num_nodes, problem.data.dtype
    zero, counts, reals = jnp.zeros((), dtype), jnp.zeros((m,), jnp.int32), jnp.zeros((m,), dtype)
    theta = None
    if watch is not None and watch.theta is not None:
        theta = jnp.ones_like(reals)  # no dual has changed
    since = Nodes(counts, reals, counts, counts, reals, reals, theta, theta)
    state = algorithm.init(problem) if state is None else algorithm.resume(state, problem)
    check.instance(f"{algorithm.name}.init", "what it returns", state, State, "a subclass of mocha_jax.State")
    return Progress(
        state=state, time=zero, lag=zero, since=since, active=jnp.zeros((m,), bool),
        bytes_down=zero, bytes_up=zero, busy=reals, answered=counts, bound=jnp.full((), -jnp.inf, dtype),
        best=Best(jnp.full((), jnp.inf, dtype), state.round, state.round, state.round, jnp.zeros((), bool)),
    )  # fmt: skip


def count(
    progress: Progress, problem: Federated, cost: Cost, request: Request, work: Work, info: Info,
    theta: tuple[Array, Array] | None,
) -> Progress:  # fmt: skip
    """Count a round: what the nodes did, how long it took and what went over the network."""
    since, present = progress.since, (work.budget(request.steps) > 0) & (problem.data.sizes > 0)
    seconds = jnp.where(present, cost.seconds(info.flops, request.down, request.up), 0.0)
    width = jnp.where(present, jnp.asarray(cost.bytes_per_number), 0.0)
    # What adding a round's seconds to a long time rounds off is kept and added later.
    spent = progress.lag + cost.round_seconds(seconds)
    time = progress.time + spent
    since = since.replace(
        steps=since.steps + info.steps,
        seconds=since.seconds + seconds,
        answered=since.answered + present.astype(jnp.int32),
        capped=since.capped + info.capped.astype(jnp.int32),
        bytes_down=since.bytes_down + width * request.down,
        bytes_up=since.bytes_up + width * request.up,
    )
    if theta is not None:
        since = since.replace(theta=theta[0], theta_error=theta[1])
    return progress.replace(time=time, lag=spent - (time - progress.time), since=since, active=present)


def record(progress: Progress, problem: Federated, quality: Quality, watch: Watch | None) -> tuple[Progress, History]:
    """Write down where the run stands, and begin to count anew what is counted between records."""
    since, present = progress.since, problem.data.sizes > 0
    nothing, none = jnp.zeros_like(since.steps), jnp.zeros_like(since.seconds)
    progress = progress.replace(
        since=since.replace(
            steps=nothing, seconds=none, answered=nothing, capped=nothing, bytes_down=none, bytes_up=none
        ),
        bytes_down=progress.bytes_down + jnp.sum(since.bytes_down),
        bytes_up=progress.bytes_up + jnp.sum(since.bytes_up),
        busy=progress.busy + since.seconds,
        answered=progress.answered + since.answered,
        bound=quality.bound,
        best=progress.best.updated(quality.residual, progress.state),
    )
    total = jnp.sum(jnp.where(present, progress.busy, 0.0))
    busy = total / jnp.maximum(jnp.sum(present), 1).astype(total.dtype)
    steps, active, capped = (jnp.sum(a, dtype=jnp.int32) for a in (since.steps, progress.active, since.capped))
    return progress, History(
        progress.state.round, quality.summary(), progress.time, progress.bytes_down, progress.bytes_up,
        jnp.minimum(safe_ratio(busy, progress.time), 1.0), steps, active, capped, None if watch is None else since,
    )  # fmt: skip
