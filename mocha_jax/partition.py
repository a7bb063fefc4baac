r"""Partitions of one pool of samples to clients: the heterogeneity of federated benchmarks, from none to severe.

Examples:
  Every function returns a list with the rows of each client, so the same deal serves any arrays of the same length:

  >>> import jax, numpy as np, mocha_jax as mj
  >>> x, y = np.random.default_rng(0).normal(size=(600, 4)).astype("f"), np.arange(600) % 10
  >>> parts = shards(jax.random.key(0), y, 30)
  >>> data = mj.pack_tasks([x[rows] for rows in parts], [y[rows] for rows in parts])
  >>> data.num_nodes, int(data.sizes.sum()), max(len(set(y[rows].tolist())) for rows in parts)
  (30, 600, 2)

  `plotting.label_distribution` draws what came out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import jax
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._data.frames import check_unmasked

__all__ = [
    "by_group",
    "dirichlet",
    "iid",
    "Parts",
    "permuted",
    "quantity",
    "shards",
]


def __dir__() -> list[str]:
    return __all__


Parts = list[np.ndarray]

# A concentration above which shares differ by less than a sample in 10,000; larger ones would overflow.
_EVEN = 1e12


def iid(key: Array, count: int, clients: int) -> Parts:
    """Shuffled and cut into equal parts; sizes differ by one at most.

    Args:
      key: a JAX random key.
      count: how many samples there are.
      clients: how many parts, at most `count`.
    """
    count, clients = _enough("iid", count, clients)
    return [np.sort(part) for part in np.array_split(_generator(key).permutation(count), clients)]


def shards(key: Array, labels: ArrayLike, clients: int, per_client: int = 2) -> Parts:
    """Sorted by label and cut into shards, of which every client gets a few (McMahan et al. 2017, "non-IID").

    With 10 balanced classes and two shards each, most clients have samples of two classes only.

    Args:
      key: a JAX random key; it decides which samples of a class go together and who gets which shard.
      labels: ``[N]``.
      clients: how many parts.
      per_client: shards of each.
    """
    labels = _labels("shards", labels)
    check.integer("shards", 1, per_client=per_client)
    _, clients = _enough("shards", len(labels), clients, per_client)
    draw = _generator(key)
    order = draw.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    pieces = np.array_split(order, clients * per_client)
    hands = draw.permutation(len(pieces)).reshape(clients, per_client)
    return [np.sort(np.concatenate([pieces[i] for i in hand])) for hand in hands]


def dirichlet(key: Array, labels: ArrayLike, clients: int, alpha: float = 0.5, *, least: int = 1) -> Parts:
    r"""The samples of each class dealt in random proportions, $\mathrm{Dir}(\alpha, \dots, \alpha)$.

    As Yurochkin et al. 2019. Large alpha: nearly IID. Small alpha: each class is with a few clients, and sizes differ
    widely.

    Args:
      key: a JAX random key.
      labels: ``[N]``.
      clients: how many parts.
      alpha: concentration, > 0.
      least: samples that every client has at the end; those with fewer are given some of the largest client's.

    Examples:
      >>> import jax, numpy as np
      >>> parts = dirichlet(jax.random.key(0), np.arange(100) % 5, 8, alpha=0.1, least=3)
      >>> sum(map(len, parts)), min(map(len, parts)) >= 3
      (100, True)
    """
    labels = _labels("dirichlet", labels)
    check.scalar("dirichlet", alpha=alpha)
    check.positive("dirichlet", alpha=alpha)
    check.integer("dirichlet", 1, least=least)
    _, clients = _enough("dirichlet", len(labels), clients, least)
    draw = _generator(key)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = draw.permutation(np.flatnonzero(labels == label))
        share = draw.dirichlet(np.full(clients, min(float(alpha), _EVEN)))
        if not np.isfinite(share).all() or not share.sum() > 0:  # of a tiny alpha all draws can be 0: one takes all
            share = np.eye(clients)[draw.integers(clients)]
        cuts = np.round(np.cumsum(share)[:-1] * len(rows)).astype(int)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    return _topped_up([np.concatenate(part) for part in parts], least, draw)


def quantity(key: Array, count: int, clients: int, sigma: float = 1.0, *, least: int = 1) -> Parts:
    """Deal samples of one distribution in sizes whose proportions are log-normal.

    Args:
      key: a JAX random key.
      count: how many samples there are.
      clients: how many parts.
      sigma: spread of the logarithms of sizes, >= 0; 0 is `iid`.
      least: samples that every client has.
    """
    check.scalar("quantity", sigma=sigma)
    check.nonnegative("quantity", sigma=sigma)
    check.integer("quantity", 1, least=least)
    count, clients = _enough("quantity", count, clients, least)
    draw = _generator(key)
    logs = sigma * draw.normal(size=clients)
    share = np.exp(logs - logs.max())
    cuts = np.round(np.cumsum(share / share.sum())[:-1] * count).astype(int)
    return _topped_up(np.split(draw.permutation(count), cuts), least, draw)


def by_group(groups: ArrayLike) -> Parts:
    """Natural clients: one for each distinct label, e.g. a writer or a subject, in sorted order."""
    groups = _labels("by_group", groups)
    member = np.unique(groups, return_inverse=True)[1]
    order = np.argsort(member, kind="stable")
    return np.split(order, np.cumsum(np.bincount(member))[:-1])


def permuted(key: Array, xs: Iterable[ArrayLike]) -> list[np.ndarray]:
    """Permute every client's features in its own random order: the same problem with different inputs (P-MNIST).

    Args:
      key: a JAX random key. The order depends on it and on the client's place only.
      xs: ``[n_t, d]`` of each client.
    """
    check.key("permuted", key)
    check_unmasked("permuted", xs=xs)
    arrays = check.arrays("permuted", "xs", xs)
    if wrong := [a.shape for a in arrays if a.ndim != 2]:
        raise ValueError(f"permuted: samples of a client are [n_t, d], got shape {wrong[0]}; flatten pictures first.")
    return [x[:, _generator(jax.random.fold_in(key, t)).permutation(x.shape[1])] for t, x in enumerate(arrays)]


def _topped_up(parts: Parts, least: int, draw: np.random.Generator) -> Parts:
    """Give rows of the largest to those that have too few."""
    parts = [draw.permutation(part) for part in parts]
    for t in range(len(parts)):
        while (short := least - len(parts[t])) > 0:
            largest = int(np.argmax([len(part) for part in parts]))
            take = min(short, len(parts[largest]) - least)
            parts[t] = np.concatenate([parts[t], parts[largest][:take]])
            parts[largest] = parts[largest][take:]
    return [np.sort(part) for part in parts]


def _generator(key: Array) -> np.random.Generator:
    check.key("partition", key)
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).astype(np.uint32).tolist())


def _labels(owner: str, labels: ArrayLike) -> np.ndarray:
    if np.ma.is_masked(labels):
        hidden = np.ma.getmaskarray(cast(np.ma.MaskedArray, labels))
        raise ValueError(f"{owner}: {int(hidden.sum())} labels are masked; fill or remove them.")
    checked = check.concrete(labels)
    if checked is None or checked.ndim != 1 or not len(checked):
        raise ValueError(f"{owner}: one label for every sample, [N], is needed; got {check.shown(labels)}.")
    if checked.dtype.kind == "f" and np.isnan(checked).any():
        raise ValueError(f"{owner}: {int(np.isnan(checked).sum())} labels are NaN.")
    return checked


def _enough(owner: str, count: int, clients: int, each: int = 1) -> tuple[int, int]:
    """Count and clients as Python's integers."""
    check.integer(owner, 1, count=count, clients=clients)
    if clients * each > count:
        raise ValueError(f"{owner}: {count} samples cannot be dealt into {clients} parts of {each} or more.")
    return int(count), int(clients)
