"""Every fit of a cross-validation is done, however many are done at a time."""

import jax.numpy as jnp
import pytest

from mocha_jax._selection.by_fold import fold_by_fold


@pytest.mark.parametrize("size", [1, 5, 12, 16])
def test_each_fit_has_its_own_place(size):
    trials, folds = 3, 4

    def fit(trial, fold):
        assert len(trial) == len(fold) == size
        number = (10 * trial + fold).astype(float)
        return number[:, None, None] * jnp.ones((1, 2, 3)), number[:, None] * jnp.ones((1, 2)), jnp.ones((size, 2), int)

    scores, residuals, rounds = fold_by_fold(fit, trials, folds, size, progress=False)
    assert scores.shape == (trials, folds, 2, 3)
    assert residuals.shape == rounds.shape == (trials, folds, 2)
    for k in range(trials):
        for f in range(folds):
            assert (scores[k, f] == 10 * k + f).all()
            assert (residuals[k, f] == 10 * k + f).all()
