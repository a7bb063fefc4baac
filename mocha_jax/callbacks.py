"""Callbacks of `solve`: something to do for every record, and TensorBoard."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

import jax
import numpy as np

from mocha_jax._core import check
from mocha_jax._driver.history import History

__all__ = [
    "EachRecord",
    "TensorBoard",
]


def __dir__() -> list[str]:
    return __all__


class EachRecord:
    """Calls a function once for every record; `solve` itself calls back once a chunk, with all records so far.

    An object follows one run. It remembers how far it has come, so that a run that was interrupted and goes on in the
    same process is told without repetition. In a new process a resumed run brings the records of its checkpoint along:
    all of them are told again, or with `after` those that are new.

    Args:
      function: called as ``function(round, record)`` with a `History` of that record alone, whose fields are numbers;
        a true return value stops the solve at the end of the chunk. If it raises, the record counts as not told.
      after: leave out records up to this round.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
      >>> seen = []
      >>> tell = mj.callbacks.EachRecord(lambda round, record: seen.append((round, record.gap.shape)))
      >>> solution = mj.solve(problem, max_rounds=6, record_every=2, tol=None, callback=tell)
      >>> seen
      [(2, ()), (4, ()), (6, ())]
    """

    def __init__(self, function: Callable[[int, History], object], *, after: int = 0) -> None:
        check.function("EachRecord", "function", function, "lambda round, record: print(round, record.residual)")
        check.integer("EachRecord", 0, after=after)
        self._function, self._told = function, int(after)

    def __call__(self, round: int, history: History) -> bool:
        """Tell what is new; true where the function wants the solve to stop."""
        del round  # of the last record
        rounds, stop = np.asarray(history.round), False
        for i in np.flatnonzero(rounds > self._told):
            record = jax.tree.map(lambda column, i=i: column[i], history)
            stop = bool(self._function(int(rounds[i]), record)) or stop
            self._told = int(rounds[i])
        return stop

    def __repr__(self) -> str:
        return f"EachRecord({self._function!r}, after={self._told})"


class TensorBoard:
    """Writes every record's numbers as scalars for TensorBoard, or for any writer like its own; the step is the round.

    A tag is the name of a column of ``history.to_dict()``, such as ``gap`` or ``simulated_time``. Those that are
    infinite from the first record on are left out until they are not, such as the joint gap of a problem that has none.
    Of resumed runs holds what `EachRecord` says of them. Of several processes the first one writes.

    Args:
      writer: with ``add_scalar(tag, value, step)``, as those of torch and tensorboardX have, or with
        ``scalar(tag, value, step)``, as that of flax; or the path of a folder, which needs tensorboardX.
      prefix: before every tag, with a slash between them; default nothing.
      after: leave out records up to this round.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> class Printer:
      ...     def add_scalar(self, tag, value, step):
      ...         if tag == "local/steps":
      ...             print(tag, step)
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
      >>> board = mj.callbacks.TensorBoard(Printer(), "local")
      >>> solution = mj.solve(problem, max_rounds=4, record_every=2, tol=None, callback=board)
      local/steps 2
      local/steps 4
    """

    def __init__(self, writer: object, prefix: str = "", *, after: int = 0) -> None:
        check.instance("TensorBoard", "prefix", prefix, str, "'local'")
        check.integer("TensorBoard", 0, after=after)
        self._prefix, self._each = f"{prefix}/" if prefix else "", EachRecord(self._write, after=after)
        writer = _opened(writer)
        add = getattr(writer, "add_scalar", None) or getattr(writer, "scalar", None)
        if not callable(add) or isinstance(writer, type):
            raise ValueError(
                f"TensorBoard: writer must have add_scalar(tag, value, step), as SummaryWriter() has, or be the path "
                f"of a folder; got {check.shown(writer)}."
            )
        self._add, self._flush = add, getattr(writer, "flush", None)
        self._known: set[str] = set()  # columns that have not always been infinite

    def __call__(self, round: int, history: History) -> None:
        """Write what is new."""
        if jax.process_index() != 0:
            return
        self._each(round, history)
        if callable(self._flush):
            self._flush()

    def _write(self, round: int, record: History) -> None:
        for name, value in record.to_dict().items():
            if not np.isinf(value):
                self._known.add(name)
            if name != "round" and name in self._known:
                self._add(self._prefix + name, float(value), round)


def _opened(writer: object) -> object:
    """A writer as it is; of a folder, one that writes there."""
    if not isinstance(writer, str | os.PathLike) or not os.fspath(writer):
        return writer
    try:
        tensorboard = importlib.import_module("tensorboardX")
    except ImportError:
        raise ImportError(
            "TensorBoard: a folder needs tensorboardX (pip install tensorboardX); any other writer can be handed in."
        ) from None
    return tensorboard.SummaryWriter(os.fspath(writer))
