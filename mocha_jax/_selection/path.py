"""Solutions along a list of hyperparameters, each begun from the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._algorithms.base import Algorithm, State
from mocha_jax._algorithms.mocha import Mocha
from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, Relation, static
from mocha_jax._core.transfers import on_purpose
from mocha_jax._core.warnings import NotConverged, warn
from mocha_jax._data.scaling import advice
from mocha_jax._driver.fallback import or_by_loops
from mocha_jax._driver.solution import Solution
from mocha_jax._driver.solve import solve
from mocha_jax._problem.certificate import Certificate
from mocha_jax._problem.problem import Problem
from mocha_jax._selection import caveats
from mocha_jax._selection.preparation import Preparation, preparation, prepared
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


class Path(Pytree):
    """Solutions along a list of hyperparameters; every field has a leading axis, one entry for each."""

    regularizer: Regularizer
    weights: Array  # [c, num_tasks, d]
    relation: Relation  # Omega of each; None where it is given
    certificate: Certificate
    rounds: Array  # [c] int32

    def __len__(self) -> int:
        return len(self.rounds)

    def __iter__(self) -> Iterator[Path]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int | slice) -> Path:
        """One of them, without the leading axis; or several."""
        if not isinstance(i, slice):
            if (number := check.whole(i)) is None:
                raise ValueError(f"Path: i must be an integer or a slice, got {check.shown(i)}.")
            if not -len(self) <= number < len(self):
                raise IndexError(f"a path of {len(self)} candidates has none with number {number}")
            i = number
        return jax.tree.map(lambda leaf: leaf[i], self)


@on_purpose
def lambda_path(
    problem: Problem,
    candidates: Regularizer,
    algorithm: Algorithm[Problem] | None = None,
    *,
    standardize: str | Preparation | None = None,
    key: Array | None = None,
    tol: float = 1e-4,
    max_rounds: int = 1000,
    record_every: int = 5,
) -> Path:
    """Solve for one regularizer after the other, each from where the last one ended; one compiled call.

    A warning, `NotConverged`, names candidates that did not reach the tolerance.

    Args:
      problem: data and loss; its own regularizer does not matter.
      candidates: regularizers in one record with a leading axis, from `grid`, best with the strongest first.
      algorithm: default `Mocha()`.
      standardize: what to do with features before, see `cross_validate`. Weights and certificates are then those of
        ``problem.data.standardized(...)``.
      key: a JAX random key; default ``jax.random.key(0)``.
      tol: relative gap at which to go on to the next.
      max_rounds: for each at most.
      record_every: rounds between looks at the gap.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
      >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], loss_scaling="task_mean")
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
      >>> path = mj.lambda_path(problem, mj.grid(mj.regularizers.Probabilistic, lam=[1.0, 0.1, 0.01]), tol=1e-3)
      >>> path.weights.shape, bool((path.certificate.relative_joint_gap <= 1e-3).all())
      ((3, 4, 3), True)
    """
    count_candidates("lambda_path", problem, candidates)
    budget = solve_options("lambda_path", algorithm, tol, max_rounds, record_every)
    key = jax.random.key(0) if key is None else key
    check.key("lambda_path", key)
    problem = prepared(problem, preparation("lambda_path", standardize, problem))[0].unnamed()
    path = or_by_loops(
        problem, budget.algorithm, lambda by: _path(key, problem, candidates, budget.replace(algorithm=by))
    )
    if not isinstance(path.rounds, jax.core.Tracer):
        residuals, rounds = np.asarray(path.certificate.residual), np.asarray(path.rounds)
        caveat = caveats.unfinished(
            residuals, rounds, budget.tol, budget.max_rounds, advice(problem.data), "are as far as they got"
        )
        if caveat is not None:
            warn(f"lambda_path: {caveat}", NotConverged)
    return path


@jax.jit
def _path(key: Array, problem: Problem, candidates: Regularizer, budget: SolveOptions) -> Path:
    def entry(regularizer: Regularizer, s: Solution[Problem]) -> Path:
        return Path(regularizer, s.weights, s.relation, s.certificate, jnp.asarray(s.rounds))

    return scan_candidates(key, partial(Problem, problem.data, problem.loss), candidates, budget, entry)


def scan_candidates(
    key: Array,
    at: Callable[[Regularizer], Problem],
    candidates: Regularizer,
    budget: SolveOptions,
    entry: Callable[[Regularizer, Solution[Problem]], Entry],
) -> Entry:
    """Something of the solution for every candidate, each begun from the one before.

    Args:
      key: a JAX random key.
      at: the problem with a regularizer, e.g. ``partial(Problem, data, loss)``.
      candidates: with a leading axis.
      budget: options of each solve.
      entry: what to keep of a solution.
    """

    def one(state: State, regularizer: Regularizer) -> tuple[State, Entry]:
        problem = at(regularizer)
        solution = budget.solve(key, problem, warm_started(budget.algorithm, state, problem))
        return solution.state, entry(regularizer, solution)

    first = at(jax.tree.map(lambda leaf: leaf[0], candidates))
    return lax.scan(one, budget.algorithm.init(first), candidates)[1]


@jax.jit
def warm_started(algorithm: Algorithm[Problem], state: State, problem: Problem) -> State:
    """Return the state from which the next solve begins; a new one where the last was not finite."""
    sound = jnp.all(jnp.isfinite(algorithm.weights(state)))
    return lax.cond(sound, lambda: algorithm.warm_start(state, problem), lambda: algorithm.init(problem))


def solve_options(
    owner: str, algorithm: Algorithm[Problem] | None, tol: float, max_rounds: int, record_every: int
) -> SolveOptions:
    """Check and collect the options of each solve."""
    check.integer(owner, 1, max_rounds=max_rounds, record_every=record_every)
    check.scalar(owner, tol=tol)
    check.nonnegative(owner, tol=tol)
    if algorithm is not None:
        check.instance(owner, "algorithm", algorithm, Algorithm, "Mocha()")
    algorithm = Mocha() if algorithm is None else algorithm
    return SolveOptions(algorithm, float(tol), int(max_rounds), int(record_every))


def count_candidates(owner: str, problem: Problem, candidates: Regularizer) -> int:
    """Count the candidates, which must be for such a problem."""
    check.instance(owner, "problem", problem, Problem, "Problem(data, loss, regularizer)")
    check.instance(owner, "candidates", candidates, Regularizer, "grid(regularizers.Independent, lam=[1.0, 0.1])")
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(candidates)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"{owner}: all numbers of the candidates need one leading axis, as those of grid(...) have; "
            f"got {candidates}."
        )
    count = int(sizes.pop()[0])
    for i in range(count):
        candidate = jax.tree.map(lambda leaf, i=i: leaf[i], candidates)
        check.representable(f"{owner}: candidate {i}", candidate, problem.data.dtype)
        candidate.check_tasks(problem.data.num_tasks)
    return count
