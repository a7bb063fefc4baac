"""Ordinal regression: labels with an order, told apart by thresholds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, tree
from mocha_jax._numerics.math import saturating_ratio, total
from mocha_jax.losses._base import Loss, Piece


class Ordinal(Loss, in_kernel=True):
    r"""The all-threshold hinge loss of a label $y \in \{0, \dots, K-1\}$.

    A prediction z says how high a label is; it says more than k where it exceeds the threshold $\theta_k$. Every
    threshold is a question of its own, with the hinge as its loss:

    $$
    \ell(z, y) = \sum_{k=1}^{K-1} \max\bigl(0,\; 1 - s_k (z - \theta_k)\bigr),
    \qquad s_k = +1 \text{ where } y \ge k, \text{ else } -1 .
    $$

    So the loss grows with the number of levels that a prediction is off: it is at least their distance, which is what
    `metrics.absolute_error` averages. (The immediate-threshold loss asks for the label's two own thresholds only. It
    bounds whether a label is wrong, not by how much; and to it thresholds may come in any order.) It is the loss of
    support vector ordinal regression with implicit constraints (Chu and Keerthi 2007), of Rennie and Srebro 2005.

    $\ell$ has slopes from -y to K-1-y and a kink at every $\tau_k = \theta_k + s_k$. Hence
    $\beta \in [y-K+1, y]$, and with $r = y - \beta$ and the kinks in rising order

    $$
    \ell^*(-\beta) = -\sum_{k \le y} (1 + \theta_k) + \sum_j h_j\tau_{(j)}, \quad h_j = \mathrm{clip}(r - j + 1, 0, 1).
    $$

    The coordinate step is exact too: no root is sought. Not smooth; (K-1)-Lipschitz. The loss is convex in z and the
    thresholds together. These are given here: for all tasks, or with `PerTask` for each its own. To learn them with the
    weights see `multiclass.by_threshold`.

    Args:
      thresholds: $\theta_1 \le \dots \le \theta_{K-1}$; array leaves. For `PerTask` each may be an array
        ``[num_tasks]``.

    Examples:
      >>> import jax.numpy as jnp
      >>> loss = Ordinal([-1.0, 1.0])
      >>> loss.value(jnp.array([-3.0, 0.0, 3.0]), jnp.array([0.0, 1.0, 0.0])).tolist()  # right, near both, two off
      [0.0, 0.0, 8.0]
      >>> loss.decide(jnp.array([-3.0, 0.0, 3.0])).tolist()
      [0.0, 1.0, 2.0]

    References:
      - Chu and Keerthi, Support Vector Ordinal Regression, 2007.
      - Rennie and Srebro, Loss Functions for Preference Levels, 2005.
    """

    piecewise_linear: ClassVar[bool] = True

    thresholds: tuple[Hyperparameter, ...] = tree()

    def __init__(self, thresholds: Sequence[Hyperparameter] | Array | np.ndarray) -> None:
        parts: list[Any] = check.sequence("Ordinal", "thresholds", thresholds)
        if not parts:
            raise ValueError("Ordinal: thresholds is empty; pass one less than there are labels.")
        for part_of in parts if isinstance(thresholds, list | tuple) else [thresholds]:
            check.number("Ordinal", "thresholds", part_of)
        if len({np.shape(part) for part in parts}) > 1 or np.ndim(parts[0]) > 1:
            raise ValueError("Ordinal: thresholds must be numbers, or for PerTask arrays [num_tasks], one per task.")
        numbers = [check.concrete(part) for part in parts]
        for low, high in zip(numbers, numbers[1:], strict=False):
            if low is not None and high is not None and not np.all(low <= high):
                raise ValueError(f"Ordinal: thresholds must rise, got {check.shown(thresholds)}.")
        if any(part is not None and not np.all(np.isfinite(part)) for part in numbers):
            raise ValueError(f"Ordinal: thresholds must be finite, got {check.shown(thresholds)}.")
        object.__setattr__(self, "thresholds", tuple(parts))

    @property
    def levels(self) -> int:
        """The number of labels, K."""
        return len(self.thresholds) + 1

    @property
    def scored_by(self) -> str:  # type: ignore[override]
        return "absolute_error"

    @property
    def admissible(self) -> Array:
        theta = [jnp.asarray(t) for t in self.thresholds]
        ordered = [jnp.all(low <= high) for low, high in zip(theta, theta[1:], strict=False)]
        return jnp.all(jnp.stack([*ordered, *(jnp.all(jnp.isfinite(t)) for t in theta)]))

    @property
    def lipschitz(self) -> float:
        return float(self.levels - 1)

    @property
    def label_rule(self) -> str:
        return f"labels 0, 1, ..., {self.levels - 1}, one more than there are thresholds at most"

    def admits(self, y: Array) -> Array:
        return (y >= 0) & (y < self.levels) & (y == jnp.round(y))

    @property
    def decides(self) -> str:
        return "level"

    def decide(self, z: Array) -> Array:
        """The label that a prediction stands for: how many thresholds it exceeds."""
        return total((z > theta).astype(z.dtype) for theta in self.thresholds)

    def _kinks(self, y: Array) -> list[Array]:
        r"""$\tau_k = \theta_k + s_k$ of all thresholds."""
        return [
            jnp.asarray(theta) + jnp.where(y > k, jnp.ones_like(y), -1.0) for k, theta in enumerate(self.thresholds)
        ]

    def _ranks(self, y: Array) -> list[Array]:
        """Tell how many kinks are before each.

        The first y thresholds have kinks theta + 1, the others theta - 1. Before a kink are the earlier ones of its
        kind. Before a kink theta + 1 are also those theta - 1 that are not higher, before a kink theta - 1 those
        theta + 1 that are lower: as thresholds rise, of all thresholds the first ones pass such a test.
        """

        def count(tests: Iterable[ArrayLike]) -> Array:
            return total(jnp.asarray(passed).astype(y.dtype) for passed in tests)

        theta, ranks = self.thresholds, []
        for k, own in enumerate(theta):
            down, up = count(t - 1.0 <= own + 1.0 for t in theta), count(t + 1.0 < own - 1.0 for t in theta)
            ranks.append(jnp.where(y > k, k + jnp.maximum(down - y, 0.0), k - y + jnp.minimum(up, y)))
        return ranks

    def _passed(self, beta: Array, y: Array) -> list[Array]:
        """Tell how far each kink is passed at the point of this slope: h, from 0 to 1."""
        return [jnp.clip(y - beta - rank, 0.0, 1.0) for rank in self._ranks(y)]

    def value(self, z: Array, y: Array) -> Array:
        return total(jnp.maximum(jnp.where(y > k, kink - z, z - kink), 0.0) for k, kink in enumerate(self._kinks(y)))

    def derivative(self, z: Array, y: Array) -> Array:
        return total((z > kink).astype(z.dtype) for kink in self._kinks(y)) - y

    def conjugate(self, beta: Array, y: Array) -> Array:
        low, high = self.dual_bounds(y)
        inside = jnp.clip(beta, low, high)
        terms = [
            jnp.where(y > k, (h - 1.0) * kink, h * kink)
            for k, (h, kink) in enumerate(zip(self._passed(inside, y), self._kinks(y), strict=True))
        ]
        return jnp.where((beta >= low) & (beta <= high), total(terms), jnp.inf)

    def conjugate_bound(self, beta: Array, y: Array) -> Array:
        size = total(jnp.abs(kink) for kink in self._kinks(y))
        return super().conjugate_bound(beta, y) + 4.0 * self.levels * jnp.finfo(size.dtype).eps * size

    def dual_bounds(self, y: Array) -> tuple[Array, Array]:
        return y - (self.levels - 1), y

    def pieces(self, y: Array) -> list[Piece]:
        zero, one = jnp.zeros_like(y), jnp.ones_like(y)
        return [
            Piece(jnp.where(y > k, zero, -one), jnp.where(y > k, one, zero), kink)
            for k, kink in enumerate(self._kinks(y))
        ]

    def dual_step(self, beta: Array, g: Array, y: Array, kappa: Array) -> Array:
        # The new prediction is g + kappa (b - beta) with b = y - sum h; it passes the kinks from the left, each by as
        # much as it takes to stop there.
        stop = zip(self._kinks(y), self._ranks(y), strict=True)
        return y - total(
            jnp.clip(saturating_ratio(g - kink, kappa) + (y - beta - rank), 0.0, 1.0) for kink, rank in stop
        )

    def fenchel_young(self, z: Array, beta: Array, y: Array) -> Array:
        return total(
            h * jnp.maximum(kink - z, 0.0) + (1.0 - h) * jnp.maximum(z - kink, 0.0)
            for h, kink in zip(self._passed(beta, y), self._kinks(y), strict=True)
        )

    def fenchel_young_change(self, z: Array, before: Array, beta: Array, y: Array) -> Array:
        passed = zip(self._passed(before, y), self._passed(beta, y), self._kinks(y), strict=True)
        return total((new - old) * (kink - z) for old, new, kink in passed)

    def _shift(self, z: Array, beta: Array, y: Array) -> Array:
        return super()._shift(z, beta, y) + 4.0 * total(jnp.abs(jnp.asarray(theta)) for theta in self.thresholds)

    def _fenchel_young_rounding(self, z: Array, beta: Array, y: Array) -> Array:
        return 2.0 * self.levels * total(jnp.abs(kink - z) for kink in self._kinks(y))
