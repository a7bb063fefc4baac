"""The kernels of the local epoch and of the weighing: the one place that knows how they are called.

To add one add a line to `EPOCHS`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.card._timing import on_cpu

# A shape ``[n, m, d]`` that a kernel takes on any card that it is for.
_USUAL = (128, 10_000, 64)

# Since this version of JAX Triton is deprecated.
_WITHOUT_TRITON = (0, 11)


def _by_mosaic() -> dict[str, Any] | None:
    from jax.experimental.pallas import mosaic_gpu

    params: Any = getattr(mosaic_gpu, "InterpretGPUParams", None)
    # What is worked on twice is written twice, which the detection of races would not like.
    return None if params is None else {"interpret": params(detect_races=False)}


class Epoch(NamedTuple):
    """A kernel of the local epoch: a module with the functions `fits` and `epoch`."""

    module: str
    used: bool  # whether the library may choose it with this version of JAX; if not it is only timed
    interpreted: Callable[[], dict[str, Any] | None]  # options for a CPU; None where this JAX cannot
    interprets: Callable[[int, int], bool]  # on a CPU, rows of d numbers of so many bytes each
    variants: tuple[dict[str, Any], ...]  # options beside those it chooses, worth a comparison on one shape


EPOCHS = {
    "mosaic": Epoch(
        "mocha_jax._node.kernel_gpu", True, _by_mosaic,
        lambda d, size: d * size % 16 == 0 and d * size >= 32 and d <= 256,
        ({"depth": 2}, {"depth": 3}, {"depth": 6}, {"lanes": 2}, {"lanes": 8}, {"lanes": 16}, {"lanes": 8, "depth": 6},
         {"copied": False}, {"copied": False, "depth": 2}, {"copied": False, "lanes": 16}),
    ),
    "triton": Epoch(
        "mocha_jax._node.kernel_triton", jax.__version_info__ < _WITHOUT_TRITON, lambda: {"interpret": True},
        lambda d, size: d <= 4096,
        ({"depth": 2}, {"depth": 6}, {"warps": 2}, {"nodes": 1}, {"nodes": 4}, {"nodes": 4, "warps": 2}),
    ),
}  # fmt: skip


class Kernel(NamedTuple):
    """A kernel that can be called here."""

    name: str
    kind: Epoch
    module: Any
    options: dict[str, Any]

    def takes(self, n: int, m: int, d: int, dtype: Any) -> bool:
        """Whether it takes n rows of m nodes with d numbers; on a card whether it is one for them."""
        if on_cpu():
            return self.kind.interprets(d, jnp.dtype(dtype).itemsize)
        return bool(self.module.fits((n, m, d), jnp.dtype(dtype)))

    @property
    def variants(self) -> list[dict[str, Any]]:
        """Options to compare, of those that it has."""
        known = set(inspect.signature(self.module.epoch).parameters)
        return [variant for variant in self.kind.variants if known >= set(variant)]

    def passes(self, orders: Array, loss: Any, *arrays: Array, **options: Any) -> tuple[Array, Array, Array]:
        """One pass for each order ``[passes, n]``; arrays are those of `mocha_jax._node.kernel` up to the steps."""
        epoch = partial(self.module.epoch, **(self.options | options))
        x, y, weight, norm2, beta, w, q, steps = arrays
        found: tuple[Array, ...] = ()
        for order in orders:
            earlier = found[1:]
            found = epoch(loss, x, y, weight, norm2, found[0] if found else beta, w, q, steps, order, *earlier)
        return found  # type: ignore[return-value]


def kernels(say: Callable[[str], None], *, used: bool = True) -> Iterator[Kernel]:
    """Those that this JAX has what they are written in for, and this card is of a generation for.

    Args:
      say: where to say which are left out, and why.
      used: only those that the library may choose.
    """
    for name, kind in EPOCHS.items():
        if used and not kind.used and not on_cpu():
            say(f"{name}: not used with jax {jax.__version__}")
            continue
        try:
            module = importlib.import_module(kind.module)
        except ImportError as error:
            say(f"{name}: not with jax {jax.__version__} ({error})")
            continue
        options = kind.interpreted() if on_cpu() else {}
        if options is None:
            say(f"{name}: jax {jax.__version__} does not interpret it on a CPU")
        elif not on_cpu() and not module.fits(_USUAL, jnp.dtype("float32")):
            say(f"{name}: not for a {jax.devices()[0].device_kind}")
        else:
            yield Kernel(name, kind, module, options)


def loops(
    orders: Array, loss: Any, x: Array, y: Array, weight: Array, _norm2: Array, beta: Array, w: Array, q: Array,
    steps: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The same passes by the loops that XLA compiles, with the same arguments and results."""
    import mocha_jax as mj
    from mocha_jax._node.buckets import time_major
    from mocha_jax._node.local_solver import ascend

    m = x.shape[1]
    data = mj.TaskData(jnp.swapaxes(x, 0, 1), y.T, weight.T, jnp.arange(m, dtype=jnp.int32), num_tasks=m)
    new, moved, done = ascend((orders,), loss, time_major(data, (), "xla"), beta.T, w, q, steps)
    return new.T, moved, done


def weigh(by_kernel: bool, v: Array, slope: Array, tasks: Any, free: Array) -> Array:
    """The weights ``[p, m]`` of points ``[p, m, d]``, by the kernel (on a CPU interpreted) or by the loops."""
    from mocha_jax.servers._quadratic_programs import best_mixture
    from mocha_jax.servers._quadratic_programs_kernels import by_kernel as weigh_by_kernel
    from mocha_jax.servers._quadratic_programs_kernels import by_platform

    if not by_kernel or not on_cpu():
        return best_mixture(list(v), slope, tasks, free, by_platform("auto" if by_kernel else "xla"))
    along = jnp.stack([jnp.sqrt(tasks.consensus.stiffness) * (point - v[0]) for point in v[1:]], axis=1)
    how = _by_mosaic() if jax.__version_info__ >= _WITHOUT_TRITON else {"interpret": True}
    a, _ = weigh_by_kernel("cuda", tasks, along, slope, free.astype(slope.dtype), **(how or {}))
    return jnp.concatenate([1.0 - jnp.sum(a, axis=0, keepdims=True), a])


def shrunk(s: Array, share: Array) -> Array:
    """Singular values less a share of the largest: a rule for `contracted`."""
    return jnp.maximum(s - share * jnp.max(s), 0.0)


def contracted(by_kernel: bool, w: Array, share: Array, basis: Any) -> tuple[Array, Array]:
    """Singular values of ``[m, d]``, and what makes it a matrix of `shrunk` ones, by the kernel or by a library.

    On a CPU the kernel is interpreted, where this version of JAX can; where it takes no such matrix there is the
    library's work.
    """
    from mocha_jax._numerics import tall

    how = _by_mosaic() if on_cpu() else None
    if by_kernel and not on_cpu():
        found = tall.contraction(shrunk, shrunk, w, share, basis)
        return found[0], found[2]
    gram = tall._gram(tall._along(w, basis))
    if by_kernel and how:
        from mocha_jax._numerics import tall_gpu

        s, *_, inner = tall_gpu.small_work(gram, basis, tall._least(w.dtype), shrunk, share, **how)
        return s, inner
    found = tall._ByLibrary(shrunk)(gram, basis, share)
    return found[0], found[2]
