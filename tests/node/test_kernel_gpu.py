"""The kernel by Mosaic against a NumPy loop and the kernel for TPUs, interpreted: copies and barriers included."""

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
from mocha_jax._node import kernel_gpu, kernel_tpu
from mocha_jax._node.buckets import time_major
from mocha_jax._node.local_solver import ascend, visiting_orders
from tests import zoo
from tests.node.test_kernels import CALLS, MOSAIC, TRITON, custom_calls, draw, numpy_epoch

PARAMS: Any = getattr(plgpu, "InterpretGPUParams", None)
interpreted = pytest.mark.skipif(PARAMS is None, reason="this version of JAX does not interpret Mosaic on a CPU")
SMOOTHED = mj.losses.SmoothedHinge(0.5)
ALL_ROWS = CALLS["cuda"] == MOSAIC  # with this version of JAX
H100 = "NVIDIA H100 80GB HBM3"


def epoch(loss, *arrays, races=False, **options):
    """The kernel, interpreted."""
    # What is worked on twice is written twice, which the detection of races would not like.
    return kernel_gpu.epoch(loss, *arrays, interpret=PARAMS(detect_races=races), **options)


def lowered_for(card):
    """As if a program were lowered for a card that need not be here."""
    described: Any = (card, None, "gpu")[: len(inspect.signature(AbstractDevice).parameters)]
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(*described)))


@interpreted
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("n", "m", "d", "store", "copied", "options"),
    [
        (9, 70, 64, jnp.float32, True, {}),  # a last turn that is not full, a last tile that begins earlier
        (2, 33, 20, jnp.float32, True, {"lanes": 8, "depth": 3}),  # fewer rows than are in flight
        (5, 40, 100, jnp.float32, True, {"depth": 2}),  # a last piece that begins earlier
        (3, 130, 256, jnp.float16, True, {"lanes": 16}),
        (3, 1, 1, jnp.float32, False, {}),
        (5, 130, 2, jnp.bfloat16, False, {}),
        (6, 70, 10, jnp.float32, False, {}),
        (6, 11, 10, jnp.float32, False, {"lanes": 8, "depth": 1}),
        (3, 40, 33, jnp.bfloat16, False, {"lanes": 8}),
        (3, 5, 33, jnp.float32, False, {}),  # one node fills a warp
        (3, 6, 100, jnp.bfloat16, False, {"lanes": 64}),  # two warps share a node
        (3, 4, 561, jnp.float32, False, {}),  # four do
        (2, 2, 1500, jnp.float16, False, {"depth": 2}),
        (2, 1, 4096, jnp.float32, False, {}),
    ],
)
@pytest.mark.thin(3)
def test_any_shape_and_storage_equals_a_loop(n, m, d, store, copied, options, first):
    arrays = draw(0, n, m, d, store)[: 9 if first else None]
    expected = numpy_epoch(0.5, *arrays)
    found = jax.jit(partial(epoch, copied=copied, **options))(SMOOTHED, *arrays)
    for a, b in zip(found[:2], expected, strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
        assert a.dtype == jnp.float32
    np.testing.assert_array_equal(found[2], expected[2])


@interpreted
@pytest.mark.parametrize("loss", zoo.LOSSES)
@pytest.mark.thin(1)
def test_every_loss_equals_the_other_kernel(loss):
    arrays = draw(1, 4, 9, 10)
    both = partial(epoch, depth=2), partial(kernel_tpu.epoch, interpret=True)
    for a, b in zip(*(jax.jit(partial(f, zoo.LOSSES[loss]))(*arrays) for f in both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@interpreted
@pytest.mark.parametrize(("m", "d", "copied"), [(12, 8, True), (12, 7, False), (3, 150, False)])
@pytest.mark.slow
def test_what_is_not_visited_keeps_its_dual(m, d, copied):
    x, y, weight, norm2, beta, w, q, _, order, u, done = draw(0, 6, m, d)
    steps = done + jnp.where(jnp.arange(m) % 2 == 0, 0, 6).astype(jnp.int32)
    beta = jnp.where(weight == 0, 0.25, beta)  # of padding too
    given = x, y, weight, norm2, beta, w, q, steps, order, u, done
    one_pass = jax.jit(partial(epoch, SMOOTHED, copied=copied, depth=2))
    new, moved, _ = one_pass(*given)
    left = (weight == 0) | (steps == done)[None]
    assert 0 < left.sum() < left.size
    np.testing.assert_array_equal(new[left], beta[left])
    assert (new != beta)[~left].any()
    np.testing.assert_array_equal(moved[steps == done], u[steps == done])
    for a, b in zip(one_pass(*given), (new, moved), strict=False):  # the same bits
        np.testing.assert_array_equal(a, b)


@interpreted
@pytest.mark.parametrize("copied", [True, False])
def test_no_copy_overtakes_what_reads_its_slot(copied):
    arrays = draw(0, 7, 128, 16)  # whole tiles: nothing is worked on twice
    found = jax.jit(partial(epoch, races=True, depth=2, copied=copied))(SMOOTHED, *arrays)
    np.testing.assert_allclose(found[0], numpy_epoch(0.5, *arrays)[0], rtol=1e-4, atol=2e-5)


@interpreted
@pytest.mark.parametrize(("d", "copied"), [(8, True), (5, False)])
@pytest.mark.slow
def test_vmap_and_scan_equal_one_at_a_time(d, copied):
    x, y, weight, norm2, beta, w, q, steps, order, u, done = draw(0, 3, 9, d)
    gammas, xs, ws = jnp.array([0.1, 2.0], jnp.float32), jnp.stack([x, 2 * x]), jnp.stack([w, 0.5 * w])

    def passes(gamma, x, w):
        def one_pass(carry, order):
            beta, *earlier = carry
            loss = mj.losses.SmoothedHinge(gamma)
            return epoch(loss, x, y, weight, norm2, beta, w, q, steps, order, *earlier, copied=copied, depth=2), None

        return lax.scan(one_pass, (beta, u, done), jnp.stack([order, order[::-1]]))[0]

    together = jax.jit(jax.vmap(passes))(gammas, xs, ws)
    alone = [jax.jit(passes)(*each) for each in zip(gammas, xs, ws, strict=True)]
    for a, *each in zip(together, *alone, strict=True):
        np.testing.assert_allclose(a, jnp.stack(each), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", zoo.LOSSES)
@pytest.mark.thin(1)
def test_is_one_kernel_on_an_accelerator(loss):
    copied = partial(kernel_gpu.epoch, copied=True)
    assert custom_calls("cuda", copied, zoo.LOSSES[loss], *draw(0, 5, 300, 100)[:9], call=MOSAIC) == 1
    if ALL_ROWS:
        assert custom_calls("cuda", kernel_gpu.epoch, zoo.LOSSES[loss], *draw(0, 5, 9, 13)[:9], call=MOSAIC) == 1


@pytest.mark.skipif(not ALL_ROWS, reason="with this version of JAX other rows are for Triton")
@pytest.mark.parametrize("m", [1, 7, 130])
@pytest.mark.parametrize(
    ("d", "store"),
    [(1, np.float32), (3, jnp.bfloat16), (10, np.float32), (33, np.float32), (100, jnp.bfloat16), (561, np.float32),
     (1500, jnp.float16), (4096, np.float32)],
)  # fmt: skip
@pytest.mark.thin(3)
def test_any_shape_lowers(m, d, store):
    one_pass = partial(kernel_gpu.epoch, depth=2)
    assert custom_calls("cuda", one_pass, SMOOTHED, *draw(0, 2, m, d, store), call=MOSAIC) == 1


def test_a_batch_is_one_kernel():
    x, *rest = draw(0, 5, 64, 24, jnp.bfloat16)

    def one(gamma):
        return kernel_gpu.epoch(mj.losses.SmoothedHinge(gamma), x, *rest, copied=True)

    assert custom_calls("cuda", jax.vmap(one), jnp.ones(3, jnp.float32), call=MOSAIC) == 1


@pytest.mark.parametrize(
    ("card", "m", "d", "store", "copied"),
    [
        (H100, 4096, 64, jnp.float32, True),
        ("NVIDIA GH200 480GB", 4096, 64, jnp.bfloat16, True),
        ("NVIDIA B200", 4096, 64, jnp.float32, True),
        ("NVIDIA A100-SXM4-80GB", 4096, 64, jnp.float32, False),
        (H100, 300, 64, jnp.float32, False),  # few nodes
        (H100, 4096, 66, jnp.float32, False),  # rows that do not begin at a multiple of 16 bytes
        (H100, 10_000, 8, jnp.bfloat16, False),  # short rows
        (H100, 4096, 260, jnp.float32, False),  # long rows
        ("NVIDIA Next", 4096, 64, jnp.float32, None),
    ],
)
@pytest.mark.thin(2)
def test_the_card_and_the_shape_decide(card, m, d, store, copied):
    def local(x, y, w):
        data = mj.TaskData(x, y, jnp.ones_like(y), jnp.arange(m, dtype=jnp.int32), num_tasks=m)
        ones = jnp.ones(m, jnp.float32)
        rows = time_major(data)
        orders = visiting_orders(jax.random.key(0), rows, 1)
        return ascend(orders, SMOOTHED, rows, jnp.zeros_like(y), w, ones, data.sizes)

    shapes = jax.ShapeDtypeStruct((m, 2, d), store), *(jax.ShapeDtypeStruct((m, k), jnp.float32) for k in (2, d))
    calls = [custom_calls("cuda", local, *shapes, call=call, card=card) for call in (MOSAIC, TRITON)]
    mosaic = copied is True or copied is False and ALL_ROWS
    assert calls == [int(mosaic), int(not mosaic and not ALL_ROWS)]
    with lowered_for(card):
        assert kernel_gpu.program((2, m, d), store).copied == bool(copied)


@pytest.mark.parametrize(
    ("capability", "known"),
    [("9.0", 9), ("10.0", 10), ("8.0", 8), ("8.9", 8), ("7.5", None), ("12.0", None), ("gfx942", None)],
)
def test_a_card_that_is_here_tells_its_generation(capability, known, monkeypatch):
    card = SimpleNamespace(compute_capability=capability, device_kind="NVIDIA H100")
    monkeypatch.setattr(mosaic, "get_default_device", lambda: card)
    assert mosaic.generation() == known


def test_a_card_that_is_not_known_is_not_chosen():
    assert mosaic.generation() is None  # a CPU
    for name, known in (("something new", None), ("NVIDIA H200", 9), ("NVIDIA A100-PCIE-40GB", 8), ("NVIDIA L40S", 8)):
        with lowered_for(name):
            assert mosaic.generation() == known


@pytest.mark.parametrize("m", [1, 5, 30, 1000, 100_000])
def test_every_feature_is_in_a_piece(m):
    for d in range(1, 300):
        for store in (np.float32, jnp.bfloat16):
            tile = kernel_gpu.program((4, m, d), store)
            starts = tile.starts(d)
            assert tile.nodes <= m
            assert tile.nodes * tile.lanes <= 128
            assert {start % tile.vector for start in (*starts, d)} == {0}
            assert {f for start in starts for f in range(start, start + tile.width)} == set(range(d))


@pytest.mark.parametrize("lanes", [2**k for k in range(8)])
def test_layouts_are_as_mosaic_wants_them(lanes):
    """Which it tells when it lowers for a card, not when a kernel is interpreted."""
    for vector in (1, 2, 4, 8):
        for nodes in sorted({1, 128 // lanes}):
            layout = mosaic.layout(lanes, vector, nodes)
            whole = layout.to_mgpu()
            rows, columns = (np.prod(layout.reduce(axis).to_mgpu().base_tile_shape) for axis in (1, 0))
            assert whole.base_tile_shape == (rows, columns) == (nodes, lanes * vector)
            assert whole.replication_factor == 128 // (nodes * lanes) if nodes * lanes <= 128 else True
