"""What every algorithm must do. A new one joins by a line: in ALGORITHMS, or in NETWORKS if it trains them."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import mocha_jax as mj
from tests import zoo
from tests.neural import problems as networks

MOCHAS: dict[str, Any] = {
    "mocha": mj.Mocha(sigma_prime="per_task"),
    "mocha_partial": mj.Mocha(local_epochs=0.6, sigma_prime="lemma9"),
    "mocha_gamma": mj.Mocha(local_epochs=2.0, sigma_prime="spectral", gamma=0.7),
}
ALGORITHMS = MOCHAS | {
    "mocha_adaptive": mj.Mocha(),
    "averaged": mj.Averaged(mj.algorithm1(sigma_prime="per_task"), after=30),
    "cocoa": mj.Cocoa(0.2),
    "sdca": mj.MiniBatchSdca(batch=4, beta=10.0),
    "sgd": mj.MiniBatchSgd(batch=4, step_size=0.3, power=0.5, horizon=3.0),
    "newton": mj.Newton(),
    "interior point": mj.InteriorPoint(),
}
NETWORKS = {
    "fedavg": mj.FedAvg(networks.MODEL, optax.sgd(0.1, momentum=0.9), local_epochs=2, batch_size=4),
    "fedadam": mj.FedAvg(networks.MODEL, optax.sgd(0.1), batch_size=4, server_optimizer=optax.adam(0.01)),
    "fedprox": mj.FedAvg(networks.MODEL, optax.sgd(0.1), batch_size=4, proximal=0.5),
    "fedsgd": mj.FedAvg(networks.MODEL, optax.sgd(0.3), batch_size=None),
    "local": mj.Local(networks.MODEL, optax.adam(0.01), batch_size=4),
    "virtual": mj.Virtual(networks.MODEL, optax.adam(0.01), batch_size=4),
    "ditto": mj.personalized.ditto(networks.MODEL, optax.sgd(0.1), personal_optimizer=optax.adam(0.01), batch_size=4),
    "scaffold": mj.personalized.scaffold(networks.MODEL, optax.sgd(0.1), local_epochs=2, batch_size=4),
    "fedu": mj.personalized.fedu(networks.MODEL, optax.sgd(0.1), graph=np.ones((5, 5)), batch_size=4),
    "apfl": mj.personalized.apfl(networks.MODEL, optax.sgd(0.1), mixing_rate=0.1, batch_size=4),
}
ALL = ALGORITHMS | NETWORKS
every_algorithm = pytest.mark.parametrize("name", ALL)
each_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
each_mocha = pytest.mark.parametrize("name", MOCHAS)
SYSTEMS = mj.systems.Dropout(0.3) & mj.systems.PartialEpochs(0.3, 1.0)


LOSSES = {"newton": mj.losses.Logistic()}  # others have a hinge


def make_problem(lam=0.1, name=None, **kwargs):
    loss = LOSSES.get(name, mj.losses.Hinge())
    return mj.Problem(zoo.data(**kwargs), loss, mj.regularizers.MeanRegularized(lam, 0.5 * lam))


def problem_of(name, **kwargs):
    """Return the problem that the algorithm of that name is tried on."""
    return networks.make_problem(**kwargs) if name in NETWORKS else make_problem(name=name, **kwargs)


def one_step(algorithm, problem, state, key):
    work = SYSTEMS.work(key, problem.data, algorithm.request(problem, state.round))
    return algorithm.step(key, state, problem, work)


@every_algorithm
@pytest.mark.thin(1)
def test_a_step_keeps_the_structure_of_the_state(name, key):
    algorithm, problem = ALL[name], problem_of(name)
    state = algorithm.init(problem)
    assert isinstance(state, mj.State)
    assert state.round == 0
    after, _ = jax.jit(one_step)(algorithm, problem, state, key)
    assert after.round == 1
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    chosen = lax.cond(True, lambda s: one_step(algorithm, problem, s, key)[0], lambda s: s, state)
    chex.assert_trees_all_close(chosen, after, rtol=1e-12)
    for leaf in jax.tree.leaves(jax.eval_shape(algorithm.init, problem)):
        assert leaf.dtype in (jnp.float64, jnp.int32)


@every_algorithm
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.slow
def test_the_data_sets_the_dtype(name, dtype, key):
    problem = problem_of(name, dtype=dtype)
    state, history = mj.run(problem, ALL[name], key, num_rounds=2, systems=SYSTEMS)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((state, history))}
    marks = {np.dtype(bool)} if name in NETWORKS else set()  # whether training goes on
    assert dtypes == {np.dtype(dtype), np.dtype(np.int32)} | marks


@every_algorithm
@pytest.mark.thin(1)
def test_jit_changes_nothing(name, key):
    algorithm, problem = ALL[name], problem_of(name)
    state = algorithm.init(problem)
    plain, _ = one_step(algorithm, problem, state, key)
    compiled, _ = jax.jit(one_step)(algorithm, problem, state, key)
    chex.assert_trees_all_close(plain, compiled, rtol=1e-10, atol=1e-13)
    prepared, _ = one_step(algorithm, algorithm.prepare(problem), state, key)
    chex.assert_trees_all_close(plain, prepared, rtol=1e-12, atol=1e-14)


@every_algorithm
@pytest.mark.thin(1)
def test_a_continued_run_is_one_run(name, key):
    algorithm, problem = ALL[name], problem_of(name)
    whole, history = mj.run(problem, algorithm, key, num_rounds=4, systems=SYSTEMS)
    begin = algorithm.init(problem)
    half, _ = mj.run(problem, algorithm, key, num_rounds=2, systems=SYSTEMS, state=begin)
    end, rest = mj.run(problem, algorithm, key, num_rounds=2, systems=SYSTEMS, state=half)
    chex.assert_trees_all_close(algorithm.weights(end), algorithm.weights(whole), rtol=1e-10, atol=1e-13)
    np.testing.assert_array_equal(rest.steps, history.steps[2:])


@every_algorithm
@pytest.mark.thin(2)
def test_a_round_that_nobody_answers_leaves_the_model_as_it_is(name, key):
    algorithm, problem = ALL[name], problem_of(name)
    begin, step = algorithm.init(problem), jax.jit(algorithm.step)
    everyone, nobody = (
        mj.systems.Dropout(p).work(key, problem.data, algorithm.request(problem, begin.round)) for p in (0.0, 1.0)
    )
    state, _ = step(key, begin, problem, everyone)
    after, info = step(key, state, problem, nobody)
    assert (np.asarray(info.steps) == 0).all()
    chex.assert_trees_all_close(algorithm.weights(after), algorithm.weights(state), rtol=1e-12, atol=1e-14)


@every_algorithm
def test_what_a_round_asks_of_nodes_is_counted(name):
    algorithm, problem = ALL[name], problem_of(name)
    request = algorithm.request(problem)
    assert request.steps.shape == (problem.data.num_nodes,)
    assert request.steps.dtype == jnp.int32
    assert (request.steps >= 0).all()
    assert (request.steps > 0).any()  # of VIRTUAL's clients one is refined in a round
    assert (np.asarray(request.step_flops) > 0).all()
    assert all(len(np.shape(a)) <= 1 for a in (request.step_flops, request.fixed_flops))
    messages = (request.down, request.up)
    assert all(a == 0 for a in messages) if name == "local" else all(a > 0 for a in messages)


@pytest.mark.parametrize("name", ["mocha_gamma", "cocoa", "sgd"])
@pytest.mark.slow
def test_vmap_over_hyperparameters_and_keys_is_a_loop(name, key):
    problem, lams = make_problem(), jnp.array([0.03, 0.1, 0.5])

    def final(lam, key):
        there = problem.replace(regularizer=mj.regularizers.MeanRegularized(lam, 0.5 * lam))
        state, history = mj.run(there, ALGORITHMS[name], key, num_rounds=70, systems=SYSTEMS)
        return ALGORITHMS[name].weights(state), history.gap

    keys = jax.random.split(key, 3)
    together = jax.vmap(final)(lams, keys)
    for i in range(3):
        chex.assert_trees_all_close(
            jax.tree.map(lambda a, i=i: a[i], together), final(lams[i], keys[i]), rtol=1e-6, atol=1e-9
        )
    grid = jax.vmap(jax.vmap(final, (None, 0)), (0, None))(lams, keys)[1]
    assert grid.shape == (3, 3, 70)
    assert (grid >= 0).all()


@pytest.mark.parametrize("name", ["mocha_gamma"])
@pytest.mark.slow
def test_one_trace_for_all_hyperparameters(name, key):
    algorithm = ALGORITHMS[name]
    traces = 0

    class Counted(mj.Mocha):
        def step(self, *args):
            nonlocal traces
            traces += 1
            return super().step(*args)

    algorithm = Counted(**{k: getattr(algorithm, k) for k in ("local_epochs", "sigma_prime", "gamma")})
    problem = make_problem()
    lams: list[Any] = [0.1, 0.2, np.float32(0.3), jnp.asarray(0.4), 1]
    for lam in lams:
        there = problem.replace(regularizer=mj.regularizers.MeanRegularized(lam, lam))
        mj.run(there, algorithm, key, num_rounds=3, systems=mj.systems.Dropout(float(lam) / 2))
    assert traces == 1
    traces = 0
    for lam in lams[1:4]:
        there = problem.replace(regularizer=mj.regularizers.MeanRegularized(lam, lam))
        mj.solve(
            there,
            algorithm.replace(gamma=1.0 - float(lam) / 2),
            key=key,
            max_rounds=int(30 * float(lam)),
            tol=float(lam),
        )
    assert traces <= 2  # once for its shapes, once compiled


@each_algorithm
@pytest.mark.thin(2)
def test_gap_is_never_negative_and_bounds_the_suboptimality(name, key):
    problem = make_problem(name=name, loss_scaling="task_mean")
    best = mj.solve(
        problem,
        mj.Mocha(local_epochs=5.0, sigma_prime="per_task"),
        tol=1e-9,
        max_rounds=50_000,
        chunk=5000,
        record_every=10,
    )
    _, history = mj.run(problem, ALGORITHMS[name], key, num_rounds=150, systems=SYSTEMS)
    assert (history.gap >= 0).all()
    assert (history.primal >= best.primal * (1 - 1e-9)).all()
    assert (history.dual <= best.primal * (1 + 1e-9)).all()
    assert history.relative_gap[-1] < 0.2 * history.relative_gap[0]
    assert history.primal[-1] <= best.primal * (1 + (0.1 if name == "sgd" else 0.02))


@pytest.mark.slow
def test_each_term_of_the_gap_is_non_negative_in_every_round(key):
    for loss in zoo.LOSSES.values():
        data = zoo.data(regression=not loss.binary, dtype=np.float32)
        problem = mj.Problem(data, loss, mj.regularizers.MeanRegularized(0.1, 0.05))
        algorithm = mj.Mocha(sigma_prime="per_task")
        state = algorithm.init(problem)

        @jax.jit
        def step(state, round, algorithm=algorithm, problem=problem):
            state, _ = one_step(algorithm, problem, state, jax.random.fold_in(key, round))
            z = jnp.einsum("mnd,md->mn", problem.data.x, state.w)
            terms = problem.loss.fenchel_young(z, state.beta, problem.data.y)
            return state, terms, algorithm.certify(state, problem)

        for r in range(25):
            state, terms, certificate = step(state, r)
            assert (np.asarray(terms) >= 0).all()
            assert (np.asarray(certificate.task_gaps) >= 0).all()
            assert certificate.primal >= certificate.dual


@each_mocha
@pytest.mark.slow
def test_nodes_that_share_a_task_are_scaled_for_their_number(name, key):
    # Six copies of one node overshoot six times over unless sigma' counts nodes, not tasks.
    xs, ys = zoo.ragged(m=1, regression=True)
    data = mj.pack_tasks(xs * 6, ys * 6).pooled().pad(nodes=8)
    problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(0.05))
    algorithm = ALGORITHMS[name]
    np.testing.assert_allclose(algorithm.init(problem).server.sigma, 6.0 * algorithm.gamma)
    _, history = mj.run(problem, algorithm, key, num_rounds=30)
    assert (np.diff(history.dual) >= -1e-12).all()


def test_an_infeasible_dual_point_certifies_nothing():
    problem = make_problem()
    assert mj.certificate(problem, 2.0 * jnp.ones_like(problem.data.y)).gap == jnp.inf


@pytest.mark.slow
def test_gradients_flow_through_a_run(key):
    # Smooth loss; the derivative of the final primal by scan against central differences.
    data = zoo.data(regression=True, m=3, d=2)

    def final(lam, scale):
        problem = mj.Problem(
            data.replace(x=data.x * scale), mj.losses.Huber(0.7), mj.regularizers.MeanRegularized(lam, 0.1)
        )
        return mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=5)[1].primal[-1]

    ours = jax.grad(final, argnums=(0, 1))(0.3, 1.0)
    for i in range(2):
        moved = [final(*(v + s * (j == i) for j, v in enumerate((0.3, 1.0)))) for s in (1e-5, -1e-5)]
        np.testing.assert_allclose(ours[i], (moved[0] - moved[1]) / 2e-5, rtol=1e-6)


@pytest.mark.parametrize("p", [0.5, np.linspace(0.0, 0.9, 5)])
@pytest.mark.slow
def test_drops_do_not_move_the_optimum(p, key):
    problem = make_problem()
    plain = mj.solve(
        problem,
        mj.Mocha(local_epochs=4.0, sigma_prime="per_task"),
        tol=1e-8,
        max_rounds=50_000,
        record_every=10,
        chunk=1000,
    )
    dropped = mj.solve(
        problem, mj.Mocha(local_epochs=4.0, sigma_prime="per_task"), key=key, tol=1e-8, max_rounds=50_000, record_every=10, chunk=1000,
        systems=mj.systems.Dropout(p),
    )  # fmt: skip
    assert dropped.status == mj.Status.CONVERGED
    assert (dropped.history.gap >= 0).all()
    np.testing.assert_allclose(dropped.primal, plain.primal, rtol=2e-8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mj.Mocha(local_epochs=0.0), lambda: mj.Mocha(sigma_prime="safe"), lambda: mj.Mocha(gamma=0.0),
        lambda: mj.Mocha(gamma=1.5),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(make):
    with pytest.raises(ValueError, match="Mocha: .* must be"):
        make()


class Charging(mj.servers.Aggregator):
    """Another server, that asks nodes for 1,000 operations more and 5 numbers more a round."""

    inner: mj.servers.Aggregator

    def init(self, *given):
        return self.inner.init(*given)

    def resume(self, *given):
        return self.inner.resume(*given)

    def add_tasks(self, *given):
        return self.inner.add_tasks(*given)

    def curvature(self, *given):
        return self.inner.curvature(*given)

    def aggregate(self, *given):
        return self.inner.aggregate(*given)

    def certify(self, *given):
        return self.inner.certify(*given)

    def relation(self, *given):
        return self.inner.relation(*given)

    def node_flops(self, problem):
        return 1000.0

    def message(self, request):
        return request.replace(up=request.up + 5.0)


@pytest.mark.parametrize("algorithm", [MOCHAS["mocha"], mj.Cocoa(0.2)], ids=["mocha", "cocoa"])
@pytest.mark.slow
def test_what_a_server_costs_is_charged(algorithm, key):
    problem = make_problem()
    own = algorithm.replace(custom_server=Charging(algorithm.server_for(problem)))
    for name, more in (("fixed_flops", 1000.0), ("up", 5.0), ("down", 0.0)):
        asked = [np.asarray(getattr(a.request(problem), name)) for a in (own, algorithm)]
        np.testing.assert_allclose(asked[0] - asked[1], more, err_msg=name)
    after, info = one_step(own, problem, own.init(problem), key)
    plain, without = one_step(algorithm, problem, algorithm.init(problem), key)
    np.testing.assert_array_equal(after.beta, plain.beta)
    np.testing.assert_allclose(info.flops - without.flops, np.where(info.steps > 0, 1000.0, 0.0))
