"""`solve`: rounds until the gap is small enough, watched from the host."""

from __future__ import annotations

import dataclasses
import enum
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax import _check, _checkpoint
from mocha_jax._algorithm import Algorithm
from mocha_jax._history import History, Progress, Watch
from mocha_jax._mocha import Mocha
from mocha_jax._objective import Certificate, with_best_dual
from mocha_jax._problem import Problem
from mocha_jax._progress import Bar
from mocha_jax._run import Setting, block, settle
from mocha_jax._spread import fetched
from mocha_jax.costs import Cost
from mocha_jax.coupling import correlation
from mocha_jax.systems import System

# A node that was silent in so many rounds is worth a warning; in fewer it may be chance.
_PATIENCE = 10

# Tasks up to which a matrix over all pairs is built on request.
_LARGEST_MATRIX = 20_000


class Status(enum.IntEnum):
    """Why a solve ended."""

    CONVERGED = 0
    MAX_ROUNDS = 1
    NON_FINITE = 2
    STOPPED = 3


@dataclasses.dataclass(frozen=True)
class Solution:
    """What `solve` found, and how good it provably is."""

    problem: Problem
    weights: Array  # [num_tasks, d]
    state: Any
    relation: Any  # Omega as the regularizer keeps it, e.g. factored; None where it is given
    certificate: Certificate
    history: History  # NumPy arrays, one entry per recorded round
    status: Status
    message: str
    rounds: int
    silent_nodes: tuple[int, ...]  # nodes with data that never did any work
    utilisation: np.ndarray  # [m] share of the simulated time in which each node was busy

    @property
    def omega(self) -> Array:
        """The relationship matrix of the model, ``[num_tasks, num_tasks]``."""
        return self.problem.regularizer.relationship(self._num_tasks_squared(), self.relation)

    @property
    def covariance(self) -> Array:
        """How the tasks' weights vary together, up to scale, ``[num_tasks, num_tasks]``."""
        return self.problem.regularizer.covariance(self._num_tasks_squared(), self.relation)

    @property
    def correlation(self) -> Array:
        """The covariance with unit diagonal: what to read as similarity of tasks, from -1 to 1."""
        return correlation(self.covariance)

    def _num_tasks_squared(self) -> int:
        """The number of tasks, where a matrix over pairs of them is a thing to build."""
        m = self.problem.data.num_tasks
        if m > _LARGEST_MATRIX:
            raise ValueError(
                f"{m} tasks have {m:,}^2 pairs; no matrix of them was or will be built. solution.relation keeps Omega "
                f"as base * I + factor @ factor.T."
            )
        return m

    @property
    def primal(self) -> float:
        """Objective at `weights`."""
        return float(self.certificate.primal)

    @property
    def dual(self) -> float:
        """A lower bound on the optimum."""
        return float(self.certificate.dual)

    @property
    def gap(self) -> float:
        """Bound on the distance of `primal` from the optimum."""
        return float(self.certificate.gap)

    @property
    def relative_gap(self) -> float:
        """The gap over the size of the objective."""
        return float(self.certificate.relative_gap)

    @property
    def task_gaps(self) -> Array:
        """Each task's share of the gap, ``[num_tasks]``."""
        return self.certificate.task_gaps

    @property
    def joint_gap(self) -> float | None:
        """Bound on the distance from the optimum over W and Omega; None where that problem is not convex."""
        return float(self.certificate.joint_gap) if self.problem.regularizer.jointly_convex else None

    @property
    def relative_joint_gap(self) -> float | None:
        """The joint gap over the size of the objective."""
        return float(self.certificate.relative_joint_gap) if self.problem.regularizer.jointly_convex else None

    def __repr__(self) -> str:
        return f"Solution({self.message})"


def solve(
    problem: Problem,
    algorithm: Algorithm | None = None,
    *,
    key: Array | None = None,
    tol: float | None = 1e-4,
    joint_tol: float | None = None,
    max_rounds: int = 1000,
    systems: System | None = None,
    cost: Cost | None = None,
    record_every: int = 1,
    chunk: int = 25,
    watch: Watch | None = None,
    progress: bool = False,
    callback: Callable[[int, History], Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    state: Any = None,
) -> Solution:
    """Run rounds until the relative duality gap is at most `tol`.

    Where the relationship of the tasks is learned, that is the joint gap, over weights and Omega; for
    `SparsePrecision`, which has none, the gap of the weights plus what the last update of Omega gained.

    The rounds run in compiled chunks; between chunks the host shows progress, calls back and
    saves. A solve that was interrupted, even killed, continues from its checkpoint when
    called again with the same arguments, and ends bit for bit where it would have ended.

    Args:
      problem: what to solve.
      algorithm: default `Mocha()`.
      key: a JAX random key; default ``jax.random.key(0)``.
      tol: relative gap at which to stop, tested at every record; None never stops early.
      joint_tol: relative joint gap at which to stop, in place of `tol`, on jointly convex problems.
      max_rounds: stop after that many rounds in any case.
      systems: how nodes behave, from `mocha_jax.systems`; default all do their full work.
      cost: prices of ``history.simulated_time``.
      record_every: rounds between records of the history.
      chunk: rounds per compiled call, rounded up to a whole number of records.
      watch: what to record of every node, `Watch`; default nothing.
      progress: show a progress bar (tqdm where installed).
      callback: called as ``callback(round, history)`` after each chunk with all records so
        far; a true return value stops the solve.
      checkpoint: file to save to after each chunk and to resume from where it exists. It is
        replaced atomically. A damaged file, or one of another run, is refused.
      state: continue from here instead of ``algorithm.init(problem)``; on another problem of the
        same shape it is a warm start. `max_rounds` counts the rounds of this call.

    >>> import numpy as np, mocha_jax as mj
    >>> rng = np.random.default_rng(0)
    >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
    >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], loss_scaling="task_mean")
    >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.01))
    >>> solution = mj.solve(problem, tol=1e-3)
    >>> solution.status.name, solution.relative_gap <= 1e-3, solution.weights.shape
    ('CONVERGED', True, (4, 3))
    """
    _check.integer("solve", 0, max_rounds=max_rounds)
    _check.integer("solve", 1, record_every=record_every, chunk=chunk)
    if joint_tol is not None:
        if not problem.regularizer.jointly_convex:
            raise ValueError(
                f"solve: {type(problem.regularizer).__name__} is not convex in W and Omega together, so there is no "
                f"joint gap; pass tol instead of joint_tol."
            )
        tol = joint_tol
    if tol is not None:
        _check.nonnegative("solve", tol=tol)
        tol = float(tol)
    chunk = -(-chunk // record_every) * record_every  # a chunk ends on a record
    key = jax.random.key(0) if key is None else key
    run = settle(Mocha() if algorithm is None else algorithm, problem, systems, cost, watch, record_every)

    where, room = _begin(key, run, state, records=chunk // record_every)
    save = _checkpoint.Saver(checkpoint, key, run, record_every, state)
    first = int(where.state.round)
    last = first + int(max_rounds)
    where, history = save.load(where, jax.tree.map(lambda r: np.asarray(r)[:0], room))
    run = _prepare(run)
    stopped = False
    with Bar(progress and jax.process_index() == 0, total=last, done=int(where.state.round)) as bar:
        while (outcome := _outcome(history, where, tol, last, stopped)) is None:
            limit = min(int(where.state.round) // record_every * record_every + chunk, last)
            within = jnp.asarray(-1.0 if tol is None else tol, problem.data.dtype)
            where, records, count = _chunk(key, run, where, room, limit, within, record_every=record_every)
            history = _extend(history, records, int(count))
            save(where, history)
            bar.show(int(where.state.round), float(history.residual[-1]))
            stopped = callback is not None and bool(callback(int(where.state.round), history))
    return _solution(problem, run, where, history, outcome, tol, int(where.state.round) - first)


@partial(jax.jit, static_argnames="records")
def _begin(key: Array, run: Setting, state: Any, *, records: int) -> tuple[Progress, History]:
    """Nothing done yet, and room for the records of a chunk."""
    progress = run.start(state)
    shapes = jax.eval_shape(lambda p: block(key, run, p, 1)[1], progress)
    return progress, jax.tree.map(lambda r: jnp.zeros((records, *r.shape), r.dtype), shapes)


@jax.jit
def _prepare(run: Setting) -> Setting:
    return run.prepared()


@partial(jax.jit, static_argnames="record_every")
def _chunk(
    key: Array, run: Setting, progress: Progress, room: History, limit: int, tol: Array, *, record_every: int
) -> tuple[Progress, History, Array]:
    """Blocks of rounds until the limit, the tolerance or a non-finite gap; no more than there is room to record."""

    def unfinished(carry: tuple[Progress, History, Array, Array]) -> Array:
        return carry[3] & (carry[0].state.round < limit)

    def body(carry: tuple[Progress, History, Array, Array]) -> tuple[Progress, History, Array, Array]:
        progress, history, i, _ = carry
        done = progress.state.round
        progress, record = block(key, run, progress, jnp.minimum(record_every - done % record_every, limit - done))
        history = jax.tree.map(lambda h, r: h.at[i].set(r), history, record)
        return progress, history, i + 1, jnp.isfinite(record.gap) & ~(record.residual <= tol)

    carry = progress, room, jnp.zeros((), jnp.int32), jnp.ones((), bool)
    return lax.while_loop(unfinished, body, carry)[:3]


def _extend(history: History, records: History, count: int) -> History:
    return jax.tree.map(lambda h, r: np.concatenate([h, fetched(r)[:count]]), history, records)


def _outcome(history: History, where: Progress, tol: float | None, last: int, stopped: bool) -> Status | None:
    if len(history.gap):
        if not np.isfinite(history.gap[-1]):
            return Status.NON_FINITE
        if tol is not None and history.residual[-1] <= tol:
            return Status.CONVERGED
    if int(where.state.round) >= last:
        return Status.MAX_ROUNDS
    return Status.STOPPED if stopped else None


@jax.jit
def _settle_state(run: Setting, where: Progress) -> tuple[Any, Certificate, Any]:
    """The state with W derived afresh from the duals, its certificate and its Omega."""
    state = run.algorithm.adopt(where.state, run.problem)
    certificate = with_best_dual(run.problem, run.algorithm.certify(state, run.problem), where.joint_dual)
    return state, certificate, run.algorithm.omega(state, run.problem)


def _solution(
    problem: Problem, run: Setting, where: Progress, history: History, status: Status, tol: float | None, rounds: int
) -> Solution:
    state, certificate, relation = _settle_state(run, where)
    regularizer = problem.regularizer
    name = "relative gap" if not regularizer.learned else "relative joint gap"
    name = name if regularizer.jointly_convex else "residual"
    residual = float(certificate.residual)
    message = {
        Status.CONVERGED: f"converged: {name} {residual:.2g} <= {tol} after {rounds} rounds",
        Status.MAX_ROUNDS: f"stopped at max_rounds after {rounds} rounds with {name} {residual:.2g}",
        Status.NON_FINITE: f"the gap became infinite or NaN at round {rounds}; check the data's scale and step sizes",
        Status.STOPPED: f"stopped by the callback after {rounds} rounds with {name} {residual:.2g}",
    }[status]
    answered, busy, sizes, task = (
        fetched(a) for a in (where.answered, where.busy, problem.data.sizes, problem.data.task)
    )
    silent = np.flatnonzero((answered == 0) & (sizes > 0)) if rounds else np.zeros(0, int)
    if len(silent) and status != Status.CONVERGED and rounds >= _PATIENCE:
        tasks = sorted(set(task[silent].tolist()))
        which = ", ".join(map(str, tasks[:10])) + (f" and {len(tasks) - 10} more" if len(tasks) > 10 else "")
        message += f"; {len(silent)} node(s) never answered, so the gap of task(s) {which} is not closed"
        warnings.warn(f"solve: {message}", stacklevel=3)
    return Solution(
        problem=problem, weights=run.algorithm.weights(state), state=state, relation=relation, certificate=certificate,
        history=history, status=status, message=message, rounds=rounds, silent_nodes=tuple(silent.tolist()),
        utilisation=np.minimum(busy / max(float(where.time), np.finfo(np.float32).tiny), 1.0),
    )  # fmt: skip
