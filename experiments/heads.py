"""Heads of a network's own for every client: ``python -m experiments.heads --data har.npz``.

Some windows of every subject of HAR with six activities, the rest for testing. A network is trained by `FedAvg`; then
every client gets a last layer of its own, one head for each activity against the others, trained by the certified
method on what the layers before make of its samples (`features.Body`):

- *network*: that of FedAvg, the same for all.
- *local heads*, *MTL heads*: independent heads, and (14), whose covariance of clients is learned.
- *alternating*: twice more the layers before are averaged over clients that keep their heads, and then heads are
  trained anew.
- *no body*: (14) on the samples as they come.

Lambda is chosen on a quarter of the training samples. Printed is the error on held-out windows, mean over clients. A
CSV keeps every trial; a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import mocha_jax as mj
from experiments import images
from experiments.rows import append, read

LAMBDAS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
WAYS = ("network", "local heads", "MTL heads", "alternating", "no body")


class Row(NamedTuple):
    """One way in one trial; the CSV's columns."""

    settings: str
    trial: int
    way: str
    lam: float
    error: float  # in %
    seconds: float


class Personal(mj.networks.Network):
    """A network whose last layers are given, one for every client; the last feature of a sample is its client's number.

    Trained are the layers before, which all clients share.
    """

    network: mj.networks.MLP
    heads: Array  # [classes, num_tasks, width + 1], with an intercept

    def init(self, key: Array) -> tuple[Any, ...]:
        *body, _ = self.network.init(key)
        return tuple(body)

    def apply(self, params: tuple[Any, ...], x: Array, key: Array | None = None) -> Array:
        width = self.heads.shape[2] - 1
        none = mj.networks.Layer(jnp.zeros((width, 1), x.dtype), jnp.zeros(1, x.dtype))
        hidden = mj.features.Body(self.network, (*params, none))(x[:, :-1])
        own = self.heads[:, x[:, -1].astype(jnp.int32)]  # [classes, b, width + 1]
        return jnp.einsum("cbf,bf->bc", own[:, :, :-1], hidden) + own[:, :, -1].T


class Parts(NamedTuple):
    """The samples of one trial."""

    train: mj.TaskData
    fit: mj.TaskData  # three quarters of those for training
    held: mj.TaskData  # and the rest, for lambda
    test: mj.TaskData


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.heads", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--data", type=Path, help="har.npz; default a synthetic set")
    parser.add_argument("--training", type=float, default=0.1, help="share of windows (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=100, help="width of the hidden layer (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=60, help="of FedAvg (default %(default)s)")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments/heads"), help="folder of the CSV")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "trials.csv"
    settings = (f"data={options.data and options.data.stem} training={options.training} hidden={options.hidden} "
                f"rounds={options.rounds} seed={options.seed}")  # fmt: skip
    rows = [row for row in read(path, Row) if row.settings == settings]
    done = {row.trial for row in rows if row.way == WAYS[-1]}
    for trial in range(options.trials):
        if trial in done:
            continue
        rows = [row for row in rows if row.trial != trial]  # of a trial that was cut off nothing counts
        found = _trial(options, settings, trial)
        for row in found:
            append(path, row)
        rows += found
        print(f"  trial {trial} " + ", ".join(f"{row.way} {row.error:.2f} %" for row in found), flush=True)
    print("\n" + table(rows))


def _trial(options: argparse.Namespace, settings: str, trial: int) -> list[Row]:
    key, began = jax.random.fold_in(jax.random.key(options.seed), trial), time.perf_counter()
    parts, classes = _parts(options, jax.random.fold_in(key, 0))
    network = mj.networks.MLP(parts.train.num_features, classes, hidden=(options.hidden,))
    averaging: dict[str, Any] = dict(local_epochs=5, batch_size=10, seed=trial)
    problem = mj.Prediction(parts.train, test=parts.test)
    state, history = mj.run(problem, mj.FedAvg(network, optax.sgd(0.1), **averaging), jax.random.fold_in(key, 1),
                            num_rounds=options.rounds, record_every=options.rounds)  # fmt: skip
    rows = []

    def say(way: str, lam: float, error: float) -> None:
        rows.append(Row(settings, trial, way, lam, 100.0 * error, time.perf_counter() - began))

    say("network", float("nan"), float(history.error[-1]))
    params: tuple[Any, ...] = state.shared
    kinds: tuple[Any, ...] = (mj.regularizers.Independent, mj.regularizers.Probabilistic)
    for kind, way in zip(kinds, ("local heads", "MTL heads"), strict=True):
        heads, lam, error = _heads(mj.features.Body(network, params), parts, kind, classes)
        say(way, lam, error)
    for again in range(2):
        personal, numbered = Personal(network, heads), mj.Prediction(_numbered(parts.train), test=_numbered(parts.test))
        trainer = mj.FedAvg(personal, optax.sgd(0.1), **averaging)
        start = trainer.init(numbered).replace(shared=tuple(params[:-1]))
        state, _ = mj.run(numbered, trainer, jax.random.fold_in(key, 2 + again), num_rounds=options.rounds // 4,
                          record_every=options.rounds // 4, state=start)  # fmt: skip
        params = (*state.shared, params[-1])
        heads, lam, error = _heads(mj.features.Body(network, params), parts, kinds[1], classes)
    say("alternating", lam, error)
    say("no body", *_heads(None, parts, kinds[1], classes)[1:])
    return rows


def _parts(options: argparse.Namespace, key: Array) -> tuple[Parts, int]:
    if options.data is None:
        digits = images.blobs(key, 1500, 20, 5)[0]
        data = images.deal(key, digits, 12, 100, iid=False)
        samples = [np.asarray(data.x[t]) for t in range(12)], [np.asarray(data.y[t]) for t in range(12)]
    else:
        file = np.load(options.data, allow_pickle=False)
        x, y = file["X"].astype(np.float32), np.unique(file["y"], return_inverse=True)[1].astype(np.float32)
        of_client = mj.partition.by_group(file["subject"])
        samples = [x[rows] for rows in of_client], [y[rows] for rows in of_client]
    train, test = mj.pack_tasks(*samples).split(jax.random.fold_in(key, 0), options.training)
    fit, held = train.split(jax.random.fold_in(key, 1), 0.75)
    return Parts(train, fit, held, test), int(max(y.max() for y in samples[1])) + 1


def _numbered(data: mj.TaskData) -> mj.TaskData:
    """Every sample with the number of its client."""
    number = jnp.broadcast_to(data.task[:, None, None].astype(data.x.dtype), (*data.x.shape[:2], 1))
    return data.replace(x=jnp.concatenate([data.x, number], axis=2))


def _heads(body: mj.features.Body | None, parts: Parts, kind: Any, classes: int) -> tuple[Array, float, float]:
    """Heads with the lambda that is best on held-out samples, for all training samples; and their error on others."""

    def seen(data: mj.TaskData) -> mj.TaskData:
        means = data.replace(loss_scaling="task_mean")
        means = means.replace(weight=means.base_weight())
        return mj.features.transform(means, _as_they_come if body is None else body, intercept=True)

    def trained(data: mj.TaskData, lam: float) -> mj.OneVsRest:
        def make(two: mj.TaskData) -> mj.Problem:
            return mj.Problem(two, mj.losses.SmoothedHinge(0.5), kind(lam))

        return mj.one_vs_rest(data, make, classes=classes, tol=1e-2, max_rounds=300)

    fit, held = seen(parts.fit), seen(parts.held)
    lam = min(LAMBDAS, key=lambda lam: float(trained(fit, lam).error_rate(held)))
    found = trained(seen(parts.train), lam)
    return found.weights, lam, float(found.error_rate(seen(parts.test)))


def _as_they_come(x: Array) -> Array:
    return x


def table(rows: list[Row]) -> str:
    """Means and standard errors over trials."""
    lines = ["| way | error % |", "|---|---|"]
    for way in WAYS:
        values = [row.error for row in rows if row.way == way]
        error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        lines.append(f"| {way} | {np.mean(values):.2f} ({error:.2f}) |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
