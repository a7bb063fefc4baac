"""Metrics of a model on held-out data: per task, then averaged over tasks; and summaries over many tasks.

A task without samples in the data has no score and does not count. One whose predictions are
NaN has the score NaN. Weights of one task (a global model) are used
for every task of the data.

It may import `_core`, `_numerics`, `_data`, `losses` and `_model`.
"""

from mocha_jax.metrics._classes import balanced_error as balanced_error
from mocha_jax.metrics._classes import error_rate as error_rate
from mocha_jax.metrics._classes import f1 as f1
from mocha_jax.metrics._classes import log_loss as log_loss
from mocha_jax.metrics._compare import Comparison as Comparison
from mocha_jax.metrics._compare import compare as compare
from mocha_jax.metrics._means import mean_over_tasks as mean_over_tasks
from mocha_jax.metrics._means import predicted as predicted
from mocha_jax.metrics._numbers import absolute_error as absolute_error
from mocha_jax.metrics._numbers import explained_variance as explained_variance
from mocha_jax.metrics._numbers import mean_loss as mean_loss
from mocha_jax.metrics._numbers import poisson_deviance as poisson_deviance
from mocha_jax.metrics._numbers import quadratic_kappa as quadratic_kappa
from mocha_jax.metrics._numbers import r2 as r2
from mocha_jax.metrics._numbers import rmse as rmse
from mocha_jax.metrics._over_tasks import OverTasks as OverTasks
from mocha_jax.metrics._over_tasks import over_tasks as over_tasks
from mocha_jax.metrics._rankings import auc as auc
from mocha_jax.metrics._rankings import average_precision as average_precision
from mocha_jax.metrics._rankings import ndcg as ndcg

__all__ = [
    "absolute_error",
    "auc",
    "average_precision",
    "balanced_error",
    "compare",
    "Comparison",
    "error_rate",
    "explained_variance",
    "f1",
    "log_loss",
    "mean_loss",
    "mean_over_tasks",
    "ndcg",
    "over_tasks",
    "OverTasks",
    "poisson_deviance",
    "predicted",
    "quadratic_kappa",
    "r2",
    "rmse",
]


def __dir__() -> list[str]:
    return __all__
