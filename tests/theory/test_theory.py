"""Measured theta, and the inequalities of the paper: over random problems, none is ever violated."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import mocha_jax as mj
from mocha_jax import theory
from mocha_jax.coupling import as_matrix
from tests import zoo

LIPSCHITZ = ("hinge", "huber")


def regularizer(kind, m=5):
    return {
        "independent": mj.regularizers.Independent(np.linspace(0.05, 0.3, m)),
        "mean": mj.regularizers.MeanRegularized(0.3, 0.05),
        "graph": mj.regularizers.Graph(zoo.random_spd(m), 0.2, 0.05),
        "probabilistic": mj.regularizers.Probabilistic(0.2, 2.0),
    }[kind]


def problem(loss="hinge", kind="mean", seed=0, **kwargs):
    data = zoo.data(seed=seed, regression=not zoo.LOSSES[loss].binary, **kwargs)
    return mj.Problem(data, zoo.LOSSES[loss], regularizer(kind))


# theta


@pytest.mark.parametrize(
    ("loss", "server"), [("hinge", "dual"), pytest.param("squared", "proximal", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_theta_of_exact_dropped_and_partial_rounds(loss, server, key):
    p = problem(loss, loss_scaling="task_mean")
    watch = mj.Watch(theta=1e-10)

    def theta(epochs, **kwargs):
        h = mj.run(
            p, mj.Mocha(epochs, server=server, sigma_prime="per_task"), key, num_rounds=2, watch=watch, **kwargs
        )[1]
        assert np.nanmax(h.nodes.theta_error) <= 1e-10
        return np.asarray(h.nodes.theta)

    assert np.nanmax(theta(1000.0)) <= 1e-8
    assert (theta(1.0, systems=mj.systems.Trace(np.zeros((1, 5)))) == 1.0).all()
    some = theta(1.0, systems=mj.systems.NeverAnswers((1, 3)))
    assert (some[:, [1, 3]] == 1.0).all()
    assert np.nanmax(some[:, [0, 2, 4]]) < 1.0
    # More steps, a smaller theta; on average over the nodes, for the visiting order is random.
    means = [np.nanmean(theta(epochs)[0]) for epochs in (0.3, 1.0, 4.0)]
    assert means == sorted(means, reverse=True)


@pytest.mark.slow
def test_theta_agrees_with_equation_5_in_plain_numpy(key):
    p = problem("squared", "graph", loss_scaling="task_mean")
    algorithm = mj.Mocha(sigma_prime="per_task")
    before, _ = mj.run(p, algorithm, key, num_rounds=1)
    work = mj.systems.Full().work(key, p.data, algorithm.request(p, 1))
    after, _ = algorithm.step(key, before, p, work)
    theta, error = algorithm.measure_theta(key, before, after, p, jnp.asarray(1e-12))
    x, y, c = (np.asarray(a) for a in (p.data.x, p.data.y, p.data.weight))
    sub = algorithm.subproblems(before, p)
    for k in range(5):
        real, w, q = c[k] > 0, np.asarray(sub.w)[k], float(sub.q[k])
        xk, yk, ck, b0 = x[k][real], y[k][real], c[k][real], np.asarray(before.beta)[k][real]

        def g(b, xk=xk, yk=yk, ck=ck, b0=b0, w=w, q=q):
            u = xk.T @ (ck * (b - b0))
            return np.sum(ck * (b**2 / 2 - b * yk)) + w @ u + q / 2 * u @ u

        gram = q * xk @ (xk.T * ck)
        best = g(np.linalg.solve(np.eye(len(yk)) + gram, yk - xk @ w + gram @ b0))
        want = (g(np.asarray(after.beta)[k][real]) - best) / (g(b0) - best)
        np.testing.assert_allclose(theta[k], want, rtol=1e-7)
        assert error[k] <= 1e-12
        np.testing.assert_allclose(sub.value(after.beta)[k], g(np.asarray(after.beta)[k][real]), rtol=1e-10)


@pytest.mark.slow
def test_theta_counts_the_whole_step_where_gamma_takes_a_part(key):
    p = problem("squared", loss_scaling="task_mean")
    thetas = []
    for gamma in (1.0, 0.5):
        algorithm = mj.Mocha(1000.0, gamma=gamma, sigma_prime="per_task")
        state = algorithm.init(p)
        work = mj.systems.Full().work(key, p.data, algorithm.request(p))
        after, _ = algorithm.step(key, state, p, work)
        thetas.append(np.asarray(algorithm.measure_theta(key, state, after, p, jnp.asarray(1e-10))[0]).max())
    assert max(thetas) <= 1e-8


@pytest.mark.slow
def test_nothing_to_gain_is_not_a_number(key):
    p = problem("squared", "independent")
    solution = mj.solve(p, mj.Mocha(10.0, sigma_prime="per_task"), tol=1e-15, max_rounds=3000, chunk=500)
    watch = mj.Watch(theta=1e-6)
    _, h = mj.run(p, mj.Mocha(10.0, sigma_prime="per_task"), key, num_rounds=2, state=solution.state, watch=watch)
    assert np.isnan(h.nodes.theta).all()
    seen = theory.assumption2(h.nodes.theta)
    assert not seen.holds  # nothing is known


@pytest.mark.slow
def test_watching_changes_nothing_else(key):
    p = problem()
    plain_state, plain = mj.run(p, mj.Mocha(sigma_prime="per_task"), key, num_rounds=4, systems=mj.systems.Dropout(0.3))
    state, h = mj.run(
        p,
        mj.Mocha(sigma_prime="per_task"),
        key,
        num_rounds=4,
        systems=mj.systems.Dropout(0.3),
        watch=mj.Watch(theta=1e-3),
    )
    np.testing.assert_allclose(state.beta, plain_state.beta, rtol=1e-12)
    np.testing.assert_allclose(h.primal, plain.primal, rtol=1e-12)
    np.testing.assert_array_equal(np.asarray(h.nodes.steps).sum(1), h.steps)
    np.testing.assert_array_equal(np.asarray(h.nodes.answered).sum(1), h.active)
    assert plain.nodes is None


# Definition 6


@pytest.mark.parametrize("kind", ["independent", "mean", "graph", "probabilistic"])
def test_sigma_is_the_largest_eigenvalue(kind):
    p = problem("squared", kind, loss_scaling="task_mean")
    x, c = np.asarray(p.data.x), np.asarray(p.data.weight)
    own = np.asarray(p.regularizer.coupling(5, p.regularizer.known_relation("test", None, 5, 4)).diagonal())
    want = [m * np.linalg.eigvalsh((xk.T * ck) @ xk)[-1] for m, xk, ck in zip(own, x, c, strict=True)]
    got = np.asarray(theory.sigma(p))
    np.testing.assert_allclose(got, want, rtol=1e-3)


def test_sigma_counts_nodes_of_a_shared_task():
    xs, ys = zoo.ragged(m=3)
    p = mj.Problem(mj.pack_tasks(xs, ys, task=[0, 0, 1]), mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    want = [5.0 * np.linalg.norm(x, 2) ** 2 for x in xs]
    np.testing.assert_allclose(theory.sigma(p, tol=1e-6), want, rtol=1e-4)


# Lemmas and theorems

# Compiled once for all examples; shrinking a failure would take long.
QUICK = hypothesis.settings(max_examples=6, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])

draw = hypothesis.given(
    loss=st.sampled_from(["logistic", "huber"]), kind=st.just("graph"),
    seed=st.integers(0, 10**6), gamma=st.floats(0.1, 1.0), rule=st.sampled_from(["per_task", "lemma9", "spectral"]),
    drop=st.floats(0.0, 0.9), epochs=st.just(0.4),
)  # fmt: skip


@jax.jit
def _round(key, algorithm, p, state, systems):
    work = systems.work(key, p.data, algorithm.request(p, state.round))
    return algorithm.step(jax.random.fold_in(key, state.round), state, p, work)[0]


@jax.jit
def _facts(key, algorithm, p, state, systems):
    """A round, both sides of Lemma 4, theta, what each task had to gain, and what was gained."""
    after = _round(key, algorithm, p, state, systems)
    theta, _ = algorithm.measure_theta(key, state, after, p, jnp.asarray(1e-8))
    before, now = algorithm.certify(state, p), algorithm.certify(after, p)
    return after, theory.lemma4(p, algorithm, state, after), theta, before.task_gaps, now.dual - before.dual, now.dual


@QUICK
@draw
@pytest.mark.slow
def test_lemma_4_and_the_decrease_it_implies(loss, kind, seed, gamma, rule, drop, epochs):
    p = problem(loss, kind, seed, m=5, low=6, high=6, loss_scaling="task_mean")
    algorithm = mj.Mocha(epochs, sigma_prime=rule, gamma=gamma, server="dual")
    key, systems = jax.random.key(seed), mj.systems.Dropout(drop)
    s = float(theory.rate(p, sigma_prime=rule, gamma=gamma))
    state = algorithm.init(p)
    for _ in range(4):
        after, (left, right), theta, gaps, gained, dual = _facts(key, algorithm, p, state, systems)
        assert left <= right + 1e-9 * abs(right)
        # Lemmas 5 and 6 for this very round: each task's progress is worth a share s of its gap.
        promised = s * gamma * np.sum((1 - np.nan_to_num(np.asarray(theta), nan=1.0)) * np.asarray(gaps))
        assert float(gained) >= promised - 1e-9 * abs(float(dual))
        state = after


@pytest.mark.parametrize("gamma", [0.5, 1.0])
@pytest.mark.thin(1)
def test_lemma_4_is_an_equality_where_nothing_couples(gamma, key):
    p = problem("hinge", "independent", loss_scaling="task_mean")
    algorithm = mj.Mocha(2.0, gamma=gamma, sigma_prime="per_task")
    state = algorithm.init(p)
    for _ in range(2):  # from beta = 0, where the dual is 0, and from where it is not
        after = _round(key, algorithm, p, state, mj.systems.Full())
        left, right = theory.lemma4(p, algorithm, state, after)
        np.testing.assert_allclose(left, right, rtol=1e-12)  # hinge is linear, and sigma' = gamma is exact
        state = after


def test_lemma_4_can_fail_where_sigma_prime_is_too_small(key):
    p = problem("squared", "mean", loss_scaling="task_mean").replace(
        regularizer=mj.regularizers.MeanRegularized(9.0, 1e-3)
    )
    algorithm = mj.Mocha(3.0, server="dual", sigma_prime="per_task")
    state = algorithm.init(p)
    state = state.replace(server=state.server.replace(stiffness=0.2 * state.server.own))
    left, right = theory.lemma4(p, algorithm, state, _round(key, algorithm, p, state, mj.systems.Full()))
    assert left > right


@QUICK
@hypothesis.given(
    loss=st.just("smoothed_hinge"), kind=st.sampled_from(["mean", "graph"]),
    seed=st.integers(0, 10**6), drop=st.floats(0.0, 0.8),
)  # fmt: skip
@pytest.mark.slow
def test_theorem_1_bounds_the_mean_over_seeds(loss, kind, seed, drop):
    p = problem(loss, kind, seed, m=5, low=6, high=6, loss_scaling="task_mean")
    keys = jax.random.split(jax.random.key(seed), 8)
    duals, thetas = _ensemble(keys, p, mj.systems.Dropout(drop))
    best = float(
        jnp.max(mj.run(p, mj.Mocha(5.0, sigma_prime="per_task"), keys[0], num_rounds=300, record_every=300)[1].dual)
    )
    best = max(best, float(duals.max()))
    seen = theory.assumption2(thetas.reshape(-1, 5))
    hypothesis.assume(seen.holds)
    start = float(mj.certificate(p, 0 * p.data.y).gap)
    rounds = np.arange(1.0, duals.shape[1] + 1)
    bound = np.asarray(theory.dual_bound(start, rounds, theory.rate(p), seen.theta_bar))
    away = best - np.asarray(duals).mean(0)
    assert (away <= bound + 1e-9 * abs(best)).all()
    for tol in (0.3 * start, 0.03 * start):  # and so the rounds that (6) asks for suffice
        enough = int(theory.theorem1(start, tol, theory.rate(p), seen.theta_bar))
        if enough <= len(away):
            assert away[enough - 1] <= tol


@jax.jit
def _ensemble(keys, p, systems):
    def one(key):
        _, h = mj.run(
            p,
            mj.Mocha(server="dual", sigma_prime="per_task"),
            key,
            num_rounds=25,
            systems=systems,
            watch=mj.Watch(theta=1e-4),
        )
        return h.dual, h.nodes.theta

    return jax.vmap(one)(keys)


@pytest.mark.parametrize("loss", LIPSCHITZ)
@pytest.mark.slow
def test_theorem_2_bounds_the_average(loss, key):
    p = problem(loss, loss_scaling="task_mean", low=6, high=6)
    p = p.replace(regularizer=mj.regularizers.MeanRegularized(3.0, 3.0))
    systems = mj.systems.Dropout(0.3)
    _, h = mj.run(
        p,
        mj.Mocha(server="dual", sigma_prime="per_task"),
        key,
        num_rounds=20,
        systems=systems,
        watch=mj.Watch(theta=1e-6),
    )
    bar = theory.assumption2(h.nodes.theta).theta_bar
    start = float(mj.certificate(p, 0 * p.data.y).gap)
    best = float(
        mj.solve(p, mj.Mocha(5.0, sigma_prime="per_task"), tol=1e-8, max_rounds=20_000, record_every=10).primal
    )
    tol = 0.05 * start
    first, last = (int(a) for a in theory.theorem2(p, start, tol, bar))
    assert 0 < first < last < 100_000
    _, h = mj.run(p, mj.Mocha(server="dual", sigma_prime="per_task"), key, num_rounds=last, systems=systems)
    # D is convex: at the average iterate it is at most the average of D.
    assert best - float(jnp.mean(h.dual[first:])) <= tol


def test_the_bounds_are_the_papers_formulas():
    p = problem("smoothed_hinge", "graph")
    x, c = np.asarray(p.data.x), np.asarray(p.data.weight)
    matrix = np.asarray(as_matrix(p.regularizer.coupling(5)))
    own, prime = np.diag(matrix), np.abs(matrix).sum(1) / np.diag(matrix)
    largest = np.array([np.linalg.norm(np.sqrt(c[t])[:, None] * x[t], 2) ** 2 for t in range(5)])
    sigma, mu = own * largest, float(p.loss.mu)
    s = min(mu / (mu + sigma * prime))
    np.testing.assert_allclose(theory.rate(p), s, rtol=1e-3)
    np.testing.assert_allclose(theory.theorem1(8.0, 0.1, s, 0.3, 0.9), np.ceil(np.log(80) / (0.7 * s * 0.9)))
    hinge = p.replace(loss=mj.losses.Hinge())
    k, a = 4 * np.sum(prime * sigma * c.sum(1)), 0.5
    for tol in (1e-2 * k, 10.0 * k):
        first = max(1 + np.log(2 * 8.0 / k) / a, 0.0) + 4 * k / (a * tol)
        last = first + 2 / a * max(1.0, k / (2 * tol))
        np.testing.assert_allclose(theory.theorem2(hinge, 8.0, tol, 0.5), [first, last], rtol=1e-2, atol=1.5)


def test_theorem_2_grows_as_the_paper_says():
    p = problem("hinge", low=6, high=6)
    rounds = [float(theory.theorem2(p, 1.0, tol, 0.5)[1]) for tol in (1e-2, 1e-3)]
    np.testing.assert_allclose(rounds[1] / rounds[0], 10.0, rtol=1e-2)  # 1 / epsilon
    slower = float(theory.theorem2(p, 1.0, 1e-2, 0.75)[1])
    np.testing.assert_allclose(slower / rounds[0], 2.0, rtol=1e-2)  # 1 / (1 - Theta)


# Assumption 2 and Corollary 8


@pytest.mark.slow
def test_a_silent_node_violates_assumption_2(key):
    p = problem("hinge", low=10, high=30)
    systems = mj.systems.NeverAnswers((3,)) & mj.systems.Dropout(0.2)
    _, h = mj.run(p, mj.Mocha(sigma_prime="per_task"), key, num_rounds=30, systems=systems, watch=mj.Watch(theta=1e-4))
    seen = theory.assumption2(h.nodes.theta)
    assert not seen.holds
    assert seen.violators == [3]
    _, h = mj.run(
        p,
        mj.Mocha(sigma_prime="per_task"),
        key,
        num_rounds=30,
        systems=mj.systems.Dropout(0.2),
        watch=mj.Watch(theta=1e-4),
    )
    seen = theory.assumption2(h.nodes.theta)
    assert seen.holds
    assert seen.violators == []
    np.testing.assert_allclose(np.asarray(seen.p).mean(), 0.2, atol=0.1)
    np.testing.assert_allclose(seen.theta_bar, seen.p_max + (1 - seen.p_max) * seen.theta_max)


def test_corollary_8_tells_the_decays_apart():
    h = np.arange(1, 2001.0)[:, None] * np.ones((1, 3))
    cases = {
        "constant": (np.full_like(h, 0.9), True, True),
        "root": (1 - 1 / np.sqrt(h), False, True),
        "one over h": (1 - 0.9 / h, False, False),
        "dead": (np.ones_like(h), False, False),
    }
    for name, (p, bounded, slow) in cases.items():
        seen = theory.corollary8(p)
        assert (bool(seen.bounded), bool(seen.slow)) == (bounded, slow), name
    assert not theory.corollary8(cases["constant"][0], cases["one over h"][0]).slow


def test_at_the_ends_of_the_bounds():
    assert float(theory.theorem1(0.5, 1.0, 0.1, 1.0)) == 0.0
    assert float(theory.theorem1(2.0, 1.0, 0.1, 1.0)) == np.inf
    assert float(theory.theorem2(problem("hinge"), 1.0, 0.1, 1.0)[1]) == np.inf
    with pytest.raises(ValueError, match="gamma must be in"):
        theory.rate(problem("logistic"), gamma=5.0)
    p = problem("logistic")
    state = mj.Mocha(server="proximal").init(p)
    with pytest.raises(ValueError, match="have no safe sigma"):
        theory.lemma4(p, mj.Mocha(server="proximal"), state, state)


BAD = {
    "not smooth": (lambda: theory.rate(problem("hinge")), "Hinge is not smooth"),
    "not Lipschitz": (lambda: theory.theorem2(problem("squared"), 1.0, 0.1, 0.5), "Squared is not Lipschitz"),
    "theta": (lambda: theory.assumption2(np.ones(3)), r"theta must be an array \[rounds, nodes\]"),
    "theta beyond 1": (lambda: theory.assumption2(np.full((3, 3), 5.0)), r"assumption2: theta must be in \[0, 1\]"),
    "theta_bar": (lambda: theory.theorem1(1.0, 0.1, 0.1, 2.0), r"theorem1: theta_bar must be in \[0, 1\]"),
    "s": (lambda: theory.theorem1(1.0, 0.1, -0.1, 0.5), r"theorem1: s must be in \[0, 1\]"),
    "start": (lambda: theory.theorem1(-1.0, 0.1, 0.1, 0.5), "theorem1: start must be finite and >= 0"),
    "tol": (lambda: theory.theorem1(1.0, -0.1, 0.1, 0.5), "theorem1: tol must be finite and > 0"),
    "gamma": (lambda: theory.dual_bound(1.0, 3, 0.1, 0.5, gamma=2.0), r"dual_bound: gamma must be in \(0, 1\]"),
    "rounds": (lambda: theory.dual_bound(1.0, -3, 0.1, 0.5), "dual_bound: rounds must be finite and >= 0"),
    "theta_bar of (7)": (
        lambda: theory.theorem2(problem(), 1.0, 0.1, -1.0),
        r"theorem2: theta_bar must be in \[0, 1\]",
    ),
    "accuracy": (lambda: theory.sigma(problem(), tol=float("nan")), "sigma: tol must be finite and > 0"),
    "an Omega of none": (
        lambda: theory.sigma(problem(), "abc"),  # type: ignore[arg-type]
        "sigma: relation must be left out",
    ),
    "p": (lambda: theory.corollary8(np.ones((2, 2))), "4 rounds or more"),
    "watch": (lambda: mj.Watch(theta=0.0), "theta must be finite and > 0"),
    "what to watch": (
        lambda: mj.run(problem(), mj.Mocha(sigma_prime="per_task"), jax.random.key(0), num_rounds=1, watch=True),  # type: ignore[arg-type]
        "watch must be a Watch",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_traced_has_the_same_bounds():
    bound = jax.jit(lambda theta_bar: theory.theorem1(10.0, 1.0, 0.1, theta_bar))
    assert bound(0.5) == theory.theorem1(10.0, 1.0, 0.1, 0.5)
