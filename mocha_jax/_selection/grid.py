"""Grids of settings as one record, to be mapped over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree

Record = TypeVar("Record", bound="Pytree")


def grid(make: Callable[..., Record], **axes: ArrayLike) -> Record:
    """All combinations of some settings in one record, to train all at once with `jax.vmap`.

    Args:
      make: a class of records, or a function that returns one.
      **axes: fields of the record, each with its values.

    Returns:
      A record whose array leaves have a leading axis, one entry per combination; the last setting varies fastest.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> rivals = grid(mj.MiniBatchSdca, batch=[2, 8], beta=[1.0, 4.0])
      >>> rivals.batch.tolist(), rivals.beta.tolist()
      ([2, 2, 8, 8], [1.0, 4.0, 1.0, 4.0])
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
      >>> def last_gap(algorithm):
      ...     return mj.run(problem, algorithm, jax.random.key(1), num_rounds=50)[1].relative_gap[-1]
      >>> jax.vmap(last_gap)(rivals).shape
      (4,)
    """
    check.function("grid", "make", make, "regularizers.Independent")
    if not axes:
        raise ValueError("grid: name at least one setting, e.g. grid(make, lam=[0.1, 1.0]).")
    values = [a.ravel() for a in np.meshgrid(*(_values(k, v) for k, v in axes.items()), indexing="ij")]
    size = values[0].size
    combinations = [{name: a.item() for name, a in zip(axes, row, strict=True)} for row in zip(*values, strict=True)]
    # What becomes of the numbers is up to `make`, so it makes one record of each combination. Where static fields
    # follow from them (the room for the largest batch), it is given all at once.
    records = [make(**combination) for combination in combinations]
    for record in records:
        check.instance("grid", "what make returns", record, Pytree, "regularizers.Independent(0.1)")
    if len({str(jax.tree.structure(r)) for r in records}) == 1:
        return jax.tree.map(lambda *leaf: np.stack([np.asarray(a) for a in leaf]), *records)
    first = records[0]
    leaves = {f.name for f in dataclasses.fields(first) if not f.metadata.get("static")}  # type: ignore[arg-type]
    if not set(axes) <= leaves:
        raise ValueError(f"grid: the records differ in static fields, which cannot be mapped over; vary {leaves}.")
    record = make(**dict(zip(axes, values, strict=True)))

    def stacked(leaf: ArrayLike) -> np.ndarray:
        return np.broadcast_to(leaf, (size, *np.shape(leaf)))

    others = {name: jax.tree.map(stacked, getattr(record, name)) for name in leaves - set(axes)}
    return record.replace(**others)


def _values(name: str, given: ArrayLike) -> np.ndarray:
    """The values of one setting of a grid."""
    values = check.concrete(given)
    if values is None or values.ndim > 1 or not values.size:
        raise ValueError(f"grid: {name} needs a list of values, at least one, got {check.shown(given)}.")
    return values
