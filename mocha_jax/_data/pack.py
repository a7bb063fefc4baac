"""Packing of ragged arrays to `TaskData`, with every mistake named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.transfers import on_purpose
from mocha_jax._core.warnings import warn
from mocha_jax._data.placement import collect
from mocha_jax._data.samples import check_unmasked, masked
from mocha_jax._data.task_data import SCALINGS, TaskData

# Bytes of samples that are padded on the host at a time.
_PIECE = 2**26


@on_purpose
def pack_tasks(
    xs: Iterable[ArrayLike] | ArrayLike,
    ys: Iterable[ArrayLike] | ArrayLike,
    groups: ArrayLike | None = None,
    *,
    task: ArrayLike | None = None,
    loss_scaling: str = "sum",
    intercept: bool = False,
    dtype: DTypeLike | None = None,
) -> TaskData:
    """Pack ragged per-node data into one `TaskData`.

    Args:
      xs: list of ``[n_t, d]`` arrays, one a node; or one ``[N, d]`` array with `groups`.
      ys: list of ``[n_t]`` arrays; or one ``[N]`` array with `groups`.
      groups: ``[N]`` labels, any sortable type; each distinct label is a node, in sorted
        order, and its samples keep their order.
      task: ``[m]`` the task of each node, where several nodes share one (Remark 4);
        default: node k is task k.
      loss_scaling: ``"sum"`` adds up losses as equation (1) does, c = 1; ``"task_mean"``
        averages them within each task, c = 1/n_t.
      intercept: append a constant 1 to every sample. Its weight is penalised like any other.
      dtype: of the stored arrays; default is JAX's default float (float32, or float64
        with ``jax_enable_x64``). With a float of 16 bits, e.g. ``"bfloat16"``, only the samples are stored
        so, rounded; labels, weights and all arithmetic have JAX's default float.

    Examples:
      >>> import numpy as np
      >>> data = pack_tasks([np.ones((3, 2), "f"), np.ones((1, 2), "f")], [np.ones(3), np.ones(1)])
      >>> data.x.shape, data.sizes.tolist(), data.weight.tolist()
      ((2, 3, 2), [3, 1], [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    """
    check.one_of("pack_tasks", "loss_scaling", loss_scaling, SCALINGS)
    check.flag("pack_tasks", intercept=intercept)
    names: list[str] = []
    check_unmasked("pack_tasks", groups=groups, task=task)
    if groups is not None:
        check_unmasked("pack_tasks", xs=xs, ys=ys)
        given = [check.concrete(a) for a in (xs, ys, groups)]
        for name, values in zip(("xs", "ys", "groups"), given, strict=True):
            if values is None:
                raise ValueError(f"pack_tasks: with groups, xs, ys and groups must each be one array; {name} is none.")
        xs, ys, names = _by_group(*(a for a in given if a is not None))
    elif getattr(xs, "ndim", 0) == 2 and getattr(ys, "ndim", 0) == 1:
        raise ValueError(
            "pack_tasks: one array of samples needs groups, the device of each; or pass a list per device."
        )
    each_x, each_y = check.sequence("pack_tasks", "xs", xs), check.sequence("pack_tasks", "ys", ys)
    for what, arrays in (("x", each_x), ("y", each_y)):
        if (node := next((t for t, a in enumerate(arrays) if masked(a)), None)) is not None:
            check_unmasked(names[node] if names else f"task {node}", **{what: arrays[node]})
    xs, ys = (check.arrays("pack_tasks", name, each) if each else [] for name, each in (("xs", each_x), ("ys", each_y)))
    names = names or [f"task {t}" for t in range(len(xs))]
    storage, dtype = _dtypes(xs, dtype)
    _check_tasks(xs, ys, names)
    m, n, d = len(xs), max(map(len, ys)), xs[0].shape[1]

    def overflow(t: int) -> ValueError:
        return ValueError(f"{names[t]}: a value overflows {storage.name}; rescale its features or labels.")

    y = np.zeros((m, n), dtype)
    weight = np.zeros((m, n), dtype)
    with np.errstate(over="ignore"):  # reported by name
        for t, labels in enumerate(ys):
            y[t, : len(labels)] = labels
            y[t, len(labels) :] = labels[-1]  # padding carries a real label, so every loss is finite on it
            weight[t, : len(labels)] = 1.0
    if not (fine := np.isfinite(y).all(1)).all():
        raise overflow(int(np.argmin(fine)))

    def pieces() -> Iterator[np.ndarray]:
        count = max(_PIECE // (n * (d + intercept) * storage.itemsize), 1)
        for first in range(0, m, count):
            piece = np.zeros((min(count, m - first), n, d + intercept), storage)
            with np.errstate(over="ignore"):
                for k, rows in enumerate(xs[first : first + count]):
                    piece[k, : len(rows), :d] = rows
                    piece[k, : len(rows), d:] = 1.0
            if not (fine := np.isfinite(piece).all((1, 2))).all():
                raise overflow(first + int(np.argmin(fine)))
            yield piece

    owner = np.arange(m) if task is None else check.concrete(task)
    if (
        owner is None
        or owner.shape != (m,)
        or owner.dtype.kind not in "iu"
        or sorted(set(owner.tolist())) != list(range(owner.max() + 1))
    ):
        raise ValueError(
            f"pack_tasks: task must give each of the {m} nodes an integer task, and every task from 0 to the "
            f"largest needs a node; renumber them, e.g. with np.unique(task, return_inverse=True)[1]."
        )
    data = TaskData(
        x=collect(pieces(), (m, n, d + intercept), storage), y=jnp.asarray(y), weight=jnp.asarray(weight),
        task=jnp.asarray(owner, jnp.int32), loss_scaling=loss_scaling,
    )  # fmt: skip
    return data.replace(weight=data.base_weight())


def _by_group(x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray], list[str]]:
    if x.ndim != 2 or y.shape != x.shape[:1] or groups.shape != x.shape[:1]:
        raise ValueError(
            f"pack_tasks: with groups, xs must be [N, d], ys and groups [N]; got {x.shape}, {y.shape}, {groups.shape}."
        )
    if groups.dtype.kind == "f" and np.isnan(groups).any():
        raise ValueError(f"pack_tasks: groups is NaN in row {int(np.argmax(np.isnan(groups)))}; give it a label.")
    labels, node = np.unique(groups, return_inverse=True)
    order = np.argsort(node, kind="stable")
    cuts = np.cumsum(np.bincount(node))[:-1]
    return np.split(x[order], cuts), np.split(y[order], cuts), [f"group {label!r}" for label in labels.tolist()]


def _dtypes(xs: list[np.ndarray], dtype: DTypeLike | None) -> tuple[np.dtype, np.dtype]:
    """Choose the dtype of the samples and that of everything else."""
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    default = np.dtype(np.float64 if x64 else np.float32)
    if dtype is not None:
        try:
            if not isinstance(dtype, str | type | np.dtype):  # NumPy takes the type of whatever has one
                raise TypeError
            wanted = jnp.dtype(dtype)
        except TypeError as error:
            shown = check.shown(dtype)
            raise ValueError(f'pack_tasks: dtype must be a float type such as "float32", got {shown}.') from error
        if not jnp.issubdtype(wanted, jnp.floating) or wanted.itemsize < 2:
            raise ValueError(f"pack_tasks: dtype must be a float type of 16 bits or more, got {wanted.name}.")
        if wanted == np.float64 and not x64:
            raise ValueError(
                "pack_tasks: dtype=float64 needs JAX's x64 mode; call jax.config.update('jax_enable_x64', True) "
                "before anything else, or leave dtype out to store float32."
            )
        return wanted, default if wanted.itemsize == 2 else wanted
    if not x64 and any(x.dtype == np.float64 for x in xs):
        warn(
            "pack_tasks: xs are float64 but JAX's x64 mode is off, so they are stored as float32 (relative gaps "
            "below about 1e-6 are then out of reach); pass dtype='float32' to accept that in silence, or call "
            "jax.config.update('jax_enable_x64', True) before anything else to keep float64."
        )
    return default, default


def _check_tasks(xs: list[np.ndarray], ys: list[np.ndarray], names: Sequence[str]) -> None:
    if not xs:
        raise ValueError("pack_tasks: got no tasks; xs is empty.")
    if len(xs) != len(ys):
        raise ValueError(f"pack_tasks: got {len(xs)} arrays in xs but {len(ys)} in ys; pass one of each per task.")
    for name, x, y in zip(names, xs, ys, strict=True):
        if x.ndim != 2:
            raise ValueError(f"{name}: x must be [n_t, d], got shape {x.shape}.")
        if x.shape[1] == 0:
            raise ValueError(f"{name}: has no features.")
        if x.shape[1] != xs[0].shape[1]:
            raise ValueError(
                f"{name}: has {x.shape[1]} features where {names[0]} has {xs[0].shape[1]}; all must agree."
            )
        if y.shape != x.shape[:1]:
            raise ValueError(f"{name}: y must be [{len(x)}] to match its x, got shape {y.shape}.")
        if not len(x):
            raise ValueError(f"{name}: has no samples; leave it out.")
        for what, a in (("x", x), ("y", y)):
            if a.dtype.kind not in "fiub":
                raise ValueError(f"{name}: {what} must be numbers, got dtype {a.dtype}.")
            if not np.isfinite(a).all():
                row = int(np.argmin(np.isfinite(a.reshape(len(a), -1)).all(1)))
                raise ValueError(f"{name}: {what} is NaN or infinite in row {row}; remove or impute it.")
