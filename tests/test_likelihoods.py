"""Likelihoods against SciPy."""

import jax.numpy as jnp
import numpy as np
from scipy import stats

import mocha_jax as mj


def test_likelihoods_are_scipys(key):
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(9, 4)), rng.integers(0, 4, 9)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    c = mj.likelihoods.Categorical()
    np.testing.assert_allclose(c.loss(jnp.asarray(z), jnp.asarray(y, float)), -np.log(p[np.arange(9), y]))
    np.testing.assert_allclose(c.error(jnp.asarray(z), jnp.asarray(y, float)), z.argmax(1) != y)
    loss, error = c.mixed(jnp.asarray(p), jnp.asarray(y, float))
    np.testing.assert_allclose(loss, -np.log(p[np.arange(9), y]))
    np.testing.assert_allclose(error, z.argmax(1) != y)
    g = mj.likelihoods.Gaussian(0.7)
    real = rng.normal(size=9)
    np.testing.assert_allclose(g.loss(jnp.asarray(z[:, :1]), jnp.asarray(real)), -stats.norm(z[:, 0], 0.7).logpdf(real))
