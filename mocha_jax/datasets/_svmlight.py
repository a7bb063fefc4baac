"""Files of LIBSVM and svmlight: a sample a line, with the features that are not zero."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from typing import NamedTuple

import numpy as np
from jax.dtypes import canonicalize_dtype
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.pack import pack_tasks
from mocha_jax._data.task_data import TaskData
from mocha_jax.datasets._column_types import lines_of, text_file


@on_purpose
def svmlight(
    path: str | os.PathLike[str],
    group: ArrayLike | str = "qid",
    *,
    num_features: int | None = None,
    zero_based: bool | str = "auto",
    limit_gb: float = 4.0,
    like: TaskData | None = None,
    loss_scaling: str = "sum",
    intercept: bool | float = False,
    dtype: DTypeLike | None = None,
) -> TaskData:
    r"""Read a file of LIBSVM or svmlight: ``label qid:3 1:0.5 7:2 # comment``, features in ascending order.

    Samples are stored dense, which a sparse file may be far too small to tell: m tasks of up to n samples with d
    features take m n d numbers. More than `limit_gb` is refused, with what it would take.

    Args:
      path: of the file, which is unpacked where its name ends in ``.gz``.
      group: ``"qid"``, the query of svmlight; or the task of every line ``[N]``, blank lines and comments not counted.
      num_features: d; default the largest that occurs, or that of `like`.
      zero_based: whether the first feature has number 0; ``"auto"``, as scikit-learn: whether a 0 occurs.
      limit_gb: of the padded samples, in 10^9 bytes.
      like: other data, e.g. for training, see `pack_tasks`.
      loss_scaling: see `pack_tasks`.
      intercept: see `pack_tasks`.
      dtype: see `pack_tasks`; default JAX's float, without a warning.

    Examples:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "clicks.txt"
      >>> _ = path.write_text("1 qid:7 1:0.5 3:2\n-1 qid:7 2:1\n1 qid:9 # nothing\n")
      >>> data = svmlight(path)
      >>> data.names.tasks, data.x[0].tolist(), data.y[0].tolist()
      ((7, 9), [[0.5, 0.0, 2.0], [0.0, 1.0, 0.0]], [1.0, -1.0])
    """
    place = text_file("svmlight", path)
    if isinstance(group, str) and group != "qid":
        raise ValueError(f'svmlight: group must be "qid" or the task of every line, got {group!r}.')
    if not isinstance(zero_based, bool | np.bool_):
        check.one_of("svmlight", "zero_based", zero_based, ("auto",))
    check.scalar("svmlight", limit_gb=limit_gb)
    check.positive_or_infinite("svmlight", limit_gb=limit_gb)
    limit = float(np.asarray(check.concrete(limit_gb)))
    if num_features is not None:
        check.integer("svmlight", 1, num_features=num_features)
    if like is not None:
        check.instance("svmlight", "like", like, TaskData, "the training data")
        intercept = like.intercept
        num_features = like.num_slopes if num_features is None else num_features
    file = _read(str(place))
    groups = _groups(place, file, group)
    column, width = _columns(place, file, num_features, zero_based)
    dtype = canonicalize_dtype(np.float64) if like is None and dtype is None else dtype
    stored = _bytes(dtype, like)
    sizes = Counter(groups.tolist())
    m, most = len(sizes) if like is None else like.num_tasks, max(sizes.values())
    size = 1e-9 * m * most * (width + bool(intercept)) * stored
    if size > limit:
        raise ValueError(
            f"{place}: samples are stored dense, and {m} tasks of up to {most} samples with {width} features would "
            f"take {size:.3g} GB, more than limit_gb={limit:g}; raise it if that fits, map the samples to "
            f'fewer features first, or store them as dtype="bfloat16".'
        )
    x = np.zeros((len(file.y), width), np.float32 if stored <= 4 else float)
    x[np.repeat(np.arange(len(file.y)), file.counts), column] = file.value
    return pack_tasks(x, file.y, groups, like=like, loss_scaling=loss_scaling, intercept=intercept, dtype=dtype)


class _File(NamedTuple):
    """Samples of N lines."""

    y: np.ndarray  # [N]
    query: np.ndarray | None  # [N]
    line: np.ndarray  # [N] from 1
    counts: np.ndarray  # [N] how many features are given
    number: np.ndarray  # of all features given, one line after the other
    value: np.ndarray


def _read(path: str) -> _File:
    y, value = array("d"), array("d")
    query, line, counts, index = array("q"), array("q"), array("q"), array("q")
    for number, text in lines_of(text_file("svmlight", path)):
        words = (content := text.partition("#")[0]).split()
        if not words:
            continue
        try:
            if "_" in content:
                raise ValueError  # to Python 1_000 is a number
            pairs = [word.split(":") for word in words[1:]]
            if pairs and pairs[0][0] == "qid":
                query.append(int(pairs.pop(0)[1]))
            y.append(float(words[0]))
            index.extend([int(i) for i, _ in pairs])
            value.extend([float(v) for _, v in pairs])
        except (ValueError, OverflowError, IndexError) as error:
            raise ValueError(f"{path}, line {number}: {_wrong(words)}.") from error
        line.append(number)
        counts.append(len(pairs))
    if not y:
        raise ValueError(f"{path}: has no samples.")
    arrays = [
        np.frombuffer(each, each.typecode) if each else np.zeros(0) for each in (y, query, line, counts, index, value)
    ]
    if len(query) not in (0, len(y)):
        raise ValueError(f"{path}: has a qid in {len(query)} lines of {len(y)}; all must have one, or none.")
    file = _File(arrays[0], arrays[1] if query else None, arrays[2], arrays[3], arrays[4].astype(int), arrays[5])
    row = np.repeat(np.arange(len(file.y)), file.counts)
    if (bad := ~np.isfinite(file.y)).any():
        raise ValueError(f"{path}, line {file.line[np.argmax(bad)]}: the label is NaN or infinite; leave the line out.")
    if (bad := ~np.isfinite(file.value)).any():
        k = int(np.argmax(bad))
        raise ValueError(f"{path}, line {file.line[row[k]]}: feature {file.number[k]} is NaN or infinite; impute it.")
    falls = (np.diff(file.number) <= 0) & (np.diff(row) == 0)
    if (bad := np.concatenate([file.number[:1] < 0, falls | (file.number[1:] < 0)])).any():
        k = int(np.argmax(bad))
        wrong = f"follows {file.number[k - 1]}" if k and file.number[k] >= 0 else "is negative"
        raise ValueError(
            f"{path}, line {file.line[row[k]]}: features must be numbered from 0 or 1 in ascending order, each once, "
            f"but {file.number[k]} {wrong}."
        )
    return file


def _wrong(words: list[str]) -> str:
    """Describe the error in a line."""

    def parse(kind: type[int] | type[float], text: str) -> None:  # no number has an underscore
        kind(text.replace("_", "?"))

    try:
        parse(float, words[0])
    except ValueError:
        several = "; several labels of a sample are not read" if "," in words[0] else ""
        return f"{words[0]!r} is no label, which is a number{several}"
    for word in words[1:]:
        name, colon, value = word.partition(":")
        try:
            parse(int, name if name != "qid" or word != words[1] else value)
            parse(float, value)
        except ValueError:
            return f"{word!r} is no feature such as 3:0.5"
    return "holds a number that is too large"


def _groups(path: object, file: _File, group: ArrayLike | str) -> np.ndarray:
    if isinstance(group, str):
        if file.query is None:
            raise ValueError(f"{path}: has no qid; pass group, the task of every line [{len(file.y)}].")
        return file.query.astype(int)
    if (groups := check.concrete(group)) is None:
        try:
            groups = np.asarray(group, object)
        except Exception:  # a user's `__array__` may raise anything
            groups = np.zeros(0)
    if groups.shape != (len(file.y),) or np.ma.is_masked(group):
        raise ValueError(
            f"svmlight: group must have a label for each of the {len(file.y)} samples, got {check.shown(group)}."
        )
    return groups


def _columns(path: object, file: _File, num_features: int | None, zero_based: bool | str) -> tuple[np.ndarray, int]:
    """The column of every feature given, and how many columns there are."""
    lowest = int(file.number.min(initial=1))
    from_zero = lowest == 0 if zero_based == "auto" else bool(zero_based)
    if lowest < 1 - from_zero:
        line = file.line[np.repeat(np.arange(len(file.y)), file.counts)[np.argmin(file.number)]]
        raise ValueError(f"{path}, line {line}: has feature 0, which zero_based=False rules out.")
    column = file.number - (0 if from_zero else 1)
    most = int(column.max(initial=-1)) + 1
    width = most if num_features is None else int(num_features)
    if most > width:
        line = file.line[np.repeat(np.arange(len(file.y)), file.counts)[np.argmax(column)]]
        raise ValueError(
            f"{path}, line {line}: has feature {file.number.max()}, more than the num_features={width} there are."
        )
    if not width:
        raise ValueError(f"{path}: has no features at all; pass num_features if that is meant.")
    return column, width


def _bytes(dtype: DTypeLike | None, like: TaskData | None) -> int:
    """Bytes of a number of the samples; of what is no type, which `pack_tasks` refuses, 4."""
    if dtype is None and like is not None:
        return like.x.dtype.itemsize
    try:
        return canonicalize_dtype(dtype).itemsize if isinstance(dtype, str | type | np.dtype) else 4
    except TypeError:
        return 4
