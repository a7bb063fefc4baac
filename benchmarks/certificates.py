"""Whether certificates are true: ``python -m benchmarks.certificates [--solves 5000] [--json FILE]``.

Random problems (losses x regularizers x servers x float32 and float64; features in units from 1e-6 to 1e6, separable
and interpolating data, lambda from 1e-12 to 1e6, duplicates, rows of zeros, one sample a task, more tasks than features
and the reverse) are solved, and every solution is judged by NumPy alone: in float64 where the problem is in float32,
in extended precision where it is in float64. The optimum is not known but bounded from above by the best point that
any of the solves of the same samples found. A solution fails if

- its weights are further above that point than its gap, or than its joint gap, says,
- its lower bound is above that point,
- its objective is further from that of its weights than its rounding says, or
- it says CONVERGED where the weights are known to be further than the tolerance from the optimum.

``--sending`` solves them by the proximal server over a channel that loses a fifth of the answers, with vectors as they
are and in every form of `experiments.compression`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj

TOL = 1e-4
LOSSES: dict[str, mj.losses.Loss] = {
    "hinge": mj.losses.Hinge(), "smoothed hinge": mj.losses.SmoothedHinge(0.5), "logistic": mj.losses.Logistic(),
    "squared hinge": mj.losses.SquaredHinge(), "squared": mj.losses.Squared(), "absolute": mj.losses.Absolute(),
    "epsilon insensitive": mj.losses.EpsilonInsensitive(0.1), "huber": mj.losses.Huber(0.7),
    "quantile": mj.losses.Quantile(0.25),
}  # fmt: skip
REGULARIZERS = "independent", "mean", "graph", "clustered", "probabilistic", "mean covariance", "sparse"
JOINT = "clustered", "probabilistic", "mean covariance"  # convex in W and Omega together
SHAPES = [(1, 5, 12), (3, 12, 4), (6, 7, 9), (12, 3, 2), (2, 40, 3), (4, 1, 6), (5, 20, 20)]  # m, n, d
KINDS = "plain", "separable", "interpolating", "duplicates", "zeros", "one unit", "all units", "offset"
ALGORITHMS: dict[str, mj.Algorithm[mj.Problem]] = {
    "adaptive": mj.Mocha(server="dual"),
    "safe": mj.Mocha(server="dual", sigma_prime="per_task"),
    "proximal": mj.Mocha(server="proximal"),
    "newton": mj.Newton(),
    "interior point": mj.InteriorPoint(),
}


@dataclass(frozen=True)
class Group:
    """Problems of one shape, loss and kind of regularizer, side by side."""

    loss: str
    regularizer: str
    x: np.ndarray  # [k, m, n, d]
    y: np.ndarray  # [k, m, n]
    c: np.ndarray  # [k, m, n]
    lam: np.ndarray  # [k]
    other: np.ndarray  # [k] the second hyperparameter

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All of them."""
        return self.x, self.y, self.c, self.lam, self.other


def groups(rng: np.random.Generator, count: int, size: int) -> Iterator[Group]:
    """Random groups; every loss with one regularizer, then with the next, so that 63 groups hold all pairs."""
    names = list(LOSSES)
    for i in range(count):
        m, n, d = SHAPES[int(rng.integers(len(SHAPES)))]
        turn, place = divmod(i, len(names))
        loss, regularizer = names[place], REGULARIZERS[(place + turn) % len(REGULARIZERS)]
        if regularizer == "sparse" and m == 1:
            m = 3
        kinds = rng.choice(KINDS, size)
        samples = [sample(rng, m, n, d, str(kind), LOSSES[loss].binary) for kind in kinds]
        x, y = (np.stack(parts).astype(np.float32) for parts in zip(*samples, strict=True))
        c = np.where(rng.random((size, 1, 1)) < 0.5, 1.0, 1.0 / n) * np.ones((size, m, n))
        c = np.where(rng.random(c.shape) < 0.1, 0.0, c) if n > 2 else c
        lam, other = 10.0 ** rng.uniform(-12, 6, size), 10.0 ** rng.uniform(-6, 3, size)
        # Half of the strengths where something happens: near what the samples weigh.
        size_of = np.mean(c[..., None] * x.astype(float) ** 2, axis=(1, 2, 3)) * n
        lam = np.where(rng.random(size) < 0.5, lam, np.clip(size_of * 10.0 ** rng.uniform(-5, 0, size), 1e-30, 1e30))
        yield Group(loss, regularizer, x, y, c.astype(np.float32), lam.astype(np.float32), other.astype(np.float32))


def sample(rng: np.random.Generator, m: int, n: int, d: int, kind: str, binary: bool) -> tuple[np.ndarray, np.ndarray]:
    """The samples of a problem: ``[m, n, d]`` and ``[m, n]``."""
    x, w = rng.normal(size=(m, n, d)), rng.normal(size=(m, d))
    if kind == "duplicates":
        x = x[:, rng.integers(0, max(n // 2, 1), n)]
    if kind == "zeros":
        x = np.where(rng.random((m, n, 1)) < 0.4, 0.0, x)
    if kind == "offset":
        x = x + 10.0 ** rng.uniform(0, 2)
    z = np.einsum("mnd,md->mn", x, w)
    noise = 0.0 if kind in ("separable", "interpolating") else rng.uniform(0.1, 2.0)
    y = z + noise * rng.normal(size=(m, n))
    y = np.where(y >= 0, 1.0, -1.0) if binary else y * 10.0 ** rng.uniform(-2, 4)
    if kind == "one unit":
        x[..., int(rng.integers(d))] *= 10.0 ** rng.uniform(-6, 6)
    if kind == "all units":
        x = x * 10.0 ** rng.uniform(-6, 6, d)
    return x, y


def regularizer(kind: str, m: int, lam: Any, other: Any) -> mj.regularizers.Regularizer:
    """The regularizer of a group with these strengths."""
    r = mj.regularizers
    path = 2.0 * np.eye(m) - np.eye(m, k=1) - np.eye(m, k=-1)
    made: dict[str, Callable[[], mj.regularizers.Regularizer]] = {
        "independent": lambda: r.Independent(lam),
        "mean": lambda: r.MeanRegularized(lam * other, lam),
        "graph": lambda: r.Graph(path, lam * other, lam),
        "clustered": lambda: r.Clustered(lam, other, min(2, m)),
        "probabilistic": lambda: r.Probabilistic(lam, other),
        "mean covariance": lambda: r.MeanCovariance(0.1 * lam, lam, other),
        "sparse": lambda: r.SparsePrecision(lam, 1.0 / other, 0.1 * lam, lam),
    }
    return made[kind]()


@partial(jax.jit, static_argnames=("loss", "kind", "dtype", "rounds"))
def solved(
    x: jax.Array, y: jax.Array, c: jax.Array, lam: jax.Array, other: jax.Array,
    algorithm: mj.Algorithm[mj.Problem], *, loss: str, kind: str, dtype: Any, rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """Solutions of all problems of a group at once."""

    def one(x: jax.Array, y: jax.Array, c: jax.Array, lam: jax.Array, other: jax.Array) -> dict[str, Any]:
        m = len(x)
        data = mj.TaskData(x, y, c, jnp.arange(m, dtype=jnp.int32), num_tasks=m, loss_scaling="sum")
        problem = mj.Problem(data, LOSSES[loss], regularizer(kind, m, lam, other))
        s = mj.solve(problem, algorithm, tol=TOL, max_rounds=rounds, record_every=10)
        q = s.certificate
        names = "primal", "dual", "gap", "joint_gap", "joint_dual", "joint_primal", "rounding", "residual"
        return {name: getattr(q, name) for name in names} | {
            "weights": s.weights, "code": s.code, "omega": s.relation if kind == "sparse" else jnp.zeros(()),
        }  # fmt: skip

    given = tuple(jnp.asarray(a, dtype) for a in (x, y, c, lam, other))
    if kind == "sparse":  # mapped, every round would update Omega, though few need it: one after the other is quicker
        return jax.lax.map(lambda each: one(*each), given)
    return jax.vmap(one)(*given)


def losses(name: str, z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The losses, from their definitions."""
    margin, e, one = 1 - y * z, z - y, z.dtype.type(1)
    return {
        "hinge": lambda: np.maximum(margin, 0),
        "smoothed hinge": lambda: np.where(
            margin <= 0, 0, np.where(margin < one / 2, margin**2, margin - one / 4)
        ),
        "squared hinge": lambda: np.maximum(margin, 0) ** 2,
        "logistic": lambda: np.logaddexp(0, -y * z),
        "squared": lambda: e**2 / 2,
        "absolute": lambda: np.abs(e),
        "epsilon insensitive": lambda: np.maximum(np.abs(e) - _as(LOSSES[name], "epsilon", z), 0),
        "huber": lambda: _huber(np.abs(e), _as(LOSSES[name], "delta", z)),
        "quantile": lambda: np.maximum(-e / 4, 3 * e / 4),
    }[name]()  # fmt: skip


def _as(loss: Any, name: str, like: np.ndarray) -> Any:
    """The parameter as the problem's own float type holds it."""
    given = np.float32 if like.dtype == np.float64 else np.float64
    return like.dtype.type(given(getattr(loss, name)))


def _huber(size: np.ndarray, delta: Any) -> np.ndarray:
    inner = np.minimum(size, delta)
    return inner * (size - inner / 2)


def penalty(kind: str, w: np.ndarray, lam: Any, other: Any, omega: np.ndarray | None) -> Any:
    """R(W), from its definition; minimised over Omega where that makes the problem convex."""
    m, one = len(w), w.dtype.type(1)
    if kind == "independent":
        return lam * np.sum(w**2)
    if kind in ("mean", "graph"):
        given = np.float32 if w.dtype == np.float64 else np.float64
        lam1 = w.dtype.type(given(lam) * given(other))  # as the solve multiplied them
        near = (
            np.sum((w - w.mean(0)) ** 2)
            if kind == "mean"
            else np.sum(w[:1] ** 2) + np.sum(w[-1:] ** 2) + np.sum(np.diff(w, axis=0) ** 2)
        )
        return lam1 * near + lam * np.sum(w**2)
    given = np.float32 if w.dtype == np.float64 else np.float64
    tenth = w.dtype.type(given(0.1) * given(lam))
    if kind == "sparse":
        assert omega is not None
        sigma2 = w.dtype.type(given(1.0) / given(other))
        quadratic = np.sum(w**2) / sigma2 + np.sum(w * (omega @ w))
        return lam * quadratic + tenth * np.sum(np.abs(w))
    if kind == "mean covariance":
        mean = w.mean(0)
        return tenth * m * np.sum(mean**2) + penalty("probabilistic", w - mean, lam, other, None)
    s = np.linalg.svd(w.astype(np.float64), compute_uv=False).astype(w.dtype)
    if kind == "probabilistic":
        return lam * (np.sum(s**2) / other + np.sum(s) ** 2)
    return lam * np.sum(s**2 / (other + _filled(s, other, min(2, m)))) if s.any() else 0 * one


def _filled(s: np.ndarray, floor: Any, total: int) -> np.ndarray:
    """clip(c s - floor, 0, 1) with sum `total`, by bisection over c."""
    low, high = 0 * floor, (1 + floor) / np.maximum(s[s > 0].min(), s[0] * np.finfo(np.float64).tiny)
    for _ in range(300):
        c = (low + high) / 2
        low, high = (c, high) if np.clip(c * s - floor, 0, 1).sum() < total else (low, c)
    return np.clip(high * s - floor, 0, 1)


def judge(group: Group, found: dict[tuple[str, str], dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """For every solution: dtype, algorithm and what is wrong with it, "" where nothing is."""
    for i in range(len(group.lam)):
        for (dtype, algorithm), all_of_them in found.items():
            own = {k: np.asarray(v)[i] for k, v in all_of_them.items()}
            exact: Any = np.float64 if dtype == "float32" else np.longdouble
            x, y, c, lam, other = (
                a.astype(exact) for a in (group.x[i], group.y[i], group.c[i], group.lam[i], group.other[i])
            )
            omega = own["omega"].astype(exact) if group.regularizer == "sparse" else None

            def objective(w: np.ndarray) -> Any:
                z = np.einsum("mnd,md->mn", x, w.astype(exact))  # noqa: B023
                empirical = np.sum(np.where(c > 0, c * losses(group.loss, z, y), 0))  # noqa: B023
                return empirical + penalty(group.regularizer, w.astype(exact), lam, other, omega)  # noqa: B023

            here = objective(own["weights"])
            points = [np.asarray(f["weights"])[i] for f in found.values()] + [0 * own["weights"]]
            values = [objective(w) for w in points if np.isfinite(w).all()]
            best = min([*values, here])
            # The judge rounds too; singular values are of float64 at best.
            blur = 50 * np.finfo(np.float64 if group.regularizer in JOINT else exact).eps * abs(here)
            yield dtype, algorithm, verdict(group, own, here, best, blur)


def verdict(group: Group, own: dict[str, Any], here: Any, best: Any, blur: Any) -> str:
    """What is wrong with a solution, or nothing."""
    code = int(own["code"])
    if code == mj.Status.NON_FINITE or not np.isfinite(own["weights"]).all():
        return ""
    learned = group.regularizer in JOINT
    gap, dual, primal = (
        own["joint_gap" if learned else "gap"], own["joint_dual" if learned else "dual"],
        own["joint_primal" if learned else "primal"],
    )  # fmt: skip
    wrong = []
    if here - best > gap + blur:
        wrong.append(f"gap {float((here - best) / max(gap, 1e-300)):.3g} times too small")
    if group.regularizer != "sparse":  # whose terms of Omega the judge leaves out
        if dual > best + blur:
            wrong.append(f"lower bound {float((dual - best) / best):.1e} too high")
        if abs(primal - here) > own["rounding"] + blur:
            wrong.append(f"objective {float(abs(primal - here) / own['rounding']):.3g} roundings off")
    if code == mj.Status.CONVERGED and here - best > TOL * here * 1.001 + blur:
        wrong.append(f"not converged: {float((here - best) / here):.1e}")
    return "; ".join(wrong)


def main() -> None:
    """Solve, judge, count."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.certificates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--solves", type=int, default=5000)
    parser.add_argument("--size", type=int, default=48, help="problems solved side by side")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sending", action="store_true", help="messages in every form, by the proximal server")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    algorithms = in_forms() if options.sending else ALGORITHMS
    counts: Counter[str] = Counter()
    bad: list[dict[str, Any]] = []
    start = time.perf_counter()
    for group in groups(np.random.default_rng(options.seed), options.solves, options.size):
        if counts["solves"] >= options.solves:
            break
        found = sweep(group, options.rounds, algorithms=algorithms)
        jax.clear_caches()  # no other group runs these programs, and a process holds only so many
        for dtype, algorithm, wrong in judge(group, found):
            counts["solves"] += 1
            if wrong:
                counts["wrong"] += 1
                bad.append(
                    {"loss": group.loss, "regularizer": group.regularizer, "dtype": dtype, "algorithm": algorithm,
                     "shape": group.x.shape[1:], "wrong": wrong}
                )  # fmt: skip
                print(bad[-1], flush=True)
        for (dtype, _), f in found.items():
            for code in np.asarray(f["code"]):
                counts[f"{dtype} {mj.Status(int(code)).name}"] += 1
        print(f"{time.perf_counter() - start:.0f} s", dict(counts), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"counts": counts, "wrong": bad}, indent=1))


def in_forms() -> dict[str, mj.Algorithm[mj.Problem]]:
    """The proximal server by itself, and over a channel in every form of messages."""
    channel, proximal = mj.systems.Unreliable(lost=0.2), mj.Mocha(server="proximal")
    forms = importlib.import_module("experiments.compression").FORMS  # which draws, too
    over = {name: mj.federated.OverChannel(proximal, channel, sending=form) for name, form in forms.items()}
    return {"proximal": proximal, **over}


def sweep(
    group: Group, rounds: int, dtypes: tuple[str, ...] = ("float32", "float64"),
    algorithms: dict[str, mj.Algorithm[mj.Problem]] | None = None,
) -> dict[tuple[str, str], dict[str, Any]]:  # fmt: skip
    """All solves of a group, by dtype and algorithm; those in float64 go on for longer."""
    return {
        (dtype, name): jax.tree.map(
            np.asarray,
            solved(
                *group.arrays, algorithm, loss=group.loss, kind=group.regularizer, dtype=dtype,
                rounds=rounds * (1 if dtype == "float32" else 4),
            ),
        )
        for dtype in dtypes
        for name, algorithm in (algorithms or ALGORITHMS).items()
        if _is_for(name, group)
    }  # fmt: skip


def _is_for(name: str, group: Group) -> bool:
    """Tell whether an algorithm solves such problems."""
    loss = LOSSES[group.loss]
    if name in ("newton", "interior point"):
        fits = loss.smoothness is not None if name == "newton" else loss.piecewise_linear
        return fits and group.regularizer in REGULARIZERS[:3]
    return name in ("adaptive", "safe") or group.regularizer != "sparse"


if __name__ == "__main__":
    main()
