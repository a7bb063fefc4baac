"""When coupling tasks pays: the test error of local, global and multi-task models over the samples per device."""

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

truth = mj.datasets.clusters(20, 4)
weights = mj.datasets.sample_weights(jax.random.key(0), truth, 20)
test = mj.datasets.classification(jax.random.key(1), weights, np.full(20, 200))
models = {"local": mj.regularizers.Independent(0.02), "multi-task": mj.regularizers.Probabilistic(0.02, 10.0)}

counts, errors = [8, 16, 32, 64, 128], {"local": [], "global": [], "multi-task": []}
for count in counts:
    train = mj.datasets.classification(jax.random.key(2), weights, np.full(20, count))
    for name, regularizer in models.items():
        solution = mj.solve(mj.Problem(train, mj.losses.Logistic(), regularizer), tol=1e-2)
        errors[name].append(float(mj.metrics.error_rate(solution.weights, test)))
    pooled = mj.solve(mj.Problem(train.pooled(), mj.losses.Logistic(), models["local"]), tol=1e-2)
    errors["global"].append(float(mj.metrics.error_rate(pooled.weights, test.pooled())))

figure, axes = plt.subplots(figsize=(6, 4))
for name, values in errors.items():
    axes.semilogx(counts, values, "o-", label=name, base=2)
axes.set(xlabel="training samples of each device", ylabel="test error")
axes.legend()
save(figure, __file__)
