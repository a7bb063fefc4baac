r"""Couplings of tasks: the operator $\bar M$ of a regularizer.

For a given $\Omega$ the convex models' regularizers are quadratic in the tasks,
$R(W) = \tfrac12 \mathrm{tr}(W^\top A W)$ with the task axis first, W ``[m, d]``. Then
$R^*(V) = \tfrac12\langle V, \bar M V\rangle$ with $\bar M = A^{-1}$ and
$W = \nabla R^*(V) = \bar M V$. A solver needs no more of a regularizer than this operator.

It may import `_core`, `_numerics` and `spectral`.
"""

from mocha_jax.coupling._base import SIGMA_PRIME_RULES as SIGMA_PRIME_RULES
from mocha_jax.coupling._base import Coupling as Coupling
from mocha_jax.coupling._base import Curvature as Curvature
from mocha_jax.coupling._base import Operator as Operator
from mocha_jax.coupling._base import OwnSystems as OwnSystems
from mocha_jax.coupling._base import Parts as Parts
from mocha_jax.coupling._base import as_matrix as as_matrix
from mocha_jax.coupling._base import correlation as correlation
from mocha_jax.coupling._low_rank import AboutMean as AboutMean
from mocha_jax.coupling._low_rank import LowRank as LowRank
from mocha_jax.coupling._simple import Dense as Dense
from mocha_jax.coupling._simple import Diagonal as Diagonal
from mocha_jax.coupling._simple import Exchangeable as Exchangeable
from mocha_jax.coupling._simple import FeatureDiagonal as FeatureDiagonal
from mocha_jax.coupling._simple import Scaled as Scaled

__all__ = [
    "AboutMean",
    "as_matrix",
    "correlation",
    "Coupling",
    "Curvature",
    "Dense",
    "Diagonal",
    "Exchangeable",
    "LowRank",
    "Operator",
    "OwnSystems",
    "Parts",
    "FeatureDiagonal",
    "SIGMA_PRIME_RULES",
    "Scaled",
]


def __dir__() -> list[str]:
    return __all__
