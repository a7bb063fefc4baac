"""Recombined points: the weights are the best ones, the dual never gets worse, and few rounds are needed."""

import cvxpy as cp
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.coupling import Dense, as_matrix
from mocha_jax.servers._adaptive import DualPoint, mixture_of_points
from mocha_jax.servers._quadratic_programs import Tasks, best_mixture, consensus
from mocha_jax.servers._quadratic_programs_kernels import by_platform
from tests import zoo

SEEDS = st.integers(0, 10_000)


def random_points(rng, m, p, d):
    """Dual vectors of some points, and the slopes of all but the first."""
    scale = 10.0 ** rng.uniform(-3, 0, size=(p, 1, 1))
    v = jnp.asarray(rng.normal(size=(1, m, d)) + scale * rng.normal(size=(p, m, d)))
    return v, jnp.asarray(rng.normal(size=(p - 1, m)) * scale[1:, 0])


def change_of_dual(a, v, slope, matrix):
    moved = np.einsum("pm,pmd->md", a, v) - v[0]
    return float(np.sum(a[1:] * slope) + 0.5 * np.sum(moved * (matrix @ moved)))


def largest_gain(v, slope, matrix, free):
    p, m, _ = v.shape
    root, weights = np.linalg.cholesky(matrix).T, cp.Variable((p - 1, m), nonneg=True)
    moved = sum(cp.multiply(weights[j][:, None], np.asarray(v[j + 1] - v[0])) for j in range(p - 1))
    value = cp.sum(cp.multiply(weights, np.asarray(slope))) + 0.5 * cp.sum_squares(root @ moved)
    best = cp.Problem(cp.Minimize(value), [cp.sum(weights, axis=0) <= np.asarray(free, float)])
    return -best.solve(solver=cp.CLARABEL)


def weights_of(v, slope, matrix, free):
    m, coupling = len(matrix), Dense(jnp.asarray(matrix))
    tasks = Tasks(coupling, consensus(coupling), None, jnp.ones(m, coupling.matrix.dtype), m)
    return np.asarray(best_mixture(v, slope, tasks, jnp.asarray(free), by_platform("auto")))


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(seed=SEEDS)
@pytest.mark.slow
def test_the_weights_gain_nearly_what_a_convex_solver_gains(seed):
    rng, (m, p, d) = np.random.default_rng(seed), (5, 4, 3)
    (v, slope), matrix = random_points(rng, m, p, d), zoo.random_spd(m, seed)
    free = rng.random(m) < 0.8
    a = weights_of(v, slope, matrix, free)
    assert (a >= 0).all()
    np.testing.assert_allclose(a.sum(0), 1.0, rtol=1e-12)
    assert (a[0, ~free] == 1).all()
    gain = largest_gain(v, slope, matrix, free)
    assert -change_of_dual(a, v, slope, matrix) >= gain / 1.1 - 1e-7 * (1 + gain)  # a tenth of it may be left


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_where_much_is_coupled_no_more_than_a_tenth_is_left(seed):
    rng, (m, p, d) = np.random.default_rng(seed), (20, 5, 3)
    factor = rng.normal(size=(m, 2))
    matrix = 0.05 * np.eye(m) + factor @ factor.T
    v, slope = random_points(rng, m, p, d)
    slope, free = -abs(slope), np.ones(m, bool)
    a = weights_of(v, slope, matrix, free)
    assert -change_of_dual(a, v, slope, matrix) >= largest_gain(v, slope, matrix, free) / 1.1


@pytest.mark.slow
def test_points_that_do_not_touch_the_weights_are_taken_if_they_gain():
    (v, slope), matrix = random_points(np.random.default_rng(0), 5, 4, 3), zoo.random_spd(5, 0)
    v = v.at[:, 2].set(0.0)  # the samples of this node are all zero
    a = weights_of(v, slope.at[:, 2].set(jnp.array([-1.0, -2.0, 3.0])), matrix, np.ones(5, bool))
    np.testing.assert_allclose(a[:, 2], [0.0, 0.0, 1.0, 0.0], atol=1e-6)


def test_weights_that_gain_nothing_move_nobody(monkeypatch):
    (v, slope), matrix = random_points(np.random.default_rng(0), 5, 4, 3), zoo.random_spd(5, 0)
    monkeypatch.setattr("mocha_jax.servers._quadratic_programs.answer", lambda *given: (jnp.full(5, 1 / 3),) * 3)
    a = weights_of(v, abs(slope), matrix, np.ones(5, bool))
    np.testing.assert_array_equal(a, np.eye(4)[:, [0] * 5])


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e4])
@pytest.mark.slow
def test_vectors_and_curvatures_of_any_size_get_the_same_weights(scale):
    rng, m = np.random.default_rng(0), 5
    (v, slope), matrix = random_points(rng, m, 4, 3), zoo.random_spd(m, 0)
    # As lambda makes them: vectors as small as it is, curvatures as large as its inverse, objectives as small.
    usual, other = (
        weights_of((s * v).astype(jnp.float32), (s * slope).astype(jnp.float32), (matrix / s).astype("f"), np.ones(m))
        for s in (1.0, scale)
    )
    np.testing.assert_allclose(usual, other, atol=1e-3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_a_task_on_several_nodes_is_weighed_as_one_operator_between_them(seed):
    rng, (p, d), task = np.random.default_rng(seed), (4, 3), np.array([0, 0, 1, 2, 2, 2])
    (v, slope), matrix = random_points(rng, len(task), p, d), zoo.random_spd(3, seed)
    coupling = Dense(jnp.asarray(matrix))
    known, counts = consensus(coupling), jnp.asarray(np.bincount(task), float)
    tasks = Tasks(coupling, known, jnp.asarray(task), counts, len(task))
    between = matrix[np.ix_(task, task)]
    stiffness = float(known.stiffness) * np.asarray(tasks.units)
    np.testing.assert_allclose(tasks.units, np.bincount(task)[task])
    h = jnp.asarray(rng.normal(size=(len(task), d)))
    np.testing.assert_allclose(tasks.apply(h), between @ h, rtol=1e-10, atol=1e-12)
    settled = between @ np.linalg.solve(between + np.diag(stiffness), stiffness[:, None] * h / stiffness[:, None])

    np.testing.assert_allclose(tasks.settle(h), settled, rtol=1e-8, atol=1e-10)
    a = np.asarray(best_mixture(tuple(v), slope, tasks, jnp.ones(len(task), bool), by_platform("auto")))
    slack = 1e-6 * np.eye(len(task))  # for the convex solver's factor
    gain = largest_gain(v, slope, between + slack, np.ones(len(task), bool))
    assert -change_of_dual(a, v, slope, between) >= gain / 1.1


def test_points_that_are_the_same_are_their_mixture_to_the_last_bit():
    point = jnp.asarray(np.random.default_rng(0).normal(size=(6, 50)), jnp.float32)
    weights = jnp.full((3, 6), 1 / 3, jnp.float32)
    np.testing.assert_array_equal(mixture_of_points(weights, (point, point, point)), point)


@pytest.mark.parametrize(("dtype", "lam"), [("float64", 1e-10), ("float32", 3e-4)])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_few_rounds_also_where_the_duals_are_tiny(dtype, lam, seed):
    # Separable, so all that is left of the optimum is of the size of lambda.
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(n, 3)) for n in (8, 1, 12)]
    data = mj.pack_tasks(xs, [np.where(x[:, 0] > 0, 1.0, -1.0) for x in xs], dtype=dtype)
    p = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(lam))
    solution = mj.solve(p, tol=1e-4, max_rounds=100)
    # In float32 the gap gets there too, but rounding of the margins may hide more than that.
    known = [mj.Status.CONVERGED] + [mj.Status.PRECISION] * (dtype == "float32")
    assert solution.status in known
    assert solution.history.residual[-1] <= 1e-4
    assert solution.weights.dtype == dtype


def adaptive(**kwargs):
    return mj.Mocha(sigma_prime="adaptive", **kwargs)


def problem(loss="hinge", kind="graph", seed=0, **kwargs):
    data = zoo.data(seed=seed, regression=not zoo.LOSSES[loss].binary, loss_scaling="task_mean", **kwargs)
    return mj.Problem(data, zoo.LOSSES[loss], zoo.regularizers(data.num_tasks)[kind])


@pytest.mark.extended
@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
    loss=st.sampled_from(["hinge", "logistic"]), seed=SEEDS, drop=st.floats(0.0, 0.9),
    epochs=st.just(0.4), gamma=st.sampled_from([0.5, 1.0]),
)  # fmt: skip
def test_the_dual_never_gets_worse(loss, seed, drop, epochs, gamma):
    p = problem(loss, seed=seed, low=6, high=6)
    systems = mj.systems.Dropout(drop) & mj.systems.PartialEpochs(0.1, 1.0)
    _, h = mj.run(p, adaptive(local_epochs=epochs, gamma=gamma), jax.random.key(seed), num_rounds=20, systems=systems)
    assert (np.diff(h.dual) >= -1e-12 * np.abs(h.dual[1:])).all()


@pytest.mark.slow
def test_many_coupled_tasks_need_a_fraction_of_the_rounds():
    data = mj.datasets.federation(jax.random.key(0), 30, 10, smallest=10, largest=40).data
    p = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(1.0, 1e-3))

    for drop in (0.0, 0.5):
        systems = mj.systems.Dropout(jnp.asarray(drop))
        few = mj.solve(p, adaptive(), tol=1e-3, max_rounds=4000, systems=systems)
        many = mj.solve(p, mj.Mocha(sigma_prime="lemma9"), tol=1e-3, max_rounds=4000, systems=systems)
        assert few.status == mj.Status.CONVERGED
        assert 8 * few.rounds <= many.rounds


@pytest.mark.slow
def test_the_shortest_memory_reaches_the_optimum():
    p = problem(m=5)
    ours = mj.solve(p, adaptive(memory=1), tol=1e-8, max_rounds=2000)
    other = mj.solve(p, mj.Mocha(sigma_prime="per_task"), tol=1e-8, max_rounds=20_000, record_every=10)
    np.testing.assert_allclose(ours.weights, other.weights, atol=1e-3)
    np.testing.assert_allclose(ours.primal, other.primal, rtol=1e-7)


@pytest.mark.slow
def test_dropped_nodes_stay_where_they_are(key):
    p = problem("logistic", m=5)
    before, _ = mj.run(p, adaptive(), key, num_rounds=3)
    after, _ = mj.run(p, adaptive(), key, num_rounds=1, state=before, systems=mj.systems.NeverAnswers((1, 3)))
    np.testing.assert_array_equal(after.beta[jnp.array([1, 3])], before.beta[jnp.array([1, 3])])
    assert (np.abs(after.beta - before.beta).max(axis=1)[[0, 2, 4]] > 0).all()


@pytest.mark.slow
def test_theta_is_of_what_was_found_before_it_was_recombined(key):
    p = problem("logistic", m=5)
    watch, never = mj.Watch(theta=1e-9), mj.systems.NeverAnswers((1,))
    _, h = mj.run(p, adaptive(local_epochs=300.0), key, num_rounds=3, systems=never, watch=watch)
    theta = np.asarray(h.nodes.theta)
    assert (theta[:, 1] == 1.0).all()
    assert np.nanmax(theta[:, [0, 2, 3, 4]]) <= 1e-6


@pytest.mark.slow
def test_messages_carry_weights_and_slopes(key):
    p = problem(m=5)
    _, h = mj.run(p, adaptive(memory=4), key, num_rounds=2, cost=mj.costs.Cost(bytes_per_number=1.0))
    d = p.data.num_features
    np.testing.assert_allclose([h.bytes_down[-1], h.bytes_up[-1]], [2 * 5 * (d + 7), 2 * 5 * (d + 5)])


@pytest.mark.slow
def test_the_predictions_for_the_slopes_are_charged(key):
    p, algorithm, d = problem(m=5, low=6, high=6), adaptive(), 4
    assert p.data.num_features == d
    request = algorithm.request(p)
    np.testing.assert_allclose(request.fixed_flops, 6 * 2 * d)
    work = mj.systems.NeverAnswers((1,)).work(key, p.data, request)
    _, info = algorithm.step(key, algorithm.init(p), p, work)
    np.testing.assert_allclose(info.flops, np.where(np.arange(5) == 1, 0, 6 * (6 * d + 2 * d)))


@pytest.mark.parametrize("other", [{"sigma_prime": "per_task"}, {"sigma_prime": "adaptive", "memory": 1}])
@pytest.mark.slow
def test_states_of_other_settings_are_warm_starts(other, key):
    p = problem(m=5)
    there = mj.solve(p, mj.Mocha(**other), tol=1e-6, max_rounds=20_000)
    again = mj.solve(p, adaptive(), tol=1e-5, state=there.state)
    back = mj.solve(p, mj.Mocha(**other), tol=1e-5, state=again.state)
    assert again.rounds <= there.rounds + 1
    assert back.rounds <= again.rounds + 1


@pytest.mark.slow
def test_what_is_remembered_is_true(key):
    p = problem(m=5)
    state, _ = mj.run(p, adaptive(), key, num_rounds=30, systems=mj.systems.Dropout(0.3))
    c, x = np.asarray(p.data.weight), np.asarray(p.data.x)
    for point in state.server.memory:
        np.testing.assert_allclose(point.v, np.einsum("mn,mn,mnd->md", c, point.beta, x), atol=1e-12)
    matrix = np.asarray(as_matrix(p.regularizer.coupling(5)))
    np.testing.assert_allclose(state.w, matrix @ np.einsum("mn,mnd->md", c * state.beta, x), atol=1e-10)


@pytest.mark.slow
def test_the_old_point_that_counts_least_makes_room(key):
    p = problem("logistic", m=5)
    best = mj.solve(p, adaptive(), tol=1e-10, max_rounds=2000).state.beta
    state = adaptive().init(p)
    memory = tuple(DualPoint(beta, p.data.node_vectors(beta)) for beta in (state.beta, best, state.beta))
    state = state.replace(server=state.server.replace(memory=memory))
    after, _ = mj.run(p, adaptive(local_epochs=0.2), key, num_rounds=1, state=state)
    # The optimum is worth more than what a fifth of an epoch has found.
    assert np.abs(after.beta - best).max() < np.abs(state.beta - best).max() / 2
    np.testing.assert_array_equal(after.server.memory[1].beta, best)
    new = [np.abs(now.beta - old.beta).max(axis=1) for now, old in zip(after.server.memory, memory, strict=True)]
    assert (np.max(new, axis=0) > 0).all()


@pytest.mark.parametrize("kind", ["graph", "independent", "mean"])
@pytest.mark.slow
def test_in_single_precision_nothing_levels_off(kind):
    data = mj.datasets.federation(jax.random.key(0), 8, 5, smallest=10, largest=30).data
    data = data.replace(**{f: getattr(data, f).astype(jnp.float32) for f in ("x", "y", "weight")})
    p = mj.Problem(data, mj.losses.Hinge(), zoo.regularizers(8)[kind])
    _, h = mj.run(p, adaptive(), jax.random.key(0), num_rounds=400)
    assert h.relative_gap.dtype == jnp.float32
    assert h.relative_gap.min() <= 1e-6


@pytest.mark.slow
def test_sigma_prime_is_steered_and_stays_within_bounds(key):
    p = problem("logistic", m=5)
    safe = float(jnp.max(p.regularizer.coupling(5).sigma_prime("per_task")))
    scales = []
    for rounds in (1, 8):
        state, _ = mj.run(p, adaptive(), key, num_rounds=rounds)
        scales.append(float(state.server.scale))
    assert all(1e-3 / safe - 1e-12 <= s <= safe + 1e-12 for s in scales)
    assert scales[0] < 1.0  # the first points get nearly all the weight: bolder
    assert scales[1] != 1.0


@pytest.mark.slow
def test_each_node_leans_its_own_way_but_not_far(key):
    p = problem("logistic", m=5)
    state, _ = mj.run(p, adaptive(), key, num_rounds=40, systems=mj.systems.NeverAnswers((2,)))
    lean = np.asarray(state.server.node_scale)
    assert lean[2] == 1.0
    assert ((lean >= 0.5) & (lean <= 2.0)).all()
    assert len(set(np.delete(lean, 2))) > 1
    q = adaptive().subproblems(state, p).q
    np.testing.assert_allclose(q, state.server.scale * lean * p.regularizer.coupling(5).diagonal())


@pytest.mark.parametrize("lam1", [0.0, 0.05])
@pytest.mark.slow
def test_the_dual_never_gets_worse_with_a_penalty_that_is_not_quadratic(lam1, key):
    data = zoo.data(loss_scaling="task_mean", m=5)
    p = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.SparsePrecision(0.02, 5.0, lam1, 0.2))
    _, h = mj.run(p, adaptive(omega_every=1000), key, num_rounds=60)
    assert (np.diff(h.dual) >= -1e-12 * np.abs(h.dual[1:])).all()
    assert h.relative_gap[-1] <= 1e-3


def test_memory_must_be_a_number_of_points():
    with pytest.raises(ValueError, match="memory must be an integer >= 1, got 0"):
        mj.Mocha(memory=0)
    with pytest.raises(ValueError, match="'lemma9', 'per_task', 'spectral', 'adaptive'"):
        mj.Mocha(sigma_prime="safe")


@pytest.mark.slow
def test_nodes_without_data_that_share_tasks_change_nothing(key):
    xs, ys = zoo.ragged(m=6)
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean", dtype="float64", task=np.arange(6) % 3)
    p = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
    (one, _), (other, _) = (mj.run(p.replace(data=d), adaptive(), key, num_rounds=6) for d in (data, data.pad(nodes=9)))
    np.testing.assert_allclose(other.w, one.w, rtol=1e-9)
