"""What kernels by Mosaic share: the names of its functions in every version of JAX, and the cards it is for."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import jax
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.backend import get_default_device

if TYPE_CHECKING:
    from jax import Ref

# Until JAX 0.11 `load` took an index, and `store` was an assignment; until 0.10.1 types were called shapes.
_ALL = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
TYPE = "type" if "out_type" in inspect.signature(plgpu.kernel).parameters else "shape"


def on_this_card() -> bool:
    """Tell whether the card that a program is lowered for is known to be of Hopper's generation or later."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = get_default_device()
    capability = getattr(device, "compute_capability", None)
    if capability is None:  # of a card that is not here its name is all there is
        return re.search(r"\b(G?H[12]00|G?B[23]00)\b", device.device_kind) is not None
    return str(capability).split(".")[0] in ("9", "10")


def load(ref: Any, layout: Any) -> Array:
    """Read all of a reference, as it lies."""
    return plgpu.load(ref, *_ALL, layout=layout, optimized=False)


def store(ref: Ref, value: Array) -> None:
    """Write all of a reference."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
