"""Thousands of small models in one call: ``python examples/many_models.py FOLDER school.npz``.

Every school has a ridge regression of its own, fitted again to 200 bootstrap samples of its pupils: 27,800 models of
139 schools, each as good as its certificate says. The file holds ``X [N, d]``, ``y [N]`` and ``task [N]``; without one
a smaller table is made up.
"""

import sys

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

if len(sys.argv) > 2:
    table = np.load(sys.argv[2], allow_pickle=False)
    x, score, school = table["X"], table["y"], table["task"]
else:
    rng = np.random.default_rng(0)
    school = np.repeat(np.arange(40), rng.integers(20, 60, size=40))
    x = rng.normal(size=(len(school), 6))
    score = np.sum(x * rng.normal(1.0, 0.5, size=(40, 6))[school], axis=1) + 2.0 * rng.normal(size=len(school))
data = mj.pack_tasks(x, score, school, loss_scaling="task_mean", dtype="float32").standardized("within", labels=True)
problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(0.01))

# A bootstrap sample is the same pupils with other weights: how often each was drawn. The samples are in memory once.
rng, times = np.random.default_rng(1), 200
sizes = np.asarray(data.sizes)
drawn = np.zeros((times, *data.weight.shape), np.float32)
for t, n in enumerate(sizes):
    drawn[:, t, :n] = rng.multinomial(n, np.full(n, 1.0 / n), size=times) / n


@jax.jit
@jax.vmap
def fitted(weight):
    """Solve for every school with these weights of pupils."""
    solution = mj.solve(problem.replace(data=data.replace(weight=weight)), tol=1e-4)
    return solution.weights, solution.certificate.relative_gap


weights, gaps = jax.device_get(fitted(drawn))  # [times, schools, d]
print(f"{times * len(sizes):,} models of {len(sizes)} schools; the largest relative gap is {gaps.max():.1e}")

feature = int(np.abs(np.asarray(mj.solve(problem).weights)).mean(axis=0).argmax())
low, middle, high = np.percentile(weights[:, :, feature], [5, 50, 95], axis=0)
order = np.argsort(middle)
apart = np.mean((low > np.median(middle)) | (high < np.median(middle)))
print(f"feature {feature}: the 90 % interval leaves out the median school's weight in {apart:.0%} of the schools")

figure, axis = plt.subplots(figsize=(8, 3.2))
place = np.arange(len(sizes))
axis.vlines(place, low[order], high[order], alpha=0.5)
axis.plot(place, middle[order], ".", ms=4)
axis.axhline(np.median(middle), color="0.5", lw=1)
axis.set(
    xlabel="schools, by their weight",
    ylabel=f"weight of feature {feature}",
    title="the middle 90 % of 200 bootstrap samples",
)
save(figure, __file__)
