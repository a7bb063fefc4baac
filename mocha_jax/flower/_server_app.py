"""The ServerApp of a federation."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from mocha_jax._core import check
from mocha_jax._core.pytree import PyTree
from mocha_jax._model.linear import LinearModel
from mocha_jax._model.network import NetworkModel
from mocha_jax.federated import Server, Training
from mocha_jax.flower._node_store import export
from mocha_jax.flower._server_loop import Rounds, Served, ServeOptions, in_words

_log = logging.getLogger("flwr")

MakeModel = Callable[[PyTree], LinearModel | NetworkModel]  # of the weights or the parameters


def server_app(
    make_server: Callable[[Mapping[str, bool | int | float | str]], Server], *,
    make_model: MakeModel | None = None, result: str = "", **options: Any,
) -> ServerApp:  # fmt: skip
    """Make the ServerApp of a federation whose central node is a `mocha_jax.federated.Server`.

    These arguments are for all runs. A run-config overrides them under the same names with hyphens, e.g. ``flwr run
    --run-config 'max-rounds=50 tol=1e-4'``, those of them that ``[tool.flwr.app.config]`` lists.

    Every round is a line in the run's log: the relative gap and a lower bound on the optimum, of networks the loss; how
    many answers were accepted, which were refused and why, seconds and bytes. A run that was killed goes on from its
    ``checkpoint`` when the next ``flwr run`` names the same file.

    Args:
      make_server: makes the server, of the run-config.
      make_model: makes a model to be saved, of the weights ``[num_tasks, d]`` or a network's parameters, e.g. ``lambda
        parameters: NetworkModel(network, parameters, d)``; default a `LinearModel` of numbers without intercept and
        names, of networks a file of NumPy's arrays. Of `Virtual` the nodes' private parts are not here, and None.
      result: path of a file for the model in the end, with how well it was trained.
      **options: those of `serve`.
    """
    check.function("server_app", "make_server", make_server, "lambda config: Server(...)")
    if make_model is not None:
        check.function("server_app", "make_model", make_model, "lambda w: LinearModel(w, 0 * w[:, 0], names)")
    defaults = {field.name: field.default for field in dataclasses.fields(ServeOptions)}
    if unknown := sorted(set(options) - set(defaults)):
        raise ValueError(f"server_app: there is no option {unknown[0]}; those of serve are {', '.join(defaults)}.")
    ServeOptions(**options)
    if not isinstance(result, str):
        raise ValueError(f"server_app: result must be the path of a file, got {check.shown(result)}.")
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        chosen = {**defaults, **options}
        chosen = {name: config.get(name.replace("_", "-"), value) for name, value in chosen.items()}
        server = make_server(config)
        check.instance("server_app", "make_server(...)", server, Server, "federated.Server(...)")
        served = Rounds(grid, server, ServeOptions(**chosen)).run()
        how = "converged" if served.converged else "ended at max_rounds"
        _log.info("%s: the model of %d rounds has %s.", how, served.rounds, in_words(served.report.quality))
        if path := str(config.get("result", result)):
            write_result(path, served, make_model)
            _log.info("The model is in %s.", path)

    return app


def write_result(path: str, served: Served, make_model: MakeModel | None) -> None:
    """Write the model to a file.

    Args:
      path: of the file.
      served: the outcome.
      make_model: as in `server_app`; where it fails the file has the arrays, so that no training is lost.
    """
    weights, network = served.weights, isinstance(served.report.quality, Training)
    if make_model is None and network:
        export(path, weights)
        return
    try:
        model = make_model(weights) if make_model else LinearModel(weights, np.zeros(len(weights), weights.dtype))
    except Exception:
        _log.exception("server_app: make_model failed; %s has the arrays of the weights.", path)
        export(path, weights)
        return
    if isinstance(model, LinearModel | NetworkModel):
        quality = served.report.quality
        numbers = {
            field.name: float(value)
            for field in dataclasses.fields(quality)
            if np.ndim(value := getattr(quality, field.name)) == 0 and value is not None and np.isfinite(value)
        }
        trained = {**model.trained, **numbers, "rounds": served.rounds, "converged": served.converged}
        model = dataclasses.replace(model, trained=trained)
    model.save(path)
