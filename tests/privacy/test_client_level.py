"""Privacy of whole clients: the round by its equation, noise of its size, clients by chance, no round past the last."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax._neural.method import ServerParts
from mocha_jax._neural.private_clients import ByCoin, with_secret
from mocha_jax._neural.training_state import Heard, Sent
from tests.federated import world
from tests.personalized import problems

SGD, DELTA, M = optax.sgd(1.0), 1e-3, problems.K
SLOW, EXTENDED = [pytest.mark.slow], [pytest.mark.extended]


def level(noise=0.0, rounds=100, clip=1.0):
    return mj.privacy.ClientLevel(noise, rounds, clip)


def private(algorithm=None, **settings):
    algorithm = mj.FedAvg(problems.MODEL, SGD, batch_size=None) if algorithm is None else algorithm
    return mj.privacy.private_clients(algorithm, level(**settings))


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(
    ("fraction", "scaling"), [(1.0, "task_mean"), pytest.param(0.5, "sum", marks=pytest.mark.extended)]
)
def test_a_round_is_that_of_the_equation(fraction, scaling, key):
    problem, oracle, clip = problems.make_problem(scaling), problems.Oracle(), 0.35
    algorithm = private(mj.FedAvg(problems.MODEL, SGD, batch_size=None, fraction=fraction), clip=clip)
    begin = algorithm.weights(algorithm.init(problem))
    state, history = mj.run(problem, algorithm, key, num_rounds=1, watch=mj.Watch())
    changes = [flat(oracle.grad(k, begin)) for k in range(M)]
    lengths = np.array([np.linalg.norm(u) for u in changes])
    assert lengths.min() < clip < lengths.max()
    asked = np.asarray(history.nodes.steps[0]) > 0
    assert asked.all() if fraction == 1 else 0 < asked.sum() < M
    total = sum(u * min(1.0, clip / n) for u, n, a in zip(changes, lengths, asked, strict=True) if a)
    np.testing.assert_allclose(flat(algorithm.weights(state)), flat(begin) - total / (fraction * M), rtol=1e-10)
    assert np.isnan(state.loss)


KIN = {
    "ditto": {}, "mr_mtl": {}, "fine_tuned": {}, "scaffold": {}, "feddyn": {}, "fedper": {}, "fedrep": {},
    "fedbn": {"private": ("head",)},
    "lg_fedavg": {}, "pfedme": {}, "per_fedavg": {}, "apfl": {}, "fedem": {},
}  # fmt: skip
TIERS = {"scaffold": EXTENDED}


@pytest.mark.parametrize("name", [pytest.param(name, marks=TIERS.get(name, SLOW)) for name in KIN])
def test_without_noise_or_clipping_it_is_the_method_on_clients_that_count_the_same(name, key):
    problem = problems.make_problem("task_mean")
    plain = getattr(mj.personalized, name)(problems.MODEL, optax.sgd(0.1), batch_size=3, **KIN[name])
    both = [mj.run(problem, a, key, num_rounds=3)[0] for a in (plain, private(plain, clip=1e9))]
    models = [(s.shared.model if hasattr(s.shared, "clip") else s.shared, s.own) for s in both]
    for a, b in zip(*map(jax.tree.leaves, models), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    for a, b in zip(*(jax.tree.leaves(a.weights(s)) for a, s in zip((plain, private(plain)), both, strict=True)), strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["ifca", "fedu", "fedamp", "q_ffl", "afl"])
def test_methods_whose_server_hears_more_than_a_sum_are_refused(name, key):
    needs = {"fedu": {"graph": np.ones((M, M)) - np.eye(M)}}.get(name, {})
    algorithm = private(getattr(mj.personalized, name)(problems.MODEL, SGD, **needs))
    with pytest.raises(ValueError, match="hears more than a sum"):
        mj.run(problems.make_problem(), algorithm, key, num_rounds=1)


def test_its_answers_are_neither_compressed_nor_combined_by_a_rule():
    for change in (
        lambda a: mj.compression.compressed(a, mj.compression.TopK(0.1)),
        lambda a: mj.robust.combined(a, mj.robust.Median()),
    ):
        with pytest.raises(ValueError, match="privacy of clients rests on the sum"):
            change(private())
    with pytest.raises(ValueError, match="private already"):
        private(private())


def noises(key, algorithm, draws=150, rounds=2):
    """The changes of the model in rounds without any change of a client, ``[draws, rounds, p]``."""
    problem = problems.make_problem()

    def models(key):
        def model(state):
            return jnp.concatenate([jnp.ravel(a) for a in jax.tree.leaves(algorithm.weights(state))])

        def change(state, _):
            after, _ = mj.run(problem, algorithm, key, num_rounds=1, state=state)
            return after, model(after) - model(state)

        return jax.lax.scan(change, algorithm.init(problem), length=rounds)[1]

    return np.asarray(jax.jit(jax.vmap(models))(jax.random.split(key, draws)))


@pytest.mark.parametrize(
    ("clip", "fraction", "factor"),
    [(0.3, 1e-9, 1.0), pytest.param(mj.privacy.QuantileClip(first=0.3, rate=0.0), 0.5, 2 / 3**0.5, marks=EXTENDED)],
)
def test_noise_has_its_size_and_is_new_in_every_round(clip, fraction, factor, key):
    nothing = mj.FedAvg(problems.MODEL, optax.sgd(0.0), batch_size=None, fraction=fraction)
    found = noises(key, private(nothing, noise=2.0, clip=clip)) / (2.0 * 0.3 / (fraction * M)) / factor
    assert abs(found.mean()) < 4 / np.sqrt(found.size)
    assert abs(found.var() - 1) < 4 * np.sqrt(2 / found.size)
    together = np.corrcoef(found.reshape(len(found), -1).T)
    assert np.abs(together - np.eye(len(together))).max() < 4.7 / np.sqrt(len(found))


@pytest.mark.extended
def test_a_state_does_not_hold_the_key_of_noise_that_was_used(key):
    algorithm, problem = private(noise=1.0), problems.make_problem()
    before = with_secret(algorithm.init(problem), jnp.array([3, 4], jnp.uint32))
    like = algorithm.answer_like(ServerParts(before.shared, before.rows))
    zero = jnp.zeros(())
    heard = Heard(jax.tree.map(jnp.zeros_like, like.total), zero, zero, jnp.int32(0))
    after = algorithm.heard(before, heard, Sent((), jnp.zeros(M, bool)), jnp.ones(M))

    def first_noise(state):
        shape = before.shared.model["body"].shape
        return jax.random.normal(jax.random.fold_in(algorithm.secret(state), 1), shape) / M

    change = before.shared.model["body"] - after.shared.model["body"]
    np.testing.assert_allclose(change, first_noise(before), rtol=1e-9)
    assert np.abs(change - first_noise(after)).max() > 0.01


def test_every_client_takes_part_by_itself_with_the_same_chance(key):
    data, share, draws = problems.make_problem().data, 0.3, 20_000
    request = mj.FedAvg(problems.MODEL, SGD).request(problems.make_problem())
    later = request.replace(round=request.round + 1)
    system = private(mj.FedAvg(problems.MODEL, SGD, fraction=share)).select_nodes(mj.systems.Full())
    work = jax.vmap(lambda key: jnp.stack([system.work(key, data, r).active for r in (request, later)], axis=-1))
    found = np.asarray(work(jax.random.split(key, draws)), float).reshape(draws, 2 * M)
    np.testing.assert_allclose(found.mean(axis=0), share, atol=4.5 * np.sqrt(share * (1 - share) / draws))
    together = np.cov(found.T) - np.diag(found.var(axis=0))
    assert np.abs(together).max() < 5 * share * (1 - share) / np.sqrt(draws)
    assert ByCoin(1.0).work(key, data, request).active.all()
    assert not ByCoin(0.0).work(key, data, request).active.any()


@pytest.mark.parametrize("pairs", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_client_moves_the_model_by_no_more_than_is_claimed(pairs, key):
    # Neighbours: with a client and without it, whatever its samples are.
    problem, clip = problems.make_problem(), 0.2
    data = problem.data
    algorithm = private(mj.FedAvg(problems.MODEL, optax.sgd(0.3), batch_size=3, local_epochs=2),
                        clip=mj.privacy.QuantileClip(first=clip, rate=1.0))  # fmt: skip

    def models(key):
        size, place, which = jax.random.split(key, 3)
        k = jax.random.randint(which, (), 0, M)
        scale = 10.0 ** jax.random.uniform(size, (), minval=-2.0, maxval=300.0)
        x = data.x.at[k].set(scale * jax.random.normal(place, data.x.shape[1:], data.dtype))
        one = mj.Prediction(data.replace(x=x))

        def end(gone):
            return mj.run(one, algorithm, key, num_rounds=1, systems=mj.systems.Dropout(gone))[0].shared

        ends = jax.vmap(end)(jnp.stack([jnp.zeros(M, bool), jnp.arange(M) == k]).astype(data.dtype))
        moved = jax.tree.map(lambda a: jnp.sum((a[0] - a[1]) ** 2), ends.model)
        return jnp.sqrt(sum(jax.tree.leaves(moved))), jnp.abs(jnp.log(ends.clip[0] / ends.clip[1]))

    moved, shares = map(np.asarray, jax.jit(jax.vmap(models))(jax.random.split(key, pairs)))
    assert np.isfinite(moved).all()
    assert moved.max() <= clip / M * (1 + 1e-9)
    assert moved.max() > 0.99 * clip / M
    assert shares.max() <= 0.5 / M * (1 + 1e-9)


@pytest.mark.extended
def test_the_length_follows_the_quantile(key):
    problem, oracle = problems.make_problem(), problems.Oracle()
    clip = mj.privacy.QuantileClip(share=0.5, first=5.0, rate=0.3, noise=1e-6)
    algorithm = private(mj.FedAvg(problems.MODEL, SGD, optax.sgd(0.0), batch_size=None), noise=0.0, clip=clip)
    begin = algorithm.weights(algorithm.init(problem))
    lengths = np.sort([np.linalg.norm(flat(oracle.grad(k, begin))) for k in range(M)])
    state, _ = mj.run(problem, algorithm, key, num_rounds=60)
    assert lengths[M // 2 - 1] * 0.8 < float(state.shared.clip) < lengths[M // 2] * 1.2
    one, _ = mj.run(problem, algorithm, key, num_rounds=1)
    np.testing.assert_allclose(one.shared.clip, 5.0 * np.exp(-0.3 * ((lengths <= 5.0).mean() - 0.5)), rtol=1e-5)


def budgeted(rounds=4):
    plain = mj.FedAvg(problems.MODEL, optax.sgd(0.1), optax.sgd(1.0, momentum=0.9), fraction=0.5)
    return mj.privacy.with_client_budget(plain, epsilon=3.0, delta=DELTA, rounds=rounds)


@pytest.mark.extended
def test_a_run_goes_no_further_than_its_rounds(key):
    problem, algorithm = problems.make_problem(), budgeted()
    states = [algorithm.init(problem)]
    for _ in range(3):
        states.append(mj.run(problem, algorithm, key, num_rounds=2, state=states[-1])[0])
    used = [mj.privacy.client_epsilon(algorithm, state, delta=DELTA) for state in states]
    assert used[0] == 0 < used[1] < 2.9 < 2.97 < used[2] == used[3] <= 3.0
    parts = [jax.tree.leaves((state.shared.model, state.kept.own)) for state in states]
    assert all((a != b).any() for a, b in zip(*parts[1:3], strict=True))
    for a, b in zip(*parts[2:], strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(algorithm.exhausted(states[1], problem)) == 0
    assert int(algorithm.exhausted(states[2], problem)) == M


@pytest.mark.extended
def test_neither_does_one_that_is_resumed(key, tmp_path):
    problem, algorithm = problems.make_problem(), budgeted()
    options = {"key": key, "tol": None, "checkpoint": tmp_path / "run"}
    mj.solve(problem, algorithm, max_rounds=3, **options)
    solution = mj.solve(problem, algorithm, max_rounds=7, **options)
    assert solution.history.exhausted.tolist() == [0, 0, 0, M, M, M, M]
    assert solution.history.steps.tolist()[4:] == [0, 0, 0]
    assert f"{M} client(s) have spent their budget of privacy" in solution.message
    assert 2.97 < mj.privacy.client_epsilon(algorithm, solution.state, delta=DELTA) <= 3.0
    # Who allows a state more rounds pays for all of them.
    more = algorithm.replace(level=algorithm.level.replace(rounds=8))
    end, _ = mj.run(problem, more, key, num_rounds=9, state=solution.state)
    assert mj.privacy.client_epsilon(more, end, delta=DELTA) > 3.2


@pytest.mark.parametrize(("accountant", "close"), [("pld", 1e-4), pytest.param("rdp", 0.05, marks=EXTENDED)])
@pytest.mark.extended
def test_epsilon_is_that_of_an_accountant(accountant, close, key):
    dp = pytest.importorskip("dp_accounting")
    problem = problems.make_problem()
    algorithm = private(mj.FedAvg(problems.MODEL, SGD, fraction=0.25), noise=1.3)
    state, _ = mj.run(problem, algorithm, key, num_rounds=5)
    of_run = {"rdp": dp.rdp.RdpAccountant, "pld": dp.pld.PLDAccountant}[accountant]()
    of_run.compose(dp.PoissonSampledDpEvent(0.25, dp.GaussianDpEvent(1.3)), 5)
    found = mj.privacy.client_epsilon(algorithm, state, delta=DELTA, accountant=accountant)
    assert of_run.get_epsilon(DELTA) * (1 - 1e-6) <= found <= of_run.get_epsilon(DELTA) * (1 + close)
    assert mj.privacy.client_epsilon(algorithm, algorithm.init(problem), delta=DELTA) == 0.0


@pytest.mark.extended
def test_noise_may_be_mapped_over(key):
    problem = problems.make_problem()

    def model(noise):
        return flat_of(mj.run(problem, private(noise=noise), key, num_rounds=2)[0].shared.model)

    def flat_of(tree):
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    found = jax.vmap(model)(jnp.array([0.0, 0.5]))
    np.testing.assert_allclose(found[1], model(0.5), rtol=1e-9)


def with_one(noise, present, trials, key, fraction, rounds):
    """The last models of runs in which one client alone has a change, ``[trials]``."""
    x, y = np.zeros((3, 1, 1)), np.zeros((3, 1))
    y[0] = 1e6 * present
    problem = mj.Prediction(mj.pack_tasks(list(x), list(y), dtype=np.float64), mj.likelihoods.Gaussian())
    linear = mj.networks.MLP(1, 1)
    zero = mj.networks.Model(lambda key: jax.tree.map(jnp.zeros_like, linear.init(key)), linear.apply)
    algorithm = private(mj.FedAvg(zero, optax.sgd(1.0), optax.sgd(1e-9), fraction=fraction), noise=noise)

    def trained(key):
        return algorithm.weights(mj.run(problem, algorithm, key, num_rounds=rounds)[0])[0].b[0]

    return 3e9 * fraction * np.asarray(jax.jit(jax.vmap(trained))(jax.random.split(key, trials)))


@pytest.mark.parametrize("trials", [pytest.param(20_000, marks=EXTENDED), pytest.param(200_000, marks=SLOW)])
def test_an_attack_finds_no_more_than_is_claimed(trials, key):
    from tests.privacy.test_audit import bound_by

    share, rounds, noise, delta = 0.3, 4, 1.2, 1e-2
    claimed = mj.privacy.epsilon(noise, 10, 3, rounds, delta=delta, accountant="pld")
    honest, weak = (
        bound_by([with_one(z, w, trials, k, share, rounds) for w, k in zip((0, 1), jax.random.split(key), strict=True)])
        for z in (noise, 0.5 * noise)
    )
    assert 0.5 * claimed < honest <= claimed < weak


# Over messages.


def deployment(**settings):
    xs, ys = world.labels()
    fraction = settings.pop("fraction", 1.0)
    model = mj.networks.MLP(world.D, 3)
    algorithm = private(mj.FedAvg(model, optax.sgd(0.3), batch_size=4, fraction=fraction), **settings)
    nodes = world.nodes_of(xs, ys, mj.likelihoods.Categorical(), algorithm, rows=max(map(len, xs)), scaling="sum")
    return algorithm, world.prediction_of(xs, ys), world.server_of(algorithm, None, scaling="sum"), nodes


def test_without_noise_messages_are_the_simulation(key):
    algorithm, problem, server, nodes = deployment(clip=mj.privacy.QuantileClip(first=0.2, noise=1e-9))
    there, _, reports = world.deployed(server, nodes, key, 3)
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    np.testing.assert_allclose(flat(server.weights(there)), flat(algorithm.weights(state)), rtol=1e-8)
    np.testing.assert_allclose(there.inner.state.shared.clip, state.shared.clip, rtol=1e-6)
    assert np.isnan(reports[-1].quality.loss)
    assert int(there.inner.state.kept.used) == 3


def answers(server, nodes, key, there):
    return {k: node.step(key, node.init(), server.down(there, k))[1] for k, node in enumerate(nodes)}


def test_the_servers_draws_are_not_told_by_a_key(key):
    _, _, server, nodes = deployment(noise=1.0, fraction=0.5)
    first = server.init()
    asked = [server.asked(key, server.init()) for _ in range(30)]
    assert len(set(asked)) > 3
    assert server.asked(key, first) == server.asked(jax.random.key(5), first)
    some = {k: up for k, up in answers(server, nodes, key, first).items() if k in server.asked(key, first)}
    ends = [server.step(first, some)[0] for _ in range(2)]
    assert np.abs(flat(server.weights(ends[0])) - flat(server.weights(ends[1]))).max() > 1e-3
    assert "secret" not in str(server.like_down())


def test_an_answer_counts_in_the_round_that_it_was_asked_for(key):
    _, _, server, nodes = deployment(fraction=0.5)
    there = server.init()
    ups = answers(server, nodes, key, there)
    asked = server.asked(key, there)
    while not 0 < len(asked) < len(nodes):
        there = server.init()
        asked = server.asked(key, there)
    _, report = server.step(there, ups)
    assert report.accepted == asked
    assert all("was not asked in this round" in why for why in report.refused.values())
    # A round late it is no answer of a client that was chosen by chance, even where all are asked.
    _, _, server, nodes = deployment()
    there = server.init()
    ups = answers(server, nodes, key, there)
    assert server.step(there, ups)[1].accepted == tuple(range(world.M))
    after, _ = server.step(there, {})
    assert not server.step(after, ups)[1].accepted


def test_a_server_goes_no_further_than_its_rounds(key):
    algorithm, _, server, nodes = deployment(noise=1.0, rounds=2)
    there, mine, _ = world.deployed(server, nodes, key, 2)
    model = flat(server.weights(there))
    assert server.asked(key, there) == ()
    after, report = server.step(there, answers(server, nodes, key, there))
    assert not report.accepted
    np.testing.assert_array_equal(flat(server.weights(after)), model)
    assert mj.privacy.client_epsilon(algorithm, after.inner.state, delta=DELTA) == mj.privacy.client_epsilon(
        algorithm, there.inner.state, delta=DELTA
    )
