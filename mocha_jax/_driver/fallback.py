"""Fallback to the loops, with a warning, if a machine's compiler refuses a program with the kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import jax

from mocha_jax._algorithms.base import Algorithm, Kind
from mocha_jax._algorithms.subproblem_method import SubproblemMethod
from mocha_jax._core.values import is_traced
from mocha_jax._core.warnings import warn
from mocha_jax._driver.config import RunConfig
from mocha_jax._problem.problem import Federated, Problem

Result = TypeVar("Result")

# What compilers raise, of JAX's own classes those that have no public name: Pallas's of GPUs and of TPUs, and MLIR's.
_REFUSALS = (jax.errors.JaxRuntimeError, NotImplementedError)
_NAMES_OF_REFUSALS = {"LoweringError", "LoweringException", "MLIRError"}

# What was refused in this process: not tried again, and not said again.
_refused: set[Hashable] = set()


def or_by_loops(problem: Kind, algorithm: Algorithm[Kind], work: Callable[[Algorithm[Kind]], Result]) -> Result:
    """Run ``work(algorithm)``; if it fails on a GPU or TPU and the kernel was not requested, use the loops.

    Only what a compiler says of a program counts; an error in the kernel's own code is raised, and so is what the
    loops raise in their turn. Where the problem is traced, the program is compiled by others later.
    """
    loops = algorithm.by_loops(problem)
    if loops is None or not _on_accelerator(problem):
        return work(algorithm)
    x, loss = problem.data.x, cast(Problem, problem).loss
    kind = jax.tree.structure(loss), x.dtype, x.shape[-1]  # in what kernels differ
    if kind in _refused:
        return work(loops)
    try:
        return work(algorithm)
    except Exception as error:
        if not _is_refusal(error):
            raise
        found = work(loops)
        _refused.add(kind)
        gist = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        warn(
            f"{type(algorithm).__name__}: the kernel for {type(loss).__name__} with {x.shape[-1]} features fails "
            f'on this machine ({gist}); the loops do its work, as with backend="xla".'
        )
        return found


def _is_refusal(error: Exception) -> bool:
    """Tell whether a compiler raised this because it cannot make a program of the kernel."""
    return isinstance(error, _REFUSALS) or type(error).__name__ in _NAMES_OF_REFUSALS


def run_by(algorithm: Algorithm[Any], config: RunConfig) -> RunConfig:
    """A run by an algorithm with the same state."""
    if algorithm is config.algorithm:
        return config
    data = config.problem.data
    if data.layout.by_rows:  # it says what works through it
        data = data.replace(layout=data.layout.replace(backend=cast(SubproblemMethod, algorithm).backend))
    return config.replace(algorithm=algorithm, problem=config.problem.replace(data=data))


def _on_accelerator(problem: Federated) -> bool:
    x = problem.data.x
    if is_traced(x):
        return False
    platforms = {d.platform for d in x.devices()} if isinstance(x, jax.Array) else {jax.default_backend()}
    return platforms != {"cpu"}
