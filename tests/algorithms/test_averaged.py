"""The averaged iterate of Theorem 2: the mean of what the rounds were, whatever cut them, and within its bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax import theory
from mocha_jax.coupling import as_matrix
from tests import zoo

SYSTEMS = mj.systems.Dropout(0.3) & mj.systems.PartialEpochs(0.3, 1.0)
METHODS = {
    "algorithm 1": mj.algorithm1(sigma_prime="per_task"),
    "adaptive": mj.Mocha(server="dual"),
    "cocoa": mj.Cocoa(0.5, server="dual"),
    "sdca": mj.MiniBatchSdca(4, beta=5.0),
}


def make(**kwargs):
    data = zoo.data(loss_scaling="task_mean", **kwargs)
    return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.05))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_it_is_the_mean_of_the_iterates(name, key):
    p, method, first, rounds = make(), METHODS[name], 3, 9
    averaged = mj.Averaged(method, after=first)

    @jax.jit
    def step(algorithm, state):
        work = SYSTEMS.work(key, p.data, algorithm.request(p, state.round))
        return algorithm.step(jax.random.fold_in(key, state.round), state, p, work)[0]

    state, mean, betas = method.init(p), averaged.init(p), []
    matrix = np.asarray(as_matrix(p.regularizer.coupling(5)))
    for h in range(1, rounds + 1):
        state, mean = step(method, state), step(averaged, mean)
        np.testing.assert_allclose(mean.inner.beta, state.beta, rtol=1e-9, atol=1e-12)
        betas.append(np.asarray(state.beta))
        want = np.mean(betas[first:], axis=0) if h > first else betas[-1]
        np.testing.assert_allclose(mean.duals, want, rtol=1e-9, atol=1e-12)
        v = np.einsum("ti,tid->td", np.asarray(p.data.weight) * want, np.asarray(p.data.x))
        np.testing.assert_allclose(averaged.weights(mean), matrix @ v, rtol=1e-8, atol=1e-11)
        np.testing.assert_allclose(averaged.certify(mean, p).gap, mj.certificate(p, jnp.asarray(want)).gap, rtol=1e-7)
    assert int(mean.count) == rounds - first


@pytest.mark.slow
def test_a_run_that_was_cut_ends_bit_for_bit_where_it_would_have(key, tmp_path):
    p, averaged = make(dtype=np.float32), mj.Averaged(mj.algorithm1(), after=4)
    many: dict = dict(key=key, tol=None, systems=SYSTEMS)
    whole = mj.solve(p, averaged, max_rounds=12, chunk=12, **many)
    path = tmp_path / "run.npz"
    for rounds in (3, 7, 12):
        cut = mj.solve(p, averaged, max_rounds=rounds, chunk=2, checkpoint=path, **many)
    np.testing.assert_array_equal(cut.state.beta, whole.state.beta)
    np.testing.assert_array_equal(cut.weights, whole.weights)
    np.testing.assert_array_equal(cut.history.gap, whole.history.gap)
    half, _ = mj.run(p, averaged, key, num_rounds=7, systems=SYSTEMS)
    end, _ = mj.run(p, averaged, key, num_rounds=5, systems=SYSTEMS, state=half)
    assert int(end.count) == 8
    np.testing.assert_allclose(end.beta, whole.state.beta, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_its_certificate_counts_everything(key):
    p = make(dtype=np.float32)
    found = mj.solve(p, mj.Averaged(mj.algorithm1(sigma_prime="per_task"), after=30), key=key, tol=None, max_rounds=120)
    assert found.dual <= float(mj.solve(p, tol=1e-5, max_rounds=2000).primal)
    again = mj.certificate(p, found.state.beta, weights=found.weights)
    np.testing.assert_allclose(again.gap, found.gap, rtol=1e-3)
    assert found.relative_gap < 0.05


@pytest.mark.slow
def test_a_mean_begins_where_a_run_of_the_method_ended(key):
    p, method = make(), METHODS["algorithm 1"]
    before, _ = mj.run(p, method, key, num_rounds=5)
    mean, _ = mj.run(p, mj.Averaged(method), key, num_rounds=3, state=before)
    ends = [mj.run(p, method, key, num_rounds=n)[0].beta for n in (6, 7, 8)]
    np.testing.assert_allclose(mean.beta, np.mean(ends, axis=0), rtol=1e-8, atol=1e-10)
    other = p.replace(regularizer=mj.regularizers.MeanRegularized(0.2, 0.1))
    assert int(mj.Averaged(method).warm_start(mean, other).count) == 0


@pytest.mark.slow
def test_theorem_2_holds_of_the_mean_it_speaks_of(key):
    p = make(low=6, high=6).replace(regularizer=mj.regularizers.MeanRegularized(3.0, 3.0))
    method, systems = METHODS["algorithm 1"], mj.systems.Dropout(0.3)
    _, h = mj.run(p, method, key, num_rounds=20, systems=systems, watch=mj.Watch(theta=1e-6))
    bar = theory.assumption2(h.nodes.theta).theta_bar
    start = float(mj.certificate(p, 0 * p.data.y).gap)
    tol = 0.5 * start
    first, last = (int(a) for a in theory.theorem2(p, start, tol, bar))
    assert 0 < first < last < 5000
    _, h = mj.run(p, mj.Averaged(method, after=first), key, num_rounds=last, systems=systems, record_every=last)
    best = float(mj.solve(p, mj.Mocha(5.0), tol=1e-8, max_rounds=5000, record_every=10).primal)
    assert 0 <= best - float(h.dual[-1]) + 1e-9 <= tol


def test_what_has_no_mean_is_refused(key):
    p = mj.Problem(zoo.data(), mj.losses.Hinge(), mj.regularizers.Probabilistic(0.1))
    with pytest.raises(ValueError, match="the weights of a ProximalServer do not follow"):
        mj.run(p, mj.Averaged(mj.Mocha()), key, num_rounds=1)
    with pytest.raises(ValueError, match="algorithm must be a DualMethod"):
        mj.Averaged(mj.MiniBatchSgd(4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="after must be finite and >= 0"):
        mj.Averaged(mj.algorithm1(), after=-1)
