"""The arguments of a run, checked and put in one record; and loops in place of a kernel that does not compile."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mocha_jax._algorithms.base import Algorithm, Kind, State
from mocha_jax._algorithms.mocha import SubproblemMethod
from mocha_jax._core import check
from mocha_jax._core.compiling import Program
from mocha_jax._core.devices import on_device
from mocha_jax._core.pytree import Pytree, fields_of, static
from mocha_jax._core.values import is_traced
from mocha_jax._core.warnings import warn
from mocha_jax._data.layouts import AsStored, Layout, row_by_row, seen_by_rows
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.history import Progress, Watch, start
from mocha_jax._node.buckets import BucketSizes
from mocha_jax._problem.problem import Federated, Problem
from mocha_jax.costs import Cost
from mocha_jax.systems import Full, System

Result = TypeVar("Result")

# What compilers raise, of JAX's own classes those that have no public name: Pallas's of GPUs and of TPUs, and MLIR's.
_REFUSALS = (jax.errors.JaxRuntimeError, NotImplementedError)
_NAMES_OF_REFUSALS = {"LoweringError", "LoweringException", "MLIRError"}

# What was refused in this process: not tried again, and not said again.
_refused: set[Hashable] = set()


class RunConfig(Pytree):
    """The constants of a run."""

    algorithm: Algorithm
    problem: Federated
    systems: System
    cost: Cost
    watch: Watch | None
    bucketing: BucketSizes = static(default=())  # how to lay out nodes of different sizes

    def prepared(self) -> RunConfig:
        """Lay out the data for the algorithm."""
        return self.replace(problem=self.algorithm.prepare(self.problem, self.bucketing))

    def laid_out(self) -> RunConfig:
        """Lay out the data as `prepared` does, outside of the programs of the rounds.

        Where loops read the samples row by row, a program does it that does not copy what is there already.
        """
        config = self.in_order()
        if not self.algorithm.lays_out:
            return config.prepared()
        rows = cast(AsStored, config.problem.data.layout).rows
        laid_out = config._with_layout(lambda _: _layout(config))
        return laid_out if rows is None else laid_out.whole(rows)

    def whole(self, rows: Array | None = None) -> RunConfig:
        """Restore what `slim` left out; from samples row by row if given."""
        return self._with_layout(lambda data: data.layout.whole(data.x, rows))

    def in_order(self) -> RunConfig:
        """Put the samples in order in memory, if that is this one's to do: not within a transformation.

        Where nodes of different sizes are to be laid out, which copies them, they stay in the order that they have.
        """
        x = self.problem.data.x if self.bucketing else row_by_row(self.problem.data.x)
        return self._with_data(self.problem.data.exchange(x=x, layout=AsStored(seen_by_rows(x))))

    def _with_layout(self, layout: Callable[[TaskData], Layout]) -> RunConfig:
        data = self.problem.data
        return self._with_data(data.exchange(layout=layout(data)))

    def _with_data(self, data: TaskData) -> RunConfig:
        return self.exchange(problem=self.problem.exchange(data=data))

    def parts(self, key: Array, record_every: int, state: State | None) -> dict[str, object]:
        """Name all that determines a run, part by part, to tell it from the run of a checkpoint."""
        fields = {**fields_of(self.problem), **fields_of(self)}
        del fields["problem"], fields["bucketing"]  # its parts are there; and it follows from the data
        own = {"key": key, "record_every": record_every, "state to start from": state}
        return {"kind of problem": type(self.problem), **fields, **own}

    def start(self, state: State | None) -> Progress:
        """The progress before the first round, from `state` or from none."""
        return start(self.algorithm, self.problem, state, self.watch)


def _numbers(*args: object, **_: object) -> float:
    """Count the samples' numbers of a run. A network's work is more than its samples tell."""
    [config] = (argument for argument in args if isinstance(argument, RunConfig))
    if not isinstance(config.problem, Problem):
        return math.inf
    data = config.problem.data
    if not config.bucketing:
        return data.x.size
    devices = 1 if data.sharding is None else data.sharding.devices
    return devices * sum(nodes * rows for nodes, rows in config.bucketing) * data.num_features


# A program of a run: one of the arguments is its `RunConfig`.
program = partial(Program, numbers=_numbers)


def _slim_layout(config: RunConfig) -> Layout:
    """Lay out the data and leave out what they hold already."""
    return config.prepared().problem.data.layout.slim()


_layout, prepared = program(_slim_layout), program(RunConfig.prepared)


def make_config(
    algorithm: Algorithm[Kind], problem: Kind, systems: System | None, cost: Cost | None, watch: Watch | None,
    record_every: int,
) -> RunConfig:  # fmt: skip
    """Defaults filled in and every float in the data's dtype, so that equal work compiles once."""

    def cast(leaf: ArrayLike) -> Array:
        floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return on_device(leaf, problem.data.dtype) if floating else jnp.asarray(leaf)

    check.instance("solve or run", "algorithm", algorithm, Algorithm, "Mocha()")
    check.instance("solve or run", "problem", problem, Federated, "Problem(data, loss, regularizer)")
    if not isinstance(problem, algorithm.solves):
        kind, got = algorithm.solves.__name__, type(problem).__name__
        remedy = f" {got} is for {problem.solvers}." if problem.solvers else ""
        raise ValueError(f"{algorithm.name} solves a {kind}, got a {got} as problem.{remedy}")
    algorithm.check(problem)
    systems, cost = Full() if systems is None else systems, Cost() if cost is None else cost
    check.instance("solve or run", "systems", systems, System, "systems.Dropout(0.3)")
    check.instance("solve or run", "cost", cost, Cost, "costs.lte()")
    cost = problem.data.pad_settings(cost)
    cost.check_nodes(problem.data.num_nodes)
    if watch is not None:
        check.instance("solve or run", "watch", watch, Watch, "Watch()")
        if watch.theta is not None and record_every != 1:
            raise ValueError(f"theta is measured in every round, so record_every must be 1, got {record_every}.")
    problem = problem.unnamed()
    systems = algorithm.select_nodes(systems)
    algorithm, systems, cost, watch = jax.tree.map(cast, (algorithm, systems, cost, watch))
    return RunConfig(algorithm, problem, systems, cost, watch, algorithm.bucketing(problem.data))


def check_state(owner: str, state: object, **rounds: int) -> None:
    """Check that `state` counts its rounds and that the counter cannot overflow."""
    done = getattr(state, "round", None)
    if state is not None and (not hasattr(done, "dtype") or getattr(done, "shape", None) != ()):
        raise ValueError(
            f"{owner}: state must be what an algorithm carries from round to round, such as solution.state; "
            f"got {check.shown(state)}."
        )
    rounds_done = None if done is None else check.concrete(done)
    left = np.iinfo(np.int32).max - max(0 if rounds_done is None else int(rounds_done), 0)
    for name, value in rounds.items():
        if value > left:
            raise ValueError(
                f"{owner}: {name} must be at most {left}, for rounds are counted in 32 bits"
                f"{f' and the state has done {rounds_done}' if rounds_done else ''}; got {value}."
            )


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
        result = work(loops)
        _refused.add(kind)
        gist = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        warn(
            f"{algorithm.name}: the kernel for {type(loss).__name__} with {x.shape[-1]} features fails "
            f'on this machine ({gist}); the loops do its work, as with backend="xla".'
        )
        return result


def _is_refusal(error: Exception) -> bool:
    """Tell whether a compiler raised this because it cannot make a program of the kernel."""
    return isinstance(error, _REFUSALS) or type(error).__name__ in _NAMES_OF_REFUSALS


def run_by(algorithm: Algorithm, config: RunConfig) -> RunConfig:
    """Return the run by another algorithm with the same state."""
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
