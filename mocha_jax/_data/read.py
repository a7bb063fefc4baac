"""Samples in any form, read to arrays of every node: lists, mappings by name, one array with groups, data frames."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._data.frames import (
    array_of,
    check_dense,
    check_frames,
    check_unmasked,
    masked,
    missing,
    of_objects,
    samples_of,
)
from mocha_jax._data.names import DataFrame, Names, columns_in_order, columns_of, listed, places

_OWNER = "pack_tasks"


class Ragged(NamedTuple):
    """Samples and labels of every node, as many as it has, with their names."""

    xs: list[np.ndarray]  # of every node ``[n_t, d]``
    ys: list[np.ndarray]  # of every node ``[n_t]``
    nodes: list[str]  # for messages
    rows: list[np.ndarray] | None  # of every node, the rows of the table that its samples were
    names: Names


def read(xs: object, ys: object, groups: object, like: Names | None) -> Ragged:
    """Read samples and labels in any form, with tasks, features and classes in the order of `like`."""
    check_unmasked(_OWNER, groups=groups)
    for name, value in (("xs", xs), ("ys", ys), ("groups", groups)):
        check_dense(_OWNER, name, value)
    check_frames(_OWNER, "xs", xs)
    xs, ys, groups = _columns_asked_for(xs, ys, groups)
    if groups is not None:
        ragged = _by_group(xs, ys, groups)
    elif isinstance(xs, Mapping):
        ragged = _by_name(xs, ys)
    else:
        ragged = _by_node(xs, ys)
    ragged = _with_class_numbers(ragged, None if like is None else like.classes)
    return ragged if like is None else _in_order_of(ragged, like)


def _columns_asked_for(xs: object, ys: object, groups: object) -> tuple[object, object, object]:
    """Labels and groups that are columns of the data frame, taken out of it."""
    asked = [name for name in (ys, groups) if isinstance(name, str)]
    if not asked:
        return xs, ys, groups
    columns = columns_of(_OWNER, xs)
    if columns is None:
        what = "ys" if isinstance(ys, str) else "groups"
        raise ValueError(
            f"{_OWNER}: {what} names a column, {asked[0]!r}, but xs is no data frame; got {check.shown(xs)}."
        )
    places(_OWNER, "column", asked, columns)
    frame: DataFrame = xs
    rest = [name for name in frame.columns if str(name) not in asked]
    return frame[rest], *(frame[name] if isinstance(name, str) else name for name in (ys, groups))


def _by_group(xs: object, ys: object, groups: object) -> Ragged:
    features = columns_of(_OWNER, xs)
    check_unmasked(_OWNER, xs=xs, ys=ys)
    x = _one_array("xs", samples_of(_OWNER, xs, features))
    y, labels = (_one_array(name, array_of(value)) for name, value in (("ys", ys), ("groups", groups)))
    if x.ndim != 2 or y.shape != x.shape[:1] or labels.shape != x.shape[:1]:
        raise ValueError(
            f"{_OWNER}: with groups, xs must be [N, d], ys and groups [N]; got {x.shape}, {y.shape}, {labels.shape}."
        )
    if (unnamed := missing(labels)).any():
        raise ValueError(f"{_OWNER}: groups is NaN in row {int(np.argmax(unnamed))}; give it a label.")
    try:
        groups_in_order, node = np.unique(labels, return_inverse=True)
    except TypeError as error:
        raise ValueError(f"{_OWNER}: groups mixes labels that have no order; make them all strings.") from error
    order = np.argsort(node, kind="stable")
    cuts = np.cumsum(np.bincount(node))[:-1]
    tasks = tuple(groups_in_order.tolist())
    return Ragged(
        np.split(x[order], cuts), np.split(y[order], cuts), [f"group {label!r}" for label in tasks],
        np.split(order, cuts), Names(tasks=tasks, features=features),
    )  # fmt: skip


def _by_name(xs: Mapping[Hashable, object], ys: object) -> Ragged:
    """Mappings of names to arrays."""
    if not isinstance(ys, Mapping):
        raise ValueError(f"{_OWNER}: where xs is a mapping of names to arrays, so must ys be; got {check.shown(ys)}.")
    if set(xs) != set(ys):
        raise ValueError(f"{_OWNER}: xs and ys must name the same tasks; {listed(sorted(set(xs) ^ set(ys), key=str))} "
                         f"are in one of them alone.")  # fmt: skip
    ragged = _by_node(list(xs.values()), [ys[name] for name in xs])
    return ragged._replace(nodes=[f"task {name!r}" for name in xs], names=ragged.names.replace(tasks=tuple(xs)))


def _by_node(xs: object, ys: object) -> Ragged:
    if getattr(xs, "ndim", 0) == 2 and getattr(ys, "ndim", 0) == 1:
        raise ValueError(f"{_OWNER}: one array of samples needs groups, the device of each; or pass a list per device.")
    each_x, each_y = check.sequence(_OWNER, "xs", xs), check.sequence(_OWNER, "ys", ys)
    for what, arrays in (("x", each_x), ("y", each_y)):
        if (node := next((t for t, a in enumerate(arrays) if masked(a)), None)) is not None:
            check_unmasked(f"task {node}", **{what: arrays[node]})
    columns = [columns_of(_OWNER, each) for each in each_x]
    for t, own in enumerate(columns):
        if own != columns[0]:
            raise ValueError(f"task {t}: has other columns than task 0, or in another order; give all the same.")
    check_dense(_OWNER, "xs", each_x)
    features = columns[0] if columns else None
    if features is not None:  # frames, whose numbers may be objects; the check of all arrays handles other values
        for t, x in enumerate(each_x):
            array = samples_of(_OWNER, x, features)
            each_x[t] = x if array is None or array.ndim != 2 else array
    samples = check.arrays(_OWNER, "xs", each_x) if each_x else []
    nodes = [f"task {t}" for t in range(len(samples))]
    return Ragged(samples, _labels(each_y), nodes, None, Names(features=features))


def _one_array(name: str, array: np.ndarray | None) -> np.ndarray:
    if array is None:
        raise ValueError(f"{_OWNER}: with groups, xs, ys and groups must each be one array; {name} is none.")
    return array


def _labels(ys: list[object]) -> list[np.ndarray]:
    """Labels of every node, which may be names of classes."""
    objects = [of_objects(y) if check.concrete(y) is None else None for y in ys]
    if all(y is None for y in objects):
        return check.arrays(_OWNER, "ys", ys) if ys else []
    return [check.arrays(_OWNER, "ys", [y])[0] if own is None else own for y, own in zip(ys, objects, strict=True)]


def _with_class_numbers(ragged: Ragged, like_classes: tuple[Hashable, ...] | None) -> Ragged:
    """Labels that are names of classes, as numbers: -1 and 1 of two, 0, 1, ... of more."""
    if not any(y.dtype.kind in "OUS" for y in ragged.ys):
        if like_classes is not None:
            codes = _codes(like_classes)
            if unknown := sorted(set(np.concatenate(ragged.ys).tolist()) - set(codes)):
                raise ValueError(
                    f"{_OWNER}: the classes of like are {listed(like_classes)}, coded as {listed(codes)}; ys has the "
                    f"label {unknown[0]:g}."
                )
        return ragged
    whole = np.concatenate([np.ravel(y) for y in ragged.ys])
    if whole.dtype.kind == "O":
        with contextlib.suppress(TypeError, ValueError):
            return ragged._replace(ys=[y.astype(float) for y in ragged.ys])
        if (unnamed := missing(whole)).any():
            raise ValueError(f"{_OWNER}: ys has {int(unnamed.sum())} missing labels; leave those samples out.")
    classes = like_classes
    if classes is None:
        classes = tuple(sorted(set(whole.tolist()), key=lambda c: (str(type(c)), c)))
    if len(classes) < 2:
        raise ValueError(f"{_OWNER}: ys has one class only, {listed(classes)}; there is nothing to tell apart.")
    values = np.array(_codes(classes))
    ys = [values[places(_OWNER, "class", y.tolist(), classes)] for y in ragged.ys]
    return ragged._replace(ys=ys, names=ragged.names.replace(classes=classes))


def _codes(classes: Sequence[Hashable]) -> list[float]:
    """The labels that stand for classes."""
    return [-1.0, 1.0] if len(classes) == 2 else np.arange(float(len(classes))).tolist()


def _in_order_of(ragged: Ragged, like: Names) -> Ragged:
    """Tasks and features in another data set's order; a task without samples has none."""
    if like.tasks is None:
        raise ValueError(f"{_OWNER}: like has no names of tasks; pack it with groups, or from a mapping.")
    if ragged.names.tasks is None:
        raise ValueError(f"{_OWNER}: to be like other data the tasks need names; pass groups, or mappings.")
    xs, features = ragged.xs, ragged.names.features
    if like.features is not None and features is not None:
        wanted = set(like.features)
        if unknown := [name for name in features if name not in wanted]:
            raise ValueError(f"{_OWNER}: features {listed(unknown)} are not among those of like; leave them out.")
        columns = columns_in_order(f"{_OWNER}: xs", features, like.features)
        xs = [x[:, columns] for x in xs]
    tasks = places(_OWNER, "task", ragged.names.tasks, like.tasks).tolist()
    node_of = {t: k for k, t in enumerate(tasks)}
    nodes = [node_of.get(t) for t in range(len(like.tasks))]  # None: no samples
    no_x, no_y, no_rows = np.zeros((0, xs[0].shape[1]), xs[0].dtype), np.zeros(0), np.zeros(0, int)
    rows = ragged.rows
    return Ragged(
        [no_x if k is None else xs[k] for k in nodes],
        [no_y if k is None else ragged.ys[k] for k in nodes],
        [like.task(t) if k is None else ragged.nodes[k] for t, k in enumerate(nodes)],
        None if rows is None else [no_rows if k is None else rows[k] for k in nodes],
        like,
    )


def names_of_tasks(task: ArrayLike | None, nodes: int) -> tuple[np.ndarray, tuple[Hashable, ...] | None]:
    """The task of every node as a number, and the names of tasks where that is what was given."""
    if task is None:
        return np.arange(nodes), None
    owner = check.concrete(task)
    if owner is not None and owner.shape == (nodes,) and owner.dtype.kind in "US":
        names, number = np.unique(owner, return_inverse=True)
        return number, tuple(names.tolist())
    if (
        owner is None
        or owner.shape != (nodes,)
        or owner.dtype.kind not in "iu"
        or sorted(set(owner.tolist())) != list(range(owner.max() + 1))
    ):
        raise ValueError(
            f"{_OWNER}: task must give each of the {nodes} nodes an integer task, and every task from 0 to the "
            f"largest needs a node; renumber them, e.g. with np.unique(task, return_inverse=True)[1]."
        )
    return owner, None


Mappings = Mapping[Any, ArrayLike]
Tables = Iterable[ArrayLike] | ArrayLike | Mappings
