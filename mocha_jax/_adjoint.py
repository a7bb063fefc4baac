r"""Which derivative a solve has.

`Unrolled` differentiates the rounds as they were computed. `Implicit` differentiates the optimum, whatever computed it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax import _check
from mocha_jax._drive import begin, settled, stretch
from mocha_jax._history import History, Progress, record
from mocha_jax._objective import Certificate, objective
from mocha_jax._problem import Problem
from mocha_jax._pytree import Pytree, static
from mocha_jax._run import Setting, advance
from mocha_jax._sensitivity import Sensitivity, implicit, read, unknown_at
from mocha_jax._solution import Solution


class Found(Pytree):
    """What a solve without a host led to."""

    state: Any
    weights: Array
    relation: Any
    certificate: Certificate
    progress: Progress
    history: History  # of the last record


class Adjoint(Pytree):
    """How derivatives go through `solve`."""

    @abstractmethod
    def solve(self, key: Array, run: Setting, state: Any, tol: Array, max_rounds: int, record_every: int) -> Found:
        """All rounds in one compiled stretch."""


class Unrolled(Adjoint):
    r"""Differentiate the rounds one by one, as a plain program.

    All ``max_rounds`` rounds are done, whatever the tolerance: the derivative converges with the rounds as well, and
    later than the point. With an adaptive :math:`\sigma'` a round's derivative is that of a round with the safe one,
    see `mocha_jax._mocha`.

    Args:
      checkpoint: keep only the states of about the square root of all rounds, and compute what lies between them
        again on the way back: memory grows with the square root of the rounds, for about twice as much computing.

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

    def solve(self, key: Array, run: Setting, state: Any, tol: Array, max_rounds: int, record_every: int) -> Found:
        progress, prepared = run.start(state), run.prepared()

        def one(p: Progress, _: None) -> tuple[Progress, None]:
            return advance(key, prepared, p), None

        def some(p: Progress, length: int) -> Progress:
            return lax.scan(jax.checkpoint(one) if self.checkpoint else one, p, length=length)[0]

        if self.checkpoint:
            width = max(math.isqrt(max_rounds), 1)
            many, rest = divmod(max_rounds, width)
            stage = jax.checkpoint(lambda p, _: (some(p, width), None))
            progress = some(lax.scan(stage, progress, length=many)[0], rest)
        else:
            progress = some(progress, max_rounds)
        state, certificate, relation = settled(run, progress)
        last = record(progress, run.problem, certificate)[1]
        return Found(state, run.algorithm.weights(state), relation, certificate, progress, last)


class Implicit(Adjoint):
    r"""Differentiate the optimum by the implicit function theorem.

    Nothing of the rounds is kept: one symmetric linear system gives the derivative with respect to every number of the
    problem: hyperparameters, parameters of the loss, sample weights, samples and labels. Where the loss is not
    smooth it is that of the free dual variables (see `mocha_jax._sensitivity`); at a kink that of one side or another.
    Weights, Omega and the primal objective have derivatives, the rest of the solution (state, gaps, history) has none.

    It is the derivative of the exact optimum, taken at the point reached: solve well enough. How well the system was
    solved is reported by `hypergradient`; inside a transformation a residual above `worst` gives NaN. There are first
    derivatives only; asking for second ones is an error.

    Args:
      tol: relative residual of the linear system to stop at; default the 3/4 power of the rounding unit.
      max_steps: of MINRES, each two products with the samples.
      worst: relative residual above which a derivative is NaN. It bounds what the system is short of, not the error
        of each number, which can be some ten times larger where the system is ill-conditioned.

    >>> import jax, numpy as np, mocha_jax as mj
    >>> rng = np.random.default_rng(0)
    >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
    >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs])
    >>> def length(lam):
    ...     problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(lam))
    ...     return (mj.solve(problem, tol=1e-5, adjoint=mj.Implicit()).weights ** 2).sum()
    >>> float(jax.grad(length)(1.0)) < 0.0
    True
    """

    tol: float | None = static(default=None)
    max_steps: int = static(default=2000)
    worst: float = static(default=1e-2)

    def __post_init__(self) -> None:
        if self.tol is not None:
            _check.positive("Implicit", tol=self.tol)
        _check.integer("Implicit", 1, max_steps=self.max_steps)
        _check.positive("Implicit", worst=self.worst)

    def solve(self, key: Array, run: Setting, state: Any, tol: Array, max_rounds: int, record_every: int) -> Found:
        held, state = lax.stop_gradient((run, state))
        progress, room = begin(key, held, state, records=1)
        last = progress.state.round + max_rounds
        progress, history, _ = stretch(key, held.prepared(), progress, room, last, tol, record_every=record_every)
        state, certificate, relation = lax.stop_gradient(settled(held, progress))
        weights, history = run.algorithm.weights(state), jax.tree.map(lambda r: r[0], history)
        problem = run.problem
        if not hasattr(state, "beta"):  # it compiles and maps, but has no derivative
            weights, relation, certificate = _without_duals(problem, state, (weights, relation, certificate))
            return Found(state, weights, relation, certificate, progress, history)
        beta = _duals(state, "Implicit")
        assert isinstance(problem, Problem)  # dual variables are of nothing else
        unknown = unknown_at(lax.stop_gradient(problem), weights, beta, relation)
        unknown, _ = implicit(problem, unknown, beta, self.tol, self.max_steps, self.worst)
        moving, moving_relation = read(problem, unknown)
        weights = _anchored(weights, moving)
        if relation is not None:
            relation = jax.tree.map(_anchored, relation, moving_relation)
        # The best Omega for W may be left out: at an optimum its own change does not change the objective.
        omega = None if problem.regularizer.jointly_convex else relation
        primal = _anchored(certificate.primal, objective(problem, weights, omega))
        return Found(state, weights, relation, certificate.replace(primal=primal), progress, history)


class Hypergradient(Pytree):
    """What `hypergradient` found."""

    value: Array  # [] of the function
    gradient: Any  # a `Problem` that holds the derivative with respect to each of its numbers
    residual: Array  # [] relative residual of the linear system
    steps: Array  # [] int32 that solving it took
    free: Array  # [] int32 dual variables that move with the problem


def hypergradient(
    fn: Callable[[Array], Array], solution: Solution, *, adjoint: Implicit | None = None
) -> Hypergradient:
    r"""The gradient of something learned with respect to everything given, and how exact it is.

    The same as ``jax.grad`` through ``solve(..., adjoint=Implicit())``, but it starts from a solution that is there
    already and returns the residual of its linear system instead of comparing it with `Implicit.worst`.

    Args:
      fn: a scalar function of the weights ``[num_tasks, d]``.
      solution: of `solve`, by a method with dual variables.
      adjoint: how exactly to solve the linear system.

    >>> import numpy as np, mocha_jax as mj
    >>> rng = np.random.default_rng(0)
    >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
    >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs])
    >>> problem = mj.Problem(data, mj.losses.SmoothedHinge(0.5), mj.regularizers.MeanRegularized(1.0, 0.5))
    >>> found = mj.hypergradient(lambda w: (w**2).sum(), mj.solve(problem, tol=1e-6))
    >>> g = found.gradient
    >>> bool(found.residual < 1e-3), bool(g.regularizer.lam2 < 0), g.loss.gamma.shape, g.data.weight.shape
    (True, True, (), (4, 20))
    """
    adjoint = Implicit() if adjoint is None else adjoint
    problem, beta = solution.problem, _duals(solution.state, "hypergradient")
    unknown = unknown_at(problem, solution.weights, beta, solution.relation)

    def outer(problem: Problem, unknown: Any) -> Array:
        return fn(_anchored(solution.weights, read(problem, unknown)[0]))

    value, pull = jax.vjp(outer, problem, unknown)
    if value.shape != ():
        raise ValueError(f"hypergradient: fn must return a single number, got shape {value.shape}.")
    direct, towards = pull(jnp.ones_like(value))
    system = Sensitivity(problem, unknown, beta, tol=adjoint.tol, max_steps=adjoint.max_steps)
    through, found = system.cotangent(towards, jnp.zeros_like(beta))
    gradient = jax.tree.map(lambda a, b: a if a.dtype == jax.dtypes.float0 else a + b, direct, through)
    return Hypergradient(value, gradient, found.residual, found.steps, jnp.sum(system.free, dtype=jnp.int32))


@jax.custom_jvp
def _without_duals(problem: Any, state: Any, found: Any) -> Any:
    """What was found; asked for its derivative with respect to the problem, an error."""
    return found


@_without_duals.defjvp
def _underivable(primals: Any, tangents: Any) -> Any:
    _duals(primals[1], "Implicit")


def _duals(state: Any, owner: str) -> Array:
    if not hasattr(state, "beta"):
        raise ValueError(
            f"{owner}: a {type(state).__name__} has no dual variables, which say where the optimum bends; solve with "
            f"Mocha() or another dual method, or differentiate with Unrolled()."
        )
    return jnp.asarray(state.beta)


def _anchored(value: Array, moving: Array) -> Array:
    """The first's value, the second's derivatives."""
    return value + (moving - lax.stop_gradient(moving))
