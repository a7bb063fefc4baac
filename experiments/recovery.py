"""Planted relationships, and what a solve finds of them: ``python -m experiments.recovery``.

Clusters that are rivals of one another, for (14) and (12): correlation of tasks within and across clusters. A sparse
graph of tasks, for (15): precision and recall of its edges over a range of the penalty on Omega.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="experiments.recovery", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    keys = [jax.random.key(seed) for seed in range(options.seeds)]

    print("12 tasks in 3 clusters, 20 features: correlation of learned tasks, mean over seeds")
    print(f"{'samples a task':>15} {'model':>6} {'within':>8} {'across':>8} {'clusters whole':>15}")
    for smallest, largest in ((20, 40), (60, 120), (200, 400)):
        for name, regularizer in (
            ("(14)", mj.regularizers.Probabilistic(0.003)),
            ("(12)", mj.regularizers.Clustered(0.006, 0.05, 3)),
        ):
            found = [clusters(key, smallest, largest, regularizer) for key in keys]
            within, across, whole = np.mean(found, axis=0)
            print(f"{f'{smallest}-{largest}':>15} {name:>6} {within:>8.2f} {across:>8.2f} {whole:>15.1f}")
    truth = mj.datasets.clusters(12, 3, within=0.95, across=-0.4)
    print(f"{'truth':>15} {'':>6} {truth[0, 1]:>8.2f} {truth[0, -1]:>8.2f}\n")

    print("12 tasks on a ring, 200 features, 400 samples a task, squared loss: edges found by (15), mean over seeds")
    print(f"{'lam2 / (lam d)':>15} {'precision':>10} {'recall':>8} {'edges':>6}")
    for penalty in (0.05, 0.1, 0.2, 0.3, 0.4):
        found = [ring(key, penalty) for key in keys]
        precision, recall, edges = np.mean(found, axis=0)
        print(f"{penalty:>15g} {precision:>10.2f} {recall:>8.2f} {edges:>6.1f}")


def clusters(key: jax.Array, smallest: int, largest: int, regularizer: mj.regularizers.Regularizer) -> tuple:
    """Mean correlation within and across clusters, and whether each task is closest to one of its own."""
    covariance = mj.datasets.clusters(12, 3, within=0.95, across=-0.4)
    truth = mj.datasets.federation(key, 12, 20, covariance=covariance, smallest=smallest, largest=largest)
    problem = mj.Problem(truth.data, mj.losses.Hinge(), regularizer)
    found = np.asarray(mj.solve(problem, key=key, tol=1e-3, max_rounds=2000).correlation)
    group = np.arange(12) // 4
    same, off = group[:, None] == group[None, :], ~np.eye(12, dtype=bool)
    nearest = np.argmax(np.where(off, found, -np.inf), axis=1)
    return found[same & off].mean(), found[~same].mean(), np.mean(group[nearest] == group)


def ring(key: jax.Array, penalty: float, m: int = 12, d: int = 200) -> tuple:
    """Precision and recall of the edges of a ring of tasks, and how many were named."""
    precision = jnp.eye(m) - 0.35 * (jnp.roll(jnp.eye(m), 1, axis=0) + jnp.roll(jnp.eye(m), -1, axis=0))
    weight_key, sample_key, run_key = jax.random.split(key, 3)
    weights = mj.datasets.sample_weights(weight_key, jnp.linalg.inv(precision), d)
    data = mj.datasets.regression(sample_key, weights, np.full(m, 400))
    lam = 1e-4
    regularizer = mj.regularizers.SparsePrecision(lam, jnp.inf, 0.0, penalty * lam * d)
    solution = mj.solve(mj.Problem(data, mj.losses.Squared(), regularizer), key=run_key, tol=1e-5, max_rounds=500)
    named = np.triu(np.abs(np.asarray(solution.omega)) > 1e-6, 1)
    true = np.triu(np.asarray(precision) != 0, 1)
    hits = (named & true).sum()
    return hits / max(named.sum(), 1), hits / true.sum(), named.sum()


if __name__ == "__main__":
    main()
