"""The d x d work of a contraction as one kernel by Mosaic, interpreted, against NumPy in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import mocha_jax as mj
from mocha_jax._numerics import tall, tall_gpu
from mocha_jax.regularizers._singular_values import _prox_values, _prox_values_by_sums
from mocha_jax.spectral import contract
from tests.node.test_kernels import MOSAIC, custom_calls

PARAMS: Any = getattr(plgpu, "InterpretGPUParams", None)
interpreted = pytest.mark.skipif(PARAMS is None, reason="this version of JAX does not interpret Mosaic on a CPU")
RNG = np.random.default_rng(0)
ROWS, COLUMNS = 200, 12
EPS = float(np.finfo(np.float32).eps)
SHARE = 0.01


def with_values(s):
    u, v = (np.linalg.qr(RNG.normal(size=(k, len(s))))[0] for k in (ROWS, len(s)))
    return (u * np.asarray(s)) @ v.T


MATRICES = {
    "normal": RNG.normal(size=(ROWS, COLUMNS)),
    "graded": with_values(np.logspace(0, -5, COLUMNS)),
    "rank four": with_values(np.where(np.arange(COLUMNS) < 4, 1.0, 0.0)),
    "repeated": with_values(np.repeat([3.0, 2.0, 1.0], COLUMNS // 3)),
    "columns twice": np.repeat(RNG.normal(size=(ROWS, COLUMNS // 2)), 2, axis=1),
    "columns of zeros": np.where(np.arange(COLUMNS) < 5, RNG.normal(size=(ROWS, COLUMNS)), 0.0),
    "zero": np.zeros((ROWS, COLUMNS)),
}


def shrunk(s, share):
    return jnp.maximum(s - share * jnp.max(s), 0.0)


@jax.jit
def kernel(w, share, basis):
    gram = tall._gram(tall._along(w, basis))
    race_free = PARAMS(detect_races=True)
    s, vt, sizes, values, inner = tall_gpu.small_work(
        gram, basis, tall._least(w.dtype), shrunk, share, interpret=race_free
    )
    return tall.Contraction(s, values, inner, tall.Basis(vt.T, sizes, basis.usual))


def basis_of(w):
    return tall.basis_of(jnp.asarray(w), jnp.ones((), w.dtype))


@pytest.mark.extended
@interpreted
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.thin(1)
def test_as_exact_as_numpy_from_the_basis_of_any_matrix(name):
    """After three times from a basis that has nothing to do with it, and from that of a matrix nearby."""
    w = MATRICES[name].astype(np.float32)
    u, s, vt = np.linalg.svd(w.astype(float), full_matrices=False)
    prox = (u * np.maximum(s - SHARE * s[0], 0.0)) @ vt
    near = (w + 1e-3 * s[0] / np.sqrt(w.size) * RNG.normal(size=w.shape)).astype(np.float32)
    other = basis_of(RNG.normal(size=w.shape).astype(np.float32))
    for _ in range(2):
        other = kernel(w, np.float32(SHARE), other).basis
    unit, hidden = EPS * s[0], 8.0 * np.sqrt(EPS) * 1e-3 * s[0]  # see `test_tall`
    for basis, more in ((other, 0.0), (basis_of(near), hidden)):
        found = kernel(w, np.float32(SHARE), basis)
        assert (np.diff(found.s) <= EPS * s[0]).all()  # but for the last rounding of a root
        np.testing.assert_allclose(found.s, s, atol=12.0 * unit + more + 1e-11 * (s[0] == 0))
        assert np.linalg.norm(w @ np.asarray(found.inner, float) - prox, 2) <= 64.0 * unit + more
        np.testing.assert_allclose(found.values, np.maximum(found.s - SHARE * found.s[0], 0.0), atol=2.0 * unit)
        vectors = np.asarray(found.basis.vectors, float)
        np.testing.assert_allclose(vectors.T @ vectors, np.eye(COLUMNS), atol=64.0 * EPS)
        size = jnp.where(tall.nothing(found.s, jnp.float32(1.0))[0], 1.0, found.s)
        np.testing.assert_array_equal(found.basis.sizes, tall._power_of_two(size))


@interpreted
@pytest.mark.parametrize("columns", [1, 16, 20])  # as many as the kernel has, fewer, and more
@pytest.mark.slow
def test_any_number_of_columns(columns):
    w = RNG.normal(size=(ROWS, columns)).astype(np.float32)
    s = np.linalg.svd(w.astype(float), compute_uv=False)
    found = kernel(1e-6 * w, np.float32(0.0), basis_of(w))  # much smaller than the size of the basis
    np.testing.assert_allclose(found.s, 1e-6 * s, rtol=32.0 * EPS)
    np.testing.assert_allclose(found.inner, np.eye(columns), atol=64.0 * EPS)


@interpreted
@pytest.mark.slow
def test_what_is_no_number_stays_none():
    w = MATRICES["normal"].astype(np.float32)
    basis = basis_of(w)
    w[17, 3] = np.nan
    found = kernel(w, np.float32(SHARE), basis)
    assert np.isnan(found.s).all()
    assert np.isnan(found.inner).all()


@interpreted
@pytest.mark.slow
def test_a_batch_equals_one_at_a_time():
    ws = np.stack([MATRICES[name] for name in ("normal", "graded")]).astype(np.float32)
    bases = [basis_of(w) for w in ws]
    shares = np.array([0.0, SHARE], np.float32)
    together = jax.jit(jax.vmap(kernel))(ws, shares, jax.tree.map(lambda *a: jnp.stack(a), *bases))
    alone = jax.tree.map(lambda *a: np.stack(a), *map(kernel, ws, shares, bases))
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("by_sums", [pytest.param(_prox_values_by_sums, marks=pytest.mark.extended), None])
@pytest.mark.parametrize(
    ("card", "columns", "dtype", "kernels"),
    [
        ("NVIDIA H100", 64, np.float32, 1),
        ("NVIDIA B200", 10, np.float32, 1),
        ("NVIDIA H100", 65, np.float32, 0),
        ("NVIDIA H100", 64, np.float64, 0),
        ("NVIDIA A100-SXM4-80GB", 64, np.float32, 0),
    ],
)
def test_the_card_and_the_matrix_decide(card, columns, dtype, kernels, by_sums):
    params = mj.regularizers.Probabilistic(jnp.asarray(0.3, dtype), jnp.asarray(2.0, dtype)), jnp.asarray(0.7, dtype)

    def step(w, vectors):
        basis = tall.Basis(vectors, w[0], w[0, 0])
        return contract(_prox_values, w, params, basis, by_sums)

    shapes = [jax.ShapeDtypeStruct((rows, columns), dtype) for rows in (1000, columns)]
    assert custom_calls("cuda", step, *shapes, call=MOSAIC, card=card) == kernels
    if kernels:
        assert custom_calls("cuda", step, *shapes, call="cusolver", card=card) == 0
        batch = [jax.ShapeDtypeStruct((3, *shape.shape), dtype) for shape in shapes]
        assert custom_calls("cuda", jax.vmap(step), *batch, call=MOSAIC, card=card) == 1


@pytest.mark.parametrize("sigma2", [jnp.inf, 2.0, 1e-6])
@pytest.mark.parametrize("lam", [1e-3, 0.3, 1e3])
def test_the_step_of_the_probabilistic_model_by_sums_is_that_of_sorted_values(lam, sigma2):
    regularizer = mj.regularizers.Probabilistic(jnp.asarray(lam), jnp.asarray(sigma2))
    sums = jax.jit(partial(_prox_values_by_sums, params=(regularizer, jnp.asarray(0.7))))
    for y in (np.zeros(9), np.ones(9), np.abs(RNG.normal(size=9)), np.logspace(0, -12, 9)):
        expected = regularizer.spectral_prox(jnp.asarray(-np.sort(-y)), jnp.asarray(0.7))
        order = RNG.permutation(16)
        found = sums(jnp.asarray(np.pad(y, (0, 7))[order]))
        np.testing.assert_allclose(-np.sort(-found)[:9], expected, rtol=1e-12, atol=1e-15)
