"""The speaking roles of Shakespeare's plays as clients, for the language model of the slides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import mocha_jax as mj

Rows = tuple[np.ndarray, np.ndarray]  # rows [n, T + 1], how many symbols each predicts [n]


class Roles(NamedTuple):
    """Rows of symbols of every role."""

    train: list[Rows]
    test: list[Rows]
    symbols: int  # of the alphabet

    def chosen(self, key: jax.Array, count: int) -> Roles:
        """So many roles at random; all where there are fewer."""
        some = np.sort(_draw(key).permutation(len(self.train))[:count])
        return Roles([self.train[i] for i in some], [self.test[i] for i in some], self.symbols)

    def shortened(self, most: int) -> Roles:
        """The first so many training rows of every role: a full batch costs every client what it costs the largest."""
        return self._replace(train=[(rows[:most], lengths[:most]) for rows, lengths in self.train])

    def problem(self, key: jax.Array, iid: bool) -> mj.Prediction:
        """Predict the next symbol; each client has a role, or the same rows dealt at random in equal parts.

        Test rows are those of all roles together: the error is the share of wrong characters.
        """
        rows, lengths = (np.concatenate([role[i] for role in self.train]) for i in (0, 1))
        roles = np.repeat(np.arange(len(self.train)), [len(role[0]) for role in self.train])
        parts = mj.partition.iid(key, len(rows), len(self.train)) if iid else mj.partition.by_group(roles)
        test = [np.concatenate([role[i] for role in self.test]) for i in (0, 1)]
        return mj.Prediction(
            mj.pack_tasks([rows[p] for p in parts], [lengths[p] for p in parts]), mj.likelihoods.NextSymbol(),
            mj.pack_tasks(test[:1], test[1:]),
        )  # fmt: skip


def shakespeare(path: Path, length: int) -> Roles:
    """Roles of a file, or of a folder of LEAF with ``train`` and ``test`` in it.

    Of a file the first 80 % of a role's characters are for training and the rest for testing, in rows of `length`
    predicted characters; roles with fewer than two rows for training, or nothing to test, are left out. LEAF's samples
    are rows of 80 characters and the next one.

    Args:
      path: an ``.npz`` with bytes ``text`` and ``offsets``, role t being ``text[offsets[t] : offsets[t + 1]]``; or a
        folder.
      length: T.
    """
    if path.is_dir():
        train = mj.datasets.leaf(path / "train")
        test = mj.datasets.leaf(path / "test", users=train.names)
        return Roles(_leaf_rows(train), _leaf_rows(test), len(mj.datasets.ALPHABET))
    file = np.load(path, allow_pickle=False)
    alphabet, text = np.unique(file["text"], return_inverse=True)
    return split(np.split(text, file["offsets"][1:-1]), length, len(alphabet))


def split(texts: list[np.ndarray], length: int, symbols: int) -> Roles:
    """Training and test rows of every role that has enough."""
    train, test = [], []
    for text in texts:
        cut = int(0.8 * len(text))
        if cut - 1 > length and len(text) - cut >= 2:
            train.append(mj.datasets.windows(text[:cut], length))
            test.append(mj.datasets.windows(text[cut:], length))
    return Roles(train, test, symbols)


def babble(key: jax.Array, roles: int, length: int, symbols: int = 12) -> Roles:
    """A stand-in without files: every role repeats words of its own and of all, for a first look and for tests."""
    draw = _draw(key)
    word: Callable[[], np.ndarray] = lambda: draw.integers(1, symbols, draw.integers(2, 6))  # noqa: E731
    common = [word() for _ in range(6)]
    texts = []
    for _ in range(roles):
        words = [*common, *(word() for _ in range(2))]
        spoken = [np.append(words[i], 0) for i in draw.integers(0, len(words), draw.integers(60, 200))]
        texts.append(np.concatenate(spoken))
    return split(texts, length, symbols)


def _leaf_rows(users: mj.datasets.Users) -> list[Rows]:
    pairs = zip(users.xs, users.ys, strict=True)
    return [(np.column_stack([x, y]), np.full(len(y), x.shape[1], np.float32)) for x, y in pairs]


def _draw(key: jax.Array) -> np.random.Generator:
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
