"""pFedMe's synthetic study, and its authors' own code on the same data: ``python -m experiments.published_pfedme``.

T Dinh et al. 2020 (arXiv 2006.08848) draw 100 clients with 250 to 25,000 samples of 60 features and ten classes, and
train a softmax regression for 600 rounds of ten clients and 20 steps of 20 samples each: FedAvg, Per-FedAvg, and
pFedMe, by its global model (GM) and by its personal ones (PM). The data here are those of their generator, draw by
draw, but for the split of every client into nine tenths for training and one for testing; the rates are those of their
README under "Fine-tuned". An accuracy is the share of all test samples. Personal models are judged after a round in
which all clients take part, which the run does not keep.

``--code FOLDER`` runs theirs besides (github.com/CharlieDinh/pFedMe, caf24b1; it needs torch, torchvision and h5py):
their clients and servers on this split, written into their folder of data. Of their evaluations, which read all samples
in every round, there are only those of the test samples, every so many rounds. Two differences remain: their pFedMe has
a weight decay of 0.001 besides, and their Per-FedAvg takes its step at the end on samples of the test part, with their
labels. Ours takes it on the training part.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments.rows import append, parser_of, read, say
from mocha_jax import plotting
from mocha_jax.systems import Request, Work

CLIENTS, FEATURES, CLASSES = 100, 60, 10
ASKED, STEPS, BATCH = 10, 20, 20
NETWORK = mj.networks.MLP(FEATURES, CLASSES)
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "fraction": ASKED / CLIENTS, "local_epochs": 2}
METHODS: dict[str, mj.Trainer] = {
    "FedAvg": mj.FedAvg(NETWORK, optax.sgd(0.02), **OPTIONS),
    "Per-FedAvg": mj.personalized.per_fedavg(NETWORK, optax.sgd(0.002), inner_rate=0.02, **OPTIONS),
    "pFedMe": mj.personalized.pfedme(
        NETWORK, optax.sgd(0.01), strength=20.0, inner_rate=0.01, server_optimizer=optax.sgd(2.0), **OPTIONS,
    ),
}  # fmt: skip
JUDGED = {"FedAvg": ("FedAvg",), "Per-FedAvg": ("Per-FedAvg",), "pFedMe": ("pFedMe, GM", "pFedMe, PM")}
MODELS = tuple(model for models in JUDGED.values() for model in models)
# Their server's module and class, its rate and beta, and where pFedMe's strength, steps and inner rate go.
THEIRS: dict[str, tuple[str, str, float, float, tuple[float, ...]]] = {
    "FedAvg": ("serveravg", "FedAvg", 0.02, 0.0, ()),
    "Per-FedAvg": ("serverperavg", "PerAvg", 0.02, 0.002, ()),
    "pFedMe": ("serverpFedMe", "pFedMe", 0.01, 2.0, (5, 0.01)),
}


class Row(NamedTuple):
    """One model after some rounds; the CSV's columns."""

    code: str  # ours or theirs
    model: str
    seed: int
    round: int
    accuracy: float  # in %


class SomeSteps(mj.systems.System):
    """All nodes do so many steps, or their full work if that is less."""

    steps: int

    def work(self, key: Array, data: mj.TaskData, request: Request) -> Work:
        return Work(jnp.minimum(request.steps, self.steps), jnp.ones(request.steps.shape, bool))


def main() -> None:
    """Parse the command line, train, print, draw."""
    parser = parser_of("published_pfedme", __doc__)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--every", type=int, default=50, help="rounds between two accuracies (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="runs (default %(default)s)")
    parser.add_argument("--code", type=Path, help="folder of the authors' code, to run it besides")
    options = parser.parse_args()
    out = options.out.resolve()  # their code runs in a folder of its own
    out.mkdir(parents=True, exist_ok=True)
    parts = split(*generated())
    rows = study(options, parts)
    say(table(rows), out)
    draw(rows).savefig(out / "published_pfedme.png", dpi=110)


Tables = tuple[list[np.ndarray], list[np.ndarray]]


def generated() -> Tables:
    """Draw synthetic(0.5, 0.5) as their ``generate_synthetic_05_05.py`` does, draw by draw."""
    rng = np.random.RandomState(0)
    sizes = (rng.lognormal(4, 2, CLIENTS).astype(int) + 50) * 5
    centre, shift = rng.normal(0, 0.5, CLIENTS), rng.normal(0, 0.5, CLIENTS)
    spread = np.diag(np.arange(1.0, FEATURES + 1) ** -1.2)
    means = [rng.normal(b, 1, FEATURES) for b in shift]
    xs, ys = [], []
    for k, n in enumerate(sizes):
        w, b = rng.normal(centre[k], 1, (FEATURES, CLASSES)), rng.normal(centre[k], 1, CLASSES)
        x = rng.multivariate_normal(means[k], spread, n)
        xs.append(x.astype(np.float32))
        ys.append((x @ w + b).argmax(axis=1))
    return xs, ys


def split(xs: list[np.ndarray], ys: list[np.ndarray]) -> tuple[Tables, Tables]:
    """Nine tenths of every client for training, one for testing."""
    rng = np.random.default_rng(0)
    train: Tables = [], []
    test: Tables = [], []
    for x, y in zip(xs, ys, strict=True):
        order = rng.permutation(len(y))
        for part, rows in ((train, order[: int(0.9 * len(y))]), (test, order[int(0.9 * len(y)) :])):
            part[0].append(x[rows])
            part[1].append(y[rows])
    return train, test


def write(folder: Path, parts: tuple[Tables, Tables]) -> None:
    """Write the parts as their code reads them."""
    for (xs, ys), name in zip(parts, ("train", "test"), strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        names = [f"f_{k:05d}" for k in range(len(xs))]
        data = {n: {"x": x.tolist(), "y": y.tolist()} for n, x, y in zip(names, xs, ys, strict=True)}
        text = json.dumps({"users": names, "user_data": data, "num_samples": [len(y) for y in ys]})
        (folder / name / f"my{name}.json").write_text(text)


def study(options: argparse.Namespace, parts: tuple[Tables, Tables]) -> list[Row]:
    """All runs that the CSV lacks; then its rows."""
    path = options.out.resolve() / "runs.csv"
    rows = read(path, Row)
    problem, test = mj.Prediction(mj.pack_tasks(*parts[0])), parts[1]
    runs = [("ours", name, seed) for seed in range(options.seeds) for name in METHODS]
    runs += [("theirs", name, 0) for name in METHODS if options.code]
    done = {(row.code, row.model.split(",")[0], row.seed) for row in rows}
    for code, name, seed in runs:
        if (code, name, seed) in done:
            continue
        if code == "ours":
            found = list(trained(problem, test, name, seed, options.rounds, options.every))
        else:
            found = list(theirs(options.code.resolve(), parts, name, options.rounds, options.every))
        for row in found:
            append(path, row)
        rows += found
        for row in found[-len(JUDGED[name]) :]:
            print(f"{code}, seed {seed}, {row.model}: {row.accuracy:.2f}", flush=True)
    return rows


def trained(problem: mj.Prediction, test: Tables, name: str, seed: int, rounds: int, every: int) -> Iterator[Row]:
    """Run a method, and judge its models now and then."""
    algorithm: Any = METHODS[name]
    all_of_them = algorithm.replace(fraction=1.0)
    key, state = jax.random.key(seed), algorithm.init(problem)
    for done in range(every, rounds + 1, every):
        state, _ = mj.run(
            problem, algorithm, key, num_rounds=every, record_every=every, systems=SomeSteps(STEPS), state=state
        )
        models = [algorithm.weights(algorithm.settle(state, problem))]
        if name == "pFedMe":
            after, _ = mj.run(problem, all_of_them, key, num_rounds=1, systems=SomeSteps(STEPS), state=state)
            models = [state.shared, algorithm.weights(after)]
        for model, weights in zip(JUDGED[name], models, strict=True):
            yield Row("ours", model, seed, done, accuracy(weights, test))


def accuracy(weights: Any, test: Tables) -> float:
    """The share of all test samples that are classified rightly, in %, by one model or by each client's own."""
    (layer,) = jax.device_get(weights)
    right = 0
    for k, (x, y) in enumerate(zip(*test, strict=True)):
        w, b = (a[k] if layer.w.ndim == 3 else a for a in (layer.w, layer.b))
        right += int(((x @ w + b).argmax(axis=1) == y).sum())
    return 100.0 * right / sum(map(len, test[1]))


def theirs(folder: Path, parts: tuple[Tables, Tables], name: str, rounds: int, every: int) -> Iterator[Row]:
    """Run their code in its folder."""
    write(folder / "data" / "Synthetic" / "data", parts)
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for 600 numbers a second one only waits
    np.random.seed(0)  # noqa: NPY002, it is what they draw clients with
    module, kind, rate, beta, more = THEIRS[name]
    model = importlib.import_module("FLAlgorithms.trainmodel.models").Mclr_Logistic(FEATURES, CLASSES)
    make = getattr(importlib.import_module(f"FLAlgorithms.servers.{module}"), kind)
    server = make(
        "cpu", "Synthetic", kind, (model, "mclr"), BATCH, rate, beta, 20, rounds + 1, STEPS, "SGD", ASKED, *more, 0
    )
    found: list[Row] = []
    judges = {"FedAvg": ("evaluate",), "Per-FedAvg": ("evaluate_one_step",),
              "pFedMe": ("evaluate", "evaluate_personalized_model")}[name]  # fmt: skip
    for label, method in zip(JUDGED[name], judges, strict=True):
        setattr(server, method, _now_and_then(server, method, label, every, found))
    server.save_results = server.save_model = lambda: None
    with contextlib.redirect_stdout(io.StringIO()):
        server.train()
    yield from found


def _now_and_then(server: Any, method: str, label: str, every: int, found: list[Row]) -> Callable[[], None]:
    """Their evaluation, of test samples alone, before every so many rounds."""
    count = itertools.count()

    def judge() -> None:
        round = next(count)
        if round == 0 or round % every:
            return
        if method == "evaluate_one_step":
            for user in server.users:
                user.train_one_step()
        of = server.test_persionalized_model if method == "evaluate_personalized_model" else server.test
        _, sizes, right = of()
        if method == "evaluate_one_step":
            for user in server.users:
                user.update_parameters(user.local_model)
        found.append(Row("theirs", label, 0, round, 100.0 * sum(right) / sum(sizes)))
        print(f"theirs, {label}: {found[-1].accuracy:.2f} after {round} rounds", file=sys.stderr, flush=True)

    return judge


def table(rows: list[Row]) -> str:
    """Accuracies at the end, and the highest on the way."""
    lines = ["| model | ours | their code |", "|---|---:|---:|"]
    for model in MODELS:
        cells = []
        for code in ("ours", "theirs"):
            runs = {row.seed for row in rows if (row.code, row.model) == (code, model)}
            of = [
                [r.accuracy for r in rows if (r.code, r.model, r.seed) == (code, model, seed)] for seed in sorted(runs)
            ]
            last, most = np.array([run[-1] for run in of]), np.array([max(run) for run in of])
            spread = f" ± {last.std(ddof=1):.2f}" if len(of) > 1 else ""
            cells.append(f"{last.mean():.2f}{spread} (at most {most.mean():.2f})" if of else "")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[Row]) -> Figure:
    """Accuracy over rounds: a colour for a model, dashes for their code."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for model, colour in zip(MODELS, plotting.COLOURS, strict=False):
        for code, style in (("ours", "-"), ("theirs", "--")):
            curve = sorted((r.round, r.accuracy) for r in rows if (r.code, r.model, r.seed) == (code, model, 0))
            if curve:
                label = model if code == "ours" else f"{model}, their code"
                axes.plot(*zip(*curve, strict=True), style, color=colour, label=label)
    axes.set_xlabel("rounds")
    axes.set_ylabel("accuracy of all test samples, %")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
