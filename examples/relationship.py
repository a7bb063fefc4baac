"""The relationship that is learned, beside the true one: two groups that are negatively related."""

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

truth = np.kron(np.array([[1.0, -0.8], [-0.8, 1.0]]), np.full((6, 6), 0.9)) + 0.1 * np.eye(12)
weights = mj.datasets.sample_weights(jax.random.key(0), truth, 30)
data = mj.datasets.classification(jax.random.key(1), weights, np.full(12, 60))
problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.Probabilistic(0.02, 10.0))
solution = mj.solve(problem, tol=1e-3)
print(solution)

figure, axes = plt.subplots(1, 2, figsize=(8, 3.6))
for side, (title, matrix) in zip(axes, {"true": truth, "learned": solution.correlation}.items(), strict=True):
    picture = side.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
    side.set_title(f"{title} correlation of tasks")
figure.colorbar(picture, ax=axes)
save(figure, __file__)
