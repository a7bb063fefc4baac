"""Singular values and vectors of tall matrices, as exact as LAPACK's and without a factorisation of many rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mocha_jax import regularizers
from mocha_jax._numerics import tall
from mocha_jax.coupling import LowRank
from mocha_jax.spectral import contract, left_spectral_map, singular_values, spectral_map

RNG = np.random.default_rng(0)
ROWS, COLUMNS = 400, 12
EPS: dict[Any, float] = {dtype: float(np.finfo(dtype).eps) for dtype in (np.float32, np.float64)}
each_dtype = pytest.mark.parametrize("dtype", EPS)


def with_values(s, rows=ROWS):
    """A matrix of these singular values."""
    u, v = (np.linalg.qr(RNG.normal(size=(k, len(s))))[0] for k in (rows, len(s)))
    return (u * np.asarray(s)) @ v.T


def first(count, rest=0.0):
    return np.where(np.arange(COLUMNS) < count, 1.0, rest)


MATRICES = {
    "flat": with_values(np.ones(COLUMNS)),
    "normal": RNG.normal(size=(ROWS, COLUMNS)),
    "graded": with_values(np.logspace(0, -5, COLUMNS)),
    "graded into the noise": with_values(np.logspace(0, -20, COLUMNS)),
    "rank four": with_values(first(4)),
    "rank four and near half of the digits": with_values(np.where(np.arange(COLUMNS) < 8, first(4, 3e-4), 0.0)),
    "one large": with_values(first(1, 1e-4)),
    "repeated": with_values(np.repeat([3.0, 2.0, 1.0], COLUMNS // 3)),
    "rows alike": np.tile(RNG.normal(size=(1, COLUMNS)), (ROWS, 1)),
    "ones": np.ones((ROWS, COLUMNS)),
    "columns twice": np.repeat(RNG.normal(size=(ROWS, COLUMNS // 2)), 2, axis=1),
    "columns of zeros": np.where(np.arange(COLUMNS) < 5, RNG.normal(size=(ROWS, COLUMNS)), 0.0),
    "few rows": np.where(np.arange(ROWS)[:, None] < 5, RNG.normal(size=(ROWS, COLUMNS)), 0.0),
    "one column": RNG.normal(size=(ROWS, 1)),
    "zero": np.zeros((ROWS, COLUMNS)),
    "as many rows as LAPACK is quicker for": RNG.normal(size=(8 * COLUMNS - 1, COLUMNS)),
    "one row more": RNG.normal(size=(8 * COLUMNS, COLUMNS)),
}
each_matrix = pytest.mark.parametrize("name", MATRICES)

# Roundings of the largest singular value beyond those of LAPACK. Its square is a sum over rows, which is off by up to
# half a rounding a row where a processor adds one row after another, and the root by half of that. Where rows differ
# most of it averages out; equal terms are all rounded to the same side while a sum stays between two powers of two.
OF_THE_SUM = dict.fromkeys(("rows alike", "ones"), ROWS / 4)
factors = jax.jit(tall.factors)


def shrunk(s, share):
    return jnp.maximum(s - share * jnp.max(s), 0.0)


def smooth(s, size):
    return s / jnp.sqrt(s**2 + size**2) * (1.0 + jnp.sum(s**2) / size)


def test_equal_terms_one_after_another_are_off_by_more_than_others():
    """What `OF_THE_SUM` is for."""
    alike = np.tile(np.linspace(0.5, 1.0, 64, dtype=np.float32), (ROWS, 1))
    others = np.square(MATRICES["normal"]).astype(np.float32)
    for terms, low, high in ((alike, 24.0, ROWS / 2), (others, 0.0, 12.0)):
        off = np.cumsum(terms, axis=0)[-1] / terms.sum(axis=0, dtype=float) - 1.0
        assert low < np.abs(off).max() / EPS[np.float32] < high


@each_dtype
@each_matrix
@pytest.mark.thin(5)
def test_as_exact_as_lapack(name, dtype):
    w = MATRICES[name].astype(dtype)
    u, s, vt = np.linalg.svd(w.astype(float), full_matrices=False)
    unit = EPS[dtype] * s[0]
    if dtype == np.float64:  # no exact reference: it is off by as much
        unit *= 2.0
    of_lapack = np.asarray(jnp.linalg.svd(w, full_matrices=False)[1], float)
    bound = max(8.0 * unit, 2.0 * np.abs(of_lapack - s).max()) + OF_THE_SUM.get(name, 0.0) * unit
    found = factors(w)
    for each in (found.s, singular_values(w), singular_values(w.T)):
        assert np.abs(np.asarray(each, float) - s).max() <= bound
        assert (np.diff(each) <= 0).all()
    left = np.asarray(found.basis, float) @ np.asarray(found.inner, float)
    right = np.asarray(found.vt, float)
    assert np.linalg.norm((left * np.asarray(found.s, float)) @ right - w, 2) <= 32.0 * unit
    np.testing.assert_allclose(right @ right.T, np.eye(len(s)), atol=64.0 * EPS[dtype])
    # Left vectors are orthogonal, and of length 1 but where there is nothing.
    lengths = np.linalg.norm(left, axis=0)
    assert (lengths <= 1.01).all()
    told = np.asarray(found.s) > 128.0 * unit
    np.testing.assert_allclose(left[:, told].T @ left[:, told], np.eye(told.sum()), atol=0.01)
    large = np.asarray(found.s) > 0.01 * s[0]
    np.testing.assert_allclose(left[:, large].T @ left[:, large], np.eye(large.sum()), atol=64.0 * EPS[dtype])
    share = dtype(0.1)
    prox = (u * np.maximum(s - share * s[0], 0.0)) @ vt
    for mapped in (spectral_map(shrunk, w, share), spectral_map(shrunk, w.T, share).T):
        assert np.linalg.norm(np.asarray(mapped, float) - prox, 2) <= 32.0 * unit


@each_dtype
@pytest.mark.parametrize("name", ["normal", "rank four", "graded", "columns of zeros"])
@pytest.mark.parametrize("exponent", [-80, -40, 40, 100])
def test_a_power_of_two_changes_no_digit(name, exponent, dtype):
    w = MATRICES[name].astype(dtype)
    scale = dtype(2.0) ** dtype(exponent)
    plain, scaled = factors(w), factors(w * scale)
    np.testing.assert_array_equal(scaled.s / scale, plain.s)
    np.testing.assert_array_equal(scaled.vt, plain.vt)


@pytest.mark.parametrize("size", [1e-34, 1e-30, 1e30, 1e37])
def test_any_size_of_float32(size):
    w = (MATRICES["normal"] * size).astype(np.float32)
    s = np.linalg.svd(w.astype(float), compute_uv=False)
    np.testing.assert_allclose(factors(w).s, s, rtol=1e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_stays_none(wrong):
    w = MATRICES["normal"].copy()
    w[17, 3] = wrong
    assert np.isnan(singular_values(w)).all()
    assert np.isnan(spectral_map(shrunk, w, 0.1)).all()


def test_nothing_of_zero_but_zero():
    found = factors(MATRICES["zero"])
    assert not np.any(found.s)
    assert np.isfinite(found.inner).all()
    assert not np.any(spectral_map(shrunk, MATRICES["zero"], 0.1))


@pytest.mark.parametrize("name", [name for name in MATRICES if name != "graded into the noise"])
@pytest.mark.thin(3)
def test_derivatives_of_smooth_functions(name):
    """Against those of the same function of the Gram matrix, by central differences."""
    w, size = MATRICES[name], 0.7
    dw = RNG.normal(size=w.shape)
    step = 1e-6

    def mapped(w):
        u, s, vt = np.linalg.svd(w, full_matrices=False)
        return (u * (s / np.sqrt(s**2 + size**2) * (1.0 + np.sum(s**2) / size))) @ vt

    difference = (mapped(w + step * dw) - mapped(w - step * dw)) / (2.0 * step)
    value, change = jax.jvp(lambda w: spectral_map(smooth, w, size), (w,), (dw,))
    np.testing.assert_allclose(value, mapped(w), atol=1e-12 * (1.0 + np.abs(mapped(w)).max()))
    np.testing.assert_allclose(change, difference, atol=1e-7 * np.abs(difference).max())
    pulled = jax.vjp(lambda w: spectral_map(smooth, w.T, size), w)[1](dw.T)[0]
    np.testing.assert_allclose(np.sum(pulled * dw), np.sum(dw * change), rtol=1e-9)


@pytest.mark.parametrize("name", ["normal", "repeated", "rank four", "zero", "one column"])
@pytest.mark.slow
def test_derivatives_in_float32_are_those_of_float64(name):
    single, double = MATRICES[name].astype(np.float32), MATRICES[name]
    dw = RNG.normal(size=double.shape)
    sums = lambda w: jnp.sum(jnp.sqrt(singular_values(w) ** 2 + w.dtype.type(0.1)))  # noqa: E731
    for function in (lambda w: spectral_map(smooth, w, w.dtype.type(0.7)), sums):
        exact = jax.jvp(function, (double,), (dw,))[1]
        found = jax.jvp(function, (single,), (dw.astype(np.float32),))[1]
        np.testing.assert_allclose(found, exact, atol=1e-4 * np.abs(exact).max())


def test_a_function_of_the_gram_matrix_of_rows():
    w, even = MATRICES["normal"].T, lambda s, t: s**2 / (s**2 + t)
    dw = RNG.normal(size=w.shape)
    mapped = lambda w: w @ w.T @ np.linalg.inv(w @ w.T + 300.0 * np.eye(len(w)))  # noqa: E731
    value, change = jax.jvp(lambda w: left_spectral_map(even, w, 300.0), (w,), (dw,))
    np.testing.assert_allclose(value, mapped(w), atol=1e-12)
    np.testing.assert_allclose(change, (mapped(w + 1e-6 * dw) - mapped(w - 1e-6 * dw)) / 2e-6, atol=1e-8)
    with pytest.raises(ValueError, match="at most as many rows as columns"):
        left_spectral_map(even, w.T, 300.0)


@pytest.mark.extended
@each_dtype
@pytest.mark.parametrize("regularizer", [regularizers.Probabilistic(0.3, 2.0), regularizers.Clustered(0.3, 0.2, 2)])
@pytest.mark.parametrize("name", ["normal", "rank four", "graded", "rows alike", "columns twice"])
@pytest.mark.thin(2)
def test_the_value_at_the_best_relation_is_the_value(name, regularizer, dtype):
    w = MATRICES[name].astype(dtype)
    regularizer = jax.tree.map(lambda a: jnp.asarray(a, dtype), regularizer)
    record = regularizer.update_relation(None, w)
    np.testing.assert_allclose(regularizer.value(w, record), regularizer.value(w), rtol=256.0 * EPS[dtype])


@pytest.mark.parametrize("base", [0.3, 1e-3])
def test_energy_and_gradient_of_a_low_rank_operator(base):
    """W has parts along all of F, those of noise too, and beside it."""
    factor, w = MATRICES["rank four and near half of the digits"], jnp.asarray(RNG.normal(size=(ROWS, 5)))
    exact = np.linalg.solve(base * np.eye(ROWS) + factor @ factor.T, w)
    for dtype in EPS:
        operator = LowRank(jnp.asarray(base, dtype), jnp.asarray(factor, dtype))
        np.testing.assert_allclose(operator.energy(w.astype(dtype)), 0.5 * np.sum(w * exact), rtol=64.0 * EPS[dtype])
        atol = 64.0 * EPS[dtype] * np.abs(exact).max()
        np.testing.assert_allclose(operator.gradient(w.astype(dtype)), exact, atol=atol)


@pytest.mark.slow
def test_a_singular_operator_has_a_range():
    factor, w = MATRICES["rank four"], jnp.asarray(RNG.normal(size=(ROWS, 5)))
    operator = LowRank(jnp.asarray(0.0), jnp.asarray(factor))
    assert operator.energy(w) == np.inf
    inside = operator.project_to_range(w)
    np.testing.assert_allclose(inside, factor @ np.linalg.pinv(factor, rcond=1e-9) @ w, atol=1e-12)
    exact = np.linalg.pinv(factor @ factor.T, rcond=1e-9) @ w
    np.testing.assert_allclose(operator.energy(inside), 0.5 * np.sum(w * exact), rtol=1e-10)
    np.testing.assert_allclose(operator.gradient(inside), exact, atol=1e-10)


contracted = jax.jit(lambda w, share, basis: contract(shrunk, w, share, basis))


def basis_of(w):
    return tall.basis_of(jnp.asarray(w), jnp.ones((), w.dtype))


def exact_prox(w, share):
    u, s, vt = np.linalg.svd(w.astype(float), full_matrices=False)
    return (u * np.maximum(s - share * s[0], 0.0)) @ vt, s


@each_dtype
@each_matrix
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.1])
@pytest.mark.thin(10)
def test_a_contraction_as_exact_as_lapack_from_any_basis(name, share, dtype):
    """From its own basis, from that of a matrix nearby, and the third time from one that has nothing to do with it."""
    w, share = MATRICES[name].astype(dtype), dtype(share)
    prox, s = exact_prox(w, share)
    near = (w + 1e-3 * s[0] / np.sqrt(w.size) * RNG.normal(size=w.shape)).astype(dtype)
    basis = basis_of(RNG.normal(size=w.shape).astype(dtype))
    for _ in range(3):
        found = contracted(w, share, basis)
        assert np.isfinite(found.matrix).all()
        basis = found.basis
    unit = EPS[dtype] * s[0]
    hidden = 8.0 * np.sqrt(EPS[dtype]) * 1e-3 * s[0]  # what cannot be told from 0 in a basis that is off by so much
    both = [(found, 0.0), (contracted(w, share, basis_of(w)), 0.0), (contracted(w, share, basis_of(near)), hidden)]
    for found, more in both:
        assert np.linalg.norm(np.asarray(found.matrix, float) - prox, 2) <= 64.0 * unit + more
        atol = (12.0 + OF_THE_SUM.get(name, 0.0)) * unit + more + 1e-11 * (s[0] == 0)
        np.testing.assert_allclose(found.of, s, atol=atol)
        np.testing.assert_allclose(np.sum(found.values**2), np.sum(prox**2), rtol=1e-5, atol=1e-20)
        np.testing.assert_allclose(found.basis.vectors.T @ found.basis.vectors, np.eye(len(s)), atol=64.0 * EPS[dtype])


def test_after_nothing_any_matrix_of_the_usual_size():
    zero, w = np.zeros((ROWS, COLUMNS), np.float32), MATRICES["normal"].astype(np.float32)
    for usual in (1e-25, 1e25):
        basis = tall.basis_of(jnp.asarray(zero), jnp.asarray(usual, np.float32))
        for _ in range(5):
            found = contracted(zero, np.float32(0.1), basis)
            assert not np.any(found.matrix)
            basis = found.basis
        for size in (1e-6 * usual, 1e6 * usual):
            found = contracted((size * w).astype(np.float32), np.float32(0.1), basis)
            prox, s = exact_prox(size * w, 0.1)
            np.testing.assert_allclose(found.matrix, prox, atol=1e-6 * s[0])


@pytest.mark.parametrize("name", [name for name in MATRICES if name != "graded into the noise"])
@pytest.mark.thin(1)
def test_derivatives_of_a_contraction_are_those_of_the_map(name):
    w, dw = MATRICES[name], RNG.normal(size=MATRICES[name].shape)
    damped = lambda s, size: s**3 / (s**2 + size**2)  # noqa: E731
    exact = jax.jvp(lambda w, size: spectral_map(damped, w, size), (w, 0.7), (dw, 1.0))
    basis = basis_of(w + RNG.normal(size=w.shape))
    found = jax.jvp(lambda w, size, b: contract(damped, w, size, b).matrix, (w, 0.7, basis), (dw, 1.0, basis))
    np.testing.assert_allclose(found[1], exact[1], rtol=1e-9, atol=1e-9 * np.abs(exact[1]).max())
    np.testing.assert_allclose(found[0], exact[0], atol=1e-6 * np.abs(exact[0]).max())
