"""The estimator of numbers."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from mocha_jax._core.devices import on_purpose
from mocha_jax.sklearn import _choices
from mocha_jax.sklearn._base import Estimator


class MochaRegressor(RegressorMixin, Estimator):
    r"""Linear regression with a model for every group, related as a regularizer says, for scikit-learn.

    It minimises $\sum_t\sum_i c_{ti}\,\ell(w_t^\top x_{ti} + b_t, y_{ti}) + R(W, \Omega)$ over groups t, of features
    that it standardises itself; coefficients are in the units of the features. No intercept b is penalised: with the
    squared loss exactly so, with others its penalty is a hundredth of a weight's.

    The groups of rows are given in one of two ways: as ``groups=`` of `fit`, `predict` and `score`, which
    scikit-learn's metadata routing hands on where ``set_fit_request(groups=True)`` and the like say so; or as a column
    of X that the parameter `groups` names. The second works everywhere, for scorers hand on nothing to `predict`.
    With ``groups=None`` all rows are one task.

    Args:
      groups: the column of X that holds the group: its name in a data frame, or its place. It is no feature.
        ``"argument"``: they are given to `fit`. None: no groups.
      regularizer: ``"independent"``, ``"pooled"`` (one model for all groups), ``"mean"``, ``"mean_covariance"``,
        ``"probabilistic"``, ``"clustered"``, ``"matrix_normal"``, ``"sparse_precision"``, ``"trace"`` or
        ``"joint_sparse"``; an object of `mocha_jax.regularizers`; or a function, called as ``make(lam=...)``, that
        returns one, such as a class of them.
      lam: the strength $\lambda$; several to choose from; or ``"cv"``, where cross-validation within every group
        chooses among 10, 1, ..., 0.0001 and the other numbers of a named regularizer. None: what an object has, and
        else ``"cv"``.
      loss: ``"squared"``, ``"absolute"``, ``"epsilon_insensitive"``, ``"huber"``, or an object of `mocha_jax.losses`.
      loss_scaling: ``"task_mean"``, every group counts the same, or ``"sum"``, every sample does, see `pack_tasks`.
      standardize: what to do with features, see `TaskData.standardized`: ``"within"``, ``"task"``, ``"pooled"``,
        ``"centred"``, or None. ``"usual"`` is ``"within"`` for numbers and ``"pooled"`` for classes. Within
        cross-validation it is fitted to the training rows of every fold.
      intercept: whether models have one. Without one features stay as they are.
      unseen: what predictions do for a group that was not there in `fit`: ``"error"``; ``"mean"``, the mean of all
        groups' weights, see `LinearModel.predict`; or ``"warn"``, that with a warning.
      tol: relative duality gap at which to stop.
      max_iter: rounds at most.
      random_state: seed of the order of samples; an integer, a `RandomState` or None.

    Attributes:
      coef_: weights of every group ``[m, d]``.
      intercept_: of every group ``[m]``.
      groups_: names of the groups in their order ``[m]``; None without groups.
      n_iter_: rounds that were done.
      dual_gap_: the relative duality gap at the end, a bound on the distance from the optimum.
      regularizer_: the one that was used.
      task_covariance_: of the groups ``[m, m]``, where it is learned.
      cross_validation_: scores of all candidates, where there were several.
      model_: the `LinearModel`, with names; it holds no samples.

    Examples:
      >>> import numpy as np
      >>> from mocha_jax.sklearn import MochaRegressor
      >>> rng = np.random.default_rng(0)
      >>> X, school = rng.normal(size=(60, 2)), np.repeat(["oak", "elm"], 30)
      >>> y = np.where(school == "oak", X[:, 0], -2 * X[:, 0])
      >>> model = MochaRegressor(regularizer="independent", lam=1e-3).fit(X, y, groups=school)
      >>> model.predict([[1.0, 0.0], [1.0, 0.0]], groups=["oak", "elm"]).round(1).tolist()
      [1.0, -2.0]
    """

    @on_purpose
    def fit(
        self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Train the models of all groups.

        Args:
          X: samples ``[k, d]``, or a data frame.
          y: numbers ``[k]``.
          groups: of every sample ``[k]``.
          sample_weight: of every sample ``[k]``, >= 0: how often its loss counts. Cross-validation trains with them,
            and scores every sample alike.
        """
        self._check_parameters()
        loss = _choices.loss_of(self._owner, "squared" if self.loss is None else self.loss, _choices.REGRESSION, False)
        x, y, groups = self._validated(X, y, groups, y_numeric=True)
        self._solve(self._packed(x, y, groups, sample_weight, loss), loss)
        return self

    def predict(self, X: ArrayLike, groups: ArrayLike | None = None) -> np.ndarray:
        """Predict numbers ``[k]``.

        Args:
          X: samples ``[k, d]``, or a data frame.
          groups: of every sample ``[k]``.
        """
        x, tasks = self._asked(X, groups)
        return self.model_.predict(x, tasks, unseen=self._unseen)

    def score(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None
    ) -> float:
        """The coefficient of determination, of all samples together.

        Args:
          X: samples ``[k, d]``, or a data frame.
          y: numbers ``[k]``.
          sample_weight: of every sample ``[k]``.
          groups: of every sample ``[k]``.
        """
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))
