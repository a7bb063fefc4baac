"""Estimators for scikit-learn, of rows that belong to groups.

It needs scikit-learn 1.6 or newer: ``pip install mocha_jax[sklearn]``.

It may import `_core`, `_data`, `_driver`, `_model`, `_problem`, `_selection`, `losses`, `multiclass` and
`regularizers`.
"""

try:
    from sklearn.utils.validation import validate_data as _needed  # noqa: F401  # of 1.6 or newer
except ImportError as error:
    raise ImportError(
        "mocha_jax.sklearn: needs scikit-learn 1.6 or newer (pip install 'mocha_jax[sklearn]')."
    ) from error

from mocha_jax.sklearn._classifier import MochaClassifier as MochaClassifier
from mocha_jax.sklearn._regressor import MochaRegressor as MochaRegressor

__all__ = [
    "MochaClassifier",
    "MochaRegressor",
]


def __dir__() -> list[str]:
    return __all__
