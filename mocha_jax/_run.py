"""The rounds: one round, one recorded block of rounds, and `run`, a scan over blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax import _check
from mocha_jax._algorithm import Algorithm
from mocha_jax._objective import with_best_dual
from mocha_jax._problem import Problem
from mocha_jax._pytree import Pytree
from mocha_jax.costs import Cost
from mocha_jax.systems import Full, System, Work


class History(Pytree):
    """Recorded rounds; in a run every field has a leading axis, one entry per record."""

    round: Array  # rounds done so far
    primal: Array
    dual: Array
    gap: Array
    relative_gap: Array
    joint_primal: Array  # with the best Omega for the weights
    joint_dual: Array  # the best lower bound on the joint optimum up to here
    joint_gap: Array  # distance from the joint optimum over W and Omega; NaN where that is not convex
    relative_joint_gap: Array
    residual: Array  # what `solve` compares with its tolerance
    gap_before: Array  # the gap just before Omega was last replaced; NaN where it was not
    simulated_time: Array  # seconds since the start, equation (30)
    steps: Array  # int32 coordinate updates of all nodes since the previous record
    active: Array  # int32 nodes that did any work in the last round


class Progress(Pytree):
    """Where a run stands: the algorithm's state and what the driver keeps count of."""

    state: Any
    time: Array  # [] simulated seconds
    steps: Array  # [] int32 since the last record
    active: Array  # [] int32
    answered: Array  # [m] int32 rounds in which a node did any work
    joint_dual: Array  # [] the best lower bound on the joint optimum so far


def start(algorithm: Algorithm, problem: Problem, state: Any = None) -> Progress:
    """Nothing done yet, or nothing since `state`."""
    zero = jnp.zeros((), jnp.int32)
    return Progress(
        state=algorithm.init(problem) if state is None else algorithm.adopt(state, problem),
        time=jnp.zeros((), problem.data.x.dtype), steps=zero, active=zero,
        answered=jnp.zeros((problem.data.num_nodes,), jnp.int32),
        joint_dual=jnp.full((), -jnp.inf, problem.data.x.dtype),
    )  # fmt: skip


def advance(
    key: Array, algorithm: Algorithm, problem: Problem, systems: System, cost: Cost, progress: Progress
) -> Progress:
    """One round. Its randomness depends on the run's key and the round's number only."""
    key = jax.random.fold_in(key, progress.state.round)
    work = systems.work(jax.random.fold_in(key, 0), problem.data, algorithm.full_work(problem))
    state, info = algorithm.step(jax.random.fold_in(key, 1), progress.state, problem, work)
    worked = info.steps > 0
    return progress.replace(
        state=state,
        time=progress.time + cost.round_seconds(problem.data, Work(info.steps, work.active)),
        steps=progress.steps + jnp.sum(info.steps, dtype=jnp.int32),
        active=jnp.sum(worked, dtype=jnp.int32),
        answered=progress.answered + worked.astype(jnp.int32),
    )


def block(
    key: Array, algorithm: Algorithm, problem: Problem, systems: System, cost: Cost, progress: Progress, count: Any
) -> tuple[Progress, History]:
    """`count` rounds and a record of where they led."""
    one_round = partial(advance, key, algorithm, problem, systems, cost)
    progress = lax.fori_loop(0, count, lambda _, p: one_round(p), progress)
    c = with_best_dual(problem, algorithm.certify(progress.state, problem), progress.joint_dual)
    record = History(
        progress.state.round, c.primal, c.dual, c.gap, c.relative_gap,
        c.joint_primal, c.joint_dual, c.joint_gap, c.relative_joint_gap, c.residual, c.gap_before,
        progress.time, progress.steps, progress.active,
    )  # fmt: skip
    return progress.replace(steps=jnp.zeros_like(progress.steps), joint_dual=c.joint_dual), record


def run(
    key: Array,
    algorithm: Algorithm,
    problem: Problem,
    *,
    num_rounds: int,
    systems: System | None = None,
    cost: Cost | None = None,
    record_every: int = 1,
    state: Any = None,
) -> tuple[Any, History]:
    """A fixed number of rounds as one `lax.scan`: pure, and it composes with every transformation.

    Args:
      key: a JAX random key; all randomness of the run derives from it.
      algorithm: e.g. `Mocha()`.
      problem: what to solve.
      num_rounds: how many rounds.
      systems: how nodes behave, from `mocha_jax.systems`; default all do their full work.
      cost: prices of `history.simulated_time`.
      record_every: rounds between records. A record costs about half a local epoch.
      state: continue from here instead of ``algorithm.init(problem)``: with the same key the
        rounds that follow are those of one long run. On another problem of the same
        shape, e.g. the next lambda of a path, it is a warm start.

    Returns:
      The state after the last round and the `History`, whose last entry belongs to that state.

    One compiled program for a whole regularization path:

    >>> import jax, jax.numpy as jnp, numpy as np, mocha_jax as mj
    >>> rng = np.random.default_rng(0)
    >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
    >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], loss_scaling="task_mean")
    >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    >>> def final_gap(lam):
    ...     there = problem.replace(regularizer=mj.regularizers.Independent(lam))
    ...     return mj.run(jax.random.key(0), mj.Mocha(), there, num_rounds=20)[1].relative_gap[-1]
    >>> bool((jax.vmap(final_gap)(jnp.array([0.1, 1.0])) < 1e-2).all())
    True
    """
    _check.integer("run", 1, num_rounds=num_rounds, record_every=record_every)
    arguments = settle(algorithm, problem, systems, cost)
    return _run(key, *arguments, state, num_rounds=int(num_rounds), record_every=int(record_every))


def settle(
    algorithm: Algorithm, problem: Problem, systems: System | None, cost: Cost | None
) -> tuple[Algorithm, Problem, System, Cost]:
    """Defaults filled in and every float in the data's dtype, so that equal work compiles once."""

    def cast(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        return leaf.astype(problem.data.x.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    _check.instance("solve or run", "algorithm", algorithm, Algorithm, "Mocha()")
    rest = algorithm, systems or Full(), cost or Cost()
    algorithm, systems, cost = jax.tree.map(cast, rest)
    return algorithm, problem, systems, cost


@partial(jax.jit, static_argnames=("num_rounds", "record_every"))
def _run(
    key: Array, algorithm: Algorithm, problem: Problem, systems: System, cost: Cost, state: Any,
    *, num_rounds: int, record_every: int,
) -> tuple[Any, History]:  # fmt: skip
    problem = algorithm.prepare(problem)
    progress = start(algorithm, problem, state)
    one_block = partial(block, key, algorithm, problem, systems, cost)
    whole, rest = divmod(num_rounds, record_every)
    progress, history = lax.scan(lambda p, _: one_block(p, record_every), progress, length=whole)
    if rest:
        progress, last = one_block(progress, rest)
        history = jax.tree.map(lambda h, r: jnp.concatenate([h, r[None]]), history, last)
    return progress.state, history
