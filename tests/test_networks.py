"""Networks: what they compute, and what convolutions become."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj


def test_lateral_connections_are_equation_4(key):
    model = mj.networks.Lateral(5, 3, (4, 6))
    params = jax.tree.map(
        lambda a: jax.random.normal(jax.random.fold_in(key, a.size), a.shape), model.init(jax.random.key(1))
    )
    x = np.random.default_rng(0).normal(size=(7, 5))

    def relu(a):
        return np.maximum(a, 0)

    with jax.numpy_rank_promotion("allow"):
        out = model.apply(params, jnp.asarray(x))
    (theta1, b1), (theta2, b2) = jax.tree.map(np.asarray, params.shared)
    server = [x, relu(x @ theta1 + b1)]
    server.append(relu(server[1] @ theta2 + b2))
    client = x
    for i, (w, u, alpha, b, c) in enumerate(params.private):
        h = (
            client @ np.asarray(w)
            + np.asarray(alpha) * (relu(server[i] + np.asarray(b)) @ np.asarray(u))
            + np.asarray(c)
        )
        client = relu(h) if i < 2 else h
    np.testing.assert_allclose(out, client, rtol=1e-10)


@pytest.mark.parametrize("model", [mj.networks.MLP(5, 3, (4,), dropout=0.4), mj.networks.Lateral(5, 3, dropout=0.4)])
def test_dropout_is_for_training_and_keeps_the_mean(model, key):
    params, x = model.init(key), jnp.ones((2000, 5))
    with jax.numpy_rank_promotion("allow"):
        plain, again = model.apply(params, x), model.apply(params, x)
        dropped = model.apply(params, x, key)
    np.testing.assert_array_equal(plain, again)
    assert np.std(np.asarray(dropped), axis=0).min() > 0
    h = mj.networks.dropped(x, 0.4, key, 0)
    assert set(np.unique(h).round(6)) == {0.0, round(1 / 0.6, 6)}
    np.testing.assert_allclose(h.mean(), 1.0, atol=0.03)


def test_a_cnn_sees_pictures(key):
    model = mj.networks.CNN((8, 12, 2), 3, (4, 5), 6)
    params = model.init(key)
    with jax.numpy_rank_promotion("allow"):
        assert model.apply(params, jnp.ones((2, 8 * 12 * 2))).shape == (2, 3)
    with pytest.raises(ValueError, match="shape must be"):
        mj.networks.CNN((2, 12, 2))


@pytest.mark.parametrize("shape", [(5, 5, 2, 3), (4, 3, 1, 2), (1, 1, 3, 1)])
def test_a_convolution_is_a_product_of_patches(shape):
    rng = np.random.default_rng(0)
    h, w = jnp.asarray(rng.normal(size=(2, 7, 6, shape[2]))), jnp.asarray(rng.normal(size=shape))

    def plain(h, w):
        return jax.lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    product = mj.networks.convolved_by_product
    np.testing.assert_allclose(product(h, w), plain(h, w), rtol=1e-12, atol=1e-12)
    slopes = (jax.grad(lambda h, w, f=f: (f(h, w) ** 3).sum(), argnums=(0, 1))(h, w) for f in (product, plain))
    chex.assert_trees_all_close(*slopes, rtol=1e-10, atol=1e-10)
