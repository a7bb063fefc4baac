"""Rounds: planned some at once, done one after the other, recorded in blocks, compiled by the chunk.

**Plans.** What nodes do and in which order depends on the run's key and the round's number alone. Drawn within the loop
of rounds it would be many small kernels a round on an accelerator; drawn for many rounds together it is as many for all
of them.

**Blocks.** A block of rounds ends with a record. `run` is a scan over blocks; `solve` runs chunks of them, which end
early where the tolerance is reached.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._algorithms.base import Algorithm, Kind, OwnState, State
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Pytree, Relation, Tree, tree
from mocha_jax._driver.config import RunConfig, check_state, make_config, or_by_loops, program, run_by
from mocha_jax._driver.history import History, Progress, Watch, count, record
from mocha_jax._problem.problem import Quality
from mocha_jax.costs import Cost
from mocha_jax.systems import System
from mocha_jax.systems._base import Work

# Folded into the run's key for what lasts longer than a round; rounds are counted below it.
NO_ROUND = np.uint32(2**32 - 1)

# Rounds planned at once, at most; and the bytes that their plans may take, so many or a share of those of the samples.
_AT_ONCE, _BYTES, _SHARE = 64, 2**20, 1 / 32


class RoundPlan(Pytree):
    """The plan of a round; of many, with a leading axis."""

    work: Work
    drawn: Tree = tree()  # from `Algorithm.draw`
    key: Array  # for measuring theta


def plan(key: Array, config: RunConfig, round: Array) -> RoundPlan:
    """Plan a round. Its randomness depends on the run's key and the round's number only."""
    algorithm, problem = config.algorithm, config.problem
    request = algorithm.request(problem, round)
    work = config.systems.work(jax.random.fold_in(key, NO_ROUND), problem.data, request)
    key = jax.random.fold_in(key, round)
    return RoundPlan(work, algorithm.draw(jax.random.fold_in(key, 1), problem), jax.random.fold_in(key, 2))


def plans(key: Array, config: RunConfig, rounds: Array) -> RoundPlan:
    """Plan several rounds, of these numbers ``[g]``."""
    return jax.vmap(partial(plan, key, config))(rounds)


def rounds_at_once(key: Array, config: RunConfig, count: int) -> int:
    """Choose how many rounds to plan at once: a divisor of their number, as large as memory allows."""
    shapes = jax.tree.leaves(jax.eval_shape(partial(plan, key, config), jnp.zeros((), jnp.int32)))
    each = sum(math.prod(s.shape) * getattr(s.dtype, "itemsize", 4) for s in shapes)
    x = config.problem.data.x
    memory = max(_SHARE * math.prod(x.shape) * x.dtype.itemsize, _BYTES)
    most = min(max(int(memory // each), 1), _AT_ONCE)
    return max(size for size in range(1, most + 1) if count % size == 0)


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
    size = rounds_at_once(key, config, rounds)

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
) -> tuple[OwnState, History]:
    """Run a fixed number of rounds as one `lax.scan`: pure, and it composes with every transformation.

    Args:
      problem: the problem to solve.
      algorithm: e.g. `Mocha()`.
      key: a JAX random key; all randomness of the run derives from it.
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
      ...     other = problem.replace(regularizer=mj.regularizers.Independent(lam))
      ...     return mj.run(other, mj.Mocha(), jax.random.key(0), num_rounds=20)[1].relative_gap[-1]
      >>> bool((jax.vmap(final_gap)(jnp.array([0.1, 1.0])) < 1e-2).all())
      True
    """
    check.key("run", key)
    check.integer("run", 1, num_rounds=num_rounds, record_every=record_every)
    check_state("run", state, num_rounds=num_rounds)
    config = make_config(algorithm, problem, systems, cost, watch, record_every)

    def work(algorithm: Algorithm[Kind]) -> tuple[State, History]:
        ordered = run_by(algorithm, config).in_order()
        return _run(key, ordered, state, num_rounds=int(num_rounds), record_every=int(record_every))

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
    return config.algorithm.from_layout(progress.state, config.problem), history


_run = program(_run_all, static_argnames=("num_rounds", "record_every"))


# Traced once for the two programs that follow.
_block = jax.jit(block, static_argnums=3)


def _allocate(key: Array, config: RunConfig, state: State | None, *, records: int) -> tuple[Progress, History]:
    """The progress before the first round, and a buffer for the records of a chunk."""
    config = config.whole()
    progress = config.start(state)
    shapes = jax.eval_shape(lambda p: _block(key, config, p, 1)[1], progress)
    return progress, jax.tree.map(lambda r: jnp.zeros((records, *r.shape), r.dtype), shapes)


def _run_chunk(
    key: Array,
    config: RunConfig,
    progress: Progress,
    buffer: History,
    blocks: Array | int,
    tol: Array,
    *,
    rounds: int,
) -> tuple[Progress, History, Array, Array]:
    """Run so many blocks of rounds, or fewer: until the tolerance, what rounding leaves or numbers that are not finite.

    Returns:
      The progress; the records, the last ones in the last place of a buffer that is full; their number; whether there
      is a reason to go on.
    """
    config = config.whole()

    def unfinished(carry: tuple[Progress, History, Array, Array]) -> Array:
        return carry[3] & (carry[2] < blocks)

    def body(carry: tuple[Progress, History, Array, Array]) -> tuple[Progress, History, Array, Array]:
        progress, history, i, _ = carry
        progress, record = _block(key, config, progress, rounds)
        place = jnp.minimum(i, len(history.round) - 1)
        history = jax.tree.map(lambda h, r: lax.dynamic_update_index_in_dim(h, r, place, 0), history, record)
        ended = (record.residual <= tol) | progress.best.stays(config.problem, tol)
        return progress, history, i + 1, record.quality.finite & ~ended

    carry = progress, buffer, jnp.zeros((), jnp.int32), jnp.ones((), bool)
    return lax.while_loop(unfinished, body, carry)


def _settled(config: RunConfig, state: State) -> State:
    """The state after the last round, made exact: W derived afresh from the duals where it follows from them."""
    config = config.whole()
    return config.algorithm.settle(state, config.problem)


def _proven(config: RunConfig, state: State, bound: Array) -> tuple[State, Quality, Relation]:
    """The state as it is returned, its certificate with all rounding counted, and its Omega."""
    config = config.whole()
    certificate = config.algorithm.prove(state, config.problem).with_bound(config.problem, bound)
    relation = config.algorithm.relation(state, config.problem)
    return config.algorithm.from_layout(state, config.problem), certificate, relation


# A run reuses the memory of its progress, and so does its end; inside a transformation there is no memory to reuse.
allocate = program(_allocate, static_argnames="records", keep_unused=True)
run_chunk = program(_run_chunk, static_argnames="rounds")
run_chunk_in_place = program(_run_chunk, static_argnames="rounds", donate_argnames="progress")
settled, proven = program(_settled), program(_proven)
_settled_in_place = program(_settled, donate_argnames="state")

Ended = tuple[State, Quality, Relation]


def finalize(config: RunConfig, state: State, bound: Array) -> Ended:
    """The state made exact, its certificate with all rounding counted, and its Omega."""
    # Two programs: the second needs no memory of the first.
    return proven(config, settled(config, state), bound)


def finalize_in_place(config: RunConfig, state: State, bound: Array) -> Ended:
    """Finalize in the memory of the state."""
    return proven(config, _settled_in_place(config, state), bound)


def begin_compiling(
    key: Array, config: RunConfig, progress: Progress, buffer: History, tol: Array | np.ndarray, rounds: int
) -> None:
    """Compile the programs of a solve side by side, not each when it is called."""
    run_chunk_in_place.begin_compiling(key, config, progress, buffer, 1, tol, rounds=rounds)
    proven.begin_compiling(config, progress.state, progress.bound)
    _settled_in_place.begin_compiling(config, progress.state)
