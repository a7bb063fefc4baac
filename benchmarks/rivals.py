r"""Beside plain solvers, on the clock: ``python -m benchmarks.rivals --data FOLDER [--rows NAME ...] [--json FILE]``.

Every row is a problem on a real task set, solved to a certified relative gap of 1e-3 and 1e-6, in one process and in
turns: by `mj.Mocha`, by `mj.Newton` or `mj.InteriorPoint` where one is for the problem, and by others:

- *L-BFGS* of SciPy on the weights of all tasks, whitened by R;
- *Schur*: least squares near the mean by one Cholesky factorisation a task and one for what they share, exact;
- *liblinear* by scikit-learn, of the hinge loss, on features that hold each sample twice, for its task and for all;
- *FISTA*, accelerated proximal gradients with restarts, where the penalty is one of singular values.

All stop by the gap that $\beta = -\ell'(z)$ certifies, in the precision that they compute in: rivals in float32 to 1e-3
and in float64 to 1e-6, the library in float32. liblinear gets the largest of its tolerances that will do; its gap is to
the dual objective of `mj.InteriorPoint`. Medians of milliseconds of the process, which count both cores, and on the
clock; the first call, which compiles, stands apart. The weights of all others are judged again by `mj.certificate`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import linalg, optimize, sparse
from sklearn import svm

import mocha_jax as mj
from experiments import tasksets

R, LOGISTIC, SQUARED, HINGE = mj.regularizers, mj.losses.Logistic(), mj.losses.Squared(), mj.losses.Hinge()
ROWS: dict[str, tuple[str, mj.losses.Loss, mj.regularizers.Regularizer]] = {
    "school (11) squared": ("school", SQUARED, R.MeanRegularized(0.1, 0.01)),
    "school local squared": ("school", SQUARED, R.Independent(0.01)),
    "school (14) squared": ("school", SQUARED, R.Probabilistic(0.03, 10.0)),
    "land mines (11) logistic": ("landmine_full", LOGISTIC, R.MeanRegularized(0.01, 0.001)),
    "land mines local logistic": ("landmine_full", LOGISTIC, R.Independent(0.001)),
    "land mines (14) logistic": ("landmine_full", LOGISTIC, R.Probabilistic(0.01, 10.0)),
    "land mines (11) hinge": ("landmine_full", HINGE, R.MeanRegularized(0.01, 0.001)),
    "land mines local hinge": ("landmine_full", HINGE, R.Independent(0.001)),
    "vehicles (11) hinge": ("vehicle", HINGE, R.MeanRegularized(0.01, 0.001)),
    "HAR (11) hinge": ("har", HINGE, R.MeanRegularized(0.01, 0.001)),
    "vehicles (11) logistic": ("vehicle", LOGISTIC, R.MeanRegularized(0.01, 0.001)),
    "HAR (11) logistic": ("har", LOGISTIC, R.MeanRegularized(0.01, 0.001)),
    "HAR (14) logistic": ("har", LOGISTIC, R.Probabilistic(0.001, 10.0)),
}
TOLERANCES = 1e-3, 1e-6
_TURNS, _SECONDS, _ROUNDS, _STEPS = 7, 20.0, 600, 20_000
_ASLEEP = 0.2  # seconds, after which the threads of SciPy's linear algebra no longer wait busily for more work
_ENOUGH = 5e3  # milliseconds of one solver, after which it is not timed again


class Rival(NamedTuple):
    """What a plain solver found."""

    weights: np.ndarray
    steps: int
    gap: float | None = None  # where its weights' own dual point says nothing


class Samples:
    """A problem as a page of NumPy has it: padded samples, and R as what it makes of means and of deviations."""

    def __init__(self, problem: mj.Problem, dtype: Any) -> None:
        data, self.dtype = problem.data, dtype
        self.x, self.y, self.c = (np.asarray(a, dtype) for a in (data.x, data.y, data.weight))
        self.across = np.ascontiguousarray(self.x.transpose(0, 2, 1))
        self.squared, self.shape = isinstance(problem.loss, mj.losses.Squared), (data.num_tasks, data.num_features)
        of: Any = problem.regularizer
        if isinstance(of, R.MeanRegularized):
            self.within, self.common = 2.0 * float(of.lam1 + of.lam2), 2.0 * float(of.lam2)
        elif isinstance(of, R.Independent):
            self.within = self.common = 2.0 * float(of.lam)

    def losses(self, w: np.ndarray) -> tuple[float, np.ndarray]:
        """The data term, and its gradient ``[m, d]``."""
        z = np.matmul(self.x, w[:, :, None])[:, :, 0]
        if self.squared:
            value, slope = 0.5 * (z - self.y) ** 2, z - self.y
        else:
            margin = self.y * z
            value = np.logaddexp(0.0, -margin)
            slope = -self.y / (1.0 + np.exp(np.clip(margin, -80.0, 80.0)))
        return float((self.c * value).sum()), np.matmul(self.across, (self.c * slope)[:, :, None])[:, :, 0]

    def scaled(self, w: np.ndarray, within: float, common: float) -> np.ndarray:
        """Deviations from the mean times one number, the mean times another."""
        mean = w.mean(0, keepdims=True)
        return self.dtype(within) * (w - mean) + self.dtype(common) * mean


def lbfgs(problem: mj.Problem, tol: float, dtype: Any) -> Rival:
    """SciPy's, on variables in which R is the sum of squares."""
    given = Samples(problem, dtype)
    found: dict[str, Any] = {"gap": np.inf, "steps": 0}
    root = given.within**-0.5, given.common**-0.5
    until = time.process_time() + _SECONDS

    def value(u: np.ndarray) -> tuple[float, np.ndarray]:
        w = given.scaled(u.reshape(given.shape).astype(dtype), *root)
        loss, gradient = given.losses(w)
        pull, v = given.scaled(w, given.within, given.common), -gradient
        penalty = 0.5 * float((w * pull).sum())
        conjugate = 0.5 * float((v * given.scaled(v, 1 / given.within, 1 / given.common)).sum())
        gap = (penalty + conjugate - float((v * w).sum())) / abs(loss + penalty)
        found["steps"] += 1
        if gap < found["gap"]:
            found.update(gap=gap, w=w)
        return loss + penalty, given.scaled(gradient + pull, *root).ravel().astype(float)

    def enough(_: np.ndarray) -> None:
        if found["gap"] <= tol or time.process_time() > until:
            raise StopIteration

    options = {"maxiter": _STEPS, "maxfun": 2 * _STEPS, "ftol": 0.0, "gtol": 0.0, "maxcor": 20}
    start = np.zeros(given.shape[0] * given.shape[1])
    optimize.minimize(value, start, jac=True, method="L-BFGS-B", callback=enough, options=options)
    return Rival(found["w"], found["steps"])


def schur(problem: mj.Problem, tol: float, dtype: Any) -> Rival:
    """Least squares near the mean, by elimination."""
    given, d = Samples(problem, dtype), problem.data.num_features
    apart, shared, right, parts = given.within - given.common, np.eye(d, dtype=dtype), np.zeros(d, dtype), []
    for x, y, c in zip(given.x, given.y, given.c, strict=True):
        weighted = x * c[:, None]
        factor = linalg.cho_factor(x.T @ weighted + dtype(given.within) * np.eye(d, dtype=dtype), check_finite=False)
        sides = np.column_stack([weighted.T @ y, dtype(apart) * np.eye(d, dtype=dtype)])
        parts.append(linalg.cho_solve(factor, sides, check_finite=False))
        shared = shared - parts[-1][:, 1:] / dtype(given.shape[0])
        right = right + parts[-1][:, 0] / dtype(given.shape[0])
    mean = linalg.solve(shared, right, check_finite=False)
    return Rival(np.stack([part[:, 0] + part[:, 1:] @ mean for part in parts]), 1)


def fista(problem: mj.Problem, tol: float, dtype: Any) -> Rival:
    r"""For R of singular values s, $\lambda(\|s\|^2/\sigma^2 + (\sum s)^2)$, which is (14)."""
    of: Any = problem.regularizer
    given, lam = Samples(problem, dtype), float(of.lam)
    ridge, until = 2.0 * lam / float(of.sigma2), time.process_time() + _SECONDS

    def shrunk(s: np.ndarray, stiff: float) -> np.ndarray:
        least = np.max(np.cumsum(s) / (stiff + 2.0 * lam * np.arange(1, len(s) + 1)))
        return np.maximum(s - 2.0 * lam * least, 0.0) / stiff

    def value(s: np.ndarray) -> float:
        return float(0.5 * ridge * (s**2).sum() + lam * s.sum() ** 2)

    def gap(w: np.ndarray, s: np.ndarray) -> float:
        loss, gradient = given.losses(w)
        of_v = np.linalg.svd(gradient, compute_uv=False)
        best = shrunk(of_v, ridge)
        conjugate = float((of_v * best).sum()) - value(best)
        return (value(s) + conjugate + float((gradient * w).sum())) / abs(loss + value(s))

    v = np.ones(given.shape, dtype)
    for _ in range(30):  # the largest curvature of any task, by powers
        v = np.matmul(given.across, given.c[:, :, None] * np.matmul(given.x, v[:, :, None]))[:, :, 0]
        size = np.linalg.norm(v, axis=1, keepdims=True)
        v = v / np.maximum(size, 1e-30).astype(dtype)
    rho = 1.02 * float(size.max()) * (1.0 if given.squared else 0.25)
    w = ahead = np.zeros(given.shape, dtype)
    theta = 1.0
    for step in range(1, _STEPS + 1):
        left, s, right = np.linalg.svd(ahead - given.losses(ahead)[1] / dtype(rho), full_matrices=False)
        s = shrunk(rho * s, rho + ridge)
        new = ((left * s) @ right).astype(dtype)
        if ((ahead - new) * (new - w)).sum() > 0:
            theta = 1.0
        after = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * theta**2))
        ahead, theta, w = new + dtype((theta - 1.0) / after) * (new - w), after, new
        if step % 5 == 0 and (gap(w, s) <= tol or time.process_time() > until):
            break
    return Rival(w, step)


def liblinear(problem: mj.Problem, tol: float, dtype: Any) -> Rival:
    """Dual coordinate descent on all tasks at once, to the largest of its tolerances that will do."""
    data = problem.data
    if id(problem) not in _LIBLINEAR:
        given = Samples(problem, np.float64)
        off = (1.0 / given.common - 1.0 / given.within) / given.shape[0]
        task, row = np.nonzero(given.c)
        x = sparse.csr_matrix(given.x[task, row])
        own = sparse.coo_matrix(x)
        own = sparse.coo_matrix(
            (own.data * given.within**-0.5, (own.row, own.col + task[own.row] * x.shape[1])),
            shape=(len(task), given.shape[0] * x.shape[1]),
        )
        twice = sparse.hstack([x * off**0.5, own]).tocsr()
        best = mj.solve(problem, mj.InteriorPoint(), tol=1e-7, max_rounds=60)
        _LIBLINEAR[id(problem)] = given, off, twice, task, row, _hinge_dual(given, off, np.asarray(best.state.beta)), {}
    given, off, twice, task, row, bound, good = _LIBLINEAR[id(problem)]
    until = time.process_time() + _SECONDS
    for its in [good[tol]] if tol in good else 10.0 ** -np.arange(8):
        model = svm.LinearSVC(C=1.0, loss="hinge", fit_intercept=False, tol=its, max_iter=10**6)
        u = model.fit(twice, given.y[task, row], sample_weight=given.c[task, row]).coef_[0]
        d = given.shape[1]
        w = off**0.5 * u[:d] + given.within**-0.5 * u[d:].reshape(given.shape)
        primal = float(mj.objective(problem, jnp.asarray(w, data.dtype)))
        if (primal - bound) / primal <= tol or time.process_time() > until:
            break
    good[tol] = its
    return Rival(w, int(model.n_iter_), (primal - bound) / primal)


_LIBLINEAR: dict[int, tuple[Any, ...]] = {}  # what it needs of a problem, and the tolerances found


def _hinge_dual(given: Samples, off: float, beta: np.ndarray) -> float:
    """The dual objective of the hinge loss, in float64."""
    terms = given.c * beta
    v = np.einsum("mnd,mn->md", given.x, terms)
    return float((terms * given.y).sum() - 0.5 * ((v * v).sum() / given.within + off * (v.sum(0) ** 2).sum()))


def rivals_of(problem: mj.Problem) -> dict[str, Callable[..., Rival]]:
    """The plain solvers that are for a problem."""
    if problem.regularizer.learned:
        return {"FISTA": fista}
    if problem.loss.piecewise_linear:
        return {"liblinear": liblinear}
    return {"L-BFGS": lbfgs} | ({"Schur": schur} if isinstance(problem.loss, mj.losses.Squared) else {})


def ours_for(problem: mj.Problem) -> dict[str, mj.Algorithm[Any]]:
    """The library's methods that are for a problem."""
    if problem.regularizer.learned:
        return {"Mocha": mj.Mocha()}
    second = mj.InteriorPoint() if problem.loss.piecewise_linear else mj.Newton()
    return {"Mocha": mj.Mocha(), type(second).__name__: second}


def timed(work: Callable[[], Any]) -> tuple[np.ndarray, Any]:
    """Milliseconds, of the process's CPU time and on the clock, and the result."""
    time.sleep(_ASLEEP)
    began = np.array([time.process_time(), time.perf_counter()])
    result = jax.block_until_ready(work())
    return 1e3 * (np.array([time.process_time(), time.perf_counter()]) - began), result


def measured(name: str, problem: mj.Problem, tol: float) -> dict[str, Any]:
    """A row for a tolerance: everybody once, which compiles, then in turns."""
    dtype = np.float32 if tol > 1e-4 else np.float64
    work: dict[str, Callable[[], Any]] = {}
    for rival, way in rivals_of(problem).items():
        work[rival] = partial(way, problem, tol, dtype)
    for method, by in ours_for(problem).items():
        every = 5 if method == "Mocha" else 1
        work[method] = partial(mj.solve, problem, by, tol=tol, max_rounds=_ROUNDS, record_every=every)
    first, results = {}, {}
    for who, go in work.items():
        first[who], results[who] = timed(go)
    times: dict[str, list[np.ndarray]] = {who: [] for who in work}
    for _ in range(_TURNS):
        for who, go in work.items():
            if sum(each[0] for each in times[who]) < _ENOUGH:
                times[who].append(timed(go)[0])
    row: dict[str, Any] = {"row": name, "tol": tol}
    for who, result in results.items():
        weights = jnp.asarray(result.weights, problem.data.dtype)
        gap = result.relative_gap if isinstance(result, mj.Solution) else result.gap or _gap(problem, weights)
        steps = result.rounds if isinstance(result, mj.Solution) else result.steps
        ms, wall = np.median(times[who], axis=0).tolist()
        row[who] = {"ms": ms, "wall_ms": wall, "first_ms": float(first[who][0]), "steps": steps, "gap": gap}
    return row


def _gap(problem: mj.Problem, weights: jax.Array) -> float:
    """The relative gap that the library certifies of weights, with their own dual point."""
    z, y = problem.data.predictions(weights), problem.data.y
    beta = problem.loss.project(-problem.loss.derivative(z, y), y)
    found = mj.certificate(problem, beta, weights=weights)
    return float(found.relative_joint_gap if problem.regularizer.learned else found.relative_gap)


def problems(folder: Path, names: list[str]) -> Iterator[tuple[str, mj.Problem]]:
    """The rows whose file is there, features standardised over all tasks."""
    for name in names:
        file, loss, regularizer = ROWS[name]
        if not (folder / f"{file}.npz").exists():
            print(f"{file}.npz is not here: {name} is skipped")
            continue
        data = tasksets.load(folder / f"{file}.npz").data
        yield name, mj.Problem(data if file == "har" else data.standardized("pooled"), loss, regularizer)


def shown(row: dict[str, Any]) -> str:
    """A line for each solver, with what it takes beside the best plain one."""
    plain = {who: found for who, found in row.items() if who in ("L-BFGS", "Schur", "FISTA", "liblinear")}
    good = [found for found in plain.values() if found["gap"] <= 2.0 * row["tol"]]
    best, wall = (min((found[kind] for found in good), default=np.nan) for kind in ("ms", "wall_ms"))
    lines = []
    for who, found in row.items():
        if isinstance(found, dict):
            shares = f"{found['ms']:10.1f} {found['ms'] / best:8.2f} {found['wall_ms']:10.1f}"
            shares += f" {found['wall_ms'] / wall:8.2f}"
            lines.append(
                f"{row['row']:>26} {row['tol']:8.0e} {who:>13} {shares} {found['steps']:7d} {found['gap']:9.1e} "
                f"{found['first_ms']:10.0f}"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.rivals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the .npz files")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="NAME")
    parser.add_argument("--json", type=Path, help="save the numbers here")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; milliseconds, medians of up to {_TURNS}")
    of_time = ("CPU ms", 10), ("/ plain", 8), ("wall ms", 10), ("/ plain", 8)
    columns = ("problem", 26), ("tol", 8), ("solver", 13), *of_time, ("steps", 7), ("gap", 9), ("first ms", 10)
    print(" ".join(f"{name:>{width}}" for name, width in columns))
    found = []
    for name, problem in problems(options.data, options.rows):
        for tol in TOLERANCES:
            found.append(measured(name, problem, tol))
            print(shown(found[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"jax": jax.__version__, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
