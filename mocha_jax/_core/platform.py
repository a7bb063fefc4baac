"""A choice by platform that is made, and traced, where a program is lowered.

`lax.platform_dependent` lowers one branch but traces all of them, and leaves a `case` in the program. Kernels take
longer to trace than the loops they replace, and need modules of JAX that are slow to import and may be gone in another
version. As one opaque operation, which becomes a branch only when it is lowered, they cost other machines nothing.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from mocha_jax._core.pytree import Tree

PLATFORMS = ("cuda", "rocm", "tpu")  # those that may have a branch of their own

Shapes = tuple[tuple[tuple[int, ...], np.dtype], ...]  # shape and dtype of every result

Result = TypeVar("Result")
Trees = TypeVarTuple("Trees")


def platform_dependent(
    results: Result, *given: *Trees, default: Callable[[*Trees], Result], **branches: Callable[[*Trees], Result]
) -> Result:
    """``branch(*given)``, with the branch for the platform that the program is lowered for.

    It works under `jit`, `vmap`, `scan` and `shard_map` (with ``check_vma=False``) and has no derivative.

    Args:
      results: arrays of the shapes and dtypes of the results.
      *given: trees of arrays.
      default: the branch of platforms that have none of their own.
      **branches: functions by name of a platform, out of `PLATFORMS`. All are hashed by value: functions of a module.
    """
    arrays, structure = jax.tree.flatten(given)
    wanted, results_structure = jax.tree.flatten(results)
    work = _Branches(default, tuple(branches.get(p, default) for p in PLATFORMS), structure)
    shapes = tuple((a.shape, a.dtype) for a in wanted)
    found = _chosen_late.bind(*map(jnp.asarray, arrays), work=work, shapes=shapes)
    return jax.tree.unflatten(results_structure, found)


@dataclasses.dataclass(frozen=True)
class _Branches:
    """Functions of trees, as functions of their leaves."""

    default: Callable[..., Tree]
    own: tuple[Callable[..., Tree], ...]
    structure: jax.tree_util.PyTreeDef

    def __call__(self, platform: str | None, *arrays: Array) -> list[Array]:
        branch = self.default if platform is None else self.own[PLATFORMS.index(platform)]
        return jax.tree.leaves(branch(*jax.tree.unflatten(self.structure, arrays)))


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """Branches that are mapped over some axes of the leaves."""

    work: Callable[..., list[Array]]
    axes: tuple[int | None, ...]

    def __call__(self, platform: str | None, *arrays: Array) -> list[Array]:
        return jax.vmap(partial(self.work, platform), in_axes=self.axes)(*arrays)


def _lowered(
    platform: str | None, ctx: mlir.LoweringRuleContext, *arrays: mlir.ir.Value, work: Callable[..., list[Array]],
    shapes: Shapes,
) -> Sequence[mlir.ir.Value | Sequence[mlir.ir.Value]]:  # fmt: skip
    del shapes
    with warnings.catch_warnings():
        # Whoever lowers a program did not choose what its kernels are written in.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return mlir.lower_fun(partial(work, platform), multiple_results=True)(ctx, *arrays)


def _batched(
    arrays: tuple[Array, ...], axes: tuple[int | None, ...], *, work: Callable[..., list[Array]], shapes: Shapes
) -> tuple[list[Array], list[int]]:
    size = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)
    wider = tuple(((size, *shape), dtype) for shape, dtype in shapes)
    return _chosen_late.bind(*arrays, work=_Mapped(work, tuple(axes)), shapes=wider), [0] * len(shapes)


@lru_cache
def _compiled(work: Callable[..., list[Array]], shapes: Shapes) -> Callable[..., list[Array]]:
    """Compile and call, outside of `jit`."""
    return jax.jit(partial(_chosen_late.bind, work=work, shapes=shapes))


_chosen_late = Primitive("platform_dependent_late")
_chosen_late.multiple_results = True
_chosen_late.def_impl(lambda *arrays, work, shapes: _compiled(work, shapes)(*arrays))
_chosen_late.def_abstract_eval(lambda *_, work, shapes: [jax.core.ShapedArray(*shape) for shape in shapes])
mlir.register_lowering(_chosen_late, partial(_lowered, None))
for _platform in PLATFORMS:
    mlir.register_lowering(_chosen_late, partial(_lowered, _platform), platform=_platform)
batching.primitive_batchers[_chosen_late] = _batched
