"""Structure known a priori: weights of low rank, and weights on the same few features."""

import numpy as np
from _figure import plt, save

import mocha_jax as mj

rng = np.random.default_rng(0)
tasks, width = 20, 16
low_rank = rng.normal(size=(tasks, 2)) @ rng.normal(size=(2, width)) / 1.5
few = np.where(rng.permutation(width) < 4, rng.normal(size=(tasks, width)), 0.0)
models = {
    "independent": mj.regularizers.Independent(0.05),
    "trace norm": mj.regularizers.TraceNorm(0.6, 0.01),
    "joint sparse": mj.regularizers.JointSparse(0.6, 0.01),
}

figure, axes = plt.subplots(2, 4, figsize=(10, 5.4), sharex=True, sharey=True)
for row, (title, truth) in zip(axes, {"rank 2": low_rank, "4 features": few}.items(), strict=True):
    xs = [rng.normal(size=(14, width)).astype("float32") for _ in truth]
    ys = [x @ w + 0.5 * rng.normal(size=14) for x, w in zip(xs, truth, strict=True)]
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    pictures = {f"truth, {title}": truth}
    for name, regularizer in models.items():
        weights = np.asarray(mj.solve(mj.Problem(data, mj.losses.Squared(), regularizer), tol=1e-4).weights)
        off = np.linalg.norm(weights - truth) / np.linalg.norm(truth)
        pictures[f"{name}, off by {100 * off:.0f} %"] = weights
    for side, (name, matrix) in zip(row, pictures.items(), strict=True):
        side.imshow(matrix, cmap="RdBu_r", vmin=-2.5, vmax=2.5, aspect="auto")
        side.set_title(name, fontsize=9)
    row[0].set_ylabel("task")
for side in axes[-1]:
    side.set_xlabel("feature")
save(figure, __file__)
