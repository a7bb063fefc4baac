"""Programs in a hurry: the same numbers, wherever they are called, and few of them."""

import logging
import math
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax._core import compiling
from mocha_jax._core.compiling import Program
from mocha_jax._driver.rounds import run_chunk_in_place


@pytest.fixture(autouse=True)
def thoroughly():
    """Compile as users do: the suite asks JAX to leave most optimisations out, which Program does not meddle with."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def lengths(x, y):
    return jnp.sqrt(jnp.sum(x * x)) + y


def program(**options):
    return Program(lengths, lambda x, y: x.size, **options)


@pytest.mark.parametrize("size", [10, 10_000, 2_000_000])
def test_the_numbers_are_those_of_jit(size):
    x, y = np.linspace(0.0, 1.0, size), np.float64(2.0)
    np.testing.assert_allclose(program()(x, y), jax.jit(lengths)(x, y), rtol=1e-14)


def test_it_composes_with_transformations():
    f, x, y = program(), jnp.arange(1.0, 4.0), 1.0
    wanted = lengths(x, y)
    np.testing.assert_allclose(jax.jit(f)(x, y), wanted)
    np.testing.assert_allclose(jax.jit(lambda: f(x, y))(), wanted)  # nothing that it is given is traced
    np.testing.assert_allclose(jax.vmap(f, in_axes=(None, 0))(x, jnp.ones(3)), jnp.full(3, wanted))
    np.testing.assert_allclose(jax.grad(f)(x, y), x / jnp.sqrt(14.0))


def test_a_compiler_without_the_options_does_without_and_is_asked_once(monkeypatch, caplog):
    monkeypatch.setattr(compiling, "_HURRIES", {100: {"xla_no_such_option": 1}})
    x = jnp.arange(1.0, 4.0)
    assert float(program()(x, 1.0)) == float(lengths(x, 1.0))
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        again = program()
        for _ in range(3):
            again(x, 1.0)
    assert sum("Finished XLA compilation" in said for said in caplog.messages) <= 1  # of the function itself
    assert not compiling._is_known("xla_no_such_option", 1)
    assert compiling._is_known("xla_backend_optimization_level", 0)


def levels(program):
    """How many versions of the programs were compiled, for few numbers, for more and for any."""
    programs = [program._by_most.get(most) for most in (*compiling._HURRIES, math.inf)]
    return [0 if compiled is None else compiled._cache_size() for compiled in programs]


def test_little_work_is_compiled_in_a_hurry():
    # Of functions of their own: JAX keeps what was compiled by function and options.
    once = Program(lambda x, y: jnp.sum(x) + y, lambda x, y: x.size)
    again = Program(lambda x, y: jnp.sum(x) - y, lambda x, y: x.size, often=True)
    for f in (once, again):
        f(jnp.ones(10), 1.0)
        f(jnp.ones(100_000), 1.0)
    assert levels(once) == [1, 1, 0]
    assert levels(again) == [0, 2, 0]
    jax.config.update("jax_disable_most_optimizations", True)
    once(jnp.ones(11), 1.0)
    assert levels(once) == [1, 1, 1]


def test_errors_are_those_of_the_function():
    def refuses(x):
        raise ValueError(f"{x.shape} will not do")

    with pytest.raises(ValueError, match="will not do"):
        Program(refuses, lambda x: x.size)(jnp.ones(3))


def test_what_does_not_compile_ahead_fails_at_the_call_alone():
    def refuses(x):
        raise NotImplementedError(f"{x.shape} will not do")

    program = Program(refuses, lambda x: x.size)
    program.begin_compiling(jnp.ones(3))
    with pytest.raises(NotImplementedError, match="will not do"):
        program(jnp.ones(3))


def test_options_are_those_of_jit():
    x = jnp.ones(4)
    assert float(program(static_argnames="y")(x, y=1.0)) == 3.0
    kept = jnp.zeros(4)
    Program(lambda x: x + 1.0, lambda x: x.size, donate_argnames="x")(kept)
    assert kept.is_deleted()


def small(regularizer):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 3)) for n in (7, 9, 5)]
    return mj.Problem(mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs]), mj.losses.Hinge(), regularizer)


@pytest.fixture
def compiles_logged():
    """Log them of every thread."""
    jax.config.update("jax_log_compiles", True)
    yield
    jax.config.update("jax_log_compiles", False)


@pytest.mark.parametrize("regularizer", [mj.regularizers.Independent(0.1), mj.regularizers.Probabilistic(0.1)])
@pytest.mark.thin(1)
def test_a_first_solve_compiles_few_programs(caplog, compiles_logged, regularizer):
    """From raw samples to a solution: the key's two, sizes, layout, start, rounds, and three that end it.

    The first of a process also asks which options the compiler knows, by a program each. Those that follow the start
    are compiled at the same time, each once.
    """
    jax.clear_caches()
    with caplog.at_level(logging.WARNING):
        problem = small(regularizer)
        str(mj.solve(problem))
        compiled = [m for m in caplog.messages if m.startswith("Finished XLA compilation") and "_unchanged" not in m]
        assert 5 < len(compiled) <= 9, "\n".join(compiled)
        names = [m.split("jit(")[1].split(")")[0] for m in compiled]
        assert all(names.count(name) == 1 for name in ("_allocate", "_run_chunk", "_proven", "_settled")), names
        caplog.clear()
        mj.solve(problem.replace(regularizer=jax.tree.map(lambda leaf: 0.5 * leaf, regularizer)))
        assert not [m for m in caplog.messages if m.startswith("Finished XLA compilation")]


def test_a_first_solve_traces_a_round_once(monkeypatch):
    step = Mock(side_effect=mj.Mocha.step)
    monkeypatch.setattr(mj.Mocha, "step", lambda *given: step(*given))
    jax.clear_caches()
    mj.solve(small(mj.regularizers.Independent(0.1)), mj.Mocha(), max_rounds=3, tol=None)
    assert step.call_count == 1


@pytest.mark.slow
def test_the_samples_alone_say_how_programs_of_a_run_are_compiled():
    """Not the room for records: other chunks are the same rounds to the bit."""
    problem = small(mj.regularizers.MeanRegularized(0.1, 0.1))
    jax.clear_caches()
    one, other = (mj.solve(problem, tol=None, max_rounds=600, chunk=chunk) for chunk in (50, 600))
    quick, *others = levels(run_chunk_in_place)
    assert quick > 1
    assert others == [0, 0]
    np.testing.assert_array_equal(one.weights, other.weights)
