"""Solves with one candidate after the other, each begun from the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._algorithms.base import Algorithm, State
from mocha_jax._algorithms.default import default_algorithm
from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, static
from mocha_jax._driver.solution import Solution
from mocha_jax._driver.solve import solve
from mocha_jax._problem.problem import Problem
from mocha_jax.regularizers import Regularizer

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
    budget: SolveOptions,
    entry: Callable[[Regularizer, Solution[Problem]], Entry],
) -> Entry:
    """Solve along the candidates with warm starts and return the entry of each.

    Args:
      key: a JAX random key.
      with_regularizer: the problem with one, e.g. ``partial(Problem, data, loss)``.
      candidates: with a leading axis.
      budget: options of each solve.
      entry: what to keep of a solution.
    """

    def one(state: State, regularizer: Regularizer) -> tuple[State, Entry]:
        problem = with_regularizer(regularizer)
        solution = budget.solve(key, problem, warm_started(budget.algorithm, state, problem))
        return solution.state, entry(regularizer, solution)

    first = with_regularizer(candidate(candidates, 0))
    return lax.scan(one, budget.algorithm.init(first), candidates)[1]


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
