"""Pictures of solves: how they went, their tasks, and the relationship of these."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax import Array
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from mocha_jax._core import check
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.history import History
from mocha_jax._driver.solution import Solution
from mocha_jax._problem.problem import Problem
from mocha_jax._selection.tuning import Tuned

# Okabe and Ito's colours, told apart by readers with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def similarity(axes: Axes, weights: Array, *, title: str = "") -> AxesImage:
    """Cosine of the angle between every two tasks' weights, as a heat map from -1 to 1."""
    check.instance("similarity", "axes", axes, Axes, "figure.subplots()")
    check.instance("similarity", "title", title, str, "'MOCHA'")
    w = np.asarray(check.floats("similarity", "weights", weights, ("tasks", "d")))
    w = w / np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-30)
    image = axes.imshow(w @ w.T, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    axes.set_title(title, fontsize=11)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("task")
    return image


def label_distribution(axes: Axes, data: TaskData, *, title: str = "") -> None:
    """Draw how many samples of each class every client has, as stacked bars; for labels 0, 1, ... or -1 and +1."""
    check.instance("label_distribution", "axes", axes, Axes, "figure.subplots()")
    check.instance("label_distribution", "data", data, TaskData, "pack_tasks(xs, ys)")
    check.instance("label_distribution", "title", title, str, "'Dirichlet 0.1'")
    y, real = np.asarray(data.y), np.asarray(data.weight) > 0
    classes, clients = np.unique(y[real]), np.arange(data.num_nodes)
    if len(classes) > 64:
        raise ValueError(f"label_distribution: {len(classes)} different labels are no classes.")
    colours = colormaps["tab20" if len(classes) > 10 else "tab10"]
    below = np.zeros(len(clients))
    for i, label in enumerate(classes):
        count = ((y == label) & real).sum(1)
        axes.bar(clients, count, 1.0, bottom=below, color=colours(i % colours.N), label=f"{label:g}", lw=0)
        below += count
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("client")
    axes.set_ylabel("samples")
    axes.set_xlim(-0.5, len(clients) - 0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="class", fontsize=7, ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def cluster_order(correlation: Array | np.ndarray) -> np.ndarray:
    """An order of the tasks that puts related ones side by side: average linkage, leaves in tree order ``[m]``."""
    similarity = np.array(check.square("cluster_order", "correlation", correlation))
    if np.isnan(similarity).any():
        raise ValueError("cluster_order: correlation has a NaN entry; a task with it is like no other.")
    np.fill_diagonal(similarity, -np.inf)
    members = [[t] for t in range(len(similarity))]
    for _ in range(len(similarity) - 1):
        i, j = sorted(np.unravel_index(np.argmax(similarity), similarity.shape))
        a, b = len(members[i]), len(members[j])
        merged = (a * similarity[i] + b * similarity[j]) / (a + b)
        similarity[i], similarity[:, i] = merged, merged
        similarity[i, i] = similarity[j] = similarity[:, j] = -np.inf
        members[i], members[j] = members[i] + members[j], []
    return np.array(max(members, key=len))


def relationship(solution: Solution[Problem], *, title: str = "") -> Figure:
    """Draw how the tasks of a solution relate: their correlation in cluster order, and the eigenvalues of Omega."""
    check.instance("relationship", "solution", solution, Solution, "solve(problem)")
    check.instance("relationship", "title", title, str, "'MOCHA'")
    correlation, omega = np.asarray(solution.correlation), np.asarray(solution.omega)
    order = cluster_order(correlation)
    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.0, 1.15]})
    image = left.imshow(correlation[np.ix_(order, order)], cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=left, shrink=0.8, label="correlation of tasks")
    left.set_xlabel("task, in cluster order")
    left.set_ylabel("task")
    if len(order) <= 30:
        task_names = solution.problem.data.names.tasks
        names = [str(t if task_names is None else task_names[t]) for t in order]
        left.set_xticks(range(len(order)), names, fontsize=6, rotation=90)
        left.set_yticks(range(len(order)), names, fontsize=6)
    values = np.maximum(np.linalg.eigvalsh(omega)[::-1], 0.0)
    rank = int((values > 1e-6 * values[0]).sum())
    right.bar(np.arange(1, len(values) + 1), values, color=COLOURS[0])
    right.set_xlabel("eigenvalues of Ω, in falling order")
    right.set_ylabel("eigenvalue")
    right.set_title(f"numerical rank {rank} of {len(values)}", fontsize=11)
    right.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    return figure


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
