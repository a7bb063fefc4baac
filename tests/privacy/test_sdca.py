"""Private dual ascent: a round by hand, sensitivity, noise, draws, budgets, an attack, and its messages."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests.federated import world
from tests.privacy.test_audit import bound_by

R = mj.regularizers
DELTA = 1e-3
MEAN = R.MeanRegularized(0.3, 0.1)
PrivateSdca, ExampleLevel = mj.privacy.PrivateSdca, mj.privacy.ExampleLevel


def made(loss=None, regularizer=MEAN, sizes=(30, 24, 40), d=3, seed=0, scaling="task_mean"):
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(n, d)) for n in sizes]
    ys = [np.sign(x[:, 0] + 0.3 * rng.normal(size=len(x))) for x in xs]
    return mj.Problem(mj.pack_tasks(xs, ys, loss_scaling=scaling), loss or mj.losses.Squared(), regularizer)


def solve(problem, algorithm, rounds, **options):
    return mj.solve(problem, algorithm, tol=None, max_rounds=rounds, **options)


@pytest.mark.parametrize("scaling", ["task_mean", "sum"])
def test_a_round_is_that_of_the_equation(scaling, key):
    problem = made(scaling=scaling, sizes=(30, 24, 24))
    clip, caution, m = 0.05, 0.5, 3
    algorithm = PrivateSdca(ExampleLevel(0.0, 100, clip), share=1.0, caution=caution)
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)

    # Of (11): R(W) = lam1 sum |w_t - mean|^2 + lam2 |mean|^2 m, whose inverse curvature mixes the mean and the rest.
    basis = np.ones((m, m)) / m
    apart, common = np.array([1.0, -1.0, 0.0])[:, None], np.ones((m, 1))
    within, mean = (0.5 * (w**2).sum() / float(MEAN.value(jnp.asarray(w))) for w in (apart, common))
    inverse = within * (np.eye(m) - basis) + mean * basis
    stiff = np.abs(inverse).sum(axis=1)
    data = problem.data
    x, y, c = (np.asarray(a, np.float64) for a in (data.x, data.y, data.weight))
    alpha, v, w = np.zeros_like(y), np.zeros((m, 3)), np.zeros((m, 3))
    for _ in range(3):
        lengths = np.linalg.norm(x, axis=2)
        kappa = caution * (c.max(axis=1) * stiff * np.asarray(data.sizes))[:, None] * lengths**2
        step = (y - np.einsum("mnd,md->mn", x, w) - alpha) / (1.0 + kappa)
        limit = clip / np.where(lengths > 0, lengths, 1.0)
        step = np.where(c > 0, np.clip(step, -limit, limit), 0.0)
        alpha, v = alpha + step, v + np.einsum("mn,mnd->md", c * step, x)
        w = inverse @ v
    np.testing.assert_allclose(state.w, w, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state.nodes.beta, alpha, rtol=1e-9, atol=1e-12)
    assert float(np.abs(alpha).max()) > clip  # it was cut, and went on


@pytest.mark.parametrize(
    ("loss", "regularizer"),
    [
        (mj.losses.Hinge(), MEAN),
        pytest.param(mj.losses.Logistic(), R.Independent(0.1), marks=pytest.mark.slow),
        pytest.param(mj.losses.Huber(), MEAN, marks=pytest.mark.slow),
        pytest.param(mj.losses.Logistic(), R.MeanCovariance(0.1, 0.03), marks=pytest.mark.slow),
    ],
    ids=["hinge", "logistic", "huber", "learned"],
)
def test_without_noise_or_limit_it_ends_near_the_optimum(loss, regularizer, key):
    problem = made(loss, regularizer)
    algorithm = PrivateSdca(share=0.5, caution=0.5, omega_every=1)
    solution = solve(problem, algorithm, 300, key=key, record_every=100)
    best = mj.solve(problem, tol=1e-6)
    assert float(solution.relative_gap) < 0.02
    assert float(jnp.linalg.norm(solution.weights - best.weights)) < 0.1 * float(jnp.linalg.norm(best.weights))


@pytest.mark.parametrize("pairs", [60, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_sample_moves_no_sum_by_more_than_is_claimed(pairs, key):
    """Whatever was published before, and whatever the sample is: the theorem's second step, round by round."""
    clip, rounds, n, d = 0.7, 4, 12, 3
    padded = mj.pack_tasks([np.zeros((n, d))], [np.ones(n)])
    losses = [mj.losses.Logistic(), mj.losses.Hinge(), mj.losses.Squared(), mj.losses.SmoothedHinge(0.3)][: pairs // 30]

    def sums(loss, x, y, w, key):
        problem = mj.Problem(padded.replace(x=x[None], y=y[None]), loss, R.Independent(0.1))
        algorithm = PrivateSdca(ExampleLevel(0.0, 100, clip), share=0.5)
        nodes, told = algorithm.init(problem).nodes, []
        for t in range(rounds):
            one, steps = jnp.ones((1,)), algorithm.full_work(problem)
            nodes, _ = algorithm.published(
                jax.random.fold_in(key, t), nodes, jnp.zeros((1,), jnp.int32), problem, w[t][None], one, steps
            )
            told.append(nodes.told[0])
        return jnp.diff(jnp.stack([jnp.zeros(d), *told]), axis=0)

    moved = []
    for loss in losses:
        both = jax.jit(lambda *a, loss=loss: sums(loss, *a))
        for pair in range(pairs // len(losses)):
            rng = np.random.default_rng([pair, losses.index(loss)])
            x, w = rng.normal(size=(n, d)) * rng.choice([0.1, 1.0, 30.0]), rng.normal(size=(rounds, d))
            # The number of samples is public: in place of the sample there is one that says nothing.
            y, without = rng.choice([-1.0, 1.0], n), x.copy()
            without[rng.integers(n)] = 0.0
            k = jax.random.fold_in(key, pair)
            change = both(x, y, w, k) - both(without, y, w, k)
            moved.append(np.linalg.norm(change, axis=1).max())
    assert max(moved) <= clip * (1 + 1e-9)
    assert max(moved) > 0.99 * clip


def test_noise_has_its_size_and_is_new_for_every_node_and_round(key):
    clip, sizes = 0.5, (20, 10)
    problem = made(sizes=sizes, d=200)
    problem = problem.replace(data=problem.data.replace(x=0.0 * problem.data.x))
    noise = np.array([2.0, 3.0])

    def told(key, rounds):
        algorithm = PrivateSdca(ExampleLevel(noise, 100, clip))
        return mj.run(problem, algorithm, key, num_rounds=rounds)[0].nodes.told

    after = [np.asarray(told(k, r)) for k in jax.random.split(key) for r in (1, 2)]
    first, second = after[0], after[1] - after[0]
    for drawn in (first, second, after[2]):
        np.testing.assert_allclose(drawn.std(axis=1), noise * clip / np.array(sizes), rtol=0.2)
    pairs = np.corrcoef(np.concatenate([first, second, after[2]]))
    assert np.abs(pairs - np.eye(6)).max() < 0.3
    assert (told(key, 1) == told(key, 1)).all()


def test_every_sample_is_drawn_by_itself_with_the_same_chance(key):
    n, share, draws = 40, 0.3, 400
    problem = made(sizes=(n, 25))
    algorithm = PrivateSdca(share=share)
    full = algorithm.full_work(problem)
    np.testing.assert_array_equal(full, [12, 8])

    def changed(key, steps):
        nodes = algorithm.init(problem).nodes
        w, one = jnp.ones((2, 3)), jnp.ones((2,))
        after, count = algorithm.published(key, nodes, jnp.arange(2, dtype=jnp.int32), problem, w, one, steps)
        return after.beta != 0, count

    keys = jax.random.split(key, draws)
    drawn, count = jax.vmap(lambda k: changed(k, full))(keys)
    drawn = np.asarray(drawn[:, 0], float)
    np.testing.assert_array_equal(drawn.sum(axis=1), count[:, 0])
    assert np.abs(drawn.mean(axis=0) - share).max() < 4.5 * np.sqrt(share * (1 - share) / draws)
    assert abs(drawn.mean() - share) < 4 * np.sqrt(share * (1 - share) / draws / n)
    assert abs(np.asarray(count[:, 0]).var() / (n * share * (1 - share)) - 1) < 0.3
    # Half of the work is half of the chance; none is silence.
    fewer, _ = jax.vmap(lambda k: changed(k, jnp.array([6, 0], jnp.int32)))(keys)
    assert abs(np.asarray(fewer[:, 0], float).mean() - 0.5 * share) < 0.02
    assert not fewer[:, 1].any()


def budgeted(problem, rounds=4, **options):
    return mj.privacy.with_budget(
        PrivateSdca(share=0.25), problem, epsilon=3.0, delta=DELTA, rounds=rounds, clip=0.1, **options
    )


def test_a_run_goes_no_further_than_its_budget(key, tmp_path):
    problem = made(sizes=(30, 24, 40))
    algorithm = budgeted(problem)
    share_alone = mj.privacy.epsilon(float(algorithm.privacy.noise[0]), 400, 100, 4, delta=DELTA)
    dropped = mj.systems.Trace(np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]]) > 0)
    states = [solve(problem, algorithm, r, key=key, systems=dropped).state for r in (2, 3, 4, 9)]
    np.testing.assert_array_equal([s.nodes.spent.steps for s in states], [[2, 1, 2], [3, 2, 3], [4, 3, 4], [4, 4, 4]])
    used = [mj.privacy.spent(algorithm, problem, s, delta=DELTA) for s in states]
    assert 2.99 < used[-1].max() <= 3.0
    assert used[0].max() < used[1].max() < 3.0
    assert used[0][1] < used[0][0]
    assert share_alone == pytest.approx(used[-1].max(), rel=1e-3)
    # A run that is resumed does not begin anew, from its state or from its file.
    again = solve(problem, algorithm, 5, key=key, state=states[-1]).state
    np.testing.assert_array_equal(again.nodes.told, states[-1].nodes.told)
    path = tmp_path / "run.npz"
    for _ in range(2):
        end = solve(problem, algorithm, 9, key=key, systems=dropped, checkpoint=path, chunk=3).state
        np.testing.assert_array_equal(end.nodes.told, states[-1].nodes.told)


def test_what_the_theorem_does_not_cover_is_refused(key):
    problem = made()
    uneven = problem.replace(data=problem.data.replace(weight=problem.data.weight.at[1, 0].multiply(2.0)))
    with pytest.raises(ValueError, match="client 1 have different weights"):
        solve(uneven, budgeted(problem), 1)

    class Shifted(mj.losses.Squared):
        def project(self, beta, y):
            return jnp.maximum(beta, 1.0)

    with pytest.raises(ValueError, match="duals of 0 are not feasible for Shifted"):
        solve(problem.replace(loss=Shifted()), budgeted(problem), 1)
    with pytest.raises(ValueError, match="with_budget: problem must be a Problem"):
        budgeted(mj.Prediction(problem.data.replace(y=0.0 * problem.data.y)))
    with pytest.raises(ValueError, match="spent: state must be a PrivateSdcaState"):
        mj.privacy.spent(budgeted(problem), problem, mj.Mocha().init(problem), delta=DELTA)
    with pytest.raises(ValueError, match="belongs to other data"):
        PrivateSdca().resume(PrivateSdca().init(problem), made(sizes=(30, 24, 45)))


def scores(noise, with_sample, trials, key):
    """How far the sums of a node, whose other samples say nothing, went in the direction of one sample."""
    n, rounds, share = 12, 3, 0.5
    x, y = np.zeros((n, 1)), np.zeros(n)
    if with_sample:
        x[0], y[0] = 1.0, 1e6
    problem = mj.Problem(mj.pack_tasks([x], [y], dtype=np.float64), mj.losses.Squared(), R.Independent(1.0))
    algorithm = PrivateSdca(ExampleLevel(noise, 10**6), share=share)
    run = jax.jit(jax.vmap(lambda k: mj.run(problem, algorithm, k, num_rounds=rounds)[0].nodes.told[0, 0]))
    return np.asarray(run(jax.random.split(key, trials)))


@pytest.mark.parametrize(
    "trials", [pytest.param(20_000, marks=pytest.mark.extended), pytest.param(200_000, marks=pytest.mark.slow)]
)
def test_an_attack_finds_no_more_than_is_claimed(trials, key):
    claimed = mj.privacy.epsilon(1.2, 1000, 500, 3, delta=1e-2, accountant="pld")
    honest, weak = (
        bound_by([scores(z, w, trials, k) for w, k in zip((False, True), jax.random.split(key), strict=True)])
        for z in (1.2, 0.6)
    )
    assert 0.5 * claimed < honest <= claimed < weak


# Messages


def deployment(noise=0.0, steps=100, regularizer=MEAN, share=1.0):
    xs, ys = world.tables()
    level = ExampleLevel(np.full(world.M, noise, np.float32), np.full(world.M, steps), 0.1)
    algorithm = PrivateSdca(level, share=share)
    problem = world.problem_of(xs, ys, mj.losses.Logistic(), regularizer)
    alone = [algorithm.replace(privacy=level.client(k)) for k in range(world.M)]
    nodes = [
        world.nodes_of([x], [y], mj.losses.Logistic(), own, rows=max(map(len, xs)))[0]
        for x, y, own in zip(xs, ys, alone, strict=True)
    ]
    return algorithm, problem, world.server_of(algorithm, regularizer), nodes


def asking(down, **arrays):
    header = down.federation, down.task, down.round, down.incarnation, down.held, down.kind
    return mj.federated.Down(*header, {**down.arrays, **arrays})


def test_without_noise_messages_are_the_simulation(key):
    algorithm, problem, server, nodes = deployment(regularizer=R.MeanCovariance(0.1, 0.03))
    there, mine, _ = world.deployed(server, nodes, key, 12)
    state, _ = mj.run(problem, algorithm, key, num_rounds=12)
    np.testing.assert_allclose(server.weights(there), state.w, rtol=1e-9, atol=1e-12)
    omega = problem.relationship(world.M, algorithm.relation(state, problem))
    np.testing.assert_allclose(server.omega(there), omega, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.stack([s.nodes.beta[0] for s in mine]), state.nodes.beta, rtol=1e-9, atol=1e-12)


def test_an_answer_makes_up_for_those_that_were_lost(key):
    algorithm, _, server, nodes = deployment(noise=1.0, steps=3)
    plan = [[-1] * world.M] * 5
    there, mine, _ = world.deployed(server, nodes, key, 5, plan, [{1}, {1, 2}, set(), set(), set()])
    told = np.stack([s.nodes.told[0] for s in mine])
    np.testing.assert_array_equal(there.inner.told, told)
    # What was sent was spent, and then a node is silent.
    assert [int(s.nodes.spent.steps[0]) for s in mine] == [3] * world.M
    _, up = nodes[1].step(key, mine[1], server.down(there, 1))
    np.testing.assert_array_equal(up.arrays["told"], told[1])
    assert set(up.arrays) == {"told", "samples"}


def test_a_node_draws_noise_that_its_key_does_not_tell(key):
    _, _, server, nodes = deployment(noise=1.0)
    down = server.down(server.init(), 0)
    answers = [nodes[0].step(key, nodes[0].init(), down)[1].arrays["told"] for _ in range(2)]
    assert np.abs(answers[0] - answers[1]).min() > 0


def test_a_node_answers_weights_that_overflow(key):
    _, _, server, nodes = deployment()
    down = server.down(server.init(), 0)
    huge = np.sign(np.arange(world.D) - 1.5) * np.finfo(np.float64).max
    state, up = nodes[0].step(key, nodes[0].init(), asking(down, model=huge))
    assert np.isfinite(up.arrays["told"]).all()
    assert int(state.nodes.spent.steps[0]) == 1


def test_a_node_takes_its_own_privacy_and_no_other():
    algorithm = deployment()[0]
    node = partial(mj.federated.Node, np.ones((3, 2)), np.ones(3), mj.losses.Hinge())
    with pytest.raises(ValueError, match="of this node alone"):
        node(algorithm)
    with pytest.raises(ValueError, match="needs privacy"):
        node(PrivateSdca())


def test_a_server_that_asks_for_a_negative_curvature_is_refused(key):
    _, _, server, nodes = deployment()
    down = server.down(server.init(), 0)
    with pytest.raises(mj.federated.Refused, match="curvature"):
        nodes[0].step(key, nodes[0].init(), asking(down, curvature=-down.arrays["curvature"]))
