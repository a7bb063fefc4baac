"""Quantiles for every device: three solves of the pinball loss make a band."""

import numpy as np
from _figure import plt, save

import mocha_jax as mj

rng = np.random.default_rng(0)
hours = [np.sort(rng.uniform(0, 24, size=n)) for n in (150, 60, 25)]


def features(t):
    """Return two harmonics of the day."""
    return np.stack([np.sin(k * t * np.pi / 12) for k in (1, 2)] + [np.cos(k * t * np.pi / 12) for k in (1, 2)], 1)


ys = [2 * np.sin((t - 3 * i) * np.pi / 12) + rng.gamma(1.5, 0.7, size=len(t)) for i, t in enumerate(hours)]
data = mj.pack_tasks([features(t).astype("float32") for t in hours], ys, loss_scaling="task_mean", intercept=True)

grid = np.linspace(0, 24, 100)
rows = np.c_[features(grid), np.ones(100)]
figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True)
for side, t, y in zip(axes, hours, ys, strict=True):
    side.plot(t, y, ".", alpha=0.4)
    side.set(xlabel="hour", title=f"{len(t)} samples")
for tau in (0.1, 0.5, 0.9):
    problem = mj.Problem(data, mj.losses.Quantile(tau), mj.regularizers.MeanRegularized(0.02, 0.003))
    solution = mj.solve(problem, tol=1e-2, max_rounds=3000)
    for side, w in zip(axes, solution.weights, strict=True):
        side.plot(grid, rows @ w, label=f"{tau:.0%}")
axes[0].legend()
save(figure, __file__)
