"""Many small models by scikit-learn in a process pool: ``python -m benchmarks.card._sklearn_models KIND FROM TO``.

JAX is not imported here: the pool forks. It prints a record of JSON and writes the weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

KINDS = ("ridge", "logistic", "svm")
LAM = 0.1  # of lambda |w|^2, beside the mean of the losses


def estimator(kind: str, n: int) -> Any:
    """The same problem as scikit-learn writes it, for n samples."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.svm import LinearSVC

    c = 1.0 / (2.0 * LAM * n)
    made: dict[str, Callable[[], Any]] = {
        "ridge": lambda: Ridge(alpha=2.0 * LAM * n, fit_intercept=False),
        # of five solvers the quickest for a few samples
        "logistic": lambda: LogisticRegression(C=c, fit_intercept=False, solver="liblinear"),
        "svm": lambda: LinearSVC(C=c, loss="hinge", dual=True, fit_intercept=False),
    }
    return made[kind]()


def objectives(kind: str, x: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The objective of every model, in float64, ``[m]``."""
    x, y, w = (a.astype(np.float64) for a in (x, y, w))
    z = np.einsum("mnd,md->mn", x, w)
    losses = {
        "ridge": lambda: 0.5 * (z - y) ** 2,
        "logistic": lambda: np.logaddexp(0.0, -y * z),
        "svm": lambda: np.maximum(1.0 - y * z, 0.0),
    }[kind]()
    return losses.mean(1) + LAM * np.sum(w**2, axis=1)


def fit(kind: str, samples: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The weights of one model; of labels that are all the same, which scikit-learn refuses, none."""
    x, y = samples
    if kind != "ridge" and len(np.unique(y)) < 2:
        return np.zeros(x.shape[1])
    return np.ravel(estimator(kind, len(x)).fit(x, y).coef_)


def main() -> None:
    """Fit all models of a file."""
    kind, source, to = sys.argv[1:]
    try:
        import sklearn
    except ImportError:
        print(json.dumps({"absent": "scikit-learn is not installed here"}))
        return
    import warnings

    warnings.simplefilter("ignore")  # a model that stops early is one of the comparison
    file = np.load(source)
    x, y = (np.asarray(file[name], np.float64) for name in ("x", "y"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(cores, mp_context=get_context("fork")) as pool:
        list(pool.map(partial(fit, kind), zip(x[: 4 * cores], y[: 4 * cores], strict=True)))  # all of them have begun
        began = time.perf_counter()
        size = max(len(x) // (8 * cores), 1)
        weights = np.stack(list(pool.map(partial(fit, kind), zip(x, y, strict=True), chunksize=size)))
        seconds = time.perf_counter() - began
    np.savez(to, weights=weights)
    print(json.dumps({"seconds": seconds, "cores": cores, "scikit-learn": sklearn.__version__}))


if __name__ == "__main__":
    main()
