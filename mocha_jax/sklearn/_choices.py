"""Regularizers and losses by name, and the numbers that cross-validation tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from mocha_jax import losses
from mocha_jax._core import check
from mocha_jax._data.task_data import TaskData
from mocha_jax._selection.candidates import grid
from mocha_jax.losses import Loss
from mocha_jax.regularizers import Regularizer
from mocha_jax.regularizers._named import NAMED, STRENGTHS, maker

# The strength of groups that are too small to choose one.
_USUAL = 0.1

REGRESSION = {
    "squared": losses.Squared,
    "absolute": losses.Absolute,
    "epsilon_insensitive": losses.EpsilonInsensitive,
    "huber": losses.Huber,
}
CLASSIFICATION = {
    "logistic": losses.Logistic,
    "hinge": losses.Hinge,
    "smoothed_hinge": losses.SmoothedHinge,
    "squared_hinge": losses.SquaredHinge,
}


def regularizers(owner: str, regularizer: object, lam: object, data: TaskData) -> tuple[Regularizer, bool]:
    """The regularizer that was asked for, or candidates in one record with a leading axis, and whether it is these.

    Args:
      owner: for messages.
      regularizer: a name, a record, or a function ``make(lam=...)``.
      lam: None, a number, several, or ``"cv"``.
      data: to train with.
    """
    make, tried = _maker(owner, regularizer, data.num_tasks)
    if lam is None and isinstance(regularizer, Regularizer):
        return regularizer, False
    if lam is None or (isinstance(lam, str) and lam == "cv"):
        if int(data.sizes.max()) < 2:  # no group has rows to hold back
            return make(lam=_USUAL), False
        return grid(make, lam=STRENGTHS, **tried), True
    strengths = check.concrete(lam)
    if strengths is None or strengths.ndim > 1 or not strengths.size or strengths.dtype.kind not in "fiu":
        raise ValueError(f'{owner}: lam must be a number, several to choose from, or "cv", got {check.shown(lam)}.')
    check.positive(owner, lam=strengths)
    if strengths.ndim and strengths.size > 1:
        return grid(make, lam=np.sort(strengths)[::-1]), True
    return make(lam=float(strengths.item())), False


def _maker(
    owner: str, regularizer: object, num_tasks: int
) -> tuple[Callable[..., Regularizer], Mapping[str, tuple[float, ...]]]:
    """A function of lam, and what cross-validation tries besides."""
    if isinstance(regularizer, str):
        check.one_of(owner, "regularizer", regularizer, tuple(NAMED))
        return maker(regularizer, num_tasks)
    if isinstance(regularizer, Regularizer):
        return partial(_with, owner, regularizer), {}
    if not callable(regularizer):
        raise ValueError(
            f"{owner}: regularizer must be one of {', '.join(map(repr, NAMED))}, an object of mocha_jax.regularizers, "
            f"or a function that makes one of lam, got {check.shown(regularizer)}."
        )
    return partial(_made, owner, regularizer), {}


def _with(owner: str, regularizer: Regularizer, lam: float) -> Regularizer:
    if not hasattr(regularizer, "lam"):
        raise ValueError(
            f"{owner}: lam must be None where regularizer is a {type(regularizer).__name__}, which has none: its own "
            f"numbers hold; pass a function that makes it of lam."
        )
    return regularizer.replace(lam=lam)


def _made(owner: str, make: Callable[..., object], lam: float) -> Regularizer:
    try:
        regularizer = make(lam=lam)
    except TypeError as error:
        raise ValueError(
            f"{owner}: regularizer must be a function make(lam=...), got {check.shown(make)}, which says: {error}."
        ) from error
    if not isinstance(regularizer, Regularizer):
        raise ValueError(
            f"{owner}: regularizer must make an object of mocha_jax.regularizers, but it made "
            f"{check.shown(regularizer)}."
        )
    return regularizer


def loss_of(owner: str, loss: object, losses: Mapping[str, Callable[[], Loss]], binary: bool) -> Loss:
    """The loss of a name, or the one that was given, for labels of the right kind."""
    if isinstance(loss, str):
        check.one_of(owner, "loss", loss, tuple(losses))
        return losses[loss]()
    if not isinstance(loss, Loss) or loss.binary != binary:
        kind = "of two classes" if binary else "of numbers"
        raise ValueError(
            f"{owner}: loss must be one of {', '.join(map(repr, losses))} or an object of mocha_jax.losses for labels "
            f"{kind}, got {check.shown(loss)}."
        )
    return loss
