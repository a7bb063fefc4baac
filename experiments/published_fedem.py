"""FedEM's synthetic study beside its authors' own code: ``python -m experiments.published_fedem``.

Marfoq et al. 2021 (arXiv 2108.10252) draw clients whose samples are mixtures of three linear models, in shares of every
client's own, and train linear models of 150 features by epochs of batches of 128: each client alone, federated
averaging, the same with an epoch of fine-tuning (FedAvg+), and FedEM with three components. An accuracy is the mean
over clients. The data are drawn as by their generator, number by number, with fewer clients and samples for testing.
That labels the first samples of a client by each component in turn, the last one that reaches a sample holds, and the
samples that none reaches are of class 0: *as generated*. *As described* in the paper every component has its own.

``--code FOLDER`` runs theirs besides (github.com/omarfoq/FedEM, 996fadd; it needs torch, torchvision, tqdm, networkx
and cvxpy): their clients and aggregators on these samples, written into their folder of data. Both begin with the same
weights, drawn as those of torch's linear layer (for Local theirs draws its own), decay weights by 5e-4, and draw their
own batches. The momentum of theirs, which goes on at a client while the server replaces its model, is switched off:
here optimizers begin anew in every round.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import pickle
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import mocha_jax as mj
from experiments.rows import append, parser_of, read, say

FEATURES, COMPONENTS, DECAY = 150, 3, 5e-4
DATA = ("as described", "as generated")
METHODS = ("Local", "FedAvg", "FedAvg+", "FedEM")


class Row(NamedTuple):
    """One model after the last round; the CSV's columns."""

    data: str  # as described or as generated
    code: str  # ours or theirs
    method: str
    rate: float
    seed: int  # of the first weights and of the batches
    accuracy: float  # in %
    tenth: float  # of the worst tenth of the clients


class Tasks(NamedTuple):
    """Samples of all clients, for training and for testing."""

    train: list[tuple[np.ndarray, np.ndarray]]
    test: list[tuple[np.ndarray, np.ndarray]]


def main() -> None:
    """Parse the command line, train, print."""
    parser = parser_of("published_fedem", __doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--tests", type=int, default=1000, help="samples of a client for testing")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128, help="samples of a step; 1000 are all of any client")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.3, 1.0, 3.0], help="learning rates")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, default=3, help="runs of ours (default %(default)s)")
    parser.add_argument("--their-seeds", type=int, nargs="+", default=[0], help="runs of theirs (default %(default)s)")
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--code", type=Path, help="folder of the authors' code, to run it besides")
    options = parser.parse_args()
    out = options.out.resolve()  # their code runs in a folder of its own
    out.mkdir(parents=True, exist_ok=True)
    say(table(study(options, out)), out)


def drawn(data: str, clients: int, tests: int) -> Tasks:
    """Draw as their ``data/synthetic/generate_data.py`` does with its default seed, and label."""
    rng = np.random.RandomState(12345)
    sizes = [min(size + 50, 1000) for size in rng.lognormal(4, 2, clients).astype(int)]
    shares = [rng.dirichlet(np.full(COMPONENTS, 0.4)) for _ in range(clients)]
    models = rng.uniform(-1.0, 1.0, (COMPONENTS, FEATURES))

    def part(share: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        counts = rng.multinomial(size, share)
        x, y = rng.uniform(-1.0, 1.0, (size, FEATURES)), np.zeros(size, int)
        starts = np.cumsum(counts) - counts if data == "as described" else np.zeros(COMPONENTS, int)
        for start, count, model in zip(starts, counts, models, strict=True):
            rows = slice(start, start + count)
            y[rows] = x[rows] @ model + rng.normal(scale=0.1, size=count) > 0.0
        order = np.arange(size)
        rng.shuffle(order)
        return x[order].astype(np.float32), y[order]

    parts = [(part(share, size), part(share, tests)) for share, size in zip(shares, sizes, strict=True)]
    return Tasks(*map(list, zip(*parts, strict=True)))


def study(options: argparse.Namespace, out: Path) -> list[Row]:
    """All runs that the CSV lacks; then its rows."""
    path = out / "runs.csv"
    tasks = {data: drawn(data, options.clients, options.tests) for data in options.data}
    rows = read(path, Row)
    done = {row[:5] for row in rows}
    runs = [("ours", *run) for run in product(options.methods, options.rates, range(options.seeds))]
    runs += [("theirs", *run) for run in product(options.methods, options.rates, options.their_seeds) if options.code]
    for run in (run for run in product(options.data, runs) if (run[0], *run[1]) not in done):
        data, (code, method, rate, seed) = run
        found = trained(tasks[data], method, rate, seed, options) if code == "ours" else theirs(
            tasks[data], method, rate, seed, options)  # fmt: skip
        mean, tenth = (100.0 * float(np.mean(some)) for some in (found, np.sort(found)[: len(found) // 10]))
        rows.append(Row(data, code, method, rate, seed, mean, tenth))
        append(path, rows[-1])
        print(f"{data}, {code}, {method}, rate {rate:g}, seed {seed}: {rows[-1].accuracy:.2f}", flush=True)
    return rows


def first_weights(key: Array) -> dict[str, Array]:
    """Draw the weights of torch's linear layer with one output."""
    of_w, of_b = jax.random.split(key)
    ends = {"minval": -(FEATURES**-0.5), "maxval": FEATURES**-0.5}
    return {"w": jax.random.uniform(of_w, (FEATURES,), **ends), "b": jax.random.uniform(of_b, (), **ends)}


def logits(weights: dict[str, Array], x: Array) -> Array:
    """Predict the logits of both classes; that of the first is 0."""
    z = x @ weights["w"] + weights["b"]
    return jnp.stack([jnp.zeros_like(z), z], axis=-1)


NETWORK = mj.networks.Model(first_weights, logits)


def made(tasks: Tasks, method: str, rate: float, seed: int, batch: int) -> tuple[mj.Prediction, Any]:
    """The problem and the algorithm."""
    train, test = (mj.pack_tasks([x for x, _ in part], [y for _, y in part]) for part in tasks)
    problem, sgd = mj.Prediction(train, test=test), optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(rate))
    make: dict[str, Any] = {
        "Local": mj.Local, "FedAvg": mj.FedAvg, "FedEM": mj.personalized.fedem,
        "FedAvg+": lambda *given, **how: mj.personalized.fine_tuned(*given, tuning_epochs=1, **how),
    }  # fmt: skip
    return problem, make[method](NETWORK, sgd, batch_size=batch, seed=seed)


def trained(tasks: Tasks, method: str, rate: float, seed: int, options: argparse.Namespace) -> np.ndarray:
    """Train, and return the accuracy of every client."""
    problem, algorithm = made(tasks, method, rate, seed, options.batch)
    rounds = options.rounds
    state, _ = mj.run(problem, algorithm, jax.random.key(seed), num_rounds=rounds, record_every=rounds)
    return 1.0 - np.asarray(algorithm.scores(algorithm.settle(state, problem), problem).error)


def first_models(tasks: Tasks, method: str, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights and intercept of every component with which all clients begin."""
    problem, algorithm = made(tasks, method, 1.0, seed, 1)
    each = algorithm.init(problem).shared
    return list(zip(np.reshape(each["w"], (-1, FEATURES)), np.reshape(each["b"], -1), strict=True))


def theirs(tasks: Tasks, method: str, rate: float, seed: int, options: argparse.Namespace) -> np.ndarray:
    """Run their code in its folder."""
    folder, rounds = options.code.resolve(), options.rounds
    root = folder / "data" / "synthetic" / "all_data" / "train"
    for k, parts in enumerate(zip(*tasks, strict=True)):
        (root / f"task_{k}").mkdir(parents=True, exist_ok=True)
        for (x, y), name in zip(parts, ("train", "test"), strict=True):
            (root / f"task_{k}" / f"{name}.pkl").write_bytes(pickle.dumps(list(zip(x, y, strict=True))))
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    torch, utils = importlib.import_module("torch"), importlib.import_module("utils.utils")
    torch.set_num_threads(1)  # for 150 numbers a second one only waits
    name = method.removesuffix("+").replace("Local", "local")
    learners = {
        "n_learners": COMPONENTS if method == "FedEM" else 1, "name": "synthetic", "device": "cpu", "seed": 1234,
        "optimizer_name": "sgd", "scheduler_name": "constant", "initial_lr": rate, "mu": 0.0, "n_rounds": rounds,
        "input_dim": FEATURES, "output_dim": 2,
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        loaders = utils.get_loaders("tabular", str(root), options.batch, False)
        clients = [
            utils.get_client(
                utils.CLIENT_TYPE[name],
                utils.get_learners_ensemble(**learners),
                1.0,
                *own,
                Silent(),
                1,
                method == "FedAvg+",
            )
            for own in zip(*loaders, strict=True)
        ]
        aggregator = utils.get_aggregator(
            aggregator_type=utils.AGGREGATOR_TYPE[name], clients=clients, lr=rate, lr_lambda=0.0, mu=0.0, q=1.0,
            global_learners_ensemble=utils.get_learners_ensemble(**learners), communication_probability=0.1,
            sampling_rate=1.0, log_freq=10 * rounds, global_train_logger=Silent(), global_test_logger=Silent(),
            test_clients=[], verbose=0, seed=1234,
        )  # fmt: skip
        firsts = [] if method == "Local" else first_models(tasks, method, seed)
        for j, learner in (pair for client in clients for pair in enumerate(client.learners_ensemble)):
            learner.optimizer.param_groups[0]["momentum"] = 0.0
            if firsts:
                learner.model.fc.weight.data[0], learner.model.fc.bias.data[0] = map(torch.tensor, firsts[j])
        torch.manual_seed(seed)  # of the batches
        for _ in range(rounds):
            aggregator.mix()
        return np.array([float(client.write_logs()[3]) for client in clients])


class Silent:
    """A log that keeps nothing."""

    def add_scalar(self, *entry: object) -> None:
        """Keep nothing."""


def table(rows: list[Row]) -> str:
    """Markdown: accuracy, and that of the worst tenth, at each method's best rate, which is chosen by ours."""
    lines = ["| data | method | rate | ours | their code |", "|---|---|---:|---:|---:|"]
    ran = {(row.data, row.method) for row in rows}
    for data, method in (each for each in product(DATA, METHODS) if each in ran):
        of = [row for row in rows if (row.data, row.method) == (data, method)]
        rates = sorted({row.rate for row in of})
        best = max(rates, key=lambda r: np.mean([row.accuracy for row in of if (row.code, row.rate) == ("ours", r)]))
        cells = []
        for code in ("ours", "theirs"):
            own = [row for row in of if (row.code, row.rate) == (code, best)]
            spread = f" ± {np.std([row.accuracy for row in own], ddof=1):.2f}" if len(own) > 1 else ""
            cells.append(
                f"{np.mean([row.accuracy for row in own]):.2f}{spread} ({np.mean([row.tenth for row in own]):.2f})"
                if own else ""
            )  # fmt: skip
        lines.append(f"| {data} | {method} | {best:g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
