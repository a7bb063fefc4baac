"""How right gradients through a solve are: ``python -m benchmarks.gradients [--losses Hinge ...] [--json FILE]``.

Losses times regularizers times methods, float32 and float64, after 3, 10 and 100 rounds, at the default gap of 1e-4 and
at 1e-8. Of each, the derivatives of a function of the weights with respect to the logarithms of every number of the
regularizer and the loss and of two samples' weights, by `hypergradient` and by `jax.grad`, against central differences
of solves in float64 to the last digit, with two step sizes that must agree. An error is relative to the derivative, or
to a hundredth of the problem's largest where it is smaller than that.

A derivative is flagged where it is NaN, or where `hypergradient` says that it may be off by more than the target. The
table has, for each regularizer, method and precision: derivatives; those flagged, and how many of them needlessly; the
worst error of the others; Newton steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import mocha_jax as mj

TARGET = 1e-4

# Relative size below which a derivative counts as this share of the largest one.
FLOOR = 1e-2

# Steps of the central differences, in logarithms, and by how much the two may differ to be believed.
STEPS, AGREE = (1e-4, 3e-5), 1e-5

TASKS, FEATURES = 4, 3

BUDGETS: dict[str, dict[str, Any]] = {
    "3 rounds": dict(tol=None, max_rounds=3),
    "10 rounds": dict(tol=None, max_rounds=10),
    "100 rounds": dict(tol=None, max_rounds=100),
    "gap 1e-4": dict(tol=1e-4, max_rounds=2000),
    "gap 1e-8": dict(tol=1e-8, max_rounds=2000),
}


def fair(z: Array, y: Array) -> Array:
    """A loss of a scalar function."""
    return jnp.abs(z - y) - jnp.log1p(jnp.abs(z - y))


LOSSES = {
    "Hinge": mj.losses.Hinge(),
    "SmoothedHinge": mj.losses.SmoothedHinge(0.5),
    "SquaredHinge": mj.losses.SquaredHinge(),
    "Logistic": mj.losses.Logistic(),
    "Squared": mj.losses.Squared(),
    "Absolute": mj.losses.Absolute(),
    "EpsilonInsensitive": mj.losses.EpsilonInsensitive(0.2),
    "Huber": mj.losses.Huber(0.7),
    "Quantile": mj.losses.Quantile(0.3),
    "from_scalar": mj.losses.from_scalar(fair, smoothness=1.0, lipschitz=1.0),
}

CHAIN = np.diag([1.0, 2.0, 2.0, 1.0]) - np.diag(np.ones(3), 1) - np.diag(np.ones(3), -1)
REGULARIZERS = {
    "Independent": mj.regularizers.Independent(0.1),
    "MeanRegularized": mj.regularizers.MeanRegularized(0.2, 0.05),
    "Graph": mj.regularizers.Graph(CHAIN, 0.1, 0.05),
    "Clustered": mj.regularizers.Clustered(0.05, 0.3, 1.5),
    "Probabilistic": mj.regularizers.Probabilistic(0.02, 3.0),
    "Probabilistic, no ridge": mj.regularizers.Probabilistic(0.05),
    "SparsePrecision": mj.regularizers.SparsePrecision(0.05, 2.0, 0.02, 0.05),
}

METHODS: dict[str, mj.Algorithm[mj.Problem]] = {
    "proximal": mj.Mocha(server="proximal"), "dual": mj.Mocha(server="dual"), "newton": mj.Newton(),
    "interior point": mj.InteriorPoint(),
}  # fmt: skip


class Case(NamedTuple):
    """A derivative, and what is known of it."""

    loss: str
    regularizer: str
    method: str
    precision: str
    budget: str
    number: int  # of the regularizer, then of the loss, then the samples' weights
    reference: float
    error: float  # of `hypergradient` with no bound
    flagged: bool  # whether it would have been NaN, or its own estimate is above the target
    error_of_grad: float  # of `jax.grad`; NaN where that is
    gap: float  # relative, of the solve
    distance: float
    residual: float


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradients", description=__doc__)
    parser.add_argument("--losses", nargs="*", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--regularizers", nargs="*", default=list(REGULARIZERS), choices=list(REGULARIZERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for all numbers")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # for the differences
    jax.config.update("jax_disable_most_optimizations", True)  # it compiles much and computes little
    cases: list[Case] = []
    for regularizer in options.regularizers:
        rows: list[Case] = []
        for loss in options.losses:
            rows += audit(loss, regularizer, options.seed)
            jax.clear_caches()  # no other loss runs these programs, and a process holds only so many
        report(rows)
        cases += rows
    total(cases)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([case._asdict() for case in cases], file)


def methods_for(problem: mj.Problem) -> list[str]:
    """Name the methods that are for a problem."""
    if problem.regularizer.learned:
        return ["proximal", "dual"] if problem.regularizer.jointly_convex else ["dual"]
    return ["dual", "newton" if problem.loss.smoothness is not None else "interior point"]


def audit(
    loss: str, regularizer: str, seed: int, *, methods: int = 2, dtypes: tuple[Any, ...] = (np.float32, np.float64),
    budgets: tuple[str, ...] = tuple(BUDGETS),
) -> Iterator[Case]:  # fmt: skip
    """One loss and regularizer: all methods, or as many as said, precisions and budgets."""
    with jax.default_device(cpu()):  # of an accelerator only what it finds is wanted
        exact = problem_of(loss, regularizer, seed)
        reference = differences(exact)
    exact = jax.tree.map(np.asarray, exact)
    for method in methods_for(exact)[:methods]:
        algorithm = METHODS[method]
        for dtype in dtypes:
            problem = cast(exact, dtype)
            through = jax.jit(jax.grad(lambda t, state, p=problem, a=algorithm: after(moved(p, t), a, state)))
            for budget in budgets:
                solution = mj.solve(problem, algorithm, **BUDGETS[budget])
                found = mj.hypergradient(score, solution, adjoint=mj.Implicit(worst=1e30))
                value, off = (in_logarithms(problem, g) for g in (found.gradient, found.error))
                by_grad = np.asarray(through(jnp.zeros(len(value), dtype), solution.state), float)
                scale = np.maximum(np.abs(reference), FLOOR * np.nanmax(np.abs(reference)))
                unknown = not max(found.distance, found.residual) <= mj.Implicit().worst
                for k in np.flatnonzero(np.isfinite(reference)):
                    flagged = unknown or not abs(off[k]) <= TARGET * max(abs(value[k]), FLOOR * np.abs(value).max())
                    yield Case(
                        loss, regularizer, method, np.dtype(dtype).name, budget, int(k), float(reference[k]),
                        float(abs(value[k] - reference[k]) / scale[k]), bool(flagged),
                        float(abs(by_grad[k] - reference[k]) / scale[k]), float(solution.certificate.residual),
                        float(found.distance), float(found.residual),
                    )  # fmt: skip


def cpu() -> Any:
    """A device of the CPU, where JAX was not told to do without."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


def problem_of(loss: str, regularizer: str, seed: int) -> mj.Problem:
    """Related tasks of 6 to 14 samples, of numbers that float32 has."""
    rng = np.random.default_rng(seed)
    shared, xs, ys = rng.normal(size=FEATURES), [], []
    for _ in range(TASKS):
        x = rng.normal(size=(rng.integers(6, 15), FEATURES)) / np.sqrt(FEATURES)
        z = x @ (shared + 0.5 * rng.normal(size=FEATURES)) + 0.3 * rng.normal(size=len(x))
        xs.append(x)
        ys.append(np.where(z > 0, 1.0, -1.0) if LOSSES[loss].binary else z)
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean", dtype=np.float64)
    return cast(cast(mj.Problem(data, LOSSES[loss], REGULARIZERS[regularizer]), np.float32), np.float64)


def cast(problem: mj.Problem, dtype: Any) -> mj.Problem:
    """The same numbers in another precision."""
    return jax.tree.map(lambda a: jnp.asarray(a, dtype if np.asarray(a).dtype.kind == "f" else None), problem)


def score(weights: Array) -> Array:
    """What is differentiated."""
    target = jnp.asarray(np.random.default_rng(7).normal(size=weights.shape), weights.dtype)
    return jnp.sum((weights - target) ** 2) + 0.3 * jnp.sum(weights**3)


def after(problem: mj.Problem, algorithm: mj.Mocha, state: Any) -> Array:
    """The same of a solve that goes on from a state, for no further round."""
    return score(mj.solve(problem, algorithm, state=state, max_rounds=0).weights)


def _is_number(leaf: Any) -> bool:
    return np.ndim(leaf) == 0 and bool(np.isfinite(leaf))


def moved(problem: mj.Problem, t: Array) -> mj.Problem:
    """Every one of the numbers times exp(t)."""
    factors = iter(jnp.exp(t))

    def scaled(record: Any) -> Any:
        leaves, tree = jax.tree.flatten(record)
        leaves = [a * next(factors) if _is_number(a) else a for a in leaves]
        return jax.tree.unflatten(tree, leaves)

    regularizer, loss = scaled(problem.regularizer), scaled(problem.loss)
    weight = problem.data.weight
    for node, factor in enumerate(factors):
        weight = weight.at[node, 0].set(factor * weight[node, 0])
    return mj.Problem(problem.data.replace(weight=weight), loss, regularizer)


def in_logarithms(problem: mj.Problem, gradient: Any) -> np.ndarray:
    """A gradient as derivatives with respect to t."""
    leaves = zip(*(jax.tree.leaves((p.regularizer, p.loss)) for p in (problem, gradient)), strict=True)
    slopes = [float(number * slope) for number, slope in leaves if _is_number(number)]
    weights = problem.data.weight * gradient.data.weight
    return np.array([*slopes, float(weights[0, 0]), float(weights[1, 0])])


def differences(problem: mj.Problem) -> np.ndarray:
    """Central differences; NaN where two step sizes disagree, as at kinks and where no solve is exact."""
    every = None if problem.regularizer.jointly_convex else 2
    algorithm = mj.Mocha(3.0, sigma_prime="per_task", omega_every=every)
    count = sum(map(_is_number, jax.tree.leaves((problem.regularizer, problem.loss)))) + 2

    def at(t: Array) -> Array:
        return score(mj.solve(moved(problem, t), algorithm, tol=1e-15, max_rounds=4000, record_every=50).weights)

    ways = np.concatenate([sign * h * np.eye(count) for h in STEPS for sign in (1.0, -1.0)])
    high, low, higher, lower = np.split(np.asarray(jax.jit(jax.vmap(at))(jnp.asarray(ways))), 4)
    wide, narrow = (high - low) / (2 * STEPS[0]), (higher - lower) / (2 * STEPS[1])
    scale = np.maximum(np.abs(wide), FLOOR * np.abs(wide).max())
    return np.where(np.abs(wide - narrow) <= AGREE * scale, wide, np.nan)


def report(cases: list[Case]) -> None:
    """One regularizer: a line for each method and precision."""
    for method, precision in sorted({(case.method, case.precision) for case in cases}):
        rows = [case for case in cases if (case.method, case.precision) == (method, precision)]
        print(f"{rows[0].regularizer:<24} {method:<14} {precision:<8} {summary(rows)}", flush=True)


def summary(cases: list[Case]) -> str:
    """Counts and worst errors."""
    flagged = [case for case in cases if case.flagged]
    needless = [case for case in flagged if case.error <= TARGET]
    silent = [case.error for case in cases if not case.flagged]
    grad = [case.error_of_grad for case in cases]
    return (
        f"{len(cases):>5} derivatives, {len(flagged):>4} flagged ({len(needless)} needlessly), worst of the others "
        f"{max(silent, default=0.0):.1e}; jax.grad: {np.isnan(grad).sum():>4} NaN, worst {np.nanmax([0.0, *grad]):.1e}"
    )


def total(cases: list[Case]) -> None:
    """All of them by budget, and together."""
    for budget in BUDGETS:
        print(f"{budget:<24} {summary([case for case in cases if case.budget == budget])}")
    print(f"{'all':<24} {summary(cases)}")


if __name__ == "__main__":
    main()
