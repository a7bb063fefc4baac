"""Convolutions and pooling, against XLA's own and against differences."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import mocha_jax as mj
from mocha_jax.networks._pictures import convolved, convolved_by_product, convolved_quickly, pooled

WAYS = [convolved_by_product, convolved_quickly]
SHAPES = [(5, 5, 2, 3), (4, 3, 1, 2), (1, 1, 3, 1)]


def plain(h, w):
    return jax.lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def windows(h):
    return jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def sides(shape, *lead, dtype=np.float64):
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.normal(size=s), dtype) for s in ((*lead, 2, 7, 6, shape[2]), (*lead, *shape)))


def slopes(f, h, w):
    return jax.grad(lambda h, w: (f(h, w) ** 3).sum(), argnums=(0, 1))(h, w)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.thin(1)
def test_a_convolution_is_a_product_of_patches(shape, way):
    h, w = sides(shape)
    np.testing.assert_allclose(way(h, w), plain(h, w), rtol=1e-12, atol=1e-12)
    chex.assert_trees_all_close(slopes(way, h, w), slopes(plain, h, w), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_slopes_of_a_convolution_are_those_of_differences(shape):
    check_grads(lambda h, w: jnp.tanh(convolved_quickly(h, w)), tuple(sides(shape)), order=1, modes=["rev"])


def test_a_convolution_in_single_precision_is_that_of_double():
    exact = tuple(sides((5, 5, 4, 8)))
    single = tuple(sides((5, 5, 4, 8), dtype=np.float32))
    assert convolved(*single).dtype == np.float32
    np.testing.assert_allclose(convolved(*single), convolved(*exact), rtol=1e-4, atol=1e-4)
    chex.assert_trees_all_close(
        slopes(convolved, *single), jax.tree.map(np.float32, slopes(convolved, *exact)), rtol=1e-4, atol=0.05
    )


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
@pytest.mark.thin(2)
def test_convolutions_map_over_pictures_and_weights(axes):
    h, w = sides((5, 3, 2, 3), 3)
    given = tuple(a if axis == 0 else a[0] for a, axis in zip((h, w), axes, strict=True))
    for f in (lambda f: f, lambda f: lambda h, w: slopes(f, h, w)):
        found, expected = (jax.vmap(f(way), axes)(*given) for way in (convolved_quickly, plain))
        chex.assert_trees_all_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_slope_of_slopes_goes_along_a_direction():
    h, w = sides((5, 3, 2, 3))

    def along(f):
        return jax.jvp(lambda w: slopes(f, h, w), (w,), (jnp.ones_like(w),))[1]

    chex.assert_trees_all_close(along(convolved_quickly), along(plain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [(6, 8), (7, 5)])
@pytest.mark.thin(1)
def test_pooling_is_by_windows_and_of_equals_the_first_counts(size):
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.integers(0, 3, (4, *size, 3)), float)  # many are equal
    weight = jnp.asarray(rng.normal(size=windows(h).shape))
    np.testing.assert_array_equal(pooled(h), windows(h))
    found, expected = (jax.grad(lambda h, f=f: (weight * f(h)).sum())(h) for f in (pooled, windows))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_pooling_hides_no_nan(place):
    assert np.isnan(pooled(jnp.zeros((1, 2, 2, 1)).at[0, *place, 0].set(jnp.nan))).all()


@pytest.mark.slow
def test_a_cnn_in_single_precision_has_the_slopes_of_double(key):
    model = mj.networks.CNN((8, 8, 1), 3, (4, 6), 5)
    params, rng = model.init(key), np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(4, 64)))

    def slope(dtype):
        with jax.numpy_rank_promotion("allow"):
            return jax.grad(lambda p: (model.apply(p, x.astype(dtype)) ** 2).sum())(
                jax.tree.map(lambda a: a.astype(dtype), params)
            )

    chex.assert_trees_all_close(slope(np.float32), jax.tree.map(np.float32, slope(np.float64)), rtol=1e-3, atol=1e-4)
