"""Networks: what they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax.networks import _base


@pytest.mark.slow
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


@pytest.mark.slow
def test_lateral_connections_of_convolutions_are_equation_4(key):
    """Pixel by pixel, with loops over the window."""
    model = mj.networks.LateralCNN((5, 4, 2), 3, (2, 3), 4)
    params = jax.tree.map(
        lambda a: jax.random.normal(jax.random.fold_in(key, a.size), a.shape), model.init(jax.random.key(1))
    )
    x = np.random.default_rng(0).normal(size=(2, 5 * 4 * 2))

    def relu(a):
        return np.maximum(a, 0)

    def times(h, w):
        if w.ndim == 2:
            return h.reshape(len(h), -1) @ w
        out = np.zeros((*h.shape[:3], w.shape[3]))
        for i, j in np.ndindex(h.shape[1:3]):
            for p, q in np.ndindex(5, 5):
                a, b = i + p - 2, j + q - 2
                if 0 <= a < h.shape[1] and 0 <= b < h.shape[2]:
                    out[:, i, j] += h[:, a, b] @ w[p, q]
        return out

    def sigma(h, layer):
        if layer < 2:
            rows, columns = h.shape[1] // 2, h.shape[2] // 2
            h = h[:, : 2 * rows, : 2 * columns].reshape(len(h), rows, 2, columns, 2, -1).max((2, 4))
        return relu(h)

    with jax.numpy_rank_promotion("allow"):
        out = model.apply(params, jnp.asarray(x))
    shared, private = jax.tree.map(np.asarray, params)
    client = server = x.reshape(2, 5, 4, 2)
    for layer, (w, u, alpha, b, c) in enumerate(private):
        client = times(client, w) + alpha * times(relu((server if w.ndim > 2 else server.reshape(2, -1)) + b), u) + c
        if layer < 3:
            client = sigma(client, layer)
            server = sigma(times(server, shared[layer].w) + shared[layer].b, layer)
    np.testing.assert_allclose(out, client, rtol=1e-10)


@pytest.mark.slow
def test_a_lateral_cnn_is_trained_by_virtual(key):
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(3, 40, 36))
    ys = [(x.reshape(-1, 6, 6)[:, :3].mean((1, 2)) > 0).astype(int) for x in xs]  # whether the upper half is bright
    problem = mj.Prediction(mj.pack_tasks(list(xs), ys))
    model = mj.networks.LateralCNN((6, 6, 1), 2, (3, 4), 8)
    algorithm = mj.Virtual(model, optax.adam(0.01), local_epochs=10, samples=2, temperature=0.01)
    _, history = mj.run(problem, algorithm, key, num_rounds=6, record_every=6)
    assert float(history.error[-1]) < 0.2


@pytest.mark.parametrize("model", [mj.networks.MLP(5, 3, (4,), dropout=0.4), mj.networks.Lateral(5, 3, dropout=0.4)])
@pytest.mark.slow
def test_dropout_is_for_training_and_keeps_the_mean(model, key):
    params, x = model.init(key), jnp.ones((2000, 5))
    with jax.numpy_rank_promotion("allow"):
        plain, again = model.apply(params, x), model.apply(params, x)
        dropped = model.apply(params, x, key)
    np.testing.assert_array_equal(plain, again)
    assert np.std(np.asarray(dropped), axis=0).min() > 0
    h = _base.dropped(x, 0.4, key, 0)
    assert set(np.unique(h).round(6)) == {0.0, round(1 / 0.6, 6)}
    np.testing.assert_allclose(h.mean(), 1.0, atol=0.03)


def test_a_cnn_sees_pictures(key):
    model = mj.networks.CNN((8, 12, 2), 3, (4, 5), 6)
    params = model.init(key)
    with jax.numpy_rank_promotion("allow"):
        assert model.apply(params, jnp.ones((2, 8 * 12 * 2))).shape == (2, 3)
    with pytest.raises(ValueError, match="shape must be"):
        mj.networks.CNN((2, 12, 2))


def lstm(params, x):
    """The equations one position after the other, each gate by itself, in NumPy."""
    embedding, layers, (w_out, b_out) = jax.tree.map(np.asarray, params)
    states = [(np.zeros((len(x), len(u))), np.zeros((len(x), len(u)))) for _, u, _ in layers]
    out = []

    def sigmoid(a):
        return 1 / (1 + np.exp(-a))

    for s in range(x.shape[1]):
        e = np.array([embedding[k] if 0 <= k < len(embedding) else 0 * embedding[0] for k in x[:, s]])
        for j, (w, u, b) in enumerate(layers):
            (h, c), n = states[j], len(u)
            i, f, g, o = (
                e @ w[:, k * n : (k + 1) * n] + h @ u[:, k * n : (k + 1) * n] + b[k * n : (k + 1) * n] for k in range(4)
            )
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            e = sigmoid(o) * np.tanh(c)
            states[j] = e, c
        out.append(e @ w_out + b_out)
    return np.stack(out, 1)


@pytest.mark.parametrize(("layers", "outputs"), [(1, None), (2, 3)])
@pytest.mark.slow
def test_an_lstm_is_its_equations(layers, outputs, key):
    model = mj.networks.LSTM(5, embedding=3, hidden=4, layers=layers, outputs=outputs)
    params = model.init(key)
    assert [layer.b.tolist() for layer in params[1]] == [[0.0] * 4 + [1.0] * 4 + [0.0] * 8] * layers
    params = jax.tree.map(lambda a: a + 0.3 * jax.random.normal(jax.random.fold_in(key, a.size), a.shape), params)
    x = np.random.default_rng(0).integers(-1, 6, (7, 9))
    with jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(model.apply(params, jnp.asarray(x, float)), lstm(params, x), rtol=1e-10)


@pytest.mark.slow
def test_an_lstms_slopes_are_differences(key):
    model = mj.networks.LSTM(4, embedding=2, hidden=3)
    params = model.init(key)
    rng = np.random.default_rng(0)
    x, weigh = rng.integers(0, 4, (5, 6)), rng.normal(size=(5, 6, 4))
    leaves, structure = jax.tree.flatten(params)
    with jax.numpy_rank_promotion("allow"):
        slopes = jax.tree.leaves(jax.grad(lambda p: jnp.sum(weigh * model.apply(p, jnp.asarray(x, float))))(params))
    for i, slope in enumerate(slopes):
        way = rng.normal(size=slope.shape)

        def moved(t, i=i, way=way):
            there = [np.asarray(a) + (t * way if j == i else 0) for j, a in enumerate(leaves)]
            return (weigh * lstm(jax.tree.unflatten(structure, there), x)).sum()

        np.testing.assert_allclose((slope * way).sum(), (moved(1e-5) - moved(-1e-5)) / 2e-5, rtol=1e-7, atol=1e-8)
