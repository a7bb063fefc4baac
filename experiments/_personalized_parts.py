"""Data sets, methods and scores of `experiments.personalized`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import mocha_jax as mj
from experiments import images

P = mj.personalized

HIDDEN = (50,)
ROWS = {"train": 100, "held": 50, "test": 150}  # of a client at most; all seeds then share compiled programs
SHARES = {"train": 0.4, "held": 0.2, "test": 0.4}
LENGTH = 8.0  # of samples, root mean square, at most: one range of rates then suits all sets


class Shape(NamedTuple):
    """Properties of a data set that programs depend on."""

    kind: str  # of labels: "classes", "rare" for two of which one is rare, or "numbers"
    features: int
    outputs: int  # of a network
    clients: int

    @property
    def network(self) -> mj.networks.MLP:
        """The network that all methods train."""
        return mj.networks.MLP(self.features, self.outputs, HIDDEN)

    @property
    def likelihood(self) -> mj.likelihoods.Likelihood:
        """The likelihood of its labels."""
        return mj.likelihoods.Gaussian() if self.kind == "numbers" else mj.likelihoods.Categorical()


class Federation(NamedTuple):
    """The samples of one data set and seed."""

    shape: Shape
    train: mj.TaskData
    held: mj.TaskData  # for all choices
    test: mj.TaskData
    scale: float  # of the labels, where they were standardised


class Outcome(NamedTuple):
    """The best run of a method."""

    scores: np.ndarray  # [m]
    chosen: str
    rounds: int
    sent: float
    received: float
    lte: float


class Traffic(NamedTuple):
    """Of one round: bytes of a client, and simulated seconds."""

    up: Array
    down: Array
    seconds: Array


class Source(NamedTuple):
    """A data set: how its clients come about."""

    draw: Callable[..., tuple[list[np.ndarray], list[np.ndarray]]]  # of a seed and how many clients, or of a file
    kind: str = "classes"
    clients: int = 0  # 0: those of the file
    file: str = ""
    package: str = ""  # where its data are

    @property
    def natural(self) -> bool:
        """Tell whether a client is the same one with every seed."""
        return not self.clients


def federation(source: Source, seed: int, clients: int, path: Path | None) -> Federation:
    """Draw a data set and divide every client's samples at random into those for training, choosing and testing."""
    places = (path,) if path is not None else ()
    xs, ys = source.draw(*places, *((seed, clients) if source.clients else ()))
    scale, centre = (np.std(np.concatenate(ys)), np.mean(np.concatenate(ys))) if source.kind == "numbers" else (1.0, 0)
    length = np.sqrt(np.mean(np.sum(np.concatenate(xs).astype(float) ** 2, axis=1)))
    factor = min(1.0, LENGTH / length)
    rng = np.random.default_rng([seed, 1])
    parts: dict[str, tuple[list[Any], list[Any]]] = {name: ([], []) for name in ROWS}
    for x, y in zip(xs, ys, strict=True):
        order = rng.permutation(len(y))
        cuts = np.maximum(np.round(np.cumsum([SHARES["train"], SHARES["held"]]) * len(y)).astype(int), (1, 2))
        for (name, (some_xs, some_ys)), rows in zip(parts.items(), np.split(order, cuts), strict=True):
            rows = rows[: ROWS[name]]
            some_xs.append((factor * x[rows]).astype(np.float32))
            some_ys.append(((y[rows] - centre) / scale).astype(np.float32))
    train, held, test = (
        mj.pack_tasks(*both, rows=ROWS[name], loss_scaling="task_mean") for name, both in parts.items()
    )  # fmt: skip
    outputs = 1 if source.kind == "numbers" else int(max(y.max() for y in ys)) + 1
    return Federation(Shape(source.kind, xs[0].shape[1], outputs, len(xs)), train, held, test, float(scale))


def _dealt(x: np.ndarray, y: np.ndarray, parts: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [x[rows] for rows in parts], [y[rows] for rows in parts]


def _digits(seed: int, clients: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return _dealt(x / 16.0, y, mj.partition.dirichlet(jax.random.key(seed), y, clients, 0.1, least=20))


def _mnist(way: str) -> Callable[..., tuple[list[np.ndarray], list[np.ndarray]]]:
    def draw(path: Path, seed: int, clients: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        digits, rng, key = images.mnist(path)[0], np.random.default_rng([seed, 2]), jax.random.key(seed)
        if way == "writers":
            many = [rows for rows in mj.partition.by_group(digits.writer) if len(rows) >= 100]
            return _dealt(digits.x, digits.y, [many[k] for k in rng.choice(len(many), clients, replace=False)])
        chosen = rng.choice(len(digits.y), 120 * clients, replace=False)
        x, y = digits.x[chosen], digits.y[chosen]
        if way == "permuted":
            xs, ys = np.split(x, clients), np.split(y, clients)
            return mj.partition.permuted(key, xs), ys
        if way == "shards":
            return _dealt(x, y, mj.partition.shards(key, y, clients, 2))
        return _dealt(x, y, mj.partition.dirichlet(key, y, clients, 0.1, least=20))

    return draw


def _file(path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The tasks of a file; classes from 0 on."""
    file = np.load(path, allow_pickle=False)
    y = file["y"]
    if len(classes := np.unique(y)) < 10:
        y = np.searchsorted(classes, y)
    return _rows(file["X"], y, file["subject" if "subject" in file.files else "task"])


def _rows(x: Any, y: Any, owner: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Deal rows to their owners, with features standardised."""
    x = np.asarray(x, float)
    spread = x.std(axis=0)
    x = (x - x.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    return _dealt(x, np.asarray(y), mj.partition.by_group(np.asarray(owner)))


def _shakespeare(path: Path, seed: int, clients: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Roles with 1,000 characters or more: the next character after eight, each as an indicator; no two overlap."""
    file, rng, past = np.load(path, allow_pickle=False), np.random.default_rng([seed, 5]), 8
    alphabet, text = np.unique(file["text"], return_inverse=True)
    roles = [role for role in np.split(text, file["offsets"][1:-1]) if len(role) >= 1000]
    xs, ys = [], []
    for k in rng.choice(len(roles), clients, replace=False):
        rows = roles[k][: len(roles[k]) // (past + 1) * (past + 1)].reshape(-1, past + 1)
        xs.append(np.eye(len(alphabet), dtype=np.float32)[rows[:, :-1]].reshape(len(rows), -1))
        ys.append(rows[:, -1])
    return xs, ys


def _synthetic(seed: int, clients: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Synthetic(1, 1) of Li et al. 2020 (FedProx): a softmax model and a distribution of inputs of every client's own.

    W_k ~ N(u_k, 1) with u_k ~ N(0, alpha), x ~ N(v_k, diag(j^-1.2)) with v_k ~ N(B_k, 1) and B_k ~ N(0, beta).
    """
    rng, d, c = np.random.default_rng([seed, 3]), 60, 10
    xs, ys = [], []
    for _ in range(clients):
        n = min(int(rng.lognormal(4.0, 2.0)) + 50, 300)
        w, b = rng.normal(rng.normal(), 1.0, (d, c)), rng.normal(rng.normal(), 1.0, c)
        x = rng.normal(rng.normal(rng.normal(), 1.0, d), np.arange(1.0, d + 1.0) ** -0.6, (n, d))
        xs.append(x)
        ys.append((x @ w + b).argmax(axis=1))
    return xs, ys


def _mixture(seed: int, clients: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The mixture of Marfoq et al. 2021 (FedEM): three logistic models, mixed in shares of every client's own.

    Shares pi_k ~ Dir(0.4), models and inputs uniform on [-1, 1]^d, labels by sigmoid(x'theta + e) with e ~ N(0, 1).
    """
    rng, d = np.random.default_rng([seed, 4]), 50
    models = rng.uniform(-1.0, 1.0, (3, d))
    xs, ys = [], []
    for _ in range(clients):
        n, shares = min(int(rng.lognormal(4.0, 1.0)) + 50, 300), rng.dirichlet(np.full(3, 0.4))
        x, which = rng.uniform(-1.0, 1.0, (n, d)), rng.choice(3, n, p=shares)
        z = np.sum(x * models[which], axis=1) + rng.normal(size=n)
        xs.append(x)
        ys.append((rng.uniform(size=n) < 1.0 / (1.0 + np.exp(-z))).astype(int))
    return xs, ys


def _pupils() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The junior school project: marks in mathematics of 49 schools' pupils, in three years."""
    table = importlib.import_module("faraway.datasets.jsp").load()
    codes = [np.asarray(table[name]) for name in ("gender", "social", "year")]
    columns = [code[:, None] == np.unique(code)[1:] for code in codes]
    return _rows(np.concatenate([*columns, table[["raven", "english"]]], axis=1), table["math"], table["school"])


def _wages() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Logarithms of the wages of 545 men in eight years (Vella and Verbeek 1998)."""
    table = importlib.import_module("linearmodels.datasets.wage_panel").load()
    names = ["educ", "black", "hisp", "exper", "expersq", "married", "union", "hours", "year"]
    return _rows(np.asarray(table[names], float), table["lwage"], table["nr"])


SOURCES = {
    "digits": Source(_digits, clients=20),
    "mixture": Source(_mixture, clients=24),
    "synthetic(1, 1)": Source(_synthetic, clients=30),
    "land mines": Source(_file, "rare", file="landmine_full"),
    "school": Source(_file, "numbers", file="school"),
    "vehicle": Source(_file, file="vehicle"),
    "pupils": Source(_pupils, "numbers", package="faraway"),
    "wages": Source(_wages, "numbers", package="linearmodels"),
    "HAR": Source(_file, file="har"),
    "MNIST shards": Source(_mnist("shards"), clients=50, file="mnist"),
    "MNIST Dirichlet": Source(_mnist("dirichlet"), clients=50, file="mnist"),
    "MNIST writers": Source(_mnist("writers"), clients=50, file="mnist"),
    "MNIST permuted": Source(_mnist("permuted"), clients=50, file="mnist"),
    "Shakespeare": Source(_shakespeare, clients=50, file="shakespeare"),
}


class Way(NamedTuple):
    """A method that trains networks."""

    make: Callable[[Shape, Any, Any, dict[str, Any]], mj.Trainer]  # of a shape, a rate, a number, and options
    numbers: tuple[float, ...] = ()  # of its own, to choose from
    static: bool = False  # whether a number makes a program of its own


SGD, ADAM = optax.sgd(1.0), optax.adam(0.02)  # times a rate of the grid
PULLS = (0.03, 0.1, 0.3, 1.0)


def _with_norm(s: Shape) -> mj.networks.Model:
    """The network with its hidden layer normalised (FedBN keeps the scale and the shift)."""
    first, last = mj.networks.MLP(s.features, HIDDEN[0]), mj.networks.MLP(HIDDEN[0], s.outputs)

    def init(key: Array) -> dict[str, Any]:
        keys = jax.random.split(key)
        norm = {"scale": jnp.ones(HIDDEN[0]), "shift": jnp.zeros(HIDDEN[0])}
        return {"first": first.init(keys[0]), "norm": norm, "last": last.init(keys[1])}

    def apply(params: dict[str, Any], x: Array) -> Array:
        h = jax.nn.standardize(first.apply(params["first"], x), axis=-1, epsilon=1e-5)
        norm = params["norm"]
        return last.apply(params["last"], jax.nn.relu(h * norm["scale"][None] + norm["shift"][None]))

    return mj.networks.Model(init, apply)


def _pfedme(s: Shape, rate: Any, strength: Any, o: dict[str, Any]) -> mj.Trainer:
    # The grid's rate is that of theta. The model goes a tenth of the way to theta in a step, as in the paper.
    return P.pfedme(s.network, SGD, strength=strength, inner_rate=rate, **{**o, "rate": 0.1 / strength})


def _fedu(s: Shape, rate: Any, strength: Any, o: dict[str, Any]) -> mj.Trainer:
    graph = (np.ones((s.clients, s.clients)) - np.eye(s.clients)) / s.clients
    return P.fedu(s.network, SGD, graph=graph.astype(np.float32), strength=strength, server_rate=1.0, **o)


def _fedamp(s: Shape, rate: Any, sharpness: Any, o: dict[str, Any]) -> mj.Trainer:
    attention = sharpness / s.clients  # the most with which all clouds are averages
    return P.fedamp(s.network, SGD, strength=0.3 * attention, attention=attention, sharpness=sharpness, **o)


def _ifca(s: Shape, rate: Any, restart: Any, o: dict[str, Any]) -> mj.Trainer:
    seed = 4 * o["seed"] + jnp.asarray(restart).astype(o["seed"].dtype)
    return P.ifca(s.network, SGD, clusters=3, classes=s.kind != "numbers", **{**o, "seed": seed})


def _virtual(s: Shape, rate: Any, temperature: Any, o: dict[str, Any]) -> mj.Trainer:
    model = mj.networks.Lateral(s.features, s.outputs, HIDDEN)
    return mj.Virtual(model, ADAM, temperature=temperature, first_scale=0.02, noise="local", draws=10, parallel=True,
                      **o)  # fmt: skip


BASELINE, ALONE = "FedAvg + fine-tuning", "Local"
WAYS = {
    ALONE: Way(lambda s, r, v, o: mj.Local(s.network, SGD, **o)),
    "FedAvg": Way(lambda s, r, v, o: mj.FedAvg(s.network, SGD, **o)),
    "FedProx": Way(lambda s, r, v, o: mj.FedAvg(s.network, SGD, proximal=v, **o), PULLS),
    BASELINE: Way(lambda s, r, v, o: P.fine_tuned(s.network, SGD, tuning_epochs=v, **o), (1, 3, 10, 30), static=True),
    "Ditto": Way(lambda s, r, v, o: P.ditto(s.network, SGD, strength=v, **o), PULLS),
    "MR-MTL": Way(lambda s, r, v, o: P.mr_mtl(s.network, SGD, strength=v, **o), PULLS),
    "pFedMe": Way(_pfedme, (1.0, 5.0, 15.0, 30.0)),
    "FedPer": Way(lambda s, r, v, o: P.fedper(s.network, SGD, **o)),
    "LG-FedAvg": Way(lambda s, r, v, o: P.lg_fedavg(s.network, SGD, **o)),
    "FedBN": Way(lambda s, r, v, o: P.fedbn(_with_norm(s), SGD, **o)),
    "FedRep": Way(lambda s, r, v, o: P.fedrep(s.network, SGD, **{**o, "local_epochs": v}), (1, 2, 5, 10), static=True),
    "SCAFFOLD": Way(lambda s, r, v, o: P.scaffold(s.network, SGD, **o)),
    "FedDyn": Way(lambda s, r, v, o: P.feddyn(s.network, SGD, strength=v, **o), PULLS),
    "Per-FedAvg": Way(lambda s, r, v, o: P.per_fedavg(s.network, SGD, inner_rate=v, **o), PULLS),
    "APFL": Way(lambda s, r, v, o: P.apfl(s.network, SGD, mixing=v, **o), (0.25, 0.5, 0.75, 0.9)),
    "IFCA": Way(_ifca, (0, 1, 2, 3)),
    "FedEM": Way(lambda s, r, v, o: P.fedem(s.network, SGD, classes=s.kind != "numbers", **o)),
    "FedU": Way(_fedu, (0.01, 0.03, 0.1, 0.3)),
    "FedAMP": Way(_fedamp, (1.0, 10.0, 100.0, 1000.0)),
    "q-FFL": Way(lambda s, r, v, o: P.q_ffl(s.network, SGD, fairness=v, lipschitz=1.0 / r, **o), (0.01, 0.1, 1.0, 5.0)),
    "AFL": Way(lambda s, r, v, o: P.afl(s.network, SGD, mixture_rate=v, **o), (0.003, 0.01, 0.03, 0.1)),
    "VIRTUAL": Way(_virtual, (1.0, 0.1, 0.01, 0.001)),
}


class Grid(NamedTuple):
    """A convex model: its numbers, and the regularizer that they make."""

    make: Callable[..., mj.regularizers.Regularizer]
    numbers: dict[str, tuple[float, ...]]
    heads: bool = False  # of a network of `FedAvg`, or of the samples as they are

    @property
    def candidates(self) -> mj.regularizers.Regularizer:
        """All of them, as a grid."""
        return mj.grid(self.make, **self.numbers)


def _both(lam: float, ridge: float) -> mj.regularizers.MeanCovariance:
    """Penalties of the mean, and of the deviations from it: lam (ridge |U|^2 + (1 - ridge) |U|_*^2)."""
    return mj.regularizers.MeanCovariance(0.01 * lam, (1.0 - ridge) * lam, (1.0 - ridge) / ridge if ridge else np.inf)


LAMS, RIDGES = (1e-1, 1e-2, 1e-3, 1e-4), (0.99, 0.5, 0.0)
GRIDS = {
    "linear, near their mean (11)": Grid(mj.regularizers.MeanRegularized, {"lam1": LAMS, "lam2": (1e-2, 1e-3, 1e-4)}),
    "linear, learned covariance (14)": Grid(mj.regularizers.Probabilistic, {"lam": LAMS, "sigma2": (1.0, 10.0, 100.0)}),
    "linear, mean and covariance": Grid(_both, {"lam": LAMS, "ridge": RIDGES}),
    "FedAvg + MOCHA heads": Grid(_both, {"lam": LAMS[:3], "ridge": RIDGES}, heads=True),
}
METHODS = (*WAYS, *GRIDS)


def predicted(algorithm: mj.Trainer, state: Any, problem: mj.Prediction, x: Array) -> Array:
    """Predict samples ``[m, n, d]`` of every client: means ``[m, n, c]``."""
    nodes = jnp.arange(len(x), dtype=jnp.int32)
    return jax.vmap(lambda node, x: algorithm.predict(state, problem, node, x).mean)(nodes, x)


def scores(shape: Shape, predicted: np.ndarray, data: mj.TaskData, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Score predictions ``[..., m, n, c]`` of every client, and the mean loss, which decides between equal scores.

    Args:
      shape: of the data set.
      predicted: probabilities of classes, or numbers ``[..., m, n, 1]``.
      data: the labels.
      scale: of the labels.

    Returns:
      Accuracies, areas under the ROC curve or RMSE ``[..., m]``, NaN where there is none; and losses ``[...]``.
    """
    y, real = np.asarray(data.y), np.asarray(data.weight) > 0
    count = np.maximum(real.sum(axis=1), 1)
    if shape.kind == "numbers":
        squares = (np.where(real, predicted[..., 0] - y, 0.0).astype(float) ** 2).sum(axis=-1) / count
        return scale * np.sqrt(squares), squares.mean(axis=-1)
    picked = np.take_along_axis(predicted, np.broadcast_to(y.astype(int), predicted.shape[:-1])[..., None], -1)[..., 0]
    loss = (np.where(real, -np.log(np.maximum(picked, 1e-30)), 0.0).sum(axis=-1) / count).mean(axis=-1)
    if shape.kind == "classes":
        right = predicted.argmax(axis=-1) == y
        return np.where(real, right, 0.0).sum(axis=-1) / count, loss
    areas = []
    for t in range(len(y)):
        high, low = (predicted[..., t, real[t] & (y[t] == k), 1] for k in (1, 0))
        if not (high.shape[-1] and low.shape[-1]):
            areas.append(np.full(predicted.shape[:-3], np.nan))
            continue
        above = high[..., :, None] - low[..., None, :]
        areas.append(np.mean((above > 0) + 0.5 * (above == 0), axis=(-1, -2)))
    return np.stack(areas, axis=-1), loss


def best(shape: Shape, judged: np.ndarray, loss: np.ndarray) -> tuple[int, int]:
    """The run and the record with the best mean score ``[runs, records, m]``; of equals the one of the least loss."""
    mean = np.nanmean(judged, axis=-1) * (1.0 if shape.kind == "numbers" else -1.0)
    order = np.lexsort((np.nan_to_num(loss, nan=np.inf).ravel(), np.nan_to_num(mean, nan=np.inf).ravel()))
    run, record = np.unravel_index(order[0], mean.shape)
    return int(run), int(record)


def with_constant(data: mj.TaskData) -> mj.TaskData:
    """Append a constant feature."""
    one = (data.weight > 0).astype(data.x.dtype)[..., None]
    return data.replace(x=jnp.concatenate([data.x, one], axis=2))


def signs(data: mj.TaskData) -> mj.TaskData:
    """Labels of one class, +1, against the others, -1."""
    return data.replace(y=jnp.where(data.y > 0, 1.0, -1.0).astype(data.dtype))
