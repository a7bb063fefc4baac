"""The weighing on accelerators: so many steps, by XLA or by a kernel for GPUs a step.

By XLA a step is twenty kernels or so, and a weighing is two dozen steps. The first one sets up the programs too, and
the last one returns the way that the weights go. Numbers of the points are kept node by node. A step needs what the
last one made of all nodes, so that two in one kernel would have to wait for each other in between.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.devices import each_device
from mocha_jax._numerics.math import matmul
from mocha_jax.coupling import Parts
from mocha_jax.servers._quadratic_programs import (
    RELAXATION,
    Iterate,
    Tasks,
    Weighed,
    Weighing,
    answer,
    combine,
    programs,
    split_step,
)

# Steps of an accelerator, whose host should not wait for an answer.
_STEPS = 24

# Features of a node up to which the kernel for GPUs holds its vectors; rows of all nodes' that it goes through.
_LONGEST, _ROWS = 4096, 1024

# Since this version Mosaic is for cards before Hopper as well, and Triton's backend is deprecated.
_MOSAIC = (0, 11)

Pull = list[Array | None]  # scale, mix and rows of `Parts`, as far as they are of a kind


def in_some_steps(tasks: Tasks, along: Array, slope: Array, free: Array) -> Weighed:
    """Go some steps: the host of an accelerator should not wait for an answer."""
    program = programs(along, slope, tasks.units, free)
    # Nodes come last: along the lanes of a TPU, which would pad a few points or features to as many.
    vectors = jnp.moveaxis(along, 0, -1)

    def asked(z: Array) -> Array:
        return tasks.units[None] * jnp.sum(vectors * z[None], axis=1)

    def way(a: Array) -> Array:
        return jnp.sum(a[:, None] * vectors, axis=0)

    def step(iterate: Iterate, _: None) -> tuple[Iterate, None]:
        return split_step(partial(answer, program), iterate, tasks.settle(iterate.h.T).T, asked, way)[0], None

    start = Iterate(jnp.zeros_like(vectors[0]), tuple(jnp.zeros_like(slope)))
    a = jnp.stack(lax.scan(step, start, length=_STEPS)[0].a)
    return a, combine(along, a)


def by_kernel(
    platform: str, tasks: Tasks, along: Array, slope: Array, free: Array, *, interpret: object = False
) -> Weighed:
    """Go the same steps by a kernel each, where this version of JAX has one that takes such vectors."""
    takes = along.dtype == jnp.float32 and along.shape[-1] <= _LONGEST
    kernel = kernel_for(platform, interpret) if takes else None
    if kernel is None:
        return in_some_steps(tasks, along, slope, free)
    return weigh(kernel, _STEPS, RELAXATION, interpret, tasks, along, slope, free)


_on_cuda, _on_rocm = partial(by_kernel, "cuda"), partial(by_kernel, "rocm")


def by_platform(backend: str) -> dict[str, Callable[[*Weighing], Weighed]]:
    """Choose the weighing of every accelerator; ``backend="xla"`` for no kernel."""
    if backend == "xla":
        return dict.fromkeys(("cuda", "rocm", "tpu"), in_some_steps)
    return {"cuda": _on_cuda, "rocm": _on_rocm, "tpu": in_some_steps}


class KernelPlan(NamedTuple):
    """Numbers of nodes and features that a kernel works on."""

    nodes: int  # of a program
    width: int  # features with those added
    lanes: int = 1  # threads that share a node
    vector: int = 1  # features of these that lie side by side
    at_once: int = 0  # features that are worked on at once


class Kernel(Protocol):
    """A module with a kernel."""

    def plan(self, m: int, d: int, p: int) -> KernelPlan:
        """Choose for m nodes, d features and p points."""

    def step(self, plan: KernelPlan, relaxation: float | None, interpret: object, *arrays: Array) -> list[Array]:
        r"""Go one step, by one kernel.

        Args:
          plan: from above.
          relaxation: r, how far a step goes; None for the last one.
          interpret: False, or how to run on a CPU.
          *arrays: vectors ``[m, p, width]``, slopes ``[m, p]``, who is free ``[m]``, stiffness ``[m]``. After the first
            step also the Gram matrices row by row ``[m, p (p + 1) / 2]``, h ``[m, width]`` and weights ``[m, p]`` of
            the last one, and scale, rows and mix of `Parts`, or scale and rows.

        Returns:
          h or in the last step the way that the weights go ``[m, width]``, weights, and the sums of the former over the
          nodes of a program ``[programs, width]``; in the first step the Gram matrices too.
        """


def kernel_for(platform: str, interpret: object) -> Kernel | None:
    """The kernel of this version of JAX for a card of that kind, or to interpret, if it has one."""
    if jax.__version_info__ < _MOSAIC:
        return _imported("_quadratic_programs_triton")
    kernel = _imported("_quadratic_programs_gpu") if platform == "cuda" else None
    return kernel if kernel is not None and (interpret or kernel.is_for_this_card()) else None


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(f"mocha_jax.servers.{name}")
    except ImportError as error:
        if (error.name or "").startswith("mocha_jax"):
            raise
        return None


def weigh(
    kernel: Kernel,
    steps: int,
    relaxation: float,
    interpret: object,
    tasks: Tasks,
    along: Array,
    slope: Array,
    free: Array,
) -> tuple[Array, Array]:
    """Return the weights ``[p, m]`` and the way that they go ``[m, d]``; see `best_mixture`."""
    m, p, d = along.shape
    sharding = tasks.sharding
    plan = kernel.plan(m if sharding is None else m // sharding.devices, d, p)
    along = jnp.pad(along, ((0, 0), (0, 0), (0, plan.width - d)))
    arrays = along, slope.T, free, tasks.units
    h, a, sums, gram = each_device(sharding, partial(_first, kernel, plan, relaxation, interpret), None, *arrays)
    for k in range(2, steps + 1):
        pull = settled_parts(tasks, h, sums, d)
        of_all = len(pull.scale) == 1, pull.mix is not None and len(pull.mix) == 1, pull.mix is not None
        parts = list(zip(pull, of_all, strict=True))
        common, by_node = ([part if shared is which else None for part, shared in parts] for which in (True, False))
        work = partial(_later, kernel, plan, None if k == steps else relaxation, interpret)
        h, a, sums = each_device(sharding, work, common, by_node, *arrays, gram, h, a)
    return a.T, h[:, :d]


def settled_parts(tasks: Tasks, h: Array, sums: Array, d: int) -> Parts:
    """Take what `Tasks.settle` returns apart, with no more rows in common than a kernel goes through by itself.

    Args:
      tasks: what couples the nodes.
      h: see `Tasks.settle`; with as many features as a kernel needs.
      sums: some rows ``[k, ...]`` that add up to the sum of those of h.
      d: so many features there are.
    """
    parts = tasks.consensus.resolvent.parts(h) if tasks.task is None and tasks.nodes == len(tasks.counts) else None
    if parts is None:
        settled = jnp.pad(tasks.settle(h[:, :d]), ((0, 0), (0, h.shape[1] - d)))
        return Parts(jnp.zeros_like(h[:1, 0]), None, settled)
    scale, mix, rows = parts
    assert mix is not None
    rows = sums if mix.shape == (1, 1) and rows is h else rows
    if len(rows) <= _ROWS and (tasks.sharding is None or rows is not sums):
        return Parts(scale, mix, rows)
    if mix.shape == (1, 1):
        return Parts(scale, mix, jnp.sum(rows, axis=0, keepdims=True))
    return Parts(scale, None, matmul(mix, rows))


def _first(
    kernel: Kernel, plan: KernelPlan, relaxation: float, interpret: object, _: None, *arrays: Array
) -> list[Array]:
    return kernel.step(plan, relaxation, interpret, *arrays)


def _later(
    kernel: Kernel,
    plan: KernelPlan,
    relaxation: float | None,
    interpret: object,
    common: Pull,
    by_node: Pull,
    *arrays: Array,
) -> list[Array]:
    scale, mix, rows = (a if b is None else b for a, b in zip(common, by_node, strict=True))
    assert scale is not None
    assert rows is not None
    pull = (scale, rows) if mix is None else (scale, rows, mix)
    return kernel.step(plan, relaxation, interpret, *arrays, *pull)
