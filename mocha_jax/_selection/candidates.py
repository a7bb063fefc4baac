"""Candidates: grids of settings in one record, and solves with one after the other, each begun from the one before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import ArrayLike

from mocha_jax._algorithms.base import Algorithm, State
from mocha_jax._algorithms.default import default_algorithm
from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, static
from mocha_jax._driver.solution import Solution
from mocha_jax._driver.solve import solve
from mocha_jax._problem.problem import Problem
from mocha_jax.regularizers import Regularizer

Record = TypeVar("Record", bound="Pytree")


def grid(make: Callable[..., Record], **axes: ArrayLike) -> Record:
    """All combinations of some settings in one record, to train all at once with `jax.vmap`.

    Args:
      make: a class of records, or a function that returns one.
      **axes: fields of the record, each with its values.

    Returns:
      A record whose array leaves have a leading axis, one entry per combination; the last setting varies fastest.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> rivals = grid(mj.MiniBatchSdca, batch=[2, 8], beta=[1.0, 4.0])
      >>> rivals.batch.tolist(), rivals.beta.tolist()
      ([2, 2, 8, 8], [1.0, 4.0, 1.0, 4.0])
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
      >>> def last_gap(algorithm):
      ...     return mj.run(problem, algorithm, jax.random.key(1), num_rounds=50)[1].relative_gap[-1]
      >>> jax.vmap(last_gap)(rivals).shape
      (4,)
    """
    check.function("grid", "make", make, "regularizers.Independent")
    if not axes:
        raise ValueError("grid: name at least one setting, e.g. grid(make, lam=[0.1, 1.0]).")
    values = [a.ravel() for a in np.meshgrid(*(_values(k, v) for k, v in axes.items()), indexing="ij")]
    size = values[0].size
    combinations = [{name: a.item() for name, a in zip(axes, row, strict=True)} for row in zip(*values, strict=True)]
    # What becomes of the numbers is up to `make`, so it makes one record of each combination. Where static fields
    # follow from them (the room for the largest batch), it is given all at once.
    records = [make(**combination) for combination in combinations]
    for record in records:
        check.instance("grid", "what make returns", record, Pytree, "regularizers.Independent(0.1)")
    if len({str(jax.tree.structure(r)) for r in records}) == 1:
        return jax.tree.map(lambda *leaf: np.stack([np.asarray(a) for a in leaf]), *records)
    first = records[0]
    leaves = {f.name for f in dataclasses.fields(first) if not f.metadata.get("static")}  # type: ignore[arg-type]
    if not set(axes) <= leaves:
        raise ValueError(f"grid: the records differ in static fields, which cannot be mapped over; vary {leaves}.")
    record = make(**dict(zip(axes, values, strict=True)))

    def stacked(leaf: ArrayLike) -> np.ndarray:
        return np.broadcast_to(leaf, (size, *np.shape(leaf)))

    others = {name: jax.tree.map(stacked, getattr(record, name)) for name in leaves - set(axes)}
    return record.replace(**others)


def _values(name: str, asked: ArrayLike) -> np.ndarray:
    """The values of one setting of a grid."""
    values = check.concrete(asked)
    if values is None or values.ndim > 1 or not values.size:
        raise ValueError(f"grid: {name} needs a list of values, at least one, got {check.shown(asked)}.")
    return values


Entry = TypeVar("Entry")  # a pytree


class SolveOptions(Pytree):
    """Options of the solves of a search."""

    algorithm: Algorithm[Problem]
    tol: float = static()
    max_rounds: int = static()
    record_every: int = static()

    def solve(self, key: Array, problem: Problem, state: State | None) -> Solution[Problem]:
        """Solve from a state, or from the beginning."""
        return solve(
            problem, self.algorithm, key=key, tol=self.tol, max_rounds=self.max_rounds,
            record_every=self.record_every, state=state,
        )  # fmt: skip


def scan_candidates(
    key: Array,
    with_regularizer: Callable[[Regularizer], Problem],
    candidates: Regularizer,
    options: SolveOptions,
    entry: Callable[[Regularizer, Solution[Problem]], Entry],
) -> Entry:
    """Solve along the candidates with warm starts and return the entry of each.

    Args:
      key: a JAX random key.
      with_regularizer: the problem with one, e.g. ``partial(Problem, data, loss)``.
      candidates: with a leading axis.
      options: of each solve.
      entry: what to keep of a solution.
    """

    def one(state: State, regularizer: Regularizer) -> tuple[State, Entry]:
        problem = with_regularizer(regularizer)
        solution = options.solve(key, problem, warm_started(options.algorithm, state, problem))
        return solution.state, entry(regularizer, solution)

    first = with_regularizer(candidate(candidates, 0))
    return lax.scan(one, options.algorithm.init(first), candidates)[1]


@jax.jit
def warm_started(algorithm: Algorithm[Problem], state: State, problem: Problem) -> State:
    """Return the state from which the next solve begins; a new one where the last was not finite."""
    sound = jnp.all(jnp.isfinite(algorithm.weights(state)))
    return lax.cond(sound, lambda: algorithm.warm_start(state, problem), lambda: algorithm.init(problem))


def solve_options(
    owner: str, problem: Problem, algorithm: Algorithm[Problem] | None, tol: float, max_rounds: int, record_every: int
) -> SolveOptions:
    """Check and collect the options of each solve of such a problem."""
    check.integer(owner, 1, max_rounds=max_rounds, record_every=record_every)
    check.scalar(owner, tol=tol)
    check.nonnegative(owner, tol=tol)
    if algorithm is not None:
        check.instance(owner, "algorithm", algorithm, Algorithm, "Mocha()")
    algorithm = default_algorithm(problem) if algorithm is None else algorithm
    return SolveOptions(algorithm, float(tol), int(max_rounds), int(record_every))


def with_first(owner: str, problem: Problem, candidates: Regularizer) -> Problem:
    """Return the problem with the first of the candidates, which must all be for such a problem."""
    check.instance(owner, "problem", problem, Problem, "Problem(data, loss, regularizer)")
    check.instance(owner, "candidates", candidates, Regularizer, "grid(regularizers.Independent, lam=[1.0, 0.1])")
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(candidates)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"{owner}: all numbers of the candidates need one leading axis, as those of grid(...) have; "
            f"got {candidates}."
        )
    for i in range(int(sizes.pop()[0])):
        regularizer = candidate(candidates, i)
        check.representable(f"{owner}: candidate {i}", regularizer, problem.data.dtype)
        regularizer.check_tasks(problem.data.num_tasks)
    return problem.replace(regularizer=candidate(candidates, 0))


def candidate(candidates: Regularizer, i: int) -> Regularizer:
    """One of the candidates."""
    return jax.tree.map(lambda leaf: leaf[i], candidates)
