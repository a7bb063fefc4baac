"""Two hyperparameters by cross-validation: the error of every candidate."""

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

data = mj.datasets.federation(jax.random.key(0), 16, 15, smallest=15, largest=60).data
problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.Probabilistic(0.1, 1.0))
lam, sigma2 = np.array([1.0, 0.3, 0.1, 0.03, 0.01]), np.array([100.0, 10.0, 1.0, 0.1])
candidates = mj.grid(mj.regularizers.Probabilistic, sigma2=sigma2, lam=lam)
found = mj.cross_validate(problem, candidates, folds=4, max_rounds=100, tol=1e-2)
print(found.regularizer)

figure, axes = plt.subplots(figsize=(5.5, 3.8))
picture = axes.imshow(np.reshape(found.mean, (len(sigma2), len(lam))), cmap="viridis_r")
axes.set_xticks(range(len(lam)), [f"{value:g}" for value in lam])
axes.set_yticks(range(len(sigma2)), [f"{value:g}" for value in sigma2])
axes.set(xlabel="lam", ylabel="sigma2", title="error rate, mean over folds")
figure.colorbar(picture)
save(figure, __file__)
