"""The methods of mocha_jax: one model for all tasks, one for each, and two that couple them."""

from __future__ import annotations

import warnings
from functools import partial

import jax
import numpy as np

import mocha_jax as mj
from experiments.baselines.cells import Cell, Fitted, Method
from experiments.baselines.tables import folds

_R = mj.regularizers
_STRONG = [30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5]

# Of every kind of table the candidates of every model, the strongest first.
GRIDS = {
    "numbers": {
        "global": mj.grid(_R.Independent, lam=_STRONG[5:11]),
        "local": mj.grid(_R.Independent, lam=_STRONG[4:9]),
        "mean-regularised": mj.grid(_R.MeanRegularized, lam1=_STRONG[:5], lam2=[0.01, 0.001]),
        "learned": mj.grid(_R.Probabilistic, lam=_STRONG[3:9]),
    },
    "rare": {
        "global": mj.grid(_R.Independent, lam=_STRONG[5:]),
        "local": mj.grid(_R.Independent, lam=_STRONG[1:10]),
        "mean-regularised": mj.grid(_R.MeanRegularized, lam1=[10.0, 1.0, 0.1, 0.01], lam2=[0.1, 0.03, 0.01, 0.003]),
        "learned": mj.grid(_R.Probabilistic, lam=_STRONG[3:12]),
    },
    "classes": {
        "global": mj.grid(_R.Independent, lam=[0.1, 0.01, 0.001]),
        "local": mj.grid(_R.Independent, lam=[0.1, 0.01, 0.001]),
        "mean-regularised": mj.grid(_R.MeanRegularized, lam1=[1.0, 0.1], lam2=[0.001, 0.0001]),
        "learned": mj.grid(_R.Probabilistic, lam=[0.1, 0.01, 0.001]),
    },
}
LOSSES = {"numbers": mj.losses.Squared(), "rare": mj.losses.Logistic(), "classes": mj.losses.Hinge()}

# Of numbers the means of each task are taken away, so that no task's level is penalised.
WAYS = {"numbers": "within", "rare": "pooled"}

_FOLDS = {"numbers": 3, "rare": 3, "classes": 2}


def _pack(cell: Cell) -> mj.TaskData:
    x, y, group, _ = cell.train
    y = y.astype(int) if cell.kind == "classes" else y
    most = int(np.unique(group, return_counts=True)[1].max())
    rows = 64 * -(-most // 64)  # so that other splits are the same programs
    return mj.pack_tasks(x, y, group, loss_scaling="task_mean", intercept=True, rows=rows, dtype="float32")


def _fit(model: str, cell: Cell) -> Fitted:
    """Choose by cross-validation, and train with all training rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of candidates that lose
        of_all = model == "global"
        found, chosen = (_of_classes if cell.kind == "classes" else _of_numbers)(model, cell, of_all)

    def predict(x: np.ndarray, group: np.ndarray) -> np.ndarray:
        said = found.decision_function if cell.kind == "rare" else found.predict
        return said(x) if of_all else said(x, task=group, unseen="mean")

    return Fitted(predict, chosen)


def _of_numbers(model: str, cell: Cell, of_all: bool) -> tuple[mj.LinearModel, str]:
    """Numbers and the rare class: `cross_validate` standardises within its folds; rare labels by the logistic loss."""
    data = _pack(cell)
    problem = mj.Problem(data.pooled() if of_all else data, LOSSES[cell.kind], _R.Independent(1.0))
    way = "pooled" if of_all else WAYS[cell.kind]
    found = mj.cross_validate(
        problem, GRIDS[cell.kind][model], key=jax.random.key(cell.seed), folds=_FOLDS[cell.kind], standardize=way,
        scored_as=data if of_all else None, tol=1e-3, max_rounds=200,
    )  # fmt: skip
    assert found.solution is not None
    return found.solution.model, _words(found.regularizer)


def _of_classes(model: str, cell: Cell, of_all: bool) -> tuple[mj.MulticlassModel, str]:
    """Several classes: each fold is standardised by its own training rows before the path of candidates."""
    candidates, errors = GRIDS["classes"][model], []
    solved = partial(
        mj.multiclass.lambda_path,
        make=lambda data: mj.Problem(data, LOSSES["classes"], _R.Independent(1.0)),
        classes=int(cell.train.y.max()) + 1,  # a fold may lack one
        tol=1e-2,
        max_rounds=100,
    )

    def path(one: Cell, candidates: mj.regularizers.Regularizer) -> list[mj.MulticlassModel]:
        data = _pack(one).standardized("pooled")
        return [found.model for found in solved(data.pooled() if of_all else data, candidates=candidates)]

    for training, held_out in folds(cell.kind, cell.train, _FOLDS["classes"], cell.seed):
        rest = cell.train.take(held_out)
        models = path(cell._replace(train=cell.train.take(training)), candidates)
        whose = None if of_all else rest.group
        errors.append([np.mean(found.predict(rest.x, whose, unseen="mean") != rest.y) for found in models])
    best = int(np.argmin(np.mean(errors, axis=0)))
    way = jax.tree.map(lambda leaf: leaf[: best + 1], candidates)
    return path(cell, way)[-1], _words(jax.tree.map(lambda leaf: leaf[best], candidates))


def _words(regularizer: mj.regularizers.Regularizer) -> str:
    """The numbers of a regularizer that were chosen."""
    names = [name for name in ("lam", "lam1", "lam2") if hasattr(regularizer, name)]
    return " ".join(f"{name}={float(getattr(regularizer, name)):g}" for name in names)


METHODS = [
    Method(f"mocha_jax, {model}", partial(_fit, model), ("school", "landmine", "har", "new person"))
    for model in ("global", "local", "mean-regularised", "learned")
]
