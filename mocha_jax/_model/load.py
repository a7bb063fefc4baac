"""Models from files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mocha_jax import likelihoods, networks
from mocha_jax._core import check
from mocha_jax._data.moments import Moments, Scaling
from mocha_jax._data.names import Names
from mocha_jax._files.container import About, Arrays
from mocha_jax._model.file import read, rebuilt
from mocha_jax._model.linear import LinearModel
from mocha_jax._model.multiclass import METHODS, MulticlassModel
from mocha_jax._model.network import NetworkModel
from mocha_jax._model.parameters import of_paths
from mocha_jax.likelihoods import Likelihood
from mocha_jax.networks import Network


def load_model(
    path: str | os.PathLike[str], *, network: Network | None = None, likelihood: Likelihood | None = None
) -> Any:
    """Read a model that was saved: a `LinearModel`, a `MulticlassModel` or a `NetworkModel`.

    Args:
      path: of the file.
      network: for a `NetworkModel` whose network is not from `mocha_jax.networks`: the network used in training.
      likelihood: likewise for a likelihood that is not from `mocha_jax.likelihoods`.

    Examples:
      >>> import pathlib, tempfile, numpy as np, mocha_jax as mj
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.npz"
      >>> mj.LinearModel(np.eye(2), np.zeros(2)).save(path)
      >>> mj.load_model(path).predict([[3.0, 4.0]], task=1).tolist()
      [4.0]
    """
    for name, own_record, kind, example in (
        ("network", network, Network, "networks.MLP(784, 10, (200, 200))"),
        ("likelihood", likelihood, Likelihood, "likelihoods.Categorical()"),
    ):
        if own_record is not None:
            check.instance("load_model", name, own_record, kind, example)
    arrays, about = read(path)
    try:
        names = Names(about["tasks"], about["features"], about["classes"])
        kind = about["model"]
        if kind == "network":
            own = {"network": network, "likelihood": likelihood}
            made = {name: _record(path, name, about[name], own_record) for name, own_record in own.items()}
            return _network_model(arrays, about, names, **made)
        if network is not None or likelihood is not None:
            raise ValueError("it is a linear model, which has no network and no likelihood")
        if kind in METHODS:
            return _multiclass_model(arrays, about, names)
        if kind == "linear":
            return _linear_model(arrays, about, names)
        raise ValueError(f"this library knows no models of the kind {kind!r}")
    except _Missing as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # any error that constructors raise for a text or arrays that were damaged
        reason = str(error).rstrip(".")
        raise ValueError(f"load_model: {path} lacks a part of a model, or it is damaged: {reason}.") from error


def _linear_model(arrays: Arrays, about: About, names: Names) -> LinearModel:
    decides = about["decides"]
    if isinstance(decides, str):
        decides = (decides,) * len(arrays["weights"])
    return LinearModel(
        arrays["weights"], arrays["intercept"], names, decides, arrays.get("thresholds"), bool(about["logistic"]),
        about["trained"],
    )  # fmt: skip


def _multiclass_model(arrays: Arrays, about: About, names: Names) -> MulticlassModel:
    return MulticlassModel(
        arrays["weights"], arrays["intercept"], names, bool(about["logistic"]), arrays.get("calibration"),
        about["model"], about["trained"],
    )  # fmt: skip


def _network_model(
    arrays: Arrays, about: About, names: Names, network: Network, likelihood: Likelihood
) -> NetworkModel:
    scaling = None
    if (by := about["scaled"]) is not None:
        scaling = Scaling(by, *(arrays.pop(f"scaling/{name}") for name in Moments._fields))
    parameters = of_paths(network, {name.removeprefix("parameters/"): array for name, array in arrays.items()})
    return NetworkModel(
        network, parameters, about["num_features"], likelihood, names, about["appended"], scaling, about["trained"]
    )


class _Missing(Exception):
    """The file needs something that a person wrote."""


def _record(path: object, name: str, about: Mapping[str, object], own_record: Network | Likelihood | None) -> Any:
    """The network or likelihood that a file describes, or the one that a person gives."""
    if own_record is not None:
        return own_record
    if about.get("own"):
        raise _Missing(
            f"load_model: {path} has a {name} of your own, {about['class']}, and a file holds no functions; pass it, "
            f"load_model(path, {name}=...)."
        )
    return rebuilt(about, networks if name == "network" else likelihoods)
