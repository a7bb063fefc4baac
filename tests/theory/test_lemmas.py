"""Lemmas 5 and 7 and the bound (27), against plain NumPy and against rounds that were done."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax import theory
from mocha_jax.coupling import as_matrix
from tests import zoo


def problem(loss, kind="graph", seed=0, **kwargs):
    data = zoo.data(seed=seed, regression=not zoo.LOSSES[loss].binary, **kwargs)
    return mj.Problem(data, zoo.LOSSES[loss], zoo.regularizers(data.num_tasks)[kind])


def some_duals(p, seed=0):
    """Feasible duals, many of them at an end."""
    rng = np.random.default_rng(seed)
    return p.loss.project(jnp.asarray(2.0 * rng.normal(size=p.data.y.shape)), p.data.y)


def subgradient(loss, z, y):
    """What the definitions say, hand in hand with no line of the library."""
    return {
        "hinge": np.where(y * z < 1, -y, 0.0),
        "logistic": -y / (1 + np.exp(y * z)),
        "squared": z - y,
        "absolute": np.sign(z - y),
        "huber": np.clip(z - y, -0.7, 0.7),
        "smoothed_hinge": -y * np.clip((1 - y * z) / 0.5, 0.0, 1.0),
    }[loss]


def conjugate(loss, b, y):
    """The conjugate at -b, from its definition as a supremum over predictions."""
    z = np.linspace(-60.0, 60.0, 240_001)[:, None]
    value = {"hinge": np.maximum(1 - y * z, 0), "squared": (z - y) ** 2 / 2, "absolute": np.abs(z - y)}[loss]
    return np.max(-b * z - value, axis=0)


def dual_of(p, loss, beta):
    """D(alpha), the paper's, in NumPy."""
    x, y, c = (np.asarray(a) for a in (p.data.x, p.data.y, p.data.weight))
    v = np.einsum("ti,tid->td", c * beta, x)
    matrix = np.asarray(as_matrix(p.regularizer.coupling(len(x))))
    terms = sum(c[t] @ conjugate(loss, beta[t], y[t]) for t in range(len(x)))
    return terms + 0.5 * np.sum(v * (matrix @ v))


@pytest.mark.parametrize("loss", ["hinge", "logistic", "squared", "huber"])
@pytest.mark.slow
def test_the_parts_of_lemma_5_are_those_of_the_paper(loss):
    p = problem(loss, loss_scaling="task_mean")
    beta, s, gamma = some_duals(p), 0.3, 0.7
    found = theory.lemma5(p, beta, s, 0.4, gamma=gamma)
    x, y, c, b = (np.asarray(a) for a in (p.data.x, p.data.y, p.data.weight, beta))
    matrix = np.asarray(as_matrix(p.regularizer.coupling(len(x))))
    w = matrix @ np.einsum("ti,tid->td", c * b, x)
    prime = gamma * np.abs(matrix).sum(1) / np.diag(matrix)
    total = 0.0
    for t in range(len(x)):
        real = c[t] > 0
        u = -subgradient(loss, x[t] @ w[t], y[t])
        np.testing.assert_allclose(np.asarray(found.target)[t][real], u[real], atol=1e-12)
        change = np.where(real, u - b[t], 0.0)
        spread = matrix[t, t] * np.sum((x[t].T @ (c[t] * change)) ** 2)
        spread -= float(p.loss.mu) * (1 - s) / (prime[t] * s) * np.sum(c[t] * change**2)
        np.testing.assert_allclose(found.spread[t], spread, rtol=1e-10)
        total += 0.6 * (s * float(found.gap[t]) - prime[t] * s**2 / 2 * spread)
    np.testing.assert_allclose(found.progress, gamma * total, rtol=1e-10)
    np.testing.assert_allclose(found.gap.sum(), mj.certificate(p, beta).gap, rtol=1e-9)


@pytest.mark.parametrize(
    ("gamma", "loss"),
    [
        pytest.param(
            gamma, loss, marks=pytest.mark.slow if (gamma == 1.0) == (loss in ("logistic", "absolute")) else ()
        )
        for gamma in (0.5, 1.0)
        for loss in ("hinge", "squared", "logistic", "absolute")
    ],
)
@pytest.mark.slow
def test_no_round_gains_less_than_lemma_5_says(loss, gamma):
    for seed in range(3):
        p = problem(loss, seed=seed, m=5, low=6, high=6, loss_scaling="task_mean")
        algorithm = mj.Mocha(0.4, server="dual", sigma_prime="per_task", gamma=gamma)
        state, key = algorithm.init(p), jax.random.key(seed)
        for round in range(3):
            work = mj.systems.Dropout(0.3).work(key, p.data, algorithm.request(p, round))
            after, _ = algorithm.step(jax.random.fold_in(key, round), state, p, work)
            theta = algorithm.measure_theta(key, state, after, p, jnp.asarray(1e-9))[0]
            theta = jnp.where(jnp.isnan(theta), 1.0, theta)
            before, now = (algorithm.certify(one, p).dual for one in (state, after))
            for s in (0.0, 0.01, 0.1, 0.3, 1.0):
                promised = theory.lemma5(p, state.beta, s, theta, gamma=gamma).progress
                assert float(now - before) >= float(promised) - 1e-9 * abs(float(now)), (seed, round, s)
            state = after


@pytest.mark.slow
def test_lemma_5_is_exact_for_one_squared_loss_a_node():
    # Of a node with one sample every step lies on the way to u, and the conjugate is as convex as mu says.
    x = np.array([3.0, 4.0]) / 5.0
    p = mj.Problem(
        mj.pack_tasks([x[None]] * 3, [[1.0], [-2.0], [0.5]]), mj.losses.Squared(), mj.regularizers.Independent(0.25)
    )
    beta = jnp.array([[0.2], [0.0], [-0.3]])
    s = 1.0 / (1.0 + 2.0)  # mu / (mu + sigma' M_tt |x|^2): the best step, the same for all
    algorithm = mj.Mocha(50.0, server="dual", sigma_prime="per_task")
    start = algorithm.resume(algorithm.init(p).replace(beta=beta), p)
    work = mj.systems.Full().work(jax.random.key(0), p.data, algorithm.request(p))
    after, _ = algorithm.step(jax.random.key(0), start, p, work)
    gained = dual_of(p, "squared", np.asarray(beta)) - dual_of(p, "squared", np.asarray(after.beta))
    promised = theory.lemma5(p, beta, s, 0.0)
    np.testing.assert_allclose(promised.progress, gained, rtol=1e-6)  # the supremum is over a grid
    assert theory.lemma5(p, beta, 1.1 * s, 0.0).progress < promised.progress
    assert theory.lemma5(p, beta, 0.9 * s, 0.0).progress < promised.progress


@pytest.mark.slow
def test_with_the_sign_of_22_as_printed_lemma_5_fails():
    # u = +subgradient: at duals near the optimum the gap is small, and such a step leads far away from it.
    p = problem("hinge", "independent", loss_scaling="task_mean")
    beta = jnp.asarray(some_duals(p))
    right = np.asarray(theory.lemma5(p, beta, 1e-6, 0.0).target)
    c = np.asarray(p.data.weight)

    def gained(u, s=1e-6):
        stepped = np.where(c > 0, beta + s * (u - beta), beta)
        return float(mj.certificate(p, jnp.asarray(stepped)).dual - mj.certificate(p, beta).dual) / s

    gap = float(mj.certificate(p, beta).gap)
    np.testing.assert_allclose(gained(right), gap, rtol=1e-3)  # to first order the step gains s times the gap
    assert (np.asarray(p.loss.project(-right, p.data.y)) != -right)[c > 0].any()  # and -u is not even feasible


@pytest.mark.slow
def test_lemma_7_bounds_j_and_is_reached():
    for seed in range(3):
        for loss in ("hinge", "absolute", "huber", "logistic"):
            p = problem(loss, seed=seed, loss_scaling="task_mean")
            for s in (0.1, 1.0):
                spread = theory.lemma5(p, some_duals(p, seed), s, 0.0).spread
                assert float(spread.sum()) <= float(theory.lemma7(p))
    # One sample a node, and every dual at the wrong end: 2 L away from u.
    xs = [np.array([[1.0, 2.0]]), np.array([[3.0, 0.0]])]
    p = mj.Problem(mj.pack_tasks(xs, [[-9.0], [9.0]]), mj.losses.Absolute(), mj.regularizers.Graph(np.eye(2), 0.1, 0.1))
    reached = theory.lemma5(p, np.array([[1.0], [-1.0]]), 1.0, 0.0).spread.sum()
    np.testing.assert_allclose(reached, theory.lemma7(p), rtol=1e-3)  # to which sigma is known
    np.testing.assert_allclose(reached, 4.0 * 2.5 * (5.0 + 9.0), rtol=1e-12)


@pytest.mark.slow
def test_27_bounds_the_gap_of_runs():
    p = problem("smoothed_hinge", "mean", m=5, low=6, high=6, loss_scaling="task_mean")
    algorithm = mj.Mocha(server="dual", sigma_prime="per_task")
    keys, watch = jax.random.split(jax.random.key(0), 8), mj.Watch(theta=1e-4)

    @jax.jit
    @jax.vmap
    def runs(key):
        _, h = mj.run(p, algorithm, key, num_rounds=25, systems=mj.systems.Dropout(0.4), watch=watch)
        return h.gap, h.dual, h.nodes.theta

    gaps, duals, thetas = runs(keys)
    seen, s = theory.assumption2(np.asarray(thetas).reshape(-1, 5)), theory.rate(p)
    best = float(mj.solve(p, mj.Mocha(5.0), tol=1e-10, max_rounds=2000).dual)
    start = best - float(mj.certificate(p, p.loss.project(0 * p.data.y, p.data.y)).dual)
    rounds = np.arange(1.0, gaps.shape[1] + 1)
    mean = np.asarray(gaps).mean(0)
    assert (mean <= np.asarray(theory.gap_bound(start, rounds, s, seen.theta_bar))).all()
    # (23), which it rests on: a round gains at least that share of the gap before it.
    duals = np.asarray(duals).mean(0)
    share = float(s * (1 - seen.theta_bar))
    assert (np.diff(duals) >= share * mean[:-1] - 1e-12).all()


def test_27_at_its_ends():
    assert float(theory.gap_bound(1.0, 5, 0.5, 1.0)) == np.inf
    assert float(theory.gap_bound(0.0, 5, 0.5, 0.5)) == 0.0
    got = theory.gap_bound(3.0, 7, 0.2, 0.4, 0.5)
    np.testing.assert_allclose(got, 3.0 * (1 - 0.2 * 0.5 * 0.6) ** 7 / (0.2 * 0.5 * 0.6), rtol=1e-6)


def test_nodes_that_share_a_task_have_their_own_parts():
    xs, ys = zoo.ragged(m=3)
    data = mj.pack_tasks(xs, ys, task=[0, 0, 1])
    p = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    found = theory.lemma5(p, some_duals(p), 0.5, np.array([0.1, 0.2, 0.3]))
    assert found.gap.shape == found.spread.shape == (3,)
    assert np.isfinite(np.asarray(found.progress))


BAD = {
    "s": (lambda p: theory.lemma5(p, p.data.y, 1.5, 0.5), r"lemma5: s must be in \[0, 1\]"),
    "theta": (lambda p: theory.lemma5(p, p.data.y, 0.5, np.ones(2)), "a number or one per node"),
    "not Lipschitz": (lambda p: theory.lemma7(p), "lemma7: Squared is not Lipschitz"),
    "rounds": (lambda p: theory.gap_bound(1.0, -3, 0.1, 0.5), "gap_bound: rounds must be finite and >= 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make(problem("squared"))
