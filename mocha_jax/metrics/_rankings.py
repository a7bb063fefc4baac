"""Scores of the order in which a model puts the samples of a task, the largest prediction first."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.metrics._means import Weights, check_labels, task_by_task


@on_purpose
def auc(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    """Area under the ROC curve: how often a positive outranks a negative, ties counting half.

    Positive are labels above 0. A task whose samples are all of one class has no score. Arguments as `error_rate`.
    """
    check.flag("auc", per_task=per_task)
    return task_by_task(_auc, weights, data, per_task)


def _auc(z: Array, y: Array, real: Array) -> tuple[Array, Array]:
    """The score, and whether there are samples of both classes to score."""
    positive, negative = real & (y > 0), real & (y <= 0)
    count = jnp.sum(negative, dtype=jnp.int32)
    losses = _above(z, negative) + _at_least(z, negative)  # twice, so that a tie counts once
    # A share of the negatives each: an int32 does not hold the number of pairs.
    wins = safe_ratio((2 * count - losses).astype(z.dtype), (2 * count).astype(z.dtype))
    scored = jnp.any(positive) & (count > 0)
    has_score = scored & ~jnp.any(real & jnp.isnan(z))  # NaN would outrank all, padding too
    share = safe_ratio(jnp.sum(jnp.where(positive, wins, 0.0)), jnp.sum(positive).astype(z.dtype))
    return jnp.where(has_score, share, jnp.nan), scored


@on_purpose
def average_precision(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    r"""Area under the curve of precision over recall, as the sum $\sum_k (R_k - R_{k-1}) P_k$ over thresholds.

    It says more than `auc` where positives are rare: chance has their share. Positive are labels above 0. A task
    without positives has no score. Arguments as `error_rate`.
    """
    check.flag("average_precision", per_task=per_task)
    return task_by_task(_average_precision, weights, data, per_task)


def _average_precision(z: Array, y: Array, real: Array) -> tuple[Array, Array]:
    """The mean, over positives, of the precision among the samples ranked as high; and whether there are any."""
    positive = real & (y > 0)
    hits, ranked = _at_least(z, positive), _at_least(z, real)
    count = jnp.sum(positive)
    total = jnp.sum(jnp.where(positive, safe_ratio(hits.astype(z.dtype), ranked.astype(z.dtype)), 0.0))
    has_score = (count > 0) & ~jnp.any(real & jnp.isnan(z))
    return jnp.where(has_score, safe_ratio(total, count.astype(z.dtype)), jnp.nan), count > 0


@on_purpose
def ndcg(weights: Weights, data: TaskData, *, top: int | None = None, per_task: bool = False) -> Array:
    r"""Normalised discounted cumulative gain: $\sum_r g_r / \log_2(r + 1)$ over ranks r, over that of the best order.

    A label is its sample's gain: grades from 0 up, or -1 and +1, of which -1 gains nothing. Samples with the same
    prediction share their ranks. A task whose labels gain nothing has no score.

    Args:
      weights: as for `error_rate`.
      data: samples with labels from 0 up, or -1 and +1.
      top: count the first ranks only; default all.
      per_task: as for `error_rate`.
    """
    check.flag("ndcg", per_task=per_task)
    if top is not None:
        check.integer("ndcg", 1, top=top)
    check.instance("metrics", "data", data, TaskData, "data.split(key, 0.75)[1]")
    check_labels("ndcg", data, lambda y: (y >= 0) | (y == -1), "labels from 0 up, or -1 and +1")
    return task_by_task(partial(_ndcg, top=None if top is None else int(top)), weights, data, per_task)


def _ndcg(z: Array, y: Array, real: Array, *, top: int | None) -> tuple[Array, Array]:
    """The score, and whether any label gains something."""
    gain = jnp.where(real, jnp.maximum(y, 0.0), 0.0)
    ranks = jnp.arange(len(z), dtype=jnp.int32)
    discount = 1.0 / jnp.log2(ranks.astype(z.dtype) + 2.0)
    if top is not None:
        discount = jnp.where(ranks < top, discount, 0.0)
    first, last = _above(z, real), _at_least(z, real)  # ranks that the samples of this prediction share
    shared = safe_ratio(_sums_up_to(last, first, real, discount), (last - first).astype(z.dtype))
    best = jnp.sum(jnp.sort(gain, descending=True) * discount)
    has_score = (best > 0) & ~jnp.any(real & jnp.isnan(z))
    return jnp.where(has_score, safe_ratio(jnp.sum(gain * shared), best), jnp.nan), best > 0


def _sums_up_to(last: Array, first: Array, real: Array, terms: Array) -> Array:
    """Add up the terms from rank `first` to before rank `last` of every sample.

    Differences of sums from rank 0 would be those of large numbers: a sum begins anew where a sample's ranks do.
    """
    begins = jnp.zeros(len(terms), bool).at[jnp.where(real, first, len(terms))].set(True, mode="drop")

    def add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] | b[0], jnp.where(b[0], b[1], a[1] + b[1])

    _, sums = lax.associative_scan(add, (begins, terms))
    return sums[last - 1]


def _at_least(z: Array, among: Array) -> Array:
    """Count for every prediction how many, among some, are as large."""
    return jnp.sum(among, dtype=jnp.int32) - jnp.searchsorted(jnp.sort(jnp.where(among, z, jnp.inf)), z, side="left")


def _above(z: Array, among: Array) -> Array:
    """Count for every prediction how many, among some, are larger."""
    up_to = jnp.searchsorted(jnp.sort(jnp.where(among, z, jnp.inf)), z, side="right")
    return jnp.maximum(jnp.sum(among, dtype=jnp.int32) - up_to, 0)  # those that are no part of it lie at infinity
