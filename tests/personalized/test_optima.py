"""Personalized methods on convex problems end where algebra and certified solves say."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import mocha_jax as mj
from mocha_jax.systems._base import Work
from tests import zoo

P: Any = mj.personalized
K, D = 4, 2
MODEL = mj.networks.Model(lambda key: jnp.full((D, 1), 0.5), lambda w, x: x @ w)
GAUSSIAN = mj.likelihoods.Gaussian()
FULL: Any = {"batch_size": None}
GRAPH = np.array([[0.0, 1.0, 0.0, 0.5], [1.0, 0.0, 2.0, 0.0], [0.0, 2.0, 0.0, 1.0], [0.5, 0.0, 1.0, 0.0]])
LAPLACIAN = np.diag(GRAPH.sum(1)) - GRAPH
RIDGE = 0.05  # a pull to zero, by the clients' optimizer


class Quadratics:
    """Clients' mean losses, halves of squared residuals: Hessians and minimizers."""

    def __init__(self, ridge=0.0):
        xs, ys = zoo.ragged(seed=7, m=K, d=D, low=5, high=9, regression=True)
        xs = [2.0 * x for x in xs]
        self.data = mj.pack_tasks(xs, ys, dtype=np.float64, loss_scaling="task_mean")
        self.problem = mj.Prediction(self.data, GAUSSIAN)
        self.h = np.array([x.T @ x / len(x) + ridge * np.eye(D) for x in xs])
        self.a = np.array([np.linalg.solve(h, x.T @ y / len(x)) for h, x, y in zip(self.h, xs, ys, strict=True)])

    def optimum(self, curvature=None):
        """The minimizer of the sum of quadratics about the clients' minimizers."""
        h = self.h if curvature is None else curvature
        return np.linalg.solve(h.sum(0), np.einsum("kij,kj->i", h, self.a))

    def near(self, w, strength):
        """Each client's minimizer with a pull to w."""
        return np.array(
            [
                np.linalg.solve(h + strength * np.eye(D), h @ a + strength * w)
                for h, a in zip(self.h, self.a, strict=True)
            ]
        )


F = Quadratics()


def ended(algorithm, rounds, problem=F.problem):
    """The state after rounds of full work by all clients."""

    def one(r, state):
        work = algorithm.full_work(problem)
        return algorithm.step(jax.random.fold_in(jax.random.key(0), r), state, problem, Work(work, work > 0))[0]

    return lax.fori_loop(0, rounds, one, algorithm.init(problem))


def models(algorithm, rounds, problem=F.problem):
    """The models of all clients then, ``[m, d]``, or the one of all ``[d]``."""
    return np.asarray(jax.jit(lambda: algorithm.weights(ended(algorithm, rounds, problem)))())[..., 0]


def close(ours, wanted, rtol=1e-8):
    np.testing.assert_allclose(ours, wanted, rtol=rtol, atol=1e-10)


def decayed(lr):
    """Gradient descent on the loss and half the ridge times the squared norm."""
    return optax.chain(optax.add_decayed_weights(RIDGE), optax.sgd(lr))


def certified(regularizer):
    """The optimum with a certificate."""
    problem = mj.Problem(F.data, mj.losses.Squared(), regularizer)
    solution = mj.solve(problem, tol=1e-11, max_rounds=20_000)
    assert solution.status == mj.Status.CONVERGED
    return np.asarray(solution.weights)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.extended
@pytest.mark.thin(1)
def test_mr_mtl_reaches_the_certified_optimum_of_mean_regularization(epochs):
    strength = 0.8
    ours = models(P.mr_mtl(MODEL, decayed(0.3), strength=strength, local_epochs=epochs, **FULL), 600)
    close(ours, certified(mj.regularizers.MeanRegularized(strength / 2, RIDGE / 2)), rtol=1e-5)


@pytest.mark.extended
def test_fedu_nears_the_certified_optimum_of_its_graph_as_its_steps_shrink():
    strength, rates = 0.6, jnp.asarray([0.08, 0.04, 0.02])
    algorithm = P.fedu(MODEL, decayed(1.0), graph=GRAPH, strength=strength, **FULL)

    def of(rate):
        there = algorithm.replace(rate=rate, numbers={**algorithm.numbers, "server_rate": rate})
        return there.weights(ended(there, 2500))[..., 0]

    ours = np.asarray(jax.jit(jax.vmap(of))(rates))
    optimum = certified(mj.regularizers.Graph(LAPLACIAN, strength / 2, RIDGE / 2))
    ridged = Quadratics(RIDGE)
    curvature = np.zeros((K, D, K, D))
    curvature[range(K), :, range(K)] = ridged.h
    h, a = curvature.reshape(K * D, K * D), ridged.a.ravel()
    pulls = strength * np.kron(LAPLACIAN, np.eye(D))
    close(optimum.ravel(), np.linalg.solve(h + pulls, h @ a), rtol=1e-5)
    for rate, w in zip(rates, ours, strict=True):
        # w = (I - rate L)(w - rate h (w - a))
        step = (np.eye(K * D) - float(rate) * pulls) @ h
        close(w.ravel(), np.linalg.solve(step + pulls, step @ a))
    distances = np.linalg.norm(ours - optimum, axis=(1, 2))
    ratios = distances[:-1] / distances[1:]
    assert np.all((ratios > 1.9) & (ratios < 2.1)), ratios


@pytest.mark.slow
def test_pfedme_reaches_the_minimizer_of_the_moreau_envelopes():
    lam, eye = 1.5, np.eye(D)
    algorithm = P.pfedme(MODEL, optax.sgd(0.8), strength=lam, inner_steps=40, inner_rate=0.3, **FULL)
    state = jax.jit(lambda: ended(algorithm, 100))()
    w = F.optimum(np.array([lam * np.linalg.solve(h + lam * eye, h) for h in F.h]))
    close(state.shared[:, 0], w)
    close(state.own[..., 0], F.near(w, lam))
    assert np.abs(w - F.optimum()).max() > 1e-3


def test_with_many_local_steps_corrections_reach_the_optimum_and_averaging_does_not():
    options: Any = {"local_epochs": 8, "batch_size": None}
    wanted = F.optimum()
    close(models(P.scaffold(MODEL, optax.sgd(0.1), **options), 300), wanted)
    close(models(P.feddyn(MODEL, optax.sgd(0.3), strength=0.5, **options), 300), wanted)
    assert np.abs(models(mj.FedAvg(MODEL, optax.sgd(0.1), **options), 300) - wanted).max() > 1e-2


@pytest.mark.slow
def test_corrections_reach_the_optimum_with_half_of_the_clients_a_round():
    wanted, options = F.optimum(), {"local_epochs": 4, "batch_size": None, "fraction": 0.5}
    for algorithm in (
        P.scaffold(MODEL, optax.sgd(0.1), **options),
        P.feddyn(MODEL, optax.sgd(0.3), strength=0.5, **options),
    ):
        state, history = mj.run(F.problem, algorithm, jax.random.key(3), num_rounds=1500, record_every=1500)
        close(algorithm.weights(state)[:, 0], wanted, rtol=1e-6)
        assert int(history.steps[0]) == 1500 * 4 * K // 2


def test_ditto_is_the_bayes_estimate_of_federated_points():
    # Points of clients about an unknown one, deviation tau, and samples about them, sigma: Ditto's estimates with
    # strength sigma^2 / (n tau^2) are the posterior means.
    n, sigma, tau, rng = 5, 0.8, 0.6, np.random.default_rng(0)
    samples = rng.normal(size=(6, 1)) * tau + 1.0 + sigma * rng.normal(size=(6, n))
    data = mj.pack_tasks([np.ones((n, 1))] * 6, list(samples), dtype=np.float64)
    model = mj.networks.Model(lambda key: jnp.zeros((1, 1)), lambda w, x: x @ w)
    algorithm = P.ditto(model, optax.sgd(0.5), strength=sigma**2 / (n * tau**2), **FULL)
    state = jax.jit(lambda: ended(algorithm, 80, mj.Prediction(data, GAUSSIAN)))()
    means = samples.mean(1)
    precisions = n / sigma**2, 1.0 / tau**2
    close(state.shared[0, 0], means.mean())
    close(state.own[:, 0, 0], (precisions[0] * means + precisions[1] * means.mean()) / sum(precisions))


@pytest.mark.parametrize("method", ["ditto", "mr_mtl"])
@pytest.mark.extended
def test_mean_estimation_has_the_error_and_the_best_strength_of_theory(method):
    # Liu et al. 2022: means w_k of deviation tau, n samples each of deviation sigma. Both methods end at
    # (x_k + lam x) / (1 + lam) of the means of samples, whose error is least at lam = sigma^2 / (n tau^2).
    k, n, sigma, tau, draws, rng = 6, 4, 1.2, 0.5, 400, np.random.default_rng(0)
    best, share = sigma**2 / (n * tau**2), sigma**2 / n
    strengths = best * np.array([0.0, 0.3, 1.0, 3.0, 30.0])
    points = 1.0 + tau * rng.normal(size=(draws, k))
    samples = points[..., None] + sigma * rng.normal(size=(draws, k, n))
    data = mj.pack_tasks([np.ones((n, 1))] * k, list(samples[0]), dtype=np.float64, loss_scaling="task_mean")
    model = mj.networks.Model(lambda key: jnp.zeros((1, 1)), lambda w, x: x @ w)

    def estimates(strength, y):
        algorithm = getattr(P, method)(model, optax.sgd(0.03), strength=strength, local_epochs=2, **FULL)
        return ended(algorithm, 1000, mj.Prediction(data.replace(y=y), GAUSSIAN)).own[:, 0, 0]

    of_draws = jax.jit(jax.vmap(jax.vmap(estimates, (None, 0)), (0, None)))
    ours = np.asarray(of_draws(jnp.asarray(strengths), jnp.asarray(samples)))
    means = samples.mean(2)
    lam = strengths[:, None, None]
    close(ours, (means + lam * means.mean(1, keepdims=True)) / (1.0 + lam), rtol=1e-6)
    own, pull = 1.0 / (1.0 + strengths), strengths / (1.0 + strengths)
    spread = tau**2 * (1.0 - 1.0 / k) + share / k
    theory = own**2 * share + pull**2 * spread + 2.0 * own * pull * share / k
    errors = ((ours - points) ** 2).mean(2)  # [strengths, draws]
    assert np.all(np.abs(errors.mean(1) - theory) < 4.0 * errors.std(1) / draws**0.5)
    assert errors.mean(1).argmin() == theory.argmin() == 2


@pytest.mark.parametrize("lam", [0.3, 3.0])
@pytest.mark.slow
def test_ditto_reaches_its_bilevel_solution(lam):
    algorithm = P.ditto(MODEL, optax.sgd(0.25), strength=lam, **FULL)
    state = jax.jit(lambda: ended(algorithm, 400))()
    close(state.shared[:, 0], F.optimum())
    close(state.own[..., 0], F.near(F.optimum(), lam))


@pytest.mark.slow
def test_afl_equalizes_the_losses_that_bind():
    # At the saddle point, clients with a share have the largest loss, and the mixture's gradient is zero.
    algorithm = P.afl(MODEL, optax.sgd(0.02), mixture_rate=0.02, **FULL)
    state = jax.jit(lambda: ended(algorithm, 30_000))()
    w, shares = np.asarray(algorithm.weights(state))[:, 0], np.asarray(state.rows)
    gradient = np.einsum("k,kij,kj->i", shares, F.h, w - F.a)
    assert np.abs(gradient).max() < 1e-3
    losses = np.asarray(jax.vmap(partial(mean_loss, w), (0,))(jnp.arange(K)))
    assert np.ptp(losses[shares > 1e-6]) < 1e-3
    assert losses.max() - losses[shares > 1e-6].min() < 1e-3
    close(shares.sum(), 1.0)


def mean_loss(w, k):
    x, y, weight = F.data.x[k], F.data.y[k], F.data.weight[k]
    return 0.5 * jnp.sum(weight * (x @ w - y) ** 2)


@pytest.mark.slow
def test_fedrep_finds_the_representation_of_linear_heads():
    d, r, m, n, rng = 6, 2, 10, 20, np.random.default_rng(1)
    truth = np.linalg.qr(rng.normal(size=(d, r)))[0]
    xs = [rng.normal(size=(n, d)) for _ in range(m)]
    ys = [x @ truth @ h for x, h in zip(xs, rng.normal(size=(m, r)), strict=True)]

    def initialise(key):
        return {"body": jnp.linalg.qr(jax.random.normal(key, (d, r)))[0], "head": jnp.zeros((r, 1))}

    model = mj.networks.Model(initialise, lambda w, x: x @ w["body"] @ w["head"])
    algorithm = P.fedrep(
        model, optax.sgd(0.5), body_optimizer=optax.sgd(0.5), private=("head",), local_epochs=20, **FULL
    )
    problem = mj.Prediction(mj.pack_tasks(xs, ys, dtype=np.float64), GAUSSIAN)

    def distance(body):  # the sine of the largest principal angle
        q = np.linalg.qr(np.asarray(body))[0]
        return np.linalg.norm(truth - q @ (q.T @ truth), 2)

    ends = jax.jit(lambda rounds: ended(algorithm, rounds, problem).shared["body"])
    distances = [distance(ends(jnp.asarray(rounds, jnp.int32))) for rounds in (0, 30, 60, 90)]
    assert distances[0] > 0.5
    assert all(after < 0.3 * before for before, after in itertools.pairwise(distances)), distances
