"""The kernels of the local epoch and of the weighing: the one place that knows how they are called.

To add one add a line to `EPOCHS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.card._timing import on_cpu

# A shape ``[n, m, d]`` that a kernel takes on any card that it is for.
_USUAL = (128, 10_000, 64)


class Epoch(NamedTuple):
    """A kernel of the local epoch, with the functions `fits` and `epoch` of its module."""

    module: str
    takes: Callable[[int, int], bool]  # rows of d numbers of so many bytes each, be it the best for them or not
    interpreted: Callable[[], dict[str, Any] | None]  # options for a CPU; None where this JAX cannot
    variants: tuple[dict[str, int], ...]  # options beside those it chooses, worth a comparison on one shape


def _by_mosaic() -> dict[str, Any] | None:
    from jax.experimental.pallas import mosaic_gpu

    params: Any = getattr(mosaic_gpu, "InterpretGPUParams", None)
    # What is worked on twice is written twice, which the detection of races would not like.
    return None if params is None else {"interpret": params(detect_races=False)}


EPOCHS = {
    "triton": Epoch(
        "mocha_jax._node.kernel_gpu", lambda d, size: d <= 4096, lambda: {"interpret": True},
        ({"depth": 2}, {"depth": 6}, {"warps": 2}, {"nodes": 1}, {"nodes": 4}, {"nodes": 4, "warps": 2}),
    ),
    "mosaic": Epoch(
        "mocha_jax._node.kernel_mosaic", lambda d, size: d * size % 16 == 0 and d * size >= 32 and d <= 256, _by_mosaic,
        ({"depth": 2}, {"depth": 3}, {"depth": 6}, {"lanes": 2}, {"lanes": 8}, {"lanes": 16}, {"lanes": 8, "depth": 6}),
    ),
}  # fmt: skip


class Kernel(NamedTuple):
    """A kernel that can be called here."""

    name: str
    kind: Epoch
    module: Any
    options: dict[str, Any]

    def takes(self, d: int, dtype: Any) -> bool:
        """Whether it can be called with rows of d numbers."""
        return self.kind.takes(d, jnp.dtype(dtype).itemsize)

    def passes(self, orders: Array, loss: Any, *arrays: Array, **options: Any) -> tuple[Array, Array, Array]:
        """One pass for each order ``[passes, n]``; arrays are those of `mocha_jax._node.kernel` up to the steps."""
        epoch = partial(self.module.epoch, **(self.options | options))
        x, y, weight, norm2, beta, w, q, steps = arrays
        found: tuple[Array, ...] = ()
        for order in orders:
            earlier = found[1:]
            found = epoch(loss, x, y, weight, norm2, found[0] if found else beta, w, q, steps, order, *earlier)
        return found  # type: ignore[return-value]


def kernels(say: Callable[[str], None]) -> Iterator[Kernel]:
    """Those that this JAX has what they are written in for, and this card is of a generation for."""
    for name, kind in EPOCHS.items():
        try:
            module = importlib.import_module(kind.module)
        except ImportError as error:
            say(f"{name}: not with jax {jax.__version__} ({error})")
            continue
        options = kind.interpreted() if on_cpu() else {}
        if options is None:
            say(f"{name}: jax {jax.__version__} does not interpret it on a CPU")
        elif not on_cpu() and not module.fits(_USUAL, jnp.float32):
            say(f"{name}: not for a {jax.devices()[0].device_kind}")
        else:
            yield Kernel(name, kind, module, options)


def loops(
    orders: Array, loss: Any, x: Array, y: Array, weight: Array, _norm2: Array, beta: Array, w: Array, q: Array,
    steps: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The same passes by the loops that XLA compiles, with the same arguments and results."""
    import mocha_jax as mj
    from mocha_jax._node.ascent import ascend
    from mocha_jax._node.layout import time_major

    m = x.shape[1]
    data = mj.TaskData(jnp.swapaxes(x, 0, 1), y.T, weight.T, jnp.arange(m, dtype=jnp.int32), num_tasks=m)
    new, moved, done = ascend((orders,), loss, time_major(data, (), "xla"), beta.T, w, q, steps)
    return new.T, moved, done


def weigh(by_kernel: bool, v: Array, slope: Array, tasks: Any, free: Array) -> Array:
    """The weights ``[p, m]`` of points ``[p, m, d]``, by the kernel (on a CPU interpreted) or by the loops."""
    from mocha_jax.servers import _weighing

    if not by_kernel:
        return _weighing.best_mixture(list(v), slope, tasks, free, "xla")
    if not on_cpu():
        return _weighing.best_mixture(list(v), slope, tasks, free)
    along = _weighing.along_from(list(v), jnp.sqrt(tasks.consensus.stiffness))
    a, _ = _weighing._by_kernel(tasks, along, slope, free.astype(slope.dtype), interpret=True)
    return jnp.concatenate([1.0 - jnp.sum(a, axis=0, keepdims=True), a])
