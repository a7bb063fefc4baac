"""Pictures of tasks and their relationship."""

from __future__ import annotations

import numpy as np
from jax import Array
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from mocha_jax._core import check
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.solution import Solution
from mocha_jax._problem.problem import Problem

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
