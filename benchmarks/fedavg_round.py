"""A round of federated averaging beside plain loops: ``python -m benchmarks.fedavg_round``.

100 clients of 600 samples of 784 features, McMahan's 2NN of 199,210 parameters, 10 clients a round, batches of 10, one
epoch, SGD. *library* is `mj.run` with `mj.FedAvg`, one client after the other; *library, at once* maps over all ten.
*lax.map* and *vmap* are the shortest loops that JAX allows: ten clients given, rows in order, no sampling, no clock,
no history. *two devices* is the library with the clients divided between two devices of the CPU, one for each core.
*torch* is a loop in PyTorch, where it is installed, of the 2NN only. All in one process but torch, in turns; the median
counts. Accuracy is that of the library's and the loop's models after as many rounds, on samples not seen. ``--model
cnn`` does the same for the CNN of 1,663,370 parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

import mocha_jax as mj

CLIENTS, SAMPLES, FEATURES, CHOSEN, BATCH, RATE = 100, 600, 784, 10, 10, 0.1
MODELS = {"2nn": mj.networks.MLP(FEATURES, 10, (200, 200)), "cnn": mj.networks.CNN()}


def main() -> None:
    """Time a round of each, in turns."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fedavg_round", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="2nn")
    parser.add_argument("--turns", type=int, default=7, help="timings of each (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="in each timing (default %(default)s)")
    parser.add_argument("--json", type=Path, help="file to save to")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    model = MODELS[options.model]
    x, y = samples(0, CLIENTS * SAMPLES)
    x, y = x.reshape(CLIENTS, SAMPLES, FEATURES), y.reshape(CLIENTS, SAMPLES)
    problem = mj.Prediction(mj.pack_tasks(list(x), list(y)), test=mj.pack_tasks(*([a] for a in samples(1, 2000))))
    ways = {
        "library": partial(library, problem, model, None),
        "library, two devices": partial(library, mj.shard(problem), model, None),
        "library, at once": partial(library, problem, model, CHOSEN),
        "lax.map": partial(plain, model, jnp.asarray(x), jnp.asarray(y, jnp.int32), False),
        "vmap": partial(plain, model, jnp.asarray(x), jnp.asarray(y, jnp.int32), True),
    }
    first: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        first[name] = timed(way, options.rounds)
    for _ in range(options.turns):
        for name, way in ways.items():
            times[name].append(timed(way, options.rounds) / options.rounds)
    median = {name: statistics.median(t) for name, t in times.items()}
    if options.model == "2nn":
        torch = subprocess.run(
            [sys.executable, "-m", "benchmarks._torch_fedavg", "2nn", str(options.turns), str(options.rounds), "cpu"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if torch.returncode == 0:
            median["torch"] = json.loads(torch.stdout.splitlines()[-1])["seconds"]
        else:
            print("torch is not installed here")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; median of {options.turns} x {options.rounds} rounds")
    print(f"{'':<22}{'s a round':>10}{'/ library':>11}{'first call s':>14}")
    for name, seconds in median.items():
        start = f"{first[name]:.1f}" if name in first else ""
        print(f"{name:<22}{seconds:>10.3f}{seconds / median['library']:>11.2f}{start:>14}")
    rounds = 2 * options.rounds
    ends = ways["library"](rounds).shared, ways["lax.map"](rounds)
    errors = [accuracy(problem, model, params) for params in ends]
    print("accuracy after {} rounds: library {:.3f}, lax.map {:.3f}".format(rounds, *errors))
    if options.json:
        options.json.write_text(json.dumps({"seconds": times, "median": median}, indent=1))


def samples(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten classes of two bumps each."""
    centres = np.random.default_rng(99).normal(size=(10, 2, FEATURES)).astype(np.float32)
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 10, count)
    noise = draw.normal(size=(count, FEATURES)).astype(np.float32)
    return 0.1 * (centres[y, draw.integers(0, 2, count)] + 6.0 * noise), y


def timed(way: Callable[[int], Any], rounds: int) -> float:
    """Seconds until the result is there."""
    began = time.perf_counter()
    jax.block_until_ready(way(rounds))
    return time.perf_counter() - began


_SGD = optax.sgd(RATE)


def library(problem: mj.Prediction, model: mj.networks.Network, at_once: int | None, rounds: int) -> Any:
    """`mj.run`; the record at the end, on the training samples' stand-in of one sample, costs nothing."""
    algorithm = mj.FedAvg(model, _SGD, batch_size=BATCH, fraction=CHOSEN / CLIENTS, at_once=at_once)
    small = problem.replace(test=jax.tree.map(lambda a: a[:, :1] if a.ndim > 1 else a, problem.test))
    return mj.run(small, algorithm, jax.random.key(0), num_rounds=rounds, record_every=rounds)[0]


Loss = Callable[[mj.networks.Network, Any, Array, Array], Array]


def plain(
    model: mj.networks.Network, x: Array, y: Array, together: bool, rounds: int, *, chosen: int = CHOSEN,
    rate: float = RATE, loss: Loss | None = None,
) -> Any:  # fmt: skip
    """As little as it takes."""
    params = model.init(jax.random.key(0))
    draw = np.random.default_rng(0)
    for _ in range(rounds):
        some = jnp.asarray(draw.permutation(len(x))[:chosen])
        params = _round(model, params, x, y, some, together, rate, loss or cross_entropy)
    return params


def cross_entropy(model: mj.networks.Network, params: Any, x: Array, y: Array) -> Array:
    """Of classes."""
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()


@partial(jax.jit, static_argnums=(5, 7))
def _round(
    model: mj.networks.Network, params: Any, x: Array, y: Array, chosen: Array, together: bool, rate: float, loss: Loss
) -> Any:  # fmt: skip
    def client(i: Array) -> Any:
        def step(p: Any, batch: tuple[Array, Array]) -> tuple[Any, None]:
            gradient = jax.grad(partial(loss, model))(p, *batch)
            return jax.tree.map(lambda a, g: a - rate * g, p, gradient), None

        cut = x[i].reshape(-1, BATCH, *x.shape[2:]), y[i].reshape(-1, BATCH, *y.shape[2:])
        return lax.scan(step, params, cut)[0]

    ends = jax.vmap(client)(chosen) if together else lax.map(client, chosen)
    return jax.tree.map(lambda a: a.mean(0), ends)


def accuracy(problem: mj.Prediction, model: mj.networks.Network, params: Any) -> float:
    """Of the test samples."""
    assert problem.test is not None
    return float((model.apply(params, problem.test.x[0]).argmax(1) == problem.test.y[0]).mean())


if __name__ == "__main__":
    main()
