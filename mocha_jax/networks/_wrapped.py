"""Networks made of other networks: with a part of every client's own, and averages of several."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import PyTree, static, summary
from mocha_jax.networks._base import Network, Params
from mocha_jax.networks._dense_layers import SplitParameters


class Parted(Network):
    """A network with some of its parameters private: `SplitParameters` of the others and of these.

    Args:
      network: any, with parameters that are not `SplitParameters` yet.
      private: paths of the private parameters, or beginnings of paths, such as ``"2"`` or ``"head/w"``; a step of a
        path is the name of a field or key, or a place. Default: the last entry of the parameters, the last layer of
        the library's networks.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> model = mj.networks.Parted(mj.networks.MLP(5, 3, (4,)))
      >>> params = model.init(jax.random.key(0))
      >>> params.shared[0].w.shape, params.shared[1].w, params.private[1].w.shape
      ((5, 4), None, (4, 3))
    """

    network: Network
    private: tuple[str, ...] | None = static(default=None)

    def __post_init__(self) -> None:
        check.instance("Parted", "network", self.network, Network, "networks.MLP(784, 10)")
        if self.private is None:
            object.__setattr__(self, "private", (paths(self.network)[-1].partition("/")[0],))
        if not isinstance(self.private, tuple) or not all(isinstance(path, str) for path in self.private):
            raise ValueError(f"Parted: private must be paths, such as ('1',); got {check.shown(self.private)}.")
        all_paths = paths(self.network)
        marks = [self._is_private(path) for path in all_paths]
        if unknown := [p for p in self.private if not any(_begins(path, p) for path in all_paths)]:
            raise ValueError(f"Parted: private has {unknown[0]!r}, and the parameters are {', '.join(all_paths)}.")
        if all(marks):
            raise ValueError(f"Parted: private must leave a parameter to be shared; they are {', '.join(all_paths)}.")

    def _is_private(self, path: str) -> bool:
        return any(_begins(path, beginning) for beginning in self.private or ())

    def init(self, key: Array) -> SplitParameters:
        leaves, structure = jax.tree_util.tree_flatten_with_path(self.network.init(key))
        marks = [self._is_private(_path(path)) for path, _ in leaves]
        shared = [None if mark else leaf for (_, leaf), mark in zip(leaves, marks, strict=True)]
        private = [leaf if mark else None for (_, leaf), mark in zip(leaves, marks, strict=True)]
        return SplitParameters(*(jax.tree.unflatten(structure, part) for part in (shared, private)))

    def apply(self, params: SplitParameters, x: Array, key: Array | None = None) -> Array:
        def either(shared: Array | None, private: Array | None) -> Array | None:
            return private if shared is None else shared

        joined = jax.tree.map(either, params.shared, params.private, is_leaf=lambda leaf: leaf is None)
        return self.network.apply(joined, x, key)


def paths(network: Network) -> list[str]:
    """Name the parameters of a network by their paths, such as ``"0/w"``."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        shapes = jax.eval_shape(network.init, jax.eval_shape(lambda: jax.random.key(0)))
    return [_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]


def _path(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _begins(path: str, beginning: str) -> bool:
    return path == beginning or path.startswith(beginning + "/")


class MixtureParameters(NamedTuple):
    """Parameters of several networks and their shares."""

    components: PyTree  # [k, ...] a tree of arrays
    shares: Array  # [k] >= 0, their sum is 1

    def __repr__(self) -> str:
        return summary(self, self._asdict())


class Mixture(Network):
    r"""An average of the predictions of k networks, $\sum_j \pi_j\, p_j(y \mid x)$.

    Outputs are logarithms of the averaged probabilities, or averaged outputs.

    Args:
      network: any; each of the k begins with another draw of its parameters.
      count: k.
      classes: whether outputs are logits of classes.

    Examples:
      >>> import jax, jax.numpy as jnp, mocha_jax as mj
      >>> model = mj.networks.Mixture(mj.networks.MLP(5, 3), 2)
      >>> params = model.init(jax.random.key(0))
      >>> params.components[0].w.shape, params.shares.tolist(), model.apply(params, jnp.ones((4, 5))).shape
      ((2, 5, 3), [0.5, 0.5], (4, 3))
    """

    network: Network
    count: int = static()
    classes: bool = static(default=True)

    def __post_init__(self) -> None:
        check.instance("Mixture", "network", self.network, Network, "networks.MLP(784, 10)")
        check.integer("Mixture", 1, count=self.count)
        check.flag("Mixture", classes=self.classes)

    def init(self, key: Array) -> MixtureParameters:
        components = jax.vmap(self.network.init)(jax.random.split(key, self.count))
        return MixtureParameters(components, jnp.full((self.count,), 1.0 / self.count))

    def apply(self, params: MixtureParameters, x: Array, key: Array | None = None) -> Array:
        def one(component: Params) -> Array:
            return self.network.apply(component, x, key)

        outputs = jax.vmap(one)(params.components)
        shares = params.shares.astype(outputs.dtype)
        if not self.classes:
            return jnp.tensordot(shares, outputs, 1)
        logs = jax.nn.log_softmax(outputs, axis=-1)
        return jax.nn.logsumexp(logs, axis=0, b=shares.reshape(-1, *(1,) * (logs.ndim - 1)))
