"""Regularizers by name, each of one strength `lam`: those that need no matrix from a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from mocha_jax.regularizers._about_mean import MeanCovariance
from mocha_jax.regularizers._base import Regularizer
from mocha_jax.regularizers._clustered import Clustered
from mocha_jax.regularizers._known_relationship import Independent, MeanRegularized
from mocha_jax.regularizers._matrix_normal import MatrixNormal
from mocha_jax.regularizers._probabilistic import Probabilistic
from mocha_jax.regularizers._sparse_precision import SparsePrecision
from mocha_jax.regularizers._trace_and_joint_sparse import JointSparse, TraceNorm

# The strengths that cross-validation tries, the strongest first.
STRENGTHS = tuple(10.0**k for k in (1, 0, -1, -2, -3, -4))

# Groups of tasks that "clustered" looks for.
_CLUSTERS = 3


def _mean(lam: float, pull: float = 10.0) -> MeanRegularized:
    return MeanRegularized(lam1=pull * lam, lam2=lam)


def _probabilistic(lam: float, sigma2: float = 10.0) -> Probabilistic:
    return Probabilistic(lam, sigma2)


def _mean_covariance(lam: float, mean: float = 0.1, ridge: float = 0.5) -> MeanCovariance:
    # lam (ridge |U|^2 + (1 - ridge) |U|_*^2), and the mean by a share of lam.
    return MeanCovariance(mean * lam, (1.0 - ridge) * lam, (1.0 - ridge) / ridge if ridge else np.inf)


def _clustered(lam: float, eta: float = 0.5, num_tasks: int = 1) -> Clustered:
    return Clustered(lam, eta, min(_CLUSTERS, num_tasks))


def _matrix_normal(lam: float, floor: float = 0.1) -> MatrixNormal:
    return MatrixNormal(lam, 10.0, floor)


def _sparse_precision(lam: float, sparsity: float = 1.0) -> SparsePrecision:
    return SparsePrecision(lam, 10.0, 0.0, sparsity * lam)


def _trace(lam: float, ridge: float = 0.1) -> TraceNorm:
    return TraceNorm(lam, ridge * lam)


def _joint_sparse(lam: float, ridge: float = 0.1) -> JointSparse:
    return JointSparse(lam, ridge * lam)


class _Named(NamedTuple):
    make: Callable[..., Regularizer]
    tried: Mapping[str, tuple[float, ...]] = {}  # of numbers besides lam, by cross-validation


NAMED = {
    "independent": _Named(Independent),
    "pooled": _Named(Independent),
    "mean": _Named(_mean, {"pull": (100.0, 10.0, 1.0, 0.1)}),
    "probabilistic": _Named(_probabilistic, {"sigma2": (0.1, 1.0, 10.0, np.inf)}),
    "mean_covariance": _Named(_mean_covariance, {"mean": (0.01, 1.0), "ridge": (0.99, 0.5, 0.0)}),
    "clustered": _Named(_clustered, {"eta": (0.1, 1.0)}),
    "matrix_normal": _Named(_matrix_normal, {"floor": (1.0, 0.1, 0.01)}),
    "sparse_precision": _Named(_sparse_precision, {"sparsity": (10.0, 1.0, 0.1)}),
    "trace": _Named(_trace),
    "joint_sparse": _Named(_joint_sparse),
}


def maker(name: str, num_tasks: int) -> tuple[Callable[..., Regularizer], Mapping[str, tuple[float, ...]]]:
    """A function of lam that makes the regularizer of a name, and what cross-validation tries besides.

    Args:
      name: one of `NAMED`.
      num_tasks: of the data.
    """
    make, tried = NAMED[name]
    return partial(make, num_tasks=num_tasks) if name == "clustered" else make, tried
