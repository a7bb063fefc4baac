"""Metrics of a model on held-out data: per task, then averaged over tasks; and what to report of many tasks.

A task without samples in the data has no score and does not count. One whose predictions are
NaN has the score NaN. Weights of one task (a global model) are used
for every task of the data.

It may import `_core`, `_numerics`, `_data`, `losses` and `_model`.
"""

from mocha_jax.metrics._over_tasks import OverTasks as OverTasks
from mocha_jax.metrics._over_tasks import over_tasks as over_tasks
from mocha_jax.metrics._scores import absolute_error as absolute_error
from mocha_jax.metrics._scores import auc as auc
from mocha_jax.metrics._scores import error_rate as error_rate
from mocha_jax.metrics._scores import mean_loss as mean_loss
from mocha_jax.metrics._scores import mean_over_tasks as mean_over_tasks
from mocha_jax.metrics._scores import predicted as predicted
from mocha_jax.metrics._scores import quadratic_kappa as quadratic_kappa
from mocha_jax.metrics._scores import rmse as rmse

__all__ = [
    "absolute_error",
    "auc",
    "error_rate",
    "mean_loss",
    "mean_over_tasks",
    "over_tasks",
    "OverTasks",
    "predicted",
    "quadratic_kappa",
    "rmse",
]


def __dir__() -> list[str]:
    return __all__
