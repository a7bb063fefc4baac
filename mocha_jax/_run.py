"""The rounds: one round, one recorded block of rounds, and `run`, a scan over blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax import _check
from mocha_jax._algorithm import Algorithm
from mocha_jax._fallback import or_by_loops, run_by
from mocha_jax._history import History, Progress, Watch, count, record, start
from mocha_jax._problem import Federated
from mocha_jax._pytree import Pytree, static
from mocha_jax._rows import Profile, size_profile
from mocha_jax._transfers import on_purpose
from mocha_jax.costs import Cost
from mocha_jax.systems import Full, System

# Folded into the run's key for what lasts longer than a round; rounds are counted below it.
_NO_ROUND = np.uint32(2**32 - 1)


class Setting(Pytree):
    """All that a run does not change."""

    algorithm: Algorithm[Any]
    problem: Federated
    systems: System
    cost: Cost
    watch: Watch | None
    profile: Profile = static(default=())  # which sizes of nodes to put together

    def prepared(self) -> Setting:
        """With the data laid out for the algorithm."""
        return self.replace(problem=self.algorithm.prepare(self.problem, self.profile))

    def start(self, state: Any) -> Progress:
        """Nothing done yet, or nothing since `state`."""
        return start(self.algorithm, self.problem, state, self.watch)


def advance(key: Array, run: Setting, progress: Progress) -> Progress:
    """One round. Its randomness depends on the run's key and the round's number only."""
    algorithm, problem, before = run.algorithm, run.problem, progress.state
    request = algorithm.request(problem, before.round)
    work = run.systems.work(jax.random.fold_in(key, _NO_ROUND), problem.data, request)
    key = jax.random.fold_in(key, before.round)
    state, info = algorithm.step(jax.random.fold_in(key, 1), before, problem, work)
    theta = None
    if run.watch is not None and run.watch.theta is not None:
        tol = jnp.asarray(run.watch.theta)
        theta = algorithm.measure_theta(jax.random.fold_in(key, 2), before, state, problem, tol)
    return count(progress.replace(state=state), problem, run.cost, request, work, info, theta)


def block(key: Array, run: Setting, progress: Progress, rounds: Any) -> tuple[Progress, History]:
    """So many rounds and a record of where they led."""
    progress = lax.fori_loop(0, rounds, lambda _, p: advance(key, run, p), progress)
    quality = run.algorithm.certify(progress.state, run.problem)
    return record(progress, run.problem, quality.with_bound(run.problem, progress.bound))


@on_purpose
def run(
    key: Array,
    algorithm: Algorithm[Any],
    problem: Federated,
    *,
    num_rounds: int,
    systems: System | None = None,
    cost: Cost | None = None,
    record_every: int = 1,
    watch: Watch | None = None,
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
      watch: what to record of every node, `Watch`; default nothing.
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
    _check.key("run", key)
    _check.integer("run", 1, num_rounds=num_rounds, record_every=record_every)
    check_state("run", state, num_rounds=num_rounds)
    setting = settle(algorithm, problem, systems, cost, watch, record_every)

    def work(by: Any) -> tuple[Any, History]:
        there = run_by(by, setting)
        return _run(key, there, state, num_rounds=int(num_rounds), record_every=int(record_every))

    return or_by_loops(setting.problem, setting.algorithm, work)


def settle(
    algorithm: Algorithm[Any], problem: Federated, systems: System | None, cost: Cost | None, watch: Watch | None,
    record_every: int,
) -> Setting:  # fmt: skip
    """Defaults filled in and every float in the data's dtype, so that equal work compiles once."""

    def cast(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        return leaf.astype(problem.data.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    _check.instance("solve or run", "algorithm", algorithm, Algorithm, "Mocha()")
    _check.instance("solve or run", "problem", problem, Federated, "Problem(data, loss, regularizer)")
    if not isinstance(problem, algorithm.solves):
        kind = algorithm.solves.__name__
        remedy = " Prediction is for FedAvg, Local and Virtual." if type(problem).__name__ == "Prediction" else ""
        raise ValueError(
            f"{type(algorithm).__name__} solves a {kind}, got a {type(problem).__name__} as problem.{remedy}"
        )
    algorithm.check(problem)
    systems, cost = Full() if systems is None else systems, Cost() if cost is None else cost
    _check.instance("solve or run", "systems", systems, System, "systems.Dropout(0.3)")
    _check.instance("solve or run", "cost", cost, Cost, "costs.lte()")
    cost = problem.data.fill_nodes(cost)
    cost.check_nodes(problem.data.num_nodes)
    if watch is not None:
        _check.instance("solve or run", "watch", watch, Watch, "Watch()")
        if watch.theta is not None and record_every != 1:
            raise ValueError(f"theta is measured in every round, so record_every must be 1, got {record_every}.")
    systems = algorithm.asks(systems)
    algorithm, systems, cost, watch = jax.tree.map(cast, (algorithm, systems, cost, watch))
    return Setting(algorithm, problem, systems, cost, watch, size_profile(problem.data))


def check_state(owner: str, state: Any, **rounds: int) -> None:
    """Something that has done a number of rounds, and can do so many more."""
    done: Any = None if state is None else getattr(state, "round", None)
    if state is not None and (not hasattr(done, "dtype") or np.shape(done) != ()):
        raise ValueError(
            f"{owner}: state must be what an algorithm carries from round to round, such as solution.state; "
            f"got {_check.shown(state)}."
        )
    known = None if done is None else _check.concrete(done)
    left = np.iinfo(np.int32).max - max(0 if known is None else int(known), 0)
    for name, value in rounds.items():
        if value > left:
            raise ValueError(
                f"{owner}: {name} must be at most {left}, for rounds are counted in 32 bits"
                f"{f' and the state has done {known}' if known else ''}; got {value}."
            )


@partial(jax.jit, static_argnames=("num_rounds", "record_every"))
def _run(key: Array, run: Setting, state: Any, *, num_rounds: int, record_every: int) -> tuple[Any, History]:
    run = run.prepared()
    whole, rest = divmod(num_rounds, record_every)
    progress, history = lax.scan(lambda p, _: block(key, run, p, record_every), run.start(state), length=whole)
    if rest:
        progress, last = block(key, run, progress, rest)
        history = jax.tree.map(lambda h, r: jnp.concatenate([h, r[None]]), history, last)
    return progress.state, history
