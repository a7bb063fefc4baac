"""A round of federated averaging by `mj.run`, by the shortest loop of `lax.scan` and `vmap`, and by torch; accuracy.

100 clients, of which ten train in a round, batches of 10, one epoch; 600 samples each for the 2NN of 199,210 parameters
and the CNN of 1,663,370, 20 rows of 80 symbols each for the LSTM of 817,392. Of VIRTUAL a round is the refinement of
one of ten clients. The shortest loops draw clients, but no rows and no clock, and keep no history; that of VIRTUAL
takes all parameters for shared ones. Accuracy is on samples not seen, after the rounds of one timing (torch: after all
its rounds).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree

import mocha_jax as mj
from benchmarks import _texts, fedavg_round
from benchmarks.card._inside import Inside, step
from benchmarks.card._timing import gist, in_threads, on_cpu, timed
from benchmarks.fedavg_round import BATCH, FEATURES, RATE, plain, samples

MODELS = ("2NN", "CNN", "LSTM", "VIRTUAL")
_ADAM, _TEMPERATURE, _SCALE = 1e-3, 0.01, 0.05


class Setting(NamedTuple):
    """What is trained, and two ways to do it: functions of nothing that return parameters."""

    library: Callable[[], Any]
    loop: Callable[[], Any]
    accuracy: Callable[[Any], float]
    rounds: int


def measure(here: Inside) -> None:
    """A process for each model, then torch."""
    here.apart("benchmarks.card.averaging", {name: {} for name in (MODELS if here.full else MODELS[2:])}, part)
    _torch(here, {detail["what"]: detail["seconds"] for detail in here.details()})


def part(here: Inside, name: str) -> None:
    """One model: compile both ways, then time them."""
    setting = _setting(name, here.full)
    warm = list(in_threads([partial(_run, way) for way in setting[:2]], lambda: 0.6 * here.left()))
    taken: list[float] = []
    with here.alone():
        for by, way, first in zip(("mj.run", "shortest loop"), setting[:2], warm, strict=True):
            what = f"{name}: a round by {by}"
            if isinstance(first, TimeoutError) or here.left() < 3.0:
                here.unfinished(what)
            elif isinstance(first, Exception):
                here.wrong(f"{what}: {gist(first)}")
            else:
                done = timed(way, calls=5, within=2.0)
                taken.append(done.seconds / setting.rounds)
                right = setting.accuracy(done.result)
                here.detail(what=what, seconds=taken[-1])
                here.figure(what, 1e3 * taken[-1], "ms", spread=done.spread, accuracy=right,
                            note=f"accuracy {right:.3f} after {setting.rounds} rounds")  # fmt: skip
    if len(taken) == 2:
        here.figure(f"{name}: mj.run over the shortest loop", taken[0] / taken[1], "times")


def _run(way: Callable[[], Any]) -> Any:
    return jax.block_until_ready(way())


def _setting(name: str, full: bool) -> Setting:
    """The model of a name, with its samples."""
    clients, rows, chosen, rounds = (100, 600, 10, 10) if full else (4, 20, 2, 1)
    if name == "LSTM":
        symbols, following = _texts.texts(0, clients, _texts.ROWS if full else BATCH, _texts.LENGTH if full else 6)
        lstm = mj.networks.LSTM(_texts.SYMBOLS) if full else mj.networks.LSTM(_texts.SYMBOLS, hidden=8, layers=1)
        return _language(lstm, symbols, following, chosen, rounds)
    test = samples(1, 2000)
    x, y = samples(0, clients * rows)
    x, y = x.reshape(clients, rows, FEATURES), y.reshape(clients, rows)
    if name == "VIRTUAL":
        hidden, rounds = ((100, 100), 20) if full else ((4, 4), 2)
        return _virtual(mj.networks.Lateral(FEATURES, 10, hidden), x[:10], y[:10], test, rounds)
    model = mj.networks.MLP(FEATURES, 10, (200, 200)) if name == "2NN" else mj.networks.CNN()
    problem = mj.Prediction(mj.pack_tasks(list(x), list(y)), test=mj.pack_tasks(*([a[:1]] for a in test)))
    return _pictures(model, problem, x, y, test, chosen, rounds)


def _averaged(model: Any, problem: mj.Prediction, share: float, rate: float, rounds: int) -> Callable[[], Any]:
    """Runs of one algorithm: of another optimizer, however alike, the programs would be others."""
    algorithm = mj.FedAvg(model, optax.sgd(rate), batch_size=BATCH, fraction=share)
    key = jax.random.key(0)
    return lambda: mj.run(problem, algorithm, key, num_rounds=rounds, record_every=rounds)[0].shared


def _right(model: Any, x: Array, y: Array, params: Any) -> float:
    return float((model.apply(params, x).argmax(-1) == y).mean())


def _pictures(
    model: Any, problem: mj.Prediction, x: np.ndarray, y: np.ndarray, test: Any, chosen: int, rounds: int
) -> Setting:  # fmt: skip
    """A classifier."""
    given = jnp.asarray(x), jnp.asarray(y, jnp.int32)
    return Setting(
        _averaged(model, problem, chosen / len(x), RATE, rounds),
        partial(plain, model, *given, not on_cpu(), rounds, chosen=chosen),
        partial(_right, model, *map(jnp.asarray, test)), rounds,
    )  # fmt: skip


def _language(model: Any, x: np.ndarray, y: np.ndarray, chosen: int, rounds: int) -> Setting:
    """A language model: the next symbol."""
    whole = np.concatenate([x, y[..., -1:]], axis=-1).astype(np.float32)
    count = np.full(x.shape[:2], x.shape[2], np.float32)
    data = mj.pack_tasks(list(whole), list(count))
    problem = mj.Prediction(data, mj.likelihoods.NextSymbol(), mj.pack_tasks([whole[0, :1]], [count[0, :1]]))
    given = jnp.asarray(x, jnp.int32), jnp.asarray(y, jnp.int32)
    test = [jnp.asarray(a[0]) for a in _texts.texts(1, 1, 100, x.shape[2])]
    loop = partial(
        plain, model, *given, not on_cpu(), rounds, chosen=chosen, rate=_texts.RATE, loss=fedavg_round.cross_entropy
    )
    return Setting(
        _averaged(model, problem, chosen / len(x), _texts.RATE, rounds),
        loop,
        partial(_right, model, *test),
        rounds,
    )


def _virtual(model: Any, x: np.ndarray, y: np.ndarray, test: Any, rounds: int) -> Setting:
    """VIRTUAL, of an MLP with lateral connections."""
    problem = mj.Prediction(mj.pack_tasks(list(x), list(y)), test=mj.pack_tasks(*([a[:1]] for a in test)))
    algorithm = mj.Virtual(model, optax.adam(_ADAM), temperature=_TEMPERATURE, samples=1, batch_size=BATCH)

    def library() -> Any:
        state = mj.run(problem, algorithm, jax.random.key(0), num_rounds=rounds, record_every=rounds)[0]
        return algorithm.parameters(state, problem, 0)

    given = jnp.asarray(x), jnp.asarray(y, jnp.int32)
    return Setting(
        library, partial(_refined, model, *given, rounds), partial(_right, model, *map(jnp.asarray, test)), rounds
    )


def _refined(model: Any, x: Array, y: Array, rounds: int) -> Any:
    """Refinements, one client after the other, each with its factor out of the posterior."""
    mean, apart = ravel_pytree(model.init(jax.random.key(0)))
    prior = jnp.full_like(mean, 1.0 / len(x)), jnp.zeros_like(mean)  # precision, precision times mean
    factors: list[Any] = [prior] * len(x)
    posterior: Any = jnp.ones_like(mean), jnp.zeros_like(mean)
    for r in range(rounds):
        i = r % len(x)
        rest = tuple(s - f for s, f in zip(posterior, factors[i], strict=True))
        mean, factors[i] = _refine(model, x[i], y[i], mean, rest, prior, jax.random.key(r), len(x))
        posterior = tuple(s + f for s, f in zip(rest, factors[i], strict=True))
    return apart(mean)


@partial(jax.jit, static_argnums=7)
def _refine(
    model: Any, x: Array, y: Array, mean: Array, rest: Any, prior: Any, key: Array, clients: int
) -> tuple[Array, Any]:  # fmt: skip
    """One client's training on the free energy."""
    apart = ravel_pytree(model.init(key))[1]
    optimizer, count = optax.adam(_ADAM), len(x)
    against = prior[0] + rest[0], prior[1] + rest[1]

    def free_energy(v: tuple[Array, Array], x: Array, y: Array, key: Array) -> Array:
        precision = jnp.exp(v[1]) + rest[0]
        drawn = apart(v[0] + jax.random.normal(key, v[0].shape) * precision**-0.5)
        ratio = against[0] / precision
        divergence = 0.5 * jnp.sum(ratio - 1.0 - jnp.log(ratio) + against[0] * (v[0] - against[1] / against[0]) ** 2)
        return fedavg_round.cross_entropy(model, drawn, x, y) + _TEMPERATURE * divergence / count

    def one(carry: Any, batch: Any) -> tuple[Any, None]:
        v, state = carry
        updates, state = optimizer.update(jax.grad(free_energy)(v, *batch), state, v)
        return (optax.apply_updates(v, updates), state), None

    start = mean, jnp.full_like(mean, jnp.log(_SCALE**-2 / clients))
    cut = x.reshape(-1, BATCH, x.shape[-1]), y.reshape(-1, BATCH)
    (mean, logs), _ = lax.scan(one, (start, optimizer.init(start)), (*cut, jax.random.split(key, len(cut[0]))))[0]
    precision = jnp.exp(logs) + rest[0]
    return mean, (jnp.exp(logs), precision * mean - rest[1])


def _torch(here: Inside, taken: dict[str, float]) -> None:
    """The same in PyTorch on the same device."""
    if here.left() < 10.0:
        here.unfinished("torch")
        return
    given = ["2nn,lstm,cnn", "3", "2", "cpu" if on_cpu() else "cuda"]
    child = here.child(["-m", "benchmarks._torch_fedavg", *given], environment={"JAX_PLATFORMS": "cpu"})
    if "No module named 'torch'" in child.output:
        here.note("torch is not installed here")
    elif child.code != 0:
        here.note(f"torch: {child.why()}")
    for row in child.results:
        name = row["model"].upper()
        note = f"accuracy {row['accuracy']:.3f} after {row['rounds']} rounds, torch {row['torch']} on {row['device']}"
        here.figure(f"{name}: a round by torch", 1e3 * row["seconds"], "ms", note=note, accuracy=row["accuracy"])
        if (ours := taken.get(f"{name}: a round by mj.run")) is not None:
            here.figure(f"{name}: torch over mj.run", row["seconds"] / ours, "times")


if __name__ == "__main__":
    step(measure, part)
