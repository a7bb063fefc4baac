"""The controller's cycle is the best there is, against a search in plain NumPy; nobody is left out."""

from typing import Any

import jax
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.systems import Controller, Deadline
from tests import zoo


@pytest.fixture
def data():
    return zoo.data(low=10, high=60)


def asked(data, epochs=100.0):
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    return mj.algorithm1(epochs).request(problem)


def worth(cycle, data, request, cost, theta):
    """Progress a second of the slowest node, as the docstring has it."""
    n, flops = np.asarray(data.sizes, float), np.asarray(request.step_flops, float)
    down, up = float(request.down), float(request.up)
    comm = cost.latency + cost.bytes_per_number * (down / cost.download + up / cost.upload)
    left = cycle - comm - np.asarray(request.fixed_flops) / cost.flops_per_second
    steps = np.clip(left * cost.flops_per_second / flops, 0.0, np.asarray(request.steps))
    return np.min(1.0 - theta ** (steps / n)) / (cycle + cost.server)


CASES: dict[str, tuple[mj.costs.Cost, Any, float]] = {
    "alike": (mj.costs.Cost(1e5, latency=0.01), 0.5, 100.0),
    "clocks": (mj.costs.Cost(np.geomspace(1e3, 1e5, 5), latency=0.05), 0.3, 100.0),
    "networks": (mj.costs.Cost(1e4, latency=np.array([0.01, 0.02, 0.5, 0.01, 0.01]), upload=100.0), 0.7, 100.0),
    "a busy server": (mj.costs.Cost(1e5, latency=0.001, server=0.3), 0.5, 100.0),
    "no more than it is asked": (mj.costs.Cost(1e5, latency=10.0), 0.9, 2.0),
    "nodes that learn at different rates": (mj.costs.Cost(1e5), np.array([0.2, 0.4, 0.6, 0.8, 0.9]), 100.0),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thin(1)
def test_no_cycle_is_better(name, data, key):
    cost, theta, epochs = CASES[name]
    request = asked(data, epochs)
    controller = Controller(cost, theta)
    cycle = float(controller.cycle(data, request))
    got = worth(cycle, data, request, cost, theta)
    tried = [worth(t, data, request, cost, theta) for t in cycle * np.geomspace(1e-3, 1e3, 20_001)]
    assert got >= (1 - 1e-6) * max(tried)
    work = controller.work(key, data, request)
    same = Deadline(cycle, cost).work(key, data, request)
    np.testing.assert_array_equal(work.steps, same.steps)
    np.testing.assert_array_equal(work.active, same.active)
    assert bool(work.active.all())  # Assumption 2


def test_it_goes_as_far_as_messages_are_dear(data):
    request = asked(data)
    epochs = []
    for latency in (1e-3, 1e-2, 1e-1, 1.0):
        work = Controller(mj.costs.Cost(1e5, latency=latency)).work(jax.random.key(0), data, request)
        epochs.append(float(np.mean(np.asarray(work.steps) / np.asarray(data.sizes))))
    assert epochs == sorted(epochs)
    assert epochs[0] < 1.0 < epochs[-1]
    small, large = (
        Controller(mj.costs.Cost(1e5), theta).cycle(data, request) for theta in (0.1, 0.9)
    )  # where an epoch achieves little it takes more of them
    assert small < large


def test_nodes_without_data_do_not_count(data):
    cost = mj.costs.Cost(1e4, latency=0.1)
    more = data.pad(nodes=8)
    a, b = (Controller(cost).cycle(d, asked(d)) for d in (data, more))
    np.testing.assert_allclose(a, b, rtol=1e-9)


@pytest.mark.slow
def test_it_is_ahead_of_fixed_work_on_a_slow_network_and_a_fast_one(key):
    data = zoo.data(m=8, d=6, low=30, high=60, loss_scaling="task_mean")
    problem = mj.Problem(data, mj.losses.SmoothedHinge(0.5), mj.regularizers.MeanRegularized(0.2, 0.05))
    best = mj.solve(problem, tol=1e-9, max_rounds=3000).primal
    clocks = np.geomspace(1e4, 1e5, 8)
    for latency in (1e-4, 3.0):
        cost = mj.costs.Cost(clocks, latency=latency, download=1e9, upload=1e9)
        # Nobody tunes it: of two ways to fix the work one is wrong on each network.
        systems = {"controller": Controller(cost), "tenth": mj.systems.PartialEpochs(1 / 300, 1 / 300), "all": None}
        times = {}
        for name, system in systems.items():
            _, h = mj.run(problem, mj.algorithm1(30.0, sigma_prime="per_task"), key, num_rounds=1500 if name == "tenth" else 300,
                          systems=system, cost=cost)  # fmt: skip
            there = np.asarray(h.primal) <= (1 + 1e-2) * best
            times[name] = float(h.simulated_time[np.argmax(there)]) if there.any() else np.inf
        worst = max(times["tenth"], times["all"])
        assert times["controller"] < 0.5 * worst, (latency, times)
        assert times["controller"] < 1.2 * min(times["tenth"], times["all"]), (latency, times)
