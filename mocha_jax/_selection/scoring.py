"""Scores by which candidates are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jax import Array

from mocha_jax import metrics
from mocha_jax._core import check
from mocha_jax._data.task_data import TaskData
from mocha_jax.losses import Loss

Metric = Callable[..., Array]  # metric(weights, data, per_task=True), as in `metrics`

METRICS: dict[str, Metric] = {
    "error_rate": metrics.error_rate,
    "auc": metrics.auc,
    "rmse": metrics.rmse,
    "mean_loss": metrics.mean_loss,
    "absolute_error": metrics.absolute_error,
    "quadratic_kappa": metrics.quadratic_kappa,
    "balanced_error": metrics.balanced_error,
    "f1": metrics.f1,
    "average_precision": metrics.average_precision,
    "ndcg": metrics.ndcg,
    "r2": metrics.r2,
    "explained_variance": metrics.explained_variance,
    "poisson_deviance": metrics.poisson_deviance,
}
OF_THE_LOSS = metrics.mean_loss, metrics.absolute_error, metrics.quadratic_kappa  # those that need it
MORE_IS_BETTER = (
    metrics.auc, metrics.quadratic_kappa, metrics.f1, metrics.average_precision, metrics.ndcg, metrics.r2,
    metrics.explained_variance,
)  # fmt: skip


class Scoring(NamedTuple):
    """A function that scores every task, and which way it is better."""

    metric: Metric
    more_is_better: bool

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.metric, "__name__", "metric")


def scoring(owner: str, metric: Metric | str, metrics_by_name: Mapping[str, Metric]) -> Scoring:
    """The score of a name, or a function of the user's own."""
    if not callable(metric):
        check.one_of(owner, "metric", metric, tuple(metrics_by_name))
        metric = metrics_by_name[metric]
    return Scoring(metric, metric in MORE_IS_BETTER)


def scored(metric: Metric, weights: Array, data: TaskData, loss: Loss) -> Array:
    """Score every task."""
    if metric in OF_THE_LOSS:
        return metric(weights, data, loss, per_task=True)
    return metric(weights, data, per_task=True)
