"""Estimators for scikit-learn: five models of the rows of twelve groups, compared by cross-validation."""

import numpy as np
import pandas as pd
from _figure import plt, save
from sklearn.model_selection import KFold, cross_validate

from mocha_jax.sklearn import MochaRegressor

rng = np.random.default_rng(0)
columns = [f"x{j}" for j in range(8)]
directions = rng.normal(size=(2, 8))  # the groups' weights are mixtures of two
own = rng.normal(size=(12, 2)) @ directions
group = rng.integers(12, size=300)
x = rng.normal(size=(300, 8)) * np.logspace(-1, 1, 8)
y = np.einsum("kd,kd->k", x / np.logspace(-1, 1, 8), own[group]) + 2.0 * rng.normal(size=300)
table = pd.DataFrame(x, columns=columns).assign(group=[f"group {g}" for g in group])

folds = KFold(5, shuffle=True, random_state=0)
figure, axes = plt.subplots(figsize=(7, 3.4))
names = ["pooled", "independent", "mean", "probabilistic", "mean_covariance"]
for k, name in enumerate(names):
    for lam, colour in zip((0.3, 0.1, 0.03, 0.01), ("#CC79A7", "#009E73", "#D55E00", "#0072B2"), strict=True):
        model = MochaRegressor(groups="group", regularizer=name, lam=lam)
        scores = cross_validate(model, table, y, cv=folds, error_score="raise")["test_score"]
        axes.plot(k + 0.15 * np.log10(lam * 3), scores.mean(), "o", color=colour, label=f"λ = {lam}" if not k else None)
axes.set(xticks=range(len(names)), xticklabels=names, ylabel="R² of held-out rows")
axes.legend()
save(figure, __file__)
