"""The kernels against the solver that XLA compiles and a NumPy loop; they lower for GPUs and TPUs on any machine."""

import inspect
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

import mocha_jax as mj
from mocha_jax._core.compiling import platform_dependent
from mocha_jax._driver import config
from mocha_jax._node import kernel_tpu, local_solver
from mocha_jax._node.buckets import bucket_sizes, time_major
from mocha_jax._node.local_solver import ascend, visiting_order, visiting_orders
from tests import zoo

TRITON, MOSAIC = "__gpu$xla.gpu.triton", "mosaic_gpu_v2"  # calls of kernels on a GPU
CALLS = {"cuda": MOSAIC, "tpu": "tpu_custom_call"}
EPOCHS = {"tpu": kernel_tpu.epoch}
VARIANTS = {"tpu": partial(kernel_tpu.epoch, nodes=2, interpret=True)}
if jax.__version_info__ < (0, 11):
    from mocha_jax._node import kernel_triton

    CALLS |= {"cuda": TRITON, "rocm": TRITON}
    EPOCHS |= dict.fromkeys(("cuda", "rocm"), kernel_triton.epoch)
    VARIANTS["gpu"] = partial(kernel_triton.epoch, nodes=2, depth=2, interpret=True)
by_triton = pytest.mark.skipif("gpu" not in VARIANTS, reason="with this version of JAX nothing is by Triton")


def draw(seed, n, m, d, store=np.float32):
    """Arguments of `epoch` after the loss, in float32, with padding, budgets of any size and a part of it done."""
    rng = np.random.default_rng(seed)
    x: Any = jnp.asarray(rng.normal(size=(n, m, d)) / np.sqrt(d), store)
    y = np.where(rng.random((n, m)) < 0.5, 1.0, -1.0)
    weight = np.where(rng.random((n, m)) < 0.8, rng.uniform(0.2, 1.0, (n, m)), 0.0)
    norm2 = np.sum(np.asarray(x, float) ** 2, axis=2)
    beta = y * rng.random((n, m)) * (weight > 0)
    w, q, u = rng.normal(size=(m, d)), rng.uniform(0.5, 2.0, m), 0.1 * rng.normal(size=(m, d))
    done = rng.integers(0, 3, m)
    *numbers, change = (jnp.asarray(a, jnp.float32) for a in (y, weight, norm2, beta, w, q, u))
    *counts, spent = (
        jnp.asarray(a, jnp.int32) for a in (done + rng.integers(0, 2 * n + 2, m), rng.permutation(n), done)
    )
    return x, *numbers, *counts, change, spent


def numpy_epoch(gamma, *arrays):
    """The pass for the smoothed hinge, one node and one row at a time, in float64."""
    x, y, c, norm2, beta, w, q = (np.array(a, float) for a in arrays[:7])
    steps, order, *earlier = (np.array(a) for a in arrays[7:])
    u, done = earlier or (np.zeros_like(w), np.zeros_like(steps))
    for k in range(len(w)):
        for i in order:
            if c[i, k] > 0 and done[k] < steps[k]:
                a, p = y[i, k] * beta[i, k], y[i, k] * (x[i, k] @ (w[k] + q[k] * u[k]))
                a = np.clip(a + (1 - p - gamma * a) / (q[k] * c[i, k] * norm2[i, k] + gamma), 0, 1)
                u[k] += c[i, k] * (y[i, k] * a - beta[i, k]) * x[i, k]
                beta[i, k] = y[i, k] * a
                done[k] += 1
    return beta, u, done


def lowered_for(platform, card="NVIDIA H100"):
    """As if its device were here: a kernel is written for one, and a mesh that is not there tells which."""
    device = ("TPU v5 lite", 1, "tpu") if platform == "tpu" else (card, None, "gpu")
    described: Any = device[: len(inspect.signature(AbstractDevice).parameters)]
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(*described)))


def custom_calls(platform, function, *arguments, call=None, card="NVIDIA H100"):
    """How many kernels there are in the program for a platform that need not be here."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in (TRITON, MOSAIC)]
    with lowered_for(platform, card):
        exported = jax.export.export(jax.jit(function), platforms=[platform], disabled_checks=checks)(*arguments)
    return exported.mlir_module().count("@" + (call or CALLS[platform]))


@pytest.mark.parametrize(
    ("loss", "variant"),
    [(loss, variant) for loss in zoo.LOSSES for variant in VARIANTS],
)
@pytest.mark.thin(1)
def test_two_passes_equal_the_solver_of_xla(loss, variant, key):
    loss = zoo.LOSSES[loss]
    data = zoo.data(regression=not loss.binary, loss_scaling="task_mean")
    m, n = data.y.shape
    rng = np.random.default_rng(0)
    start = loss.project(jnp.asarray(0.3 * rng.normal(size=(m, n))), data.y) * (data.weight > 0).astype(float)
    w, q = jnp.asarray(rng.normal(size=(m, 4))), jnp.asarray(rng.uniform(0.5, 2.0, m))
    steps = jnp.array([0, 4, 13, 20, 100], jnp.int32)
    x, y, weight = (jnp.swapaxes(a, 0, 1) for a in (data.x, data.y, data.weight))

    def one_pass(carry, order):
        beta, *earlier = carry
        return VARIANTS[variant](loss, x, y, weight, norm2, beta, w, q, steps, order, *earlier), None

    norm2 = jnp.sum(x * x, axis=2)
    orders = jnp.stack([visiting_order(jax.random.fold_in(key, p), n) for p in range(2)]).astype(jnp.int32)
    carry = start.T, jnp.zeros_like(w), jnp.zeros_like(steps)
    beta, u, done = jax.jit(partial(lax.scan, one_pass))(carry, orders)[0]
    rows = time_major(data)
    expected = ascend(visiting_orders(key, rows, 2), loss, rows, start, w, q, steps)
    np.testing.assert_allclose(beta.T, expected[0], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(u, expected[1], rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(done, expected[2])
    assert done[0] == 0
    assert (done[1:3] == steps[1:3]).all()


@settings(max_examples=7)
@example(seed=0, n=5, m=5, d=3, nodes=2, depth=3, first=True, store=jnp.float32)  # a last turn that is not full
@given(
    seed=st.integers(0, 1000),
    n=st.integers(1, 9),
    m=st.integers(1, 7),
    d=st.sampled_from([1, 3, 64, 100]),
    nodes=st.sampled_from([1, 2, 4]),
    depth=st.integers(1, 3),
    first=st.booleans(),
    store=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
)
@pytest.mark.slow
def test_any_shape_and_storage_equals_a_loop(seed, n, m, d, nodes, depth, first, store):
    arrays = draw(seed, n, m, d, store)[: 9 if first else None]
    loss = mj.losses.SmoothedHinge(0.5)
    expected = numpy_epoch(0.5, *arrays)
    epochs = [partial(kernel_tpu.epoch, nodes=nodes, interpret=True)]
    if "gpu" in VARIANTS:
        epochs.append(partial(kernel_triton.epoch, nodes=nodes, depth=depth, interpret=True))
    for epoch in epochs:
        beta, u, done = jax.jit(epoch)(loss, *arrays)
        np.testing.assert_allclose(beta, expected[0], rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(u, expected[1], rtol=1e-4, atol=2e-5)
        np.testing.assert_array_equal(done, expected[2])
        assert beta.dtype == u.dtype == jnp.float32


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.thin(1)
def test_vmap_equals_one_at_a_time(variant):
    x, y, weight, norm2, beta, w, q, *rest = draw(0, 6, 5, 3)
    gammas = jnp.array([0.1, 2.0], jnp.float32)
    ws, qs = (jnp.stack([a, 0.5 * a]) for a in (w, q))

    def one(gamma, w, q):
        return VARIANTS[variant](mj.losses.SmoothedHinge(gamma), x, y, weight, norm2, beta, w, q, *rest)

    together = jax.jit(jax.vmap(one))(gammas, ws, qs)
    alone = [jax.jit(one)(*each) for each in zip(gammas, ws, qs, strict=True)]
    for a, *each in zip(together, *alone, strict=True):
        np.testing.assert_allclose(a, jnp.stack(each), rtol=1e-6, atol=1e-7)


@by_triton
def test_the_gpu_reads_no_row_that_is_not_visited():
    x, y, weight, norm2, beta, w, q, _, order, u, done = draw(0, 6, 5, 3)
    steps = done + jnp.array([0, 6, 0, 6, 6], jnp.int32)
    unused = ((weight == 0) | (steps == done)[None])[:, :, None]
    assert 0 < unused.sum() < unused.size
    rest = y, weight, norm2, beta, w, q, steps, order, u, done
    one_pass = jax.jit(partial(kernel_triton.epoch, mj.losses.Hinge(), interpret=True))
    for a, b in zip(one_pass(jnp.where(unused, jnp.nan, x), *rest), one_pass(x, *rest), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("platform", EPOCHS)
@pytest.mark.parametrize("loss", zoo.LOSSES)
@pytest.mark.thin(4)
def test_is_one_kernel_on_an_accelerator(loss, platform):
    arrays = draw(0, 5, 300, 100)[:9]  # of the first pass
    assert custom_calls(platform, EPOCHS[platform], zoo.LOSSES[loss], *arrays) == 1


@pytest.mark.parametrize("platform", EPOCHS)
@pytest.mark.parametrize(("m", "d", "store"), [(1, 1, np.float32), (7, 3, jnp.bfloat16), (130, 576, jnp.float16)])
@pytest.mark.thin(4)
def test_any_shape_lowers_and_a_batch_is_one_kernel(platform, m, d, store):
    x, *rest = draw(0, 5, m, d, store)

    def batch(gammas):
        return jax.vmap(lambda gamma: EPOCHS[platform](mj.losses.SmoothedHinge(gamma), x, *rest))(gammas)

    assert custom_calls(platform, batch, jnp.ones(3, jnp.float32)) == 1


def test_indices_on_a_tpu_are_int32():
    # Mosaic's compiler, which is not here, refuses the int64 that Python's numbers are in this suite.
    equations = jax.make_jaxpr(kernel_tpu.epoch)(mj.losses.Hinge(), *draw(0, 2, 3, 4)).jaxpr.eqns
    [call] = (e for e in equations if e.primitive.name == "pallas_call")
    indices = [index for b in call.params["grid_mapping"].block_mappings for index in b.index_map_jaxpr.out_avals]
    assert {index.dtype for index in indices} == {np.dtype("int32")}


@pytest.mark.parametrize("case", ["plain", "buckets", "devices"])
@pytest.mark.slow
@pytest.mark.usefixtures("buckets_of_any_size")
def test_a_run_with_the_kernel_is_the_run_with_loops(case, key):
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 6, 7)
    if case == "buckets":
        sizes[2] = 200
    xs = [rng.normal(size=(n, 40 if case == "buckets" else 3)) for n in sizes]
    data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs])
    assert (len(bucket_sizes(data)) > 1) == (case == "buckets")
    problem = mj.Problem(data, mj.losses.SmoothedHinge(0.5), mj.regularizers.MeanRegularized(0.5, 0.5))
    if case == "devices":
        problem = mj.shard(problem, jax.make_mesh((2,), ("nodes",), axis_types=(AxisType.Auto,)))

    def gaps(backend):
        algorithm = mj.Mocha(local_epochs=1.5, backend=backend, sigma_prime="per_task")
        return mj.run(problem, algorithm, key, num_rounds=3, systems=mj.systems.Dropout(0.2))[1].gap

    np.testing.assert_allclose(gaps("pallas"), gaps("xla"), rtol=1e-9)


@pytest.mark.slow
def test_the_derivative_is_that_of_the_loops(key):
    data = zoo.data()
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.5, 0.5))

    def last_gap(lam, backend):
        there = problem.replace(regularizer=mj.regularizers.MeanRegularized(lam, 0.5))
        algorithm = mj.Mocha(backend=backend, sigma_prime="per_task")
        return mj.run(there, algorithm, key, num_rounds=2)[1].gap[-1]

    for derivative in (jax.grad, jax.jacfwd):
        by_kernel, by_loops = (jax.jit(partial(derivative(last_gap), backend=b))(0.7) for b in ("pallas", "xla"))
        assert by_kernel != 0
        np.testing.assert_allclose(by_kernel, by_loops, rtol=1e-9)


class Doubled(mj.losses.Hinge):
    """Says nothing of kernels, whatever its parent says."""


class Same(mj.losses.Hinge, in_kernel=True):
    """Says that it fits."""


def two_passes(loss, backend="auto", dtype=jnp.float32, features=4, map_over=None):
    """Arguments of the local solver, and the solver of them."""
    data = jax.tree.map(lambda a: a.astype(dtype) if a.dtype == jnp.float64 else a, zoo.data(d=features))
    m = len(data.y)
    w, q = jnp.ones((m, features), dtype), jnp.ones(m, dtype)

    def local(w):
        rows = time_major(data, (), backend)
        orders = visiting_orders(jax.random.key(0), rows, 2)
        return ascend(orders, loss, rows, jnp.zeros_like(data.y), w, q, data.sizes)

    return (jax.vmap(local), jnp.stack([w, 2 * w])) if map_over else (local, w)


@pytest.mark.parametrize("platform", CALLS)
@pytest.mark.parametrize(
    ("loss", "how", "kernels"),
    [
        (mj.losses.Hinge(), {}, 2),
        (mj.losses.Huber(0.5), {"map_over": True}, 2),
        (Same(), {}, 2),
        (mj.losses.Hinge(), {"backend": "xla"}, 0),
        (mj.losses.Hinge(), {"dtype": jnp.float64}, 0),
        (mj.losses.Hinge(), {"features": 5000}, 0),
        (Doubled(), {}, 0),
        (mj.losses.from_scalar(lambda z, y: (z - y) ** 2), {}, 0),
    ],
    ids=["built in", "mapped", "says so", "loops wanted", "float64", "long rows", "says nothing", "any function"],
)
@pytest.mark.thin(3)
def test_the_machine_lowered_for_decides(platform, loss, how, kernels):
    # The default backend of this process is a CPU; no deprecation of JAX's own parts gets through (warnings are
    # errors).
    assert custom_calls(platform, *two_passes(loss, **how)) == kernels


def probit(z, y):
    """A loss with the logarithm of the normal distribution, which no kernel knows."""
    return -jax.scipy.special.log_ndtr(y * z)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
@pytest.mark.slow
def test_a_loss_of_what_no_kernel_knows_lowers_for_every_machine(platform, key):
    data = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.float64 else a, zoo.data())
    loss = mj.losses.from_scalar(probit, smoothness=1.01, binary=True)
    problem = mj.Problem(data, loss, mj.regularizers.MeanRegularized(0.1, 0.5))
    exported = jax.export.export(
        jax.jit(lambda problem: mj.run(problem, mj.algorithm1(), key, num_rounds=2)[1].gap), platforms=[platform]
    )(problem)
    assert not any(call in exported.mlir_module() for call in CALLS.values())


@pytest.mark.slow
def test_a_loss_of_what_no_kernel_knows_is_solved():
    data = zoo.data(loss_scaling="task_mean")
    loss = mj.losses.from_scalar(probit, smoothness=1.01, binary=True)
    solution = mj.solve(mj.Problem(data, loss, mj.regularizers.Independent(0.1)), tol=1e-8, max_rounds=2000)
    assert solution.status == mj.Status.CONVERGED
    for t in range(data.num_tasks):
        real = np.asarray(data.weight[t]) > 0
        x, y = np.asarray(data.x[t])[real], np.asarray(data.y[t])[real]

        def risk(w, x=x, y=y):
            return -scipy.stats.norm.logcdf(y * (x @ w)).mean() + 0.1 * w @ w

        best = scipy.optimize.minimize(risk, np.zeros(x.shape[1]), method="BFGS", options={"gtol": 1e-9})
        np.testing.assert_allclose(solution.weights[t], best.x, atol=2e-4)


def test_each_device_has_the_kernel(key, monkeypatch):
    monkeypatch.setattr("mocha_jax._core.compiling._has_devices", lambda platform: platform == "tpu")
    mesh = jax.make_mesh((2,), ("nodes",), axis_types=(AxisType.Auto,))
    data = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.float64 else a, zoo.data())
    problem = mj.shard(mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.5, 0.5)), mesh)
    go = lambda problem: mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=2)[0]  # noqa: E731
    assert custom_calls("tpu", go, problem) == 1  # GPUs must be real, or in `benchmarks.accelerators`


@pytest.mark.slow
def test_a_cpu_knows_nothing_of_kernels(monkeypatch):
    def never(*_, **__):
        raise AssertionError("traced")

    monkeypatch.setattr(local_solver, "_by_kernel", never)
    (auto, w), (loops, _) = two_passes(mj.losses.Hinge()), two_passes(mj.losses.Hinge(), "xla")
    assert jax.jit(auto).lower(w).as_text() == jax.jit(loops).lower(w).as_text()
    for a, b in zip(jax.jit(jax.vmap(auto))(w[None]), loops(w), strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-6, atol=1e-7)


def test_without_what_its_kernel_is_written_in_a_gpu_has_the_loops(monkeypatch, request):
    jax.clear_caches()  # JAX keeps what it traced
    request.addfinalizer(jax.clear_caches)
    for written_in, ours in (("triton", "kernel_triton"), ("mosaic_gpu", "kernel_gpu")):
        monkeypatch.setitem(sys.modules, f"jax.experimental.pallas.{written_in}", None)
        monkeypatch.delitem(sys.modules, f"mocha_jax._node.{ours}", raising=False)
        monkeypatch.delattr(jax.experimental.pallas, written_in, raising=False)
        monkeypatch.delattr(mj._node, ours, raising=False)
    for platform, kernels in (("cuda", 0), ("tpu", 2)):
        assert custom_calls(platform, *two_passes(mj.losses.Hinge())) == kernels


def test_a_gpu_without_mosaic_has_triton_while_that_is_not_deprecated():
    calls = [custom_calls("rocm", *two_passes(mj.losses.Hinge()), call=call) for call in (TRITON, MOSAIC)]
    assert calls == [2 if "rocm" in CALLS else 0, 0]


def test_too_many_rows_for_the_kernel_of_a_tpu_get_the_loops(monkeypatch):
    n = zoo.data().y.shape[1]
    for most, kernels in ((n, 2), (n - 1, 0)):
        monkeypatch.setattr("mocha_jax._node.kernel_tpu._MOST", most)
        jax.clear_caches()
        assert custom_calls("tpu", *two_passes(mj.losses.Hinge())) == kernels


def test_a_loss_that_does_not_fit_the_kernel_is_refused_where_it_is_asked_for():
    problem = mj.Problem(zoo.data(), Doubled(), mj.regularizers.Independent(1.0))
    with pytest.raises(
        ValueError, match='Mocha: backend="pallas" needs .*, and Doubled does not .*in_kernel=True.* "auto"'
    ):
        mj.solve(problem, mj.Mocha(backend="pallas"))


def refusing(tried):
    """What stands for the choice by machine where the kernel does not compile."""

    def refuses(*given):
        tried.append(1)
        *_, beta, w, _, steps = given
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (beta, w, steps)]
        return tuple(jax.ffi.ffi_call("no_such_kernel", shapes)(beta))  # the compiler knows no such kernel

    def by_machine(backend, *given):
        return platform_dependent(*given, default=local_solver._in_blocks if backend == "xla" else refuses)

    return by_machine


@pytest.mark.parametrize("driver", ["solve", "run"])
@pytest.mark.extended
@pytest.mark.thin(1)
def test_a_kernel_that_does_not_compile_is_said_once_and_replaced(driver, key, monkeypatch):
    tried: list[int] = []

    monkeypatch.setattr(local_solver, "_passes_by_machine", refusing(tried))
    monkeypatch.setattr(config, "_on_accelerator", lambda problem: True)
    monkeypatch.setattr(config, "_refused", set())
    # Of a shape and dtype of their own: JAX keeps what it traced.
    data = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.float64 else a, zoo.data(m=3, d=6))
    problem = mj.Problem(data, mj.losses.SmoothedHinge(0.3), mj.regularizers.MeanRegularized(0.5, 0.5))

    def gap(backend="auto"):
        algorithm = mj.Mocha(backend=backend, sigma_prime="per_task")
        if driver == "run":
            return mj.run(problem, algorithm, key, num_rounds=4)[1].gap[-1]
        return mj.solve(problem, algorithm, key=key, tol=None, max_rounds=4, chunk=2).gap

    with pytest.warns(
        UserWarning, match=r"Mocha: the kernel for SmoothedHinge with 6 features .*no_such_kernel.*\); .*xla"
    ):
        first = gap()
    times = len(tried)
    assert times > 0
    assert first == gap() == gap("xla")  # nothing is said, and nothing is tried again
    assert len(tried) == times


SEARCHES = {
    "path": lambda p, a: mj.lambda_path(p, mj.grid(mj.regularizers.Independent, lam=[1.0, 0.5]), a, max_rounds=2).weights,
    "cross-validation": lambda p, a: mj.cross_validate(
        p, mj.grid(mj.regularizers.Independent, lam=[1.0, 0.5]), a, folds=2, max_rounds=2, refit=False
    ).scores,
    "descent": lambda p, a: mj.tune(p, folds=2, algorithm=a, steps=1, tol=1e-2).value,
    "classes": lambda p, a: mj.one_vs_rest(
        p.data.replace(y=(p.data.y > 0).astype(p.data.dtype)), lambda data: p.replace(data=data), a, tol=0.1
    ).weights,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:cross_validate")
@pytest.mark.parametrize(
    "search", [pytest.param(name, marks=pytest.mark.slow) if name != "path" else name for name in SEARCHES]
)
@pytest.mark.slow
def test_searches_go_on_with_the_loops_too(search, monkeypatch):
    monkeypatch.setattr(config, "_on_accelerator", lambda problem: True)
    monkeypatch.setattr(config, "_refused", set())
    # Of a shape of their own: JAX keeps what it traced.
    data = zoo.data(m=3, d=11 + list(SEARCHES).index(search), dtype=np.float32)
    problem = mj.Problem(data, mj.losses.SmoothedHinge(0.3), mj.regularizers.Independent(0.5))
    want = SEARCHES[search](problem, mj.Mocha(backend="xla"))
    monkeypatch.setattr(local_solver, "_passes_by_machine", refusing([]))
    with pytest.warns(UserWarning, match=r"Mocha: the kernel for SmoothedHinge .* fails on this machine"):
        found = SEARCHES[search](problem, mj.Mocha())
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("error", [TypeError, ValueError, IndexError, AssertionError])
def test_a_bug_in_the_kernel_is_an_error(error, key, monkeypatch):
    def broken(*_):
        raise error("a bug")

    monkeypatch.setattr(local_solver, "_passes_by_machine", broken)
    monkeypatch.setattr(config, "_on_accelerator", lambda problem: True)
    problem = mj.Problem(zoo.data(m=3, d=7), mj.losses.SmoothedHinge(0.3), mj.regularizers.Independent(0.5))
    with pytest.raises(error, match="a bug"):
        mj.run(problem, mj.Mocha(), key, num_rounds=1)


def test_an_error_of_something_else_is_raised(key, monkeypatch):
    monkeypatch.setattr(config, "_on_accelerator", lambda problem: True)

    class Broken(mj.systems.Full):
        def work(self, *_):
            raise RuntimeError("mine")

    problem = mj.Problem(zoo.data(), mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    with pytest.raises(RuntimeError, match="mine"):
        mj.run(problem, mj.Mocha(), key, num_rounds=1, systems=Broken())
