"""One lambda for every task, by gradients through the optimum."""

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

rng = np.random.default_rng(0)
noise = np.geomspace(0.05, 3.0, 8)  # some devices are far noisier than others
xs = [rng.normal(size=(30, 10)).astype("float32") for _ in noise]
ys = [x @ np.ones(10) + level * 3 * rng.normal(size=30) for x, level in zip(xs, noise, strict=True)]
data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(np.full(8, 0.1, "float32")))
tuned = mj.tune(problem)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
left.plot(tuned.history.value, "o-")
left.set(xlabel="steps", ylabel="loss of the fold that stops")
right.loglog(noise, np.ravel(jax.tree.leaves(tuned.hyperparameters)[0]), "o")
right.set(xlabel="noise of a device", ylabel="its lambda")
save(figure, __file__)
