"""Run all cells that are not there yet, and print the tables: ``python -m experiments.baselines --data FOLDER``."""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

import numpy as np

from experiments.baselines import mixed, ours, rivals
from experiments.baselines.cells import Cell, Method
from experiments.baselines.report import Row, markdown, scores
from experiments.baselines.tables import KINDS, Rows, load, split
from experiments.rows import append, read

METHODS = [*ours.METHODS, *rivals.METHODS, *mixed.METHODS]
SEEDS = {"school": 3, "landmine": 10, "har": 3, "new person": 3}


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.baselines", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of school.npz, landmine.npz, har.npz; default made-up tables")
    parser.add_argument("--tables", nargs="+", choices=KINDS, default=list(KINDS), help="default all")
    parser.add_argument("--methods", default="", help="only those whose names have this text in them")
    parser.add_argument("--seeds", type=int, help="random splits (default 10 of land mines, 3 of others)")
    parser.add_argument("--out", type=Path, default=Path("experiments") / "baselines_out", help="folder of the CSV")
    found = parser.parse_args()
    found.out.mkdir(parents=True, exist_ok=True)
    return found


def cell(name: str, rows: Rows, method: Method, seed: int) -> list[Row]:
    """One method on one split."""
    train, test = split(name, rows, seed)
    began = time.process_time()
    found = method.fit(Cell(KINDS[name], train, seed))
    seconds = time.process_time() - began
    said = found.predict(test.x, test.group)
    return [
        Row(name, seed, method.name, metric, value, " ".join(f"{s:.6g}" for s in each), found.chosen, seconds)
        for metric, (value, each) in scores(KINDS[name], test, said, np.unique(rows.group)).items()
    ]


def main() -> None:
    """All tables, resumed."""
    given = options()
    path = given.out / "cells.csv"
    for name in given.tables:
        if (rows := load(given.data, name)) is None:
            print(f"{name} is not in {given.data}: skipped")
            continue
        methods = [m for m in METHODS if name in m.tables and given.methods in m.name]
        missing = {m.name: m.needs for m in methods if m.needs and importlib.util.find_spec(m.needs) is None}
        done = {(row.table, row.seed, row.method) for row in read(path, Row)}
        for seed in range(given.seeds or SEEDS[name]):
            for method in methods:
                if method.name in missing or (name, seed, method.name) in done:
                    continue
                for row in cell(name, rows, method, seed):
                    append(path, row)
                    print(f"{name} {seed} {method.name}: {row.metric} {row.score:.4f} ({row.chosen}), "
                          f"{row.seconds:.1f} s of the CPU", flush=True)  # fmt: skip
        known = [row for row in read(path, Row) if row.seed < (given.seeds or SEEDS[name])]
        print("\n" + markdown(known, name, KINDS[name], [m.name for m in methods], missing))


if __name__ == "__main__":
    main()
