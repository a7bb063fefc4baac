"""A weighing by the kernel for GPUs, interpreted, is that by the loops."""

import importlib
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax._core.compiling import platform_dependent
from mocha_jax.coupling import Dense, Diagonal, Exchangeable, FeatureDiagonal, LowRank, as_matrix
from mocha_jax.servers import _quadratic_programs_kernels as kernels_of
from mocha_jax.servers._quadratic_programs import (
    RELAXATION,
    Tasks,
    answer,
    consensus,
    programs,
    until_they_agree,
)
from mocha_jax.servers._quadratic_programs_kernels import by_kernel, by_platform, in_some_steps
from tests import zoo
from tests.node.test_kernels import lowered_for


def coupling(kind, m, rng):
    if kind == "exchangeable":
        return Exchangeable(jnp.float32(0.7), jnp.float32(5.0), m)
    if kind == "low rank":
        return LowRank(jnp.float32(0.3), jnp.asarray(rng.normal(size=(m, 2)), jnp.float32))
    if kind == "diagonal":
        return Diagonal(jnp.asarray(rng.uniform(0.5, 2.0, m), jnp.float32))
    return Dense(jnp.asarray(zoo.random_spd(m, 0), jnp.float32))


def weighing(kind, m, p, d, task=None):
    rng, float32 = np.random.default_rng(m + p + d), jnp.float32
    far = np.array([0.1, 1.0, 0.01, 1.0, 0.5, 0.02, 1.0, 0.2])[:p, None]
    along = jnp.asarray(far * rng.normal(size=(m, p, d)), float32)
    slope = -jnp.asarray(rng.uniform(0.0, 1.0, size=(p, m)), float32)
    free = jnp.asarray(rng.random(m) < 0.8, float32)
    num_tasks = m if task is None else int(task.max()) + 1
    between = coupling(kind, num_tasks, rng)
    counts = jnp.ones(m, float32) if task is None else jnp.asarray(np.bincount(task), float32)
    task = None if task is None else jnp.asarray(task)
    return Tasks(between, consensus(between), task, counts, m), along, slope, free


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr("mocha_jax.servers._quadratic_programs_kernels._STEPS", 3)


def interpreted(*given):
    """A weighing by the kernel of this version of JAX, on a CPU."""
    if jax.__version_info__ < (0, 11):
        return by_kernel("cuda", *given, interpret=True)
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    # What is worked on twice is written twice, which the detection of races would not like.
    return by_kernel("cuda", *given, interpret=plgpu.InterpretGPUParams(detect_races=False))


def by_numpy(tasks, along, slope, free):
    """The splitting in float64, the coupling written out; of the library's it takes what a node answers."""
    along, slope = np.asarray(along, float), np.asarray(slope, float)
    p, m = slope.shape
    node = np.eye(m)[:, : len(tasks.counts)] if tasks.task is None else np.eye(len(tasks.counts))[tasks.task]
    counts, c = np.asarray(tasks.counts, float), float(tasks.consensus.stiffness)
    units, matrix = node @ counts, np.asarray(as_matrix(tasks.coupling), float)
    settle = node @ matrix @ np.linalg.inv(matrix + c * np.eye(len(matrix))) @ (node / units[:, None]).T
    given = programs(*map(jnp.asarray, (along, slope, units, np.asarray(free, float))))
    h, a = np.zeros_like(along[:, 0]), np.zeros_like(slope)
    for _ in range(kernels_of._STEPS):
        pulled = settle @ h
        asked = units * np.einsum("mpd,md->pm", along, h - 2.0 * pulled)
        a = np.stack(jax.jit(answer)(given, tuple(map(jnp.asarray, asked)), tuple(map(jnp.asarray, a))))
        moved = np.einsum("pm,mpd->md", a, along)
        h = h + RELAXATION * (moved - h + pulled)
    return a, moved


# Every kind, every number of points, one node and many, features that do and do not fill the threads.
QUICK = [("exchangeable", (7, 2, 33)), ("diagonal", (1, 2, 1)), ("low rank", (100, 2, 10)), ("dense", (7, 5, 64))]
SLOW = [
    (kind, (m, p, d))
    for m, kind in ((1, "exchangeable"), (7, "low rank"), (100, "exchangeable"), (100, "dense"), (7, "diagonal"))
    for p in (2, 5, 8)
    for d in (1, 10, 33, 64, 561)
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("kind", "size"), CASES)
@pytest.mark.thin(1)
def test_the_kernel_weighs_as_the_loops_and_numpy_do(kind, size):
    given = weighing(kind, *size)
    found = interpreted(*given)
    for one, *others in zip(found, in_some_steps(*given), by_numpy(*given), strict=True):
        for other in others:
            np.testing.assert_allclose(one, other, atol=2e-4)
    assert float(jnp.max(jnp.abs(found[1]))) > 1e-3
    if (kind, size) == QUICK[0]:
        for one, again in zip(found, interpreted(*given), strict=True):
            np.testing.assert_array_equal(one, again)


@pytest.mark.slow
def test_the_kernel_knows_of_tasks_on_several_nodes():
    given = weighing("exchangeable", 12, 2, 5, task=np.arange(12) % 5)
    ways = interpreted(*given), in_some_steps(*given), by_numpy(*given)
    for one, *others in zip(*ways, strict=True):
        for other in others:
            np.testing.assert_allclose(one, other, atol=2e-4)


@pytest.mark.slow
def test_the_kernel_takes_a_coupling_by_features():
    tasks, along, slope, free = weighing("diagonal", 6, 2, 5)
    between = FeatureDiagonal(jnp.asarray([0.5, 1.0, 2.0, 0.1, 3.0], jnp.float32), 6)
    given = tasks.replace(coupling=between, consensus=consensus(between)), along, slope, free
    for one, other in zip(interpreted(*given), in_some_steps(*given), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)


@pytest.mark.slow
def test_a_batch_of_weighings_is_each_of_them():
    tasks, along, slope, free = weighing("exchangeable", 5, 2, 4)
    alongs, slopes = jnp.stack([along, 0.5 * along]), jnp.stack([slope, 2.0 * slope])
    together = jax.vmap(lambda along, slope: interpreted(tasks, along, slope, free))(alongs, slopes)
    for k in range(2):
        for one, other in zip(together, in_some_steps(tasks, alongs[k], slopes[k], free), strict=True):
            np.testing.assert_allclose(one[k], other, atol=2e-4)


@pytest.mark.parametrize(("platform", "d", "kernels"), [("cuda", 5, 3), ("cuda", 4097, 0), ("rocm", 5, None)])
def test_a_step_is_one_kernel_of_what_this_version_of_jax_has(platform, d, kernels):
    tasks, along, slope, free = weighing("exchangeable", 6, 2, d)
    new = jax.__version_info__ >= (0, 11)
    kernels = (0 if new else 3) if kernels is None else kernels
    calls = {"__gpu$xla.gpu.triton": 0 if new else kernels, "mosaic_gpu_v2": kernels if new else 0}
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in calls]
    work = jax.jit(
        lambda *weighing_of: platform_dependent(*weighing_of, default=until_they_agree, **by_platform("auto"))
    )
    with lowered_for(platform):
        exported = jax.export.export(work, platforms=[platform], disabled_checks=checks)(tasks, along, slope, free)
    text = exported.mlir_module()
    # Steps alike are one function that is called.
    found = {name: sum(len(re.findall(rf"call @{f}\(", text)) or 1 for f in holders(text, name)) for name in calls}
    assert found == calls


def holders(text, call):
    """The function that holds each of these calls."""
    return [re.findall(r"func\.func \w+ @(\w+)\(", text[: at.start()])[-1] for at in re.finditer(re.escape(call), text)]


@hypothesis.given(st.integers(1, 2000), st.integers(1, 4096), st.integers(1, 9))
def test_a_program_has_its_nodes_and_fits_the_card(m, d, p):
    if jax.__version_info__ < (0, 11):
        pytest.skip("this version of JAX has a kernel of its own")
    plan = importlib.import_module("mocha_jax.servers._quadratic_programs_gpu").plan(m, d, p)
    assert plan.nodes <= m
    assert plan.nodes <= -(-m // plan.nodes)  # the rows that they add up to fill a tile
    assert plan.nodes * plan.lanes == 128
    assert d <= plan.width < d + plan.at_once  # no turn is for nothing
    assert plan.width % plan.at_once == 0
    assert plan.at_once % (plan.lanes * plan.vector) == 0
    assert 4 * plan.nodes * plan.width <= 2**15  # bytes of shared memory, of 99 KB at least


@pytest.mark.slow
def test_blocks_of_nodes_answer_as_all_do(monkeypatch):
    given = weighing("exchangeable", 11, 4, 5)
    at_once = until_they_agree(*given)
    monkeypatch.setattr("mocha_jax.servers._quadratic_programs._BLOCK", 4)
    for one, other in zip(at_once, until_they_agree(*given), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("kind", ["exchangeable", "dense"])
@pytest.mark.slow
def test_steps_of_an_accelerator_lead_nearly_as_far_as_those_that_look(kind, monkeypatch):
    monkeypatch.undo()
    tasks, along, slope, free = weighing(kind, 20, 4, 6)

    def gained(found):
        a, moved = found
        return float(jnp.sum(slope * a) + 0.5 * jnp.sum(moved * tasks.apply(moved)) / tasks.consensus.stiffness)

    some, enough = (gained(by(tasks, along, slope, free)) for by in (in_some_steps, until_they_agree))
    assert some < 0
    assert some <= 0.9 * enough


def test_without_kernels_means_without_this_one_whatever_the_loss():
    data = zoo.data(loss_scaling="task_mean")
    loss = mj.losses.from_scalar(lambda z, y: (z - y) ** 2, smoothness=2.0)
    problem = mj.Problem(data, loss, mj.regularizers.Independent(0.1))
    loops = mj.Mocha().by_loops(problem)
    assert loops is not None
    server = loops.server_for(problem)
    assert isinstance(server, mj.servers.AdaptiveServer)
    assert server.backend == "xla"
