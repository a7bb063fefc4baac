r"""Kernels and other models that are linear in features: maps of samples, to be solved as any problem.

A model that is not linear in x is linear in features $\phi(x)$, and with these in place of x everything holds as it is:
duals, certificates, every algorithm. With a kernel $k(x, x') = \langle\phi(x), \phi(x')\rangle$ of the samples, tasks
are coupled by the product of the kernels of tasks and inputs (Bonilla et al. 2008), for
$w_t = \sum_{t'} \bar M_{tt'} \sum_i c_{t'i}\beta_{t'i}\phi(x_{t'i})$ predicts

$$
\langle w_t, \phi(x)\rangle = \sum_{t'}\sum_i \bar M_{tt'}\,k(x, x_{t'i})\, c_{t'i}\beta_{t'i},
$$

with $\bar M$ given or learned. Three ways to features:

- `RandomFourier`: of the Gaussian kernel, by chance, as few or as many as one likes.
- `Nystroem`: of any kernel, from some landmarks. **With all samples as landmarks it is the kernel method itself**, the
  dual on Gram matrices, certificate included: the representer theorem leaves nothing else for weights to be.
- `Body`: what a network has learned before its last layer; the tasks' own last layers (heads) are then the problem's.

A map is a record of arrays: it works under `jit`, `vmap` and `grad`. `transform` applies one to a data set, and new
samples are mapped in the same way before they are predicted.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check, domains
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Hyperparameter, PyTree, Pytree, tree
from mocha_jax._data.task_data import TaskData, size_of_intercept
from mocha_jax._numerics.math import EXACT, matmul
from mocha_jax.networks import Layer, Network

__all__ = [
    "Body",
    "FeatureMap",
    "GaussianKernel",
    "landmarks",
    "Nystroem",
    "RandomFourier",
    "transform",
]

Kernel = Callable[[Array, Array], Array]


def __dir__() -> list[str]:
    return __all__


class FeatureMap(Pytree):
    """Base class of maps from samples to features."""

    @abstractmethod
    def __call__(self, x: Array) -> Array:
        """Features of samples, ``[..., d]`` to ``[..., features]``."""


class GaussianKernel(Pytree):
    r"""The kernel $k(x, x') = \exp(-\gamma\|x - x'\|^2)$.

    Args:
      gamma: > 0; an array leaf.

    Examples:
      >>> import jax.numpy as jnp
      >>> [round(k, 3) for k in GaussianKernel(0.5)(jnp.array([[0.0], [2.0]]), jnp.array([[0.0]]))[:, 0].tolist()]
      [1.0, 0.135]
    """

    domains: ClassVar[Mapping[str, domains.Domain]] = {"gamma": domains.POSITIVE}

    gamma: Hyperparameter

    def __post_init__(self) -> None:
        domains.require(self, self.domains)

    def __call__(self, a: Array, b: Array) -> Array:
        """The kernel of samples ``[p, d]`` and ``[q, d]``, ``[p, q]``."""
        # From the middle of b, where squares of distances lose least to the squares of lengths.
        middle = jnp.mean(b, axis=0, keepdims=True)
        a, b = a - middle, b - middle
        lengths = jnp.sum(a**2, axis=1)[:, None] + jnp.sum(b**2, axis=1)[None]
        squared = jnp.maximum(lengths - 2.0 * matmul(a, b.T), 0.0)
        return jnp.exp(-jnp.asarray(self.gamma, squared.dtype) * squared)


class RandomFourier(FeatureMap):
    r"""Random features of the Gaussian kernel (Rahimi and Recht 2007).

    With directions $\omega_j \sim N(0, 2\gamma I)$, D/2 of them,

    $$
    \phi(x) = \sqrt{2/D}\,\bigl(\cos\omega_1^\top x, \dots, \sin\omega_1^\top x, \dots\bigr), \qquad
    \mathbb E\,\langle\phi(x), \phi(x')\rangle = e^{-\gamma\|x - x'\|^2} .
    $$

    For any two samples the standard deviation of the product is at most $1/\sqrt D$. All features have length 1.

    Args:
      key: a JAX random key; the key is consumed.
      num_inputs: d of the samples.
      num_features: D, even.
      gamma: of the kernel, > 0; an array leaf.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> phi = RandomFourier(jax.random.key(0), num_inputs=3, num_features=4000, gamma=0.5)
      >>> x = jnp.array([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
      >>> features = phi(x)
      >>> features.shape, bool(abs(features[0] @ features[1] - jnp.exp(-1.0)) < 0.05)
      ((2, 4000), True)
    """

    directions: Array = tree()  # [D/2, d] standard normal
    gamma: Hyperparameter

    def __init__(self, key: Array, num_inputs: int, num_features: int, gamma: Hyperparameter) -> None:
        check.key("RandomFourier", key)
        check.integer("RandomFourier", 1, num_inputs=num_inputs)
        check.integer("RandomFourier", 2, num_features=num_features)
        if num_features % 2:
            raise ValueError(f"RandomFourier: num_features must be even, got {num_features}.")
        check.scalar("RandomFourier", gamma=gamma)
        check.positive("RandomFourier", gamma=gamma)
        object.__setattr__(self, "directions", jax.random.normal(key, (num_features // 2, num_inputs)))
        object.__setattr__(self, "gamma", gamma)

    def replace(self, **changes: object) -> Self:
        return self.exchange(**changes)

    def __call__(self, x: Array) -> Array:
        x = _samples("RandomFourier", x, self.directions.shape[1])
        along = jnp.sqrt(2.0 * jnp.asarray(self.gamma, x.dtype)) * self.directions.astype(x.dtype)
        phase = jnp.einsum("...d,fd->...f", x, along, precision=EXACT)
        scale = math.sqrt(1.0 / len(self.directions))
        return scale * jnp.concatenate([jnp.cos(phase), jnp.sin(phase)], axis=-1)


class Nystroem(FeatureMap):
    r"""Features of a kernel from some landmarks $l_1, \dots, l_p$ (Williams and Seeger 2001).

    $$
    \phi(x) = K^{-1/2}\,\bigl(k(l_1, x), \dots, k(l_p, x)\bigr), \qquad K_{ij} = k(l_i, l_j)
    $$

    The product of features is the kernel where one of the two samples is a landmark, and otherwise that of their
    projections onto the landmarks: on the diagonal never more than the kernel. With all samples as landmarks
    (``landmarks(data)``) a problem in these features is the kernel's own, and its duals are those on the Gram matrix.
    Eigenvalues of K below p roundings of the largest are taken for 0. They are computed whenever the map is applied,
    in about 10 p^3 operations: apply it to many samples at once.

    Args:
      kernel: ``kernel(a, b)`` of samples ``[p, d]`` and ``[q, d]``, ``[p, q]``: a record such as `GaussianKernel`, or a
        function of yours.
      landmarks: ``[p, d]``, see `landmarks`.

    Examples:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[0.0], [1.0], [3.0]])
      >>> phi = Nystroem(GaussianKernel(0.5), landmarks=x)
      >>> bool(jnp.allclose(phi(x) @ phi(x).T, GaussianKernel(0.5)(x, x), atol=1e-5))
      True
    """

    kernel: Callable[[Array, Array], Array] = tree()
    landmarks: Array

    def __post_init__(self) -> None:
        check.function("Nystroem", "kernel", self.kernel, "features.GaussianKernel(0.5)")
        check.array("Nystroem", "landmarks", self.landmarks, ("p", "d"))

    def __call__(self, x: Array) -> Array:
        landmarks = jnp.asarray(self.landmarks)
        x = _samples("Nystroem", x, landmarks.shape[1])
        landmarks = landmarks.astype(x.dtype)
        values, vectors = jnp.linalg.eigh(self.kernel(landmarks, landmarks))
        kept = values > len(landmarks) * jnp.finfo(values.dtype).eps * values[-1]
        roots = jnp.where(kept, 1.0 / jnp.sqrt(jnp.where(kept, values, 1.0)), 0.0)
        flat = self.kernel(x.reshape(-1, x.shape[-1]), landmarks)
        root = matmul(vectors * roots[None], vectors.T)
        return matmul(flat, root).reshape(*x.shape[:-1], len(landmarks))


class Body(FeatureMap):
    """The activations of a network before its last layer.

    With these as features every task's own last layer, its head, is a convex problem: solved by `Mocha` with a learned
    covariance of tasks, and certified. Train the network by `FedAvg` first, or go back and forth.

    Args:
      network: `networks.MLP` or `networks.CNN`, or any whose parameters are a tuple of layers that ends in a dense one.
      params: its parameters, e.g. ``solution.weights``.

    Examples:
      >>> import jax, jax.numpy as jnp, mocha_jax as mj
      >>> network = mj.networks.MLP(4, 10, hidden=(7,))
      >>> params, x = network.init(jax.random.key(0)), jnp.ones((3, 4))
      >>> hidden = Body(network, params)(x)
      >>> hidden.shape, bool(jnp.allclose(hidden @ params[-1].w + params[-1].b, network.apply(params, x), atol=1e-6))
      ((3, 7), True)
    """

    network: Network
    params: PyTree = tree()

    def __post_init__(self) -> None:
        check.instance("Body", "network", self.network, Network, "networks.MLP(784, 10, hidden=(200,))")
        last = self.params[-1] if isinstance(self.params, tuple) and self.params else None
        if not isinstance(last, Layer) or jnp.ndim(last.w) != 2:
            raise ValueError(
                "Body: params must be a tuple of layers that ends in a dense one, as those of networks.MLP and CNN do."
            )

    def __call__(self, x: Array) -> Array:
        *body, last = self.params
        width = last.w.shape[0]
        # Outputs are what the last layer makes of the activations: one that leaves them as they are shows them.
        shown = Layer(jnp.eye(width, dtype=last.w.dtype), jnp.zeros(width, last.w.dtype))
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # networks assume it
            hidden = self.network.apply((*body, shown), x.reshape(-1, x.shape[-1]).astype(last.w.dtype))
        return hidden.reshape(*x.shape[:-1], width)


def _samples(owner: str, x: Array, width: int) -> Array:
    x = jnp.asarray(x)
    if x.ndim < 1 or x.shape[-1] != width:
        raise ValueError(f"{owner}: samples must have {width} features [..., {width}], got shape {x.shape}.")
    return x


@on_purpose
def landmarks(data: TaskData, count: int | None = None, key: Array | None = None) -> Array:
    """Samples of a federation, ``[count, d]``: all real ones, node by node, or some of them at random.

    Args:
      data: the samples.
      count: how many; default all.
      key: a JAX random key for the choice; default ``jax.random.key(0)``.
    """
    check.instance("landmarks", "data", data, TaskData, "pack_tasks(xs, ys)")
    weight = check.concrete(data.weight)
    if weight is None:
        raise ValueError("landmarks: how many samples are real is not known inside a transformation; choose before.")
    x = data.x[weight > 0].astype(data.dtype)
    if count is None:
        return x
    check.integer("landmarks", 1, len(x), count=count)
    key = jax.random.key(0) if key is None else key
    check.key("landmarks", key)
    return x[jax.random.choice(key, len(x), (count,), replace=False)]


@on_purpose
def transform(data: TaskData, feature_map: Callable[[Array], Array], *, intercept: bool | float = False) -> TaskData:
    """Map the samples of a federation: ``[m, n, d]`` to ``[m, n, features]``.

    Args:
      data: the samples.
      feature_map: one of the maps here, or any function of samples ``[m, n, d]``.
      intercept: append a constant, see `pack_tasks`.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> x = np.random.default_rng(0).normal(size=(2, 30, 2)).astype("f")
      >>> data = mj.pack_tasks(list(x), list(np.sign(x[..., 0] * x[..., 1])))  # no line tells these apart
      >>> phi = mj.features.Nystroem(mj.features.GaussianKernel(1.0), mj.features.landmarks(data))
      >>> problem = mj.Problem(mj.features.transform(data, phi), mj.losses.Hinge(), mj.regularizers.Independent(0.01))
      >>> solution = mj.solve(problem, tol=1e-2)
      >>> float(mj.metrics.error_rate(solution.weights, problem.data))
      0.0
    """
    check.instance("transform", "data", data, TaskData, "pack_tasks(xs, ys)")
    check.function("transform", "feature_map", feature_map, "features.Nystroem(kernel, landmarks)")
    intercept = size_of_intercept("transform", intercept)
    x = feature_map(data.x.astype(data.dtype))
    if x.shape[:2] != data.x.shape[:2] or x.ndim != 3:
        raise ValueError(
            f"transform: feature_map must make {[*data.x.shape[:2], 'features']} of {list(data.x.shape)}, got shape "
            f"{list(x.shape)}."
        )
    if intercept:
        x = jnp.concatenate([x, jnp.full((*x.shape[:2], 1), intercept, x.dtype)], axis=2)
    return data.replace(x=x, names=data.names.replace(features=None), intercept=intercept, scaling=None)
