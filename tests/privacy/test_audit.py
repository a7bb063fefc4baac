"""An attack on private training: the epsilon that it measures stays below the claim, and above it with half the noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import mocha_jax as mj

N, BATCH, ROUNDS, DELTA, NOISE = 12, 4, 3, 1e-2, 1.2
LINEAR = mj.networks.MLP(1, 1)
ZERO = mj.networks.Model(lambda key: jax.tree.map(jnp.zeros_like, LINEAR.init(key)), LINEAR.apply)


def models(noise, with_sample, trials, key):
    """The last models of runs in which all samples but one have no gradient, ``[trials]``."""
    x, y = np.zeros((N, 1)), np.zeros(N)
    if with_sample:
        y[0] = 1e6  # its gradient is clipped, and always points the same way
    problem = mj.Prediction(mj.pack_tasks([x], [y], dtype=np.float64), mj.likelihoods.Gaussian())
    private = mj.privacy.ExampleLevel(noise, 10**6)
    algorithm = mj.FedAvg(ZERO, optax.sgd(1e-9), batch_size=BATCH, local_epochs=2, privacy=private)

    def trained(key):
        return mj.run(problem, algorithm, key, num_rounds=ROUNDS)[0].shared[0].b[0]

    return 1e9 * BATCH * np.asarray(jax.jit(jax.vmap(trained))(jax.random.split(key, trials)))


def measured(noise, trials, key):
    """A lower bound on epsilon: the best threshold on half of the trials, its rates on the other half."""
    return bound_by([models(noise, w, trials, k) for w, k in zip((False, True), jax.random.split(key), strict=True)])


def bound_by(found):
    """The same of scores without the secret ``[trials]``, and with it."""
    half = len(found[0]) // 2
    choices, best = (
        np.quantile(np.concatenate([f[:half] for f in found]), np.linspace(0.001, 0.999, 999)),
        (-np.inf, 0.0),
    )
    for cut in choices:
        false, true = ((f[:half] > cut).mean() for f in found)
        if false > 20 / half and true > DELTA:
            best = max(best, (np.log((true - DELTA) / false), cut))
    counts = [int((f[half:] > best[1]).sum()) for f in found]
    most = stats.beta.ppf(0.975, counts[0] + 1, half - counts[0])
    least = stats.beta.ppf(0.025, counts[1], half - counts[1] + 1)
    return np.log((least - DELTA) / most)


@pytest.mark.parametrize(
    "trials", [pytest.param(20_000, marks=pytest.mark.extended), pytest.param(200_000, marks=pytest.mark.slow)]
)
def test_an_attack_finds_no_more_than_is_claimed(trials, key):
    steps = ROUNDS * 2 * 3
    claimed = mj.privacy.epsilon(NOISE, N, BATCH, steps, delta=DELTA, accountant="pld")
    honest, weak = (measured(z, trials, key) for z in (NOISE, 0.5 * NOISE))
    assert 0.5 * claimed < honest <= claimed < weak
    assert weak <= mj.privacy.epsilon(0.5 * NOISE, N, BATCH, steps, delta=DELTA, accountant="pld")
