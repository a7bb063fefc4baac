"""Forms of few bytes against NumPy, SciPy and the bounds of their papers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import mocha_jax as mj

C = mj.compression
FORMS = {
    "8 bits": C.Quantized(),
    "3 bits": C.Quantized(3),
    "1 bit": C.Quantized(1),
    "8 bits by chance": C.Stochastic(),
    "2 bits by chance": C.Stochastic(2),
    "1 bit by chance": C.Stochastic(1),
    "largest": C.TopK(0.1),
    "at random": C.RandomK(0.1),
    "1 bit rotated": C.Rotated(C.Quantized(1)),
    "largest rotated": C.Rotated(C.TopK(0.1)),
}
BYTES = {  # of a vector of d numbers of 4 bytes
    "8 bits": lambda d: d + 4, "3 bits": lambda d: 3 * -(-d // 8) + 4, "1 bit": lambda d: -(-d // 8) + 4,
    "8 bits by chance": lambda d: 8 * -(-d // 8) + 4, "2 bits by chance": lambda d: 2 * -(-d // 8) + 4,
    "1 bit by chance": lambda d: -(-d // 8) + 4, "largest": lambda d: 6 * -(-d // 10),
    "at random": lambda d: 4 * -(-d // 10) + 4, "1 bit rotated": lambda d: power_of_two(d) // 8 + 8,
    "largest rotated": lambda d: 6 * -(-power_of_two(d) // 10) + 4,
}  # fmt: skip


def power_of_two(d):
    return 2 ** int(np.ceil(np.log2(d)))


def vectors(m, d, dtype=np.float32, seed=0):
    return (np.random.default_rng(seed).normal(size=(m, d)) ** 3).astype(dtype)


def rounds(m, first=1):
    return jnp.arange(first, first + m, dtype=jnp.int32)


def coded(form: Any, x, first=1) -> tuple[Any, Any]:
    """The code of vectors of which nothing is held, and what it says."""
    return encoded(form, rounds(len(x), first), x, np.zeros_like(x))


@jax.jit
def encoded(form: Any, *args: Any) -> tuple[Any, Any]:
    return form.encode(*args)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.thin(3)
def test_node_and_server_have_the_same_vector_to_the_last_bit(name, dtype):
    form = FORMS[name]
    for d in (1, 100):
        held, v = vectors(4, d, dtype, 1), vectors(4, d, dtype, 2)
        code, found = jax.jit(form.encode)(rounds(4), v, held)
        assert found.dtype == dtype
        for decode in (jax.jit(form.decode), form.decode) if d > 1 else (jax.jit(form.decode),):
            assert np.asarray(decode(code, jnp.asarray(held))).tobytes() == np.asarray(found).tobytes()
        # A node alone says what all nodes at once do.
        _, alone = form.encode(rounds(1, 3), v[2:3], held[2:3])
        np.testing.assert_array_equal(alone[0], found[2])


@pytest.mark.parametrize("name", FORMS)
def test_a_code_has_so_many_bytes(name):
    for d in (64, 1000):
        code, _ = jax.eval_shape(FORMS[name].encode, rounds(1), *(jnp.zeros((1, d), jnp.float32),) * 2)
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(code)) == BYTES[name](d)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.thin(2)
def test_what_is_left_out_is_made_up_for(name):
    """The contraction of EF21: the error vanishes while the vector stays as it is."""
    form, v = FORMS[name], jnp.asarray(vectors(3, 50))

    def step(held, first):
        return form.encode(first + rounds(3), v, held)[1], None

    held, _ = jax.lax.scan(step, jnp.zeros_like(v), 3 * jnp.arange(150, dtype=jnp.int32))
    assert (np.linalg.norm(held - v, axis=1) < 2e-3 * np.linalg.norm(v, axis=1)).all()


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_a_number_is_the_nearest_multiple(bits):
    x = vectors(20, 41, np.float64)
    code, found = coded(C.Quantized(bits), x)
    scale, most = np.asarray(code.scale, np.float64)[:, None], 2 ** (bits - 1) - 1
    np.testing.assert_array_equal(found, np.clip(np.round(x / scale), -most, most) * scale)
    # No scale of those that reach further is better.
    whole = np.abs(x).max(axis=1, keepdims=True) / most
    for share in 0.8 ** np.arange(8 if bits < 6 else 1):
        other = np.clip(np.round(x / (share * whole)), -most, most) * share * whole
        assert (np.sum((found - x) ** 2, axis=1) <= np.sum((other - x) ** 2, axis=1) * (1 + 1e-3)).all()
    # Sixteen significant bits: products with the multiples are exact.
    assert (np.asarray(code.scale).view(np.uint32) & 0xFF == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_of_any_size_have_multiples(dtype):
    for size in (0.0, 1e-30, 1e-6, 1e5, 1e30):
        held = 10 * size * vectors(5, 7, dtype, 1)
        v = held + (size * vectors(5, 7, dtype, 2)).astype(dtype)
        form: Any = C.Quantized()
        code, found = form.encode(rounds(5), jnp.asarray(v), jnp.asarray(held))
        scale = np.asarray(code.scale, dtype)[:, None]
        assert np.isfinite(np.asarray(found)).all()
        assert (np.abs(found - v) <= 0.501 * scale + 4 * np.finfo(dtype).eps * np.abs(v)).all()


def test_one_bit_is_the_sign_times_the_mean_size():
    x = vectors(6, 33)
    found = np.asarray(coded(C.Quantized(1), x)[1])
    np.testing.assert_array_equal(found > 0, x > 0)
    size = np.abs(x).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(np.abs(found), np.broadcast_to(size, x.shape), rtol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, pytest.param(4, marks=pytest.mark.extended)])
def test_the_mean_of_what_is_drawn_is_the_number_itself(bits):
    """But for the factor, which is that of the least error for this variance."""
    x = np.repeat(vectors(1, 9, np.float64), 40_000, axis=0)
    found = np.asarray(coded(C.Stochastic(bits), x)[1])
    most = max(2 ** (bits - 1) - 1, 0.5)
    scale = np.abs(x[0]).max() / most
    place = x[0] / scale + most
    chance = place - np.clip(np.floor(place), 0, 2 * most - 1)
    variance = scale**2 * (chance * (1 - chance)).sum()
    factor = (x[0] ** 2).sum() / ((x[0] ** 2).sum() + variance)
    error = found.std(axis=0) / np.sqrt(len(found))
    assert (np.abs(found.mean(axis=0) - factor * x[0]) <= 5 * error + 1e-3 * np.abs(x[0])).all()
    assert error[0] > 0
    # In a round, nodes with other vectors draw other numbers.
    others = jnp.asarray(x[:64] * (1 + 1e-4 * np.arange(64)[:, None]))
    _, drawn = encoded(C.Stochastic(bits), jnp.ones(64, jnp.int32), others, jnp.zeros_like(others))
    assert len(np.unique(np.asarray(drawn) > 0, axis=0)) > 2


def test_the_largest_coordinates_and_drawn_ones():
    x = vectors(8, 60)
    for share, k in ((0.1, 6), (0.101, 7), (1.0, 60), (1e-6, 1)):
        largest, drawn = (np.asarray(coded(form(share), x)[1]) for form in (C.TopK, C.RandomK))
        for found in (largest, drawn):
            assert ((found != 0).sum(axis=1) == k).all()
            np.testing.assert_array_equal(found[found != 0], x[found != 0])
        kept = np.where(largest != 0, np.abs(x), np.inf).min(axis=1)
        assert (np.where(largest == 0, np.abs(x), 0.0).max(axis=1) <= kept).all()
    # Every coordinate is drawn as often.
    often = np.mean([np.asarray(coded(C.RandomK(0.1), x, first=8 * i)[1]) != 0 for i in range(250)], axis=(0, 1))
    assert np.abs(often - 0.1).max() < 5 * np.sqrt(0.1 * 0.9 / 2000)
    code = jax.eval_shape(C.TopK(0.5).encode, rounds(1), *(jnp.zeros((1, 2**16 + 1)),) * 2)[0]
    assert (code.places.dtype, code.places.shape) == (jnp.uint32, (1, 2**15 + 1))


@pytest.mark.parametrize("d", [1, 2, 37, 64])
def test_a_rotation_is_that_of_hadamards_matrix(d):
    x, n = vectors(3, d, np.float64), power_of_two(d)
    whole = C.Rotated(C.TopK(1.0))
    code, found = coded(whole, x)
    np.testing.assert_allclose(found, x, rtol=1e-12, atol=1e-13)
    turned = np.zeros((3, n))
    np.put_along_axis(turned, np.asarray(code.code.places, int), np.asarray(code.code.values), axis=1)
    # H D x with the signs D on the diagonal: H of what was turned has them.
    back = turned @ scipy.linalg.hadamard(n) / n
    ratio = back[:, :d] / x
    np.testing.assert_allclose(np.abs(back[:, :d]), np.abs(ratio[0, 0] * x), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(back[:, d:], 0.0, atol=1e-12)
    assert d < 37 or 0.2 < np.mean(ratio > 0) < 0.8


def test_rotated_numbers_lose_little_in_one_bit():
    """A share of 1 - 2 / pi of the squared length, that of a Gaussian vector (DRIVE, theorem 1); plain ones more."""
    x = vectors(40, 1024) ** 3
    lost = {
        rotated: np.mean(np.sum((np.asarray(coded(form, x)[1]) - x) ** 2, axis=1) / np.sum(x**2, axis=1))
        for rotated, form in ((True, FORMS["1 bit rotated"]), (False, FORMS["1 bit"]))
    }
    assert lost[True] < 1 - 2 / np.pi + 0.03
    assert lost[False] > 0.9


def test_forms_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="Quantized: bits must be an integer from 1 to 8"):
        C.Quantized(9)
    with pytest.raises(ValueError, match="TopK: share must"):
        C.TopK(0.0)
    with pytest.raises(ValueError, match="Rotated: form must be"):
        C.Rotated("1 bit")  # type: ignore[arg-type]
