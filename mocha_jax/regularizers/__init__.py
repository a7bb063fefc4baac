"""Regularizers R(W, Omega), as the paper writes them: no hidden factor 1/2.

======================  ================================================  =====================================
regularizer             R(W, Omega)                                       Omega
======================  ================================================  =====================================
`Independent`           lam |W|^2                                         none: tasks on their own
`MeanRegularized` (11)  lam1 sum_t |w_t - mean|^2 + lam2 |W|^2            given
`Graph` (2)             lam1 tr(W' Omega W) + lam2 |W|^2                  given
`PerFeature`            one of these three, of W diag(f)^(1/2)            given
`Clustered` (12)        lam tr(W' inv(eta I + Omega) W)                   learned: 0 <= Omega <= I, trace k
`Probabilistic` (14)    lam (|W|^2 / sigma2 + tr(W' inv(Omega) W))        learned: Omega >= 0, trace 1
`MeanCovariance`        lam0 m |mean|^2 + lam (|U|^2 / sigma2             learned: Omega >= 0, trace 1,
                        + tr(U' inv(Omega) U)), U = W - mean              of deviations from the mean
`MatrixNormal` (13)     lam (|W|^2 / sigma2 + tr(W' inv(Omega) W)         learned: Omega >= floor I
                        + d log|Omega|)
`SparsePrecision` (15)  lam (|W|^2 / sigma2 + tr(W' Omega W)              learned: a precision matrix,
                        - d log|Omega|) + lam1 |W|_1 + lam2 |Omega|_1     sparse
`TraceNorm`             lam/2 (tr(W' inv(Omega) W) + tr Omega)            learned: Omega >= 0, of low rank
                        + lam2 |W|^2
`JointSparse`           lam/2 sum_j (|W_j|^2 / g_j + g_j) + lam2 |W|^2    none; scales g of features are learned
======================  ================================================  =====================================

Weights are ``[m, d]``, the task axis first. Every hyperparameter is an array leaf: it may be
traced, mapped over and differentiated.

It may import `_core`, `_numerics`, `spectral` and `coupling`.
"""

from mocha_jax.regularizers._about_mean import DeviationsLearned as DeviationsLearned
from mocha_jax.regularizers._about_mean import MeanCovariance as MeanCovariance
from mocha_jax.regularizers._base import Learned as Learned
from mocha_jax.regularizers._base import OptimalityConditions as OptimalityConditions
from mocha_jax.regularizers._base import Regularizer as Regularizer
from mocha_jax.regularizers._clustered import Clustered as Clustered
from mocha_jax.regularizers._known_relationship import Graph as Graph
from mocha_jax.regularizers._known_relationship import Independent as Independent
from mocha_jax.regularizers._known_relationship import MeanRegularized as MeanRegularized
from mocha_jax.regularizers._matrix_normal import MatrixNormal as MatrixNormal
from mocha_jax.regularizers._per_feature import PerFeature as PerFeature
from mocha_jax.regularizers._probabilistic import Probabilistic as Probabilistic
from mocha_jax.regularizers._singular_values import Spectral as Spectral
from mocha_jax.regularizers._singular_values import TraceLimited as TraceLimited
from mocha_jax.regularizers._sparse_precision import SparsePrecision as SparsePrecision
from mocha_jax.regularizers._trace_and_joint_sparse import JointSparse as JointSparse
from mocha_jax.regularizers._trace_and_joint_sparse import TraceNorm as TraceNorm

__all__ = [
    "Clustered",
    "DeviationsLearned",
    "Graph",
    "Independent",
    "JointSparse",
    "Learned",
    "MatrixNormal",
    "MeanCovariance",
    "MeanRegularized",
    "OptimalityConditions",
    "PerFeature",
    "Probabilistic",
    "Regularizer",
    "SparsePrecision",
    "Spectral",
    "TraceLimited",
    "TraceNorm",
]


def __dir__() -> list[str]:
    return __all__
