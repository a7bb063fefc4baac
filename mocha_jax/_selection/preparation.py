"""Preparation of samples, fitted to the training samples of a fold, and scores of its held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from mocha_jax import metrics
from mocha_jax._core import check
from mocha_jax._data.standardize import WAYS, Standardize, scaled
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.problem import Problem
from mocha_jax.losses import Loss, ResidualLoss, Squared

# From samples for training to what is done with any; pure, since it runs within compiled programs.
Preparation = Callable[[TaskData], Callable[[TaskData], TaskData]]


# The constant feature of an intercept that is to cost little: its weight is that much less, its penalty by the square.
FREE_INTERCEPT = 10.0


def usual(loss: Loss) -> str:
    """The usual way to standardise samples of tables, by which no level of a group has to be paid for."""
    return "within" if isinstance(loss, ResidualLoss) else "pooled"


def frees_intercept(by: str | None, loss: Loss) -> bool:
    """Tell whether the intercept is not penalised at all, labels being centred too: see `_data.standardize`."""
    return by in ("task", "within", "centred") and isinstance(loss, Squared)


def preparation(owner: str, standardize: str | Preparation | None, labels: bool) -> Preparation | None:
    """The rule for samples that is asked for: by name, or a function of the user's own.

    Args:
      owner: for messages.
      standardize: as asked for.
      labels: whether a rule by name centres labels too.
    """
    if standardize is None:
        return None
    if not isinstance(standardize, str):
        check.function(owner, "standardize", standardize, "lambda training: lambda data: data")
        return standardize
    check.one_of(owner, "standardize", standardize, WAYS)
    return Standardize(standardize, labels)


def prepared(prepare: Preparation | None, data: TaskData) -> TaskData:
    """Samples for training, prepared."""
    if not isinstance(prepare, Standardize):
        return prepared_within(prepare, data)[0]
    return data.standardized(prepare.by, labels=prepare.labels)  # which remembers how


def prepared_within(prepare: Preparation | None, data: TaskData, *others: TaskData) -> list[TaskData]:
    """Prepare within compiled programs, where nothing is remembered."""
    if prepare is None:
        return [data, *others]
    apply = prepare(data)
    check.function("standardize", "what it returns", apply, "lambda data: data")
    prepared_data = [apply(each) for each in (data, *others)]
    for each in prepared_data:
        check.instance("standardize", "what is returned for data", each, TaskData, "data.replace(x=...)")
    return prepared_data


def to_score(
    prepare: Preparation | None, training: TaskData, held_out: TaskData
) -> tuple[TaskData, TaskData, Callable[[Array], Array]]:
    """Prepare samples to train with, and others to score by the labels that they have.

    Where labels are centred to train, what was taken from them is added to predictions again: as the weights of one
    more feature, which is 1 for all samples to score.

    Returns:
      The samples to train with; those to score; and from weights ``[., d]`` for the first those for the second.
    """
    if not isinstance(prepare, Standardize) or not prepare.labels:
        return *prepared_within(prepare, training, held_out), lambda weights: weights  # type: ignore[return-value]
    moments = prepare.fit(training)
    seen = scaled(held_out, moments._replace(level=jnp.zeros_like(moments.level)))
    one = (seen.weight > 0).astype(seen.x.dtype)[..., None]

    def levelled(weights: Array) -> Array:
        level = jnp.broadcast_to(moments.level, (len(weights),)).astype(weights.dtype)
        return jnp.concatenate([weights, level[:, None]], axis=1)

    return scaled(training, moments), seen.replace(x=jnp.concatenate([seen.x, one], axis=2)), levelled


def anonymous(data: TaskData, prepare: Preparation | None) -> TaskData:
    """Data without names, which still says whether it has an intercept where that is asked."""
    return data.unnamed() if prepare is None else data.unnamed().exchange(intercept=data.intercept)


def of_residuals(problem: Problem) -> bool:
    """Tell whether the loss knows labels by their distance from predictions alone, so that both may be moved."""
    return all(isinstance(problem.loss.of_task(t), ResidualLoss) for t in range(problem.data.num_tasks))


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
