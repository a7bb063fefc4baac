"""A choice by the platform that a program is lowered for.

`lax.platform_dependent` lowers one branch and traces all of them. Kernels take longer to trace than the loops they
replace, and need modules of JAX that are slow to import. So only those platforms get their branch that a program of
this process can be lowered for: those of its devices, and that of the device which an abstract mesh names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar, TypeVarTuple

import jax
from jax import lax

_ACCELERATORS = ("cuda", "rocm", "tpu")
PLATFORMS = (*_ACCELERATORS, "cpu")  # those that may have a branch of their own
_GPUS = ("cuda", "rocm")  # devices of both call their platform "gpu"

Result = TypeVar("Result")
Trees = TypeVarTuple("Trees")


def platform_dependent(
    *given: *Trees, default: Callable[[*Trees], Result], **branches: Callable[[*Trees], Result]
) -> Result:
    """``branch(*given)``, with the branch for the platform that the program is lowered for.

    Args:
      *given: trees of arrays.
      default: the branch of platforms that have none of their own.
      **branches: functions by name of a platform, out of `PLATFORMS`.
    """
    if not any(map(_reachable, _ACCELERATORS)):
        return branches.get("cpu", default)(*given)
    reachable = {name: branch for name, branch in branches.items() if branch is not default and _reachable(name)}
    return lax.platform_dependent(*given, default=default, **reachable) if reachable else default(*given)


def _reachable(platform: str) -> bool:
    """Tell whether a program may be lowered for this platform."""
    named = jax.sharding.get_abstract_mesh().abstract_device
    if named is None:
        return _has_devices(platform)
    return named.platform in (platform, "gpu" if platform in _GPUS else platform) or _has_devices(platform)


@lru_cache
def _has_devices(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:  # "Unknown backend"
        return False
