r"""Vectors in 8 bits a number, with error feedback.

What travels is the difference between the node's vector v and the one that the server holds of it, $\hat v$, in whole
multiples of a scale. The server adds it to what it holds. What that leaves of the difference is not lost: the node's
next round starts from $w + q\,(v - \hat v)$ and so makes up for it. Towards the end of a run differences shrink, and so
do the steps: it converges to the same optimum.

The scale is a power of two. So the multiples are exact, their sum with what is held is rounded once, and node and
server have the same $\hat v$ to the last bit, whatever machines they are.
"""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from mocha_jax._core.pytree import Pytree
from mocha_jax.federated._sending import Sending

_MOST = 127  # of an integer of 8 bits, either sign

# Powers of two that are normal numbers of float32, and so are that many times as large.
_EXPONENTS = -110, 110


class Code(Pytree):
    """Differences in multiples of a scale."""

    steps: Array  # [m, d] int8
    scale: Array  # [m] float32, a power of two


class Quantized(Sending):
    """A vector's difference from the one that is held, in 8 bits a number and one scale.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> held, v = jnp.ones((1, 3)), jnp.array([[1.0, 1.3, -0.7]])
      >>> code, found = Quantized().encode(jnp.ones(1, "int32"), v, held)
      >>> code.steps.tolist(), code.scale.tolist()
      ([[0, 19, -109]], [0.015625])
      >>> float(jnp.max(jnp.abs(found - v))) <= float(code.scale[0]) / 2
      True
      >>> np.array_equal(Quantized().decode(code, held), found)
      True
    """

    relative: ClassVar[bool] = True

    def encode(self, round: Array, v: Array, held: Array) -> tuple[Code, Array]:
        difference = v - held
        largest = jnp.max(jnp.abs(difference), axis=1)
        exponent = jnp.clip(jnp.frexp(largest / _MOST)[1], *_EXPONENTS)
        scale = jnp.ldexp(jnp.ones_like(largest), exponent)
        steps = jnp.clip(jnp.round(difference / scale[:, None]), -_MOST, _MOST).astype(jnp.int8)
        code = Code(steps, scale.astype(jnp.float32))
        return code, self.decode(code, held)

    def decode(self, code: Code, held: Array) -> Array:
        return held + code.steps.astype(held.dtype) * code.scale.astype(held.dtype)[:, None]
