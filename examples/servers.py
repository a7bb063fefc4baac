"""Three servers on one problem: the certified gap of Algorithm 1, of the adaptive and of the proximal server."""

import jax
from _figure import plt, save

import mocha_jax as mj

data = mj.datasets.federation(jax.random.key(0), 24, 20, smallest=20, largest=80).data
problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(0.05, 10.0))

figure, axes = plt.subplots(figsize=(6, 4))
algorithms = {
    "Algorithm 1 (paper)": mj.algorithm1(),
    "adaptive": mj.Mocha(server="dual"),
    "proximal (default)": mj.Mocha(),
}
for name, algorithm in algorithms.items():
    _, history = mj.run(problem, algorithm, jax.random.key(0), num_rounds=150)
    axes.semilogy(history.round, history.relative_joint_gap, label=name)
axes.set(xlabel="rounds", ylabel="relative joint gap", title="Omega learned, eq. (14)")
axes.legend()
save(figure, __file__)
