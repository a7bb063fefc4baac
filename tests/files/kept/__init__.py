"""One small file of every kind that the library writes, as version 0.2.0 wrote it, and what they are made from.

``python -m tests.files.kept FOLDER`` writes them anew. Those of a released version stay as they are: later versions read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import mocha_jax as mj

NAMES = ("north", "south", "west")
SETTING: dict[str, Any] = {"loss_scaling": "task_mean", "federation": "three stations", "dtype": np.float32}
ALGORITHM, REGULARIZER = mj.Mocha(), mj.regularizers.Probabilistic(0.1)
KEY = jax.random.key(0)


def samples() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return three tasks of some samples with four features and their labels, -1 or 1."""
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 4)).astype(np.float32) for n in (6, 9, 7)]
    return xs, [np.where(x[:, 0] + 0.3 * x[:, 1] > 0, 1.0, -1.0).astype(np.float32) for x in xs]


def frame() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the samples one below the other, their labels and the names of their tasks."""
    xs, ys = samples()
    return np.concatenate(xs), np.concatenate(ys), np.repeat(NAMES, [len(y) for y in ys])


def problem() -> mj.Problem:
    """Return the problem of the solve that the checkpoint interrupts."""
    x, y, names = frame()
    data = mj.pack_tasks(x, y, names, loss_scaling="task_mean", intercept=True, dtype=np.float32)
    return mj.Problem(data, mj.losses.Hinge(), REGULARIZER)


def server() -> mj.federated.Server:
    """Return the server of the federation."""
    return mj.federated.Server(ALGORITHM, REGULARIZER, num_tasks=3, num_features=4, **SETTING)


def nodes() -> list[mj.federated.Node]:
    """Return the nodes of the federation."""
    return [mj.federated.Node(x, y, mj.losses.Hinge(), ALGORITHM, **SETTING) for x, y in zip(*samples(), strict=True)]


def write(folder: Path) -> None:
    """Write a file of every kind, and ``predicted.npz`` with what the models predict."""
    x, y, names = frame()
    linear = mj.solve(problem(), ALGORITHM, tol=1e-3, key=KEY, record_every=4, max_rounds=8,
                      checkpoint=folder / "checkpoint.npz").model  # fmt: skip
    classes = (y + x[:, 2] > 0).astype(int) + (x[:, 3] > 1)
    data = mj.pack_tasks(x, classes, names, loss_scaling="task_mean", dtype=np.float32)
    several = mj.one_vs_rest(
        data, lambda d: mj.Problem(d, mj.losses.Squared(), mj.regularizers.MeanRegularized(0.1, 0.1)), tol=1e-3
    ).model
    averaging = mj.FedAvg(mj.networks.MLP(4, 3, (2,)), optax.sgd(0.1))
    network = mj.solve(mj.Prediction(data), averaging, tol=None, max_rounds=2).model
    models = {"linear": linear, "classes": several, "network": network}
    for name, model in models.items():
        model.save(folder / f"{name}.npz")
    np.savez(folder / "predicted.npz", **{name: model.predict(x, names) for name, model in models.items()})

    centre, devices = server(), nodes()
    state, states = centre.init(), [node.init() for node in devices]
    down = centre.down(state, 0)
    stepped = [
        node.step(KEY, s, centre.down(state, t)) for t, (node, s) in enumerate(zip(devices, states, strict=True))
    ]
    state, _ = centre.step(state, {t: up for t, (_, up) in enumerate(stepped)})
    for name, record in {"down": down, "up": stepped[0][1], "node": stepped[0][0], "server": state}.items():
        mj.federated.save(folder / f"{name}.npz", record)
