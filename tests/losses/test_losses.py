"""Every loss against brute force, and from_scalar against the closed forms."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.test_util import check_grads

import mocha_jax as mj
from tests import zoo
from tests.zoo import LOSSES

numbers = st.floats(-5, 5, allow_nan=False, width=32)
curvatures = st.one_of(st.just(0.0), st.floats(1e-6, 1e3))
shares = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
each_loss = pytest.mark.parametrize("name", LOSSES)


def label(loss, raw):
    return (1.0 if raw >= 0 else -1.0) if loss.binary else raw


def feasible(loss, y, share):
    """A dual feasible point: `share` of the way along the (clipped) dual interval."""
    low, high = (np.clip(float(b), -20, 20) for b in loss.dual_bounds(jnp.asarray(y)))
    return float(np.clip(low + share * (high - low), low, high))


def dual_objective(loss, b, beta, g, y, kappa):
    return loss.conjugate(b, y) + (b - beta) * g + 0.5 * kappa * (b - beta) ** 2


@each_loss
@given(y=numbers, share=shares)
def test_conjugate_is_the_supremum(name, y, share):
    loss = LOSSES[name]
    y = label(loss, y)
    beta = feasible(loss, y, share)
    kinks = np.array([y, 1.0, -1.0, y - 0.2, y + 0.2])  # where a grid would miss the top

    def best(z):
        values = np.asarray(-beta * z - loss.value(jnp.asarray(z), jnp.full(z.shape, y)))
        return z[values.argmax()], values.max()

    # The function is concave: its top lies within a step of the largest value on a grid.
    top, _ = best(np.linspace(-200.0, 200.0, 8_001))
    brute = best(np.concatenate([top + np.linspace(-0.05, 0.05, 2_001), kinks]))[1]
    np.testing.assert_allclose(loss.conjugate(jnp.asarray(beta), jnp.asarray(y)), brute, atol=1e-5)


@each_loss
def test_conjugate_is_infinite_outside_the_dual_domain(name):
    loss = LOSSES[name]
    for y in (-1.0, 1.0):
        low, high = (float(b) for b in loss.dual_bounds(jnp.asarray(y)))
        for outside in (low - 1e-6, high + 1e-6):
            if np.isfinite(outside):
                assert loss.conjugate(jnp.asarray(outside), jnp.asarray(y)) == jnp.inf


@each_loss
@given(y=numbers, share=shares, g=numbers, kappa=curvatures)
def test_dual_step_is_the_exact_minimiser(name, y, share, g, kappa):
    loss = LOSSES[name]
    y = label(loss, y)
    beta = feasible(loss, y, share)
    new = float(loss.dual_step(*map(jnp.asarray, (beta, g, y, kappa))))
    low, high = (float(b) for b in loss.dual_bounds(jnp.asarray(y)))
    assert low <= new <= high
    here = float(dual_objective(loss, jnp.asarray(new), beta, g, jnp.asarray(y), kappa))
    others = jnp.clip(
        jnp.concatenate([new + jnp.linspace(-1, 1, 2001), new + jnp.linspace(-1e-3, 1e-3, 201)]), low, high
    )
    best = float(jnp.min(dual_objective(loss, others, beta, g, jnp.full_like(others, y), kappa)))
    assert here <= best + 1e-10 * (1.0 + abs(best))


@each_loss
@given(y=numbers, share=shares, z=st.floats(-50, 50, width=32))
def test_fenchel_young_is_its_definition_and_never_negative(name, y, share, z):
    loss = LOSSES[name]
    y = label(loss, y)
    beta = feasible(loss, y, share)
    z, beta, y = map(jnp.asarray, (z, beta, y))
    term = loss.fenchel_young(z, beta, y)
    assert term >= 0
    np.testing.assert_allclose(term, loss.value(z, y) + loss.conjugate(beta, y) + z * beta, atol=1e-9)


@each_loss
@given(y=numbers, z=numbers, kappa=st.floats(0.01, 100))
def test_fenchel_young_vanishes_at_the_dual_of_a_prediction(name, y, z, kappa):
    # After an exact step the new prediction g + kappa (b - beta) and b are dual to each other.
    loss = LOSSES[name]
    y = jnp.asarray(label(loss, y))
    beta = jnp.asarray(feasible(loss, y, 0.5))
    b = loss.dual_step(beta, jnp.asarray(z), y, jnp.asarray(kappa))
    at = z + kappa * (b - beta)
    np.testing.assert_allclose(loss.fenchel_young(at, b, y), 0.0, atol=1e-12 * (1 + kappa) ** 2)


@each_loss
def test_fenchel_young_keeps_its_digits_in_float32(name):
    # Near a dual pair the naive sum loses what is left of the gap; the product form does not.
    loss = LOSSES[name]
    loss = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), loss)
    rng = np.random.default_rng(0)
    y = jnp.asarray(np.sign(rng.normal(size=4000)), jnp.float32)
    z = jnp.asarray(3 * rng.normal(size=4000), jnp.float32)
    beta = loss.project(-loss.derivative(z, y) * (1 - jnp.float32(1e-3)), y)
    term = loss.fenchel_young(z, beta, y)
    wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), loss)
    true = wide.fenchel_young(*(jnp.asarray(a, jnp.float64) for a in (z, beta, y)))
    assert term.dtype == jnp.float32
    assert (term >= 0).all()
    np.testing.assert_allclose(np.sum(term, dtype=np.float64), np.sum(true), rtol=2e-4)


@each_loss
@given(y=numbers, shares=st.tuples(shares, shares), z=st.floats(-50, 50, width=32))
def test_the_change_of_fenchel_young_is_the_difference(name, y, shares, z):
    loss = LOSSES[name]
    y = label(loss, y)
    before, beta = (jnp.asarray(feasible(loss, y, share)) for share in shares)
    z, y = jnp.asarray(z), jnp.asarray(y)
    difference = loss.fenchel_young(z, beta, y) - loss.fenchel_young(z, before, y)
    np.testing.assert_allclose(loss.fenchel_young_change(z, before, beta, y), difference, atol=1e-9)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"logistic"}))
def test_small_changes_of_small_duals_count(name):
    # Where the regularizer is weak every dual is tiny, and each term is nearly that of no dual at all.
    loss = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), LOSSES[name])
    rng = np.random.default_rng(0)
    y = jnp.asarray(np.sign(rng.normal(size=4000)), jnp.float32)
    z = jnp.asarray(3 * rng.normal(size=4000), jnp.float32)
    before, beta = (loss.project(y * jnp.asarray(1e-6 * rng.random(4000), jnp.float32), y) for _ in range(2))
    change = loss.fenchel_young_change(z, before, beta, y)
    wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), loss)
    true = wide.fenchel_young_change(*(jnp.asarray(a, jnp.float64) for a in (z, before, beta, y)))
    assert change.dtype == jnp.float32
    np.testing.assert_allclose(change, true, rtol=1e-5, atol=1e-12)


@each_loss
def test_constants(name):
    """Smoothness and Lipschitz constants bound what is measured, and are attained nearly."""
    loss = LOSSES[name]
    z = jnp.linspace(-6, 6, 24_001)
    for y in (-1.0, 1.0):
        slope = loss.derivative(z, jnp.full_like(z, y))
        rise, curve = jnp.max(jnp.abs(slope)), jnp.max(jnp.abs(jnp.diff(slope))) / (z[1] - z[0])
        if loss.lipschitz is not None:
            assert 0.6 * loss.lipschitz <= rise <= loss.lipschitz + 1e-12
        if loss.smoothness is None:
            assert loss.mu == 0.0
            assert curve > 100
        else:
            np.testing.assert_allclose(curve, loss.smoothness, rtol=1e-3)
            np.testing.assert_allclose(loss.mu * loss.smoothness, 1.0)
        np.testing.assert_allclose(
            jnp.cumsum(slope)[-1] * (z[1] - z[0]),
            loss.value(z[-1], jnp.asarray(y)) - loss.value(z[0], jnp.asarray(y)),
            rtol=1e-3,
            atol=1e-2,
        )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("kappa", [0.0, 1e-30, 1e-3, 1.0, 30.0, 1e4, 1e8])
def test_logistic_step_reaches_rounding_for_any_curvature(kappa, dtype):
    loss = mj.losses.Logistic()
    g = jnp.linspace(-60, 60, 241).astype(dtype)
    for a in (0.0, 1e-6, 0.3, 1.0):
        new = loss.dual_step(jnp.full_like(g, a), g, jnp.ones_like(g), jnp.full_like(g, kappa))
        at = g + kappa * (new - dtype(a)).astype(dtype)
        # Optimality a = sigmoid(-p); measured in a, whose own rounding is amplified by kappa.
        error = jnp.abs(new - jax.nn.sigmoid(-at))
        assert float(jnp.max(error)) <= 40 * jnp.finfo(dtype).eps * max(1.0, kappa)
        assert ((new >= 0) & (new <= 1)).all()


@each_loss
def test_zero_curvature_takes_the_full_step_with_finite_gradients(name):
    loss = LOSSES[name]
    y = jnp.asarray(1.0)
    step = lambda g, kappa: loss.dual_step(jnp.asarray(0.25), g, y, kappa)  # noqa: E731
    np.testing.assert_allclose(step(jnp.asarray(-1.5), jnp.asarray(0.0)), -loss.derivative(jnp.asarray(-1.5), y))
    assert np.isfinite(jax.jit(jax.grad(step, argnums=(0, 1)))(jnp.asarray(-1.5), jnp.asarray(0.0))).all()


def test_smooth_steps_have_right_derivatives():
    for name in ("logistic", "squared", "smoothed_hinge", "huber", "squared_hinge"):
        loss = LOSSES[name]
        check_grads(
            lambda beta, g, kappa, loss=loss: loss.dual_step(beta, g, jnp.asarray(1.0), kappa),
            (jnp.asarray(0.3), jnp.asarray(0.2), jnp.asarray(0.8)), order=1, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6,
        )  # fmt: skip


SCALARS = {
    "hinge": lambda z, y: jnp.maximum(1 - y * z, 0.0),
    "logistic": lambda z, y: jnp.logaddexp(0.0, -y * z),
    "squared": lambda z, y: 0.5 * (z - y) ** 2,
    "absolute": lambda z, y: jnp.abs(z - y),
    "huber": lambda z, y: jnp.where(jnp.abs(z - y) <= 0.7, 0.5 * (z - y) ** 2, 0.7 * jnp.abs(z - y) - 0.245),
    "quantile": lambda z, y: jnp.maximum(0.3 * (y - z), -0.7 * (y - z)),
}


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.thin(2)
def test_from_scalar_agrees_with_the_closed_forms(name):
    exact = LOSSES[name]
    loss = mj.losses.from_scalar(SCALARS[name], binary=exact.binary)
    rng = np.random.default_rng(1)
    y = jnp.asarray(np.sign(rng.normal(size=300)) if exact.binary else rng.normal(size=300))
    g = jnp.asarray(3 * rng.normal(size=300))
    kappa = jnp.asarray(np.where(rng.random(300) < 0.1, 0.0, 10 ** rng.uniform(-3, 2, size=300)))
    low, high = exact.dual_bounds(y)
    beta = jnp.clip(jnp.asarray(rng.uniform(-1, 1, size=300)), low, high)

    @jax.jit
    def found(loss):
        return loss.dual_step(beta, g, y, kappa), loss.conjugate(beta, y), loss.fenchel_young(g, beta, y)

    for a, b, atol in zip(found(loss), found(exact), (1e-9, 1e-8, 1e-8), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


def test_a_scalar_function_that_overflows_is_refused():
    with pytest.raises(ValueError, match="logaddexp"):
        mj.losses.from_scalar(lambda z, y: jnp.log1p(jnp.exp(-y * z)), binary=True)


def square(z, y):
    return (z - y) ** 2


NO_LOSSES: dict[str, tuple[Any, str]] = {
    "concave": (lambda: mj.losses.from_scalar(lambda z, y: -((z - y) ** 2)), "fn must be convex in z, but its slope falls"),
    "redescending": (lambda: mj.losses.from_scalar(lambda z, y: jnp.log1p((z - y) ** 2)), "fn must be convex"),
    "convex for one label": (
        lambda: mj.losses.from_scalar(lambda z, y: -y * jax.nn.softplus(z), binary=True), "fn must be convex .* for y = 1"
    ),
    "negative smoothness": (lambda: mj.losses.from_scalar(square, smoothness=-1.0), "smoothness must be finite and > 0"),
    "too smooth": (lambda: mj.losses.from_scalar(square, smoothness=1.0), "smoothness must bound .* by 2 per unit .* got 1"),
    "word": (lambda: mj.losses.from_scalar(square, lipschitz="abc"), "lipschitz must be a number"),  # type: ignore[arg-type]
    "not Lipschitz": (lambda: mj.losses.from_scalar(square, lipschitz=3.0), "lipschitz must bound the slopes of fn"),
    "flag": (lambda: mj.losses.from_scalar(square, binary="abc"), "binary must be True or False"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", NO_LOSSES)
def test_what_is_said_of_a_function_is_looked_at(name):
    make, message = NO_LOSSES[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.thin(3)
def test_what_is_true_of_a_function_is_accepted(name):
    exact: Any = LOSSES[name]
    with jax.enable_x64(False):
        loss = mj.losses.from_scalar(
            SCALARS[name], smoothness=exact.smoothness, lipschitz=exact.lipschitz, binary=exact.binary
        )
    assert loss.smoothness == exact.smoothness


NUMBERS = np.linspace(0.2, 0.9, 6)


@pytest.mark.parametrize(
    "make", [mj.losses.SmoothedHinge, mj.losses.Huber, mj.losses.EpsilonInsensitive, mj.losses.Quantile]
)
def test_a_loss_is_the_same_for_all_samples(make):
    data, independent = zoo.data(m=3, low=6, high=6), mj.regularizers.Independent(1.0)
    loss = make(NUMBERS)
    with pytest.raises(ValueError, match=r"must be a single number, got shape \(6,\)"):
        mj.Problem(data, loss, independent)
    with pytest.raises(ValueError, match="must be a single number"):
        mj.metrics.mean_loss(jnp.zeros((3, 4)), data, loss)
    each = jax.vmap(lambda loss: mj.objective(mj.Problem(data, loss, independent), jnp.zeros((3, 4))))(loss)
    assert each.shape == (6,)


def test_tiny_curvature_keeps_gradients_finite():
    for name in ("hinge", "absolute", "epsilon_insensitive", "quantile"):
        loss = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), LOSSES[name])
        args = [jnp.asarray(v, jnp.float32) for v in (0.25, -1.5, 1.0, 1e-22)]
        assert np.isfinite(jax.grad(loss.dual_step, argnums=(0, 1, 3))(*args)).all()


def test_bad_parameters_are_refused():
    for make in (
        lambda: mj.losses.SmoothedHinge(0.0), lambda: mj.losses.EpsilonInsensitive(-1.0), lambda: mj.losses.Huber(np.nan),
        lambda: mj.losses.Quantile(1.0), lambda: mj.losses.Quantile(0.0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must be"):
            make()
