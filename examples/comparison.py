"""Three models of 90 tasks side by side: ``python examples/comparison.py``."""

import jax
import numpy as np
from _figure import save

import mocha_jax as mj

sizes = np.random.default_rng(0).integers(12, 60, 90)
weights = mj.datasets.sample_weights(jax.random.key(0), mj.datasets.clusters(90, 3, within=0.8, across=0.2), 12)
data = mj.datasets.regression(jax.random.key(1), weights, sizes, noise=1.5, loss_scaling="task_mean")
models = {
    "local": (lambda data: data, mj.regularizers.Independent),
    "global": (lambda data: data.pooled(), mj.regularizers.Independent),
    "learned": (lambda data: data, mj.regularizers.Probabilistic),
}
scores = {name: [] for name in models}
for seed in range(2):
    train, test = data.split(jax.random.key(seed), 0.6)
    for name, (seen, regularizer) in models.items():
        problem = mj.Problem(seen(train), mj.losses.Squared(), regularizer(0.1))
        grid = mj.grid(regularizer, lam=[0.3, 0.1, 0.03, 0.01, 0.003, 0.001])
        found = mj.cross_validate(problem, grid, folds=3, scored_as=train, key=jax.random.key(seed), tol=1e-2)
        scores[name].append(mj.metrics.rmse(found.solution.weights, test, per_task=True))

found = mj.metrics.compare({name: np.array(of) for name, of in scores.items()}, sizes, baseline="local")
print(found)
save(mj.plotting.compare(found, score="RMSE"), __file__)
