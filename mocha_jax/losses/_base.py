"""The contract of losses: a value, its conjugate and one exact coordinate step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import domains
from mocha_jax._core.pytree import Hyperparameter, Pytree


class Piece(Pytree):
    r"""A function of predictions with one kink: $-\beta(z - k)$ with the larger one of two slopes $-\beta$."""

    low: Array  # of two numbers beta the smaller one: the slope beyond the kink is -low
    high: Array  # minus the slope before it
    kink: Array  # k


class Loss(Pytree):
    r"""A convex loss $\ell(z, y)$ of a prediction z and a label y.

    All methods work elementwise on arrays. The dual variable $\beta$ of a sample
    enters through $\ell^*(-\beta)$; at the optimum
    $-\beta \in \partial \ell(z)$.
    """

    binary: ClassVar[bool] = False  # True: labels must be -1 or +1
    scored_by: ClassVar[str] = "mean_loss"  # the function of `metrics` by which `cross_validate` compares its models
    quadratic: ClassVar[bool] = False  # True: the second derivative is constant
    piecewise_linear: ClassVar[bool] = False  # True: it is the sum of its `pieces`
    log_odds: ClassVar[bool] = False  # True: a prediction is the logarithm of the odds of label 1
    in_kernel: ClassVar[bool] = False  # True: a kernel may hold `dual_step`, see `__init_subclass__`
    domains: ClassVar[Mapping[str, domains.Domain]] = {}  # where its numbers must lie

    def __init_subclass__(cls, *, in_kernel: bool = False, **kwargs: object) -> None:
        """Say whether the kernels for GPUs and TPUs may hold the coordinate step.

        That is so where `dual_step` is arithmetic that they know, and hyperparameters are scalars. It is not inherited,
        for a subclass may override anything: ``class Mine(Hinge, in_kernel=True)`` declares it again.
        """
        super().__init_subclass__(**kwargs)
        if "in_kernel" not in vars(cls):
            cls.in_kernel = in_kernel

    def __post_init__(self) -> None:
        domains.require(self, self.domains)

    @property
    def admissible(self) -> Array:
        """True if the loss's hyperparameters lie in their domains, [] bool; it works for traced values too."""
        return domains.contain(self, self.domains)

    @property
    def smoothness(self) -> Hyperparameter | None:
        r"""$1/\mu$, the Lipschitz constant of the derivative, or None."""
        return None

    @property
    def mu(self) -> Hyperparameter:
        r"""Strong convexity $\mu$ of the conjugate: ``1 / smoothness``, 0 if not smooth."""
        return 0.0 if self.smoothness is None else 1.0 / self.smoothness

    @property
    def lipschitz(self) -> Hyperparameter | None:
        """Lipschitz constant L of the loss, or None."""
        return None

    @abstractmethod
    def value(self, z: Array, y: Array) -> Array:
        r"""$\ell(z, y)$."""

    @abstractmethod
    def derivative(self, z: Array, y: Array) -> Array:
        r"""A subgradient $\ell'(z, y)$."""

    @abstractmethod
    def conjugate(self, beta: Array, y: Array) -> Array:
        r"""$\ell^*(-\beta, y)$; infinite where `beta` is not dual feasible."""

    @abstractmethod
    def dual_bounds(self, y: Array) -> tuple[Array, Array]:
        r"""The interval of dual feasible $\beta$ (ends may be infinite)."""

    def pieces(self, y: Array) -> Sequence[Piece]:
        """Divide a loss that is `piecewise_linear` into functions with one kink, for `InteriorPoint`.

        Default: one, with its kink at z = y.
        """
        return [Piece(*self.dual_bounds(y), y)]

    @abstractmethod
    def dual_step(self, beta: Array, g: Array, y: Array, kappa: Array) -> Array:
        r"""The exact minimiser of one coordinate of the dual, as the *new* $\beta$.

        $$
        \arg\min_b\; \ell^*(-b) + (b - \beta)\,g + \tfrac{\kappa}{2}(b-\beta)^2
        $$

        `g` is the current prediction and ``kappa >= 0`` the curvature; zero curvature (a
        zero row) is allowed. The result is dual feasible to the last bit.
        """

    def fenchel_young(self, z: Array, beta: Array, y: Array) -> Array:
        r"""$\ell(z) + \ell^*(-\beta) + z\beta \ge 0$, one sample's share of the gap.

        The losses here compute it as a product or a sum of non-negative numbers, so that
        no cancellation can make it negative or drown it in rounding.
        """
        return jnp.maximum(self.value(z, y) + self.conjugate(beta, y) + z * beta, 0.0)

    def conjugate_bound(self, beta: Array, y: Array) -> Array:
        """An upper bound on `conjugate` that allows for rounding."""
        conjugate = self.conjugate(beta, y)
        # One of its parts is at most a dual times a label or 1, and so is the other up to their sum.
        parts = jnp.abs(conjugate) + 2.0 * jnp.abs(beta) * (1.0 + jnp.abs(y))
        return conjugate + 8.0 * jnp.finfo(conjugate.dtype).eps * parts

    def fenchel_young_bound(self, z: Array, error: Array, beta: Array, y: Array) -> Array:
        """An upper bound on `fenchel_young` at all points within `error` of z that allows for rounding.

        The term is convex in z, so that it is largest at one end.
        """
        ends = self.ends(z, error, beta, y)
        largest = jnp.maximum(*(self.fenchel_young(end, beta, y) for end in ends))
        eps = jnp.finfo(largest.dtype).eps
        lost = jnp.maximum(*(self._fenchel_young_rounding(end, beta, y) for end in ends))
        return largest * (1.0 + 32.0 * eps) + eps * lost

    def ends(self, z: Array, error: Array, beta: Array, y: Array) -> tuple[Array, Array]:
        """The ends of the interval around z, moved out by what rounding does inside of the methods here."""
        eps = jnp.finfo(z.dtype).eps
        error = error + eps * self._shift(z, beta, y)
        error = (1.0 + 4.0 * eps) * (error + 0.5 * eps * (jnp.abs(z) + error))  # to round the ends themselves
        return z - error, z + error

    def _shift(self, z: Array, beta: Array, y: Array) -> Array:
        """Bound, in roundings, the move of z that has the effect of rounding inside of the methods."""
        return 4.0 * (1.0 + jnp.abs(z) + jnp.abs(y) + jnp.abs(beta))

    def _fenchel_young_rounding(self, z: Array, beta: Array, y: Array) -> Array:
        """Bound the rounding of `fenchel_young`, in roundings, besides a few of its own size."""
        return 8.0 * (jnp.abs(self.value(z, y)) + jnp.abs(self.conjugate(beta, y)) + jnp.abs(z * beta))

    def fenchel_young_change(self, z: Array, before: Array, beta: Array, y: Array) -> Array:
        """`fenchel_young` at `beta` minus that at `before`, both feasible, with small changes of small duals intact."""
        return self.fenchel_young(z, beta, y) - self.fenchel_young(z, before, y)

    def project(self, beta: Array, y: Array) -> Array:
        """The dual feasible point nearest to `beta`."""
        return jnp.clip(beta, *self.dual_bounds(y))

    @property
    def decides(self) -> str:
        """Name the rule that turns predictions into labels, for saved models.

        ``"value"``, itself; ``"sign"``; or ``"level"``, how many `thresholds` it exceeds, which the loss then has.
        """
        return "sign" if self.binary else "value"

    def decide(self, z: Array) -> Array:
        """The label that a prediction stands for. Default: the prediction, of two classes its sign."""
        return jnp.sign(z) if self.binary else z

    @property
    def label_rule(self) -> str:
        """Describe the labels that it accepts, as the end of a sentence; empty if it accepts all."""
        sign = "labels -1 and +1; map yours, e.g. with np.where(y == positive_class, 1, -1)"
        return sign if self.binary else ""

    def admits(self, y: Array) -> Array:
        """True where a label is acceptable, bool."""
        return abs(y) == 1 if self.binary else jnp.ones_like(y, bool)

    def of_nodes(self, task: Array) -> Loss:
        """The loss of nodes that work on these tasks ``[m]``: what differs between them is an array ``[m, 1]``."""
        del task
        return self

    def of_task(self, task: int) -> Loss:
        """The loss of one task."""
        del task
        return self

    def check_tasks(self, num_tasks: int) -> None:
        """Raise where it is not a loss for so many tasks: unless it says otherwise its hyperparameters are numbers."""
        del num_tasks
        name = type(self).__name__
        for path, leaf in jax.tree_util.tree_leaves_with_path(self):
            if jnp.ndim(leaf):
                field = jax.tree_util.keystr(path).lstrip(".")
                raise ValueError(
                    f"{name}: {field} must be a single number, got shape {jnp.shape(leaf)}; for one per task write "
                    f"losses.PerTask({name}(...)), to solve for several map over them with jax.vmap."
                )


class MarginLoss(Loss):
    r"""A loss $\varphi(yz)$ of the margin; labels are -1 and +1.

    With $a = y\beta$ and $p = yz$ everything is free of the label.
    """

    binary: ClassVar[bool] = True
    scored_by: ClassVar[str] = "error_rate"

    def value(self, z: Array, y: Array) -> Array:
        return self.phi(y * z)

    def derivative(self, z: Array, y: Array) -> Array:
        return y * self.phi_slope(y * z)

    def conjugate(self, beta: Array, y: Array) -> Array:
        a = y * beta
        low, high = self.phi_bounds()
        return jnp.where((a >= low) & (a <= high), self.phi_conjugate(jnp.clip(a, low, high)), jnp.inf)

    def dual_bounds(self, y: Array) -> tuple[Array, Array]:
        low, high = self.phi_bounds()
        return jnp.where(y > 0, low, -high), jnp.where(y > 0, high, -low)

    def dual_step(self, beta: Array, g: Array, y: Array, kappa: Array) -> Array:
        return y * self.phi_step(y * beta, y * g, kappa)

    def fenchel_young(self, z: Array, beta: Array, y: Array) -> Array:
        return self.phi_fenchel_young(y * z, y * beta)

    def _shift(self, z: Array, beta: Array, y: Array) -> Array:
        return jnp.abs(1.0 - y * z)

    def _fenchel_young_rounding(self, z: Array, beta: Array, y: Array) -> Array:
        return jnp.zeros_like(z)  # a sum of products without cancellation

    def fenchel_young_change(self, z: Array, before: Array, beta: Array, y: Array) -> Array:
        return self.phi_change(y * z, y * before, y * beta)

    def phi_change(self, p: Array, before: Array, a: Array) -> Array:
        return self.phi_fenchel_young(p, a) - self.phi_fenchel_young(p, before)

    def phi_bounds(self) -> tuple[float, float]:
        """The interval of feasible a. Default: 0 to 1."""
        return 0.0, 1.0

    @abstractmethod
    def phi(self, p: Array) -> Array:
        r"""$\varphi(p)$."""

    @abstractmethod
    def phi_slope(self, p: Array) -> Array:
        r"""A subgradient $\varphi'(p)$."""

    @abstractmethod
    def phi_conjugate(self, a: Array) -> Array:
        r"""$\varphi^*(-a)$ for feasible a."""

    @abstractmethod
    def phi_step(self, a: Array, p: Array, kappa: Array) -> Array:
        r"""The new a: $\arg\min_b \varphi^*(-b) + (b - a)p + \kappa(b - a)^2/2$."""

    @abstractmethod
    def phi_fenchel_young(self, p: Array, a: Array) -> Array:
        r"""$\varphi(p) + \varphi^*(-a) + pa \ge 0$, as a product or sum without cancellation."""


class ResidualLoss(Loss):
    r"""A loss $\varphi(z - y)$ of the residual e = z - y; labels are any reals.

    $\ell^*(-\beta) = h(\beta) - \beta y$ with $h(\beta) = \varphi^*(-\beta)$.
    """

    def value(self, z: Array, y: Array) -> Array:
        return self.phi(z - y)

    def derivative(self, z: Array, y: Array) -> Array:
        return self.phi_slope(z - y)

    def conjugate(self, beta: Array, y: Array) -> Array:
        low, high = self.dual_bounds(y)
        inside = (beta >= low) & (beta <= high)
        return jnp.where(inside, self.phi_conjugate(jnp.clip(beta, low, high)) - beta * y, jnp.inf)

    def dual_bounds(self, y: Array) -> tuple[Array, Array]:
        low, high = self.phi_bounds()
        return jnp.full_like(y, low), jnp.full_like(y, high)

    def dual_step(self, beta: Array, g: Array, y: Array, kappa: Array) -> Array:
        return self.phi_step(beta, g - y, kappa)

    def fenchel_young(self, z: Array, beta: Array, y: Array) -> Array:
        return self.phi_fenchel_young(z - y, beta)

    def _shift(self, z: Array, beta: Array, y: Array) -> Array:
        return jnp.abs(z - y)

    def _fenchel_young_rounding(self, z: Array, beta: Array, y: Array) -> Array:
        return jnp.zeros_like(z)  # a sum of products without cancellation

    def fenchel_young_change(self, z: Array, before: Array, beta: Array, y: Array) -> Array:
        return self.phi_change(z - y, before, beta)

    def phi_change(self, e: Array, before: Array, beta: Array) -> Array:
        return self.phi_fenchel_young(e, beta) - self.phi_fenchel_young(e, before)

    @abstractmethod
    def phi_bounds(self) -> tuple[Hyperparameter, Hyperparameter]:
        r"""The interval of feasible $\beta$."""

    @abstractmethod
    def phi(self, e: Array) -> Array:
        r"""$\varphi(e)$."""

    @abstractmethod
    def phi_slope(self, e: Array) -> Array:
        r"""A subgradient $\varphi'(e)$."""

    @abstractmethod
    def phi_conjugate(self, beta: Array) -> Array:
        r"""$\varphi^*(-\beta)$ for feasible $\beta$."""

    @abstractmethod
    def phi_step(self, beta: Array, e: Array, kappa: Array) -> Array:
        r"""The new $\beta$: $\arg\min_b \varphi^*(-b) + (b - \beta)e + \kappa(b - \beta)^2/2$."""

    @abstractmethod
    def phi_fenchel_young(self, e: Array, beta: Array) -> Array:
        r"""$\varphi(e) + \varphi^*(-\beta) + e\beta \ge 0$, as a product or sum without cancellation."""
