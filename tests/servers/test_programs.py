"""The quadratic programs of single nodes: answers are feasible, better each time, and soon the best there are."""

import cvxpy as cp
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mocha_jax.servers._quadratic_programs import answer, left, programs

SEEDS = st.integers(0, 10_000)


def problem(seed, p, d=3, m=6, spread=2.0):
    """Vectors [m, p, d] of different lengths, nearly on a line as old points are; slopes and what is asked [p, m]."""
    rng = np.random.default_rng(seed)
    common, lengths = rng.normal(size=(m, 1, d)), 10.0 ** (spread * rng.uniform(-1, 0, size=(m, p, 1)))
    along = lengths * (common + rng.choice([0.03, 1.0]) * rng.normal(size=(m, p, d)))
    pull = rng.normal(size=(m, d))
    slope = -np.einsum("mpd,md->pm", along, pull) + 0.1 * rng.normal(size=(p, m)) * lengths[..., 0].T
    return along, slope, 0.1 * rng.normal(size=(p, m)) * lengths[..., 0].T, rng.uniform(0.5, 2.0, m)


def given_of(along, slope, stiffness, dtype="float64"):
    along, slope, stiffness = (jnp.asarray(a, dtype) for a in (along, slope, stiffness))
    return programs(along, slope, stiffness, jnp.ones(len(along), dtype))


def value(along, slope, asked, stiffness, a):
    moved = np.einsum("pm,mpd->md", np.asarray(a, float), along)
    return np.sum((slope - asked) * np.asarray(a, float), axis=0) + 0.5 * stiffness * np.sum(moved**2, axis=1)


def least(along, slope, asked, stiffness):
    found = []
    for k, vectors in enumerate(along):
        a = cp.Variable(len(vectors), nonneg=True)
        objective = (slope - asked)[:, k] @ a + 0.5 * stiffness[k] * cp.sum_squares(vectors.T @ a)
        found.append(cp.Problem(cp.Minimize(objective), [cp.sum(a) <= 1]).solve(solver=cp.CLARABEL))
    return np.array(found)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(seed=SEEDS, p=st.integers(1, 6), spread=st.sampled_from([0.0, 1.0, 2.0]))
@pytest.mark.slow
def test_answers_become_those_of_a_convex_solver(seed, p, spread):
    along, slope, asked, stiffness = problem(seed, p, spread=spread)
    given, a = given_of(along, slope, stiffness), tuple(jnp.zeros_like(slope))
    values = [np.zeros(len(along))]
    for _ in range(2 * p + 2):
        a = answer(given, tuple(jnp.asarray(asked)), a)
        assert all((each >= 0).all() for each in a)
        assert (np.stack(a).sum(0) <= 1 + 1e-12).all()
        values.append(value(along, slope, asked, stiffness, a))
    best = least(along, slope, asked, stiffness)
    assert (np.diff(values, axis=0) <= 1e-12).all()
    np.testing.assert_allclose(values[-1], best, rtol=1e-6, atol=1e-8)
    bound = np.asarray(left(given, tuple(jnp.asarray(asked)), a))
    assert (values[-1] - bound <= best + 1e-8).all()


def test_two_answers_leave_next_to_nothing_where_all_points_count():
    # The best weights are within, known beforehand: exchanges between pairs alone would leave a thousandth.
    rng, (m, p, d) = np.random.default_rng(0), (50, 4, 8)
    along, best = rng.normal(size=(m, 1, d)) + rng.normal(size=(m, p, d)), 0.9 * rng.dirichlet(np.ones(p), m).T
    slope, nothing, ones = -np.einsum("mpd,mqd,qm->pm", along, along, best), np.zeros((p, m)), np.ones(m)
    given, a = given_of(along, slope, ones), tuple(jnp.zeros_like(slope))
    for _ in range(2):
        a = answer(given, tuple(jnp.asarray(nothing)), a)
    gained, most = (-np.sum(value(along, slope, nothing, ones, weights)) for weights in (np.stack(a), best))
    assert most - gained <= 1e-5 * most


@pytest.mark.parametrize("twin", ["the same", "nearly the same", "where it stands", "nearly where it stands"])
@pytest.mark.slow
def test_points_that_rounding_tells_apart_keep_still(twin):
    # In float32 the weights of such points are noise, but nobody moves by them, nor by what they take from others.
    along, slope, asked, stiffness = problem(3, 4, m=200)
    near = {"nearly the same": 1e-6, "nearly where it stands": 1e-6}.get(twin, 0.0)
    noise = near * np.random.default_rng(0).normal(size=along[:, 1].shape)
    where = "stands" in twin
    along[:, 1] = noise if where else along[:, 0] + noise
    pull = np.einsum("md,md->m", noise, np.ones_like(noise))
    slope[1], asked[1] = (pull, 0.0) if where else (slope[0] + pull, asked[0])
    given, a = given_of(along, slope, stiffness, "float32"), tuple(jnp.zeros_like(jnp.asarray(slope, jnp.float32)))
    moved = []
    for _ in range(12):
        a = answer(given, tuple(jnp.asarray(asked, jnp.float32)), a)
        moved.append(np.einsum("pm,mpd->md", np.asarray(a, float), along))
    change = np.linalg.norm(moved[-1] - moved[-2], axis=1) / np.linalg.norm(along, axis=(1, 2))
    assert change.max() <= 1e-3
    best = least(along, slope, asked, stiffness)
    lost = value(along, slope, asked, stiffness, a) - best
    assert lost.max() <= 1e-4 * (1 - best).max()


@pytest.mark.parametrize("near", [0.0, 1e-7, pytest.param(1e-6, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_points_that_are_all_the_same_are_numbers(near):
    # What is left between them is rounding, which must not be taken for lengths.
    rng = np.random.default_rng(0)
    along = np.repeat(rng.normal(size=(500, 1, 3)), 4, axis=1) * (1.0 + near * rng.normal(size=(500, 4, 3)))
    slope = -np.sum(along**2, axis=2).T * rng.uniform(0.5, 3.0, 500)
    given, asked = given_of(along, slope, np.ones(500), "float32"), tuple(jnp.zeros((4, 500), jnp.float32))
    a = tuple(jnp.full((4, 500), 0.25, jnp.float32))
    for _ in range(5):
        a = jax.jit(answer)(given, asked, a)
        assert np.isfinite(np.stack(a)).all()
    lost = value(along, slope, np.zeros_like(slope), np.ones(500), a) - least(along, slope, 0 * slope, np.ones(500))
    assert lost.max() <= 1e-4


def test_nodes_that_did_not_answer_have_no_weights():
    along, slope, asked, stiffness = problem(0, 3)
    given = given_of(along, slope, stiffness).replace(free=jnp.asarray([0.0, 1.0] * 3))
    a = np.stack(answer(given, tuple(jnp.asarray(asked)), tuple(jnp.zeros_like(slope))))
    assert (a[:, ::2] == 0).all()
    assert a[:, 1::2].sum() > 0
