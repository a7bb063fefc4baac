"""Simulated time follows equation (30); operations and bytes are what was really done."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax._node.local_solver import _step_one_node
from tests import zoo


def problem(**kwargs):
    return mj.Problem(zoo.data(**kwargs), mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.05))


@pytest.mark.slow
def test_a_rounds_time_is_its_slowest_nodes(key):
    p = problem(low=10, high=60)
    rates, d, sizes = np.arange(1.0, 6.0), p.data.num_features, np.asarray(p.data.sizes)
    cost = mj.costs.Cost(rates, latency=0.5, download=64.0, upload=32.0, bytes_per_number=8)
    _, h = mj.run(
        p,
        mj.Mocha(sigma_prime="per_task"),
        key,
        num_rounds=4,
        systems=mj.systems.Trace(np.eye(4, 5)),
        cost=cost,
        watch=mj.Watch(),
    )
    seconds = sizes * 6 * d / rates + 0.5 + 8 * d / 64 + 8 * d / 32
    np.testing.assert_allclose(h.nodes.seconds, np.eye(4, 5) * seconds)
    np.testing.assert_allclose(h.simulated_time, np.cumsum(seconds[:4]))
    np.testing.assert_allclose(h.bytes_down, 8 * d * np.arange(1, 5))
    np.testing.assert_allclose(h.bytes_up, h.bytes_down)
    np.testing.assert_allclose(h.utilisation, 1 / 5)  # one of five nodes is busy at any time
    _, h = mj.run(p, mj.Mocha(sigma_prime="per_task"), key, num_rounds=3, cost=cost, watch=mj.Watch())
    np.testing.assert_allclose(h.simulated_time, seconds.max() * np.arange(1, 4))
    np.testing.assert_allclose(h.utilisation, np.mean(seconds) / seconds.max())


class Terse(mj.Mocha):
    """Answers with fewer numbers than it is sent."""

    def request(self, problem, round=0):
        return super().request(problem, round).replace(up=jnp.asarray(2.0))


def test_each_direction_is_counted_for_itself(key):
    _, h = mj.run(
        problem(),
        Terse(sigma_prime="per_task"),
        key,
        num_rounds=1,
        cost=mj.costs.Cost(1e30, 0.0, download=64.0, upload=32.0),
    )
    np.testing.assert_allclose([h.bytes_down[0], h.bytes_up[0]], [5 * 4 * problem().data.num_features, 5 * 4 * 2])
    np.testing.assert_allclose(h.simulated_time, 4 * problem().data.num_features / 64 + 4 * 2 / 32)


@pytest.mark.slow
def test_a_solution_says_how_busy_each_node_was():
    p = problem(low=10, high=60)
    cost = mj.costs.Cost(1e3, latency=0.0)
    solution = mj.solve(p, tol=1e-2, cost=cost, systems=mj.systems.NeverAnswers((2,)), max_rounds=5)
    sizes = np.asarray(p.data.sizes) * (np.arange(5) != 2)
    np.testing.assert_allclose(solution.utilisation, sizes / sizes.max(), rtol=1e-2)


@pytest.mark.slow
def test_the_servers_work_comes_after_the_slowest_node(key):
    plain, busy = mj.costs.lte(), mj.costs.lte().replace(server=0.25)
    times = [
        mj.run(problem(), mj.Mocha(), key, num_rounds=4, cost=cost)[1].simulated_time
        for cost in (plain, busy, busy.replace(cycle=3.0))
    ]
    np.testing.assert_allclose(times[1], times[0] + 0.25 * np.arange(1, 5))
    np.testing.assert_allclose(times[2], 3.25 * np.arange(1, 5))


def test_a_round_lasts_at_least_a_clock_cycle(key):
    cost = mj.costs.lte().replace(cycle=3.0)
    _, h = mj.run(
        problem(),
        mj.Mocha(sigma_prime="per_task"),
        key,
        num_rounds=4,
        cost=cost,
        systems=mj.systems.Trace(np.zeros((1, 5))),
    )
    np.testing.assert_allclose(h.simulated_time, 3.0 * np.arange(1, 5))
    assert not h.active.any()
    assert h.bytes_up[-1] == 0.0


ALGORITHMS = {
    "mocha": (mj.Mocha(2.0, sigma_prime="per_task"), 6.0),
    "sdca": (mj.MiniBatchSdca(batch=4, beta=8.0), 4.0),
    "sgd": (mj.MiniBatchSgd(batch=4), 4.0),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.slow
def test_operations_are_those_of_the_steps(name, key):
    algorithm, per_feature = ALGORITHMS[name]
    p = problem()
    work = mj.systems.Full().work(key, p.data, algorithm.request(p))
    _, info = algorithm.step(key, algorithm.init(p), p, work)
    np.testing.assert_allclose(info.flops, per_feature * p.data.num_features * np.asarray(info.steps))
    np.testing.assert_array_equal(info.steps, work.steps)
    assert not info.capped.any()


def test_operations_agree_with_the_compiled_program(key):
    # XLA counts what one coordinate step of one node really does; with many features the vectors rule.
    d = 4096
    vector, scalar = jnp.ones(d), jnp.ones(())
    step = partial(_step_one_node, mj.losses.Hinge())
    arguments = vector, scalar, scalar, scalar, scalar, jnp.array(True), vector, scalar, vector
    analysis: Any = jax.jit(step).lower(*arguments).compile().cost_analysis()
    counted = analysis["flops"]
    assert abs(counted - 6 * d) < 0.2 * d


@pytest.mark.slow
def test_cocoa_is_charged_for_its_gaps(key):
    p = problem()
    algorithm = mj.Cocoa(0.5)
    work = mj.systems.Full().work(key, p.data, algorithm.request(p))
    _, info = algorithm.step(key, algorithm.init(p), p, work)
    d, sizes, steps = p.data.num_features, np.asarray(p.data.sizes), np.asarray(info.steps)
    checks = steps / sizes + 1  # before the first pass and after each
    np.testing.assert_allclose(info.flops, 6 * d * steps + checks * (2 * d * sizes + 4 * d))


def test_relative_prices_count_per_feature(key):
    p = problem(low=10, high=60)
    for ratio in (10.0, 100.0, 1000.0):
        _, h = mj.run(p, mj.Mocha(sigma_prime="per_task"), key, num_rounds=1, cost=mj.costs.relative(ratio))
        want = 6 * int(p.data.sizes.max()) + ratio
        np.testing.assert_allclose(h.simulated_time[0] / p.data.num_features, want, rtol=1e-6)


def test_slower_networks_cost_more():
    times = [float(c().message_seconds(500.0, 500.0)) for c in (mj.costs.wifi, mj.costs.lte, mj.costs.cellular_3g)]
    assert times == sorted(times)


def test_costs_map_without_training_again(key):
    p = problem()
    networks = jax.tree.map(lambda *a: jnp.stack(a), *(mj.costs.relative(r) for r in (10.0, 100.0)))
    h = jax.vmap(lambda c: mj.run(p, mj.Mocha(sigma_prime="per_task"), key, num_rounds=3, cost=c)[1])(networks)
    assert h.simulated_time.shape == (2, 3)
    np.testing.assert_array_equal(h.gap[0], h.gap[1])


BAD = {
    "rate": (lambda: mj.costs.Cost(flops_per_second=0.0), "flops_per_second must be finite and > 0"),
    "latency": (lambda: mj.costs.Cost(latency=-1.0), "latency must be finite and >= 0"),
    "cycle": (lambda: mj.costs.Cost(cycle=np.ones(3)).check_nodes(3), "cycle must be a single number"),
    "server": (lambda: mj.costs.Cost(server=-1.0), "server must be finite and >= 0"),
    "per node": (
        lambda: mj.costs.Cost(latency=np.ones(3)).check_nodes(5),
        r"latency must be a number or one per node \[5\]",
    ),
    "not a cost": (
        lambda: mj.run(problem(), mj.Mocha(sigma_prime="per_task"), jax.random.key(0), num_rounds=1, cost=mj.costs.lte),  # type: ignore[arg-type]
        "cost must be a Cost",
    ),
    "ratio": (lambda: mj.costs.relative(0.0), "ratio must be finite and > 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_costs_are_refused(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()
