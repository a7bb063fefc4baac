"""The estimator of classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets

from mocha_jax import multiclass
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.warnings import NotConverged, silenced, warn
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.problem import Problem
from mocha_jax._selection.candidates import candidate
from mocha_jax._selection.results import CrossValidation
from mocha_jax.losses import Loss
from mocha_jax.multiclass import OneVsRest
from mocha_jax.multiclass._one_vs_rest import unfinished_classes
from mocha_jax.regularizers import Regularizer
from mocha_jax.sklearn import _choices
from mocha_jax.sklearn._base import Estimator


def _has_probabilities(estimator: MochaClassifier) -> bool:
    """Tell whether the loss has some; AttributeError where it has not."""
    return estimator._loss().log_odds


class MochaClassifier(ClassifierMixin, Estimator):
    r"""Linear classification with a model for every group, related as a regularizer says, for scikit-learn.

    Labels are any two classes, or more: then every class has a model against all others, see `one_vs_rest`.

    Args:
      groups: the column of X that holds the group, see `MochaRegressor`.
      regularizer: a name, an object or a function, see `MochaRegressor`.
      lam: the strength, several, or ``"cv"``, see `MochaRegressor`; of more than two classes one for all.
      loss: ``"logistic"``, which has probabilities, ``"hinge"``, ``"smoothed_hinge"``, ``"squared_hinge"``, or an
        object of `mocha_jax.losses` for two classes.
      loss_scaling: ``"task_mean"``, every group counts the same, or ``"sum"``, every sample does, see `pack_tasks`.
      standardize: what to do with features, see `MochaRegressor`.
      intercept: whether models have one, see `MochaRegressor`.
      unseen: ``"error"``, ``"mean"`` or ``"warn"``, see `MochaRegressor`.
      tol: relative duality gap at which to stop.
      max_iter: rounds at most.
      random_state: seed of the order of samples; an integer, a `RandomState` or None.

    Attributes:
      classes_: the labels in their order.
      coef_: weights of every group ``[m, d]``; of more than two classes ``[classes, m, d]``, and so on below.
      intercept_: of every group ``[m]``.
      groups_: names of the groups in their order ``[m]``; None without groups.
      n_iter_: rounds that were done; of more than two classes the most.
      dual_gap_: the relative duality gap at the end; of more than two classes the largest.
      regularizer_: the one that was used.
      task_covariance_: of the groups ``[m, m]``, where it is learned.
      cross_validation_: scores of all candidates, where there were several.
      model_: the `LinearModel`, with names; of more than two classes the `MulticlassModel`.

    Examples:
      >>> import numpy as np
      >>> from mocha_jax.sklearn import MochaClassifier
      >>> rng = np.random.default_rng(0)
      >>> X, user = rng.normal(size=(60, 2)), np.repeat(["ada", "bob"], 30)
      >>> y = np.where((X[:, 0] > 0) == (user == "ada"), "walks", "rests")
      >>> model = MochaClassifier(lam=1e-3).fit(X, y, groups=user)
      >>> model.predict([[1.0, 0.0], [1.0, 0.0]], groups=["ada", "bob"]).tolist()
      ['walks', 'rests']
    """

    @on_purpose
    def fit(
        self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Train the models of all groups.

        Args:
          X: samples ``[k, d]``, or a data frame.
          y: labels ``[k]``.
          groups: of every sample ``[k]``.
          sample_weight: of every sample ``[k]``, >= 0: how often its loss counts. Cross-validation trains with them,
            and scores every sample alike.
        """
        self._check_parameters()
        loss = self._loss()
        x, y, groups = self._validated(X, y, groups)
        check_classification_targets(y)
        self.classes_, code = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"{self._owner}: y must have two classes or more, got one class, {self.classes_[0]!r}.")
        names = tuple(self.classes_.tolist())
        if len(names) == 2:
            self._solve(self._packed(x, 2.0 * code - 1.0, groups, sample_weight, loss, names), loss)
        else:
            self._solve_each(self._packed(x, code, groups, sample_weight, loss, names), loss)
        return self

    def _loss(self) -> Loss:
        return _choices.loss_of(
            self._owner, "logistic" if self.loss is None else self.loss, _choices.CLASSIFICATION, True
        )

    def _solve_each(self, data: TaskData, loss: Loss) -> None:
        """Solve the problem of each class against all others, and remember their model."""

        def choose(data: TaskData, candidates: Regularizer, **options: Any) -> CrossValidation[OneVsRest]:
            return multiclass.cross_validate(data, with_regularizer(candidate(candidates, 0)), candidates, **options)

        def with_regularizer(regularizer: Regularizer) -> Callable[[TaskData], Problem]:
            return lambda data: Problem(data, loss, regularizer)

        fitted, regularizer = self._chosen(data, loss, choose)
        make, tol, rounds = with_regularizer(regularizer), float(self.tol), int(self.max_iter)
        with silenced(NotConverged):  # for scikit-learn's own category
            models = multiclass.one_vs_rest(fitted, make, key=self._key(), tol=tol, max_rounds=rounds, record_every=1)
        relations = [jax.tree.map(lambda leaf, k=k: leaf[k], models.relation) for k in range(len(self.classes_))]
        self._keep(models.model, relations, int(models.rounds.max()), float(models.certificate.residual.max()))
        caveat = unfinished_classes(models, tol, rounds)
        if not np.isfinite(self.dual_gap_):
            caveat = "the weights of a class are no longer finite numbers; scale the features"
        if caveat is not None:
            warn(f"{self._owner}: {caveat}", ConvergenceWarning)

    def decision_function(self, X: ArrayLike, groups: ArrayLike | None = None) -> np.ndarray:
        """The predictions w'x + b of the second class ``[k]``; of more than two, of each ``[k, classes]``.

        Args:
          X: samples ``[k, d]``, or a data frame.
          groups: of every sample ``[k]``.
        """
        x, tasks = self._asked(X, groups)
        return self.model_.decision_function(x, tasks, unseen=self._unseen)

    def predict(self, X: ArrayLike, groups: ArrayLike | None = None) -> np.ndarray:
        """Predict classes ``[k]``.

        Args:
          X: samples ``[k, d]``, or a data frame.
          groups: of every sample ``[k]``.
        """
        z = self.decision_function(X, groups)
        return self.classes_[(z > 0).astype(int) if z.ndim == 1 else z.argmax(axis=1)]

    @available_if(_has_probabilities)
    def predict_proba(self, X: ArrayLike, groups: ArrayLike | None = None) -> np.ndarray:
        """The probabilities of all classes ``[k, classes]``, of the logistic loss.

        Of more than two classes each has its own model, and what these say is divided by its sum.

        Args:
          X: samples ``[k, d]``, or a data frame.
          groups: of every sample ``[k]``.
        """
        x, tasks = self._asked(X, groups)
        return self.model_.predict_proba(x, tasks, unseen=self._unseen)

    def score(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None
    ) -> float:
        """The share of right classes, of all samples together.

        Args:
          X: samples ``[k, d]``, or a data frame.
          y: labels ``[k]``.
          sample_weight: of every sample ``[k]``.
          groups: of every sample ``[k]``.
        """
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))
