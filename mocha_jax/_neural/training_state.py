"""Records of federated training: the state between rounds, and those that go between clients and server in a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jax import Array

from mocha_jax._algorithms.base import State
from mocha_jax._core.pytree import PyTree, tree
from mocha_jax.likelihoods import Likelihood


class TrainingState(State):
    """The state of a method of federated training between rounds."""

    shared: PyTree = tree()  # the server's trees: what goes to all clients,
    rows: PyTree = tree()  # ``[m, ...]`` to each,
    kept: PyTree = tree()  # and what stays
    own: PyTree = tree()  # ``[m, ...]`` what every client keeps
    ready: PyTree = tree()  # ``[m, ...]`` `Method.ready`, from `resume` to the next round; else NaN
    loss: Array  # [] mean over the training of the last round; infinite before any
    diverged: Array  # [] int32 answers left out so far because they were not finite
    failed: Array  # [] int32 of them in a row, up to now
    spent: PyTree = tree(default=())  # what each client has spent so far, a `Spent`, where privacy limits them


class RoundInputs(NamedTuple):
    """The inputs of all clients in a round."""

    key: Array
    shared: PyTree
    numbers: Mapping[str, Array]
    rate: Array
    likelihood: Likelihood


class Heard(NamedTuple):
    """The sum over the clients' answers."""

    total: PyTree
    weight: Array  # [] of their samples
    loss: Array  # [] mean over their training, times the weight
    diverged: Array  # [] int32 answers that were not finite


class Sent(NamedTuple):
    """The rows of the clients' answers."""

    row: PyTree
    answered: Array  # bool
