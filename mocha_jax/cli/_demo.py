"""The command ``demo``: models of a synthetic federation, side by side."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

import mocha_jax as mj
from mocha_jax._files import atomic
from mocha_jax.cli import _arguments, _picture


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    show = commands.add_parser("demo", help="train on a synthetic federation with stragglers and drops")
    show.add_argument("--tasks", type=_arguments.integer(4), default=24, help="number of devices (default %(default)s)")
    show.add_argument(
        "--features", type=_arguments.integer(1), default=30, help="features of a sample (default %(default)s)"
    )
    show.add_argument(
        "--drop", type=_arguments.probability, default=0.2, help="probability of missing a round (default %(default)s)"
    )
    show.add_argument(
        "--tol", type=_arguments.number, default=1e-3, help="relative gap at which to stop (default %(default)s)"
    )
    show.add_argument(
        "--max-rounds", type=_arguments.integer(1), default=2000, help="rounds at most (default %(default)s)"
    )
    show.add_argument(
        "--seed", type=_arguments.integer(0), default=0, help="seed of everything random (default %(default)s)"
    )
    show.add_argument("--out", type=Path, default=Path("mocha_demo.png"), help="picture (default %(default)s)")
    show.add_argument("--quiet", action="store_true", help="no progress bars")
    show.set_defaults(run=demo)


def demo(options: argparse.Namespace) -> int:
    """Global, local and multi-task models of one federation, side by side."""
    if _picture.installed():
        _picture.check_form("--out", options.out)
        atomic.make_writable(options.out)
    key, data_key, split_key, tune_key = jax.random.split(jax.random.key(options.seed), 4)
    truth = mj.datasets.federation(data_key, options.tasks, options.features, smallest=12, largest=160)
    train, test = truth.data.split(split_key, 0.75)
    systems = mj.systems.Dropout(options.drop) & mj.systems.PartialEpochs(0.1, 1.0)
    sizes = train.sizes
    print(
        f"{options.tasks} devices in 4 groups, {options.features} features, {int(sizes.min())} to {int(sizes.max())} "
        f"training samples each.\nEvery round a device does 10-100 % of an epoch, and misses it with "
        f"probability {options.drop:g}.\n"
    )

    # Once the links between devices of one group are known, the model of equation (2); once they are learned, (14).
    adjacency = (truth.covariance > 0.5).astype(truth.covariance.dtype)
    laplacian = (jnp.diag(adjacency.sum(1)) - adjacency) / adjacency.sum(1).max()
    models: dict[str, tuple[mj.TaskData, Callable[[Array], mj.regularizers.Regularizer]]] = {
        "global": (train.pooled(), mj.regularizers.Independent),
        "local": (train, mj.regularizers.Independent),
        "known groups": (train, lambda lam: mj.regularizers.Graph(laplacian, 20.0 * lam, lam)),
        "learned": (train, mj.regularizers.Probabilistic),
    }
    solutions: dict[str, mj.Solution[mj.Problem]] = {}
    rows = []
    for name, (data, regularizer) in models.items():
        lam = _choose(tune_key, data, regularizer)
        problem = mj.Problem(data, mj.losses.Hinge(), regularizer(lam))
        began = time.perf_counter()
        if not options.quiet:
            print(f"{name} (lambda = {float(lam):.3g})")
        solution = mj.solve(
            problem, mj.Mocha(), key=key, systems=systems, tol=options.tol, max_rounds=options.max_rounds,
            progress=not options.quiet,
        )  # fmt: skip
        solutions[name] = solution
        error = 100 * float(mj.metrics.error_rate(solution.weights, test))
        simulated = float(solution.history.simulated_time[-1])
        wall = time.perf_counter() - began
        rows.append(
            f"{name:>13} {error:>13.1f} {solution.certificate.residual:>14.1e} {solution.rounds:>8} "
            f"{simulated:>13.1f} {wall:>8.1f}"
        )

    print(f"\n{'model':>13} {'test error %':>13} {'relative gap':>14} {'rounds':>8} {'simulated s':>13} {'wall s':>8}")
    print("\n".join(rows))
    if not _picture.installed():
        print(f"\n{_picture.missing()}")
        return 0
    from mocha_jax import plotting

    weights = {
        "truth": truth.weights,
        **{name: solutions[name].weights for name in ("local", "known groups", "learned")},
    }
    figure = plotting.overview({name: s.history for name, s in solutions.items()}, weights)
    _picture.save(figure, options.out)
    print(f"\nPicture: {options.out}")
    return 0


def _choose(key: Array, data: mj.TaskData, regularizer: Callable[[Array], mj.regularizers.Regularizer]) -> Array:
    """The lambda of least validation error, of those along a path."""
    inner, validation = data.split(key, 0.7)
    lams = jnp.geomspace(1.0, 1e-3, 10)
    problem = mj.Problem(inner, mj.losses.Hinge(), regularizer(lams[0]))
    path = mj.lambda_path(problem, jax.vmap(regularizer)(lams), tol=1e-2)
    return lams[jnp.argmin(jax.vmap(lambda weights: mj.metrics.error_rate(weights, validation))(path.weights))]
