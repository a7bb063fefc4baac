"""Regularizers by name: all that need nothing but numbers, each of one strength."""

import jax
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.regularizers._named import NAMED, STRENGTHS, maker


def test_every_regularizer_that_needs_nothing_but_a_number_has_a_name():
    bases = ("DeviationsLearned", "Learned", "OptimalityConditions", "Regularizer", "Spectral", "TraceLimited")
    kinds = {name for name in mj.regularizers.__all__ if name not in bases}
    assert {type(maker(name, 4)[0](lam=0.1)).__name__ for name in NAMED} == kinds - {"Graph", "PerFeature"}


@pytest.mark.parametrize("name", NAMED)
def test_candidates_can_be_made_of_every_name(name):
    make, tried = maker(name, 2)
    assert all(len(values) > 1 for values in tried.values())
    candidates = mj.grid(make, lam=STRENGTHS, **tried)
    sizes = {np.shape(leaf)[0] for leaf in jax.tree.leaves(candidates)}
    assert sizes == {len(STRENGTHS) * int(np.prod([len(values) for values in tried.values()]))}
