"""Clients that join when training is over: ``python -m experiments.new_clients``.

The networks of `experiments.personalized` are trained anew, with the numbers and the rounds that were chosen there, by
four fifths of the clients. The others join: they do their part of 1, 5 or 30 rounds, of which the server does not hear
(`join`), and held-out samples choose between the three. Every client is new in one of five trainings, which run at once
in one compiled call. Beside the score as a new client is that of the client that took part.

A convex model has no row: its optimum with a client does not depend on when the client came (`Mocha.add_tasks`).
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import mocha_jax as mj
from experiments import personalized as study
from experiments._personalized_parts import SOURCES, WAYS, Federation, Shape, best, federation, scores
from experiments.rows import append, read
from mocha_jax._neural.client_server import ClientServer

FOLDS = 5
JOINED = 1, 5, 30  # rounds of those who join
METHODS = tuple(method for method in WAYS if method != "VIRTUAL")


class Row(NamedTuple):
    """One method on one data set and seed; the CSV's columns."""

    tasks: str
    seed: int
    method: str
    chosen: str
    rounds: int  # of training
    joined: int  # and of those who joined
    scores: str  # of every client as a new one


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.new_clients", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--trials", type=Path, default=Path("experiments/personalized/trials.csv"),
                        help="what was chosen, by experiments.personalized (default %(default)s)")  # fmt: skip
    parser.add_argument("--sets", nargs="+", choices=SOURCES, default=tuple(SOURCES), help="default all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help="default all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--clients", type=int, help="of made federations, as in the trials (default: their numbers)")
    parser.add_argument("--report", action="store_true", help="no training: the table of the CSV")
    parser.add_argument("--out", type=Path, default=Path("experiments/new_clients"), help="folder of the CSV")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path, folder = options.out / "trials.csv", os.environ.get("MOCHA_JAX_DATA")
    rows = read(path, Row)
    done = {(row.tasks, row.seed, row.method) for row in rows}
    trials = [trial for trial in study.whole(read(options.trials, study.Row))
              if trial.tasks in options.sets and trial.method in options.methods and trial.seed < options.seeds
              and trial.settings.endswith(f"clients={options.clients}")]  # fmt: skip
    trials.sort(key=lambda trial: (options.sets.index(trial.tasks), trial.seed, METHODS.index(trial.method)))
    drawn: tuple[Any, Federation | None] = None, None
    for trial in () if options.report else trials:
        source = SOURCES[trial.tasks]
        if (trial.tasks, trial.seed, trial.method) in done:
            continue
        if source.file and not folder:
            parser.error(f"{trial.tasks}: set MOCHA_JAX_DATA to the folder of {source.file}.npz.")
        if drawn[0] != (trial.tasks, trial.seed):
            file = Path(folder or ".") / f"{source.file}.npz" if source.file else None
            drawn = (trial.tasks, trial.seed), federation(source, trial.seed, options.clients or source.clients, file)
            jax.clear_caches()  # a process holds only so many programs
        assert drawn[1] is not None
        found, joined = as_new(drawn[1], trial)
        of_clients = " ".join(f"{s:.6g}" for s in found)
        row = Row(trial.tasks, trial.seed, trial.method, trial.chosen, trial.rounds, joined, of_clients)
        append(path, row)
        rows.append(row)
        print(f"{row.tasks}, seed {row.seed}, {row.method}: {np.nanmean(found):.4f} after {joined} rounds", flush=True)
    if not rows:
        parser.error("there are no results")
    print("\n" + table(rows, trials))


def as_new(fed: Federation, trial: study.Row) -> tuple[np.ndarray, int]:
    """Score every client that was not there in training ``[m]``, after the rounds that are best on held-out samples."""
    way, (rate, number) = WAYS[trial.method], numbers(trial.chosen)
    m, dtype = fed.shape.clients, fed.train.dtype
    order = np.random.default_rng([trial.seed, 6]).permutation(m).astype(np.int32)
    count = -(-m // FOLDS)
    begins = np.round(np.linspace(0, m - count, FOLDS)).astype(int)
    new = np.stack([order[begin : begin + count] for begin in begins])
    old = np.stack([np.setdiff1d(order, some) for some in new])
    held, test = _program(
        fed[1:4], old, new, jnp.asarray(rate, dtype), jnp.asarray(number, dtype), jnp.uint32(trial.seed),
        jax.random.key(trial.seed), shape=fed.shape, method=trial.method, fixed=int(number) if way.static else None,
        rounds=trial.rounds,
    )  # fmt: skip
    # Folds overlap where five do not divide the clients; one that is new twice counts as it was the second time.
    of_clients: list[np.ndarray] = []
    for predicted in (held, test):
        values = np.zeros((len(JOINED), m, *predicted.shape[3:]), predicted.dtype)
        for of_fold, who in zip(np.asarray(predicted), new, strict=True):
            values[:, who] = of_fold
        of_clients.append(values)
    judged, loss = scores(fed.shape, of_clients[0], fed.held, fed.scale)
    chosen = best(fed.shape, judged[:, None], loss[:, None])[0]
    return scores(fed.shape, of_clients[1][chosen], fed.test, fed.scale)[0], JOINED[chosen]


def numbers(chosen: str) -> tuple[float, float]:
    """The rate and the number in what `experiments.personalized` says that it chose."""
    rate, _, number = chosen.removeprefix("rate ").partition(", ")
    return float(rate), float(number or 0.0)


@partial(jax.jit, static_argnames=("shape", "method", "fixed", "rounds"))
def _program(
    parts: tuple[mj.TaskData, ...], old: Array, new: Array, rate: Array, number: Array, seed: Array, key: Array, *,
    shape: Shape, method: str, fixed: int | None, rounds: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Predictions for choosing and testing, ``[folds, ways to join, new clients, n, c]``."""
    train, held, test = parts
    options = dict(local_epochs=study.EPOCHS, batch_size=study.BATCH, rate=rate, seed=seed)
    shape = shape._replace(clients=old.shape[1])
    algorithm = WAYS[method].make(shape, rate, number if fixed is None else fixed, options)
    assert isinstance(algorithm, ClientServer)

    def one(old: Array, new: Array) -> tuple[Array, Array]:
        problem, fresh = (mj.Prediction(_some(train, who), shape.likelihood) for who in (old, new))
        state, _ = mj.run(problem, algorithm, key, num_rounds=rounds, record_every=rounds)

        def predicted(data: mj.TaskData, count: int) -> Array:
            joined = algorithm.join(state, fresh, jax.random.fold_in(key, 1), rounds=count)
            nodes = jnp.arange(len(new), dtype=jnp.int32)
            return jax.vmap(lambda node, x: algorithm.predict(joined, fresh, node, x).mean)(nodes, data.x[new])

        of_held, of_test = (jnp.stack([predicted(data, count) for count in JOINED]) for data in (held, test))
        return of_held, of_test

    return jax.vmap(one)(old, new)


def _some(data: mj.TaskData, who: Array) -> mj.TaskData:
    x, y, weight = (a[who] for a in (data.x, data.y, data.weight))
    return data.replace(x=x, y=y, weight=weight, task=jnp.arange(len(who), dtype=jnp.int32), num_tasks=len(who))


def table(rows: list[Row], trials: list[study.Row]) -> str:
    """Scores as new clients, in parentheses as clients that took part."""
    there = {(trial.tasks, trial.seed, trial.method): trial.scores for trial in trials}
    sets = list(dict.fromkeys(row.tasks for row in rows if (row.tasks, row.seed, row.method) in there))
    lines = [f"| method | {' | '.join(sets)} |", "|---" + "|---:" * len(sets) + "|"]
    for method in METHODS:
        cells = []
        for tasks in sets:
            own = [row for row in rows if (row.tasks, row.method) == (tasks, method) and row[:3] in there]
            factor = 1.0 if SOURCES[tasks].kind == "numbers" else 100.0
            as_new, took_part = ([factor * _mean(text) for text in texts] for texts in
                                 ((row.scores for row in own), (there[row[:3]] for row in own)))  # fmt: skip
            cells.append(f"{np.mean(as_new):.2f} ({np.mean(took_part):.2f})" if own else "")
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(scores: str) -> float:
    return float(np.nanmean(np.array(scores.split(), float)))


if __name__ == "__main__":
    main()
