"""Samples that are sequences: labels at their positions, lengths and masks, for every trainer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj

V, T = 5, 6


# One table: the logits of what follows a symbol.
def bigrams(key):
    return 0.1 * jax.random.normal(key, (V, V))


MODEL = mj.networks.Model(bigrams, lambda w, x: jax.nn.one_hot(x.astype(jnp.int32), V, dtype=w.dtype) @ w)


def texts(m=4, seed=0):
    """Texts of every client, ``[n_t]`` lists of 2 to T + 1 symbols."""
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, V, rng.integers(2, T + 2)) for _ in range(rng.integers(4, 9))] for _ in range(m)]


def packed(texts, padding=0, length=T):
    rows = [np.array([[*t, *[padding] * (length + 1 - len(t))] for t in client], float) for client in texts]
    return mj.pack_tasks(rows, [np.array([len(t) - 1 for t in client]) for client in texts])


def make_problem(padding=0):
    return mj.Prediction(packed(texts(), padding), mj.likelihoods.NextSymbol(), packed(texts(seed=1), padding))


def losses_of(w, text):
    """Loss and error at every position of a text, in NumPy."""
    z = np.asarray(w)[text[:-1]]
    logs = z - np.log(np.exp(z).sum(1, keepdims=True))
    return -logs[np.arange(len(z)), text[1:]], z.argmax(1) != text[1:]


@pytest.mark.slow
def test_a_full_batch_of_texts_is_one_step_down_the_mean_of_their_means(key):
    problem, eta = make_problem(), 0.7
    state, history = mj.run(problem, mj.FedAvg(MODEL, optax.sgd(eta), batch_size=None), key, num_rounds=1)
    start = mj.FedAvg(MODEL, optax.sgd(eta)).init(problem).shared
    every = [text for client in texts() for text in client]
    step, value = np.zeros((V, V)), 0.0
    for text in every:  # softmax minus what is there, averaged over a text, then over all texts
        value += losses_of(start, text)[0].mean() / len(every)
        for a, b in zip(text[:-1], text[1:], strict=True):
            p = np.exp(start[a]) / np.exp(start[a]).sum()
            step[a] += (p - np.eye(V)[b]) / (len(text) - 1) / len(every)
    np.testing.assert_allclose(state.shared, start - eta * step, rtol=1e-10)
    np.testing.assert_allclose(history.loss[-1], value, rtol=1e-10)


@pytest.mark.extended
def test_weights_of_lengths_make_every_symbol_count_alike(key):
    problem, eta = make_problem(), 0.7
    by_symbol = problem.replace(data=problem.data.replace(weight=problem.data.weight * problem.data.y))
    state, _ = mj.run(by_symbol, mj.FedAvg(MODEL, optax.sgd(eta), batch_size=None), key, num_rounds=1)
    start = mj.FedAvg(MODEL, optax.sgd(eta)).init(problem).shared
    pairs = [pair for client in texts() for text in client for pair in zip(text[:-1], text[1:], strict=True)]
    step = np.zeros((V, V))
    for a, b in pairs:
        step[a] += (np.exp(start[a]) / np.exp(start[a]).sum() - np.eye(V)[b]) / len(pairs)
    np.testing.assert_allclose(state.shared, start - eta * step, rtol=1e-10)


@pytest.mark.parametrize("make", [mj.FedAvg, mj.Local, mj.Virtual])
@pytest.mark.thin(2)
def test_scores_are_means_over_symbols(make, key):
    problem = make_problem()
    algorithm = make(MODEL, optax.sgd(0.1), batch_size=3)
    state = algorithm.init(problem)
    scores = algorithm.scores(state, problem)
    assert scores.samples.tolist() == [sum(len(t) - 1 for t in client) for client in texts(seed=1)]
    if make is mj.Virtual:
        return  # averages over draws
    for k, client in enumerate(texts(seed=1)):
        w = algorithm.parameters(state, problem, k)
        found = [np.concatenate(parts) for parts in zip(*(losses_of(w, t) for t in client), strict=True)]
        np.testing.assert_allclose([scores.loss[k], scores.error[k]], [f.mean() for f in found], rtol=1e-10)


ALGORITHMS = {
    "fedavg": mj.FedAvg(MODEL, optax.sgd(0.5), batch_size=3, local_epochs=2),
    "fedprox": mj.FedAvg(MODEL, optax.sgd(0.5), batch_size=3, proximal=0.5),
    "local": mj.Local(MODEL, optax.adam(0.05), batch_size=3),
    "virtual": mj.Virtual(MODEL, optax.adam(0.05), batch_size=3, samples=1),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.slow
def test_padding_of_any_content_changes_no_bit(name, key):
    algorithm = ALGORITHMS[name]
    ours, theirs = (mj.run(make_problem(padding), algorithm, key, num_rounds=3) for padding in (0, 4))
    chex.assert_trees_all_equal(ours, theirs)
    assert ours[1].loss[-1] < ours[1].loss[0]


@pytest.mark.slow
def test_longer_rows_and_more_of_them_change_nothing(key):
    algorithm = ALGORITHMS["fedavg"].replace(batch_size=None)
    plain, _ = mj.run(make_problem(), algorithm, key, num_rounds=3)
    wide = mj.Prediction(packed(texts(), length=T + 3), mj.likelihoods.NextSymbol())
    tall = make_problem().replace(data=packed(texts()).pad(rows=11))
    for problem in (wide, tall):
        state, _ = mj.run(problem, algorithm, key, num_rounds=3)
        chex.assert_trees_all_close(plain.shared, state.shared, rtol=1e-12)


@pytest.mark.slow
def test_a_mask_has_holes(key):
    """Labels of -1 are none: the same loss as of texts that were cut there."""
    rng = np.random.default_rng(3)
    inputs, labels = rng.integers(0, V, (2, 7, T))
    some = rng.random((7, T)) < 0.6
    some[:, 0] = True
    masked = np.where(some, labels, -1)
    data = mj.pack_tasks([np.concatenate([inputs, masked], 1).astype(float)], [np.full(7, T)])
    problem, eta = mj.Prediction(data, mj.likelihoods.Sequence()), 0.5
    algorithm = mj.FedAvg(MODEL, optax.sgd(eta), batch_size=None)
    start, state = algorithm.init(problem).shared, mj.run(problem, algorithm, key, num_rounds=1)[0]
    step = np.zeros((V, V))
    for i, s in np.argwhere(some):
        a = inputs[i, s]
        step[a] += (np.exp(start[a]) / np.exp(start[a]).sum() - np.eye(V)[labels[i, s]]) / some[i].sum() / 7
    np.testing.assert_allclose(state.shared, start - eta * step, rtol=1e-10)


def test_sequences_of_real_labels(key):
    """What is negative is a label like others."""
    rng = np.random.default_rng(0)
    x, lengths = rng.normal(size=(8, 3)), np.array([3, 1, 2, 3, 3, 2, 1, 3])
    data = mj.pack_tasks([np.concatenate([x, -2.0 * x], 1)], [lengths])
    problem = mj.Prediction(data, mj.likelihoods.Sequence(mj.likelihoods.Gaussian(0.5)))
    line = mj.networks.Model(lambda key: jnp.zeros(()), lambda w, x: w * x[..., None])
    state, history = mj.run(problem, mj.FedAvg(line, optax.sgd(0.2), batch_size=None), key, num_rounds=100)
    np.testing.assert_allclose(state.shared, -2.0, rtol=1e-6)
    np.testing.assert_allclose(history.error[-1], 0.0, atol=1e-9)


@pytest.mark.slow
def test_a_client_predicts_every_position(key):
    problem = make_problem()
    algorithm = ALGORITHMS["virtual"]
    x = problem.data.x[1, :, :-1]
    found = algorithm.predict(algorithm.init(problem), problem, 1, x)
    assert found.mean.shape == (*x.shape, V)
    assert found.entropy.shape == x.shape
    with pytest.raises(
        ValueError, match=r"x must be an array \[b, 6\], got shape \(9, 7\)|x must be an array \[b, 6\]"
    ):
        algorithm.predict(algorithm.init(problem), problem, 1, problem.data.x[1])


@pytest.mark.slow
def test_a_resumed_solve_of_texts_is_one_solve(key, tmp_path):
    problem, algorithm = make_problem(), ALGORITHMS["fedavg"].replace(fraction=0.5)

    def solve(rounds, **more):
        return mj.solve(problem, algorithm, key=key, tol=None, max_rounds=rounds, chunk=2, **more)

    whole = solve(6)
    solve(4, checkpoint=tmp_path / "run.npz")
    resumed = solve(6, checkpoint=tmp_path / "run.npz")
    chex.assert_trees_all_equal((whole.weights, whole.history), (resumed.weights, resumed.history))


@pytest.mark.slow
def test_an_lstm_learns_what_no_table_of_pairs_can(key):
    """The symbol after next repeats: a b a b ..., of any two symbols."""
    rng = np.random.default_rng(0)
    first = np.array([[a, b] for a in range(V) for b in range(V) if a != b])
    rows = np.tile(first, (4, 4)).astype(float)  # [80, 8]
    parts = np.array_split(rng.permutation(len(rows)), 4)
    data = mj.pack_tasks([rows[p] for p in parts], [np.full(len(p), 7) for p in parts])
    problem = mj.Prediction(data, mj.likelihoods.NextSymbol())
    model = mj.networks.LSTM(V, embedding=4, hidden=16, layers=1)
    solution = mj.solve(problem, mj.FedAvg(model, optax.adam(0.03), local_epochs=2), key=key, tol=0.12, max_rounds=60)
    assert solution.status is mj.Status.CONVERGED  # all but the first of seven, which nobody knows
    pairs = mj.solve(problem, mj.FedAvg(MODEL, optax.adam(0.03), local_epochs=2), key=key, tol=0.12, max_rounds=60)
    assert pairs.history.error.min() > 0.5


@pytest.mark.slow
def test_noise_for_every_row_is_not_for_loops(key):
    virtual = mj.Virtual(mj.networks.LSTM(V, 2, 3), optax.sgd(0.1), samples=1, noise="flipout")
    with pytest.raises(ValueError, match="LSTM cannot predict samples of 6 features with noise='flipout'"):
        mj.run(make_problem(), virtual, key, num_rounds=1)
    plain = virtual.replace(noise="shared")
    assert np.isfinite(mj.run(make_problem(), plain, key, num_rounds=1)[1].loss).all()


def test_what_is_no_sequence_is_said(key):
    sequence, following = mj.likelihoods.Sequence(), mj.likelihoods.NextSymbol()
    rows = np.ones((3, 5))

    def problem(likelihood, lengths=(1, 2, 4), rows=rows):
        return mj.Prediction(mj.pack_tasks([rows], [np.array(lengths, float)]), likelihood)

    for lengths in ((1, 2, 0), (1, 2, 5), (1, 2, 1.5)):
        with pytest.raises(ValueError, match="1 of 3 sequences have no label; the y of each must be its length, an "
                                             "integer from 1 to 4"):  # fmt: skip
            problem(following, lengths)
    with pytest.raises(ValueError, match="a row holds T inputs and T labels, an even number; got 5"):
        problem(sequence)
    with pytest.raises(ValueError, match="one column"):
        problem(following, (1, 1, 1), rows[:, :1])
    with pytest.raises(ValueError, match=r"needs labels 0, 1, ..., but there is a 0.5"):
        problem(following, rows=0.5 * rows)
    with pytest.raises(ValueError, match="there is a label 7, but the model has outputs for 5 classes"):
        mj.run(problem(following, rows=7 * rows), mj.FedAvg(MODEL, optax.sgd(0.1)), key, num_rounds=1)
    with pytest.raises(ValueError, match=r"must be \[2, 4, c\], got \(2, 3\)"):
        mj.run(problem(following), mj.FedAvg(mj.networks.MLP(4, 3), optax.sgd(0.1)), key, num_rounds=1)
    plain = mj.Prediction(mj.pack_tasks([rows], [[0, 1, 0]]))
    with pytest.raises(ValueError, match=r"must be \[2, c\], got \(2, 5, 5\)"):
        mj.run(plain, mj.FedAvg(MODEL, optax.sgd(0.1)), key, num_rounds=1)
    with pytest.raises(ValueError, match="Sequence: each must be a Likelihood"):
        mj.likelihoods.Sequence("categorical")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="each must be a likelihood of one label"):
        mj.likelihoods.Sequence(following)
