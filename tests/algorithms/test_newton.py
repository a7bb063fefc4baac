"""Newton's method on all weights, against NumPy, SciPy and other methods."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import mocha_jax as mj
from mocha_jax._algorithms.second_derivatives import ByFeatures, BySamples, curvature
from mocha_jax.coupling import Dense, Diagonal, Exchangeable, LowRank, as_matrix
from mocha_jax.systems._base import Work
from tests import zoo

M, D = 6, 3
REGULARIZERS = zoo.regularizers(M)
SMOOTH = {name: loss for name, loss in zoo.LOSSES.items() if loss.smoothness is not None}


def problem(loss, regularizer="mean", **kwargs):
    data = zoo.data(m=M, d=D, regression=not loss.binary, loss_scaling="task_mean", **kwargs)
    return mj.Problem(data, loss, REGULARIZERS[regularizer])


def optimum(p):
    """The least objective, by SciPy from the library's own objective and JAX's derivatives of it."""
    shape = p.data.num_tasks, p.data.num_features
    value = jax.jit(jax.value_and_grad(lambda w: mj.objective(p, w.reshape(shape))))
    found = scipy.optimize.minimize(value, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B",
                                    options={"maxiter": 5000, "ftol": 1e-16, "gtol": 1e-11})  # fmt: skip
    return found.fun


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.thin(2)
def test_one_round_solves_least_squares(regularizer, key):
    p = problem(mj.losses.Squared(), regularizer)
    state, _ = mj.run(p, mj.Newton(), key, num_rounds=1)
    a = np.linalg.inv(as_matrix(p.regularizer.coupling(M)))
    x, y, c = (np.asarray(v) for v in (p.data.x, p.data.y, p.data.weight))
    system = np.kron(a, np.eye(D))
    for t in range(M):
        system[t * D : t * D + D, t * D : t * D + D] += (x[t] * c[t][:, None]).T @ x[t]
    expected = np.linalg.solve(system, np.concatenate([x[t].T @ (c[t] * y[t]) for t in range(M)]))
    np.testing.assert_allclose(np.ravel(state.w), expected, rtol=1e-8, atol=1e-10)
    assert mj.solve(p, mj.Newton(), tol=1e-6, record_every=1).rounds == 1


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.thin(2)
def test_it_ends_at_the_optimum(name):
    p = problem(SMOOTH[name])
    solution = mj.solve(p, mj.Newton(), tol=1e-9, record_every=1, max_rounds=200)
    assert solution.status == mj.Status.CONVERGED
    best = optimum(p)
    assert best * (1 - 1e-9) <= solution.primal <= best * (1 + 1e-8)
    assert solution.primal - solution.gap <= best * (1 + 1e-12)


@pytest.mark.extended
def test_a_handful_of_rounds_where_ascent_takes_many():
    p = problem(mj.losses.Logistic()).replace(regularizer=mj.regularizers.MeanRegularized(0.01, 0.0001))
    newton = mj.solve(p, mj.Newton(), tol=1e-8, record_every=1)
    assert newton.status == mj.Status.CONVERGED
    assert newton.rounds <= 10
    assert mj.solve(p, mj.Mocha(), tol=1e-8, max_rounds=1000).rounds > 4 * newton.rounds


@pytest.mark.parametrize(
    "systems",
    [
        pytest.param(mj.systems.Dropout(0.4), marks=pytest.mark.extended, id="silent"),
        pytest.param(mj.systems.PartialEpochs(0.2, 1.0), marks=pytest.mark.extended, id="no time"),
        pytest.param(mj.systems.Dropout(0.2) & mj.systems.PartialEpochs(0.2, 1.0), id="both"),
    ],
)
@pytest.mark.extended
def test_nodes_that_are_silent_or_have_no_time_do_not_move_the_optimum(systems):
    p = problem(mj.losses.Logistic(), "graph")
    plain = mj.solve(p, mj.Newton(), tol=1e-9, record_every=1)
    other = mj.solve(p, mj.Newton(), tol=1e-9, record_every=1, systems=systems, max_rounds=300)
    assert other.status == mj.Status.CONVERGED
    assert plain.rounds < other.rounds <= 60
    np.testing.assert_allclose(other.weights, plain.weights, atol=1e-4)


class Outage(mj.systems.System):
    """From the second to the thirteenth round two nodes answer, then all."""

    def work(self, key, data, request):
        few = (request.round >= 1) & (request.round <= 12)
        return mj.systems.Work(request.steps, ~few | (jnp.arange(data.num_nodes) < 2))


@pytest.mark.parametrize("seed", range(4))
def test_it_goes_on_at_once_after_a_long_outage(seed, key):
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(30, 5)) for _ in range(10)]
    ys = [np.sign(x[:, 0] + 0.5 * rng.normal(size=30)) for x in xs]
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.MeanRegularized(0.1, 0.02))
    state, _ = mj.run(problem, mj.Newton(), key, num_rounds=13, systems=Outage())
    assert float(state.share) == 1.0  # steps of no more than rounding are not taken back
    solution = mj.solve(problem, mj.Newton(), systems=Outage(), tol=1e-9, record_every=1)
    assert solution.rounds <= 13 + 4


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_warm_start_is_a_newton_step_at_once(factor, key):
    def problem(lam):
        data = mj.pack_tasks(*zoo.ragged(seed=3, m=6, d=4, low=20, high=40), loss_scaling="task_mean")
        return mj.Problem(data, mj.losses.Logistic(), mj.regularizers.MeanRegularized(lam, lam / 10.0))

    state, _ = mj.run(problem(0.1), mj.Newton(), key, num_rounds=3)
    after, history = mj.run(problem(0.1 * factor), mj.Newton(), key, num_rounds=6, state=state, record_every=1)
    assert float(after.share) == 1.0
    assert np.all(np.diff(np.asarray(history.primal)) <= 1e-12)  # no step is taken back
    assert float(history.relative_gap[-1]) < 1e-9


class Alternating(mj.systems.System):
    """Nodes with even and with odd numbers answer in turn: none does in two rounds running."""

    def work(self, key, data, request):
        return mj.systems.Work(request.steps, jnp.arange(data.num_nodes, dtype=jnp.int32) % 2 == request.round % 2)


# A system, and how near the optimum sixty rounds come at least, as a multiple of the objective there.
SILENT = {
    "drops": (mj.systems.Dropout(0.5), 1.5), "sampled": (mj.systems.Sampled(0.1), 4.0), "in turn": (Alternating(), 1.5)
}  # fmt: skip


@pytest.mark.parametrize("width", [0.5, 0.05])
@pytest.mark.parametrize("case", SILENT)
@pytest.mark.extended
def test_losses_that_bend_suddenly_do_not_throw_it_off_when_nodes_are_silent(case, width, key):
    rng = np.random.default_rng(0)
    xs, common = [rng.normal(size=(int(rng.integers(5, 60)), 8)) for _ in range(40)], rng.normal(size=8)
    ys = [np.sign(x @ (common + 0.5 * rng.normal(size=8)) + 0.5 * rng.normal(size=len(x))) for x in xs]
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    problem = mj.Problem(data, mj.losses.SmoothedHinge(width), mj.regularizers.MeanRegularized(0.01, 0.001))
    _, history = mj.run(problem, mj.Newton(), key, num_rounds=60, systems=SILENT[case][0], record_every=1)
    start = 40.0 * (1.0 - width / 2.0)  # the objective without weights
    assert np.all(np.asarray(history.primal[1:]) < start)
    assert history.primal[-1] < SILENT[case][1] * mj.solve(problem, mj.Newton(), tol=1e-6).primal


@pytest.mark.parametrize("far", [0.0, 1e4])
def test_steps_at_the_optimum_are_no_more_than_rounding(far, key):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(20, 4)).astype("f") for _ in range(6)]
    data = mj.pack_tasks(xs, [(far + x[:, 0] + rng.normal(size=20)).astype("f") for x in xs], intercept=1.0)
    problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.MeanRegularized(0.1, 0.02))
    state, _ = mj.run(problem, mj.Newton(), key, num_rounds=16)
    assert float(state.share) == 1.0  # none of them was taken back


@pytest.mark.extended
def test_weights_that_are_worse_are_taken_back(key):
    """With labels far apart a step of a smoothed hinge goes too far: no base is worse than the one before."""
    p = problem(mj.losses.SmoothedHinge(0.05)).replace(regularizer=mj.regularizers.MeanRegularized(1e-3, 1e-4))
    state, worse, at = mj.Newton().init(p), 0, []
    step = jax.jit(mj.Newton().step)
    for r in range(40):
        work = mj.systems.Full().work(key, p.data, mj.Newton().request(p, r))
        state, _ = step(key, state, p, work)
        worse += int(state.share < 1.0)
        at.append(float(mj.objective(p, state.base)))
    assert worse > 3
    assert (np.diff(at) <= 1e-12).all()
    assert at[-1] < 0.5 * at[0]


@pytest.mark.extended
def test_a_task_on_several_nodes_is_one_task():
    xs, ys = zoo.ragged(m=4, d=D)
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    dealt = mj.pack_tasks(xs, ys, loss_scaling="task_mean", rows=5)
    assert dealt.num_nodes > 4
    one, several = (
        mj.solve(
            mj.Problem(d, mj.losses.Logistic(), mj.regularizers.MeanRegularized(0.1, 0.02)), mj.Newton(), tol=1e-10
        )
        for d in (data, dealt)
    )
    np.testing.assert_allclose(several.weights, one.weights, atol=1e-6)


def test_what_a_message_holds_is_counted():
    p = problem(mj.losses.Logistic())
    first, later = (mj.Newton().request(p, r) for r in (0, 1))
    assert first.down == later.down == D
    assert later.up == 1 + D + D * (D + 1) / 2  # the losses, the gradient, the Hessian
    assert first.up == later.up + D * (D + 1) / 2  # second moments
    _, history = mj.run(p, mj.Newton(), jax.random.key(0), num_rounds=2)
    assert history.bytes_up[-1] == 4 * M * float(first.up + later.up)


@pytest.mark.extended
def test_its_optimum_has_derivatives():
    p = problem(mj.losses.Logistic())

    def length(lam):
        there = p.replace(regularizer=mj.regularizers.MeanRegularized(lam, 0.05))
        return (mj.solve(there, mj.Newton(), tol=1e-12).weights ** 2).sum()

    ours = jax.grad(length)(0.2)
    np.testing.assert_allclose(ours, (length(0.2 + 1e-4) - length(0.2 - 1e-4)) / 2e-4, rtol=1e-4)


@pytest.mark.extended
def test_a_gap_in_float32_has_no_floor(key):
    """As a difference of R(W), R*(V) and <V, W> the recorded gap would stay at 1e-7, and rounds would go on."""
    p = problem(mj.losses.Logistic(), dtype=np.float32)
    _, history = mj.run(p, mj.Newton(), key, num_rounds=10)
    assert history.relative_gap.dtype == np.float32
    assert history.relative_gap.min() < 1e-9
    solution = mj.solve(p, mj.Newton(), tol=1e-6, record_every=1)
    assert solution.status == mj.Status.CONVERGED
    assert solution.rounds <= 10


COUPLINGS: dict[str, Any] = {
    "diagonal": Diagonal(jnp.linspace(0.1, 10.0, M)),
    "alike": Exchangeable(jnp.asarray(0.3), jnp.asarray(50.0), M),
    "dense": Dense(zoo.random_spd(M)),
    "low rank": LowRank(jnp.asarray(0.2), jnp.asarray(np.random.default_rng(0).normal(size=(M, 2)))),
}


@pytest.mark.parametrize("loss", ["huber", pytest.param("smoothed_hinge", marks=pytest.mark.extended)])
def test_samples_of_very_different_lengths_leave_weights_finite(loss):
    # A Hessian of a few long samples is singular up to its rounding, which is more than the regularizer.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 40, 6))
    y = np.einsum("mnd,md->mn", x, rng.normal(size=(12, 6))) + 0.3 * rng.normal(size=(12, 40))
    x *= np.exp(2 * rng.normal(size=(12, 40, 1)))
    hinge = loss == "smoothed_hinge"
    data = mj.pack_tasks(list(x), list(np.sign(y) if hinge else y), dtype=np.float32)
    of_samples = mj.losses.SmoothedHinge(0.5) if hinge else mj.losses.Huber(0.3)
    problem = mj.Problem(data, of_samples, mj.regularizers.MeanRegularized(1e-5, 1e-6))
    solution = mj.solve(problem, mj.Newton(), tol=None, max_rounds=40)
    assert np.isfinite(solution.weights).all()
    assert hinge or mj.solve(problem, mj.Newton(), tol=1e-4, max_rounds=300).status == mj.Status.CONVERGED


@pytest.mark.parametrize(("far", "strength"), [(1e4, 0.3), pytest.param(1e6, 3.0, marks=pytest.mark.extended)])
def test_labels_far_away_do_not_hide_a_step_that_is_too_long(far, strength):
    # Rounding of their losses is more than what steps change in the end, where undamped ones go to and fro.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 40, 8)).astype("f")
    y = np.einsum("mnd,md->mn", x, rng.normal(size=(20, 8))) + 0.3 * rng.normal(size=(20, 40))
    y[:, :4] += far * rng.normal(size=(20, 4))
    data = mj.pack_tasks(list(x), list(y), dtype=np.float32)
    problem = mj.Problem(data, mj.losses.Huber(0.1), mj.regularizers.MeanRegularized(strength, 0.1))
    solution = mj.solve(problem, mj.Newton(), tol=1e-7, max_rounds=60)
    assert solution.status == mj.Status.CONVERGED


@pytest.mark.parametrize("rows", [2, 5], ids=["fewer samples than features", "more"])
@pytest.mark.parametrize("name", COUPLINGS)
def test_the_step_of_a_coupling_is_that_of_its_matrix(name, rows):
    rng, coupling = np.random.default_rng(1), COUPLINGS[name]
    data = mj.pack_tasks(list(rng.normal(size=(M, rows, D))), [np.ones(rows)] * M)
    bend = rng.uniform(size=(M, rows)) * np.logspace(-2, 1, M)[:, None]
    bend[:, 0] = [0.0, 1e-200, 1e-8, 1.0, 1e2, 1e4]
    right, slopes = rng.normal(size=(M, D)), rng.normal(size=(M, rows)) * np.minimum(bend, 1.0)
    curved = curvature(data, jnp.asarray(bend))
    assert isinstance(curved, BySamples if rows < D else ByFeatures)
    matrix, x = np.kron(as_matrix(coupling), np.eye(D)), np.asarray(data.x)
    blocks = np.zeros((M * D, M * D))
    for t in range(M):
        blocks[t * D : t * D + D, t * D : t * D + D] = (x[t].T * bend[t]) @ x[t]
    forced = right.ravel() + matrix @ np.einsum("mnd,mn->md", x, slopes).ravel()
    expected = np.linalg.solve(np.eye(M * D) + matrix @ blocks, forced)
    found, left = coupling.newton_system(curved)(jnp.asarray(right), jnp.asarray(slopes))
    np.testing.assert_allclose(np.ravel(found), expected, rtol=1e-6, atol=1e-8)
    there = np.einsum("mnd,md->mn", x, expected.reshape(M, D))
    np.testing.assert_allclose(left, slopes - bend * there, rtol=1e-6, atol=1e-7)


@pytest.mark.extended
@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize("regularizer", ["mean", "independent_per_task", "graph"])
@pytest.mark.thin(2)
def test_fewer_samples_than_features_end_at_the_same_optimum(loss, regularizer):
    """The systems have the size of the samples then; two nodes of a task need those of the features."""
    d, made = 9, zoo.LOSSES[loss]
    xs, ys = zoo.ragged(m=M, d=d, low=3, high=7, regression=not made.binary)
    one, two = mj.pack_tasks(xs, ys, loss_scaling="task_mean"), mj.pack_tasks(xs, ys, loss_scaling="task_mean", rows=3)
    assert one.y.shape[1] < d
    assert two.num_nodes > M
    a, b = (mj.solve(mj.Problem(data, made, REGULARIZERS[regularizer]), mj.Newton(), tol=1e-12) for data in (one, two))
    assert a.status == b.status == mj.Status.CONVERGED
    assert a.rounds in (b.rounds - 1, b.rounds, b.rounds + 1)
    np.testing.assert_allclose(a.weights, b.weights, atol=1e-6)


@pytest.mark.extended
def test_losses_that_all_but_vanish_leave_duals_that_are_more_than_rounding():
    """Fewer samples than features and a weak regularizer: residuals are a millionth of the labels."""
    xs, ys = zoo.ragged(m=M, d=20, low=5, high=10, regression=True, dtype=np.float32)
    data, exact = (mj.pack_tasks(xs, ys, loss_scaling="task_mean", dtype=dtype) for dtype in (np.float32, np.float64))
    p = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(np.float32(1e-6)))
    state, history = mj.run(p, mj.Newton(), jax.random.key(0), num_rounds=1)
    assert history.relative_gap[-1] < 1e-5
    residuals = np.abs(data.y - data.predictions(state.w))
    assert np.max(np.where(data.weight > 0, residuals, 0.0)) < 1e-4
    best = mj.solve(mj.Problem(exact, p.loss, mj.regularizers.Independent(1e-6)), tol=1e-12)
    real = np.asarray(data.weight > 0)
    np.testing.assert_allclose(state.beta[real], best.state.beta[real], rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize(("wrong", "message"), [
    (lambda: mj.Problem(zoo.data(), mj.losses.Hinge(), mj.regularizers.Independent(0.1)), "Hinge has no second derivative"),
    (lambda: mj.Problem(zoo.data(), mj.losses.Logistic(), mj.regularizers.Probabilistic(0.1)), "learns the relationship"),
])  # fmt: skip
def test_what_it_is_not_for_is_said(wrong, message):
    with pytest.raises(ValueError, match=message):
        mj.solve(wrong(), mj.Newton())


def test_a_state_of_other_data_is_refused():
    p = problem(mj.losses.Logistic())
    with pytest.raises(ValueError, match="belongs to another algorithm"):
        mj.solve(p, mj.Newton(), state=mj.Mocha().init(p))


@pytest.mark.extended
def test_a_round_without_answers_changes_nothing():
    data = mj.datasets.federation(jax.random.key(0), 5, 4).data
    problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.MeanRegularized(1e-3, 1e-4))
    algorithm = mj.Newton()
    step = jax.jit(lambda state, work: algorithm.step(jax.random.key(0), state, problem, work)[0])
    nodes = jnp.ones(data.num_nodes, bool)
    state = algorithm.init(problem)
    for _ in range(2):
        state = step(state, Work(data.sizes, nodes))
    silent = step(state, Work(jnp.zeros_like(data.sizes), ~nodes))
    assert int(silent.round) == int(state.round) + 1
    for old, new in zip(jax.tree.leaves(state.replace(round=0)), jax.tree.leaves(silent.replace(round=0)), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-12, atol=1e-14)
