"""Inverses of Cholesky factors, against LAPACK's by way of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mocha_jax._numerics.cholesky import inverse_factor


@pytest.mark.parametrize("n", [1, 16, 33, 70])
def test_it_is_the_inverse_of_the_factor(n):
    x = np.random.default_rng(n).normal(size=(3, n, n + 2))
    a = x @ x.transpose(0, 2, 1) / n + 0.1 * np.eye(n)
    found = np.asarray(jax.jit(inverse_factor)(jnp.asarray(np.tril(a))))
    np.testing.assert_allclose(found, np.linalg.inv(np.linalg.cholesky(a)), rtol=1e-9, atol=1e-11)
    assert not np.triu(found, 1).any()


def test_what_is_not_positive_definite_has_none():
    a = jnp.stack([jnp.eye(20), jnp.eye(20).at[18, 18].set(-1.0)])
    found = jax.jit(inverse_factor)(a)
    np.testing.assert_array_equal(found[0], jnp.eye(20))
    assert jnp.isnan(found[1]).any()


@pytest.mark.parametrize(("count", "n"), [(139, 20), (5000, 20)])
def test_a_cpu_calls_no_library(count, n):
    """Where two programs factorise batches at a time, JAX 0.10 may wait for ever; and the first call imports SciPy."""
    text = jax.jit(inverse_factor).lower(jax.ShapeDtypeStruct((count, n, n), "float32")).as_text()
    assert "custom_call" not in text
