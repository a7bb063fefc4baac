r"""Standardised samples: features brought to similar sizes, with what was taken from them kept.

Every feature is centred and divided by its standard deviation, and real labels may be centred too:

$$
x'_{tij} = \frac{x_{tij} - \mu_{tj}}{\sigma_{tj}}, \qquad y'_{ti} = y_{ti} - \nu_t .
$$

A model of $x'$ is one of x: with $w_{tj} = w'_{tj}/\sigma_{tj}$ and $b_t = b'_t - \sum_j w_{tj}\mu_{tj} + \nu_t$ it
predicts samples as they are, so that ``solution.model`` has no scaling left in it.

**An intercept that costs nothing.** With $\mu_t$ and $\nu_t$ the means of every task, weighed as its samples are, the
squared loss has its least value over b at $b' = 0$, whatever w' is:
$\partial_b \sum_i c_i \tfrac12 (w'^\top x'_i + b - y'_i)^2 = b \sum_i c_i$. So the model with $b'$ left out, or
penalised, is the one whose intercept is not penalised, exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._data.moments import Moments, Scaling
from mocha_jax._data.names import places
from mocha_jax._data.node_arrays import Data, NodeArrays
from mocha_jax._numerics.math import safe_ratio

# Whose means and standard deviations: of all samples; of each task; means of each task, deviations from them of all;
# means of each task alone.
WAYS = ("pooled", "task", "within", "centred")

# Features whose standard deviations differ by more than this are said to keep a solve from converging.
UNEVEN = 30.0

# Numbers of the samples that are looked at for that.
_LOOKED_AT = 2**22

# Standard deviations below this share of a feature's size are rounding: the feature is constant.
_CONSTANT = 1e-5


@dataclasses.dataclass(frozen=True)
class Standardize:
    """A rule by which samples are standardised: fitted to those for training, it is applied to any."""

    by: str
    labels: bool = False

    def __call__(self, training: NodeArrays) -> Callable[[Data], Data]:
        """Fit, and return what is then done with any samples; within compiled programs too."""
        return partial(scaled, moments=self.fit(training))

    def fit(self, data: NodeArrays) -> Moments:
        """Means and standard deviations of a data set; a pure function of its arrays."""
        x = data.x[..., : data.num_slopes].astype(data.dtype)
        real = (data.weight > 0).astype(data.dtype)
        mean, level = _means(data, x, real, self.by)
        if self.by == "centred":
            return Moments(mean, jnp.ones_like(mean[:1]), level if self.labels else jnp.zeros_like(level))
        centred = jnp.where(real[..., None] > 0, x - _of_nodes(data, mean)[:, None], 0.0)
        squares = jnp.sum(real[..., None] * centred**2, axis=1)
        everywhere = jnp.sqrt(jnp.sum(squares, axis=0) / jnp.maximum(jnp.sum(real), 1.0))[None]
        size = jnp.max(jnp.abs(x) * real[..., None], axis=(0, 1))[None]
        everywhere = jnp.where(everywhere > _CONSTANT * size, everywhere, 1.0)
        scale = everywhere
        if self.by == "task":
            own = jnp.sqrt(safe_ratio(data.to_tasks(squares), data.to_tasks(jnp.sum(real, axis=1))[:, None]))
            scale = jnp.where(own > _CONSTANT * size, own, everywhere)  # constant in this task: as elsewhere
        return Moments(mean, scale, level if self.labels else jnp.zeros_like(level))


def _means(data: NodeArrays, x: Array, real: Array, by: str) -> tuple[Array, Array]:
    """Means of features and labels: over all samples, or over each task's with their weights."""
    weight = real if by == "pooled" else data.weight

    def over(a: Array) -> Array:
        sums = jnp.sum(weight.reshape(weight.shape + (1,) * (a.ndim - 2)) * a, axis=1)
        count = jnp.sum(weight, axis=1)
        if by == "pooled":
            total, number = jnp.sum(sums, axis=0)[None], jnp.sum(count)[None]
        else:
            total, number = data.to_tasks(sums), data.to_tasks(count)
        number = number.reshape(number.shape + (1,) * (total.ndim - 1))
        own = safe_ratio(total, number)
        # A task without samples has the mean of the others.
        others = safe_ratio(jnp.sum(own, axis=0), jnp.sum(number > 0, axis=0).astype(own.dtype))
        return jnp.where(number > 0, own, others)

    # A second pass takes away what the first lost to the size of the numbers.
    mean, level = over(x), over(data.y)
    mean = mean + over(x - _of_nodes(data, mean)[:, None])
    return mean, level + over(data.y - _of_nodes(data, level)[:, None])


def _of_nodes(data: NodeArrays, rows: Array) -> Array:
    return jnp.broadcast_to(rows, (data.num_nodes, *rows.shape[1:])) if len(rows) == 1 else data.to_nodes(rows)


def scaled(data: Data, moments: Moments) -> Data:
    """Scale the samples and labels of a data set; padding stays what it is. A pure function of arrays."""
    mean, scale, level = (_of_nodes(data, jnp.asarray(a, data.dtype)) for a in moments)
    scale = jnp.where(scale > 0, scale, 1.0)  # of inert nodes
    real, d = data.weight > 0, data.num_slopes
    x = (data.x[..., :d].astype(data.dtype) - mean[:, None]) / scale[:, None]
    x = jnp.where(real[..., None], x, 0.0).astype(data.x.dtype)
    y = jnp.where(real, data.y - level[:, None], data.y)
    return data.replace(x=jnp.concatenate([x, data.x[..., d:]], axis=2), y=y)


def standardized(data: Data, by: str, labels: bool, like: NodeArrays | None) -> Data:
    """Scale samples and labels by their own moments or those of other data, and record these with them."""
    owner = "TaskData.standardized"
    check.one_of(owner, "by", by, WAYS)
    check.flag(owner, labels=labels)
    if data.scaling is not None:
        raise ValueError(f"{owner}: these samples are standardised already, by {data.scaling.by!r}.")
    if like is None:
        moments = Moments(*(np.asarray(a) for a in Standardize(by, labels).fit(data)))  # type: ignore[arg-type]
        return recorded(scaled(data, moments), by, moments)
    check.instance(owner, "like", like, type(data), "the training data, standardised")
    if like.scaling is None:
        raise ValueError(f"{owner}: like is not standardised; call train.standardized() first.")
    if (scaling := like.scaling).mean.shape[1] != data.num_slopes:
        raise ValueError(
            f"{owner}: the samples have {data.num_slopes} features, those of like {scaling.mean.shape[1]}."
        )
    moments = scaling.rows(_order(owner, data, like))
    if len(moments.mean) not in (1, data.num_tasks):
        raise ValueError(f"{owner}: the data has {data.num_tasks} tasks, and like {like.num_tasks}.")
    return recorded(scaled(data, moments), scaling.by, moments)


def _order(owner: str, data: NodeArrays, like: NodeArrays) -> np.ndarray:
    """The tasks of `like` that those of the data are."""
    if data.names.tasks is None or like.names.tasks is None:
        return np.arange(like.num_tasks)
    return places(owner, "task", data.names.tasks, like.names.tasks)


def recorded(data: Data, by: str, moments: Moments) -> Data:
    """Keep what was taken from the samples with them."""
    return data.exchange(scaling=Scaling(by, *(np.asarray(a) for a in moments)))


def appended(data: NodeArrays, other: NodeArrays) -> Scaling | None:
    """The scaling of the tasks of two data sets."""
    one, two = data.scaling, other.scaling
    if one is None and two is None:
        return None
    if one is None or two is None or one.by != two.by or (one.by == "pooled" and one != two):
        raise ValueError("TaskData.append: append before standardising, or standardise the second like the first.")
    if one.by == "pooled":
        return one
    both = (
        [np.broadcast_to(a, (each.num_tasks, *a.shape[1:])) for a in own.moments]
        for own, each in ((one, data), (two, other))
    )
    return Scaling(one.by, *(np.concatenate(pair) for pair in zip(*both, strict=True)))


def unevenness(data: NodeArrays) -> float:
    """The ratio of the largest to the smallest standard deviation of features, over some of the tasks."""
    if check.hidden(data.x):  # other processes would have to look too
        return 1.0
    nodes = max(_LOOKED_AT // max(data.x[0].size, 1), 1)
    some = (a if nodes >= data.num_nodes else a[:nodes] for a in (data.x, data.weight))
    x, weight = (np.asarray(a, np.float32) for a in some)  # on the host, where nothing has to be compiled
    real = x[weight > 0]
    if not len(real):
        return 1.0
    deviation = real.std(axis=0)
    varies = deviation[deviation > _CONSTANT * np.abs(real).max(axis=0)]
    return float(varies.max() / varies.min()) if len(varies) else 1.0


def advice(data: NodeArrays) -> str:
    """A sentence where features differ so much in size that solves are slow; else nothing."""
    ratio = unevenness(data)
    if not UNEVEN < ratio < np.inf:
        return ""
    return (
        f"the features' standard deviations differ by a factor of {ratio:.0e}, which slows every solver down: "
        f"standardise them (data.standardized())"
    )
