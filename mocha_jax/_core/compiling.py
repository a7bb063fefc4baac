"""Programs that the host calls, compiled with as much effort as their work is worth, and branches by platform.

XLA and LLVM take the same seconds to compile a program of some hundred small loops for a hundred numbers as for a
hundred million. On a CPU most of that time goes into optimisations that only pay if there is much to compute; for
little work the compiler leaves them out. Programs for accelerators and parts of larger programs are compiled as usual.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Generic, TypedDict, TypeVar, TypeVarTuple, Unpack

import jax
from jax import lax

from mocha_jax._core.kept_programs import KeptPrograms
from mocha_jax._core.values import is_traced

# The keys limit for how many numbers to leave optimisations out. Measured with JAX 0.10 on two cores, rounds of `Mocha`
# with both of its servers: the first takes 0.2 of the compiler's time, and 1.5 to 1.8 times that of a round at 375
# numbers, 2 to 3 times (a tenth of a millisecond more) at 4,000; the second takes 0.4 of the compiler's time and the
# same for a round, from 450 to 430,000 numbers. Since JAX 0.11 XLA keeps its fusion emitters, and compiling takes
# longer: at 24,000 numbers the first saves 1.2 s of a first solve (of 5.1) and costs each solve 20 ms, so that it is
# worth it up to 60 of them. The second saves 0.3 to 3 s from 1 to 40 million numbers (JAX 0.12), where a round of
# `Mocha`, `Newton` or `InteriorPoint` takes 0.9 to 1.1 times as long.
_FEW = 4_096 if jax.__version_info__ < (0, 11) else 32_768
_HURRIES: dict[float, dict[str, int | bool]] = {
    _FEW: {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    16_000_000: {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False},
}

Result = TypeVar("Result")


class JitOptions(TypedDict, total=False):
    """Options of `jax.jit`."""

    static_argnames: str | tuple[str, ...]
    donate_argnames: str | tuple[str, ...]
    keep_unused: bool


class Program(Generic[Result]):
    """A function as ``jax.jit(function, **options)`` compiles it, with less optimisation if it has little to compute.

    Args:
      function: to compile.
      numbers: maps the same arguments to the size of the work. Calls that must agree bit for bit agree in it.
      often: whether the work is repeated many times, so that it is worth more than the lowest level.
      options: of `jax.jit`.

    Attributes:
      traces: how often the function was traced: a call that traces it is one that compiles.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        numbers: Callable[..., float],
        *,
        often: bool = False,
        **options: Unpack[JitOptions],
    ) -> None:
        self._numbers, self._often, self._options, self.traces = numbers, often, options, 0
        self._compiling: list[threading.Thread] = []
        name = f"{function.__module__}.{function.__qualname__} {options} {often}"
        self._kept = KeptPrograms(name, options.get("static_argnames", ()))

        @wraps(function)
        def counted(*args: object, **kwargs: object) -> Result:
            self.traces += 1
            return function(*args, **kwargs)

        self._function = counted
        self._by_most: dict[float, jax.stages.Wrapped] = {math.inf: jax.jit(counted, **options)}

    def _for(self, numbers: float) -> jax.stages.Wrapped:
        """The function compiled for this many numbers."""
        most = min(most for most in (*_HURRIES, math.inf) if numbers <= most)
        if most not in self._by_most:
            compiler_options = {name: value for name, value in _HURRIES[most].items() if _is_known(name, value)}
            self._by_most[most] = jax.jit(self._function, compiler_options=compiler_options, **self._options)
        return self._by_most[most]

    def _chosen(self, *args: object, **kwargs: object) -> jax.stages.Wrapped:
        """The function compiled for the work of these arguments."""
        if jax.default_backend() != "cpu" or jax.config.read("jax_disable_most_optimizations"):
            return self._by_most[math.inf]
        numbers = self._numbers(*args, **kwargs)
        # A tracer may be mapped over any number of problems.
        if self._often or any(is_traced(a) for a in jax.tree.leaves(args)):
            numbers = max(numbers, min(_HURRIES) + 1)
        return self._for(numbers)

    def __call__(self, *args: object, **kwargs: object) -> Result:
        for thread in tuple(self._compiling):  # other threads may call, too
            thread.join()
            with contextlib.suppress(ValueError):
                self._compiling.remove(thread)
        if place := self._kept.place(args, kwargs):
            program = place.program or place.compile(self._chosen(*args, **kwargs).lower(*args, **kwargs))
            return program(*args, **self._kept.dynamic(kwargs))
        try:
            return self._chosen(*args, **kwargs)(*args, **kwargs)
        except ValueError as refused:
            # Part of a program that is compiled as a whole or differentiated, which JAX gives no options of their own.
            if "compiler_options" not in str(refused):
                raise
            return self._by_most[math.inf](*args, **kwargs)

    def begin_compiling(self, *args: object, **kwargs: object) -> None:
        """Compile for such arguments in a thread. A call waits for it; what fails here is raised there."""
        if jax.config.read("jax_disable_most_optimizations"):  # threads cost more than such a compiler
            return
        with contextlib.suppress(Exception):
            place = self._kept.place(args, kwargs)
            if place and place.program:
                return
            lowered = self._chosen(*args, **kwargs).lower(*args, **kwargs)
            compile = partial(place.compile, lowered) if place else lowered.compile
            thread = threading.Thread(target=_quietly, args=(compile,))
            thread.start()
            self._compiling.append(thread)

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        """Lower for a compiler that takes its time."""
        return self._by_most[math.inf].lower(*args, **kwargs)


def _quietly(compile: Callable[[], object]) -> None:
    """Compile. JAX keeps the outcome with what it has lowered, and finds it at the call."""
    with contextlib.suppress(Exception), jax.transfer_guard("allow"):
        compile()


@lru_cache
def _is_known(option: str, value: object) -> bool:
    """Ask XLA whether it knows an option of its compiler: its options come and go without notice."""
    number = jax.ShapeDtypeStruct((), "float32")
    try:
        jax.jit(_unchanged, compiler_options={option: value}).lower(number).compile()
    except jax.errors.JaxRuntimeError as refused:
        if "compile option" not in str(refused):
            raise
        return False
    return True


def _unchanged(x: jax.Array) -> jax.Array:
    return x


_ACCELERATORS = ("cuda", "rocm", "tpu")
PLATFORMS = (*_ACCELERATORS, "cpu")  # those that may have a branch of their own
_GPUS = ("cuda", "rocm")  # devices of both call their platform "gpu"

Trees = TypeVarTuple("Trees")


def platform_dependent(
    *operands: *Trees, default: Callable[[*Trees], Result], **branches: Callable[[*Trees], Result]
) -> Result:
    """``branch(*operands)``, with the branch for the platform that the program is lowered for.

    `lax.platform_dependent` lowers one branch and traces all of them. Kernels take longer to trace than the loops they
    replace, and need modules of JAX that are slow to import. So only those platforms get their branch that a program of
    this process can be lowered for: those of its devices, and that of the device which an abstract mesh names.

    Args:
      *operands: trees of arrays.
      default: the branch of platforms that have none of their own.
      **branches: functions by name of a platform, out of `PLATFORMS`.
    """
    if not any(map(_reachable, _ACCELERATORS)):
        return branches.get("cpu", default)(*operands)
    reachable = {name: branch for name, branch in branches.items() if branch is not default and _reachable(name)}
    return lax.platform_dependent(*operands, default=default, **reachable) if reachable else default(*operands)


def _reachable(platform: str) -> bool:
    """Tell whether a program may be lowered for this platform."""
    named = jax.sharding.get_abstract_mesh().abstract_device
    if named is None:
        return _has_devices(platform)
    return named.platform in (platform, "gpu" if platform in _GPUS else platform) or _has_devices(platform)


@lru_cache
def _has_devices(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:  # "Unknown backend"
        return False
