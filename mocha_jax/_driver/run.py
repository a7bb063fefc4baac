"""The rounds: one round, one recorded block of rounds, and `run`, a scan over blocks."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._algorithms.base import Algorithm, Kind, State
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._driver.config import RunConfig, check_state, make_config, program
from mocha_jax._driver.fallback import or_by_loops, run_by
from mocha_jax._driver.history import History, Progress, Watch, count, record
from mocha_jax._driver.plan import RoundPlan, at_once, plans
from mocha_jax._problem.problem import Federated
from mocha_jax.costs import Cost
from mocha_jax.systems import System


def advance(config: RunConfig, progress: Progress, planned: RoundPlan) -> Progress:
    """One round."""
    algorithm, problem, before = config.algorithm, config.problem, progress.state
    state, info = algorithm.step(planned.drawn, before, problem, planned.work)
    theta = None
    if config.watch is not None and config.watch.theta is not None:
        tol = jnp.asarray(config.watch.theta)
        theta = algorithm.measure_theta(planned.key, before, state, problem, tol)
    request = algorithm.request(problem, before.round)
    return count(progress.replace(state=state), problem, config.cost, request, planned.work, info, theta)


def advance_many(key: Array, config: RunConfig, progress: Progress, rounds: int) -> Progress:
    """Run some rounds. Their number is static, so that the host need not check whether another one follows."""
    size = at_once(key, config, rounds)

    def several(progress: Progress, _: None) -> tuple[Progress, None]:
        numbers = progress.state.round + jnp.arange(size, dtype=jnp.int32)
        return lax.scan(lambda p, planned: (advance(config, p, planned), None), progress, plans(key, config, numbers))

    return lax.scan(several, progress, length=rounds // size)[0]


def block(key: Array, config: RunConfig, progress: Progress, rounds: int) -> tuple[Progress, History]:
    """Run `rounds` rounds and record the certificate."""
    progress = advance_many(key, config, progress, rounds)
    quality = config.algorithm.certify(progress.state, config.problem)
    return record(progress, config.problem, quality.with_bound(config.problem, progress.bound), config.watch)


@on_purpose
def run(
    problem: Kind,
    algorithm: Algorithm[Kind],
    key: Array,
    *,
    num_rounds: int,
    systems: System | None = None,
    cost: Cost | None = None,
    record_every: int = 1,
    watch: Watch | None = None,
    state: State | None = None,
) -> tuple[Any, History]:
    """Run a fixed number of rounds as one `lax.scan`: pure, and it composes with every transformation.

    Args:
      problem: the problem to solve.
      algorithm: e.g. `Mocha()`.
      key: a JAX random key; all randomness of the run derives from it. ``run(key, algorithm, problem, ...)`` is
        accepted too.
      num_rounds: how many rounds.
      systems: how nodes behave, from `mocha_jax.systems`; default all do their full work.
      cost: prices of `history.simulated_time`.
      record_every: rounds between records. A record costs about half a local epoch.
      watch: quantities to record for every node, a `Watch`; default none.
      state: continue from here instead of ``algorithm.init(problem)``: with the same key the
        following rounds are those of one long run. On another problem of the same
        shape, e.g. the next lambda of a path, it is a warm start.

    Returns:
      The state after the last round and the `History`, whose last entry belongs to that state.

    Examples:
      One compiled program for a whole regularization path:

      >>> import jax, jax.numpy as jnp, numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
      >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], loss_scaling="task_mean")
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
      >>> def final_gap(lam):
      ...     there = problem.replace(regularizer=mj.regularizers.Independent(lam))
      ...     return mj.run(there, mj.Mocha(), jax.random.key(0), num_rounds=20)[1].relative_gap[-1]
      >>> bool((jax.vmap(final_gap)(jnp.array([0.1, 1.0])) < 1e-2).all())
      True
    """
    if isinstance(key, Federated):
        problem, key = cast(Kind, key), cast(Array, problem)
    check.key("run", key)
    check.integer("run", 1, num_rounds=num_rounds, record_every=record_every)
    check_state("run", state, num_rounds=num_rounds)
    config = make_config(algorithm, problem, systems, cost, watch, record_every)

    def work(by: Algorithm[Kind]) -> tuple[Any, History]:
        there = run_by(by, config).in_order()
        return _run(key, there, state, num_rounds=int(num_rounds), record_every=int(record_every))

    return or_by_loops(config.problem, config.algorithm, work)


def _run_all(
    key: Array, config: RunConfig, state: State | None, *, num_rounds: int, record_every: int
) -> tuple[State, History]:
    config = config.prepared()
    whole, rest = divmod(num_rounds, record_every)
    progress, history = lax.scan(lambda p, _: block(key, config, p, record_every), config.start(state), length=whole)
    if rest:
        progress, last = block(key, config, progress, rest)
        history = jax.tree.map(lambda h, r: jnp.concatenate([h, r[None]]), history, last)
    return progress.state, history


_run = program(_run_all, static_argnames=("num_rounds", "record_every"))
