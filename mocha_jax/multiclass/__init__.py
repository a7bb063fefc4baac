"""More than two classes with models for two: each against the rest, all pairs at once, or thresholds of ordered ones.

It may import `_core`, `_numerics`, `_data`, `_model`, `losses`, `regularizers`, `metrics`, `_problem`, `_algorithms`,
`_driver` and `_selection`.
"""

from mocha_jax.multiclass._calibration import calibrated as calibrated
from mocha_jax.multiclass._one_vs_rest import OneVsRest as OneVsRest
from mocha_jax.multiclass._one_vs_rest import one_vs_rest as one_vs_rest
from mocha_jax.multiclass._pairs import by_pair as by_pair
from mocha_jax.multiclass._pairs import pair_model as pair_model
from mocha_jax.multiclass._pairs import weights_of_classes as weights_of_classes
from mocha_jax.multiclass._scores import ClassScores as ClassScores
from mocha_jax.multiclass._scores import class_scores as class_scores
from mocha_jax.multiclass._scores import confusion as confusion
from mocha_jax.multiclass._scores import error_rate as error_rate
from mocha_jax.multiclass._scores import log_loss as log_loss
from mocha_jax.multiclass._search import cross_validate as cross_validate
from mocha_jax.multiclass._search import lambda_path as lambda_path
from mocha_jax.multiclass._thresholds import by_threshold as by_threshold
from mocha_jax.multiclass._thresholds import thresholds_of as thresholds_of

__all__ = [
    "by_pair",
    "by_threshold",
    "calibrated",
    "class_scores",
    "ClassScores",
    "confusion",
    "cross_validate",
    "error_rate",
    "lambda_path",
    "log_loss",
    "one_vs_rest",
    "OneVsRest",
    "pair_model",
    "thresholds_of",
    "weights_of_classes",
]


def __dir__() -> list[str]:
    return __all__
