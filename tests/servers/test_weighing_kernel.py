"""A weighing by the kernel for GPUs, interpreted, is that by the loops."""

import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.coupling import Dense, Diagonal, Exchangeable, LowRank
from mocha_jax.servers._weighing import Tasks, _by_kernel, _in_some_steps, _until_they_agree, consensus
from tests import zoo


def coupling(kind, m, rng):
    if kind == "exchangeable":
        return Exchangeable(jnp.float32(0.7), jnp.float32(5.0), m)
    if kind == "low rank":
        return LowRank(jnp.float32(0.3), jnp.asarray(rng.normal(size=(m, 2)), jnp.float32))
    if kind == "diagonal":
        return Diagonal(jnp.asarray(rng.uniform(0.5, 2.0, m), jnp.float32))
    return Dense(jnp.asarray(zoo.random_spd(m, 0), jnp.float32))


def weighing(kind, m, p, d, task=None):
    rng, float32 = np.random.default_rng(m + p + d), jnp.float32
    far = np.array([0.1, 1.0, 0.01, 1.0])[:p, None]
    along = jnp.asarray(far * rng.normal(size=(m, p, d)), float32)
    slope = -jnp.asarray(rng.uniform(0.0, 1.0, size=(p, m)), float32)
    free = jnp.asarray(rng.random(m) < 0.8, float32)
    num_tasks = m if task is None else int(task.max()) + 1
    between = coupling(kind, num_tasks, rng)
    counts = jnp.ones(m, float32) if task is None else jnp.asarray(np.bincount(task), float32)
    task = None if task is None else jnp.asarray(task)
    return Tasks(between, consensus(between), task, counts, m), along, slope, free


SIZES = [(5, 4, 3), (40, 3, 16), (33, 4, 64), (3, 1, 200)]  # nodes, points, features


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr("mocha_jax.servers._weighing._STEPS", 5)


@pytest.mark.parametrize(
    ("size", "kind"),
    [  # every kind in one size, half of the sizes of one kind
        pytest.param(
            size,
            kind,
            marks=() if size == SIZES[0] or (kind == "low rank" and size in SIZES[::2]) else pytest.mark.slow,
        )
        for size in SIZES
        for kind in ("exchangeable", "low rank", "diagonal", "dense")
    ],
)
@pytest.mark.extended
@pytest.mark.thin(1)
def test_the_kernel_weighs_as_the_loops_do(kind, size):
    given = weighing(kind, *size)
    (a, moved), (found, way) = _in_some_steps(*given), _by_kernel(*given, interpret=True)
    np.testing.assert_allclose(found, a, atol=2e-4)
    np.testing.assert_allclose(way, moved, atol=2e-4)
    assert float(jnp.max(jnp.abs(moved))) > 1e-3


@pytest.mark.slow
def test_the_kernel_knows_of_tasks_on_several_nodes():
    given = weighing("exchangeable", 12, 4, 5, task=np.arange(12) % 5)
    for one, other in zip(_in_some_steps(*given), _by_kernel(*given, interpret=True), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)


@pytest.mark.slow
def test_blocks_of_nodes_answer_as_all_do(monkeypatch):
    given = weighing("exchangeable", 11, 4, 5)
    at_once = _until_they_agree(*given)
    monkeypatch.setattr("mocha_jax.servers._weighing._BLOCK", 4)
    for one, other in zip(at_once, _until_they_agree(*given), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("kind", ["exchangeable", "dense"])
@pytest.mark.thin(1)
def test_steps_of_an_accelerator_lead_nearly_as_far_as_those_that_look(kind, monkeypatch):
    monkeypatch.undo()
    tasks, along, slope, free = weighing(kind, 20, 4, 6)

    def gained(found):
        a, moved = found
        return float(jnp.sum(slope * a) + 0.5 * jnp.sum(moved * tasks.apply(moved)) / tasks.consensus.stiffness)

    some, enough = (gained(by(tasks, along, slope, free)) for by in (_in_some_steps, _until_they_agree))
    assert some < 0
    assert some <= 0.9 * enough


def test_without_kernels_means_without_this_one_whatever_the_loss():
    data = zoo.data(loss_scaling="task_mean")
    loss = mj.losses.from_scalar(lambda z, y: (z - y) ** 2, smoothness=2.0)
    problem = mj.Problem(data, loss, mj.regularizers.Independent(0.1))
    loops = mj.Mocha().by_loops(problem)
    assert loops is not None
    server = loops.server_for(problem)
    assert isinstance(server, mj.servers.AdaptiveServer)
    assert server.backend == "xla"
