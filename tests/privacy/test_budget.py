"""Budgets: the accountant's numbers, runs that stop at them, whatever happens on the way."""

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

import mocha_jax as mj
from tests.federated import world
from tests.personalized import problems

SGD = optax.sgd(0.1)
DELTA = 1e-3
MODEL = mj.networks.MLP(world.D, 3)


def private(algorithm, problem, rounds=3, **options):
    return mj.privacy.with_budget(algorithm, problem, epsilon=2.0, delta=DELTA, rounds=rounds, **options)


def test_epsilon_of_a_gaussian_mechanism_is_that_of_its_closed_form():
    # Balle and Wang 2018, theorem 8: delta of one Gaussian mechanism with noise z at epsilon.
    stats = pytest.importorskip("scipy.stats")
    for steps, noise in ((1, 4.0), (20, 5.0)):
        epsilon = mj.privacy.epsilon(noise, 50, None, steps, delta=DELTA, accountant="pld")
        z = noise / math.sqrt(steps)
        delta = stats.norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * stats.norm.cdf(-0.5 / z - epsilon * z)
        assert delta == pytest.approx(DELTA, rel=1e-2)
        assert mj.privacy.epsilon(noise, 50, None, steps, delta=DELTA) > epsilon


def test_epsilon_of_samples_is_above_that_of_the_divergences():
    # RDP of the Poisson-sampled Gaussian mechanism at an integer order (Mironov et al. 2019), summed here.
    share, noise, steps = 0.1, 1.5, 40
    best = math.inf
    for order in range(2, 32):
        terms = [math.comb(order, k) * (1 - share) ** (order - k) * share**k * math.exp(k * (k - 1) / (2 * noise**2))
                 for k in range(order + 1)]  # fmt: skip
        rdp = steps * math.log(math.fsum(terms)) / (order - 1)
        best = min(best, rdp + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1))
    found = mj.privacy.epsilon(noise, 1000, 100, steps, delta=DELTA)
    assert found == pytest.approx(best, rel=2e-2)
    assert found <= best + 1e-9


def test_noise_is_the_least_that_keeps_the_budget():
    problem = problems.make_problem()
    algorithm = private(mj.FedAvg(problems.MODEL, SGD, batch_size=3, local_epochs=2), problem)
    sizes = np.asarray(problem.data.sizes)
    steps = 3 * 2 * -(-sizes // 3)
    np.testing.assert_array_equal(algorithm.privacy.steps, steps)
    for n, t, z in zip(sizes, steps, algorithm.privacy.noise, strict=True):
        assert mj.privacy.noise(2.0, int(n), 3, int(t), delta=DELTA) == float(z)
        assert 1.98 < mj.privacy.epsilon(float(z), int(n), 3, int(t), delta=DELTA) <= 2.0


@pytest.mark.extended
def test_clients_may_have_budgets_of_their_own():
    problem = problems.make_problem()
    algorithm = mj.FedAvg(problems.MODEL, SGD, batch_size=3)
    budgets = np.array([1.0, 2.0, 4.0, 8.0])
    own = mj.privacy.with_budget(algorithm, problem, epsilon=budgets, delta=DELTA, rounds=3)
    state, _ = mj.run(problem, own, jax.random.key(0), num_rounds=3)
    used = mj.privacy.spent(own, problem, state, delta=DELTA)
    assert (used <= budgets).all()
    assert (used > 0.98 * budgets).all()


@pytest.mark.parametrize(
    "name", ["mr_mtl", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fedrep", "fine_tuned", "ifca"))]
)
@pytest.mark.extended
def test_a_run_goes_no_further_than_its_budget(name, key, tmp_path):
    problem = problems.make_problem()
    plain = getattr(mj.personalized, name)(problems.MODEL, SGD, batch_size=3)
    algorithm = private(plain, problem)
    limit = np.asarray(algorithm.privacy.steps) - np.asarray(algorithm.tuning_steps(problem.data))
    options = {"key": key, "tol": None, "checkpoint": tmp_path / "run"}
    some = mj.solve(problem, algorithm, max_rounds=2, **options).state
    assert (np.asarray(some.spent.steps) < limit).all()
    solution = mj.solve(problem, algorithm, max_rounds=6, **options)
    end = solution.state
    np.testing.assert_array_equal(end.spent.steps, limit)
    assert solution.history.exhausted.tolist() == [0, 0, 4, 4, 4, 4]
    assert solution.history.steps.tolist()[3:] == [0, 0, 0]
    assert "4 client(s) have spent their budget of privacy" in solution.message
    used = mj.privacy.spent(algorithm, problem, end, delta=DELTA)
    assert (used <= 2.0).all()
    assert (used > 1.98).all()
    # Nothing that was trained on samples changes any more.
    later, _ = mj.run(problem, algorithm, jax.random.key(9), num_rounds=2, state=end)
    before, after = (jax.tree.leaves((s.own, s.rows, s.shared)) for s in (end, later))
    if name != "fedrep":
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("name", "spends"), [("mr_mtl", False), ("fine_tuned", True), ("ifca", True)])
def test_making_clients_ready_is_spent_whether_or_not_they_took_part(name, spends):
    problem = problems.make_problem()
    algorithm = private(getattr(mj.personalized, name)(problems.MODEL, SGD, batch_size=3), problem)
    used = mj.privacy.spent(algorithm, problem, algorithm.init(problem), delta=DELTA)
    assert ((used > 0) == spends).all()


@pytest.mark.extended
def test_work_that_is_not_done_is_not_spent(key):
    problem = problems.make_problem()
    algorithm = private(mj.FedAvg(problems.MODEL, SGD, batch_size=3, local_epochs=2), problem, rounds=8)
    systems = mj.systems.Dropout(0.4) & mj.systems.PartialEpochs(0.2, 0.9)
    state, history = mj.run(problem, algorithm, key, num_rounds=4, systems=systems, watch=mj.Watch())
    np.testing.assert_array_equal(state.spent.steps, np.asarray(history.nodes.steps).sum(axis=0))
    full = 4 * np.asarray(algorithm.full_work(problem))
    assert (np.asarray(state.spent.steps) < full).all()


@pytest.mark.parametrize("kind", ["networks", "linear"])
def test_more_noise_later_does_not_make_earlier_steps_more_private(kind, key):
    if kind == "networks":
        problem: Any = problems.make_problem()
        algorithm: Any = mj.FedAvg(problems.MODEL, SGD, batch_size=3)
        fewer: dict[str, Any] = {"batch_size": 1}
    else:
        data = mj.datasets.federation(key, 4, 3, smallest=20, largest=30).data
        problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(1.0))
        algorithm, fewer = mj.privacy.PrivateSdca(share=0.3), {"share": 0.1}

    def after(algorithm, rounds, state=None):
        state, _ = mj.run(problem, algorithm, key, num_rounds=rounds, record_every=rounds, state=state)
        return state

    def used(algorithm, state):
        return mj.privacy.spent(algorithm, problem, state, delta=DELTA)

    little = algorithm.replace(privacy=mj.privacy.ExampleLevel(1.0, 1000))
    much = algorithm.replace(privacy=mj.privacy.ExampleLevel(50.0, 1000), **fewer)
    early = after(little, 2)
    assert (used(much, after(much, 1, early)) >= used(little, early)).all()
    assert (used(much, after(much, 3)) < used(little, early)).all()
    np.testing.assert_allclose(used(much, early), used(little, early), rtol=1e-6)


@pytest.mark.extended
def test_new_clients_spend_their_own_budget(key):
    problem = problems.make_problem()
    algorithm = private(mj.personalized.ditto(problems.MODEL, SGD, batch_size=3), problem)
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    new = algorithm.join(state, problem, key, rounds=9)
    np.testing.assert_array_equal(new.spent.steps, algorithm.privacy.steps)


def deployment(rounds=2):
    xs, ys = world.labels()
    problem = world.prediction_of(xs, ys)
    algorithm = private(mj.personalized.mr_mtl(MODEL, SGD, batch_size=4), problem, rounds=rounds)
    server = world.server_of(algorithm, None, scaling="sum")
    return algorithm, problem, server, nodes_of(algorithm, xs, ys)


def nodes_of(algorithm, xs, ys):
    return [
        world.nodes_of([x], [y], mj.likelihoods.Categorical(), algorithm.replace(privacy=algorithm.privacy.client(k)),
                       rows=max(map(len, xs)), scaling="sum")[0]
        for k, (x, y) in enumerate(zip(xs, ys, strict=True))
    ]  # fmt: skip


def test_a_node_takes_no_numbers_among_which_a_server_could_choose():
    xs, ys = world.labels()
    algorithm = deployment()[0]
    with pytest.raises(ValueError, match="of this node alone"):
        mj.federated.Node(xs[0], ys[0], mj.likelihoods.Categorical(), algorithm)
    with pytest.raises(ValueError, match="there is no client 9"):
        algorithm.privacy.client(9)


def test_a_private_node_is_not_tuned_in_passing(key):
    xs, ys = world.labels()
    algorithm = mj.personalized.fine_tuned(MODEL, SGD).replace(privacy=mj.privacy.ExampleLevel(1.0, 9))
    server, node = world.server_of(algorithm, None, scaling="sum"), nodes_of(algorithm, xs, ys)[0]
    with pytest.raises(ValueError, match="spend at every call"):
        node.weights(node.init(), server.down(server.init(), 0))


def test_a_line_search_is_refused(key):
    algorithm = mj.FedAvg(problems.MODEL, optax.lbfgs(), privacy=mj.privacy.ExampleLevel(1.0, 9))
    with pytest.raises(TypeError, match="value"):
        mj.run(problems.make_problem(), algorithm, key, num_rounds=1)


def test_a_node_goes_no_further_than_its_budget_whether_or_not_it_is_heard(key, tmp_path):
    algorithm, problem, server, nodes = deployment()
    limit = np.asarray(algorithm.privacy.steps)
    # The first answers of node 1 are lost: they have been sent all the same.
    there, mine, _ = world.deployed(server, nodes, key, 4, [[-1] * world.M] * 4, [{1}, {1}, set(), set()])
    assert [int(state.spent.steps[0]) for state in mine] == limit.tolist()
    mj.federated.save(tmp_path / "node", mine[1])
    again = mj.federated.load(tmp_path / "node", nodes[1].init())
    assert int(again.spent.steps[0]) == limit[1]
    _, up = nodes[1].step(key, again, server.down(there, 1))
    assert float(up.arrays["weight"]) == 0
    assert not up.arrays["loss"]


def test_a_node_draws_noise_that_its_key_does_not_tell(key):
    _, _, server, nodes = deployment()
    there = server.init()
    answers = [nodes[0].step(key, nodes[0].init(), server.down(there, 0))[1].arrays for _ in range(2)]
    name = next(n for n in answers[0] if n.startswith("total"))
    assert np.abs(np.asarray(answers[0][name]) - answers[1][name]).max() > 1e-3


def test_messages_say_nothing_of_losses(key):
    _, _, server, nodes = deployment()
    there, mine = server.init(), [node.init() for node in nodes]
    ups = {k: node.step(key, mine[k], server.down(there, k))[1] for k, node in enumerate(nodes)}
    after, report = server.step(there, ups)
    assert all(not np.any(up.arrays["loss"]) for up in ups.values())
    assert report.accepted == tuple(range(world.M))
    assert math.isnan(report.quality.loss)


def test_without_the_accountant_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    from mocha_jax.privacy import _budget

    _budget.epsilon_of.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'mocha_jax\[privacy\]'"):
        mj.privacy.epsilon(1.0, 10, 5, 3, delta=1e-3)
