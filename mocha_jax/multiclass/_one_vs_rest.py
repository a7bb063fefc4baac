"""A model for every class against all others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.compiling import Program
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Pytree, Relation, static, summary
from mocha_jax._core.warnings import NotConverged, warn
from mocha_jax._data.moments import Scaling
from mocha_jax._data.names import NAMELESS, Names
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.config import or_by_loops
from mocha_jax._driver.solution import Solution
from mocha_jax._model.base import matched
from mocha_jax._model.multiclass import MulticlassModel
from mocha_jax._problem.gap import Certificate
from mocha_jax._problem.problem import Problem
from mocha_jax._problem.to_model import how_trained, slopes_and_intercepts
from mocha_jax._selection import caveats
from mocha_jax._selection.candidates import SolveOptions, solve_options
from mocha_jax.losses import Loss
from mocha_jax.multiclass import _scores
from mocha_jax.multiclass._each_class import EachClass, Make, count_classes, each_class
from mocha_jax.multiclass._scores import ClassScores
from mocha_jax.regularizers import Regularizer


class OneVsRest(Pytree):
    """A model for every class; the class with the largest decision value is predicted.

    Data is given as when it was packed; its tasks and features are found by name where there are names.
    """

    weights: Array  # [classes, num_tasks, d]
    relation: Relation  # Omega of each; None where it is given
    certificate: Certificate  # of each, [classes, ...]
    rounds: Array  # [classes] int32
    loss: Loss | None = None
    regularizer: Regularizer | None = None
    calibration: Array | None = None  # [classes, 2] from `calibrated`
    names: Names = static(default=NAMELESS)  # of tasks, features and classes
    intercept: float = static(default=0.0)  # see `TaskData`
    scaling: Scaling | None = static(default=None)  # see `TaskData`

    def predict(self, data: TaskData) -> Array:
        """The class of every sample, ``[m, n]`` int32."""
        return jnp.argmax(_scores.said(self, data), axis=0).astype(jnp.int32)

    def decision_function(self, data: TaskData) -> Array:
        """Return the decision value of each class for every sample, ``[m, n, classes]``."""
        return jnp.moveaxis(_scores.said(self, data), 0, -1)

    def predict_proba(self, data: TaskData) -> Array:
        """Probabilities of the classes ``[m, n, classes]``: calibrated ones, else of the logistic loss."""
        return _scores.probabilities(self, data)

    def error_rate(self, data: TaskData, *, per_task: bool = False) -> Array:
        """Share of wrong classes, mean over tasks; of every task with `per_task`.

        NaN without samples, or where a model predicts NaN.
        """
        return _scores.error_rate(self, data, per_task=per_task)

    def confusion(self, data: TaskData, *, per_task: bool = False) -> Array:
        """Count samples by class and predicted class, see `multiclass.confusion`."""
        return _scores.confusion(self, data, per_task=per_task)

    def scores(self, data: TaskData, *, per_task: bool = False) -> ClassScores:
        """Precision, recall and F1 of every class, see `multiclass.class_scores`."""
        return _scores.class_scores(self, data, per_task=per_task)

    @property
    @on_purpose
    def message(self) -> str:
        """Say in a sentence how far the models of all classes were trained."""
        reached = "" if self.certificate is None else f" with residuals up to {np.max(self.certificate.residual):.2g}"
        return f"each class against the rest, after up to {np.max(self.rounds)} rounds{reached}"

    @on_purpose
    def __repr__(self) -> str:
        if check.hidden(self.rounds) or np.ndim(self.rounds) != 1:
            return summary(self, {"weights": self.weights, "rounds": self.rounds})
        classes, tasks, _ = self.weights.shape
        return f"OneVsRest({classes} classes, {tasks} tasks, {self.message})"

    @property
    @on_purpose
    def model(self) -> MulticlassModel:
        """The model that predicts: weights with the names of tasks, features and classes, without samples."""
        weights, gaps = np.asarray(self.weights), {}
        if self.certificate is not None:
            gaps = {
                "relative_gap": self.certificate.relative_gap,
                "relative_joint_gap": self.certificate.relative_joint_gap,
            }
        quality = {name: float(np.max(gap)) for name, gap in gaps.items() if np.isfinite(gap).all()}
        quality["rounds"] = int(np.max(self.rounds))
        slopes, intercept = slopes_and_intercepts(weights, self)
        return MulticlassModel(
            slopes, intercept, self.names, self.logistic,
            None if self.calibration is None else np.asarray(self.calibration), "one_vs_rest",
            {**how_trained(self.loss, self.regularizer), "message": self.message, **quality},
        )  # fmt: skip

    @property
    def logistic(self) -> bool:
        """Tell whether decision values are the logarithms of odds, so that there are probabilities."""
        return self.loss is not None and all(self.loss.of_task(t).log_odds for t in range(self.weights.shape[1]))

    @on_purpose
    def weights_for(self, data: TaskData) -> Array:
        """The weights of the tasks of a data set, found by their names ``[classes, num_tasks of the data, d]``."""
        if (self.intercept, self.scaling) != (data.intercept, data.scaling):
            return jnp.asarray(self.model.weights_for(data), self.weights.dtype)
        of_features = self.weights.shape[-1] - bool(self.intercept)
        order, columns = matched(self.names, self.weights.shape[1], of_features, data)
        if self.intercept:
            columns = np.r_[columns, of_features]
        return self.weights[:, order][:, :, columns]


@on_purpose
def one_vs_rest(
    data: TaskData,
    make: Make,
    algorithm: Algorithm[Problem] | None = None,
    *,
    classes: int | None = None,
    key: Array | None = None,
    tol: float = 1e-3,
    max_rounds: int = 500,
    record_every: int = 5,
) -> OneVsRest:
    """Train a model for each class against all others; one compiled call for all classes.

    A warning, `NotConverged`, names classes whose models did not reach the tolerance.

    Args:
      data: samples with labels 0, 1, ..., classes - 1.
      make: the problem for labels -1 and +1.
      algorithm: default as for `solve`.
      classes: how many; default one more than the largest label, or as many as there are names of classes.
      key: a JAX random key; default ``jax.random.key(0)``.
      tol: relative gap at which to stop.
      max_rounds: of each model.
      record_every: rounds between tests of the gap.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(60, 3)).astype("f") for _ in range(4)]
      >>> data = mj.pack_tasks(xs, [x.argmax(1) for x in xs], loss_scaling="task_mean")
      >>> def hinge(data):
      ...     return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(1e-3))
      >>> found = mj.one_vs_rest(data, hinge)
      >>> found.weights.shape, bool(found.error_rate(data) < 0.1)
      ((3, 4, 3), True)
    """
    owner = "one_vs_rest"
    count = count_classes(owner, data, classes)
    key = jax.random.key(0) if key is None else key
    check.key(owner, key)
    each, first = each_class(owner, data, make, count)
    options = solve_options(owner, first, algorithm, tol, max_rounds, record_every)
    trained_models = or_by_loops(first, options.algorithm, lambda by: trained(key, each, options.replace(algorithm=by)))
    model = described(trained_models, first, data.names)
    warn_of_classes(owner, model, options)
    return model


def warn_of_classes(owner: str, model: OneVsRest, options: SolveOptions) -> None:
    """Warn of classes whose models did not reach the tolerance."""
    if (caveat := unfinished_classes(model, options.tol, options.max_rounds)) is not None:
        warn(f"{owner}: {caveat}", NotConverged)


def unfinished_classes(model: OneVsRest, tol: float, max_rounds: int) -> str | None:
    """A sentence on classes whose models did not reach the tolerance; None if all did."""
    return caveats.unfinished(
        np.asarray(model.certificate.residual), np.asarray(model.rounds), tol, max_rounds,
        then="are as far as they got", of="classes", names=model.names.classes,
    )  # fmt: skip


def _train(key: Array, each: EachClass, options: SolveOptions) -> OneVsRest:
    """Solve for every class."""
    return each.map(lambda problem: of_solution(options.solve(key, problem, None)))


trained = Program(_train, lambda key, each, *_: each.size, often=True)


def of_solution(s: Solution[Problem]) -> OneVsRest:
    """Keep of one class's solution what the record of all keeps, without an axis for classes."""
    return OneVsRest(s.weights, s.relation, s.certificate, jnp.asarray(s.rounds, jnp.int32))


def described(models: OneVsRest, first: Problem, names: Names) -> OneVsRest:
    """Add what the problem of a class knows, and the names of the data's classes."""
    data, count = first.data, models.weights.shape[0]
    classes = names.classes if len(names.classes or ()) == count else None
    return models.exchange(
        loss=first.loss,
        regularizer=first.regularizer,
        intercept=data.intercept,
        scaling=data.scaling,
        names=data.names.replace(classes=classes),
    )
