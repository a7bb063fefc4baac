"""A picture of several methods on the same tasks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax.metrics import Comparison, OverTasks
from mocha_jax.metrics import compare as compared
from mocha_jax.plotting._solutions import COLOURS

# Tasks up to which each has a line and its name.
_NAMED = 30

# The half of a row that points may fill, and the steps in which they are put beside one another.
_HALF, _BINS = 0.34, 60


def compare(methods: Comparison | Mapping[str, ArrayLike], *, score: str = "score", title: str = "") -> Figure:
    """Draw the scores of methods over tasks, and on the right how they differ from the baseline, task by task.

    Up to 30 tasks have a line each, in the order of the baseline's scores; of more, every task is a point in its
    method's row. Diamonds are means with their intervals, of scores and of differences; points filled faintly on the
    right are tasks that are worse off than with the baseline.

    Args:
      methods: from `metrics.compare`, or scores by name, of which the first is the baseline.
      score: the name of what is compared, for the axes.
      title: of the picture.
    """
    check.instance("compare", "score", score, str, "'RMSE'")
    check.instance("compare", "title", title, str, "'schools'")
    if not isinstance(methods, Comparison):
        first = next(iter(methods)) if isinstance(methods, Mapping) and methods else None
        methods = compared(methods, baseline=None if first is None else str(first))
    others = [name for name in methods.scores if name != methods.baseline] if methods.baseline is not None else []
    named, rows = len(methods.tasks) <= _NAMED, len(methods.scores)
    height = max(0.27 * (len(methods.tasks) + rows) if named else 0.95 * rows, 0.95 * len(others), 1.4) + 1.5
    figure = Figure(figsize=(9.6 if others else 5.8, height), layout="constrained")
    widths = [1.2, 1.0] if others else [1.0]
    grid = figure.subplots(1, len(widths), squeeze=False, gridspec_kw={"width_ratios": widths})
    colours = dict(zip(methods.scores, COLOURS * rows, strict=False))
    (_by_task if named else _by_method)(grid[0, 0], methods, colours)
    grid[0, 0].set_xlabel(f"{score} ({'more' if methods.maximise else 'less'} is better)")
    if others:
        _differences(grid[0, 1], methods, others, colours)
        grid[0, 1].set_xlabel(f"{score}\nminus that of {methods.baseline}, of every task")
    figure.suptitle(title)
    return figure


def _by_task(axes: Axes, methods: Comparison, colours: Mapping[str, str]) -> None:
    """A line for every task, with a point for every method; below, the means."""
    scores = np.stack(list(methods.scores.values()))
    first = scores[0] if methods.baseline is None else methods.scores[methods.baseline]
    order, count = np.argsort(first, kind="stable"), scores.shape[1]
    axes.hlines(np.arange(count), scores.min(0)[order], scores.max(0)[order], color="0.82", lw=2.2, zorder=1)
    for name, values in methods.scores.items():
        axes.plot(values[order], np.arange(count), "o", color=colours[name], ms=5.5, mec="white", mew=0.6, label=name)
    for i, (name, one) in enumerate(methods.summaries.items()):
        _mean(axes, one.mean, one.interval, count + 0.7 + i, colours[name])
    axes.axhline(count - 0.15, color="0.6", lw=0.8)
    axes.set_yticks([*range(count), count + 0.2 + 0.5 * len(scores)], [*(str(methods.tasks[t]) for t in order), "mean"])
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.set_ylim(count + len(scores) + 0.2, -0.8)
    axes.legend(
        frameon=False, ncols=min(len(scores), 4), loc="lower left", bbox_to_anchor=(0.0, 1.0), handletextpad=0.2,
        columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip
    _bare(axes)


def _by_method(axes: Axes, methods: Comparison, colours: Mapping[str, str]) -> None:
    """A row for every method, with a point for every task."""
    ends = _ends(np.concatenate(list(methods.scores.values())))
    for i, (name, values) in enumerate(methods.scores.items()):
        one = methods.summaries[name]
        axes.plot(values, i + _beside(values, ends), "o", color=colours[name], ms=4, mec="white", mew=0.3, alpha=0.55)
        _mean(axes, one.mean, one.interval, i, colours[name])
        _say(axes, one.mean, i, f"{one.mean:.{methods.places}f}")
    axes.set_yticks(range(len(methods.scores)), list(methods.scores))
    axes.set_ylim(len(methods.scores) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    _bare(axes)


def _differences(axes: Axes, methods: Comparison, others: list[str], colours: Mapping[str, str]) -> None:
    """A row for every method but the baseline, with a point for every task's difference from it."""
    assert methods.baseline is not None
    apart = {name: methods.scores[name] - methods.scores[methods.baseline] for name in others}
    ends = _ends(np.concatenate([*apart.values(), [0.0]]))
    axes.axvline(0.0, color="0.35", lw=1.0, zorder=1)
    sign = 1.0 if methods.maximise else -1.0
    for i, (name, values) in enumerate(apart.items()):
        # Few points would vanish behind the mean's interval.
        one, beside = methods.summaries[name], i + _beside(values, ends) - (0.18 if len(values) <= _NAMED else 0.0)
        for which, alpha in ((sign * values >= 0, 0.6), (sign * values < 0, 0.22)):
            axes.plot(values[which], beside[which], "o", color=colours[name], ms=4, mec="white", mew=0.3, alpha=alpha)
        if one.difference is not None and one.difference_interval is not None:
            _mean(axes, one.difference, one.difference_interval, i, colours[name])
            _say(axes, one.difference, i, f"{one.difference:+.{methods.places}f}")
    axes.set_yticks(range(len(others)), [f"{name}\n{_share(methods.summaries[name])}" for name in others])
    arrow, side = ("better \u2192", "left") if methods.maximise else ("\u2190 better", "right")
    axes.annotate(
        arrow, (0.0, 1.0), (6 * sign, -1), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
        ha=side, va="top", fontsize=9, color="0.35",
    )  # fmt: skip
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(*ends)
    axes.set_ylim(len(others) - 0.4, -0.7)
    _bare(axes)


def _share(one: OverTasks) -> str:
    return "" if one.better is None else f"better in {100 * one.better:.0f} %"


def _mean(axes: Axes, mean: float, interval: tuple[float, float], row: float, colour: str) -> None:
    """A diamond at the mean, on its interval."""
    axes.plot(interval, [row, row], color="white", lw=5.5, solid_capstyle="round", zorder=3)
    axes.plot(interval, [row, row], color=colour, lw=2.6, solid_capstyle="round", zorder=4)
    axes.plot([mean], [row], "D", color=colour, ms=7, mec="white", mew=1.0, zorder=5)


def _say(axes: Axes, value: float, row: float, text: str) -> None:
    axes.annotate(
        text, (value, row), (0, -11), textcoords="offset points", ha="center", va="center", fontsize=8.5, zorder=6,
        bbox={"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.8},
    )  # fmt: skip


def _beside(values: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    """Offsets that put points of about the same value beside one another, the same in all pictures of them."""
    low, high = ends
    place = np.minimum((_BINS * (values - low) / max(high - low, np.finfo(float).tiny)).astype(int), _BINS - 1)
    offsets = np.zeros(len(values))
    fullest = max(int(np.bincount(place).max()), 8)
    for one in np.unique(place):
        members = np.flatnonzero(place == one)
        rank = np.arange(len(members))
        # 0, 1, -1, 2, -2, ...: from the middle of the row outwards
        steps = (rank + 1) // 2 * np.where(rank % 2 == 1, 1, -1)
        offsets[members[np.argsort(values[members], kind="stable")]] = 2.0 * _HALF * steps / fullest
    return offsets


def _ends(values: np.ndarray) -> tuple[float, float]:
    """The limits of an axis with some room beside the outermost points."""
    low, high = float(values.min()), float(values.max())
    room = 0.06 * (high - low) or 0.5
    return low - room, high + room


def _bare(axes: Axes) -> None:
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
