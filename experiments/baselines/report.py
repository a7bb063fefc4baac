"""Scores of tasks, and tables of many splits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import mocha_jax as mj
from experiments.baselines.tables import Rows

# The metrics of every kind of table: the factor of what is printed, and whether more is better. Methods are compared
# by the first.
METRICS = {
    "numbers": {"RMSE": (1.0, False), "explained variance %": (100.0, True)},
    "rare": {"AUC %": (100.0, True), "average precision %": (100.0, True)},
    "classes": {"error %": (100.0, False)},
}
AGAINST = "mocha_jax, learned"


class Row(NamedTuple):
    """One metric of one method on one split; a line of the CSV."""

    table: str
    seed: int
    method: str
    metric: str
    score: float  # mean over tasks; of the explained variance over all rows, as in the papers
    tasks: str  # the score of every task that has one in some split, else nan
    chosen: str
    seconds: float  # of the CPU, for the choice and the training


def scores(kind: str, test: Rows, said: np.ndarray, tasks: np.ndarray) -> dict[str, tuple[float, np.ndarray]]:
    """Of every metric the score, and that of every task."""
    found = {}
    for name in METRICS[kind]:
        each = np.array([_score(name, test.y[test.group == t], said[test.group == t]) for t in tasks])
        overall = _score(name, test.y, said) if name.startswith("explained") else float(np.nanmean(each))
        found[name] = (overall, each)
    return found


def _score(name: str, y: np.ndarray, said: np.ndarray) -> float:
    if not len(y):
        return float("nan")
    if name == "RMSE":
        return float(np.sqrt(np.mean((y - said) ** 2)))
    if name == "error %":
        return float(np.mean(y != said))
    if name.startswith("explained"):
        return float(1.0 - np.mean((y - said) ** 2) / np.var(y)) if np.var(y) > 0 else float("nan")
    from sklearn.metrics import average_precision_score, roc_auc_score

    if len(np.unique(y)) < 2:
        return float("nan")
    return float((roc_auc_score if name == "AUC %" else average_precision_score)(y, said))


def markdown(rows: list[Row], table: str, kind: str, methods: list[str], missing: dict[str, str]) -> str:
    """Means and standard errors over splits, and differences from the learned relationship in pairs."""
    metrics = METRICS[kind]
    first, (factor, more) = next(iter(metrics.items()))
    mine = [row for row in rows if row.table == table]
    seeds = sorted({row.seed for row in mine})
    per_task = {}
    for method in methods:
        its = [row for row in mine if (row.method, row.metric) == (method, first)]
        of = {row.seed: np.array(row.tasks.split(), float) for row in its}
        if len(of) == len(seeds):
            per_task[method] = factor * np.stack([of[seed] for seed in seeds])
    compared = mj.metrics.compare(per_task, baseline=AGAINST, maximise=more) if AGAINST in per_task else None
    head = [f"{table}, {len(seeds)} splits", *metrics, "minus learned [95 %]", "tasks better", "CPU s"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for method in methods:
        if method in missing:
            lines.append(f"| {method} | {missing[method]} is not installed |" + " |" * (len(head) - 2))
            continue
        cells, seconds = [], [row.seconds for row in mine if (row.method, row.metric) == (method, first)]
        for metric, (scale, _) in metrics.items():
            values = [scale * row.score for row in mine if (row.method, row.metric) == (method, metric)]
            spread = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
            cells.append(f"{np.mean(values):.2f} ± {spread:.2f}" if values else "")
        summary = compared.summaries[method] if compared is not None and method in per_task else None
        if summary is not None and summary.difference_interval is not None and summary.better is not None:
            low, high = summary.difference_interval
            cells += [f"{summary.difference:+.2f} [{low:+.2f}, {high:+.2f}]", f"{100 * summary.better:.0f} %"]
        else:
            cells += ["", ""]
        lines.append(f"| {method} | {' | '.join(cells)} | {np.median(seconds):.1f} |" if seconds else f"| {method} |")
    return "\n".join(lines) + "\n"
