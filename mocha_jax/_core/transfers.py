"""Transfers to the device that the library means to make.

With ``jax_transfer_guard="disallow"`` people look for arrays that travel to the device unnoticed; to JAX every Python
number in an expression is one of them. What a function of the library is given and the few numbers that it adds are
meant to be there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

Function = TypeVar("Function", bound=Callable[..., Any])


def on_purpose(function: Function) -> Function:
    """The function, with leave to bring to the device what it needs there, and to look at what comes of it."""

    @functools.wraps(function)
    def with_leave(*args: Any, **kwargs: Any) -> Any:
        with jax.transfer_guard("allow"):
            return function(*args, **kwargs)

    return cast(Function, with_leave)


def on_device(value: ArrayLike, dtype: DTypeLike | None = None) -> Array:
    """The value as an array of JAX. What is on the host is made there: `jnp.asarray` would compile a program for it."""
    if isinstance(value, jax.Array):
        # In that dtype and not weakly so: programs are compiled for one or the other.
        same = dtype is None or (value.dtype == dtype and not value.weak_type)
        return value if same else jnp.asarray(value, dtype)
    return jax.device_put(np.asarray(value, dtype))
