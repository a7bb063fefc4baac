"""School exam scores, or any table with a group column: ``python examples/real_data.py FOLDER school.npz``.

The file holds ``X [N, d]``, ``y [N]`` and ``task [N]``. Without one, a table is made up.
"""

import sys

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

if len(sys.argv) > 2:
    table = np.load(sys.argv[2], allow_pickle=False)
    x, y, group = table["X"], table["y"], table["task"]
else:
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(40), rng.integers(10, 40, size=40))
    x = rng.normal(size=(len(group), 6))
    slopes = rng.normal(size=6) + 0.5 * rng.normal(size=(40, 6))
    y = 20 + 5 * np.einsum("nd,nd->n", x, slopes[group]) + 5 * rng.normal(size=len(group))

x = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1.0)
y = (y - y.mean()) / y.std()
names = np.unique(group)
pairs = [x[group == name].astype("float32") for name in names], [y[group == name] for name in names]
train, test = mj.pack_tasks(*pairs, loss_scaling="task_mean", intercept=True).split(jax.random.key(0), 0.75)

problem = mj.Problem(train, mj.losses.Squared(), mj.regularizers.MeanRegularized(0.1, 0.01))
strengths = [3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003]
candidates = mj.grid(mj.regularizers.MeanRegularized, lam1=strengths, lam2=[0.01])
found = mj.cross_validate(problem, candidates, folds=4)
print(found.regularizer, float(mj.metrics.rmse(found.solution.weights, test)))

figure, axes = plt.subplots(figsize=(6, 4))
axes.errorbar(strengths, found.mean, yerr=found.standard_error, fmt="o-")
axes.set(
    xscale="log", xlabel="lam1", ylabel="RMSE by cross-validation, in standard deviations", title=f"{len(names)} groups"
)
save(figure, __file__)
