"""What the figures share: networks, tuning by simulated time, CSV and axes."""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments.tasksets import TaskSet, each, synthetic
from mocha_jax import plotting

NETWORKS = {
    "WiFi": mj.costs.wifi(),
    "LTE": mj.costs.lte(),
    "3G": mj.costs.cellular_3g(),
    "relative 10": mj.costs.relative(10.0),
    "relative 100": mj.costs.relative(100.0),
    "relative 1000": mj.costs.relative(1000.0),
}

METHODS = ("Algorithm 1", "CoCoA", "Mb-SDCA", "Mb-SGD", "default")
SERVERS = ("counted", "free")  # on a clock that counts the server's work, and on one that does not


def command_line(prog: str, description: str | None) -> argparse.Namespace:
    """The options that all figures have."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help=".npz files; default a synthetic federation")
    parser.add_argument("--lam", type=float, default=1e-1, help="lambda (default %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="rounds, times this (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments"), help="folder of picture and CSV")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def task_sets(options: argparse.Namespace) -> Iterable[TaskSet]:
    """The files asked for; absent ones are named and skipped. Without any, the synthetic federation."""
    for tasks in each(options.data, synthetic(jax.random.key(options.seed))):
        print(f"{tasks.name}: {tasks.data.num_tasks} tasks, lambda {options.lam:g}", flush=True)
        yield tasks


def save(figure: Figure, options: argparse.Namespace, tasks: TaskSet, name: str) -> None:
    """The picture of one task set."""
    path = options.out / (f"{name}.png" if tasks.name in ("har", "synthetic") else f"{name}_{tasks.name}.png")
    figure.savefig(path, dpi=150)
    print(f"  {path}")


def w_step(tasks: TaskSet, lam: float) -> mj.Problem:
    """The update of W for an Omega that (14) has learned on these tasks, which is then held."""
    learned = mj.Problem(tasks.data, tasks.loss, mj.regularizers.Probabilistic(lam, 10.0))
    omega = mj.solve(learned, tol=1e-3, max_rounds=2000).omega
    m = tasks.data.num_tasks
    mixed = 0.99 * np.asarray(omega, np.float64) + 0.01 * np.eye(m) / m  # away from singular
    precision = np.linalg.inv(mixed)
    scale = np.trace(precision) / m  # so that lambda means the same on all task sets
    graph = mj.regularizers.Graph(0.5 * (precision + precision.T) / scale, lam, 0.1 * lam)
    return mj.Problem(tasks.data, tasks.loss, graph)


def optimum(problem: mj.Problem, tol: float) -> float:
    """The least objective, to within `tol` relative: the best lower bound."""
    algorithm = mj.Mocha(4.0, server="proximal")
    best = mj.solve(problem, algorithm, tol=tol, max_rounds=5000, record_every=10, chunk=100)
    gap = best.certificate.residual
    print(f"  optimum {best.primal:.6g}, relative gap {gap:.1g} after {best.rounds} rounds of 4 epochs", flush=True)
    return 0.5 * float(best.certificate.joint_primal + best.certificate.joint_dual)


def server_seconds(problem: mj.Problem, algorithm: mj.SubproblemMethod, rounds: int = 100) -> float:
    """Seconds that the server's work of a round takes on this machine: of as many tasks, with one row each."""
    data, key = problem.data, jax.random.key(0)
    x = np.asarray(jax.random.normal(key, (data.num_tasks, 1, data.num_features)))
    small = problem.replace(data=mj.pack_tasks(list(x), [np.ones(1, np.float32)] * len(x)))
    state = algorithm.init(small)
    server = algorithm.server_for(small)
    info = mj.Info(jnp.ones(len(x), jnp.int32), jnp.ones(len(x)), jnp.zeros(len(x), bool))

    @jax.jit
    def many(state: mj.MochaState) -> tuple:
        def one(carry: tuple, round: jax.Array) -> tuple:
            beta, v, held = carry
            change = 0.01 * jax.random.normal(jax.random.fold_in(key, round), beta.shape)
            found = small.loss.project(beta + change, small.data.y)
            dv = small.data.node_vectors(found - beta)
            update = mj.NodeUpdate(found, dv, jnp.ones(len(x)), info)
            return server.aggregate(small, held, round, beta, update, v + small.data.to_tasks(dv)), None

        return jax.lax.scan(one, (state.beta, state.v, state.server), jnp.arange(1, rounds + 1))[0]

    times = []
    for _ in range(6):
        began = time.perf_counter()
        jax.block_until_ready(many(state))
        times.append(time.perf_counter() - began)
    return min(times[1:]) / rounds


def served(costs: Iterable[mj.costs.Cost], seconds: float) -> list[mj.costs.Cost]:
    """Clocks that count the server's work, in a phone's operations where these are the unit of time; then as given."""
    costs = list(costs)
    return [c.replace(server=seconds * mj.costs.PHONE / float(c.flops_per_second)) for c in costs] + costs


class Curve(NamedTuple):
    """What one setting led to; `time` with a leading axis over networks until one is chosen."""

    setting: str
    time: np.ndarray  # [records]
    excess: np.ndarray  # [records] P / P* - 1


class Curves(NamedTuple):
    """What a grid of settings led to; one entry per network and setting."""

    settings: list[str]
    time: np.ndarray  # [networks, settings, records]
    excess: np.ndarray  # [settings, records] P / P* - 1


def run_grid(
    key: jax.Array, problem: mj.Problem, best: float, algorithms: mj.Algorithm, settings: Sequence[str],
    costs: Sequence[mj.costs.Cost], *, rounds: int, record_every: int = 1, systems: Any = None,
    map_systems: bool = False,
) -> Curves:  # fmt: skip
    """Train all settings at once; only the clock differs between networks, so they cost nothing more.

    `algorithms` is a record with a leading axis over settings, from `mj.grid`; with `map_systems`, `systems` too.
    """
    networks = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *costs)

    def one(problem: mj.Problem, algorithm: mj.Algorithm, systems: Any) -> tuple[jax.Array, jax.Array]:
        def clocked(cost: mj.costs.Cost) -> mj.History:
            run = dict(num_rounds=rounds, record_every=record_every, systems=systems, cost=cost)
            return mj.run(problem, algorithm, key, **run)[1]

        history = jax.vmap(clocked)(networks)
        return history.simulated_time, history.primal[0]

    began = time.perf_counter()
    mapped = jax.vmap(one, (None, 0, 0 if map_systems else None), (1, 0))
    clock, primal = jax.jit(mapped)(problem, algorithms, systems)
    clock, primal = np.asarray(clock, float), np.asarray(primal, float)
    name = type(algorithms).__name__
    print(f"  {name}: {len(settings)} settings x {rounds} rounds in {time.perf_counter() - began:.1f} s", flush=True)
    return Curves(list(settings), clock, np.maximum(primal / best - 1.0, 1e-9))


def joined(parts: Sequence[Curves]) -> list[Curve]:
    """Settings of several grids in one list, `time` ``[networks, records]``."""
    return [Curve(s, c.time[:, i], c.excess[i]) for c in parts for i, s in enumerate(c.settings)]


def time_to(target: float, curve: Curve) -> float:
    """When the objective was within `target` of the optimum for good; infinite where it never was."""
    above = np.flatnonzero(~(curve.excess <= target))
    first = above[-1] + 1 if len(above) else 0
    return float(curve.time[first]) if first < len(curve.time) else np.inf


def tuned(settings: dict[str, list[Curve]], network: int, target: float) -> dict[str, Curve]:
    """Of every method the setting that reaches the target first on this network; where none does, the one that
    ends closest."""

    def rank(curve: Curve) -> tuple[float, float]:
        end = np.nan_to_num(curve.excess[-max(len(curve.excess) // 10, 1) :], nan=np.inf)
        return time_to(target, curve), float(np.median(end))

    there = {m: [c._replace(time=c.time[network]) for c in settings[m]] for m in METHODS}
    return {m: min(curves, key=rank) for m, curves in there.items()}


def points(chosen: dict[str, Curve], *names: str) -> list[tuple]:
    """Rows of a CSV: names, method, setting, and a point of the curve."""
    return [
        (*names, m, c.setting, float(t), float(e))
        for m, c in chosen.items() for t, e in zip(c.time, c.excess, strict=True)
    ]  # fmt: skip


def thin(rows: list[tuple], most: int = 200) -> list[tuple]:
    """Each curve with not so many points; the last two entries of a row are the point, the others name the curve."""
    curves: dict[tuple, list[tuple]] = {}
    for row in rows:
        curves.setdefault(row[:-2], []).append(row)
    return [row for c in curves.values() for row in c[:: -(-len(c) // most)]]


def write(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A CSV file."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows([[f"{v:.6g}" if isinstance(v, float) else v for v in row] for row in rows])
    print(f"  {path}")


def style(axes: Axes, title: str, xlabel: str, ylabel: str | None = None) -> None:
    """One look for all panels."""
    axes.set_yscale("log")
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(xlabel)
    if ylabel:
        axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def panel(axes: Axes, title: str, network: str, chosen: dict[str, Curve], target: float) -> None:
    """The tuned curves on one network."""
    for (method, curve), colour in zip(chosen.items(), plotting.COLOURS, strict=False):
        axes.plot(curve.time, curve.excess, color=colour, lw=1.6, label=method)
    axes.axhline(target, color="0.6", lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.set_ylim(1e-4, 10.0)
    style(axes, title, "time of one operation" if network.startswith("relative") else "simulated seconds")
