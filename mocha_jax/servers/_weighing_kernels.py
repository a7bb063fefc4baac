"""The weighing by a kernel for GPUs, one for each step: what the kernels are given, and when.

By XLA a step is twenty kernels or so, and a weighing is two dozen steps. The first one sets up the programs too, and
the last one returns the way that the weights go. Numbers of the points are kept node by node. A step needs what the
last one made of all nodes, so that two in one kernel would have to wait for each other in between.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core.devices import each_device

if TYPE_CHECKING:
    from mocha_jax.servers._weighing import Tasks

# Since this version Mosaic is for cards before Hopper as well, and Triton's backend is deprecated.
_MOSAIC = (0, 11)

Pull = list[Array | None]  # scale, mix and rows of `Parts`, as far as they are of a kind


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

    def step(self, plan: KernelPlan, relaxation: float | None, interpret: Any, *arrays: Array) -> list[Array]:
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


def kernel_for(platform: str, interpret: Any) -> Kernel | None:
    """The kernel of this version of JAX for a card of that kind, or to interpret, if it has one."""
    if jax.__version_info__ < _MOSAIC:
        return _imported("_weighing_gpu")
    kernel = _imported("_weighing_mosaic") if platform == "cuda" else None
    return kernel if kernel is not None and (interpret or kernel.is_for_this_card()) else None


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(f"mocha_jax.servers.{name}")
    except ImportError as error:
        if (error.name or "").startswith("mocha_jax"):
            raise
        return None


def weigh(
    kernel: Kernel, steps: int, relaxation: float, interpret: Any, tasks: Tasks, along: Array, slope: Array, free: Array
) -> tuple[Array, Array]:
    """Return the weights ``[p, m]`` and the way that they go ``[m, d]``; see `mocha_jax.servers._weighing`."""
    m, p, d = along.shape
    sharding = tasks.sharding
    plan = kernel.plan(m if sharding is None else m // sharding.devices, d, p)
    along = jnp.pad(along, ((0, 0), (0, 0), (0, plan.width - d)))
    given = along, slope.T, free, tasks.units
    h, a, sums, gram = each_device(sharding, partial(_first, kernel, plan, relaxation, interpret), None, *given)
    for k in range(2, steps + 1):
        pull = tasks.settled_parts(h, sums, d)
        of_all = len(pull.scale) == 1, pull.mix is not None and len(pull.mix) == 1, pull.mix is not None
        parts = list(zip(pull, of_all, strict=True))
        everybodys, mine = ([part if common is which else None for part, common in parts] for which in (True, False))
        work = partial(_later, kernel, plan, None if k == steps else relaxation, interpret)
        h, a, sums = each_device(sharding, work, everybodys, mine, *given, gram, h, a)
    return a.T, h[:, :d]


def _first(kernel: Kernel, plan: KernelPlan, relaxation: float, interpret: Any, _: None, *given: Array) -> list[Array]:
    return kernel.step(plan, relaxation, interpret, *given)


def _later(
    kernel: Kernel,
    plan: KernelPlan,
    relaxation: float | None,
    interpret: Any,
    everybodys: Pull,
    mine: Pull,
    *arrays: Array,
) -> list[Array]:
    scale, mix, rows = (a if b is None else b for a, b in zip(everybodys, mine, strict=True))
    assert scale is not None
    assert rows is not None
    pull = (scale, rows) if mix is None else (scale, rows, mix)
    return kernel.step(plan, relaxation, interpret, *arrays, *pull)
