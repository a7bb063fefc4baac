"""A factor for every feature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check, domains
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax.coupling import Scaled
from mocha_jax.regularizers._base import Regularizer, rounded, twice_rounded


class PerFeature(Regularizer):
    r"""$R(W\,\mathrm{diag}(f)^{1/2})$: the numbers of a regularizer R times a factor $f_j$ for every feature.

    With `Independent` it is $\sum_{t,j}\lambda_t f_j w_{tj}^2$, with `MeanRegularized` every feature has a
    $\lambda_1$ and a $\lambda_2$. A learned relationship is one of all features together, to which they cannot
    belong with factors of their own: divide each feature of the samples by the root of its factor instead.

    Args:
      regularizer: R, of a relationship that is given.
      factor: $f > 0$ ``[d]``, the intercept among the features where there is one.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mocha_jax.regularizers import Independent
      >>> r = PerFeature(Independent(0.5), jnp.array([1.0, 1.0, 4.0]))
      >>> float(r.value(jnp.ones((2, 3))))  # 2 * 0.5 * (1 + 1 + 4)
      6.0
    """

    domains: ClassVar[Mapping[str, domains.Domain]] = {"factor": domains.POSITIVE}

    regularizer: Regularizer
    factor: Hyperparameter

    def __post_init__(self) -> None:
        check.instance("PerFeature", "regularizer", self.regularizer, Regularizer, "regularizers.Independent(0.1)")
        if self.regularizer.learned:
            raise ValueError(
                f"PerFeature: {type(self.regularizer).__name__} learns its relationship, which all features share; "
                f"divide each feature of the samples by the root of its factor instead."
            )
        check.array("PerFeature", "factor", self.factor, ("d",))
        super().__post_init__()

    @property
    def separate(self) -> bool:  # type: ignore[override]
        return self.regularizer.separate

    @property
    def admissible(self) -> Array:
        return super().admissible & self.regularizer.admissible

    def fits(self, num_tasks: int) -> Array | bool:
        return self.regularizer.fits(num_tasks)

    @property
    def _root(self) -> Array:
        """The root of the factors ``[1, d]``."""
        return jnp.sqrt(jnp.asarray(self.factor))[None, :]

    def value(self, weights: Array, relation: None = None) -> Array:
        return self.regularizer.value(self._root * weights)

    def bracket(self, v: Array, error: Array, weights: Array, relation: None = None) -> Array:
        # As the norm that its root is: of what is seen, and of what rounding made of the scaled weights.
        implied, scaled = v / self._root, self._root * weights
        error = error / self._root + rounded(implied, 4.0)
        seen = self.regularizer.bracket(implied, error, scaled)
        return twice_rounded((jnp.sqrt(seen) + jnp.sqrt(self._of_rounding(scaled))) ** 2)

    def value_error(self, weights: Array, relation: None = None) -> Array:
        scaled = self._root * weights
        lost = self._of_rounding(scaled)
        moved = 2.0 * jnp.sqrt(self.regularizer.value(scaled) * lost) + lost
        return self.regularizer.value_error(scaled) + moved

    def _of_rounding(self, scaled: Array) -> Array:
        """Bound R of what rounding may have added to scaled weights."""
        return 0.5 * self.regularizer.curvatures(len(scaled))[0] * jnp.sum(rounded(scaled, 4.0) ** 2)

    def curvatures(self, num_tasks: int, relation: None = None) -> tuple[Array, Array]:
        steep, flat = self.regularizer.curvatures(num_tasks)
        factor = jnp.asarray(self.factor)
        return steep * jnp.max(factor), flat / jnp.min(factor)

    def typical_curvature(self, num_tasks: int, num_features: int) -> Array:
        return self.regularizer.typical_curvature(num_tasks, num_features) * jnp.mean(1.0 / jnp.asarray(self.factor))

    def conjugate_bound(self, norm: Array, num_tasks: int, num_features: int) -> Array:
        return self.regularizer.conjugate_bound(norm / jnp.min(self._root), num_tasks, num_features)

    def strong_convexity(self, num_tasks: int) -> Array | None:
        inverse = self.regularizer.strong_convexity(num_tasks)
        return None if inverse is None else inverse / jnp.min(jnp.asarray(self.factor))

    def coupling(self, num_tasks: int, relation: None = None) -> Scaled:
        return Scaled(self.regularizer.coupling(num_tasks), 1.0 / self._root[0])

    def relationship(self, num_tasks: int, relation: None = None) -> Array:
        return self.regularizer.relationship(num_tasks)

    def covariance(self, num_tasks: int, relation: None = None) -> Array:
        return self.regularizer.covariance(num_tasks)

    def check_tasks(self, num_tasks: int) -> None:
        self.regularizer.check_tasks(num_tasks)

    def check_features(self, num_features: int) -> None:
        self.regularizer.check_features(num_features)
        if jnp.shape(self.factor) != (num_features,):
            raise ValueError(
                f"PerFeature: factor must be one number per feature [{num_features}], the intercept among them, got "
                f"shape {jnp.shape(self.factor)}."
            )
