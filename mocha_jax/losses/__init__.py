"""Convex losses: value, conjugate, exact dual coordinate step, smoothness, Lipschitz constant.

========================  ==================================  =========  =========
loss                      l(z, y)                             1/mu       L
========================  ==================================  =========  =========
`Hinge`                   max(0, 1 - yz)                      --         1
`SmoothedHinge`           hinge, rounded over gamma           1/gamma    1
`SquaredHinge`            max(0, 1 - yz)^2                    2          --
`Logistic`                log(1 + exp(-yz))                   1/4        1
`Squared`                 (z - y)^2 / 2                       1          --
`Absolute`                |z - y|                             --         1
`EpsilonInsensitive`      max(|z - y| - epsilon, 0)           --         1
`Huber`                   (z - y)^2 / 2, linear from delta    1          delta
`Quantile`                pinball loss of level tau           --         max(tau, 1-tau)
`Ordinal`                 all thresholds' hinges              --         K - 1
`from_scalar`             any convex function                 given      given
`PerTask`                 every task's own                    largest    largest
========================  ==================================  =========  =========

It may import `_core` and `_numerics`.
"""

from mocha_jax.losses._base import Loss as Loss
from mocha_jax.losses._base import MarginLoss as MarginLoss
from mocha_jax.losses._base import Piece as Piece
from mocha_jax.losses._base import ResidualLoss as ResidualLoss
from mocha_jax.losses._margin import Hinge as Hinge
from mocha_jax.losses._margin import Logistic as Logistic
from mocha_jax.losses._margin import SmoothedHinge as SmoothedHinge
from mocha_jax.losses._margin import SquaredHinge as SquaredHinge
from mocha_jax.losses._ordinal import Ordinal as Ordinal
from mocha_jax.losses._per_task import PerTask as PerTask
from mocha_jax.losses._residual import Absolute as Absolute
from mocha_jax.losses._residual import EpsilonInsensitive as EpsilonInsensitive
from mocha_jax.losses._residual import Huber as Huber
from mocha_jax.losses._residual import Quantile as Quantile
from mocha_jax.losses._residual import Squared as Squared
from mocha_jax.losses._scalar import from_scalar as from_scalar

__all__ = [
    "Absolute",
    "EpsilonInsensitive",
    "from_scalar",
    "Hinge",
    "Huber",
    "Logistic",
    "Loss",
    "MarginLoss",
    "Ordinal",
    "PerTask",
    "Piece",
    "Quantile",
    "ResidualLoss",
    "SmoothedHinge",
    "Squared",
    "SquaredHinge",
]


def __dir__() -> list[str]:
    return __all__
