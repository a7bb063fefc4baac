"""Few tasks, many tasks, tiny numbers, where Omega is learned."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests.servers.problems import MODELS, R, make


@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (6, 1)])
@pytest.mark.slow
def test_few_tasks_and_few_features(shape):
    m, d = shape
    ridges = (R.Probabilistic(0.05, sigma2) for sigma2 in (1e-6, 1.0, 1e6, np.inf))
    for model in (*ridges, R.Clustered(0.05, 0.1, 1), R.Clustered(0.05, 0.1, m)):
        solution = mj.solve(make(model, m=m, d=d), tol=1e-4, max_rounds=5000, record_every=10)
        assert solution.status == mj.Status.CONVERGED
        assert np.isfinite(solution.omega).all()
        assert np.isfinite(solution.correlation).all()


@pytest.mark.parametrize("server", ["proximal", "dual"])
@pytest.mark.parametrize("name", ["probabilistic", "clustered"])
@pytest.mark.slow
def test_no_array_of_all_pairs_of_tasks_exists(server, name):
    m, d = 5003, 3
    x = jnp.ones((m, 2, d), jnp.float32)
    data = mj.TaskData(x, jnp.ones((m, 2), jnp.float32), jnp.ones((m, 2), jnp.float32), jnp.arange(m, dtype=jnp.int32))
    problem = mj.Problem(data, mj.losses.Hinge(), MODELS[name][0])
    algorithm = mj.Mocha(server=server, omega_every=2, sigma_prime="per_task")
    for rule in ("per_task", "spectral") if server == "dual" else ("per_task",):
        program = jax.jit(lambda key, a: mj.run(problem, a, key, num_rounds=4))
        text = str(program.lower(jax.random.key(0), algorithm.replace(sigma_prime=rule)).compile().as_text())
        sizes = [
            np.prod([int(n) for n in dims.split(",")])
            for dims in re.findall(r"(?:f32|s32|u32|pred|f64|s64)\[([\d,]+)\]", text)
        ]
        assert max(sizes) <= 200 * m  # far below m * m = 5003 * m; the row sums take 64 rows at a time


@pytest.mark.slow
def test_matrices_over_all_pairs_are_refused_where_they_would_be_huge(monkeypatch):
    solution = mj.solve(make(), max_rounds=2)
    monkeypatch.setattr("mocha_jax._driver.solution._LARGEST_MATRIX", 4)
    with pytest.raises(ValueError, match=r"solution\.relation keeps Omega"):
        _ = solution.omega
    assert isinstance(solution.relation, mj.coupling.LowRank)
    assert solution.relation.factor.shape == (5, 4)


@pytest.mark.slow
def test_the_step_size_rests_where_all_that_moves_is_rounding(key):
    rng, sizes = np.random.default_rng(0), (8, 5, 12, 9)
    xs = [rng.normal(size=(n, 3)) for n in sizes]
    data = mj.pack_tasks(xs, [np.sign(rng.normal(size=n)) for n in sizes], loss_scaling="task_mean", dtype="float32")
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    algorithm = mj.Mocha(server="proximal")
    first, history = mj.run(problem, algorithm, key, num_rounds=250)
    second, _ = mj.run(problem, algorithm, key, num_rounds=250, state=first)
    assert history.relative_gap[-1] < 1e-5
    assert 0.1 < first.server.rho * first.server.curvature < 10
    assert first.server.rho == second.server.rho
