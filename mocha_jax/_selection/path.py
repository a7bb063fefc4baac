"""Solutions along a list of hyperparameters, each begun from the one before."""

from __future__ import annotations

import jax
from jax import Array

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._problem.problem import Problem
from mocha_jax._selection.candidates import solve_options, with_first
from mocha_jax._selection.learner import Answer, Learner, Way, learner_of
from mocha_jax._selection.preparation import Preparation, preparation
from mocha_jax.regularizers import Regularizer


@on_purpose
def lambda_path(
    problem: Problem | Learner[Answer, Way],
    candidates: Regularizer,
    algorithm: Algorithm[Problem] | None = None,
    *,
    standardize: str | Preparation | None = None,
    key: Array | None = None,
    tol: float = 1e-4,
    max_rounds: int = 1000,
    record_every: int = 5,
) -> Way:
    """Solve for one regularizer after the other, each from where the last one ended; one compiled call.

    A warning, `NotConverged`, names candidates that did not reach the tolerance.

    Args:
      problem: data and loss; its own regularizer does not matter. Of several classes see `multiclass.lambda_path`.
      candidates: regularizers in one record with a leading axis, from `grid`, best with the strongest first.
      algorithm: default as for `solve`.
      standardize: what to do with features before, see `cross_validate`. Weights and certificates are then those of
        ``problem.data.standardized(...)``.
      key: a JAX random key; default ``jax.random.key(0)``.
      tol: relative gap at which to go on to the next.
      max_rounds: for each at most.
      record_every: rounds between looks at the gap.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
      >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], loss_scaling="task_mean")
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
      >>> path = mj.lambda_path(problem, mj.grid(mj.regularizers.Probabilistic, lam=[1.0, 0.1, 0.01]), tol=1e-3)
      >>> path.weights.shape, bool((path.certificate.relative_joint_gap <= 1e-3).all())
      ((3, 4, 3), True)
    """
    owner, learner = "lambda_path", learner_of("lambda_path", problem)
    first = with_first(owner, learner.problem, candidates)
    options = solve_options(owner, first, algorithm, tol, max_rounds, record_every)
    key = jax.random.key(0) if key is None else key
    check.key(owner, key)
    prepare = preparation(owner, standardize, learner.centres_labels)
    return learner.path(owner, key, candidates, options, prepare)
