"""Networks: what they compute."""

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
