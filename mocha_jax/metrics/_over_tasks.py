"""Summaries of the scores of many tasks, for reports on a federation."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose

# Shares of the tasks at which quantiles are taken.
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)

# Times that tasks and seeds are drawn again, for intervals.
_DRAWS = 2000


@dataclasses.dataclass(frozen=True)
class OverTasks:
    """Scores over tasks in a few numbers, from `over_tasks`."""

    count: int  # tasks that have a score
    mean: float
    weighted_mean: float  # each task by its samples
    std: float  # over tasks
    quantiles: tuple[float, ...]  # at 10, 25, 50, 75 and 90 % of the tasks
    worst_tenth: float  # mean of the tenth of the tasks with the worst scores
    best_tenth: float
    interval: tuple[float, float]  # of the mean, over tasks and seeds
    better: float | None = None  # share of tasks with a better score than the baseline's, ties by half
    difference: float | None = None  # mean over tasks of the score less the baseline's
    difference_interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        low, high = self.interval
        text = (
            f"mean {self.mean:.4g} [{low:.4g}, {high:.4g}], by samples {self.weighted_mean:.4g}, std {self.std:.3g}, "
            f"median {self.quantiles[2]:.4g}, worst tenth {self.worst_tenth:.4g}, best tenth {self.best_tenth:.4g}"
        )
        if self.better is None or self.difference is None or self.difference_interval is None:
            return text
        low, high = self.difference_interval
        share = f"{100 * self.better:.0f} % of {self.count} tasks"
        by = f"{self.difference:+.3g} [{low:+.3g}, {high:+.3g}]"
        return f"{text}; better in {share}, by {by}"


@on_purpose
def over_tasks(
    scores: ArrayLike,
    sizes: ArrayLike | None = None,
    *,
    baseline: ArrayLike | None = None,
    maximise: bool = False,
    level: float = 0.95,
    seed: int = 0,
) -> OverTasks:
    """Summarise the scores of tasks, and how they differ from a baseline's of the same tasks.

    Intervals are of percentiles when tasks and seeds are drawn anew, each with replacement (the pigeonhole bootstrap,
    Owen 2007): they say what another federation of such tasks, trained with other seeds, would show, and are rather
    too wide than too narrow. Differences are taken task by task and seed by seed before.

    Args:
      scores: ``[num_tasks]``, e.g. ``metrics.rmse(solution, test, per_task=True)``, or ``[seeds, num_tasks]``; NaN
        where a task has none.
      sizes: samples of each task ``[num_tasks]`` for the weighted mean; default all alike.
      baseline: scores of another method, shaped like `scores`, such as those of local models.
      maximise: whether more is better.
      level: of the intervals, in (0, 1).
      seed: of the draws.

    Examples:
      >>> import numpy as np
      >>> joint, local = np.array([0.1, 0.2, 0.3, 0.2]), np.array([0.2, 0.3, 0.3, 0.5])
      >>> found = over_tasks(joint, baseline=local)
      >>> round(found.mean, 3), found.better, round(found.difference, 3)
      (0.2, 0.875, -0.125)
    """
    name = "over_tasks"
    check.flag(name, maximise=maximise)
    check.scalar(name, level=level)
    check.in_unit_interval(name, open_left=True, open_right=True, level=level)
    check.integer(name, 0, seed=seed)
    own_scores = by_seed(name, "scores", scores)
    has_score = ~np.isnan(own_scores).all(axis=0)
    if not has_score.any():
        raise ValueError("over_tasks: scores has no number in it.")
    sizes = np.ones(own_scores.shape[1]) if sizes is None else _sizes(sizes, own_scores.shape[1])
    own_scores, sizes = own_scores[:, has_score], sizes[has_score]
    of_tasks = np.nanmean(own_scores, axis=0)
    order = np.sort(of_tasks)
    tenth = max(round(0.1 * len(order)), 1)
    low, high = float(np.mean(order[:tenth])), float(np.mean(order[-tenth:]))
    weighted = float(np.sum(sizes * of_tasks) / np.sum(sizes)) if np.sum(sizes) > 0 else float("nan")
    summary = OverTasks(
        len(order), float(np.mean(of_tasks)), weighted, float(np.std(of_tasks, ddof=1)) if len(order) > 1 else 0.0,
        tuple(float(q) for q in np.quantile(of_tasks, QUANTILES)), *((low, high) if maximise else (high, low)),
        _interval(own_scores, float(level), int(seed)),
    )  # fmt: skip
    if baseline is None:
        return summary
    other = by_seed(name, "baseline", baseline)
    if other.shape != (len(own_scores), len(has_score)):
        raise ValueError(
            f"over_tasks: baseline must be shaped like scores, [..., {len(has_score)}]; got {other.shape}."
        )
    apart = own_scores - other[:, has_score]
    if np.isnan(apart).all(axis=0).any():
        raise ValueError("over_tasks: baseline must have a score for every task that scores has one for.")
    of_tasks = np.nanmean(apart, axis=0)
    return dataclasses.replace(
        summary, better=share_better(of_tasks, maximise), difference=float(np.mean(of_tasks)),
        difference_interval=_interval(apart, float(level), int(seed)),
    )  # fmt: skip


def share_better(differences: np.ndarray, maximise: bool) -> float:
    """Share of differences ``[num_tasks]`` that are gains; none at all counts half."""
    gain = differences if maximise else -differences
    return float(np.mean(np.where(gain == 0, 0.5, gain > 0)))


def by_seed(owner: str, name: str, values: ArrayLike) -> np.ndarray:
    """Scores ``[seeds, num_tasks]``."""
    array = check.concrete(values)
    if array is None or array.ndim not in (1, 2) or not array.size or array.dtype.kind not in "fiub":
        raise ValueError(f"{owner}: {name} must be [num_tasks] or [seeds, num_tasks], got {check.shown(values)}.")
    if np.isinf(array).any():
        raise ValueError(f"{owner}: {name} must be finite, or NaN where a task has no score, got an infinite one.")
    return np.atleast_2d(array.astype(float))


def _sizes(values: ArrayLike, count: int) -> np.ndarray:
    array = check.concrete(values)
    if array is None or array.shape != (count,) or array.dtype.kind not in "fiu" or not (array >= 0).all():
        raise ValueError(
            f"over_tasks: sizes must be [{count}] numbers >= 0, one for each task of scores; got {check.shown(values)}."
        )
    return array.astype(float)


def _interval(scores: np.ndarray, level: float, seed: int) -> tuple[float, float]:
    """Bound the mean of scores ``[seeds, num_tasks]`` when tasks and seeds are drawn anew."""
    seeds, tasks = scores.shape
    draw, real = np.random.default_rng(seed), ~np.isnan(scores)
    filled = np.where(real, scores, 0.0)
    of_seed = draw.multinomial(seeds, np.full(seeds, 1.0 / seeds), _DRAWS).astype(float)
    of_task = draw.multinomial(tasks, np.full(tasks, 1.0 / tasks), _DRAWS).astype(float)
    total = np.einsum("bs,st,bt->b", of_seed, filled, of_task, optimize=True)
    count = np.einsum("bs,st,bt->b", of_seed, real.astype(float), of_task, optimize=True)
    means = total[count > 0] / count[count > 0]
    low, high = np.quantile(means, [0.5 - 0.5 * level, 0.5 + 0.5 * level])
    return float(low), float(high)
