"""Networks in two parts and mixtures of networks."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj

N: Any = mj.networks


@pytest.fixture(autouse=True)
def usual_promotion():
    """Networks are applied as the library applies them."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


MODEL = N.MLP(4, 3, (5,))
X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)))


@pytest.mark.parametrize("private", [None, ("0/b", "1/w"), ("0",)])
def test_parted_predicts_as_its_network(private):
    parted, key = N.Parted(MODEL, private), jax.random.key(1)
    params, whole = parted.init(key), MODEL.init(key)
    np.testing.assert_array_equal(parted.apply(params, X), MODEL.apply(whole, X))
    parts = [jax.tree.leaves(part) for part in params]
    both = sorted((*parts[0], *parts[1]), key=jnp.size)
    chex.assert_trees_all_equal(both, sorted(jax.tree.leaves(whole), key=jnp.size))
    assert [len(part) for part in parts] == [2, 2]
    assert parted.private == (private or ("1",))


def test_mixtures_average_probabilities_or_outputs():
    for classes in (True, False):
        mixture = N.Mixture(MODEL, 3, classes)
        params = mixture.init(jax.random.key(2))._replace(shares=jnp.asarray([0.2, 0.0, 0.8]))
        each = [MODEL.apply(jax.tree.map(lambda a, j=j: a[j], params.components), X) for j in range(3)]
        assert float(jnp.abs(each[0] - each[2]).max()) > 0.1
        found = mixture.apply(params, X)
        if classes:
            each, found = [jax.nn.softmax(a) for a in each], jnp.exp(found)
        np.testing.assert_allclose(found, 0.2 * each[0] + 0.8 * each[2], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: N.Parted(MODEL, ("2",)), r"Parted: private has '2', and the parameters are 0/w, 0/b, 1/w, 1/b\."),
        (lambda: N.Parted(MODEL, ("1/",)), "Parted: private has '1/'"),
        (lambda: N.Parted(MODEL, ("0", "1")), "Parted: private must leave a parameter to be shared"),
        (lambda: N.Parted(N.Model(lambda key: jnp.ones(3), lambda w, x: x)), "Parted: private must leave a parameter"),
        (lambda: N.Parted(MODEL, "1"), r"Parted: private must be paths, such as \('1',\)"),
        (lambda: N.Parted(None), "Parted: network must be"),
        (lambda: N.Mixture(MODEL, 0), "Mixture: count must be an integer >= 1"),
        (lambda: mj.personalized.fedbn(MODEL, mj.FedAvg), "fedbn: client_optimizer must be of optax"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
