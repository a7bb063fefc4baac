"""Kernels: four tasks with round classes and twelve samples each, by themselves and together."""

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

rng = np.random.default_rng(3)
centres = rng.normal(scale=0.3, size=(4, 2))
xs = [rng.uniform(-2, 2, size=(12, 2)).astype("float32") for _ in centres]
ys = [np.where(np.linalg.norm(x - c, axis=1) < 1.3, 1.0, -1.0) for x, c in zip(xs, centres, strict=True)]
data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
phi = mj.features.Nystroem(mj.features.GaussianKernel(0.5), mj.features.landmarks(data))
mapped = mj.features.transform(data, phi, intercept=True)
models = {
    "local": mj.regularizers.Independent(0.01),
    "together": mj.regularizers.MeanRegularized(0.1, 0.005),
}

line = np.linspace(-2, 2, 60, dtype="float32")
grid = np.stack(np.meshgrid(line, line), axis=-1)
features = np.concatenate([np.asarray(phi(grid)), np.ones((60, 60, 1), "f")], axis=-1)
figure, axes = plt.subplots(2, 4, figsize=(10, 5.2), sharex=True, sharey=True)
for row, (name, regularizer) in zip(axes, models.items(), strict=True):
    solution = mj.solve(mj.Problem(mapped, mj.losses.Hinge(), regularizer), key=jax.random.key(0), tol=1e-3)
    print(name, solution)
    for t, side in enumerate(row):
        side.contourf(line, line, features @ np.asarray(solution.weights[t]) > 0, levels=[-0.5, 0.5, 1.5],
                      colors=["#f4d9c6", "#c6daf4"])  # fmt: skip
        side.add_patch(plt.Circle(centres[t], 1.3, fill=False, linestyle="--"))
        side.scatter(*xs[t].T, c=np.where(ys[t] > 0, "tab:blue", "tab:orange"), s=18, zorder=2)
        side.set(aspect="equal", xlim=(-2, 2), ylim=(-2, 2))
        side.set_title(f"{name}, task {t}", fontsize=9)
figure.suptitle("12 samples a task; dashed: the true boundary")
save(figure, __file__)
