"""A factor for every feature, against the same regularizer of scaled samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests import zoo

R = mj.regularizers
M, D = 5, 4
FACTOR = np.array([0.25, 1.0, 2.0, 9.0])
PENALTIES = {
    "independent": R.Independent(np.linspace(0.02, 0.2, M)),
    "mean": R.MeanRegularized(0.2, 0.05),
    "graph": R.Graph(zoo.laplacian(M), 0.2, 0.05),
}


def both(name, loss, **kwargs):
    """The problem with factors, and that of samples whose features are divided by their roots."""
    data = zoo.data(m=M, d=D, regression=not loss.binary, loss_scaling="task_mean", **kwargs)
    penalty = PENALTIES[name]
    scaled = data.replace(x=data.x / np.sqrt(FACTOR)[None, None])
    return mj.Problem(data, loss, R.PerFeature(penalty, FACTOR)), mj.Problem(scaled, loss, penalty)


@pytest.mark.parametrize("name", PENALTIES)
def test_value_coupling_and_brackets_are_those_of_scaled_weights(name):
    penalty = PENALTIES[name]
    there, root = R.PerFeature(penalty, FACTOR), np.sqrt(FACTOR)[None]
    rng = np.random.default_rng(0)
    w, v = (jnp.asarray(rng.normal(size=(M, D))) for _ in range(2))
    np.testing.assert_allclose(there.value(w), penalty.value(w * root), rtol=1e-12)
    of, base = there.coupling(M), penalty.coupling(M)
    np.testing.assert_allclose(of.apply(v), base.apply(v / root) / root, rtol=1e-12)
    np.testing.assert_allclose(of.gradient(w), jax.grad(there.value)(w), rtol=1e-10)
    np.testing.assert_allclose(there.conjugate(v), penalty.conjugate(v / root), rtol=1e-12)
    near = there.prox(v, jnp.asarray(0.7))
    np.testing.assert_allclose(jax.grad(there.value)(near), 0.7 * (v - near), rtol=1e-9, atol=1e-12)
    for nodes in (jnp.ones(M), jnp.arange(1.0, M + 1.0)):
        # sigma' is safe for every feature: of each the matrix is that of the tasks times one number.
        matrix = np.stack(
            [np.asarray(of.apply(jnp.zeros((M, D)).at[t, j].set(1.0)))[:, j] for t in range(M) for j in range(D)]
        )
        for j in range(D):
            owner = np.repeat(np.arange(M), np.asarray(nodes, int))
            sigma = np.asarray(of.sigma_prime("per_task", nodes=nodes))
            own = np.diag((sigma * np.asarray(of.diagonal()))[owner])
            assert np.linalg.eigvalsh(own - matrix[j::D][np.ix_(owner, owner)]).min() >= -1e-9
    # The bracket is at least the Fenchel-Young term, of single precision too.
    exact = float(there.value(w) + there.conjugate(v) - jnp.sum(v * w))
    single = R.PerFeature(jax.tree.map(lambda a: jnp.asarray(a, "float32"), penalty), FACTOR.astype("float32"))
    v32, w32 = v.astype("float32"), w.astype("float32")
    error = jnp.abs(v32.astype(float) - v).astype("float32")
    assert exact * (1 - 1e-5) <= single.bracket(v32, error, w32) <= exact * 1.01


@pytest.mark.extended
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.thin(1)
def test_solutions_are_those_of_scaled_samples(name):
    problem, other = both(name, mj.losses.Logistic())
    there, scaled = (mj.solve(p, mj.Newton(), tol=1e-12, max_rounds=100) for p in (problem, other))
    np.testing.assert_allclose(there.weights * np.sqrt(FACTOR)[None], scaled.weights, atol=1e-6)
    ascent = mj.solve(problem, mj.Mocha(), tol=1e-7, max_rounds=3000)
    assert ascent.status == mj.Status.CONVERGED
    assert scaled.primal * (1 - 1e-12) <= ascent.primal <= scaled.primal * (1 + 1e-7)


@pytest.mark.extended
def test_fewer_samples_than_features():
    there, scaled = (
        mj.solve(p, mj.Newton(), tol=1e-10) for p in both("independent", mj.losses.Squared(), low=2, high=3)
    )
    np.testing.assert_allclose(there.weights * np.sqrt(FACTOR)[None], scaled.weights, rtol=1e-6, atol=1e-8)


@pytest.mark.extended
def test_derivatives_are_central_differences():
    problem, _ = both("mean", mj.losses.Logistic())

    def at(factor):
        there = problem.replace(regularizer=problem.regularizer.replace(factor=factor))
        return mj.solve(there, tol=1e-12, max_rounds=100)

    def score(w):
        return jnp.sum(jnp.sin(w))

    found = mj.hypergradient(score, at(FACTOR)).gradient.regularizer.factor
    for j, unit in enumerate(np.eye(D) * 1e-5):
        high, low = (float(score(at(FACTOR + s * unit).weights)) for s in (1, -1))
        assert found[j] == pytest.approx((high - low) / 2e-5, rel=1e-5)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="Probabilistic learns its relationship"):
        R.PerFeature(R.Probabilistic(0.1), FACTOR)
    with pytest.raises(ValueError, match="factor must be one number per feature"):
        mj.Problem(zoo.data(m=M, d=D), mj.losses.Hinge(), R.PerFeature(R.Independent(0.1), FACTOR[:2]))
    with pytest.raises(ValueError, match="factor must be"):
        R.PerFeature(R.Independent(0.1), -FACTOR)
