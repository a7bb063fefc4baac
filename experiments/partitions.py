"""How samples are dealt to clients, in pictures: ``python -m experiments.partitions --data mnist.npz``."""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import images
from mocha_jax import plotting


def main() -> None:
    """Parse the command line, deal, draw."""
    parser = argparse.ArgumentParser(prog="python -m experiments.partitions", description=__doc__)
    parser.add_argument("--data", type=Path, help="mnist.npz; default a synthetic set")
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments"), help="folder of the picture")
    options = parser.parse_args()
    key, count = jax.random.key(options.seed), options.clients
    digits = images.blobs(key)[0] if options.data is None else images.mnist(options.data)[0]
    ways = {
        "iid": mj.partition.iid(key, len(digits.y), count),
        "shards, two each": mj.partition.shards(key, digits.y, count),
        "dirichlet, alpha 1": mj.partition.dirichlet(key, digits.y, count, 1.0),
        "dirichlet, alpha 0.1": mj.partition.dirichlet(key, digits.y, count, 0.1),
        "quantity, sigma 1": mj.partition.quantity(key, len(digits.y), count, 1.0),
        "by_group: the first writers": mj.partition.by_group(digits.writer)[:count],
    }
    figure = Figure(figsize=(11.0, 5.0), layout="constrained")
    panels = figure.subplots(2, 3).flat
    for axes, (name, parts) in zip(panels, ways.items(), strict=True):
        # Features do not matter to the picture.
        data = mj.pack_tasks([digits.x[rows, :1] for rows in parts], [digits.y[rows] for rows in parts])
        plotting.label_distribution(axes, data, title=name)
        axes.get_legend().set_visible(axes is figure.axes[2])
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "partitions.png"
    figure.savefig(path, dpi=130)
    print(path)


if __name__ == "__main__":
    main()
