"""Mixed-effects models: statsmodels, GPBoost and MERF, each with an intercept of every task that is random."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np

from experiments.baselines.cells import Cell, Fitted, Method
from experiments.baselines.tables import folds

_SLOPES = 3  # of MixedLM, whose covariance of random effects is a full matrix


class _Design:
    """Standardised features that are not sums of others, a column of ones before them; fitted to training rows."""

    def __init__(self, x: np.ndarray) -> None:
        from scipy.linalg import qr

        self.mean, self.scale = x.mean(axis=0), np.where(x.std(axis=0) > 0, x.std(axis=0), 1.0)
        z = np.c_[np.ones(len(x)), (x - self.mean) / self.scale]
        r, order = qr(z, mode="r", pivoting=True)
        independent = np.abs(np.diag(r)) > 1e-6 * np.abs(r[0, 0])
        self.columns = np.array(sorted({0, *order[: len(independent)][independent]}))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.c_[np.ones(len(x)), (x - self.mean) / self.scale][:, self.columns]


def _varying(z: np.ndarray, y: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Columns that vary within nine tasks of ten, those with the largest weights in all rows first."""
    within = np.mean([z[group == one].std(axis=0) > 0 for one in np.unique(group)], axis=0)
    weights = np.linalg.lstsq(z, y, rcond=None)[0]
    order = np.argsort(-np.abs(weights))
    return order[within[order] > 0.9]


def _mixed_lm(cell: Cell, slopes: int) -> Fitted:
    """statsmodels' MixedLM by restricted likelihood: no hyperparameter is left to choose."""
    from statsmodels.regression.mixed_linear_model import MixedLM

    x, y, group, _ = cell.train
    design = _Design(x)
    z = design(x)
    random = np.r_[0, _varying(z, y, group)[:slopes]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a covariance at the edge
        found = MixedLM(y, z, groups=group, exog_re=z[:, random]).fit(reml=True)
    effects = {one: np.asarray(value) for one, value in found.random_effects.items()}
    fixed = np.asarray(found.fe_params)

    def predict(x: np.ndarray, group: np.ndarray) -> np.ndarray:
        z = design(x)
        return z @ fixed + np.sum(z[:, random] * np.array([effects[one] for one in group]), axis=1)

    return Fitted(predict, f"{len(random) - 1} slopes")


def _bayes_mixed_glm(cell: Cell) -> Fitted:
    """statsmodels' logistic model by variational Bayes: intercept and slopes are random, each with a variance."""
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    x, y, group, _ = cell.train
    design, tasks = _Design(x), np.unique(group)

    def effects(z: np.ndarray, group: np.ndarray) -> np.ndarray:
        mine = (group[:, None] == tasks).astype(float)
        return np.concatenate([mine * z[:, [j]] for j in range(z.shape[1])], axis=1)

    z = design(x)
    kinds = np.repeat(np.arange(z.shape[1]), len(tasks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = BinomialBayesMixedGLM((y > 0).astype(float), z, effects(z, group), kinds, vcp_p=1.0).fit_vb()

    def predict(x: np.ndarray, group: np.ndarray) -> np.ndarray:
        z = design(x)
        return z @ found.fe_mean + effects(z, group) @ found.vc_mean

    return Fitted(predict, "all slopes")


def _gp_linear(cell: Cell) -> Fitted:
    """GPBoost's linear model: an intercept and the slopes that vary within tasks are random, each with a variance."""
    import gpboost

    x, y, group, _ = cell.train
    design = _Design(x)
    z = design(x)
    slopes = _varying(z, y, group)
    slopes = slopes[slopes > 0]
    likelihood = "gaussian" if cell.kind == "numbers" else "bernoulli_logit"
    level, scale = (y.mean(), y.std()) if cell.kind == "numbers" else (0.0, 1.0)
    labels = (y - level) / scale if cell.kind == "numbers" else (y > 0).astype(float)
    found = gpboost.GPModel(
        group_data=group, group_rand_coef_data=z[:, slopes], ind_effect_group_rand_coef=[1] * len(slopes),
        likelihood=likelihood, num_parallel_threads=1,
    )  # fmt: skip
    found.fit(y=labels, X=z)

    def predict(x: np.ndarray, group: np.ndarray) -> np.ndarray:
        z = design(x)
        said = found.predict(
            X_pred=z, group_data_pred=group, group_rand_coef_data_pred=z[:, slopes],
            predict_response=cell.kind == "numbers",
        )  # fmt: skip
        return level + scale * said["mu"]

    return Fitted(predict, f"{len(slopes)} slopes")


def _gp_boost(cell: Cell) -> Fitted:
    """Trees with a random intercept of every task; their number and their leaves by cross-validation."""
    import gpboost

    x, y, group, _ = cell.train
    numbers = cell.kind == "numbers"
    level, scale = (y.mean(), y.std()) if numbers else (0.0, 1.0)
    labels = (y - level) / scale if numbers else (y > 0).astype(float)
    likelihood = "gaussian" if numbers else "bernoulli_logit"
    parts = folds(cell.kind, cell.train, 3, cell.seed)

    def model() -> gpboost.GPModel:
        return gpboost.GPModel(group_data=group, likelihood=likelihood, num_parallel_threads=1)

    def dataset() -> gpboost.Dataset:
        return gpboost.Dataset(x, label=labels, free_raw_data=False)

    tried = {}
    for leaves in (4, 15):
        params = {
            "learning_rate": 0.05, "num_leaves": leaves, "min_data_in_leaf": 20 if numbers else 5, "verbose": -1,
            "num_threads": 1, "seed": cell.seed,
        }  # fmt: skip
        scores = gpboost.cv(
            params=params, train_set=dataset(), gp_model=model(), num_boost_round=400, folds=parts,
            early_stopping_rounds=20, use_gp_model_for_validation=True, metric="mse" if numbers else "binary_logloss",
        )  # fmt: skip
        means = next(values for name, values in scores.items() if name.endswith("-mean"))
        tried[leaves] = (min(means), int(np.argmin(means)) + 1, params)
    leaves = min(tried, key=lambda one: tried[one][0])
    _, rounds, params = tried[leaves]
    found = gpboost.train(params=params, train_set=dataset(), gp_model=model(), num_boost_round=rounds)

    def predict(x: np.ndarray, group: np.ndarray) -> np.ndarray:
        said = found.predict(data=x, group_data_pred=group, pred_latent=not numbers)
        z = said["response_mean"] if numbers else said["fixed_effect"] + said["random_effect_mean"]
        return level + scale * z

    return Fitted(predict, f"leaves={leaves} trees={rounds}")


def _merf(cell: Cell) -> Fitted:
    """A forest with a random intercept of every task; the size of its leaves by one held-out fold of four.

    Of the rare class it regresses 0 and 1, since it has no other likelihood.
    """
    import logging

    import pandas
    from merf import MERF
    from sklearn.ensemble import RandomForestRegressor

    logging.getLogger("merf").setLevel(logging.WARNING)
    labels = (cell.train.y > 0).astype(float) if cell.kind == "rare" else cell.train.y

    def fit(which: np.ndarray, leaf: int) -> MERF:
        forest = RandomForestRegressor(50, min_samples_leaf=leaf, max_features=0.3, random_state=cell.seed, n_jobs=1)
        found = MERF(forest, max_iterations=5)
        x, group = cell.train.x[which], pandas.Series(cell.train.group[which])
        return found.fit(pandas.DataFrame(x), np.ones((len(x), 1)), group, pandas.Series(labels[which]))

    def predict(found: MERF, x: np.ndarray, group: np.ndarray) -> np.ndarray:
        return np.asarray(found.predict(pandas.DataFrame(x), np.ones((len(x), 1)), pandas.Series(group)))

    training, rest = folds(cell.kind, cell.train, 4, cell.seed)[0]
    x, _, group, _ = cell.train.take(rest)
    tried = {leaf: np.mean((predict(fit(training, leaf), x, group) - labels[rest]) ** 2) for leaf in (5, 20)}
    leaf = min(tried, key=lambda one: tried[one])
    found = fit(np.arange(len(labels)), leaf)
    return Fitted(partial(predict, found), f"leaf={leaf}")


METHODS = [
    Method("statsmodels MixedLM, intercept", partial(_mixed_lm, slopes=0), ("school",), "statsmodels"),
    Method("statsmodels MixedLM, intercept, 3 slopes", partial(_mixed_lm, slopes=_SLOPES), ("school",), "statsmodels"),
    Method("statsmodels BayesMixedGLM, all slopes", _bayes_mixed_glm, ("landmine",), "statsmodels"),
    Method("GPBoost linear, intercept, slopes", _gp_linear, ("school", "landmine"), "gpboost"),
    Method("GPBoost trees, intercept", _gp_boost, ("school", "landmine"), "gpboost"),
    Method("MERF, intercept", _merf, ("school", "landmine"), "merf"),
]
