"""Private training of 139 schools: ``python -m experiments.private_school --data school.npz``.

The setting of figure 3(c) of Liu, Hu, Wu and Smith 2022, "On privacy and personalization in cross-silo federated
learning" (arXiv 2206.07902): pupils' exam scores by linear models from 0, 70 % of each school for training, features
standardised within a school, scores in [0, 1], 200 rounds of an epoch, batches of 32, learning rate 0.01, gradients
clipped to 1, delta 1e-3; mean squared error on the other pupils.

Two kinds of rows:

- *published*: the training of the paper's own code written anew in NumPy. Its batches are shuffled epochs without the
  last, short batch, and the noise is that of the accountant for Poisson sampling, which such batches are not: the
  epsilon is what that paper calls so. The pull of MR-MTL is clipped together with the samples' gradients.
- *Poisson*: `mocha_jax.privacy`, whose batches are drawn as the accountant assumes.

The features' means and spreads, from the training samples, are not accounted for, as in the paper.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments.rows import append, parser_of, read, say
from mocha_jax import plotting

EPSILONS = (0.5, 1.0, 2.0, 6.0, np.inf)
PULLS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
PULL = 1.0  # of the paper's figure
ROUNDS, BATCH, RATE, CLIP, DELTA = 200, 32, 0.01, 1.0, 1e-3
FIGURE = {"FedAvg": 0.02564, "Local": 0.02628, "MR-MTL": 0.02394}  # of the paper's code, epsilon 6
TICKS = 0.02, 0.03, 0.05, 0.1
METHODS = ("FedAvg", "Local", "MR-MTL", "Ditto", "FedAvg + fine-tuning", "IFCA")


class Row(NamedTuple):
    """One run; the CSV's columns."""

    kind: str  # "published" or "Poisson"
    method: str
    pull: float
    epsilon: float
    seed: int
    error: float


class Split(NamedTuple):
    """Samples of all schools."""

    xs: list[np.ndarray]
    ys: list[np.ndarray]
    test_xs: list[np.ndarray]
    test_ys: list[np.ndarray]


def main() -> None:
    """Parse the command line, train, print, draw."""
    parser = parser_of("private_school", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="school.npz")
    parser.add_argument("--seeds", type=int, default=5, help="splits (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = study(options)
    say(report(rows), options.out)
    draw(rows).savefig(options.out / "private_school.png", dpi=110)


def study(options: argparse.Namespace) -> list[Row]:
    """All that the CSV lacks; then its rows."""
    path = options.out / "runs.csv"
    rows = read(path, Row)
    done = {row[:5] for row in rows}
    wanted = [("published", method, PULL, 6.0) for method in FIGURE]
    for epsilon in options.epsilons:
        wanted += [("Poisson", "MR-MTL", pull, epsilon) for pull in PULLS]
        wanted += [("Poisson", method, PULL, epsilon) for method in METHODS if method != "MR-MTL"]
    file = np.load(options.data, allow_pickle=False)
    for kind, method, pull, epsilon in wanted:
        for seed in range(options.seeds):
            if (kind, method, pull, epsilon, seed) in done:
                continue
            parts = split(file, seed)
            run = published if kind == "published" else private
            row = Row(kind, method, pull, epsilon, seed, run(parts, method, pull, epsilon, seed, options.rounds))
            append(path, row)
            rows.append(row)
        errors = [row.error for row in rows if row[:4] == (kind, method, pull, epsilon)]
        print(f"{kind:>9} {method:<21} pull {pull:<5g} epsilon {epsilon:<4g} {np.mean(errors):.5f}", flush=True)
    return rows


def split(file: Any, seed: int, share: float = 0.7, lowest: float = 1.0, span: float = 69.0) -> Split:
    """Draw a share of every school for training, and scale labels to [0, 1]."""
    rng, parts = np.random.default_rng(seed), Split([], [], [], [])
    for task in np.unique(file["task"]):
        order = rng.permutation(np.flatnonzero(file["task"] == task))
        train, test = np.split(order, [round(share * len(order))])
        x = file["X"].astype(float)
        spread = x[train].std(axis=0)
        x = (x - x[train].mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        for xs, ys, rows in ((parts.xs, parts.ys, train), (parts.test_xs, parts.test_ys, test)):
            xs.append(x[rows].astype(np.float32))
            ys.append(((file["y"][rows] - lowest) / span).astype(np.float32))
    return parts


def private(parts: Split, method: str, pull: float, epsilon: float, seed: int, rounds: int) -> float:
    """Train by batches drawn as the accountant assumes."""
    train, test = (mj.pack_tasks(x, y) for x, y in (parts[:2], parts[2:]))
    problem = mj.Prediction(train, mj.likelihoods.Gaussian(), test=test)
    algorithm, some = algorithms(parts.xs[0].shape[1], rounds)[method]
    if method in ("MR-MTL", "Ditto"):
        algorithm = algorithm.replace(numbers={"strength": pull})
    if np.isfinite(epsilon):
        algorithm = algorithm.replace(privacy=levels(problem, method, epsilon, rounds))
    solution = mj.solve(problem, algorithm, key=jax.random.key(seed), tol=None, max_rounds=some, record_every=some)
    return float(solution.history.sample_error[-1])


@cache
def algorithms(features: int, rounds: int) -> dict[str, tuple[Any, int]]:
    """The algorithms, and how many rounds they have; fine-tuning takes half of the epochs."""
    model, sgd, how = linear(features, 0.0), optax.sgd(RATE), {"batch_size": BATCH}
    p: Any = mj.personalized
    return {
        "FedAvg": (mj.FedAvg(model, sgd, batch_size=BATCH), rounds),
        "Local": (mj.Local(model, sgd, batch_size=BATCH), rounds),
        "MR-MTL": (p.mr_mtl(model, sgd, **how), rounds),
        "Ditto": (p.ditto(model, sgd, **how), rounds),
        "FedAvg + fine-tuning": (p.fine_tuned(model, sgd, tuning_epochs=rounds // 2, **how), rounds // 2),
        # Models that begin alike would stay alike.
        "IFCA": (p.ifca(linear(features, 0.01), sgd, clusters=2, classes=False, **how), rounds),
    }


def linear(features: int, scale: float) -> mj.networks.Model:
    """A linear model that begins at 0, or at random and near it."""
    plain = mj.networks.MLP(features, 1)
    return mj.networks.Model(lambda key: jax.tree.map(lambda a: scale * a, plain.init(key)), plain.apply)


_LEVELS: dict[tuple[str, float, int], mj.privacy.ExampleLevel] = {}


def levels(problem: mj.Prediction, method: str, epsilon: float, rounds: int) -> mj.privacy.ExampleLevel:
    """Noise and steps of every school; the same for all splits, whose sizes are."""
    key = method, epsilon, rounds
    if key not in _LEVELS:
        algorithm, some = algorithms(problem.data.num_features, rounds)[method]
        found = mj.privacy.with_budget(algorithm, problem, epsilon=epsilon, delta=DELTA, rounds=some, clip=CLIP)
        _LEVELS[key] = found.privacy
    return _LEVELS[key]


def published(parts: Split, method: str, pull: float, epsilon: float, seed: int, rounds: int) -> float:
    """Train as the paper's code does, in NumPy; it has one round more than it says."""
    sizes = np.array([len(y) for y in parts.ys])
    m, n, rng = len(sizes), int(sizes.max()), np.random.default_rng([seed, 5])
    x, y = np.zeros((m, n, parts.xs[0].shape[1] + 1)), np.zeros((m, n))
    for k, (own_x, own_y) in enumerate(zip(parts.xs, parts.ys, strict=True)):
        x[k, : sizes[k]], y[k, : sizes[k]] = np.c_[own_x, np.ones(len(own_y))], own_y
    batch = np.minimum(BATCH, sizes)
    steps = sizes // batch
    noise = np.array([mj.privacy.noise(epsilon, int(n), int(b), int(s) * (rounds + 1), delta=DELTA)
                      for n, b, s in zip(sizes, batch, steps, strict=True)])  # fmt: skip
    everyone, w, mean = np.arange(m)[:, None], np.zeros((m, x.shape[2])), np.zeros(x.shape[2])
    for _ in range(rounds + 1):
        start = np.broadcast_to(mean, w.shape) if method == "FedAvg" else w
        now = start.copy()
        order = np.argsort(np.where(np.arange(n) < sizes[:, None], rng.random((m, n)), 2.0), axis=1)
        for s in range(int(steps.max())):
            places = np.minimum(s * batch[:, None] + np.arange(BATCH)[None, :], n - 1)
            rows = np.take_along_axis(order, places, axis=1)
            counts = (np.arange(BATCH)[None, :] < batch[:, None]) & (s < steps)[:, None]
            some_x = x[everyone, rows]
            each = (np.einsum("mbd,md->mb", some_x, now) - y[everyone, rows])[..., None] * some_x
            if method == "MR-MTL":
                each = each + pull * (now - mean)[:, None, :]
            length = np.linalg.norm(each, axis=2)
            each = each * (counts * np.minimum(1.0, CLIP / (length + 1e-15)))[..., None]
            drawn = (noise * CLIP)[:, None] * rng.normal(size=now.shape)
            gradient = (each.sum(axis=1) + drawn) / batch[:, None]
            now = now - RATE * gradient * (s < steps)[:, None]
        if method != "Local":
            mean = mean + sizes @ (now - start) / sizes.sum()
        w = now
    models = np.broadcast_to(mean, w.shape) if method == "FedAvg" else w
    squares = [np.sum((np.c_[a, np.ones(len(b))] @ models[k] - b) ** 2)
               for k, (a, b) in enumerate(zip(*parts[2:], strict=True))]  # fmt: skip
    return float(sum(squares) / sum(map(len, parts.test_ys)))


def gathered(rows: list[Row]) -> dict[tuple[str, str, float, float], np.ndarray]:
    """Errors of all splits."""
    found: dict[tuple[str, str, float, float], list[float]] = {}
    for row in rows:
        found.setdefault((row.kind, row.method, row.pull, row.epsilon), []).append(row.error)
    return {key: np.array(errors) for key, errors in found.items()}


def report(rows: list[Row]) -> str:
    """Tables in Markdown: the published figure, and all methods over epsilon."""
    found = gathered(rows)

    def shown(*key: Any) -> str:
        errors = found.get(key)
        return "" if errors is None else f"{errors.mean():.5f} ± {errors.std():.5f}"

    lines = ["| epsilon 6 | paper | published training | Poisson sampling |", "|---|---:|---:|---:|"]
    for method, figure in FIGURE.items():
        both = (shown(kind, method, PULL, 6.0) for kind in ("published", "Poisson"))
        lines.append(f"| {method} | {figure:.5f} | {' | '.join(both)} |")
    epsilons = sorted({row.epsilon for row in rows})
    heads = ["no privacy" if np.isinf(e) else f"{e:g}" for e in epsilons]
    lines += ["", f"| epsilon | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    for method in METHODS:
        pulls = PULLS if method == "MR-MTL" else (PULL,)
        for pull in pulls:
            name = f"{method}, pull {pull:g}" if method in ("MR-MTL", "Ditto") else method
            lines.append(f"| {name} | {' | '.join(shown('Poisson', method, pull, e) for e in epsilons)} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[Row]) -> Figure:
    """The error over epsilon, and over the pull of MR-MTL."""
    found, figure = gathered(rows), Figure(figsize=(9.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    finite = sorted({row.epsilon for row in rows if np.isfinite(row.epsilon)})
    for colour, method in zip(plotting.COLOURS, METHODS, strict=False):
        pulls = PULLS if method == "MR-MTL" else (PULL,)
        best = [
            min(found[key].mean() for pull in pulls if (key := ("Poisson", method, pull, e)) in found) for e in finite
        ]
        left.plot(
            finite, best, "o-", color=colour, ms=4, label=f"{method}, best pull" if method == "MR-MTL" else method
        )
    left.set_xscale("log")
    left.set_xticks(finite, [f"{e:g}" for e in finite])
    left.set_yscale("log")
    left.set_ylim(0.02, 0.1)
    left.set_yticks(TICKS, [f"{t:g}" for t in TICKS])
    left.set_xlabel("epsilon of every school")
    left.set_ylabel("mean squared error")
    left.legend(fontsize=8)
    for colour, epsilon in zip(plotting.COLOURS, sorted({row.epsilon for row in rows}), strict=False):
        curve = [(pull, found[key].mean()) for pull in PULLS if (key := ("Poisson", "MR-MTL", pull, epsilon)) in found]
        label = "no privacy" if np.isinf(epsilon) else f"epsilon {epsilon:g}"
        right.plot(*zip(*curve, strict=True), "o-", color=colour, ms=4, label=label)
    right.set_xscale("log")
    right.set_xlabel("pull of MR-MTL towards the mean")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
