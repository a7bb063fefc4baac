"""The kernel by Mosaic against a NumPy loop and the other kernel, interpreted: copies and barriers included."""

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import mocha_jax as mj
from mocha_jax._core import mosaic
from mocha_jax._node import kernel_gpu, kernel_mosaic
from mocha_jax._node.ascent import ascend, visiting_orders
from mocha_jax._node.layout import time_major
from tests import zoo
from tests.node.test_kernels import CALLS, MOSAIC, custom_calls, draw, numpy_epoch

PARAMS: Any = getattr(plgpu, "InterpretGPUParams", None)
interpreted = pytest.mark.skipif(PARAMS is None, reason="this version of JAX does not interpret Mosaic on a CPU")
SMOOTHED = mj.losses.SmoothedHinge(0.5)


def epoch(loss, *arrays, **options):
    """The kernel, interpreted."""
    # What is worked on twice is written twice, which the detection of races would not like.
    return kernel_mosaic.epoch(loss, *arrays, interpret=PARAMS(detect_races=False), **options)


@interpreted
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("n", "m", "d", "store", "lanes", "depth"),
    [
        (9, 70, 64, jnp.float32, None, 4),  # a last turn that is not full, a last tile that begins earlier
        (8, 5, 12, jnp.float32, None, 4),  # fewer nodes than a tile, features that do not fill one
        (2, 33, 20, jnp.float32, 8, 3),  # fewer rows than are in flight
        (1, 1, 8, jnp.float32, None, 1),
        (5, 40, 96, jnp.bfloat16, None, 2),
        (3, 130, 256, jnp.float16, 16, 4),
    ],
)
def test_any_shape_and_storage_equals_a_loop(n, m, d, store, lanes, depth, first):
    arrays = draw(0, n, m, d, store)[: 9 if first else None]
    expected = numpy_epoch(0.5, *arrays)
    found = jax.jit(partial(epoch, lanes=lanes, depth=depth))(SMOOTHED, *arrays)
    for a, b in zip(found[:2], expected, strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
        assert a.dtype == jnp.float32
    np.testing.assert_array_equal(found[2], expected[2])


@interpreted
@pytest.mark.parametrize("loss", zoo.LOSSES)
def test_every_loss_equals_the_other_kernel(loss):
    arrays = draw(1, 6, 10, 16)
    both = (partial(f, zoo.LOSSES[loss]) for f in (epoch, partial(kernel_gpu.epoch, interpret=True)))
    for a, b in zip(*(jax.jit(f)(*arrays) for f in both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@interpreted
def test_what_is_not_visited_keeps_its_dual():
    x, y, weight, norm2, beta, w, q, _, order, u, done = draw(0, 6, 40, 8)
    steps = done + jnp.where(jnp.arange(40) % 2 == 0, 0, 6).astype(jnp.int32)
    beta = jnp.where(weight == 0, 0.25, beta)  # of padding too
    new, moved, _ = jax.jit(epoch)(SMOOTHED, x, y, weight, norm2, beta, w, q, steps, order, u, done)
    left = (weight == 0) | (steps == done)[None]
    assert 0 < left.sum() < left.size
    np.testing.assert_array_equal(new[left], beta[left])
    assert (new != beta)[~left].any()
    np.testing.assert_array_equal(moved[steps == done], u[steps == done])


@interpreted
def test_no_copy_overtakes_what_reads_its_slot():
    arrays = draw(0, 7, 128, 16)  # whole tiles: nothing is worked on twice
    found = jax.jit(partial(kernel_mosaic.epoch, interpret=PARAMS(detect_races=True), depth=2))(SMOOTHED, *arrays)
    np.testing.assert_allclose(found[0], numpy_epoch(0.5, *arrays)[0], rtol=1e-4, atol=2e-5)


@interpreted
def test_vmap_and_scan_equal_one_at_a_time():
    x, y, weight, norm2, beta, w, q, steps, order, u, done = draw(0, 6, 9, 8)
    gammas, xs, ws = jnp.array([0.1, 2.0], jnp.float32), jnp.stack([x, 2 * x]), jnp.stack([w, 0.5 * w])

    def passes(gamma, x, w):
        def one_pass(carry, order):
            beta, *earlier = carry
            loss = mj.losses.SmoothedHinge(gamma)
            return epoch(loss, x, y, weight, norm2, beta, w, q, steps, order, *earlier), None

        return lax.scan(one_pass, (beta, u, done), jnp.stack([order, order[::-1]]))[0]

    together = jax.jit(jax.vmap(passes))(gammas, xs, ws)
    alone = [jax.jit(passes)(*each) for each in zip(gammas, xs, ws, strict=True)]
    for a, *each in zip(together, *alone, strict=True):
        np.testing.assert_allclose(a, jnp.stack(each), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", zoo.LOSSES)
def test_is_one_kernel_on_an_accelerator(loss):
    assert custom_calls("cuda", kernel_mosaic.epoch, zoo.LOSSES[loss], *draw(0, 5, 300, 100)[:9], call=MOSAIC) == 1


@pytest.mark.parametrize(("m", "d", "store"), [(1, 8, np.float32), (7, 24, jnp.bfloat16), (130, 256, jnp.float16)])
def test_any_shape_lowers_and_a_batch_is_one_kernel(m, d, store):
    x, *rest = draw(0, 5, m, d, store)

    def batch(gammas):
        return jax.vmap(lambda gamma: kernel_mosaic.epoch(mj.losses.SmoothedHinge(gamma), x, *rest))(gammas)

    assert custom_calls("cuda", batch, jnp.ones(3, jnp.float32), call=MOSAIC) == 1


@pytest.mark.parametrize(
    ("card", "m", "d", "store", "mosaic"),
    [
        ("NVIDIA H100 80GB HBM3", 4096, 64, jnp.float32, True),
        ("NVIDIA GH200 480GB", 4096, 64, jnp.bfloat16, True),
        ("NVIDIA B200", 4096, 64, jnp.float32, True),
        ("NVIDIA A100-SXM4-80GB", 4096, 64, jnp.float32, False),
        ("NVIDIA H100 80GB HBM3", 300, 64, jnp.float32, False),  # few nodes
        ("NVIDIA H100 80GB HBM3", 4096, 66, jnp.float32, False),  # rows that do not begin at a multiple of 16 bytes
        ("NVIDIA H100 80GB HBM3", 10_000, 8, jnp.bfloat16, False),  # short rows
        ("NVIDIA H100 80GB HBM3", 4096, 260, jnp.float32, False),  # long rows
    ],
)
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_the_card_and_the_shape_decide(card, m, d, store, mosaic):
    def local(x, y, w):
        data = mj.TaskData(x, y, jnp.ones_like(y), jnp.arange(m, dtype=jnp.int32), num_tasks=m)
        ones = jnp.ones(m, jnp.float32)
        rows = time_major(data)
        orders = visiting_orders(jax.random.key(0), rows, 1)
        return ascend(orders, SMOOTHED, rows, jnp.zeros_like(y), w, ones, data.sizes)

    shapes = jax.ShapeDtypeStruct((m, 2, d), store), *(jax.ShapeDtypeStruct((m, k), jnp.float32) for k in (2, d))
    calls = [custom_calls("cuda", local, *shapes, call=call, card=card) for call in (MOSAIC, CALLS["cuda"])]
    assert calls == [int(mosaic), int(not mosaic)]


@pytest.mark.parametrize(
    ("capability", "known"), [("9.0", True), ("10.0", True), ("8.0", False), ("12.0", False), ("gfx942", False)]
)
def test_a_card_that_is_here_tells_its_generation(capability, known, monkeypatch):
    card = SimpleNamespace(compute_capability=capability, device_kind="NVIDIA H100")
    monkeypatch.setattr(mosaic, "get_default_device", lambda: card)
    assert mosaic.on_this_card() == known


def test_a_card_that_is_not_known_is_not_chosen():
    assert not mosaic.on_this_card()  # a CPU
    for name, known in (("something new", False), ("NVIDIA H200", True)):
        described: Any = (name, None, "gpu")[: len(inspect.signature(AbstractDevice).parameters)]
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(*described))):
            assert mosaic.on_this_card() == known
