"""Counting floating-point operations: products and convolutions, and one for each number made by anything else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from mocha_jax._core.pytree import Tree


def flops(fn: Callable[..., Tree], *args: Tree) -> float:
    """Operations of ``fn(*args)``; arguments may be shapes (`jax.ShapeDtypeStruct`).

    Examples:
      >>> import jax.numpy as jnp
      >>> flops(lambda a, b: a @ b + 1.0, jnp.ones((3, 4)), jnp.ones((4, 5)))
      135.0
    """
    return _count(jax.make_jaxpr(fn)(*args))


def _count(jaxpr: Any) -> float:
    return float(sum(_operations(equation) for equation in jaxpr.eqns))


def _operations(equation: Any) -> float:
    inner = [part for value in equation.params.values() for part in _programs(value)]
    if inner:
        times = equation.params.get("length", 1)  # of a scan; loops with an open end count once
        return float(times * max(map(_count, inner)))
    made = float(sum(math.prod(out.aval.shape) for out in equation.outvars))
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * made * math.prod(equation.invars[0].aval.shape[i] for i in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * made * math.prod(kernel) / outputs
    return made


def _programs(value: object) -> list[Any]:
    if hasattr(value, "eqns"):
        return [value]
    if isinstance(value, tuple | list):
        return [program for item in value for program in _programs(item)]
    return []
