"""Pictures of a solve. Needs matplotlib: ``pip install mocha_jax[plots]``.

Import this module by name; the package does not import it for you.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import Array
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mocha_jax._run import History

# Okabe and Ito's colours, told apart by readers with any colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def convergence(axes: Axes, histories: Mapping[str, History], *, against: str = "simulated_time") -> None:
    """Relative duality gap of one or more solves, on a log scale.

    Args:
      axes: where to draw.
      histories: by the name to show.
      against: ``"simulated_time"`` or ``"round"``.
    """
    for (name, history), colour in zip(histories.items(), _COLOURS * len(histories), strict=False):
        gap = np.asarray(history.relative_gap)
        positive = gap > 0  # a gap of exactly 0 has no place on a log scale
        x = np.asarray(getattr(history, against))
        axes.plot(x[positive], gap[positive], color=colour, lw=1.8, label=name)
        axes.plot(x[positive][-1:], gap[positive][-1:], "o", color=colour, ms=5)
    axes.set_yscale("log")
    axes.set_xlabel({"simulated_time": "simulated seconds", "round": "rounds"}[against])
    axes.set_ylabel("relative duality gap")
    axes.grid(alpha=0.25, which="major")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def similarity(axes: Axes, weights: Array, *, title: str = "") -> Any:
    """Cosine of the angle between every two tasks' weights, as a heat map from -1 to 1."""
    w = np.asarray(weights, float)
    w = w / np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-30)
    image = axes.imshow(w @ w.T, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    axes.set_title(title, fontsize=11)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("task")
    return image


def overview(histories: Mapping[str, History], weights: Mapping[str, Array]) -> Figure:
    """One figure: convergence on the left, the similarity of each model's tasks beside it."""
    figure = Figure(figsize=(5.2 + 2.6 * len(weights), 3.6), layout="constrained")
    ratios = [1.9] + [1.0] * len(weights)
    axes = figure.subplots(1, 1 + len(weights), gridspec_kw={"width_ratios": ratios})
    convergence(axes[0], histories)
    for ax, (name, w) in zip(axes[1:], weights.items(), strict=True):
        image = similarity(ax, w, title=name)
    axes[1].set_ylabel("task")
    figure.colorbar(image, ax=list(axes[1:]), shrink=0.75, label="cosine of weights")
    return figure
