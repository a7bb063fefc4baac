r"""Derivatives of a solve.

`Unrolled` differentiates the rounds as they were computed. `Implicit` differentiates the optimum, whatever computed it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from mocha_jax._algorithms.base import State
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import PyTree, Pytree, Relation, fields_of, static, summary, tree
from mocha_jax._core.values import is_traced
from mocha_jax._core.warnings import warn
from mocha_jax._derivatives.optimum import optimum, pulled_back, refine
from mocha_jax._driver.config import RunConfig, prepared
from mocha_jax._driver.history import History, Progress, record
from mocha_jax._driver.rounds import advance, allocate, finalize, plan, run_chunk
from mocha_jax._driver.solution import Solution
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.gap import Certificate
from mocha_jax._problem.problem import Federated, Problem, Quality

Answer = tuple[Array, Relation, Quality]  # weights, Omega, and how good they are


class Outcome(Pytree):
    """The outcome of a solve without a host."""

    state: State = tree()
    weights: Array = tree()
    relation: Relation
    quality: Quality
    progress: Progress
    history: History  # of the last record


class Adjoint(Pytree):
    """Base class of derivatives of `solve`."""

    @abstractmethod
    def solve(
        self, key: Array, config: RunConfig, state: State | None, tol: Array, max_rounds: int, record_every: int
    ) -> Outcome:
        """Run all rounds in one compiled call."""


class Unrolled(Adjoint):
    r"""Differentiate the rounds one by one, as a plain program.

    All ``max_rounds`` rounds are done, whatever the tolerance: the derivative converges with the rounds as well, and
    later than the point. With an adaptive $\sigma'$ a round has the derivative of a round with the safe one: both have
    the same fixed point, and only that one is a contraction.

    Args:
      checkpoint: keep only the states of about the square root of all rounds, and compute what lies between them
        again on the way back: memory grows with the square root of the rounds, for about twice as much computing.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
      >>> data = mj.pack_tasks(xs, [x[:, 0] for x in xs])
      >>> def length(lam):
      ...     problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(lam))
      ...     return (mj.solve(problem, max_rounds=20, adjoint=mj.Unrolled()).weights ** 2).sum()
      >>> float(jax.grad(length)(1.0)) < 0.0
      True
    """

    checkpoint: bool = static(default=True)

    def __post_init__(self) -> None:
        check.flag("Unrolled", checkpoint=self.checkpoint)

    def solve(
        self, key: Array, config: RunConfig, state: State | None, tol: Array, max_rounds: int, record_every: int
    ) -> Outcome:
        prepared = config.prepared()
        progress = prepared.start(state)

        def one(p: Progress, _: None) -> tuple[Progress, None]:
            return advance(prepared, p, plan(key, prepared, p.state.round)), None

        def some(p: Progress, length: int) -> Progress:
            return lax.scan(jax.checkpoint(one) if self.checkpoint else one, p, length=length)[0]

        if self.checkpoint:
            width = max(math.isqrt(max_rounds), 1)
            many, rest = divmod(max_rounds, width)
            stage = jax.checkpoint(lambda p, _: (some(p, width), None))
            progress = some(lax.scan(stage, progress, length=many)[0], rest)
        else:
            progress = some(progress, max_rounds)
        state, quality, relation = finalize(prepared, progress.state, progress.bound)
        progress, last = record(progress, config.problem, quality, config.watch)
        return Outcome(state, config.algorithm.weights(state), relation, quality, progress, last)


class Implicit(Adjoint):
    r"""Differentiate the optimum by the implicit function theorem.

    Nothing of the rounds is kept: one symmetric linear system gives the derivative with respect to every number of the
    problem: hyperparameters, parameters of the loss, sample weights, samples and labels. Where the loss is not
    smooth it is that of the free dual variables; at a kink that of one side or
    another. Weights, Omega and the primal objective have derivatives, the rest of the solution (state, gaps, history)
    has none.

    The point at which it is taken is the optimum too, or there is none: where a derivative is asked for, Newton steps
    lead on from where the rounds ended, and the weights, Omega and objective that
    come with the derivative are those at their end. A gap of 1e-4 is near enough for that; how far the last step still
    went says how exact the point is, and after too few rounds, or where alternation stalls far from the joint optimum,
    the steps lead nowhere. Then, and where the linear system could not be solved, the derivative is NaN.
    `hypergradient` bounds the error of each number. There are first derivatives only; asking for second ones is an
    error.

    Args:
      tol: relative residual of a linear system to stop at; default the 3/4 power of the rounding unit.
      max_steps: of MINRES for each, two products with the samples a step.
      worst: above which a derivative is NaN: by how much the last Newton step may have moved the point, as a share of
        its size, and the relative residual of the linear system. Both are shares of the sizes of weights and duals: a
        derivative that is a thousandth of those may keep two or three digits in float32, which `jax.grad` cannot tell
        and `hypergradient` does.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
      >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs])
      >>> def length(lam):
      ...     problem = mj.Problem(data, mj.losses.SmoothedHinge(0.5), mj.regularizers.MeanRegularized(lam, 0.5))
      ...     return (mj.solve(problem, adjoint=mj.Implicit()).weights ** 2).sum()
      >>> float(jax.grad(length)(1.0)) < 0.0
      True
    """

    tol: float | None = static(default=None)
    max_steps: int = static(default=2000)
    worst: float = static(default=1e-4)

    def __post_init__(self) -> None:
        if self.tol is not None:
            check.scalar("Implicit", tol=self.tol)
            check.positive("Implicit", tol=self.tol)
        check.integer("Implicit", 1, max_steps=self.max_steps)
        check.scalar("Implicit", worst=self.worst)
        check.positive("Implicit", worst=self.worst)

    def solve(
        self, key: Array, config: RunConfig, state: State | None, tol: Array, max_rounds: int, record_every: int
    ) -> Outcome:
        constant, state = lax.stop_gradient((config, state))
        laid_out, going = prepared(constant), None
        progress, history = allocate(key, laid_out, state, records=1)
        whole, rest = divmod(max_rounds, record_every)
        for blocks, rounds in ((whole, record_every), (1, rest)):
            if blocks and rounds:
                left = np.int32(blocks) if going is None else jnp.where(going, blocks, 0)
                progress, history, _, going = run_chunk(key, laid_out, progress, history, left, tol, rounds=rounds)
        state, quality, relation = lax.stop_gradient(finalize(laid_out, progress.state, progress.bound))
        weights, history = config.algorithm.weights(state), jax.tree.map(lambda r: r[0], history)
        weights, relation, quality = self.differentiable(config.problem, state, (weights, relation, quality))
        return Outcome(state, weights, relation, quality, progress, history)

    def differentiable(self, problem: Federated, state: State, answer: Answer) -> Answer:
        """Give weights, Omega and quality of a run that has ended their derivatives with respect to the problem."""
        if state.duals is None:  # it compiles and maps, but has no derivative
            return _without_duals(problem, state, answer)
        weights, relation, quality = answer
        beta = _duals(state, "Implicit")
        problem, certificate = cast(Problem, problem), cast(Certificate, quality)  # nothing else has dual variables
        reported = weights, relation, certificate.primal
        weights, relation, primal = optimum(problem, reported, beta, self.tol, self.max_steps, self.worst)
        return weights, relation, certificate.replace(primal=primal)


# By how much a gradient may be off by rounding alone, in roundings of the sizes of weights and slope. With none, some
# numbers of (14) without ridge were further off than they said (`benchmarks.gradients`, hinge and quantile loss).
_ROUNDINGS = 16.0


class Hypergradient(Pytree):
    """A gradient and its error, from `hypergradient`."""

    value: Array  # [] of the function
    gradient: PyTree  # a `Problem` that holds the derivative with respect to each of its numbers; NaN where unknown
    error: PyTree  # the same of the size of the gradient's error: what the last Newton step changed, and rounding
    distance: Array  # [] by how much that step moved weights or duals, as a share of their size
    residual: Array  # [] relative residual of the linear system
    steps: Array  # [] int32 that solving it took
    free: Array  # [] int32 dual variables that move with the problem

    def __repr__(self) -> str:
        last = {name: value for name, value in fields_of(self).items() if name not in ("gradient", "error")}
        return summary(self, {**last, "gradient": self.gradient})


@on_purpose
def hypergradient(
    fn: Callable[[Array], Array], solution: Solution[Problem], *, adjoint: Implicit | None = None
) -> Hypergradient:
    r"""The gradient of a function of the solution with respect to all inputs, with its error.

    The same as ``jax.grad`` through ``solve(..., adjoint=Implicit())``, but it starts from a solution that is there
    already, and says how far off each number may be: ``error`` is by how much the gradient differs from the one before
    the last Newton step, which is more than it is off itself, and what rounding may make of it: a derivative far
    smaller than the sizes of weights and of the function's slope is a difference of large numbers. Beyond
    ``adjoint.worst`` it is NaN, and a warning says why.

    Args:
      fn: a scalar function of the weights ``[num_tasks, d]``; its value is that of the solution's own weights.
      solution: of `solve`, by a method with dual variables.
      adjoint: how exactly to solve the linear system, and when to give up.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
      >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs])
      >>> problem = mj.Problem(data, mj.losses.SmoothedHinge(0.5), mj.regularizers.MeanRegularized(1.0, 0.5))
      >>> found = mj.hypergradient(lambda w: (w**2).sum(), mj.solve(problem))
      >>> g, error = found.gradient, found.error
      >>> bool(g.regularizer.lam2 < 0), g.loss.gamma.shape, g.data.weight.shape
      (True, (), (4, 20))
      >>> bool(abs(error.regularizer.lam2) < 1e-3 * abs(g.regularizer.lam2))
      True
    """
    name = "hypergradient"
    check.function(name, "fn", fn, "lambda weights: (weights**2).sum()")
    check.instance(name, "solution", solution, Solution, "solve(problem)")
    adjoint = Implicit() if adjoint is None else adjoint
    check.instance(name, "adjoint", adjoint, Implicit, "Implicit()")
    problem, beta = solution.problem, _duals(solution.state, name)
    tol, max_steps = adjoint.tol, adjoint.max_steps
    value = jnp.asarray(fn(solution.weights))
    if value.shape != ():
        raise ValueError(f"hypergradient: fn must return a single number, got shape {value.shape}.")
    refined = refine(problem, solution.weights, beta, solution.relation, tol=tol, max_steps=max_steps)

    points = jax.tree.map(lambda *both: jnp.stack(both), refined.point, refined.before)
    slopes = jnp.stack([jax.grad(fn)(point.weights) for point in (refined.point, refined.before)])
    gradients, every, moving = pulled_back(problem, points, slopes, tol=tol, max_steps=max_steps)
    last, solved, free = jax.tree.map(lambda a: a[0], (gradients, every, moving))
    before, slope = jax.tree.map(lambda a: a[1], gradients), slopes[0]
    trusted = (refined.distance <= adjoint.worst) & (solved.residual <= adjoint.worst)
    lost = _ROUNDINGS * jnp.finfo(beta.dtype).eps * jnp.sqrt(jnp.sum(slope**2) * jnp.sum(refined.point.weights**2))

    def off(leaf: ArrayLike, a: Array, b: Array) -> Array:
        """Add what rounding makes of a change of the whole leaf, by a share of its size, to what the last step did."""
        if a.dtype == jax.dtypes.float0:
            return a
        return jnp.abs(a - b) + safe_ratio(lost, jnp.sqrt(jnp.sum(jnp.asarray(leaf) ** 2)))

    error = jax.tree.map(off, problem, last, before)
    hyper = Hypergradient(
        value, _where(trusted, last), _where(trusted, error), refined.distance, solved.residual, solved.steps, free
    )
    if not is_traced(trusted) and not trusted:
        warn(f"hypergradient: the gradient is NaN, for {_why(hyper, adjoint)}.")
    return hyper


def _where(trusted: Array, gradient: Problem) -> Problem:
    """NaN where it is not to be trusted."""
    return jax.tree.map(lambda a: a if a.dtype == jax.dtypes.float0 else jnp.where(trusted, a, jnp.nan), gradient)


def _why(hyper: Hypergradient, adjoint: Implicit) -> str:
    """Why there is no gradient, and what helps."""
    if not hyper.distance <= adjoint.worst:
        return (
            f"the solution is not near the optimum: Newton steps from it do not get there, the last "
            f"still moves the point by {float(hyper.distance):.1e} of its size (at most {adjoint.worst:g}); solve to a "
            f'smaller tol, with more rounds, and where Omega is learned with Mocha() rather than Mocha(server="dual")'
        )
    if jnp.isnan(hyper.residual):
        return "that of fn is not finite at the optimum's weights"
    return (
        f"its linear system is solved to {float(hyper.residual):.1e} only (at most {adjoint.worst:g}); allow more "
        f"max_steps in Implicit, or use float64"
    )


@jax.custom_jvp
def _without_duals(problem: Federated, state: State, answer: Answer) -> Answer:
    """Return the answer; asked for its derivative with respect to the problem, raise."""
    return answer


@_without_duals.defjvp
def _underivable(primals: tuple[Federated, State, Answer], tangents: object) -> Any:
    _duals(primals[1], "Implicit")


def _duals(state: State, owner: str) -> Array:
    if state.duals is None:
        raise ValueError(
            f"{owner}: a {type(state).__name__} has no dual variables, which say where the optimum bends; solve with "
            f"Mocha() or another dual method, or differentiate with Unrolled()."
        )
    return state.duals
