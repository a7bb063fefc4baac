"""Several methods on the same tasks, side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.names import duplicates, listed
from mocha_jax.metrics._over_tasks import OverTasks, by_seed, over_tasks, share_better


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Methods on the same tasks, from `compare`; as a text it is a table."""

    summaries: Mapping[str, OverTasks]  # of every method, with the difference from the baseline of all but that one
    scores: Mapping[str, np.ndarray]  # [num_tasks] mean over seeds of every method
    tasks: tuple[Hashable, ...]  # [num_tasks] their names or numbers; those without a score are left out
    baseline: str | None
    maximise: bool
    level: float
    notes: tuple[str, ...] = ()  # what else to say below the table

    @property
    def wins(self) -> np.ndarray:
        """Share of tasks where the method of the row is better than that of the column, ties by half ``[k, k]``."""
        scores = list(self.scores.values())
        return np.array([[share_better(row - column, self.maximise) for column in scores] for row in scores])

    def to_dict(self) -> dict[str, list[str | float | None]]:
        """Return the table as columns by name, numbers as they are; None where there is no difference to tell."""
        rows: list[dict[str, str | float | None]] = [
            {"method": name, **_numbers(one)} for name, one in self.summaries.items()
        ]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        header, *rows = ([cell.replace("|", "\\|") for cell in row] for row in self._cells())
        ruler = ["---", *["---:"] * (len(header) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (header, ruler, *rows))

    def __str__(self) -> str:
        rows = self._cells()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(k) for cell, k in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        table = [line.rstrip() for line in (lines[0], "-" * len(lines[0]), *lines[1:])]
        return "\n".join([*table, self.caption, *self.notes])

    @property
    def caption(self) -> str:
        """Say in a line what the numbers are."""
        better = "more" if self.maximise else "less"
        count = f"{len(self.tasks)} task{'s' if len(self.tasks) != 1 else ''}"
        return f"{count}; {better} is better; intervals of {100 * self.level:g} % over tasks and seeds"

    @property
    def places(self) -> int:
        """Digits behind the point that its numbers are shown with: four in all of the largest mean."""
        largest = max(abs(one.mean) for one in self.summaries.values())
        return min(max(3 - math.floor(math.log10(largest)), 0), 8) if 0 < largest < math.inf else 4

    def __repr__(self) -> str:
        against = "" if self.baseline is None else f", against {self.baseline}"
        return f"Comparison({', '.join(self.summaries)}{against}, {len(self.tasks)} tasks)"

    def _cells(self) -> list[list[str]]:
        """The table in words, the header first."""
        level, places = f"[{100 * self.level:g} %]", self.places
        summaries = self.summaries.values()
        weighted = ["by samples"] if any(one.weighted_mean != one.mean for one in summaries) else []
        header = ["method", f"mean {level}", *weighted, "std", "median", "worst tenth", "best tenth"]
        if self.baseline is not None:
            header += ["tasks better", f"minus {self.baseline} {level}"]
        rows = [header]
        for name, one in self.summaries.items():
            others = [one.std, one.quantiles[2], one.worst_tenth, one.best_tenth]
            others = [one.weighted_mean, *others] if weighted else others
            row = [name, _with_interval(one.mean, one.interval, places), *(f"{value:.{places}f}" for value in others)]
            if one.better is not None and one.difference is not None and one.difference_interval is not None:
                row += [
                    f"{100 * one.better:.0f} %",
                    _with_interval(one.difference, one.difference_interval, places, "+"),
                ]
            rows.append(row + [""] * (len(header) - len(row)))
        return rows


@on_purpose
def compare(
    methods: Mapping[str, ArrayLike],
    sizes: ArrayLike | None = None,
    *,
    baseline: str | None = None,
    maximise: bool = False,
    level: float = 0.95,
    seed: int = 0,
    tasks: Sequence[Hashable] | None = None,
) -> Comparison:
    """Put the scores of several methods on the same tasks side by side, each summarised by `over_tasks`.

    Tasks and seeds are drawn anew for the intervals in the same way for all methods. A task must have a score by all
    methods or by none.

    Args:
      methods: scores of each by its name, ``[num_tasks]`` or ``[seeds, num_tasks]``, with NaN where a task has none;
        those without an axis of seeds count for every seed of the others.
      sizes: samples of each task ``[num_tasks]`` for the weighted mean; default all alike.
      baseline: the method that others are compared with, task by task; default none.
      maximise: whether more is better.
      level: of the intervals, in (0, 1).
      seed: of the draws.
      tasks: names of the tasks, such as ``data.names.tasks``; default their numbers.

    Examples:
      >>> import numpy as np
      >>> local, learned = np.array([0.2, 0.3, 0.3, 0.5]), np.array([0.1, 0.2, 0.3, 0.2])
      >>> found = compare({"local": local, "learned": learned}, baseline="local")
      >>> found.summaries["learned"].better, found.wins.tolist()
      (0.875, [[0.5, 0.125], [0.875, 0.5]])
      >>> print(found.to_markdown().splitlines()[-1])
      | learned | 0.2000 [0.1250, 0.2750] | 0.0816 | 0.2000 | 0.3000 | 0.1000 | 88 % | -0.1250 [-0.2500, -0.0250] |
    """
    name = "compare"
    scores_of = {
        str(key): by_seed(name, f"methods[{key!r}]", scores) for key, scores in _mapping(name, methods).items()
    }
    check.flag(name, maximise=maximise)
    if baseline is not None:
        check.one_of(name, "baseline", baseline, tuple(scores_of))
    seeds, count = _common_shape(name, scores_of)
    scores_of = {key: np.broadcast_to(scores, (seeds, count)) for key, scores in scores_of.items()}
    has_score = {key: ~np.isnan(scores).all(axis=0) for key, scores in scores_of.items()}
    named = _names(name, tasks, count)
    first, has = next(iter(has_score.items()))
    for key, others in has_score.items():
        if (apart := np.flatnonzero(has != others)).size:
            with_one, without = (first, key) if has[apart[0]] else (key, first)
            raise ValueError(
                f"{name}: methods must have scores of the same tasks, but task {named[apart[0]]!r} has one by "
                f"{with_one!r} and none by {without!r}."
            )
    if not has.any():
        raise ValueError(f"{name}: methods must have scores, but all of them are NaN.")
    against = None if baseline is None else scores_of[baseline]
    summaries = {
        key: over_tasks(
            scores, sizes, baseline=None if key == baseline else against, maximise=maximise, level=level, seed=seed
        )
        for key, scores in scores_of.items()
    }
    return Comparison(
        summaries, {key: np.nanmean(scores[:, has], axis=0) for key, scores in scores_of.items()},
        tuple(name for name, scored in zip(named, has, strict=True) if scored), baseline, bool(maximise), float(level),
    )  # fmt: skip


def _mapping(owner: str, methods: object) -> Mapping[str, ArrayLike]:
    if not isinstance(methods, Mapping) or not methods:
        raise ValueError(
            f"{owner}: methods must be a dictionary of scores by name, such as {{'local': scores}}, got "
            f"{check.shown(methods)}."
        )
    if repeated := duplicates([str(key) for key in methods]):
        raise ValueError(
            f"{owner}: methods must have names that differ as texts, but {listed(repeated)} occur more than once."
        )
    return methods


def _common_shape(owner: str, scores_of: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """The number of seeds and that of tasks."""
    seeds, tasks = ({scores.shape[axis] for scores in scores_of.values()} for axis in (0, 1))
    if len(tasks) > 1 or len(seeds - {1}) > 1:
        shapes = ", ".join(f"{list(scores.shape)} of {key!r}" for key, scores in scores_of.items())
        raise ValueError(f"{owner}: methods must have as many tasks, and seeds, as one another; got {shapes}.")
    return max(seeds), tasks.pop()


def _names(owner: str, tasks: object, count: int) -> tuple[Hashable, ...]:
    if tasks is None:
        return tuple(range(count))
    several = (
        isinstance(tasks, Collection) and not isinstance(tasks, str | Set | Mapping) and getattr(tasks, "ndim", 1) > 0
    )
    names: list[Any] = list(tasks) if several else []  # type: ignore[call-overload]
    named = [one.item() if isinstance(one, np.generic) else one for one in names]
    if len(named) != count or not all(isinstance(one, Hashable) and one == one for one in named):
        raise ValueError(f"{owner}: tasks must be {count} names, one for each task; got {check.shown(tasks)}.")
    if repeated := duplicates(named):
        raise ValueError(f"{owner}: tasks must differ, but {listed(repeated)} occur more than once.")
    return tuple(named)


def _with_interval(value: float, interval: tuple[float, float], places: int, sign: str = "") -> str:
    shown, low, high = (f"{number:{sign}.{places}f}" for number in (value, *interval))
    return f"{shown} [{low}, {high}]"


def _numbers(one: OverTasks) -> dict[str, float | None]:
    """One method's numbers by name, each interval as two."""
    low, high = (None, None) if one.difference_interval is None else one.difference_interval
    return {
        "mean": one.mean, "mean_low": one.interval[0], "mean_high": one.interval[1], "weighted_mean": one.weighted_mean,
        "std": one.std, "q10": one.quantiles[0], "q25": one.quantiles[1], "median": one.quantiles[2],
        "q75": one.quantiles[3], "q90": one.quantiles[4], "worst_tenth": one.worst_tenth, "best_tenth": one.best_tenth,
        "better": one.better, "difference": one.difference, "difference_low": low, "difference_high": high,
    }  # fmt: skip
