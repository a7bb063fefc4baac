"""`solve`: rounds until the gap is small enough, watched from the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._algorithms.base import Algorithm, Kind, State
from mocha_jax._algorithms.default import default_algorithm
from mocha_jax._core import check
from mocha_jax._core.devices import on_device, on_purpose
from mocha_jax._core.pytree import Tree
from mocha_jax._core.values import is_traced
from mocha_jax._core.warnings import NotConverged, warn
from mocha_jax._driver.adjoint import Adjoint, Implicit, Unrolled
from mocha_jax._driver.config import RunConfig, check_state, make_config
from mocha_jax._driver.history import History, Progress, Watch
from mocha_jax._driver.host import aims, read_ending, solve_from_host
from mocha_jax._driver.solution import Solution, Status
from mocha_jax._problem.problem import Federated, Quality
from mocha_jax.costs import Cost
from mocha_jax.systems import System

# Rounds per compiled call by default, and at least: shorter solves share a program.
_CHUNK = 25


@on_purpose
def solve(
    problem: Kind,
    algorithm: Algorithm[Kind] | None = None,
    *,
    key: Array | None = None,
    tol: float | None = 1e-4,
    joint_tol: float | None = None,
    max_rounds: int = 1000,
    systems: System | None = None,
    cost: Cost | None = None,
    record_every: int = 1,
    chunk: int = _CHUNK,
    watch: Watch | None = None,
    progress: bool = False,
    callback: Callable[[int, History], object] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    state: State | None = None,
    adjoint: Adjoint | None = None,
) -> Solution[Kind]:
    """Run rounds until the relative duality gap is at most `tol`.

    If the relationship of the tasks is learned, this is the joint gap, over weights and Omega; for
    `SparsePrecision`, which has none, it is the gap of the weights plus the gain of the last update of Omega.

    The rounds run in compiled chunks; between chunks the host shows progress, calls back and
    saves. A solve that was interrupted, even killed, continues from its checkpoint when
    called again with the same arguments, and ends bit for bit where it would have ended.

    A solve of a convex problem that ends at `max_rounds` before it reaches its tolerance warns, `NotConverged`.

    Any function of the solution can be differentiated by any input; `adjoint` selects the derivative. Inside
    ``jax.jit`` and `vmap`, and where `Unrolled` rounds are differentiated, it is one compiled call without a host,
    which can solve a whole grid of problems.

    Args:
      problem: the problem to solve.
      algorithm: by default the choice of `default_algorithm`: `Newton()` or `InteriorPoint()` where it is fastest on
        one machine, else `Mocha()`; with `systems`, `cost` or `watch`, which are about a federation, `Mocha()`.
      key: a JAX random key; default ``jax.random.key(0)``.
      tol: relative gap at which to stop, tested at every record; None never stops early.
      joint_tol: relative joint gap at which to stop, in place of `tol`, on jointly convex problems.
      max_rounds: stop after that many rounds in any case.
      systems: how nodes behave, from `mocha_jax.systems`; default all do their full work.
      cost: prices of ``history.simulated_time``.
      record_every: rounds between records of the history.
      chunk: rounds per compiled call, rounded up to a whole number of records.
      watch: quantities to record for every node, a `Watch`; default none.
      progress: show a progress bar (tqdm where installed).
      callback: called as ``callback(round, history)`` after each chunk with all records so
        far; a true return value stops the solve. `callbacks` has some that receive every record.
      checkpoint: file to save to before the first round and after each chunk, and to resume from where it exists. It is
        replaced atomically; processes that share arrays write parts beside it, each the rows of its own nodes. A
        damaged file, one of another run, or one that another solve is saving to is refused with a `CheckpointError`,
        and so is a path that cannot be saved to. If a later save fails, e.g. on a full disk, a
        warning is issued: the file keeps its contents, and the solve continues.
      state: continue from here instead of ``algorithm.init(problem)``; on another problem of the
        same shape it is a warm start. `max_rounds` counts the rounds of this call.
      adjoint: the derivative, `Implicit` (the default) or `Unrolled`; without effect outside of a
        transformation.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
      >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], loss_scaling="task_mean")
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.01))
      >>> solution = mj.solve(problem, tol=1e-3)
      >>> solution.status.name, solution.relative_gap <= 1e-3, solution.weights.shape
      ('CONVERGED', True, (4, 3))

      How the weights' length changes with the ridge:

      >>> def length(lam2):
      ...     other = problem.replace(regularizer=mj.regularizers.MeanRegularized(0.1, lam2))
      ...     return (mj.solve(other, tol=1e-5).weights ** 2).sum()
      >>> float(jax.grad(length)(0.01)) < 0.0
      True
    """
    check.instance("solve", "problem", problem, Federated, "Problem(data, loss, regularizer)")
    check.integer("solve", 0, max_rounds=max_rounds)
    check.integer("solve", 1, record_every=record_every, chunk=chunk)
    max_rounds, record_every, chunk = int(max_rounds), int(record_every), int(chunk)
    if joint_tol is not None and not problem.jointly_convex:
        raise ValueError(
            f"solve: {problem.model_name} is not convex in W and Omega together, so there is no joint gap; pass tol "
            f"instead of joint_tol."
        )
    for name, value in (("tol", tol), ("joint_tol", joint_tol)):
        if value is not None:
            check.scalar("solve", **{name: value})
            check.nonnegative("solve", **{name: value})
            tol = float(value)
    chunk = min(chunk, max(max_rounds, _CHUNK))  # there has to be room for the records of a chunk
    chunk = -(-chunk // record_every) * record_every  # which ends on a record
    key = jax.random.key(0) if key is None else key
    check.key("solve", key)
    _check_host(progress, callback, checkpoint)
    if adjoint is not None:
        check.instance("solve", "adjoint", adjoint, Adjoint, "Implicit()")
    check_state("solve", state, max_rounds=max_rounds)
    federation = any(argument is not None for argument in (systems, cost, watch))
    if algorithm is None:
        algorithm = default_algorithm(problem, state, federation=federation)
    config = make_config(algorithm, problem, systems, cost, watch, record_every)

    from_host = partial(
        solve_from_host, key=key, tol=tol, max_rounds=max_rounds, record_every=record_every, chunk=chunk,
        progress=progress, callback=callback, checkpoint=checkpoint,
    )  # fmt: skip
    if _traced(key, config, state):
        adjoint = adjoint if adjoint is not None else Implicit() if problem.convex else Unrolled()
        constants = lax.stop_gradient((problem, config, state))
        if isinstance(adjoint, Implicit) and not _traced(key, constants):
            # Of what is differentiated and nothing else, the values are there.
            solution = from_host(*constants)
            answer = solution.weights, solution.relation, solution.quality
            moving = adjoint.differentiable(config.problem, solution.state, answer)
            names = "weights", "relation", "quality"
            return solution.replace(problem=problem, **dict(zip(names, moving, strict=True)))
        if progress or callback is not None or checkpoint is not None:
            raise ValueError(
                "solve: progress, callback and checkpoint need a host; leave them out inside jax.jit and vmap, and "
                "where Unrolled() is differentiated."
            )
        return _within_a_transformation(problem, adjoint, key, config, state, tol, max_rounds, record_every)

    solution = from_host(problem, config, state)
    if reason := solution.message if solution.missing_nodes else _unconverged(solution):
        warn(f"solve: {reason}", NotConverged)
    return solution


def _check_host(progress: bool, callback: object, checkpoint: object) -> None:
    """Check the arguments of what is done between chunks."""
    check.flag("solve", progress=progress)
    if callback is not None:
        check.function("solve", "callback", callback, "lambda round, history: round >= 100")
    if checkpoint is not None and not (isinstance(checkpoint, str | os.PathLike) and os.fspath(checkpoint)):
        shown = check.shown(checkpoint)
        raise ValueError(f'solve: checkpoint must be the path of a file such as "run.npz", got {shown}.')


@jax.jit
def _ending(
    problem: Federated, current: Progress, recorded: Quality, residual: Array, tol: Array, aim: Array
) -> tuple[Array, Array, Array]:
    """Read it in one program; and which nodes were silent ``[m]``."""
    ending = read_ending(jnp, problem, current, recorded, residual, tol, aim, otherwise=Status.MAX_ROUNDS)
    return *ending, (current.answered == 0) & (problem.data.sizes > 0)


def _traced(*trees: Tree) -> bool:
    return any(is_traced(leaf) for leaf in jax.tree.leaves(trees))


def _unconverged(solution: Solution[Kind]) -> str | None:
    """A sentence on a solve that ended above the requested tolerance; None if it did not.

    Networks are trained for so many rounds: a tolerance there says when to stop earlier.
    """
    problem, residual = solution.problem, float(solution.quality.residual)
    if solution.tol is None or not solution.rounds or not problem.convex or not np.isfinite(residual):
        return None
    text = f"tol={solution.tol:g} was not reached: {solution.message}"
    if solution.status == Status.PRECISION and float(solution.history.residual[-1]) > solution.tol:
        return f"{text}."
    if solution.status != Status.MAX_ROUNDS:
        return None
    if residual <= problem.rounding_level:
        dtype = np.dtype(problem.data.dtype)
        return f"{text}, where rounding in {dtype} slows the last digits down: compute in float64, or ask for less."
    return f"{text}; pass more max_rounds, or a tol that is worth them."


def _within_a_transformation(
    problem: Kind,
    adjoint: Adjoint,
    key: Array,
    config: RunConfig,
    state: State | None,
    tol: float | None,
    max_rounds: int,
    record_every: int,
) -> Solution[Kind]:
    """Solve under jit or vmap, or by rounds that are differentiated: one compiled call without a host."""
    first = jnp.zeros((), jnp.int32) if state is None else state.round
    wanted, aim = aims(problem, tol)
    outcome = adjoint.solve(key, config, state, on_device(aim), max_rounds, record_every)
    progress, recorded = outcome.progress.replace(state=None), outcome.history.quality
    code, busy, silent = _ending(config.problem, progress, recorded, outcome.quality.residual, wanted, aim)
    return Solution(
        problem, outcome.weights, outcome.state, outcome.relation, outcome.quality, outcome.history, code,
        outcome.state.round - first, silent, problem.data.task, busy, config.algorithm.network, tol,
    )  # fmt: skip
