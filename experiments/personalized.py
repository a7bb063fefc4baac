"""Methods of personalized federated learning side by side: ``python -m experiments.personalized --data har.npz ...``.

Twenty-two methods that train a network with 50 hidden units, three certified convex models, and certified heads on such
a network, on the same features of up to fourteen federations:

- made ones: scikit-learn's digits dealt by Dirichlet(0.1), FedEM's mixture of three logistic models, synthetic(1, 1);
- of files, where they are: land mines, schools (real labels), vehicle sensors, HAR's six activities, and MNIST in
  shards, by Dirichlet(0.1), by writers, and with the pixels of every client permuted; roles of Shakespeare;
- of packages, where they are installed: the marks of 49 schools' pupils (faraway), the wages of 545 men (linearmodels).

Of a client's samples 40 % are for training (at most 100), 20 % for choosing (50) and 40 % for testing (150). Every
method of training networks has twelve runs: three learning rates times four values of a number of its own, or twelve
rates. They train at once, in one compiled call but for numbers that change the program. Choices are by the mean score
over clients on the samples for choosing: the run, and the round out of ten where the model is taken. A convex model has
twelve candidates, each solved until its gap is 1 % of the objective; heads have nine, on the best of three networks.

Scores are accuracies, of land mines areas under the ROC curve, of numbers RMSE. Beside them are the rounds up to the
model taken, what a client sends until then (`Algorithm.request`), and simulated seconds on LTE. Differences from
federated averaging with fine-tuning, or from another ``--baseline``, are paired, with 95 % intervals over clients and
seeds (`metrics.over_tasks`). A CSV keeps every method; a run that was interrupted goes on. ``--small`` has two data
sets, one seed and a third of the rounds; ``--report`` makes table and picture of what there is.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from matplotlib.figure import Figure
from scipy.stats import rankdata

import mocha_jax as mj
from experiments._personalized_parts import (
    ALONE,
    BASELINE,
    GRIDS,
    METHODS,
    SOURCES,
    WAYS,
    Federation,
    Outcome,
    Shape,
    Traffic,
    best,
    federation,
    predicted,
    scores,
    signs,
    with_constant,
)
from experiments.rows import append, read
from mocha_jax import plotting

SMALL, SMALL_ROUNDS = ("digits", "mixture"), 50
RATES = {"classes": (0.02, 0.5), "rare": (0.02, 0.5), "numbers": (0.004, 0.1)}  # the least and the largest rate
RECORDS = 10
EPOCHS, BATCH = 2, 10
DRAWS = 2000  # of clients, for intervals of ranks
GAP, MOST_ROUNDS = 1e-2, 2000  # of a convex model, relative


class Row(NamedTuple):
    """One method on one data set and seed; the CSV's columns."""

    tasks: str
    settings: str
    seed: int
    method: str
    scores: str  # of every client
    chosen: str
    rounds: int
    sent: float  # megabytes, by a client
    received: float
    lte: float  # simulated seconds
    seconds: float  # of this process


def main() -> None:
    """Parse the command line, train, print, draw."""
    parser = argparse.ArgumentParser(prog="python -m experiments.personalized", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--data", type=Path, nargs="*", help=".npz files; default those in the folder MOCHA_JAX_DATA")
    parser.add_argument("--sets", nargs="+", choices=SOURCES, help="default all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help="default all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help=f"of every run, in tens (default 150, with --small {SMALL_ROUNDS})")
    parser.add_argument("--rates", type=int, default=3, help="learning rates of a method (default %(default)s)")
    parser.add_argument("--clients", type=int, help="of made federations (default: their own numbers)")
    parser.add_argument("--small", action="store_true", help=f"{' and '.join(SMALL)}, one seed, fewer rounds")
    parser.add_argument("--baseline", choices=METHODS, default=BASELINE, metavar="METHOD",
                        help="of paired differences (default %(default)s)")  # fmt: skip
    parser.add_argument("--report", action="store_true", help="no training: table and picture of the CSV")
    parser.add_argument("--out", type=Path, default=Path("experiments/personalized"), help="folder of CSV and picture")
    options = parser.parse_args()
    if options.data is None:
        folder = os.environ.get("MOCHA_JAX_DATA")
        options.data = sorted(Path(folder).glob("*.npz")) if folder else []
    options.sets = options.sets or (SMALL if options.small else tuple(SOURCES))
    options.seeds = 1 if options.small else options.seeds
    options.rounds = options.rounds or (SMALL_ROUNDS if options.small else 150)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = study(options)
    if not rows:
        parser.error("there are no results")
    text = report(rows, options.baseline)
    print("\n" + text)
    (options.out / "table.md").write_text(text)
    draw(rows, options.out / "personalized.png", options.baseline)


def study(options: argparse.Namespace) -> list[Row]:
    """All that the CSV lacks; then its rows of these sets, seeds and methods."""
    path = options.out / "trials.csv"
    settings = f"rounds={options.rounds} rates={options.rates} clients={options.clients}"
    wanted = {(name, seed, method) for name in options.sets for seed in range(options.seeds)
              for method in options.methods}  # fmt: skip
    rows = [r for r in read(path, Row) if r.settings == settings and (r.tasks, r.seed, r.method) in wanted]
    done = {(r.tasks, r.seed, r.method) for r in rows}
    files = {file.stem: file for file in options.data if file.exists()}
    for name in () if options.report else options.sets:
        source = SOURCES[name]
        if source.package and not importlib.util.find_spec(source.package):
            print(f"{source.package} is not installed: {name} is skipped", file=sys.stderr)
            continue
        if source.file and source.file not in files:
            print(f"{source.file}.npz is not here: {name} is skipped", file=sys.stderr)
            continue
        for seed in range(options.seeds):
            missing = [method for method in options.methods if (name, seed, method) not in done]
            if not missing:
                continue
            fed = federation(source, seed, options.clients or source.clients, files.get(source.file))
            print(f"{name}, seed {seed}: {fed.shape.clients} clients", flush=True)
            for method in missing:
                began = time.process_time()
                train = trained if method in WAYS else headed if GRIDS[method].heads else linear
                found = train(fed, method, seed, options)
                row = Row(name, settings, seed, method, " ".join(f"{s:.6g}" for s in found.scores), *found[1:],
                          time.process_time() - began)  # fmt: skip
                append(path, row)
                rows.append(row)
                print(f"  {method:>31}: {np.nanmean(found.scores):.4f} after {row.rounds:3d} rounds, {row.chosen} "
                      f"({row.seconds:.0f} s)", flush=True)  # fmt: skip
        jax.clear_caches()  # a process holds only so many programs
    return whole(rows)


def whole(rows: list[Row]) -> list[Row]:
    """Leave out what is under way: seeds of a data set that lack a method that all its other seeds have.

    A data set's only seed is compared with the other data sets.
    """
    of: dict[str, dict[int, set[str]]] = {}
    for row in rows:
        of.setdefault(row.tasks, {}).setdefault(row.seed, set()).add(row.method)

    def is_whole(row: Row) -> bool:
        others = [methods for seed, methods in of[row.tasks].items() if seed != row.seed]
        if not others:
            others = [set.union(*seeds.values()) for tasks, seeds in of.items() if tasks != row.tasks]
        return not others or set.intersection(*others) <= of[row.tasks][row.seed]

    return [row for row in rows if is_whole(row)]


class Tuned(NamedTuple):
    """The best run of a method that trains networks, and where its model is taken."""

    rate: float
    number: float
    rounds: int
    scores: np.ndarray  # [m]
    traffic: tuple[float, float, float]  # up to there: bytes sent and received, seconds


def trained(fed: Federation, method: str, seed: int, options: argparse.Namespace) -> Outcome:
    """Train all runs of a method that trains networks, and score the best one."""
    numbers = WAYS[method].numbers
    run = tuned(fed, method, seed, options, options.rates if numbers else 4 * options.rates)
    chosen = f"rate {run.rate:.3g}" + (f", {run.number:g}" if numbers else "")
    up, down, lte = run.traffic
    return Outcome(run.scores, chosen, run.rounds, up / 1e6, down / 1e6, lte)


def tuned(fed: Federation, method: str, seed: int, options: argparse.Namespace, many: int) -> Tuned:
    """Train a method with so many rates and all of its numbers, and choose."""
    way, dtype = WAYS[method], fed.train.dtype
    least, most = RATES[fed.shape.kind]
    rates = np.geomspace(least, most, many) if many > 1 else np.sqrt([least * most])
    pairs = [(rate, number) for number in way.numbers or (0.0,) for rate in rates]
    programs = [[pair for pair in pairs if pair[1] == number] for number in way.numbers] if way.static else [pairs]
    every = max(options.rounds // RECORDS, 1)
    found = []
    for some in programs:
        both = (jnp.asarray(column, dtype) for column in zip(*some, strict=True))
        fixed = int(some[0][1]) if way.static else None
        key = jax.random.key(seed)
        found.append(_program(fed[1:4], *both, jnp.uint32(seed), key, shape=fed.shape, method=method, fixed=fixed,
                              every=every, records=-(-options.rounds // every)))  # fmt: skip
    held, test, traffic = jax.tree.map(lambda *a: np.concatenate(a), *found)  # [runs, records, ...]
    judged, loss = scores(fed.shape, held, fed.held, fed.scale)
    run, record = best(fed.shape, judged, loss)
    rounds, (rate, number) = every * (record + 1), pairs[run]
    up, down, lte = (float(a[run, : record + 1].sum()) for a in traffic)
    tested = scores(fed.shape, test[run, record], fed.test, fed.scale)[0]
    return Tuned(float(rate), float(number), rounds, tested, (up, down, lte))


def headed(fed: Federation, method: str, seed: int, options: argparse.Namespace) -> Outcome:
    """Train `FedAvg`, then a certified last layer of every client's own on what the layers before make of its samples.

    Of its twelve runs three choose the rate, and then nine the head.
    """
    run, shape = tuned(fed, "FedAvg", seed, options, options.rates), fed.shape
    rate = jnp.asarray(run.rate, fed.train.dtype)
    how = dict(local_epochs=EPOCHS, batch_size=BATCH, rate=rate, seed=jnp.uint32(seed))
    problem, averaging = mj.Prediction(fed.train, shape.likelihood), WAYS["FedAvg"].make(shape, rate, 0.0, how)
    state, _ = mj.run(problem, averaging, jax.random.key(seed), num_rounds=run.rounds, record_every=run.rounds)
    body = mj.features.Body(shape.network, state.shared)

    def seen(data: mj.TaskData) -> mj.TaskData:
        return data.replace(x=jnp.where(data.weight[..., None] > 0, body(data.x), 0.0))

    heads = linear(fed._replace(train=seen(fed.train), held=seen(fed.held), test=seen(fed.test)), method, seed, options)
    up, down, lte = run.traffic
    return Outcome(heads.scores, f"rate {run.rate:.3g}, {heads.chosen}", run.rounds + heads.rounds,
                   up / 1e6 + heads.sent, down / 1e6 + heads.received, lte + heads.lte)  # fmt: skip


@partial(jax.jit, static_argnames=("shape", "method", "fixed", "every", "records"))
def _program(
    parts: tuple[mj.TaskData, ...], rates: Array, numbers: Array, seed: Array, key: Array, *, shape: Shape, method: str,
    fixed: int | None, every: int, records: int,
) -> tuple[Array, Array, Traffic]:  # fmt: skip
    """Predictions for choosing and testing, ``[runs, records, m, n, c]``, and traffic ``[runs, records]``."""
    train, held, test = parts
    if method == "VIRTUAL":  # whose likelihoods count every sample
        summed = train.replace(loss_scaling="sum")
        train = summed.replace(weight=summed.base_weight())
    problem = mj.Prediction(train, shape.likelihood)

    def one(rate: Array, number: Array) -> tuple[Array, Array, Traffic]:
        options = dict(local_epochs=EPOCHS, batch_size=BATCH, rate=rate, seed=seed)
        algorithm = WAYS[method].make(shape, rate, number if fixed is None else fixed, options)

        def block(state: Any, _: None) -> tuple[Any, tuple[Array, Array, Traffic]]:
            state, history = mj.run(problem, algorithm, key, num_rounds=every, record_every=every, state=state,
                                    cost=mj.costs.lte())  # fmt: skip
            ready = algorithm.resume(state, problem)

            request = algorithm.request(problem)
            traffic = Traffic(4.0 * every * request.up, 4.0 * every * request.down, history.simulated_time[-1])
            of_held, of_test = (predicted(algorithm, ready, problem, data.x) for data in (held, test))
            return state, (of_held, of_test, traffic)

        return lax.scan(block, algorithm.init(problem), length=records)[1]

    return jax.vmap(one)(rates, numbers)


def linear(fed: Federation, method: str, seed: int, options: argparse.Namespace) -> Outcome:
    """Train a certified convex model with all its candidates, and score the best one."""
    shape, candidates, algorithm = fed.shape, GRIDS[method].candidates, mj.Mocha()
    train, held, test = (with_constant(data) for data in fed[1:4])
    several = shape.kind != "numbers" and shape.outputs > 2
    losses = {"classes": mj.losses.SmoothedHinge(0.5) if several else mj.losses.Logistic(),
              "rare": mj.losses.Logistic(), "numbers": mj.losses.Squared()}  # fmt: skip
    if not several and shape.kind != "numbers":
        train = train.replace(y=2.0 * train.y - 1.0)

    def problem(data: mj.TaskData, i: int = 0) -> mj.Problem:
        return mj.Problem(data, losses[shape.kind], jax.tree.map(lambda leaf: leaf[i], candidates))

    def of(weights: Any, data: mj.TaskData) -> np.ndarray:
        z = np.einsum("...mf,mnf->...mn", np.asarray(weights), np.asarray(data.x))
        if shape.kind == "numbers":
            return z[..., None]
        z = np.moveaxis(z, 0, -1) if several else np.stack([np.zeros_like(z), z], axis=-1)
        return np.asarray(jax.nn.softmax(z, axis=-1))

    how: dict[str, Any] = dict(key=jax.random.key(seed), tol=GAP, max_rounds=MOST_ROUNDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mj.NotConverged)
        if several:
            path = mj.multiclass.lambda_path(train, problem, candidates, algorithm, classes=shape.outputs, **how)
            weights = np.stack([model.weights for model in path])  # [candidates, classes, m, d]
        else:
            weights = np.asarray(mj.lambda_path(problem(train), candidates, algorithm, **how).weights)
        judged, loss = scores(shape, np.stack([of(w, held) for w in weights]), fed.held, fed.scale)
        chosen = best(shape, judged[:, None], loss[:, None])[0]
        if several:  # anew from the beginning, so that its rounds count
            of_classes = mj.one_vs_rest(train, partial(problem, i=chosen), algorithm, classes=shape.outputs, **how)
            last, of_each, certificate = of_classes.weights, np.asarray(of_classes.rounds), of_classes.certificate
        else:
            solution = mj.solve(problem(train, chosen), algorithm, **how)
            last, of_each, certificate = solution.weights, np.array([solution.rounds]), solution.certificate
    asked, cost = algorithm.request(problem(signs(train) if several else train)), mj.costs.lte()
    flops = asked.steps.astype(train.dtype) * asked.step_flops + asked.fixed_flops
    together = cost.replace(latency=0.0).round_seconds(cost.replace(latency=0.0).seconds(flops, asked.down, asked.up))
    most, vectors = int(of_each.max()), int(of_each.sum())
    lte = vectors * float(together) + most * float(cost.latency)
    sent, received = (4e-6 * vectors * float(numbers) for numbers in (asked.up, asked.down))
    record = jax.tree.map(lambda leaf: float(leaf[chosen]), candidates)
    gap = float(jnp.max(certificate.relative_joint_gap))
    note = "" if gap <= GAP else f", gap of {gap:.2g}"
    tested = scores(shape, of(last, test), fed.test, fed.scale)[0]
    return Outcome(tested, f"{record!r}{note}", most, sent, received, lte)


def gathered(rows: list[Row]) -> dict[str, dict[str, np.ndarray]]:
    """Scores ``[seeds, m]`` by data set and method, where all seeds are done; of dealt clients ``[1, seeds m]``."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in dict.fromkeys(row.tasks for row in rows):
        own = [row for row in rows if row.tasks == name]
        seeds = sorted({row.seed for row in own})
        for method in METHODS:
            texts = {row.seed: row.scores for row in own if row.method == method}
            if sorted(texts) == seeds:
                values = np.array([np.array(texts[seed].split(), float) for seed in seeds])
                values = values if SOURCES[name].natural else values.reshape(1, -1)
                found.setdefault(name, {})[method] = values
    return found


def report(rows: list[Row], baseline: str = BASELINE) -> str:
    """Tables in Markdown: all data sets by average rank, with worst tenths in parentheses; each one; numbers tried."""
    found, wide, lines = gathered(rows), dict[str, list[str]](), []
    heads = ["method", "average rank"]
    for name, of_methods in found.items():
        numbers, seeds = SOURCES[name].kind == "numbers", len({r.seed for r in rows if r.tasks == name})
        title = {"numbers": "RMSE", "rare": "AUC %", "classes": "accuracy %"}[SOURCES[name].kind]
        heads += [f"{name}, {title}"]
        lines += [
            f"\n**{name}**, {seeds} seed{'s' if seeds > 1 else ''}\n",
            f"| method | {title} | worst tenth | best tenth | std | better than local % | minus {baseline} | rounds "
            "| MB sent | MB received | s on LTE |",
            "|---" + "|---:" * 10 + "|",
        ]
        factor, sign = (1.0, 1.0) if numbers else (100.0, -1.0)
        for method, values in sorted(of_methods.items(), key=lambda item: sign * float(np.nanmean(item[1]))):
            alone, tuned = (
                mj.metrics.over_tasks(
                    factor * values, maximise=not numbers,
                    baseline=factor * of_methods[other] if other in of_methods and other != method else None,
                ) for other in (ALONE, baseline)
            )  # fmt: skip
            low, high = tuned.difference_interval or (np.nan, np.nan)
            better = "" if alone.better is None else f"{100 * alone.better:.0f}"
            difference = "" if tuned.difference is None else f"{tuned.difference:+.2f} [{low:+.2f}, {high:+.2f}]"
            own = [r for r in rows if (r.tasks, r.method) == (name, method)]
            rounds, *costs = (np.mean([getattr(r, f) for r in own]) for f in ("rounds", "sent", "received", "lte"))
            lines.append(
                f"| {method} | {alone.mean:.2f} | {alone.worst_tenth:.2f} | {alone.best_tenth:.2f} | {alone.std:.2f} | "
                f"{better} | {difference} | {rounds:.0f} | " + " | ".join(f"{cost:.3g}" for cost in costs) + " |"
            )
            wide.setdefault(method, []).append(f"{alone.mean:.2f} ({alone.worst_tenth:.2f})")
    top = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for method, (rank, low, high) in sorted(ranks(rows).items(), key=lambda item: item[1]):
        top.append(f"| {method} | {rank:.1f} [{low:.1f}, {high:.1f}] | {' | '.join(wide[method])} |")
    return "\n".join(top + lines + tried(wide)) + "\n"


def tried(methods: Iterable[str]) -> list[str]:
    """A table of the numbers that methods choose from."""
    lines = ["\n**Numbers to choose from**\n", "| method | numbers |", "|---|---|"]
    for method in methods:
        if method in GRIDS:
            text = ", ".join(f"{name} {' '.join(map('{:g}'.format, of))}" for name, of in GRIDS[method].numbers.items())
        elif WAYS[method].numbers:
            text = " ".join(f"{number:g}" for number in WAYS[method].numbers) + ", three rates"
        else:
            text = "twelve rates"
        lines.append(f"| {method} | {text} |")
    return lines


def ranks(rows: list[Row]) -> dict[str, tuple[float, float, float]]:
    """The average rank of every method with a 95 % interval: ranks at each client, sets alike, clients drawn anew."""
    found = gathered(rows)
    methods = [method for method in METHODS if all(method in of_methods for of_methods in found.values())]
    rng, means = np.random.default_rng(0), []
    for name, of_methods in found.items():
        sign = 1.0 if SOURCES[name].kind == "numbers" else -1.0
        values = np.stack([sign * of_methods[method] for method in methods])  # [methods, seeds, m]
        own = rankdata(values, axis=0, nan_policy="omit").mean(axis=1, where=~np.isnan(values))
        own = own[:, ~np.isnan(own).any(axis=0)]
        count = own.shape[1]
        drawn = rng.multinomial(count, np.full(count, 1.0 / count), DRAWS) / count
        means.append(np.concatenate([own.mean(axis=1)[:, None], own @ drawn.T], axis=1))
    middle = np.mean(means, axis=0)
    low, high = np.quantile(middle[:, 1:], [0.025, 0.975], axis=1)
    return {method: (middle[i, 0], low[i], high[i]) for i, method in enumerate(methods)}


def draw(rows: list[Row], path: Path, baseline: str = BASELINE) -> None:
    """Average ranks with intervals; the band is that of the baseline."""
    found = sorted(ranks(rows).items(), key=lambda item: item[1])
    kinds = {**dict.fromkeys((ALONE, "FedAvg", "FedProx"), 1), **dict.fromkeys(GRIDS, 3), baseline: 2}
    figure = Figure(figsize=(7.0, 1.0 + 0.2 * len(found)), layout="constrained")
    axes = figure.subplots()
    for place, (method, (mean, low, high)) in enumerate(found):
        colour = plotting.COLOURS[kinds.get(method, 0)]
        axes.plot([low, high], [place, place], color=colour, lw=1.6)
        axes.plot([mean], [place], "o", color=colour, ms=4.5)
        if method == baseline:
            axes.axvspan(low, high, color=colour, alpha=0.12, lw=0)
    axes.set_yticks(range(len(found)), [method for method, _ in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"average rank at the clients of {len(gathered(rows))} federations; 1 is best", fontsize=9)
    axes.grid(alpha=0.25, axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    print(path)


if __name__ == "__main__":
    main()
