"""Clients that join when training is over: ``python -m experiments.new_clients``.

The networks of `experiments.personalized` are trained anew by four fifths of the clients, with the numbers and rounds
that were chosen there. The others join: they do their part of 1, 5 or 30 rounds, of which the server does not hear
(`join`), and held-out samples choose between the three. Where all predict by the server's model, or by one that is made
from it, no round is needed; a client alone trains for as long as it would have. Every client is new in one of five
trainings, or in two where five do not divide their number; they run at once in one compiled call. In the others it
takes part, and beside its score as a new client is the mean of those.

Convex models are left out: their optimum with a client does not depend on when the client came (`Mocha.add_tasks`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import mocha_jax as mj
from experiments import personalized as study
from experiments._personalized_parts import ALONE, SOURCES, WAYS, Federation, Shape, best, federation, predicted, scores
from experiments.rows import append, read
from mocha_jax._neural.client_server import ClientServer

FOLDS = 5
JOINED = 1, 5, 30  # rounds of those who join
DIVERGED = 1e6
METHODS = tuple(method for method in WAYS if method != "VIRTUAL")


class Row(NamedTuple):
    """One method on one data set and seed; the CSV's columns."""

    tasks: str
    settings: str
    seed: int
    method: str
    chosen: str
    rounds: int  # of training
    joined: int  # and of those who joined
    scores: str  # of every client as a new one
    took_part: str  # and as one that takes part


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.new_clients", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--trials", type=Path, default=Path("experiments/personalized/trials.csv"),
                        help="what was chosen, by experiments.personalized (default %(default)s)")  # fmt: skip
    parser.add_argument("--sets", nargs="+", choices=SOURCES, default=tuple(SOURCES), help="default all in the trials")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help="default all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--settings", default="rounds=150 rates=3 clients=None", help="of the trials (%(default)s)")
    parser.add_argument("--report", action="store_true", help="no training: the table of the CSV")
    parser.add_argument("--out", type=Path, default=Path("experiments/new_clients"), help="folder of the CSV")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "trials.csv"
    rows = [row for row in read(path, Row) if row.settings == options.settings]
    if not options.report:
        for row in study_of(options, {(row.tasks, row.seed, row.method) for row in rows}):
            append(path, row)
            rows.append(row)
            print(f"{row.tasks}, seed {row.seed}, {row.method}: {_mean(row.scores):.4f} after {row.joined} rounds, "
                  f"{_mean(row.took_part):.4f} there", flush=True)  # fmt: skip
    if not rows:
        parser.error("there are no results")
    print("\n" + table(rows))


def study_of(options: argparse.Namespace, done: set[tuple[str, int, str]]) -> Iterator[Row]:
    """Train all that is not done."""
    trials = [row for row in read(options.trials, study.Row) if row.settings == options.settings]
    clients = options.settings.rpartition("clients=")[2]
    of: tuple[str, int] | None = None
    trials = [row for row in study.whole(trials) if row.tasks in options.sets and row.method in options.methods
              and row.seed < options.seeds and (row.tasks, row.seed, row.method) not in done]  # fmt: skip
    for trial in sorted(trials, key=lambda row: (options.sets.index(row.tasks), row.seed)):
        source = SOURCES[trial.tasks]
        if of != (trial.tasks, trial.seed):
            jax.clear_caches()  # a process holds only so many programs
            of = trial.tasks, trial.seed
            file = Path(os.environ.get("MOCHA_JAX_DATA", ".")) / f"{source.file}.npz" if source.file else None
            fed = federation(source, trial.seed, source.clients if clients == "None" else int(clients), file)
        as_new, took_part, joined = trained(fed, trial)
        texts = (" ".join(f"{s:.6g}" for s in of_clients) for of_clients in (as_new, took_part))
        yield Row(*trial[:4], trial.chosen, trial.rounds, joined, *texts)


def folds(m: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Clients that take part in five trainings ``[5, ...]``, and those who join; each joins at least once."""
    order, count = np.random.default_rng([seed, 6]).permutation(m).astype(np.int32), -(-m // FOLDS)
    new = np.stack([order[begin : begin + count] for begin in np.linspace(0, m - count, FOLDS).round().astype(int)])
    return np.stack([np.setdiff1d(order, some) for some in new]), new


def trained(fed: Federation, trial: study.Row) -> tuple[np.ndarray, np.ndarray, int]:
    """Score every client as a new one, and as one that took part, ``[m]``, and the rounds that new ones needed."""
    way, m, dtype = WAYS[trial.method], fed.shape.clients, fed.train.dtype
    rate, _, number = trial.chosen.removeprefix("rate ").partition(", ")
    old, new = folds(m, trial.seed)
    of_new, of_old = _program(
        fed[1:4], old, new, jnp.asarray(float(rate), dtype), jnp.asarray(float(number or 0.0), dtype),
        jnp.uint32(trial.seed), jax.random.key(trial.seed), shape=fed.shape, method=trial.method,
        fixed=int(number) if way.static else None, rounds=trial.rounds,
    )  # fmt: skip

    def by_client(part: Array, who: np.ndarray, data: mj.TaskData) -> tuple[np.ndarray, np.ndarray]:
        """Means over folds of scores ``[ways, m]`` and of losses ``[ways]``."""
        found, losses = np.full((FOLDS, part.shape[1], m), np.nan), []
        for fold, (values, some) in enumerate(zip(np.asarray(part), who, strict=True)):
            found[fold][:, some], loss = scores(fed.shape, values, _some(data, some), fed.scale)
            losses.append(loss)
        return np.nanmean(found, axis=0), np.mean(losses, axis=0)

    judged, loss = by_client(of_new[0], new, fed.held)
    chosen = best(fed.shape, judged[:, None], loss[:, None])[0]
    as_new, took_part = by_client(of_new[1], new, fed.test)[0][chosen], by_client(of_old, old, fed.test)[0][0]
    return as_new, took_part, _rounds(trial.method, fed.shape, trial.rounds)[chosen]


def _rounds(method: str, shape: Shape, rounds: int) -> tuple[int, ...]:
    if method == ALONE:
        return (rounds,)
    made = WAYS[method].make(shape, jnp.ones(()), 1, dict(rate=1.0, seed=jnp.uint32(0)))
    assert isinstance(made, ClientServer)
    declared = made.declared().method
    return (0,) if declared.personal_model is None or declared.ready is not None else JOINED


@partial(jax.jit, static_argnames=("shape", "method", "fixed", "rounds"))
def _program(
    parts: tuple[mj.TaskData, ...], old: Array, new: Array, rate: Array, number: Array, seed: Array, key: Array, *,
    shape: Shape, method: str, fixed: int | None, rounds: int,
) -> tuple[tuple[Array, Array], Array]:  # fmt: skip
    """Predictions ``[folds, ways to join, clients, n, c]``: of new clients, for choosing and testing, and of others."""
    train, held, test = parts
    options = dict(local_epochs=study.EPOCHS, batch_size=study.BATCH, rate=rate, seed=seed)
    few = shape._replace(clients=old.shape[1])
    algorithm = WAYS[method].make(few, rate, number if fixed is None else fixed, options)
    assert isinstance(algorithm, ClientServer)

    def one(old: Array, new: Array) -> tuple[tuple[Array, Array], Array]:
        problem, fresh = (mj.Prediction(_some(train, who), shape.likelihood) for who in (old, new))
        state, _ = mj.run(problem, algorithm, key, num_rounds=rounds, record_every=rounds)
        joined = [algorithm.join(state, fresh, jax.random.fold_in(key, 2**31 - 1), rounds=count)
                  for count in _rounds(method, few, rounds)]  # fmt: skip
        of_held, of_test = (jnp.stack([predicted(algorithm, after, fresh, data.x[new]) for after in joined])
                            for data in (held, test))  # fmt: skip
        return (of_held, of_test), predicted(algorithm, algorithm.resume(state, problem), problem, test.x[old])[None]

    return jax.vmap(one)(old, new)


def _some(data: mj.TaskData, who: Array | np.ndarray) -> mj.TaskData:
    x, y, weight = (a[who] for a in (data.x, data.y, data.weight))
    return data.replace(x=x, y=y, weight=weight, task=jnp.arange(len(who), dtype=jnp.int32), num_tasks=len(who))


def table(rows: list[Row]) -> str:
    """Scores as new clients, in parentheses as clients that took part; means over clients and seeds."""
    sets = list(dict.fromkeys(row.tasks for row in rows))
    lines = [f"| method | {' | '.join(sets)} |", "|---" + "|---:" * len(sets) + "|"]
    for method in METHODS:
        cells = []
        for tasks in sets:
            own = [row for row in rows if (row.tasks, row.method) == (tasks, method)]
            factor = 1.0 if SOURCES[tasks].kind == "numbers" else 100.0
            as_new, took_part = (factor * np.mean([_mean(text) for text in texts]) if own else 0.0 for texts in
                                 ([row.scores for row in own], [row.took_part for row in own]))  # fmt: skip
            diverged = not as_new < DIVERGED
            cells.append("diverged" if diverged else f"{as_new:.2f} ({took_part:.2f})" if own else "")
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(scores: str) -> float:
    return float(np.nanmean(np.array(scores.split(), float)))


if __name__ == "__main__":
    main()
