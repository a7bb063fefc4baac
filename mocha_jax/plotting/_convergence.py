"""Pictures of how solves went."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax import Array
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mocha_jax._core import check
from mocha_jax._driver.history import History
from mocha_jax._selection.tuning import Tuned
from mocha_jax.plotting._tasks import COLOURS, similarity


def convergence(axes: Axes, histories: Mapping[str, History], *, against: str = "simulated_time") -> None:
    """Relative duality gap of solves, the joint one where Omega is learned, or the error of networks, on a log scale.

    Args:
      axes: where to draw.
      histories: by the name to show.
      against: ``"simulated_time"`` or ``"round"``.
    """
    check.instance("convergence", "axes", axes, Axes, "figure.subplots()")
    _check_histories("convergence", histories)
    check.one_of("convergence", "against", against, ("simulated_time", "round"))
    for (name, history), colour in zip(histories.items(), COLOURS * len(histories), strict=False):
        gap = np.asarray(history.residual)
        positive = gap > 0  # a gap of exactly 0 has no place on a log scale
        x = np.asarray(getattr(history, against))
        axes.plot(x[positive], gap[positive], color=colour, lw=1.8, label=name)
        axes.plot(x[positive][-1:], gap[positive][-1:], "o", color=colour, ms=5)
    axes.set_yscale("log")
    axes.set_xlabel({"simulated_time": "simulated seconds", "round": "rounds"}[against])
    certified = all(hasattr(history, "gap") for history in histories.values())
    axes.set_ylabel("relative duality gap" if certified else "error")
    axes.grid(alpha=0.25, which="major")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def overview(histories: Mapping[str, History], weights: Mapping[str, Array]) -> Figure:
    """One figure: convergence on the left, the similarity of each model's tasks beside it."""
    _check_histories("overview", histories)
    if not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"overview: weights must be a dictionary of weights by name, got {check.shown(weights)}.")
    figure = Figure(figsize=(5.2 + 2.6 * len(weights), 3.6), layout="constrained")
    ratios = [1.9] + [1.0] * len(weights)
    axes = figure.subplots(1, 1 + len(weights), gridspec_kw={"width_ratios": ratios})
    convergence(axes[0], histories)
    for ax, (name, w) in zip(axes[1:], weights.items(), strict=True):
        image = similarity(ax, w, title=name)
    axes[1].set_ylabel("task")
    figure.colorbar(image, ax=list(axes[1:]), shrink=0.75, label="cosine of weights")
    return figure


def tuning(tuned: Tuned) -> Figure:
    """The losses of held-out folds at every step of `tune`, the best one marked, and hyperparameters on a log scale."""
    check.instance("tuning", "tuned", tuned, Tuned, "tune(problem)")
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.arange(len(tuned.history.value))
    left.plot(steps, tuned.history.value, "o-", color=COLOURS[0], ms=4, label="folds that stop")
    left.plot(steps, tuned.history.descended, "-", color=COLOURS[1], lw=1.6, label="descended on")
    left.set_ylabel("loss of held-out samples")
    left.legend(frameon=False)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tuned.history.hyperparameters)
    for (path, values), colour in zip(leaves, COLOURS * len(leaves), strict=False):
        rows = np.asarray(values).reshape(len(steps), -1)
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        right.plot(
            steps, rows[:, :1], color=colour, lw=1.6, label=name if rows.shape[1] == 1 else f"{name} ({rows.shape[1]})"
        )
        right.plot(steps, rows[:, 1:], color=colour, lw=0.8, alpha=0.6)
    right.set_yscale("log")
    right.set_ylabel("hyperparameters")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.axvline(tuned.best, color="0.6", lw=0.8, ls=":")
        axes.set_xlabel("steps of descent")
        axes.grid(alpha=0.25, which="major")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _check_histories(owner: str, histories: object) -> None:
    all_histories = isinstance(histories, Mapping) and all(
        isinstance(history, History) for history in histories.values()
    )
    if not all_histories or not histories:
        raise ValueError(
            f"{owner}: histories must be a dictionary of histories by name, such as {{'MOCHA': solution.history}}, "
            f"got {check.shown(histories)}."
        )
