r"""Private linear models by dual vectors: ``python -m experiments.private_dual --data school.npz landmine_full.npz``.

A task's weights follow from sums over its samples, :math:`w = \bar M v` with :math:`v_t = \sum_j \alpha_{tj}x_{tj}`. A
node keeps its duals alpha. In every round it publishes a noisy sum, and the server makes v of all that was published,
and from v the weights: means of tasks and a learned relationship are post-processing, which no budget pays for. All
rows x have length 1, so that a limit C of a number is one of its vector. The sums, with noise of deviation sC:

- *DP-SCD* (Damaskinos et al. 2020, arXiv 2006.07272): of the steps of alpha in a batch, each cut to C. Alpha gets noise
  besides, so that a sample moves a pair of length :math:`\sqrt2 C`, and both have :math:`\sqrt2` times the noise.
- *increments*: of the steps of alpha in a batch, without noise on alpha; v is the sum of the rounds.
- *increments, whole path*: of the steps of all samples, each cut to :math:`2C/\sqrt T`, and so that the squares of all
  T steps of a sample add up to :math:`C^2`: its account is that of one release.
- *sums anew*: of alpha itself, cut to C, of all samples; v is the last one, and in the end the mean of the later half.
- *gradients*: of minus the derivatives of the losses in a batch, cut to C; v forgets by the share that it takes in.
  There are no duals: what the server does with sums is the same, so that this row shows what the duals are good for.
- *DP-SGD* is `mocha_jax.privacy.with_budget` on `Local` and MR-MTL, with batches of all samples.

Beside them weights that are published after a solve in the clear, where the samples of all tasks may be seen
together: *output* is `mocha_jax.privacy.release`, *objective* is `objective_perturbation`. Their neighbours differ in a
sample that is replaced, which is more than one that is missing. The loss of numbers is Huber's, its threshold is the
limit.

**The duals need no noise.** Let D have the sample j, let D' lack it, and let :math:`o_1, \dots, o_T` be the sums
published. A sample's dual before round t is a function of that sample, of its own coins (whether it was in the batch)
of earlier rounds, and of :math:`o_{<t}`, through v: of no other sample. (1) Show the adversary the coins of all other
samples: they are distributed alike under D and D', so this only helps. Then the sum over the others in round t is the
same function :math:`S_t(o_{<t})` under both, whatever duals they keep. (2) Under D' round t is
:math:`N(S_t, s^2C^2I)`. Under D it is a mixture, over j's earlier coins given :math:`o_{<t}`, of
:math:`(1-q)N(S_t, s^2C^2I) + qN(S_t + c, s^2C^2I)` with :math:`|c| \le C`: j's coin of round t is independent of all
earlier ones, and c depends on these alone. Powers of the ratio to a given law are convex in the other law, so the Renyi
divergences between the two, in both directions, are at most those of the sampled Gaussian mechanism, for every
:math:`o_{<t}`. (3) They add up over rounds. For *whole path* there are no coins, and the Renyi divergence of order a
of round t is :math:`a|c_t|^2/2s^2C^2`; that the sum of these bounds is at most :math:`a/2s^2` for every course of the
rounds is enough (Feldman and Zrnic 2021, arXiv 2008.11193).

The proof breaks where a step reads what is not published. In an epoch of coordinate steps, or in any local solve to
the end, a sample's step reads the steps of others, and one sample more moves the duals of all: bounds on each, such as
a logistic loss has, do not bound the change of the sum. So all steps of a round are taken from one w, and are shortened
by a share of the bound with which that is safe. The numbers of samples are taken to be public, as by `ExampleLevel`. As
for DP-SCD: if alpha were seen, so would be who is in a batch, and sampling would amplify nothing; if it is not, the
noise on alpha is not needed. Its batches are drawn at random here.

Every method has 24 settings in a grid that was placed by runs on the first split, and takes for every split and epsilon
the one that is the best on the other splits; these choices, and means and spreads of features, are not accounted for.
With infinite epsilon there is no noise, and still the limits. Labels that are not -1 and 1 are scores as in
`private_school`, with its splits; of two classes half of each task is for training.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import private_school
from experiments.private_school import DELTA, EPSILONS
from experiments.rows import append, parser_of, read, say
from mocha_jax import plotting

GAP, TOL = 1e-6, 1e-10  # of solves, absolute and relative
SHARE, CAUTION = 0.3, 0.2  # of samples in a batch; of the safe curvature, but of sums anew, which need all of it
REFERENCE = "DP-SGD, MR-MTL"
STYLES = {"alone": ":", "mean": "-", "learned": "--"}


class Method(NamedTuple):
    """What is published, and the model."""

    release: str
    model: str


class Setting(NamedTuple):
    """The free numbers of a run."""

    rounds: int
    clip: float
    first: float  # the penalty of deviations, or of weights; DP-SGD's rate
    second: float  # the penalty of the mean; DP-SGD's pull

    def __str__(self) -> str:
        return " ".join(f"{value:g}" for value in self)


class Row(NamedTuple):
    """One run; the CSV's columns."""

    tasks: str
    method: str
    setting: str
    epsilon: float
    seed: int
    error: float  # mean squared, or one minus the mean AUC of the tasks


METHODS = {
    "DP-SGD, each alone": Method("DP-SGD", "alone"),
    REFERENCE: Method("DP-SGD", "mean"),
    "DP-SCD, each alone": Method("DP-SCD", "alone"),
    "DP-SCD, near the mean": Method("DP-SCD", "mean"),
    "increments, each alone": Method("increments", "alone"),
    "increments, near the mean": Method("increments", "mean"),
    "increments, learned covariance": Method("increments", "learned"),
    "increments, whole path, near the mean": Method("path", "mean"),
    "sums anew, near the mean": Method("anew", "mean"),
    "gradients, near the mean": Method("gradients", "mean"),
    "output, near the mean": Method("output", "mean"),
    "objective, near the mean": Method("objective", "mean"),
}

Grid = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...], tuple[float, ...]]
_ROUNDS, _NONE = (40, 100), (1.0,)
_NUMBERS: dict[Method, Grid] = {
    Method("DP-SGD", "alone"): (_ROUNDS, (0.01, 0.03, 0.1), (0.3, 1.0, 2.0, 4.0), _NONE),
    Method("DP-SGD", "mean"): (_ROUNDS, (0.01, 0.03, 0.1), (2.0, 4.0), (0.03, 0.1)),
    Method("DP-SCD", "alone"): (_ROUNDS, (0.001, 0.003, 0.01), (0.1, 0.3, 1.0, 3.0), _NONE),
    Method("increments", "alone"): (_ROUNDS, (0.001, 0.003, 0.01), (0.1, 0.3, 1.0, 3.0), _NONE),
    Method("DP-SCD", "mean"): (_ROUNDS, (0.001, 0.003), (0.3, 1.0, 3.0), (0.03, 0.1)),
    Method("increments", "mean"): (_ROUNDS, (0.001, 0.003), (0.3, 1.0, 3.0), (0.03, 0.1)),
    Method("increments", "learned"): (_ROUNDS, (0.001, 0.003), (0.3, 1.0, 3.0), (0.03, 0.1)),
    Method("path", "mean"): (_ROUNDS, (0.003, 0.012), (0.3, 1.0, 3.0), (0.03, 0.1)),
    Method("anew", "mean"): ((10, 40), (0.1, 0.2), (1.0, 10.0, 30.0), (0.1, 1.0)),
    Method("gradients", "mean"): (_ROUNDS, (0.03, 0.1), (0.3, 1.0, 3.0), (0.01, 0.03)),
    Method("output", "mean"): ((1,), (0.03, 0.1), (1.0, 3.0, 10.0, 30.0), (0.01, 0.1, 1.0)),
    Method("objective", "mean"): ((1,), (0.03, 0.1), (1.0, 3.0, 10.0, 30.0), (0.01, 0.1, 1.0)),
}
_CLASSES: dict[Method, Grid] = {
    Method("DP-SGD", "alone"): (_ROUNDS, (0.1, 0.3, 1.0), (2.0, 4.0, 16.0, 64.0), _NONE),
    Method("DP-SGD", "mean"): (_ROUNDS, (0.3, 1.0), (4.0, 16.0), (0.01, 0.03, 0.1)),
    Method("DP-SCD", "alone"): (_ROUNDS, (0.003, 0.01, 0.03), (0.1, 1.0, 3.0, 10.0), _NONE),
    Method("increments", "alone"): (_ROUNDS, (0.003, 0.01, 0.03), (0.1, 1.0, 3.0, 10.0), _NONE),
    Method("DP-SCD", "mean"): (_ROUNDS, (0.003, 0.01), (0.1, 1.0, 10.0), (0.003, 0.01)),
    Method("increments", "mean"): (_ROUNDS, (0.01, 0.03), (0.1, 1.0, 10.0), (0.003, 0.01)),
    Method("increments", "learned"): (_ROUNDS, (0.01, 0.03), (0.1, 1.0, 10.0), (0.003, 0.01)),
    Method("path", "mean"): (_ROUNDS, (0.03, 0.1), (0.1, 1.0, 10.0), (0.003, 0.01)),
    Method("anew", "mean"): ((10, 40), (0.3, 1.0), (0.1, 1.0, 10.0), (0.01, 0.1)),
    Method("gradients", "mean"): (_ROUNDS, (0.3, 1.0), (0.1, 1.0, 10.0), (0.003, 0.01)),
    Method("output", "mean"): ((1,), _NONE, (1.0, 3.0, 10.0, 30.0, 100.0, 300.0), (0.01, 0.1, 1.0, 10.0)),
    Method("objective", "mean"): ((1,), _NONE, (1.0, 3.0, 10.0, 30.0, 100.0, 300.0), (0.01, 0.1, 1.0, 10.0)),
}


class Tasks(NamedTuple):
    """Rows of length 1 of all tasks, for training and held out."""

    train: mj.TaskData
    test: mj.TaskData
    classes: bool


class Numbers(NamedTuple):
    """Free numbers of many runs, one entry each, and the multiple of the limit that the noise is."""

    clip: Array
    first: Array
    second: Array
    noise: Array


class State(NamedTuple):
    """What one round leaves to the next."""

    alpha: Array  # [m, n]
    used: Array  # [m, n] squares of a sample's steps so far
    v: Array  # [m, d]
    late: Array  # [m, d] sum of the v of the later half
    weights: Array  # [m, d]
    relation: Any


def main() -> None:
    """Parse the command line, train, print, draw."""
    parser = parser_of("private_dual", __doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="school.npz landmine_full.npz")
    parser.add_argument("--seeds", type=int, default=3, help="splits (default %(default)s)")
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = study(options)
    say(report(rows), options.out)
    draw(rows).savefig(options.out / "private_dual.png", dpi=110)


def study(options: argparse.Namespace) -> list[Row]:
    """All that the CSV lacks; then its rows."""
    path = options.out / "runs.csv"
    rows = read(path, Row)
    done = {row[:5] for row in rows}
    for file, seed in product(options.data, range(options.seeds)):
        tasks = load(file, seed)
        for name in options.methods:
            for settings in batches(METHODS[name], tasks.classes):
                wanted = [
                    (setting, epsilon) for setting, epsilon in product(settings, options.epsilons)
                    if (file.stem, name, str(setting), epsilon, seed) not in done
                ]  # fmt: skip
                for (setting, epsilon), error in zip(wanted, errors(tasks, METHODS[name], wanted, seed), strict=True):
                    row = Row(file.stem, name, str(setting), epsilon, seed, error)
                    append(path, row)
                    rows.append(row)
            print(f"{file.stem} split {seed}: {name}", flush=True)
            jax.clear_caches()  # a process may have so many programs in memory and no more
    return rows


def batches(method: Method, classes: bool) -> Iterator[list[Setting]]:
    """The settings of a method, those that are trained together: of as many rounds, and DP-SGD's of one rate."""
    rounds, *others = (_CLASSES if classes else _NUMBERS)[method]
    settings = [Setting(t, *numbers) for t, numbers in product(rounds, product(*others))]
    for key in dict.fromkeys(_together(method, setting) for setting in settings):
        yield [setting for setting in settings if _together(method, setting) == key]


def _together(method: Method, setting: Setting) -> tuple[float, ...]:
    return (setting.rounds, setting.first) if method.release == "DP-SGD" else (setting.rounds,)


def load(path: Path, seed: int) -> Tasks:
    """Split, scale features within a task, append 1 as large as all features together, and scale rows to length 1."""
    file = np.load(path, allow_pickle=False)
    classes = set(np.unique(file["y"]).tolist()) <= {-1, 1}
    parts = private_school.split(file, seed, 0.5, 0.0, 1.0) if classes else private_school.split(file, seed)
    train, test = (mj.pack_tasks([_rows(x) for x in xs], ys) for xs, ys in (parts[:2], parts[2:]))
    return Tasks(train, test, classes)


def _rows(x: np.ndarray) -> np.ndarray:
    rows = np.c_[x / np.sqrt(x.shape[1]), np.ones(len(x))]
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def errors(tasks: Tasks, method: Method, wanted: list[tuple[Setting, float]], seed: int) -> list[float]:
    """Train one split with settings that go together, all at once."""
    if not wanted:
        return []
    if method.release in ("output", "objective"):
        return [published(tasks, method.release, *one, seed) for one in wanted]
    noise = [multiple(method.release, setting.rounds, epsilon) for setting, epsilon in wanted]
    each = zip(*(setting[1:] for setting, _ in wanted), strict=True)
    numbers = Numbers(*(jnp.asarray(column, tasks.train.dtype) for column in (*each, noise)))
    keys = jax.random.split(jax.random.key(seed), len(wanted))
    rounds = wanted[0][0].rounds
    if method.release == "DP-SGD":
        found = by_gradients(tasks, method.model, wanted[0][0].first, rounds, numbers, keys)
    else:
        found = by_duals(tasks.train, tasks.test, rounds, numbers, keys, method=method, classes=tasks.classes)
    return [float(error) for error in found]


@cache
def multiple(release: str, rounds: int, epsilon: float) -> float:
    """The noise, as a multiple of the limit, that so many rounds of a release need."""
    if np.isinf(epsilon):
        return 0.0
    if release == "path":
        rounds = 1
    batch = round(1000 * SHARE) if release in ("DP-SCD", "increments", "gradients") else None
    return mj.privacy.noise(epsilon, 1000, batch, rounds, delta=DELTA)


def published(tasks: Tasks, release: str, setting: Setting, epsilon: float, seed: int) -> float:
    """Solve, publish and judge; NaN where the budget is too small for the penalties."""
    given: Any = {"epsilon": epsilon, "delta": DELTA, "bound": 1.0, "gap": GAP, "key": jax.random.key(seed)}
    with jax.enable_x64(True):  # for the gap of an objective that is large with its linear term
        numbers = {name: np.asarray(getattr(tasks.train, name), float) for name in ("x", "y", "weight")}
        train = tasks.train.replace(**numbers)
        loss = mj.losses.Logistic() if tasks.classes else mj.losses.Huber(setting.clip)
        problem = mj.Problem(train, loss, mj.regularizers.MeanRegularized(setting.first, setting.second))
        if np.isinf(epsilon):
            weights = np.asarray(mj.solve(problem, tol=TOL).weights)
        elif release == "output":
            weights = mj.privacy.release(mj.solve(problem, tol=TOL), **given).weights
        else:
            try:
                weights = mj.privacy.objective_perturbation(problem, **given).weights
            except ValueError as error:
                if "curvatures" not in str(error):
                    raise
                return np.nan
    return float(judged(jnp.asarray(weights, tasks.test.dtype), tasks.test, tasks.classes))


def by_gradients(tasks: Tasks, model: str, rate: float, rounds: int, numbers: Numbers, keys: Array) -> Array:
    """Train by DP-SGD with one rate."""
    likelihood = mj.likelihoods.Categorical() if tasks.classes else mj.likelihoods.Gaussian()
    train = tasks.train.replace(y=0.5 * (tasks.train.y + 1.0)) if tasks.classes else tasks.train
    problem = mj.Prediction(train, likelihood)
    network, sgd = linear(train.num_features, tasks.classes), optax.sgd(rate)
    method: Any = mj.Local if model == "alone" else mj.personalized.mr_mtl
    algorithm = method(network, sgd, batch_size=None)

    def one(numbers: Numbers, key: Array) -> Array:
        own = algorithm.replace(privacy=mj.privacy.ExampleLevel(numbers.noise, rounds, numbers.clip))
        if model == "mean":
            own = own.replace(numbers={"strength": numbers.second})
        state, _ = mj.run(problem, own, key, num_rounds=rounds, record_every=rounds)
        weights = jax.tree.leaves(state.own)[0]  # they come first in what a client keeps
        return judged(weights[..., 0], tasks.test, tasks.classes)

    return jax.jit(jax.vmap(one))(numbers, keys)


@cache
def linear(features: int, classes: bool) -> mj.networks.Model:
    """A linear model that begins at 0; of two classes the first has the logit 0."""

    def predicted(weights: Array, x: Array) -> Array:
        z = x @ weights
        return jnp.concatenate([jnp.zeros_like(z), z], axis=-1) if classes else z

    return mj.networks.Model(lambda key: jnp.zeros((features, 1)), predicted)


@partial(jax.jit, static_argnames=("rounds", "method", "classes"))
def by_duals(
    train: mj.TaskData, test: mj.TaskData, rounds: int, numbers: Numbers, keys: Array, *, method: Method,
    classes: bool,
) -> Array:  # fmt: skip
    """Train by noisy sums of as many runs as there are keys."""
    return jax.vmap(lambda numbers, key: _by_sums(train, test, rounds, numbers, key, method, classes))(numbers, keys)


def _by_sums(
    train: mj.TaskData, test: mj.TaskData, rounds: int, numbers: Numbers, key: Array, method: Method,
    classes: bool,
) -> Array:  # fmt: skip
    x, y, real = train.x, train.y, train.weight > 0
    loss = mj.losses.Logistic() if classes else mj.losses.Squared()
    prior, nothing, none = regularizer(method.model, numbers, len(x)), jnp.zeros_like(y), jnp.zeros_like(x[:, 0])
    sizes = train.sizes.astype(x.dtype)
    caution = 1.0 if method.release == "anew" else CAUTION
    share = 1.0 if method.release in ("path", "anew") else SHARE

    def step(t: Array, state: State) -> State:
        of_batch, of_sum, of_alpha = jax.random.split(jax.random.fold_in(key, t), 3)
        batch = real & (jax.random.uniform(of_batch, y.shape, x.dtype) < share)
        coupling = prior.coupling(len(x), state.relation)
        kappa = caution * share * (coupling.row_sums(jnp.ones_like(sizes)) * sizes)[:, None]
        z = jnp.einsum("mnd,md->mn", x, state.weights)
        alpha, change, used, late = state.alpha, nothing, state.used, state.late
        spread = numbers.noise * numbers.clip * jax.random.normal(of_sum, none.shape, x.dtype)
        if method.release == "gradients":
            slopes = loss.dual_step(nothing, z, y, nothing)  # minus the derivatives
            told = _sums(x, jnp.where(batch, _cut(slopes, numbers.clip), 0.0)) + spread
            v = state.v + (told - share * state.v) / (1.0 + kappa)
        else:
            change = jnp.where(batch, loss.dual_step(alpha, z, y, jnp.broadcast_to(kappa, z.shape)) - alpha, 0.0)
        if method.release == "DP-SCD":
            change, root = _cut(change, numbers.clip), math.sqrt(2.0)
            noise = root * numbers.noise * numbers.clip * jax.random.normal(of_alpha, y.shape, x.dtype)
            v = state.v + _sums(x, change) + root * spread
            alpha = loss.project(alpha + jnp.where(batch, change + noise, 0.0), y)
        elif method.release in ("increments", "path"):
            limit = numbers.clip
            if method.release == "path":
                left = jnp.sqrt(jnp.maximum(limit**2 - used, 0.0))
                limit = jnp.minimum(left, 2.0 * limit / math.sqrt(rounds))
            change = _cut(change, limit)
            alpha, used, v = alpha + change, used + change**2, state.v + _sums(x, change) + spread
        elif method.release == "anew":
            alpha = _cut(alpha + change, numbers.clip)
            v = _sums(x, alpha) + spread
            late = late + jnp.where(t >= rounds // 2, v, 0.0)
        weights = coupling.apply(v)
        relation = state.relation
        if learned := prior.learned:
            relation = learned.update_relation(relation, weights, jnp.mean(jnp.sum(weights**2, axis=1)))
        return State(alpha, used, v, late, prior.coupling(len(x), relation).apply(v), relation)

    first = State(nothing, nothing, none, none, none, prior.known_relation("private_dual", None, *none.shape))
    last = lax.fori_loop(0, rounds, step, first)
    weights = last.weights
    if method.release == "anew":
        weights = prior.coupling(len(x), last.relation).apply(last.late / (rounds - rounds // 2))
    return judged(weights, test, classes)


def regularizer(model: str, numbers: Numbers, tasks: int) -> mj.regularizers.Regularizer:
    """The model; a learned covariance begins as tasks near their mean, with the same penalty of deviations."""
    if model == "alone":
        return mj.regularizers.Independent(numbers.first)
    if model == "mean":
        return mj.regularizers.MeanRegularized(numbers.first, numbers.second)
    return mj.regularizers.MeanCovariance(numbers.second, numbers.first / tasks)


def _cut(values: Array, limit: Array) -> Array:
    return jnp.clip(values, -limit, limit)


def _sums(x: Array, values: Array) -> Array:
    return jnp.einsum("mnd,mn->md", x, values)


def judged(weights: Array, test: mj.TaskData, classes: bool) -> Array:
    """The mean squared error of all samples, or one minus the mean AUC of the tasks."""
    if classes:
        return 1.0 - mj.metrics.auc(weights, test)
    squares = (jnp.einsum("mnd,md->mn", test.x, weights) - test.y) ** 2
    return jnp.sum(jnp.where(test.weight > 0, squares, 0.0)) / jnp.sum(jnp.where(test.weight > 0, 1.0, 0.0))


def crossed(rows: list[Row], tasks: str, method: str, epsilon: float) -> np.ndarray:
    """The error of every split with the setting that is the best on the others; of a single split the least."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if (row.tasks, row.method, row.epsilon) == (tasks, method, epsilon):
            found.setdefault(row.setting, []).append((row.seed, row.error))
    table = np.array([[error for _, error in sorted(pairs)] for pairs in found.values()])
    table = np.nan_to_num(table, nan=np.inf)
    splits = range(table.shape[1])
    others = [table[:, [k for k in splits if k != split] or [split]].mean(axis=1) for split in splits]
    return np.array([table[others[split].argmin(), split] for split in splits])


def report(rows: list[Row]) -> str:
    """Markdown: the mean over splits, and the standard error of its difference from the reference."""
    sets, epsilons = list(dict.fromkeys(row.tasks for row in rows)), sorted({row.epsilon for row in rows})
    columns = list(product(sets, epsilons))
    heads = [f"{tasks}, {_shown(epsilon)}" for tasks, epsilon in columns]
    lines = [f"| epsilon | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    for name in (name for name in METHODS if name in {row.method for row in rows}):
        cells = []
        for tasks, epsilon in columns:
            own, other = (crossed(rows, tasks, method, epsilon) for method in (name, REFERENCE))
            spread = f" ({np.std(own - other, ddof=1) / np.sqrt(len(own)):.4f})" if len(own) > 1 else ""
            cells.append(f"{own.mean():.4f}" + ("" if name == REFERENCE else spread))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(epsilon: float) -> str:
    return "no noise" if np.isinf(epsilon) else f"{epsilon:g}"


def draw(rows: list[Row]) -> Figure:
    """The error over epsilon, a panel for each set of tasks: a colour for what is published, a style for the model."""
    sets, epsilons = list(dict.fromkeys(row.tasks for row in rows)), sorted({row.epsilon for row in rows})
    figure = Figure(figsize=(4.8 * len(sets), 4.2), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(sets)))
    releases = dict.fromkeys(method.release for method in METHODS.values())
    colours = dict(zip(releases, (*plotting.COLOURS, "black", "gray"), strict=False))
    for axes, tasks in zip(panels, sets, strict=True):
        for name, method in ((name, METHODS[name]) for name in METHODS if name in {row.method for row in rows}):
            curve = [crossed(rows, tasks, name, epsilon).mean() for epsilon in epsilons]
            axes.plot(curve, f"o{STYLES[method.model]}", color=colours[method.release], ms=4, label=name)
        axes.set_xticks(range(len(epsilons)), [_shown(epsilon) for epsilon in epsilons])
        axes.set_xlabel(f"epsilon of every task, {tasks}")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("mean squared error, or 1 - AUC")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    main()
