"""Rounds run from the host, a compiled chunk after the other: shown, saved and stopped in between."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

import jax
import numpy as np
from jax import Array

from mocha_jax._algorithms.base import Algorithm, Kind, State
from mocha_jax._core.devices import fetched
from mocha_jax._driver.config import RunConfig, or_by_loops, run_by
from mocha_jax._driver.history import History, Progress
from mocha_jax._driver.progress import Bar
from mocha_jax._driver.read_history import name_of
from mocha_jax._driver.rounds import allocate, begin_compiling, finalize_in_place, run_chunk_in_place
from mocha_jax._driver.solution import Solution, Status
from mocha_jax._files.checkpoint import Saver
from mocha_jax._problem.problem import Federated, Quality


def solve_from_host(
    problem: Kind,
    config: RunConfig,
    state: State | None,
    *,
    key: Array,
    tol: float | None,
    max_rounds: int,
    record_every: int,
    chunk: int,
    progress: bool,
    callback: Callable[[int, History], object] | None,
    checkpoint: str | os.PathLike[str] | None,
) -> Solution[Kind]:
    """Run rounds until the tolerance, see `solve`; `problem` is the one of the config with its names."""
    user_config, config = config, config.laid_out()
    (_, aim), stopped = aims(problem, tol), False
    traces = allocate.traces
    current, buffer = allocate(key, config, state, records=chunk // record_every)
    if allocate.traces > traces and max_rounds >= record_every and jax.process_count() == 1:
        begin_compiling(key, config, current, buffer, aim, record_every)
    first = int(current.state.round)
    last = first + int(max_rounds)
    algorithm = config.algorithm

    def as_saved(current: Progress) -> Progress:
        """Arrange it so that other devices may go on from it."""
        if checkpoint is None:
            return current
        return current.replace(state=algorithm.from_layout(current.state, config.problem))

    with Saver(checkpoint, user_config.parts(key, record_every, state)) as save:
        blank = jax.tree.map(lambda r: np.asarray(r)[:0], buffer)
        if checkpoint is None:
            history = blank
        else:
            current, history = save.load(as_saved(current), blank)
            current = current.replace(state=algorithm.to_layout(current.state, config.problem))
        if not _ended(problem, history, current, aim, last, stopped):
            # A path that cannot be saved to is found out before there is something to lose.
            save(int(current.state.round), as_saved(current), history, name_of(type(history.quality)))
        with Bar(progress and jax.process_index() == 0, total=last, done=int(current.state.round)) as bar:
            while not _ended(problem, history, current, aim, last, stopped):
                blocks, rounds = _next_blocks(int(current.state.round) - first, last - first, record_every, chunk)

                def one_chunk(
                    algorithm: Algorithm[Kind], current: Progress = current, blocks: int = blocks, rounds: int = rounds
                ) -> tuple[Progress, History, Array, Array]:
                    return run_chunk_in_place(
                        key, run_by(algorithm, config), current, buffer, blocks, aim, rounds=rounds
                    )

                current, records, count, _ = or_by_loops(config.problem, config.algorithm, one_chunk)
                history = _extend(history, records, int(count))
                save(int(current.state.round), as_saved(current), history, name_of(type(history.quality)))
                bar.show(int(current.state.round), float(history.residual[-1]))
                stopped = callback is not None and bool(callback(int(current.state.round), history))
    return _solution(problem, config, current, history, stopped, tol, int(current.state.round) - first)


def _next_blocks(done: int, last: int, record_every: int, chunk: int) -> tuple[int, int]:
    """The next blocks of rounds, and the rounds of each: up to a chunk, or one that is shorter than the others."""
    whole = min(chunk // record_every, (last - done) // record_every)
    if whole and not done % record_every:
        return whole, record_every
    return 1, min(record_every - done % record_every, last - done)


def _extend(history: History, records: History, count: int) -> History:
    return jax.tree.map(lambda h, r: np.concatenate([h, fetched(r)[:count]]), history, records)


def _ended(problem: Federated, history: History, current: Progress, aim: np.ndarray, last: int, stopped: bool) -> bool:
    if len(history.round):
        quality, best = jax.tree.map(lambda a: a[-1], history.quality), jax.tree.map(fetched, current.best)
        if not bool(quality.finite) or bool(quality.residual <= aim):
            return True
        if bool(best.stays(problem, aim)):
            return True
    return stopped or int(current.state.round) >= last


def read_ending(
    xp: ModuleType, problem: Federated, current: Progress, recorded: Quality, residual: Array,
    tol: Array | np.ndarray, aim: Array | np.ndarray, *, otherwise: Status,
) -> tuple[Array, Array]:  # fmt: skip
    """Read the end of a run, of NumPy's arrays on the host and of JAX's within a transformation.

    Returns:
      The status as a number: of the last record, and of the answer's residual with all that rounding may hide; how
      busy each node was ``[m]``.
    """
    cases = {
        Status.NON_FINITE: ~recorded.finite | xp.isnan(residual),
        Status.CONVERGED: residual <= tol,
        Status.PRECISION: (recorded.residual <= aim) | current.best.stays(problem, aim),
    }
    code = xp.select(list(map(xp.asarray, cases.values())), [xp.asarray(c.value) for c in cases], otherwise.value)
    tiny = xp.finfo(current.time.dtype).tiny
    return code, xp.minimum(current.busy / xp.maximum(current.time, tiny), 1.0)


def _solution(
    problem: Kind,
    config: RunConfig,
    current: Progress,
    history: History,
    stopped: bool,
    tol: float | None,
    rounds: int,
) -> Solution[Kind]:
    state, certificate, relation = finalize_in_place(config, current.state, current.bound)
    # Brought together now, by all processes: one of them alone may read the solution.
    progress, residual = jax.tree.map(fetched, (current.replace(state=None, since=None), certificate.residual))
    recorded = jax.tree.map(lambda a: a[-1], history.quality) if len(history.round) else certificate
    otherwise = Status.STOPPED if stopped else Status.MAX_ROUNDS
    code, busy = read_ending(np, problem, progress, recorded, residual, *aims(problem, tol), otherwise=otherwise)
    silent, owner = progress.answered == 0, fetched(problem.data.task)
    if silent.any():
        silent &= fetched(problem.data.sizes) > 0
    return Solution(
        problem, config.algorithm.weights(state), state, relation, certificate, history, int(code), rounds,
        silent, owner, busy, config.algorithm.network, tol,
    )  # fmt: skip


def aims(problem: Federated, tol: float | None) -> tuple[np.ndarray, np.ndarray]:
    """The tolerance, -1 for none, and the recorded residual at which rounds end, in the data's dtype."""
    wanted = -1.0 if tol is None else tol
    dtype = problem.data.dtype
    return np.asarray(wanted, dtype), np.asarray(problem.aim(wanted), dtype)
