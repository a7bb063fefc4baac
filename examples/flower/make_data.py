"""Make a table for every node: tasks that are related, of different sizes.

python make_data.py FOLDER NUMBER_OF_NODES      # FOLDER/node0.csv, FOLDER/node1.csv, ...
"""

import sys
from pathlib import Path

import numpy as np


def table(node, features=8, seed=0):
    """Samples with their labels in the last column."""
    common = np.random.default_rng([seed, 0]).normal(size=(2, features))
    rng = np.random.default_rng([seed, 1 + node])
    weights = rng.normal(size=2) @ common
    x = rng.normal(size=(60 + 20 * (node % 3), features))
    return np.column_stack([x, np.sign(x @ weights + 0.3 + rng.normal(size=len(x)))])


def write(folder, nodes, features=8):
    """Write the tables, and return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    header = ",".join([*(f"x{j}" for j in range(features)), "label"])
    paths = [folder / f"node{node}.csv" for node in range(nodes)]
    for node, path in enumerate(paths):
        np.savetxt(path, table(node, features), "%.6g", ",", header=header, comments="")
    return paths


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]))
