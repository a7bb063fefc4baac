r"""Forms of few bytes: a part of the coordinates, few bits a number, and a rotation before either.

Node and server must have the same $\hat v$ to the last bit, on any machines. Scales have 16 significant bits, so that
their products with whole numbers of 8 bits are exact; other numbers are selected, or added in a given order.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, Tree, static, tree
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.compression._sending import Difference

# Normal numbers of float32, also that many times as large.
_SMALLEST, _LARGEST = 2.0**-110, 2.0**110

# Scales that `Quantized` tries, as shares of the one that reaches the largest number: with few bits, rounding the many
# small numbers well is worth more than the few large ones.
_SHARES = tuple(0.8**i for i in range(8))

# Folded into the keys of rounds.
_ROUNDING, _PLACES, _SIGNS = np.uint32(1), np.uint32(2), np.uint32(3)


class Steps(Pytree):
    """Differences in multiples of a scale."""

    planes: Array  # [m, b, ceil(d / 8)] uint8: the bits of the multiples
    scale: Array  # [m] float32 with 16 significant bits


class _OfBits(Difference):
    """Base class of forms of few bits a number."""

    bits: int = static(default=8)

    def __post_init__(self) -> None:
        check.integer(type(self).__name__, 1, 8, bits=self.bits)

    def expand(self, code: Steps, like: Array) -> Array:
        each = jnp.unpackbits(code.planes, axis=-1, count=like.shape[1]).astype(jnp.int32)
        places = jnp.arange(self.bits, dtype=jnp.int32)[None, :, None]
        steps = jnp.sum(each << places, axis=1, dtype=jnp.int32)
        centred = (2 * steps - 1 if self.bits == 1 else steps - _most(self.bits)).astype(like.dtype)
        return centred * code.scale.astype(like.dtype)[:, None]


class _OfCoordinates(Difference):
    """Base class of forms of some coordinates."""

    share: float = static(default=0.01)

    def __post_init__(self) -> None:
        name = type(self).__name__
        check.scalar(name, share=self.share)
        check.in_unit_interval(name, open_left=True, share=self.share)

    def count(self, d: int) -> int:
        """The number of coordinates of d, at least one."""
        return max(1, math.ceil(float(self.share) * d - 1e-9))


class Quantized(_OfBits):
    r"""Whole multiples of a scale, with few bits a number.

    With b bits, 2 to 8, a number is $s\,k$ for the nearest whole k of $-(2^{b-1}-1), \dots, 2^{b-1}-1$. Of some s, from
    the one that reaches the largest number downwards, the one with the least error is taken. With one bit a number is
    $\pm s$, with the mean absolute value for s.

    Args:
      bits: b of a number.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, mocha_jax as mj
      >>> form, held, v = mj.compression.Quantized(), jnp.ones((1, 3)), jnp.array([[1.0, 1.3, -0.7]])
      >>> code, found = form.encode(jnp.ones(1, "int32"), v, held)
      >>> code.planes.shape, code.planes.dtype, float(jnp.abs(found - v).max()) < 1.7 / 254
      ((1, 8, 1), dtype('uint8'), True)
      >>> np.array_equal(form.decode(code, held), found)
      True

    References:
      - [Seide et al., 1-Bit Stochastic Gradient Descent](https://doi.org/10.21437/Interspeech.2014-274), 2014.
    """

    def compress(self, round: Array, x: Array) -> Steps:
        if self.bits == 1:
            return Steps(_planes((x > 0).astype(jnp.int32), 1), _scale(jnp.mean(jnp.abs(x), axis=1)))
        most, largest = _most(self.bits), jnp.max(jnp.abs(x), axis=1)

        def rounded(scale: Array) -> Array:
            return jnp.clip(jnp.round(x / scale[:, None].astype(x.dtype)), -most, most)

        def error(scale: Array) -> Array:
            return jnp.sum((rounded(scale) * scale[:, None].astype(x.dtype) - x) ** 2, axis=1)

        scales = [_scale(share * largest / most) for share in _SHARES[: 1 if self.bits > 5 else None]]
        best = jnp.argmin(jnp.stack([error(scale) for scale in scales]), axis=0)
        scale = jnp.take_along_axis(jnp.stack(scales), best[None], axis=0)[0]
        return Steps(_planes((rounded(scale) + most).astype(jnp.int32), self.bits), scale)


class Stochastic(_OfBits):
    r"""Multiples of a scale as in `Quantized`, rounded up or down by chance such that the mean is the number itself.

    The draws of nodes and rounds are independent. What was drawn for x is multiplied by
    $\|x\|^2 / (\|x\|^2 + \sigma^2)$, $\sigma^2$ the variance of the draw. Without this factor an error could grow from
    round to round where the bits are few.

    Args:
      bits: of a number, 1 to 8. With one bit a number is plus or minus the largest one.

    References:
      - [Alistarh et al., QSGD](https://arxiv.org/abs/1610.02132), 2017.
      - [Mishchenko et al., Distributed Learning with Compressed Gradient Differences](https://arxiv.org/abs/1901.09269),
        2019, with the factor $1/(1 + \omega)$.
    """

    def compress(self, round: Array, x: Array) -> Steps:
        # With one bit the multiples are -1/2 and 1/2, of twice the largest; else as in `Quantized`.
        most = max(_most(self.bits), 0.5)
        scale = _scale(jnp.max(jnp.abs(x), axis=1) / most)
        place = jnp.clip(x / scale[:, None].astype(x.dtype), -most, most) + jnp.asarray(most, x.dtype)
        below = jnp.clip(jnp.floor(place), 0, 2 * most - 1)
        chance = place - below
        steps = below + (_uniform(round, x) < chance).astype(x.dtype)
        variance = scale.astype(x.dtype) ** 2 * jnp.sum(chance * (1.0 - chance), axis=1)
        length = jnp.sum(x**2, axis=1)
        shorter = scale.astype(x.dtype) * safe_ratio(length, length + variance)
        return Steps(_planes(steps.astype(jnp.int32), self.bits), _scale(min(most, 1.0) * shorter))


class Entries(Pytree):
    """Some coordinates of differences."""

    values: Array  # [m, k]
    places: Array  # [m, k] uint16, or uint32 of vectors of more than 65,536 numbers


class TopK(_OfCoordinates):
    r"""The coordinates of the largest absolute values.

    Args:
      share: of the coordinates, k of d, rounded up.

    Examples:
      >>> import jax.numpy as jnp, mocha_jax as mj
      >>> v = jnp.array([[3.0, -1.0, 0.5, -4.0]])
      >>> mj.compression.TopK(0.5).encode(jnp.ones(1, "int32"), v, jnp.zeros_like(v))[1].tolist()
      [[3.0, 0.0, 0.0, -4.0]]

    References:
      - [Stich, Cordonnier and Jaggi, Sparsified SGD with Memory](https://arxiv.org/abs/1809.07599), 2018.
    """

    def compress(self, round: Array, x: Array) -> Entries:
        _, places = lax.top_k(jnp.abs(x), self.count(x.shape[1]))
        values = jnp.take_along_axis(x, places, axis=1)
        return Entries(values, places.astype(jnp.uint16 if x.shape[1] <= 2**16 else jnp.uint32))

    def expand(self, code: Entries, like: Array) -> Array:
        return _spread(code.values, code.places.astype(jnp.int32), like)


class Drawn(Pytree):
    """Coordinates that the round draws."""

    values: Array  # [m, k]
    round: Array  # [m] int32


class RandomK(_OfCoordinates):
    """Coordinates drawn anew in every round, without replacement: they need not be sent.

    Args:
      share: of the coordinates, k of d, rounded up.

    References:
      - [Stich, Cordonnier and Jaggi, Sparsified SGD with Memory](https://arxiv.org/abs/1809.07599), 2018.
    """

    def compress(self, round: Array, x: Array) -> Drawn:
        return Drawn(jnp.take_along_axis(x, self._places(round, x), axis=1), round)

    def expand(self, code: Drawn, like: Array) -> Array:
        return _spread(code.values, self._places(code.round, like), like)

    def _places(self, round: Array, like: Array) -> Array:
        d = like.shape[1]
        places = jnp.arange(d, dtype=jnp.int32)
        return jax.vmap(lambda r: jax.random.permutation(_key(r, _PLACES), places))(round)[:, : self.count(d)]


class Turned(Pytree):
    """Differences that a round's rotation has turned."""

    code: Tree = tree()  # in the inner form
    round: Array  # [m] int32


class Rotated(Difference):
    r"""Another form, of the differences after a random rotation.

    The rotation is $H D / \sqrt n$: D has random signs, H is the Hadamard matrix of the next power of two n. It makes
    all coordinates about alike, which is what few bits a number need.

    Args:
      form: e.g. ``compression.Quantized(1)``.

    Examples:
      >>> import jax, jax.numpy as jnp, mocha_jax as mj
      >>> v = jax.random.normal(jax.random.key(0), (1, 100)) ** 5
      >>> for form in (mj.compression.Quantized(1), mj.compression.Rotated(mj.compression.Quantized(1))):
      ...     found = form.encode(jnp.ones(1, "int32"), v, jnp.zeros_like(v))[1]
      ...     print(f"{float(jnp.linalg.norm(found - v) / jnp.linalg.norm(v)):.2f}")
      0.96
      0.48

    References:
      - [Suresh et al., Distributed Mean Estimation with Limited Communication](https://arxiv.org/abs/1611.00429), 2017.
      - [Vargaftik et al., DRIVE](https://arxiv.org/abs/2105.08339), 2021.
    """

    form: Difference

    def __post_init__(self) -> None:
        check.instance("Rotated", "form", self.form, Difference, "compression.Quantized(1)")

    def compress(self, round: Array, x: Array) -> Turned:
        turned = _hadamard(_signs(round, x) * _padded(x))
        return Turned(self.form.compress(round, turned * _per_root(turned)), round)

    def expand(self, code: Turned, like: Array) -> Array:
        turned = self.form.expand(code.code, _padded(like))
        # H H = n. The factors are powers of two, so all but the sums is exact.
        back = _hadamard(turned) * jnp.asarray(1.0 / (turned.shape[1] * _per_root(turned)), like.dtype)
        return (_signs(code.round, like) * back)[:, : like.shape[1]]


def _most(bits: int) -> int:
    """The largest multiple: as many below 0 as above."""
    return 2 ** (bits - 1) - 1


def _scale(exact: Array) -> Array:
    """Round to 16 significant bits, upwards."""
    bits = lax.bitcast_convert_type(jnp.clip(exact.astype(jnp.float32), _SMALLEST, _LARGEST), jnp.uint32)
    return lax.bitcast_convert_type((bits + np.uint32(0xFF)) & np.uint32(0xFFFFFF00), jnp.float32)


def _planes(steps: Array, bits: int) -> Array:
    """Pack numbers ``[m, d]`` of so many bits."""
    each = (steps[:, None, :] >> jnp.arange(bits, dtype=steps.dtype)[None, :, None]) & 1
    return jnp.packbits(each.astype(jnp.uint8), axis=-1)


def _key(round: Array, what: np.uint32) -> Array:
    return jax.random.fold_in(jax.random.key(round.astype(jnp.uint32), impl="threefry2x32"), what)


def _uniform(round: Array, x: Array) -> Array:
    """Draw numbers ``[m, d]`` in [0, 1), of the round and of what a node has to say."""
    said = lax.bitcast_convert_type(jnp.sum(x, axis=1).astype(jnp.float32), jnp.uint32)

    def draw(round: Array, said: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(_key(round, _ROUNDING), said), x.shape[1:], x.dtype)

    return jax.vmap(draw)(round, said)


def _spread(values: Array, places: Array, like: Array) -> Array:
    """Put values ``[m, k]`` into zeros like an array ``[m, d]``."""
    return jax.vmap(lambda zeros, at, value: zeros.at[at].set(value, mode="drop"))(
        jnp.zeros_like(like), places, values.astype(like.dtype)
    )


def _padded(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (0, _length(x) - x.shape[1])))


def _length(x: Array) -> int:
    """The next power of two."""
    return 1 << max(x.shape[1] - 1, 0).bit_length()


def _per_root(x: Array) -> Array:
    """A power of two near one over the root of the length."""
    return jnp.asarray(2.0 ** -(_length(x).bit_length() // 2), x.dtype)


def _signs(round: Array, x: Array) -> Array:
    return jax.vmap(lambda r: jax.random.rademacher(_key(r, _SIGNS), (_length(x),), x.dtype))(round)


def _hadamard(x: Array) -> Array:
    """Multiply vectors ``[m, n]`` by the Hadamard matrix, by sums and differences alone."""
    m, n = x.shape
    half = 1
    while half < n:
        pairs = x.reshape(m, n // (2 * half), 2, half)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = jnp.stack([a + b, a - b], axis=2).reshape(m, n)
        half *= 2
    return x
