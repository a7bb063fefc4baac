"""What a method is: from training rows to a function that predicts any rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from experiments.baselines.tables import Rows

# From rows [k, d] and their tasks [k] to numbers, decision values of the rare class, or classes [k].
Predict = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Cell(NamedTuple):
    """Training rows, and what a method needs to know of them."""

    kind: str  # of `tables.KINDS`
    train: Rows
    seed: int


class Fitted(NamedTuple):
    """A method after training."""

    predict: Predict
    chosen: str  # hyperparameters, in words


class Method(NamedTuple):
    """A line of the tables."""

    name: str
    fit: Callable[[Cell], Fitted]
    tables: tuple[str, ...]
    needs: str = ""  # a package that may not be there
