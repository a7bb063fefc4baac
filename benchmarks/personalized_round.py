"""A round of federated methods beside other libraries: ``python -m benchmarks.personalized_round --pfllib FOLDER``.

50 clients of two digits each, 100 samples of 784 features for training and 50 for testing, a network of one hidden
layer of 100 units, batches of 10, one epoch, all clients in every round. *PFLlib* is the program of the checkout in
FOLDER (github.com/TsingZ0/PFLlib, its dependencies installed), run as its README says, with the same samples, layers
and numbers; *Flower* is its simulation of federated averaging by its own strategy with a client in PyTorch, where
``flwr[simulation]`` is installed. Every one has a process of its own, one after the other. Seconds are the median over
rounds in which nothing is evaluated; accuracies are of each client's model on its own test samples, after all rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import mocha_jax as mj

CLIENTS, TRAIN, TEST, FEATURES, HIDDEN, BATCH, RATE = 50, 100, 50, 784, 100, 10, 0.05
P = mj.personalized


class Digits(NamedTuple):
    """Samples of all clients."""

    x: np.ndarray  # [clients, samples, 784]
    y: np.ndarray  # [clients, samples]


class Both(NamedTuple):
    """A method: PFLlib's arguments, and the algorithm."""

    arguments: str
    make: Callable[..., Any]  # make(model, optimizer, local_epochs=, batch_size=)


METHODS = {
    "FedAvg": Both("FedAvg", mj.FedAvg),
    "Local": Both("Local", mj.Local),
    "FedProx": Both("FedProx -mu 0.1", lambda *a, **k: mj.FedAvg(*a, **k, proximal=0.1)),
    "Ditto": Both("Ditto -mu 1 -pls 1", lambda *a, **k: P.ditto(*a, **k, strength=1.0)),
    "pFedMe": Both("pFedMe -lam 15 -K 5 -lrp 0.01 -bt 1", lambda *a, **k: P.pfedme(*a, **k, strength=15.0)),
    "Per-FedAvg": Both("PerAvg", lambda *a, **k: P.per_fedavg(*a, **k, inner_rate=RATE)),
    "APFL": Both("APFL -al 0.5", lambda *a, **k: P.apfl(*a, **k, mixing_rate=RATE)),
    "FedPer": Both("FedPer", P.fedper),
    "FedRep": Both("FedRep -pls 1", P.fedrep),
    "LG-FedAvg": Both("LG-FedAvg", P.lg_fedavg),
    "SCAFFOLD": Both("SCAFFOLD", P.scaffold),
    "FedDyn": Both("FedDyn -al 0.1", lambda *a, **k: P.feddyn(*a, **k, strength=0.1)),
    "FedAMP": Both("FedAMP -alk 0.02 -lam 0.02", lambda *a, **k: P.fedamp(*a, **k, strength=0.02, attention=0.02)),
}


# PFLlib's own DNN takes a log-softmax, and takes it of the hidden layer where a method splits the network in two.
_NETWORK = """

class DNN(nn.Module):
    def __init__(self, inputs, hidden, num_classes):
        super().__init__()
        self.fc1, self.fc = nn.Linear(inputs, hidden), nn.Linear(hidden, num_classes)

    def forward(self, x):
        return self.fc(F.relu(self.fc1(torch.flatten(x, 1))))
"""


class AsInTorch(mj.networks.MLP):
    """The network with the first parameters that PyTorch draws: uniform up to one over the root of the inputs."""

    def init(self, key: Array) -> Any:
        leaves, structure = jax.tree.flatten(super().init(key))
        bounds = [1.0 / np.sqrt(FEATURES)] * 2 + [1.0 / np.sqrt(HIDDEN)] * 2
        keys = jax.random.split(key, len(leaves))
        drawn = [jax.random.uniform(k, a.shape, a.dtype, -b, b) for k, a, b in zip(keys, leaves, bounds, strict=True)]
        return jax.tree.unflatten(structure, drawn)


def main() -> None:
    """Time all methods, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.personalized_round", description=__doc__)
    parser.add_argument("--pfllib", type=Path, required=True, help="a checkout of PFLlib")
    parser.add_argument("--mnist", type=Path, required=True, help="mnist.npz")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=tuple(METHODS), metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="file to save to")
    options = parser.parse_args()
    train, test = deal(options.mnist)
    rows: dict[str, dict[str, float]] = {}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; {options.rounds} rounds")
    print(
        f"{'':<12}{'ms a round':>12}{'PFLlib':>10}{'ratio':>8}{'first s':>9}{'accuracy':>10}{'PFLlib':>8}", flush=True
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, options.pfllib, train, test)
        for method in options.methods:
            row = library(method, train, test, options.rounds) | pfllib(method, folder / "system", options.rounds)
            rows[method] = row
            print(
                f"{method:<12}{1e3 * row['seconds']:>12.1f}{1e3 * row['theirs']:>10.0f}"
                f"{row['theirs'] / row['seconds']:>8.1f}{row['first']:>9.1f}{row['accuracy']:>10.4f}"
                f"{row['their_accuracy']:>8.4f}",
                flush=True,
            )
        seconds = flower(folder, options.rounds)
    if seconds is not None:
        print(f"Flower's simulation, FedAvg: {1e3 * seconds:.0f} ms a round")
        rows["Flower"] = {"theirs": seconds}
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def deal(path: Path) -> tuple[Digits, Digits]:
    """Give every client two digits' samples, for training and for testing."""
    file = np.load(path)
    x, y = file["X"].reshape(len(file["y"]), -1), file["y"].astype(int)
    x = (x / x.max()).astype(np.float32)
    draw = np.random.default_rng(0)
    left = {digit: draw.permutation(np.flatnonzero(y == digit)).tolist() for digit in range(10)}
    own = []
    for client in range(CLIENTS):
        digits = client % 10, (client + 1 + client // 10) % 10
        own.append(draw.permutation([left[digits[i % 2]].pop() for i in range(TRAIN + TEST)]))
    places = np.array(own)
    return Digits(x[places[:, :TRAIN]], y[places[:, :TRAIN]]), Digits(x[places[:, TRAIN:]], y[places[:, TRAIN:]])


def library(method: str, train: Digits, test: Digits, rounds: int) -> dict[str, float]:
    """Train once with compiling, once to time it; judge."""
    problem = mj.Prediction(mj.pack_tasks(list(train.x), list(train.y)))
    model, optimizer = AsInTorch(FEATURES, 10, (HIDDEN,)), optax.sgd(RATE)
    algorithm = METHODS[method].make(model, optimizer, local_epochs=1, batch_size=BATCH)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        state, _ = mj.run(problem, algorithm, jax.random.key(0), num_rounds=rounds, record_every=rounds)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - began)
    ready = algorithm.resume(state, problem)
    predict = jax.jit(jax.vmap(lambda node, x: algorithm.predict(ready, problem, node, x).mean))
    said = predict(jnp.arange(CLIENTS, dtype=jnp.int32), jnp.asarray(test.x)).argmax(-1)
    accuracy = float((np.asarray(said) == test.y).mean())
    return {"seconds": statistics.median(times[1:]) / rounds, "first": times[0], "accuracy": accuracy}


def write(folder: Path, checkout: Path, train: Digits, test: Digits) -> None:
    """PFLlib's program and the samples, where it looks for them."""
    shutil.copytree(checkout / "system", folder / "system")
    with open(folder / "system" / "flcore" / "trainmodel" / "models.py", "a") as models:
        models.write(_NETWORK)
    for part, data in (("train", train), ("test", test)):
        (folder / "dataset" / "MNIST" / part).mkdir(parents=True)
        for client in range(CLIENTS):
            own = {"x": data.x[client].reshape(-1, 1, 28, 28), "y": data.y[client]}
            np.savez(folder / "dataset" / "MNIST" / part / f"{client}.npz", data=np.array(own, dtype=object))


def pfllib(method: str, system: Path, rounds: int) -> dict[str, float]:
    """Run it: the median seconds of rounds without evaluation, and the accuracy after all rounds."""
    numbers = f"-data MNIST -m DNN -nc {CLIENTS} -lbs {BATCH} -lr {RATE} -ls 1 -gr {rounds} -eg {rounds} -dev cpu"
    command = [sys.executable, "-u", "main.py", *numbers.split(), "-algo", *METHODS[method].arguments.split()]
    done = subprocess.run(command, cwd=system, capture_output=True, text=True, check=False)
    times = [float(said) for said in re.findall(r"-{20} ([\d.]+)$", done.stdout, re.MULTILINE)]
    accuracies = re.findall(r"Averaged? Test Accuracy: ([\d.]+)", done.stdout)
    if done.returncode or len(times) < rounds:
        raise SystemExit(f"PFLlib's {method} failed:\n{done.stderr[-2000:]}")
    return {"theirs": statistics.median(times[1:rounds]), "their_accuracy": float(accuracies[-1])}


def flower(folder: Path, rounds: int) -> float | None:
    """Run Flower's simulation on the same files; the median seconds of a round, None where it is not installed."""
    command = [sys.executable, "-m", "benchmarks._flower_fedavg", str(folder / "dataset" / "MNIST"), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"Flower's simulation: {done.stderr.strip().splitlines()[-1]}")
        return None
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
