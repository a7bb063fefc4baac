r"""The recurrence of a layer of long short-term memory, and its derivative.

By autodiff of a scan every step adds an outer product to the derivative of the recurrent weights, as large as they are.
Here the steps back leave their parts in a row, and one product at the end adds up all of them. There is no derivative
in forward mode.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

Steps = tuple[Array, Array, Array, Array, Array, Array]  # h, c, i, f, g, o at all positions, [T, b, h]


@jax.custom_vjp
def recurrence(z: Array, u: Array) -> Array:
    r"""States h at all positions ``[T, b, h]`` of a layer that begins with $h = c = 0$.

    $$
    (i, f, g, o)_s = z_s + h_{s-1} U, \quad
    c_s = \sigma(f_s) \odot c_{s-1} + \sigma(i_s) \odot \tanh(g_s), \quad
    h_s = \sigma(o_s) \odot \tanh(c_s)
    $$

    Args:
      z: what the gates get from below ``[T, b, 4h]``, in the order i, f, g, o.
      u: the recurrent weights ``[h, 4h]``.
    """
    return _forward(z, u)[0]


def _forward(z: Array, u: Array) -> tuple[Array, tuple[Array, Steps]]:
    def step(carry: tuple[Array, Array], z: Array) -> tuple[tuple[Array, Array], Steps]:
        h, c = carry
        i, f, g, o = jnp.split(z + h @ u, 4, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), (h, c, i, f, g, o)

    zero = jnp.zeros((z.shape[1], u.shape[0]), z.dtype)
    _, steps = lax.scan(step, (zero, zero), z)
    return steps[0], (u, steps)


def _backward(kept: tuple[Array, Steps], slopes: Array) -> tuple[Array, Array]:
    u, (h, c, i, f, g, o) = kept
    before_h, before_c = (jnp.concatenate([jnp.zeros_like(a[:1]), a[:-1]]) for a in (h, c))
    back = u.T

    def step(carry: tuple[Array, Array], at: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        dh, dc = carry
        slope, c, before, i, f, g, o = at
        dh, out = dh + slope, jnp.tanh(c)
        dc = dc + dh * o * (1.0 - out * out)
        dz = jnp.concatenate(
            [dc * g * i * (1.0 - i), dc * before * f * (1.0 - f), dc * i * (1.0 - g * g), dh * out * o * (1.0 - o)], -1
        )
        return (dz @ back, dc * f), dz

    zero = jnp.zeros_like(h[0])
    _, dz = lax.scan(step, (zero, zero), (slopes, c, before_c, i, f, g, o), reverse=True)
    return dz, jnp.einsum("sbh,sbz->hz", before_h, dz)


recurrence.defvjp(_forward, _backward)
