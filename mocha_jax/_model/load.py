"""Models from files."""

from __future__ import annotations

import os
from typing import Any

from mocha_jax._data.names import Names
from mocha_jax._model.file import read
from mocha_jax._model.linear import LinearModel
from mocha_jax._model.multiclass import METHODS, MulticlassModel


def load_model(path: str | os.PathLike[str]) -> LinearModel | MulticlassModel:
    """Read a model that `LinearModel.save` or `MulticlassModel.save` wrote.

    Examples:
      >>> import pathlib, tempfile, numpy as np, mocha_jax as mj
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.npz"
      >>> mj.LinearModel(np.eye(2), np.zeros(2)).save(path)
      >>> mj.load_model(path).predict([[3.0, 4.0]], task=1).tolist()
      [4.0]
    """
    arrays, about = read(path)
    try:
        names = Names(*(_tuple(about[what]) for what in ("tasks", "features", "classes")))
        if (kind := about["kind"]) in METHODS:
            return MulticlassModel(
                arrays["weights"], arrays["intercept"], names, bool(about["logistic"]), arrays.get("calibration"), kind,
                about["trained"],
            )  # fmt: skip
        decides = about["decides"]
        many = len(arrays["weights"])
        return LinearModel(
            arrays["weights"], arrays["intercept"], names, (decides,) * many if isinstance(decides, str) else decides,
            arrays.get("thresholds"), bool(about["logistic"]), about["trained"],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"load_model: {path} lacks a part of a model, or it is damaged: {error}.") from error


def _tuple(names: list[Any] | None) -> tuple[Any, ...] | None:
    return None if names is None else tuple(names)
