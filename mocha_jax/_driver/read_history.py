"""The records in a checkpoint, told apart by name, so that others can read them while the solve goes on.

A checkpoint holds the leaves of a history by the way to each, ``history/round``, ``history/quality.gap`` and so on, and
the name of the kind of quality that they are of.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree
from mocha_jax._driver.history import History, Nodes
from mocha_jax._files.checkpoint import KIND
from mocha_jax._files.checkpoint_parts import read
from mocha_jax._files.container import Arrays, Container
from mocha_jax._files.owned_file import CheckpointError
from mocha_jax._problem.problem import Quality

Record = TypeVar("Record", bound=Pytree)


def read_history(path: str | os.PathLike[str]) -> History:
    """Read the records that a solve has saved to its checkpoint so far, also while it is running.

    Nothing is locked or written. The file is replaced as a whole each time the solve saves, so that what is read was
    there at one moment; damage to other parts of it than the records is not looked for.

    Args:
      path: what was given to ``solve(checkpoint=...)``.

    Returns:
      The history, of NumPy arrays, as ``solution.history`` would be if the solve ended there.

    Examples:
      >>> import jax, pathlib, tempfile, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.npz"
      >>> solution = mj.solve(problem, max_rounds=6, record_every=2, tol=None, checkpoint=path)
      >>> mj.read_history(path).round.tolist()
      [2, 4, 6]
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f'read_history: path must be that of a file such as "run.npz", got {check.shown(path)}.')
    if not isinstance(os.fspath(path), str) or "\0" in os.fspath(path) or not os.path.isfile(path):
        raise CheckpointError(f"read_history: path must be that of a checkpoint, and there is no file at {path!r}.")
    saved = read(Path(path), KIND, lambda name: name.startswith("history/"))
    try:
        return _rebuilt(saved)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} does not hold what it says it holds; its records cannot be read.") from error


def _rebuilt(saved: Container) -> History:
    branches: dict[str, Arrays] = {}  # "" is the history itself
    for name, array in saved.arrays.items():
        branch, _, field = name.removeprefix("history/").rpartition(".")
        branches.setdefault(branch, {})[field] = array
    quality, nodes = _record(_kind(saved.about["quality"]), branches["quality"]), branches.get("nodes")
    return _record(History, {**branches[""], "quality": quality, "nodes": nodes and _record(Nodes, nodes)})


def _record(cls: type[Record], fields: Mapping[str, object]) -> Record:
    """A record of arrays that were in one before; fields without an array are None."""
    record = object.__new__(cls)
    vars(record).update({field.name: fields.get(field.name) for field in dataclasses.fields(cls)})  # type: ignore[arg-type]
    return record


def name_of(cls: type[Quality]) -> str:
    """Name of a kind of quality: of the library's own without the module, which may come to be another one."""
    ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
    return cls.__qualname__ if ours else f"{cls.__module__}.{cls.__qualname__}"


# Where the library's own kinds are defined, above and below here.
_KINDS = ("mocha_jax._problem.gap", "mocha_jax._neural.prediction")


def _kind(name: str) -> type[Quality]:
    """The kind of that name among the library's own and those that there are: a file decides on no import."""
    for module in _KINDS:
        importlib.import_module(module)
    queue: list[type[Quality]] = Quality.__subclasses__()
    while queue:
        cls = queue.pop()
        if name_of(cls) == name:
            return cls
        queue += cls.__subclasses__()
    raise CheckpointError(f"read_history: the records are of {name}, which is not defined here; import it first.")
