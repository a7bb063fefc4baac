"""Packing of ragged arrays to `TaskData`, with every mistake named."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.devices import on_device, on_purpose
from mocha_jax._core.warnings import warn
from mocha_jax._data.frames import check_unmasked
from mocha_jax._data.layouts import collect
from mocha_jax._data.read import Ragged, Tables, names_of_tasks, read
from mocha_jax._data.task_data import SCALINGS, TaskData, size_of_intercept

# Bytes of samples that are padded on the host at a time.
_PIECE = 2**26

# Padding is worth a warning where it makes samples so many times as large, and by so many bytes larger.
_OFTEN, _MUCH = 4, 100_000_000


@on_purpose
def pack_tasks(
    xs: Tables,
    ys: Tables | str,
    groups: ArrayLike | str | None = None,
    *,
    like: TaskData | None = None,
    task: ArrayLike | None = None,
    loss_scaling: str = "sum",
    intercept: bool | float = False,
    dtype: DTypeLike | None = None,
    rows: int | None = None,
) -> TaskData:
    """Pack ragged per-node data into one `TaskData`.

    Args:
      xs: list of ``[n_t, d]`` arrays, one per node; a mapping of names to such arrays; or one ``[N, d]`` array or
        data frame with `groups`. Column names of data frames become feature names.
      ys: list or mapping of ``[n_t]`` arrays; or one ``[N]`` array with `groups`; or the column of a data frame that
        holds them. Text labels are class names: in sorted order they become -1 and 1 for two classes, and
        0, 1, ... for more.
      groups: ``[N]`` labels, any sortable type, or the column that holds them; each distinct label is a node of that
        name, in sorted order, and its samples keep their order.
      like: other data, e.g. for training, to match by the names of tasks, features and classes: the result has its
        order, and no samples for tasks that are absent here. Its other settings apply too,
        including its standardisation.
      task: ``[m]`` the task of each node, if several nodes share one (Remark 4), as integers or as
        names; default: node k is task k.
      loss_scaling: ``"sum"`` adds up losses as in equation (1), c = 1; ``"task_mean"``
        averages them within each task, c = 1/n_t.
      intercept: append a constant to every sample, 1 or any other number s. Its weight is penalised like any other,
        and with it the intercept, 1/s^2 as much: with 10 a hundredth. See `TaskData.standardized` for one that is not
        penalised at all with the squared loss, and `free_intercept` for the effect of s with others.
      dtype: of the stored arrays; default is JAX's default float (float32, or float64
        with ``jax_enable_x64``). With a float of 16 bits, e.g. ``"bfloat16"``, only the samples are rounded and stored
        in it; labels, weights and all arithmetic have JAX's default float.
      rows: of every node; default: the samples of the largest task, to which all others are then padded, with a warning
        if that takes much memory. A task with more samples is dealt over several nodes, which share its weights as
        with `task`: less padding and the same optimum, reached by other rounds. One with fewer is padded. Data of the
        same shape share compiled programs.

    Examples:
      >>> import numpy as np
      >>> data = pack_tasks([np.ones((3, 2), "f"), np.ones((1, 2), "f")], [np.ones(3), np.ones(1)])
      >>> data.x.shape, data.sizes.tolist(), data.weight.tolist()
      ((2, 3, 2), [3, 1], [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])

      Test samples of one task of two:

      >>> train = pack_tasks({"oak": np.ones((3, 2), "f"), "elm": np.ones((1, 2), "f")},
      ...                    {"oak": np.ones(3), "elm": np.ones(1)})
      >>> test = pack_tasks({"elm": np.zeros((2, 2), "f")}, {"elm": np.ones(2)}, like=train)
      >>> test.names.tasks, test.sizes.tolist()
      (('oak', 'elm'), [0, 2])

      One large task among small ones, on nodes of its own:

      >>> data = pack_tasks([np.ones((9, 2), "f"), np.ones((3, 2), "f")], [np.ones(9), np.ones(3)], rows=3)
      >>> data.x.shape, data.task.tolist(), data.num_tasks
      ((4, 3, 2), [0, 0, 0, 1], 2)
    """
    check.one_of("pack_tasks", "loss_scaling", loss_scaling, SCALINGS)
    intercept = size_of_intercept("pack_tasks", intercept)
    check_unmasked("pack_tasks", task=task)
    if like is not None:
        check.instance("pack_tasks", "like", like, TaskData, "the training data")
        if task is not None:
            raise ValueError("pack_tasks: task must be left out where like says which tasks there are.")
        loss_scaling, intercept = like.loss_scaling, like.intercept
        dtype = like.x.dtype if dtype is None else dtype
    ragged = read(xs, ys, groups, None if like is None else like.names)
    storage, dtype = _dtypes(ragged.xs, dtype)
    _check_tasks(ragged, absent=like is not None)
    samples, labels, nodes = ragged.xs, ragged.ys, ragged.nodes
    owner, tasks = names_of_tasks(task, len(samples))
    names = ragged.names if task is None else ragged.names.replace(tasks=tasks)  # those read are of nodes
    d = samples[0].shape[1]
    width = d + bool(intercept)
    if rows is None:
        n = max(map(len, labels))
        _warn_of_padding(np.array([len(y) for y in labels]), width * storage.itemsize)
    else:
        check.integer("pack_tasks", 1, rows=rows)
        n = int(rows)
        origin, samples, labels = _dealt(samples, labels, n)
        owner, nodes = owner[origin], [nodes[t] for t in origin]
    m = len(samples)
    if like is not None and d != like.num_slopes:
        raise ValueError(f"pack_tasks: xs has {d} features, where like has {like.num_slopes}.")

    def overflow(t: int) -> ValueError:
        return ValueError(f"{nodes[t]}: a value overflows {storage.name}; rescale its features or labels.")

    some_label = next(own[0] for own in labels if len(own))
    y = np.zeros((m, n), dtype)
    weight = np.zeros((m, n), dtype)
    with np.errstate(over="ignore"):  # reported by name
        for t, own in enumerate(labels):
            y[t, : len(own)] = own
            # Padding carries a real label, so every loss is finite on it.
            y[t, len(own) :] = own[-1] if len(own) else some_label
            weight[t, : len(own)] = 1.0
    if not (fine := np.isfinite(y).all(1)).all():
        raise overflow(int(np.argmin(fine)))

    def pieces() -> Iterator[np.ndarray]:
        count = max(_PIECE // (n * width * storage.itemsize), 1)
        for first in range(0, m, count):
            piece = np.zeros((min(count, m - first), n, width), storage)
            with np.errstate(over="ignore"):
                for k, own in enumerate(samples[first : first + count]):
                    piece[k, : len(own), :d] = own
                    piece[k, : len(own), d:] = intercept
            if not (fine := np.isfinite(piece).all((1, 2))).all():
                raise overflow(first + int(np.argmin(fine)))
            yield piece

    data = TaskData(
        x=collect(pieces(), (m, n, width), storage), y=on_device(y), weight=on_device(weight),
        task=on_device(owner, np.int32), loss_scaling=loss_scaling, names=names, intercept=intercept,
    )  # fmt: skip
    if loss_scaling != "sum":  # which is what they are
        data = data.replace(weight=_base_weight(data.unnamed()))
    return data if like is None or like.scaling is None else data.standardized(like=like)


def _dealt(
    xs: list[np.ndarray], ys: list[np.ndarray], rows: int
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Cut what has more samples than `rows` into parts of about the same size; from which each came, and the parts."""
    parts = [max(-(-len(y) // rows), 1) for y in ys]
    if max(parts) == 1:
        return np.arange(len(ys)), xs, ys
    xs, ys = ([one for a, k in zip(each, parts, strict=True) for one in np.array_split(a, k)] for each in (xs, ys))
    return np.repeat(np.arange(len(parts)), parts), xs, ys


def _warn_of_padding(sizes: np.ndarray, row: int) -> None:
    """Say what padding costs, and what dealing large tasks over nodes would; `row` are the bytes of a sample."""
    padded, own = len(sizes) * int(sizes.max()) * row, int(sizes.sum()) * row
    if padded > _OFTEN * own and padded - own > _MUCH:
        rows = -(-int(sizes.sum()) // len(sizes))  # with the mean, never more than twice the samples
        dealt = int(np.maximum(-(-sizes // rows), 1).sum()) * rows * row
        warn(
            f"pack_tasks: padded to the {sizes.max()} samples of the largest task, {own / 1e6:.3g} MB of samples take "
            f"{padded / 1e6:.3g} MB; with rows={rows}, which deals large tasks over several nodes, they take "
            f"{dealt / 1e6:.3g} MB and have the same optimum."
        )


_base_weight = jax.jit(TaskData.base_weight)  # one program


def _dtypes(xs: list[np.ndarray], dtype: DTypeLike | None) -> tuple[np.dtype, np.dtype]:
    """Choose the dtype of the samples and that of everything else."""
    default = jnp.result_type(float)
    x64 = default == np.float64
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


def _check_tasks(ragged: Ragged, absent: bool) -> None:
    """Samples and labels that fit together and are numbers; with `absent`, tasks may have none."""
    xs, ys, names, _, _ = ragged
    if not xs:
        raise ValueError("pack_tasks: got no tasks; xs is empty.")
    if len(xs) != len(ys):
        raise ValueError(f"pack_tasks: got {len(xs)} arrays in xs but {len(ys)} in ys; pass one of each per task.")
    for t, (name, x, y) in enumerate(zip(names, xs, ys, strict=True)):
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
        if not len(x) and not absent:
            raise ValueError(f"{name}: has no samples; leave it out.")
        for what, a in (("x", x), ("y", y)):
            if a.dtype.kind not in "fiub":
                raise ValueError(f"{name}: {what} must be numbers, got dtype {a.dtype}.")
            if not np.isfinite(a).all():
                row = int(np.argmin(np.isfinite(a.reshape(len(a), -1)).all(1)))
                place = f"row {row}" if ragged.rows is None else f"row {ragged.rows[t][row]} of the table"
                raise ValueError(f"{name}: {what} is NaN or infinite in {place}; remove or impute it.")
