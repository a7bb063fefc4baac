"""Programs that a next process neither traces nor compiles: which are found again, which never, and that they are right."""

import os
import subprocess
import sys
import zlib
from functools import partial
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import mocha_jax as mj
from mocha_jax._core import kept_programs
from mocha_jax._core.compiling import Program
from mocha_jax._driver import rounds


@pytest.fixture
def folder(tmp_path):
    """Where programs are kept, without JAX's cache: what that has is not written again."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    kept_programs.keep_in(tmp_path)
    yield tmp_path
    kept_programs.keep_in(None)
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def scaled(x, y, *, times=1):
    return {"sum": jnp.sum(x * y), "lengths": (jnp.sqrt(x * x + times), None)}


def program():
    """As another process makes it: with nothing in memory."""
    return Program(scaled, lambda x, y, **_: 10, static_argnames="times")


X = np.linspace(0.0, 1.0, 7, dtype="f")


def test_the_next_process_traces_nothing_and_has_the_same_numbers(folder):
    first, second = program(), program()
    wanted = first(X, 2.0, times=3)
    assert first.traces == 1
    assert len(list(folder.iterdir())) == 1
    found = second(X, 2.0, times=3)
    assert second.traces == 0
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    other = second(2 * X, 3.0, times=3)  # other numbers
    assert second.traces == 0
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), other, scaled(2 * X, 3.0, times=3))


@pytest.mark.parametrize(
    ("x", "y", "times"),
    [
        (X[:5], 2.0, 3), (X.astype("d"), 2.0, 3), (jnp.asarray(X), 2.0, 3), (X, np.float32(2.0), 3),
        (X, jnp.asarray(2.0, "float32"), 3), (jax.device_put(X, jax.devices()[0]), 2.0, 3), (X, jnp.asarray(2.0), 3), (X, 2, 3), (X, 2.0, 4), (X, 2.0, None),
    ],
    ids=["shape", "dtype", "device", "number", "array", "placed", "weak", "integer", "static", "default"],
)  # fmt: skip
def test_what_is_called_otherwise_is_another_program(folder, x, y, times):
    program()(X, 2.0, times=3)
    again, how = program(), {} if times is None else {"times": times}
    for _ in range(2):
        found = again(x, y, **how)
    assert again.traces == 1
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, scaled(x, y, **how))


def test_a_weak_type_is_another_program(folder):
    x, weak = jnp.asarray(X.astype("d")), jnp.asarray(2.0)
    firm = jnp.asarray(np.full((), 2.0))
    assert weak.dtype == firm.dtype
    program()(x, weak)
    again = program()
    again(x, firm)
    assert again.traces == 1


@pytest.mark.parametrize("changed", ["settings", "flags", "versions"])
def test_another_setting_or_version_is_another_program(folder, changed, monkeypatch):
    program()(X, 2.0)
    if changed == "flags":
        monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_another=1")
    if changed == "versions":
        monkeypatch.setattr(kept_programs, "_versions", lambda: ("another",))
    with jax.default_matmul_precision("highest" if changed == "settings" else None):
        again = program()
        again(X, 2.0)
    assert again.traces == 1
    assert len(list(folder.iterdir())) == 2


def test_a_program_that_is_found_reuses_memory(folder):
    def doubled(x):
        return 2 * x

    for _ in range(2):
        one, x = Program(doubled, lambda x: 10, donate_argnames="x"), jnp.ones(1000)
        np.testing.assert_array_equal(one(x), np.full(1000, 2.0))
        assert x.is_deleted()
    assert one.traces == 0


def of_the_user(x):
    return x + 1


class Holder(mj.Pytree):
    """A record with a function in its structure."""

    function: Any = mj.static()


class Mine(mj.losses.Loss):
    """A loss that is not this library's."""


@pytest.mark.parametrize("of", [of_the_user, Mine, lambda x: x], ids=["function", "class", "lambda"])
def test_code_of_the_users_is_never_kept(folder, of):
    for _ in range(2):
        one = Program(lambda x, *, of: 2 * x, lambda x, **_: 10, static_argnames="of")
        np.testing.assert_array_equal(one(X, of=of), 2 * X)
        assert one.traces == 1
    assert not list(folder.iterdir())


def test_results_that_hold_functions_are_never_kept(folder):
    # What a next process reads would be another function, and a tree with it another structure.
    optimizer = Holder(optax.adam(0.1).update)
    one = Program(lambda x: (2 * x, optimizer), lambda x: 10)
    assert one(X)[1].function is optimizer.function
    assert not list(folder.iterdir())


def test_what_calls_back_is_never_kept(folder, capfd):
    def speaking(x):
        jax.debug.print("seen")
        return x

    for _ in range(2):
        Program(speaking, lambda x: 10)(X).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 2
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("name", "count"), [("lapack_spotrf_ffi", 1), ('"somebody.elses"', 0)])
def test_functions_outside_that_a_next_process_might_not_have_ready_are_no_part_of_what_is_kept(folder, name, count):
    lowered = jax.jit(lambda x: 2 * x).lower(X)
    text = lowered.as_text() + f"%1 = stablehlo.custom_call @{name}(%0)"
    place = kept_programs.Place(folder / "one-program", jax.tree.structure(((X,), {})))
    np.testing.assert_array_equal(place.compile(Mock(compile=lowered.compile, as_text=lambda: text))(X), 2 * X)
    assert len(list(folder.iterdir())) == count


@pytest.mark.parametrize("content", [b"", b"no program", zlib.compress(b"nor this")])
def test_a_damaged_file_is_written_anew(folder, content):
    program()(X, 2.0)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(content or whole[:-100])
    again = program()
    again(X, 2.0)
    assert again.traces == 1
    third = program()
    third(X, 2.0)
    assert third.traces == 0


def test_what_cannot_be_written_is_compiled_all_the_same(folder):
    folder.rmdir()
    np.testing.assert_allclose(program()(X, 2.0)["sum"], 2 * X.sum(), rtol=1e-6)
    assert not folder.exists()
    folder.mkdir()


def test_transformations_are_jaxs_own(folder):
    one, x = program(), jnp.asarray(X)
    sums = jax.vmap(lambda y: one(x, y)["sum"])(jnp.arange(3.0, dtype="f"))
    np.testing.assert_allclose(sums, X.sum() * np.arange(3), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: one(x, jnp.float32(2.0))["sum"])(x), np.full(7, 2.0))
    with jax.disable_jit():
        one(X, 2.0)
    assert not list(folder.iterdir())


def problem():
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(5, 3)).astype("f") for _ in range(3)]
    data = mj.pack_tasks(xs, [np.sign(x[:, 0] + 0.1) for x in xs])
    return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))


def test_a_solve_is_the_same(folder, monkeypatch):
    def forget():
        for one in (rounds.allocate, rounds.run_chunk_in_place, rounds.proven, rounds._settled_in_place):
            monkeypatch.setattr(one, "_kept", kept_programs.KeptPrograms(one._kept._name, one._kept._static))

    kept_programs.keep_in(None)
    wanted = mj.solve(problem(), tol=1e-3)
    kept_programs.keep_in(folder)
    for _ in range(2):
        forget()
        found = mj.solve(problem(), tol=1e-3)
        np.testing.assert_array_equal(found.weights, wanted.weights)
        assert found.relative_gap == wanted.relative_gap
    assert len(list(folder.glob("*-program"))) >= 4


NEXT = """
import numpy as np
import mocha_jax as mj
from mocha_jax._driver import rounds

mj.keep_programs()
rng = np.random.default_rng(0)
xs = [rng.normal(size=(8, 3)).astype("f") for _ in range(4)]
data = mj.pack_tasks(xs, [np.sign(x[:, 0] + 0.1) for x in xs])
model = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.Probabilistic(0.1))
solution = mj.solve(model, mj.Mocha(), tol=1e-3)
programs = rounds.allocate, rounds.run_chunk_in_place, rounds.proven, rounds._settled_in_place
print(sum(one.traces for one in programs), np.asarray(solution.weights).tobytes().hex(), solution.relative_gap)
"""


@pytest.mark.extended
def test_a_next_process_solves_with_lapack_and_writes_nothing_that_is_not_whole(tmp_path):
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path)}
    command = [sys.executable, "-c", NEXT]

    def process():
        done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
        traces, *answer = done.stdout.split()
        return int(traces), answer

    first, second = process(), process()
    assert first[0] >= 4
    assert second[0] == 0
    assert second[1] == first[1]
    # Those that JAX's cache has are not compiled again, so that they cannot be written again: they are traced.
    kept = list(tmp_path.rglob("*-program"))
    assert len(kept) >= 4
    for path in kept:
        path.unlink()
    for _ in range(2):
        traces, answer = process()
        assert traces >= 4
        assert answer == first[1]
