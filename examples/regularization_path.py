"""From separate models to one: the weights of all tasks along a path of lambda, in one compiled call."""

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

data = mj.datasets.federation(jax.random.key(0), 10, 6, smallest=15, largest=40).data
problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.MeanRegularized(1.0, 0.01))
strengths = np.geomspace(3.0, 1e-3, 20)
path = mj.lambda_path(problem, mj.grid(mj.regularizers.MeanRegularized, lam1=strengths, lam2=[0.01]), tol=1e-3)

figure, axes = plt.subplots(figsize=(6, 4))
axes.semilogx(strengths, np.asarray(path.weights)[:, :, 0])
axes.set(xlabel="lam1: how strongly tasks are pulled to their mean", ylabel="first weight of each task")
axes.invert_xaxis()
save(figure, __file__)
