"""Checks of samples, labels and weights: real numbers, finite, none of them masked."""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check

Samples = Array | np.ndarray

# Arrays that were looked at. Those of JAX never change, so once is enough.
_seen: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def masked(value: object) -> bool:
    """Tell whether values are masked, in an array or a list of them: NumPy would take what lies beneath for data."""
    if isinstance(value, list | tuple):
        return any(masked(one) for one in value)
    return bool(np.ma.is_masked(value))


def check_unmasked(owner: str, **arrays: object) -> None:
    """Check that arrays have no masked values."""
    for name, array in arrays.items():
        if masked(array):
            raise ValueError(
                f"{owner}: {name} holds masked values, which have no numbers; leave those samples out or impute them."
            )


def check_arrays(x: Samples, y: Samples, weight: Samples, task: Samples) -> None:
    """Samples ``[m, n, d]``, labels and weights ``[m, n]`` and tasks ``[m]`` that fit together and are numbers."""
    check_unmasked("TaskData", x=x, y=y, weight=weight, task=task)
    check.array("TaskData", "x", x, ("m", "n", "d"))
    m, n, _ = np.shape(x)
    for name, value, shape in (("y", y, (m, n)), ("weight", weight, (m, n)), ("task", task, (m,))):
        check.array("TaskData", name, value, shape)
    weights = check.concrete(weight)
    if weights is not None and not (sound := np.isfinite(weights) & (weights >= 0)).all():
        node = int(np.argmin(sound.all(1)))
        raise ValueError(f"TaskData: node {node} has a negative or non-finite weight; weights must be >= 0.")
    for name, value in (("x", x), ("y", y)):
        if not _finite(value):
            good = np.isfinite(np.asarray(value)).reshape(m, n, -1).all(2)
            node, row = np.argwhere(~good)[0]
            tasks = check.concrete(task)
            where = f"{'' if tasks is None else f'task {int(tasks[node])}, '}node {node}, row {row}"
            # 0 times NaN is not 0.
            padding = weights is not None and weights[node, row] == 0
            remedy = "padding must be finite too, e.g. 0" if padding else "remove or impute it"
            raise ValueError(f"TaskData: {name} is NaN or infinite in {where}; {remedy}.")


def _views(array: Samples) -> list[np.ndarray]:
    """The numbers of an array on CPUs as they lie there: NumPy's own copy of them in its order would stay with it."""
    if not isinstance(array, jax.Array):
        return [np.asarray(array)]
    return [np.from_dlpack(shard.data) for shard in array.addressable_shards]


def _finite(array: Samples) -> bool:
    """Tell whether all numbers are finite, at about the cost of their sum; true of what cannot be looked at."""
    if check.hidden(array) or not jnp.issubdtype(array.dtype, jnp.floating):
        return True
    if _seen.get(id(array)) is array:
        return True
    here = not isinstance(array, jax.Array) or {d.platform for d in array.devices()} == {"cpu"}
    if here and array.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            # What is not finite stays so in a sum; finite numbers may overflow in it.
            found = all(bool(np.isfinite(a.sum()) or np.isfinite(a).all()) for a in _views(array))
    else:  # NumPy is slow with small floats, and what is elsewhere should stay there
        with jax.ensure_compile_time_eval():
            found = bool(jnp.isfinite(array).all())
    if found and isinstance(array, jax.Array):
        _seen[id(array)] = array
    return found
