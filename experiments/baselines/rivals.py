"""scikit-learn's linear models, for all tasks and for each, and LightGBM with the task as a category."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from experiments.baselines.cells import Cell, Fitted, Method
from experiments.baselines.tables import Rows, folds

_FOLDS = {"numbers": 3, "rare": 3, "classes": 2}
_SCORING = {"numbers": "neg_mean_squared_error", "rare": "neg_log_loss", "classes": "accuracy"}


def _estimator(kind: str) -> tuple[Any, dict[str, np.ndarray]]:
    """A linear model, and the strengths that are tried."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.svm import LinearSVC

    if kind == "numbers":
        return Ridge(), {"alpha": np.logspace(-1, 4, 11)}
    if kind == "rare":
        return LogisticRegression(max_iter=1000), {"C": np.logspace(-4, 2, 13)}
    return LinearSVC(max_iter=3000), {"C": np.logspace(-4, 0, 5)}


def _search(cell: Cell, columns: bool = False) -> Any:
    """A search over the strength of a pipeline that standardises; with `columns` the last feature is a category."""
    from sklearn.compose import make_column_transformer
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    scale = StandardScaler()
    if columns:
        scale = make_column_transformer((scale, slice(-1)), (OneHotEncoder(handle_unknown="ignore"), [-1]))
    last, strengths = _estimator(cell.kind)
    parts = folds(cell.kind, cell.train, _FOLDS[cell.kind], cell.seed)
    grid = {f"last__{name}": values for name, values in strengths.items()}
    return GridSearchCV(Pipeline([("scale", scale), ("last", last)]), grid, scoring=_SCORING[cell.kind], cv=parts)


def _said(found: Any, kind: str, x: np.ndarray) -> np.ndarray:
    return found.decision_function(x) if kind == "rare" else found.predict(x)


def _strength(found: Any) -> str:
    return " ".join(f"{name.removeprefix('last__')}={value:.2g}" for name, value in found.best_params_.items())


def _pooled(cell: Cell, columns: bool = False) -> Fitted:
    def table(x: np.ndarray, group: np.ndarray) -> np.ndarray:
        return np.c_[x, group] if columns else x

    found = _search(cell, columns).fit(table(cell.train.x, cell.train.group), cell.train.y)
    return Fitted(lambda x, group: _said(found, cell.kind, table(x, group)), _strength(found))


def _each(cell: Cell) -> Fitted:
    """A model and a search for every task; a task in which a fold would lack a class takes the strongest penalty."""
    found = {group: _alone(cell, cell.train.of(group)) for group in np.unique(cell.train.group)}

    def predict(x: np.ndarray, group: np.ndarray) -> np.ndarray:
        out = np.zeros(len(x))
        for one in np.unique(group):
            out[group == one] = found[one](x[group == one])
        return out

    return Fitted(predict, "each its own")


def _alone(cell: Cell, rows: Rows) -> Callable[[np.ndarray], np.ndarray]:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    labels, counts = np.unique(rows.y, return_counts=True)
    if len(labels) == 1:  # the rare class is not there: nothing to rank by
        return lambda x: np.full(len(x), labels[0])
    one = cell._replace(train=rows)
    if cell.kind == "rare" and counts.min() < _FOLDS["rare"]:
        last, strengths = _estimator(cell.kind)
        found = make_pipeline(StandardScaler(), last.set_params(C=strengths["C"][0])).fit(rows.x, rows.y)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # folds of HAR that lack a class
            found = _search(one).fit(rows.x, rows.y)
    return lambda x: _said(found, cell.kind, x)


def _lightgbm(cell: Cell, column: bool = True) -> Fitted:
    """Trees; their number by early stopping, and their leaves, by cross-validation."""
    import lightgbm

    x, y, group, _ = cell.train
    objective = {"numbers": "regression", "rare": "binary", "classes": "multiclass"}[cell.kind]
    fixed = {"objective": objective, "learning_rate": 0.05, "verbosity": -1, "num_threads": 1, "seed": cell.seed}
    if cell.kind == "classes":
        # All rows vote on few of many features at a time, which is as good here and ten times as quick.
        fixed |= {"num_class": int(y.max()) + 1, "feature_fraction": 0.1, "learning_rate": 0.1}
    table = np.c_[x, group] if column else x
    category = {"categorical_feature": [x.shape[1]]} if column else {}
    labels = (y > 0).astype(int) if cell.kind == "rare" else y

    def dataset() -> lightgbm.Dataset:
        return lightgbm.Dataset(table, labels, params={"verbosity": -1}, free_raw_data=False, **category)

    tried = {}
    for leaves in (15,) if cell.kind == "classes" else (4, 15):
        params = fixed | {"num_leaves": leaves, "min_data_in_leaf": 5 if cell.kind == "rare" else 20}
        stop = lightgbm.early_stopping(20, verbose=False)
        parts = folds(cell.kind, cell.train, _FOLDS[cell.kind], cell.seed)
        scores = lightgbm.cv(params, dataset(), 600, folds=parts, callbacks=[stop])
        means = next(values for name, values in scores.items() if name.endswith("-mean"))
        tried[leaves] = (min(means), int(np.argmin(means)) + 1, params)
    leaves = min(tried, key=lambda one: tried[one][0])
    _, rounds, params = tried[leaves]
    found = lightgbm.train(params, dataset(), rounds)

    def predict(x: np.ndarray, group: np.ndarray) -> np.ndarray:
        said = found.predict(np.c_[x, group] if column else x)
        return said.argmax(axis=1).astype(float) if cell.kind == "classes" else said

    return Fitted(predict, f"leaves={leaves} trees={rounds}")


KNOWN, ALL = ("school", "landmine", "har"), ("school", "landmine", "har", "new person")

METHODS = [
    Method("scikit-learn, pooled", _pooled, ALL, "sklearn"),
    Method("scikit-learn, pooled, a column for every task", partial(_pooled, columns=True), KNOWN, "sklearn"),
    Method("scikit-learn, each task", _each, KNOWN, "sklearn"),
    Method("LightGBM, the task a category", _lightgbm, KNOWN, "lightgbm"),
    Method("LightGBM, pooled", partial(_lightgbm, column=False), ("new person",), "lightgbm"),
]
