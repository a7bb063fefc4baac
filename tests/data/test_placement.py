"""The order of samples in memory: it changes no number, and programs have no copy of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax._data import layouts, node_arrays
from mocha_jax._driver import rounds
from mocha_jax._driver.config import make_config

M, N, D = 50, 20, 7


@pytest.fixture
def data(monkeypatch):
    monkeypatch.setattr(layouts, "_SMALL", 0)
    monkeypatch.setattr("mocha_jax._data.pack._PIECE", 9 * N * D * 8)  # nine nodes at a time
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, D)) for n in np.r_[N, rng.integers(5, N, M - 1)]]
    return xs, mj.pack_tasks(xs, [rng.choice([-1.0, 1.0], len(x)) for x in xs], loss_scaling="task_mean")


def order(x):
    return x.format.layout.major_to_minor


@pytest.mark.slow
def test_packed_and_divided_samples_lie_row_by_row(data):
    xs, packed = data
    parts = packed.split(jax.random.key(0), 0.5)
    for one in (packed, *parts, packed.append(packed), packed.pad(nodes=64)):
        assert order(one.x) == (1, 0, 2)
    for t, x in enumerate(xs):
        np.testing.assert_array_equal(packed.x[t, : len(x)], x)
        assert not packed.x[t, len(x) :].any()


def test_small_samples_stay_as_they_come():
    assert order(mj.pack_tasks([np.ones((3, 2))], [np.ones(3)]).x) == (0, 1, 2)


@pytest.mark.parametrize("algorithm", [mj.Mocha(), mj.algorithm1(), mj.MiniBatchSdca(4, beta=2.0)], ids=["a", "p", "b"])
@pytest.mark.slow
def test_their_order_changes_no_result(data, algorithm):
    _, packed = data
    stored = packed.replace(x=np.array(packed.x))
    object.__setattr__(stored, "x", jnp.array(np.array(packed.x)))
    assert order(stored.x) == (0, 1, 2)
    found = []
    for one in (packed, stored):
        problem = mj.Problem(one, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
        state, history = mj.run(problem, algorithm, jax.random.key(0), num_rounds=5)
        found.append((state.w, history.gap, mj.solve(problem, algorithm, tol=None, max_rounds=5).weights))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_solve_on_a_cpu_reads_them_where_they_are(key, monkeypatch):
    monkeypatch.setattr(layouts, "_SMALL", 0)
    monkeypatch.setattr("mocha_jax._node.buckets.PART", 2**15)
    m, n, d = 400, 30, 50
    x = layouts.row_by_row(jnp.ones((m, n, d)))
    y = jnp.ones((m, n))
    data = mj.TaskData(x, y, y / n, jnp.arange(m, dtype=jnp.int32), loss_scaling="task_mean")
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))

    def memory_of(problem):
        config: Any = make_config(mj.algorithm1(), problem, None, None, None, 1).laid_out()
        held = config.problem.data.layout.buckets[0].x.unsafe_buffer_pointer(), config.problem.data.x
        where, room = rounds.allocate(key, config, None, records=3)
        programs = [
            rounds.run_chunk.lower(key, config, where, room, 3, jnp.zeros(()), rounds=2),
            rounds.settled.lower(config, where.state),
            rounds.proven.lower(config, where.state, where.bound),
        ]
        memory: list[Any] = [program.compile().memory_analysis() for program in programs]
        return held, [one.temp_size_in_bytes / x.nbytes for one in memory]

    (seen, still), sizes = memory_of(problem)
    assert seen == still.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    assert max(sizes) < 0.7


def test_samples_are_checked_where_they_are(monkeypatch):
    """NumPy's copy of an array in another order than its own stays as long as the array."""
    monkeypatch.setattr(layouts, "_SMALL", 0)
    x = layouts.row_by_row(jnp.ones((40, 3, 5)))
    [view] = node_arrays._views(x)
    assert view.ctypes.data == x.unsafe_buffer_pointer()
    np.testing.assert_array_equal(view, np.ones((40, 3, 5)))
    y, wrong = jnp.ones((40, 3)), layouts.row_by_row(x.at[7, 2, 4].set(jnp.nan))
    with pytest.raises(ValueError, match="x is NaN or infinite in task 7, node 7, row 2"):
        mj.TaskData(wrong, y, y, jnp.arange(40, dtype=jnp.int32))


@pytest.mark.slow
def test_rounds_go_on_in_the_memory_of_the_last_ones(key):
    m, n, d = 50, 7, 6
    x, y = jnp.ones((m, n, d)), jnp.ones((m, n))
    data = mj.TaskData(x, y, y / n, jnp.arange(m, dtype=jnp.int32), loss_scaling="task_mean")
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(0.1))
    config = make_config(mj.Mocha(), problem, None, None, None, 1).laid_out()
    where, room = rounds.allocate(key, config, None, records=3)
    lowered = rounds.run_chunk_in_place.lower(key, config, where, room, 3, jnp.zeros(()), rounds=2)
    memory: Any = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(a.nbytes for a in jax.tree.leaves(where.state))
    # A state that was given is still there.
    state = mj.solve(problem, max_rounds=2).state
    once, again = (mj.solve(problem, max_rounds=2, state=state).weights for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert np.isfinite(state.w).all()
