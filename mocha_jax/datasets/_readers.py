"""Federations from files: LEAF's folders, and texts as rows of symbols."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mocha_jax._core import check
from mocha_jax._data.names import listed

# The 80 symbols of LEAF's Shakespeare, in LEAF's order.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"


class Users(NamedTuple):
    """Samples of users, in the order of their names."""

    names: list[str]
    xs: list[np.ndarray]  # of every user ``[n_t, d]`` float32
    ys: list[np.ndarray]  # of every user ``[n_t]`` float32

    def __repr__(self) -> str:
        return f"Users({len(self.names)} of them: {listed(self.names)}; {sum(map(len, self.ys))} samples)"


def leaf(
    folder: str | os.PathLike[str], *, users: Sequence[str] | None = None, alphabet: str = ALPHABET
) -> Users:  # fmt: skip
    """Read one part of a data set of LEAF (Caldas et al. 2018): all ``.json`` files of a folder, train or test.

    A file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``; other keys are
    passed over. A sample of numbers, such as the 784 pixels of FEMNIST with labels 0 to 61, is read as it is. A sample
    of text, such as 80 characters of Shakespeare with the next one for its label, becomes `symbols`.

    Args:
      folder: where the files are.
      users: names of those to read, in this order, e.g. those of the other part; default all, by file and place in it.
      alphabet: of texts.

    Examples:
      >>> import json, pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> samples = {"x": ["He je", "e jes"], "y": ["s", "t"]}
      >>> content = {"users": ["ROMEO"], "num_samples": [2], "user_data": {"ROMEO": samples}}
      >>> _ = (folder / "part_0.json").write_text(json.dumps(content))
      >>> found = leaf(folder)
      >>> found.names, found.xs[0].shape, found.ys[0].tolist()
      (['ROMEO'], (2, 5), [71.0, 72.0])
    """
    if not isinstance(folder, str | os.PathLike) or not str(folder) or not Path(folder).is_dir():
        raise ValueError(f"leaf: folder must be one with LEAF's .json files, got {check.shown(folder)}.")
    wanted = None if users is None else _names(users)
    codes = _codes("leaf", alphabet)
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise ValueError(f"leaf: there is no .json file in {folder}.")
    samples_of: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    width: tuple[int, str] | None = None
    for path in paths:
        for name, samples in _users_of(path):
            if wanted is not None and name not in wanted:
                continue
            owner = f"leaf: {path}: user {name!r}"
            if name in samples_of:
                raise ValueError(f"{owner} is in an earlier file too; a folder must hold one part, train or test.")
            x, y = samples_of[name] = _samples(owner, samples, codes)
            width = (x.shape[1], name) if width is None else width
            if x.shape[1] != width[0]:
                raise ValueError(
                    f"{owner} has samples of length {x.shape[1]}, where those of {width[1]!r} have {width[0]}."
                )
    names = list(samples_of) if wanted is None else wanted
    if missing := [name for name in names if name not in samples_of]:
        raise ValueError(f"leaf: {len(missing)} of {len(names)} users are not in {folder}, e.g. {missing[0]!r}.")
    if not names:
        raise ValueError(f"leaf: there are no users in {folder}.")
    return Users(names, [samples_of[name][0] for name in names], [samples_of[name][1] for name in names])


def symbols(text: str, alphabet: str = ALPHABET) -> np.ndarray:
    """Number the symbols of a text by their places in an alphabet, ``[len(text)]`` int32.

    Examples:
      >>> symbols("abc", "cba").tolist()
      [2, 1, 0]
    """
    codes = _codes("symbols", alphabet)
    if not isinstance(text, str):
        raise ValueError(f"symbols: text must be a string, got {check.shown(text)}.")
    return _numbered("symbols: text", text, codes)


def windows(sequence: Sequence[int] | np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a sequence of symbols into rows for `likelihoods.NextSymbol`, which predict each but the first once.

    Args:
      sequence: ``[N]`` symbols, two or more.
      length: T, how many symbols a row predicts at most. Neighbouring rows have one symbol in common.

    Returns:
      Rows ``[n, T + 1]`` float32, the last padded with zeros, and how many symbols each predicts ``[n]`` float32.

    Examples:
      >>> rows, lengths = windows([5, 6, 7, 8, 9, 5], 3)
      >>> rows.tolist(), lengths.tolist()
      ([[5.0, 6.0, 7.0, 8.0], [8.0, 9.0, 5.0, 0.0]], [3.0, 2.0])
    """
    check.integer("windows", 1, length=length)
    length = int(length)
    check.integers("windows", 0, sequence=sequence)
    symbols = np.asarray(sequence)
    if symbols.ndim != 1 or len(symbols) < 2:
        raise ValueError(f"windows: sequence must have one axis and two symbols or more, got {check.shown(sequence)}.")
    count = -(-(len(symbols) - 1) // length)
    places = length * np.arange(count)[:, None] + np.arange(length + 1)[None, :]
    rows = np.where(places < len(symbols), symbols[np.minimum(places, len(symbols) - 1)], 0)
    lengths = np.minimum(len(symbols) - 1 - places[:, 0], length)
    return rows.astype(np.float32), lengths.astype(np.float32)


Codes = tuple[np.ndarray, np.ndarray]  # of an alphabet in sorted order, and their places in it


def _codes(owner: str, alphabet: object) -> Codes:
    if not isinstance(alphabet, str) or not alphabet or len(set(alphabet)) < len(alphabet):
        raise ValueError(f"{owner}: alphabet must be a string of different symbols, got {check.shown(alphabet)}.")
    codes = _code_points(alphabet)
    order = np.argsort(codes)
    return codes[order], order


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _numbered(owner: str, text: str, codes: Codes) -> np.ndarray:
    alphabet, order = codes
    points = _code_points(text)
    places = np.minimum(np.searchsorted(alphabet, points), len(alphabet) - 1)
    if len(strange := np.flatnonzero(alphabet[places] != points)):
        raise ValueError(
            f"{owner} has a {text[strange[0]]!r} at place {strange[0]}, which the alphabet of {len(alphabet)} symbols "
            f"lacks."
        )
    return order[places].astype(np.int32)


def _names(users: object) -> list[str]:
    names = list(users) if isinstance(users, Sequence) and not isinstance(users, str) else []
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"leaf: users must be a list of different names, got {check.shown(users)}.")
    return names


def _users_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The users of a file, with their data."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"leaf: {path} cannot be read, {error}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"leaf: {path} is no JSON: {error}.") from error
    kinds = {"users": list, "num_samples": list, "user_data": dict}
    for key, kind in kinds.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise ValueError(f"leaf: {path} needs a {kind.__name__} {key!r}, as LEAF's files have.")
    names, counts, data = (content[key] for key in kinds)
    if len(names) != len(counts):
        raise ValueError(f"leaf: {path} has {len(names)} users but {len(counts)} num_samples.")
    for name, count in zip(names, counts, strict=True):
        samples = data.get(name) if isinstance(name, str) else None
        if not isinstance(samples, dict) or not {"x", "y"} <= samples.keys():
            raise ValueError(f"leaf: {path}: user {name!r} has no x and y in user_data.")
        if not all(isinstance(samples[key], list | str) for key in "xy"):
            raise ValueError(f"leaf: {path}: user {name!r} has an x or y that is no list.")
        if not len(samples["x"]) == len(samples["y"]) == count:
            raise ValueError(
                f"leaf: {path}: user {name!r} has {len(samples['x'])} samples and {len(samples['y'])} labels, where "
                f"num_samples says {count}."
            )
        yield name, samples


def _samples(owner: str, samples: dict[str, Any], codes: Codes) -> tuple[np.ndarray, np.ndarray]:
    """Samples and labels as arrays."""
    x, y = samples["x"], samples["y"]
    if not len(x):
        raise ValueError(f"{owner} has no samples.")
    if all(isinstance(row, str) for row in x):
        if len({len(row) for row in x}) > 1 or not all(isinstance(one, str) and len(one) == 1 for one in y):
            raise ValueError(f"{owner} has texts of different lengths, or a label that is no single symbol.")
        numbered = _numbered(f"{owner}:", "".join(x), codes).reshape(len(x), -1)
        return numbered.astype(np.float32), _numbered(f"{owner}:", "".join(y), codes).astype(np.float32)
    try:
        with np.errstate(over="ignore"):  # what is too large is infinite, and refused below
            rows, labels = np.asarray(x, np.float32), np.asarray(y, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{owner} has samples that are neither texts nor lists of numbers of one length.") from error
    if (
        rows.ndim != 2
        or not rows.shape[1]
        or labels.ndim != 1
        or not (np.isfinite(rows).all() and np.isfinite(labels).all())
    ):
        raise ValueError(f"{owner} has samples that are no lists of numbers, or a label that is no number.")
    return rows, labels
