"""The part that both estimators share: rows with groups, a solve, and a model that is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_array, check_is_fitted, check_X_y, validate_data

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.program_cache import keep_programs
from mocha_jax._core.pytree import Relation
from mocha_jax._core.warnings import NotConverged, silenced, warn
from mocha_jax._data.frames import check_unmasked
from mocha_jax._data.names import columns_of, listed, places
from mocha_jax._data.pack import pack_tasks
from mocha_jax._data.standardize import WAYS
from mocha_jax._data.task_data import SCALINGS, TaskData
from mocha_jax._driver.solution import Status
from mocha_jax._driver.solve import solve
from mocha_jax._model.base import UNSEEN
from mocha_jax._model.linear import LinearModel
from mocha_jax._model.multiclass import MulticlassModel
from mocha_jax._problem.problem import Problem
from mocha_jax._selection.candidates import candidate
from mocha_jax._selection.cross_validation import cross_validate
from mocha_jax._selection.preparation import FREE_INTERCEPT, frees_intercept, preparation, prepared, usual
from mocha_jax._selection.results import CrossValidation
from mocha_jax.losses import Loss, ResidualLoss
from mocha_jax.regularizers import Regularizer
from mocha_jax.sklearn import _choices

# To choose among candidates no solve needs to be more exact; parts of every group's rows for that, at most.
_CHOICE_TOL, _FOLDS = 1e-3, 5

# Groups as an argument of `fit`; samples prepared as usual; for groups that were not there the mean, with a warning.
ARGUMENT, USUAL, WARN = "argument", "usual", "warn"

Choose = Callable[..., CrossValidation]  # choose(data, candidates, **options of cross_validate)


class Estimator(BaseEstimator):
    """The parameters, and how rows with groups become a model; see `MochaRegressor`."""

    model_: LinearModel | MulticlassModel
    regularizer_: Any  # has the fields of its own
    groups_: Any  # [m] their names; None of one model for all
    cross_validation_: CrossValidation
    coef_: np.ndarray
    intercept_: np.ndarray

    def __init__(
        self,
        *,
        groups: str | int | None = ARGUMENT,
        regularizer: object = "mean_covariance",
        lam: object = None,
        loss: object = None,
        loss_scaling: str = "task_mean",
        standardize: str | None = USUAL,
        intercept: bool = True,
        unseen: str = WARN,
        tol: float = 1e-4,
        max_iter: int = 1000,
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.groups = groups
        self.regularizer = regularizer
        self.lam = lam
        self.loss = loss
        self.loss_scaling = loss_scaling
        self.standardize = standardize
        self.intercept = intercept
        self.unseen = unseen
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    @property
    @on_purpose
    def task_covariance_(self) -> np.ndarray:
        """The covariance of the tasks' weights up to scale, ``[m, m]``; AttributeError where none was learned."""
        check_is_fitted(self)
        if not self.regularizer_.learned:
            raise AttributeError(f"a {type(self.regularizer_).__name__} learns no covariance of tasks.")
        m = self.coef_.shape[-2]
        each = [np.asarray(self.regularizer_.covariance(m, relation)) for relation in self._relations]
        return each[0] if len(each) == 1 else np.stack(each)

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def _check_parameters(self) -> None:
        owner = self._owner
        check.one_of(owner, "loss_scaling", self.loss_scaling, SCALINGS)
        check.one_of(owner, "unseen", self.unseen, (*UNSEEN, WARN))
        if self.standardize is not None:
            check.one_of(owner, "standardize", self.standardize, (USUAL, *WAYS))
        if not self.intercept and self.standardize not in (USUAL, None):
            raise ValueError(
                f"{owner}: standardize must be None where intercept is False: centred samples have an intercept."
            )
        check.flag(owner, intercept=self.intercept)
        check.scalar(owner, tol=self.tol)
        check.nonnegative(owner, tol=self.tol)
        check.integer(owner, 1, max_iter=self.max_iter)

    def _validated(
        self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None, **asked: object
    ) -> tuple[np.ndarray, np.ndarray, ArrayLike | None]:
        """Samples, labels and groups to train with; the number and names of the columns are remembered."""
        if self._by_argument:
            if groups is None and self.groups is not None:
                raise ValueError(
                    f"{self._owner}: groups must be given: fit(X, y, groups=...), or the column of X that holds them, "
                    f'{self._owner}(groups="school"), or {self._owner}(groups=None) for one model of all samples.'
                )
            return *validate_data(self, X, y, **asked), groups
        validate_data(self, X, y, skip_check_array=True)
        x, groups = self._apart(X, groups)
        return *check_X_y(x, y, estimator=self, **asked), groups

    def _asked(self, X: ArrayLike, groups: ArrayLike | None) -> tuple[np.ndarray, Sequence[Hashable] | None]:
        """Samples to predict, and their groups."""
        check_is_fitted(self)
        if self._by_argument:
            x = validate_data(self, X, reset=False)
        else:
            validate_data(self, X, reset=False, skip_check_array=True)
            x, groups = self._apart(X, groups)
            x = check_array(x, estimator=self)
        if self.groups_ is None and groups is not None:
            raise ValueError(f"{self._owner}: groups must be None, as they were in fit.")
        model = self.model_
        if model.names.tasks is None:  # one for all
            return x, None
        if groups is None and model.num_tasks > 1:
            raise ValueError(
                f"{self._owner}: groups must name the group of every sample, for {model.num_tasks} groups have models "
                f"of their own; scikit-learn's scorers pass none to predict, so keep them in a column of X there and "
                f'name it, e.g. {self._owner}(groups="school").'
            )
        named = None if groups is None else _labels(self._owner, groups, len(x)).tolist()
        if self.unseen == WARN and named is not None:
            self._warn_of_unseen(named)
        return x, named

    @property
    def _by_argument(self) -> bool:
        """Tell whether groups are no column of X."""
        return self.groups is None or self.groups == ARGUMENT

    @property
    def _unseen(self) -> str:
        """The word for it that models know."""
        return "mean" if self.unseen == WARN else self.unseen

    def _warn_of_unseen(self, groups: list[Hashable]) -> None:
        model_tasks = set(self.model_.tasks)
        if (new := dict.fromkeys(name for name in groups if name not in model_tasks)) and len(model_tasks) > 1:
            warn(
                f"{self._owner}: {listed(tuple(new))} not seen in fit, predicted with the mean of all groups; folds "
                f"that divide the rows of every group are KFold(shuffle=True), those of whole groups GroupKFold, and "
                f'unseen="mean" or "error" says what to do.'
            )

    def _apart(self, X: Any, groups: ArrayLike | None) -> tuple[ArrayLike, ArrayLike]:
        """The samples without the column that holds the group, and that column."""
        owner = self._owner
        if groups is not None:
            raise ValueError(f"{owner}: groups must be left out where a column of X, {self.groups!r}, holds them.")
        columns = columns_of(owner, X)
        if columns is None:
            X = _array(X)
        width = X.shape[1]
        if isinstance(self.groups, str):
            if columns is None:
                raise ValueError(
                    f"{owner}: groups names a column, {self.groups!r}, but X is no data frame; give its place."
                )
            place = int(places(owner, "column", [self.groups], columns)[0])
        else:
            number = check.whole(self.groups)
            if number is None or not -width <= number < width:
                raise ValueError(
                    f"{owner}: groups must be the name of a column of X or its place, an integer from {-width} to "
                    f"{width - 1}, got {check.shown(self.groups)}."
                )  # fmt: skip
            place = number % width
        others = [j for j in range(width) if j != place]
        if columns is None:
            return X[:, others], X[:, place]
        return X[[X.columns[j] for j in others]], X[X.columns[place]]

    def _packed(
        self, x: np.ndarray, y: np.ndarray, groups: ArrayLike | None, weights: ArrayLike | None, loss: Loss,
        classes: tuple[Hashable, ...] | None = None,
    ) -> TaskData:  # fmt: skip
        """The samples of every group, padded to one of few numbers of rows, with their names and weights."""
        keep_programs()
        column = self.intercept and not frees_intercept(self._by(loss), loss)
        how: dict[str, Any] = {"intercept": FREE_INTERCEPT if column else False, "dtype": jnp.result_type(float)}
        weight = self._weights(weights, x)
        counts = weight > 0  # the others are as if they were not there
        x, y, weight = x[counts], y[counts], weight[counts]
        if groups is None:
            self.groups_, place = None, np.zeros(len(x), int)
            data = pack_tasks([x], [y], rows=room_for(len(x)), **how)
        else:
            groups = _labels(self._owner, groups, len(counts))[counts]
            data = pack_tasks(x, y, groups, rows=room_for(max(Counter(groups.tolist()).values())), **how)
            self.groups_ = np.array(data.names.tasks)
            number = {name: t for t, name in enumerate(data.names.tasks or ())}
            place = np.array([number[name] for name in groups.tolist()])
        data = data.replace(names=data.names.replace(features=self._features(), classes=classes))
        if weights is None:
            return data
        own = np.zeros(data.y.shape)
        for t in range(data.num_tasks):
            theirs = weight[place == t]  # in the order of the samples, as `pack_tasks` keeps it
            own[t, : len(theirs)] = theirs
        return data.replace(weight=jnp.asarray(own, data.dtype))

    def _by(self, loss: Loss) -> str | None:
        """The way in which samples are standardised."""
        if not self.intercept:
            return None
        return usual(loss) if self.standardize == USUAL else self.standardize

    def _weights(self, weights: ArrayLike | None, x: np.ndarray) -> np.ndarray:
        """The weight of every sample, none negative and not all 0."""
        if weights is None:
            return np.ones(len(x))
        if isinstance(weights, str):
            raise ValueError(
                f"{self._owner}: sample_weight must be a number for each sample, got {check.shown(weights)}."
            )
        weight = _check_sample_weight(weights, x, dtype=np.float64)
        if not (weight >= 0).all() or not weight.any():
            raise ValueError(
                f"{self._owner}: sample_weight must be weights >= 0 that are not all zero, got {check.shown(weights)}."
            )
        return weight

    def _scaled(self, data: TaskData) -> TaskData:
        """The weights of samples as `loss_scaling` has them: as they are, or of sum 1 in every task."""
        if self.loss_scaling == "sum":
            return data
        total = data.to_tasks(jnp.sum(data.weight, axis=1))
        return data.replace(loss_scaling=self.loss_scaling, weight=data.weight / data.to_nodes(total)[:, None])

    def _features(self) -> tuple[str, ...] | None:
        """The names of the columns that are features, where there are names."""
        names = getattr(self, "feature_names_in_", None)
        if names is None or self._by_argument:
            return None if names is None else tuple(names.tolist())
        group_column: Any = names == self.groups if isinstance(self.groups, str) else self.groups
        return tuple(np.delete(names, group_column).tolist())

    def _chosen(self, data: TaskData, loss: Loss, choose: Choose) -> tuple[TaskData, Regularizer]:
        """The training samples and the regularizer, by cross-validation if requested."""
        prepare = preparation(self._owner, self._by(loss), isinstance(loss, ResidualLoss))
        pooled = isinstance(self.regularizer, str) and self.regularizer == "pooled"
        fitted = self._scaled(data.pooled() if pooled else data)
        regularizer, several = _choices.regularizers(self._owner, self.regularizer, self.lam, fitted)
        if hasattr(self, "cross_validation_"):  # of an earlier fit
            del self.cross_validation_
        if several:
            validation = choose(
                fitted, regularizer, key=self._key(), tol=max(float(self.tol), _CHOICE_TOL),
                max_rounds=int(self.max_iter), scored_as=data, refit=False,
                standardize=self._by(loss), folds=min(_FOLDS, int(fitted.sizes.max())),
            )  # fmt: skip
            self.cross_validation_ = validation
            regularizer = jax.tree.map(lambda leaf: np.asarray(leaf).item(), validation.regularizer)
        self.regularizer_ = regularizer
        return prepared(prepare, fitted), regularizer

    def _solve(self, data: TaskData, loss: Loss) -> None:
        """Solve one problem, and remember its model."""

        def choose(data: TaskData, candidates: Regularizer, **options: Any) -> CrossValidation:
            return cross_validate(Problem(data, loss, candidate(candidates, 0)), candidates, **options)

        fitted, regularizer = self._chosen(data, loss, choose)
        problem = Problem(fitted, loss, regularizer)
        with silenced(NotConverged):  # for scikit-learn's own category
            solution = solve(problem, key=self._key(), tol=float(self.tol), max_rounds=int(self.max_iter))
        self._keep(solution.model, [solution.relation], int(solution.rounds), float(solution.quality.residual))
        if solution.status != Status.CONVERGED:
            warn(f"{self._owner}: {solution.message}.", ConvergenceWarning)

    def _keep(self, model: LinearModel | MulticlassModel, relations: list[Relation], rounds: int, gap: float) -> None:
        """Keep the model and how the solve ended, but no samples."""
        self.model_, self.n_iter_, self.dual_gap_ = model, rounds, gap
        self._relations: list[Relation] = [jax.tree.map(np.asarray, relation) for relation in relations]
        self.coef_, self.intercept_ = model.weights, model.intercept

    def _key(self) -> jax.Array:
        """A random key of `random_state`."""
        state = self.random_state
        if state is None or isinstance(state, np.random.RandomState):
            return jax.random.key(int(check_random_state(state).randint(2**31 - 1)))
        if check.whole(state) is None:
            raise ValueError(
                f"{self._owner}: random_state must be an integer, a RandomState or None, got {check.shown(state)}."
            )
        check.integer(self._owner, 0, random_state=state)
        return jax.random.key(int(state))


def room_for(rows: int) -> int:
    """The least number of rows among 1, 2, 3, 4, 6, 8, 12, ... that holds so many, so that few shapes are compiled."""
    power = 1 << (rows - 1).bit_length()
    return next(size for size in (3 * power // 4, power) if size >= rows)


def _array(X: object) -> np.ndarray:
    """An array with two axes, in which a column may hold what is no number."""
    if hasattr(X, "tocsr") or getattr(X, "ndim", 2) != 2:
        return check_array(X)  # which says what is wrong with it
    return np.asarray(X) if hasattr(X, "dtype") else np.asarray(X, object)  # of lists every entry keeps its type


def _labels(owner: str, groups: ArrayLike, count: int) -> np.ndarray:
    """The group of every sample."""
    check_unmasked(owner, groups=groups)
    try:
        labels = np.asarray(groups)
    except Exception:  # a user's `__array__` may raise anything
        labels = np.zeros(())
    if labels.shape != (count,) or not all(isinstance(each, Hashable) for each in labels.tolist()):
        raise ValueError(
            f"{owner}: groups must name the group of each of the {count} samples, got {check.shown(groups)}."
        )
    return labels
