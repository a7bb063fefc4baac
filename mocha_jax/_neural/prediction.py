"""The problem of networks: labels predicted from samples, judged on held-out ones."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Pytree
from mocha_jax._data.task_data import TaskData
from mocha_jax._model.base import HowTrained
from mocha_jax._model.network import NetworkModel
from mocha_jax._model.parameters import named, owned, rows
from mocha_jax._numerics.math import in_blocks, nodes_of, safe_ratio
from mocha_jax._problem.problem import Federated, Quality
from mocha_jax._problem.to_model import how_trained
from mocha_jax.likelihoods import Categorical, Likelihood, Positions
from mocha_jax.networks import Network, Params

# Samples that are predicted at once, of a node and of all: a network's activations of all may not fit into memory.
ROWS, _AT_ONCE = 512, 2048


class Prediction(Federated):
    r"""Learn to predict labels: minimise $-\sum_k\sum_i c_{ki} \log p(y_{ki} \mid x_{ki})$ over networks.

    The problem of `FedAvg`, `Local` and `Virtual`. ``solve(..., tol=0.03)`` stops when the error on the held-out
    samples is at most 3 %, the mean over tasks. A solve has no derivative with respect to the problem.

    Args:
      data: training samples, from `pack_tasks`.
      likelihood: from `mocha_jax.likelihoods`; default `Categorical`, labels 0, 1, ...
      test: held-out samples of the same tasks, each judged by the network of the client that works on it; or of one
        task, judged by all of them, on average. Default the training samples.
    """

    likelihood: Likelihood = Categorical()
    test: TaskData | None = None

    solvers = "FedAvg, Local, Virtual and the methods of mj.personalized"

    def __post_init__(self) -> None:
        check.instance("Prediction", "data", self.data, TaskData, "pack_tasks(xs, ys)")
        check.instance("Prediction", "likelihood", self.likelihood, Likelihood, "likelihoods.Categorical()")
        object.__setattr__(self, "likelihood", jax.tree.map(lambda a: jnp.asarray(a, self.data.dtype), self.likelihood))
        if self.test is not None:
            check.instance("Prediction", "test", self.test, TaskData, "data.split(key, 0.75)[1]")
            if self.test.num_features != self.data.num_features:
                raise ValueError(
                    f"Prediction: test samples have {self.test.num_features} features, training samples "
                    f"{self.data.num_features}."
                )

        for name, data in (("data", self.data), ("test", self.test)):
            if data is not None and (y := real_labels(data, self.likelihood)) is not None:
                if not len(y):
                    raise ValueError(f"Prediction: {name} has no samples (of weight > 0).")
                self.likelihood.check_labels("Prediction", y)

    @property
    def criterion_name(self) -> str:
        return "error"

    @property
    def objective_name(self) -> str:
        return "loss"

    def remarks(self, quality: Evaluation) -> str:
        lost, exhausted = int(quality.diverged), int(quality.exhausted)
        text = f"; {lost} update(s) of clients were not finite and were left out" if lost else ""
        return text + (f"; {exhausted} client(s) have spent their budget of privacy" if exhausted else "")

    @property
    def judged_on(self) -> TaskData:
        """The held-out samples, or the training samples without any."""
        return self.data if self.test is None else self.test

    def seen(self, samples: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes of what a network sees of so many samples, and of their labels."""
        check.integer("Prediction.seen", 1, samples=samples)
        dtype, d = self.data.dtype, self.data.num_features
        rows = jax.ShapeDtypeStruct((int(samples), d), dtype), jax.ShapeDtypeStruct((int(samples),), dtype)
        return jax.eval_shape(self.likelihood.parts, *rows)

    def network_model(self, network: Network, parameters: Params, trained: HowTrained) -> NetworkModel:
        """The model of trained parameters, with the names of the data.

        Args:
          network: whose parameters they are.
          parameters: as `NetworkModel` has them, of all clients.
          trained: what else to say of the training.
        """
        data, sequences = self.data, isinstance(self.likelihood, Positions)
        if any(owned(network, parameters)):
            if data.shared:
                raise ValueError(
                    "model: several clients share a task and have networks of their own, so that which of them is to "
                    "predict its samples is open; give every client a task."
                )
            parameters = rows(parameters, owned(network, parameters), slice(data.num_tasks))  # others hold no data
        names = data.names.replace(
            features=None if sequences else data.names.features,
            classes=data.names.classes if self.likelihood.classes else None,
        )
        return NetworkModel(
            network, parameters, data.num_slopes if not sequences else self.seen(1)[0].shape[1], self.likelihood, names,
            0.0 if sequences else data.intercept, data.scaling,
            {**how_trained(None, None, likelihood=self.likelihood), "network": named(network), **trained},
        )  # fmt: skip

    def merged(self) -> Prediction:
        """The problem with all training samples on one client, for a centralised baseline."""
        return self.replace(data=self.data.merged())


class Evaluation(Quality):
    """The quality of networks; ``residual`` is the error on held-out samples, mean over tasks."""

    # [] mean over the training of the last round, each batch before its step; of all that was minimised, proximal
    # terms and divergences too; infinite before any
    loss: Array
    test_loss: Array  # [] mean over held-out labels of a task, then over tasks
    error: Array  # [] the same of errors: share of wrong classes, or mean squared error
    sample_error: Array  # [] mean of errors over all held-out labels: a task counts by how many it has
    diverged: Array  # [] int32 updates left out so far because they were not finite
    alive: Array  # [] bool false where as many trainings in a row as there are clients were not finite
    exhausted: Array  # [] int32 clients whose privacy allows them no more steps

    @property
    def finite(self) -> Array:
        return jnp.asarray(self.alive)


class Scores(Pytree):
    """Loss and error of every task, ``[num_tasks]``; NaN without samples."""

    loss: Array
    error: Array
    samples: Array  # how many labels: one a sample, where a likelihood does not say otherwise

    def mean(self, values: Array) -> Array:
        """Over tasks with samples, all alike; NaN without any."""
        return self._averaged(values, (self.samples > 0).astype(values.dtype))

    def mean_over_samples(self, values: Array) -> Array:
        """Over tasks, each by the number of its samples; NaN without any."""
        return self._averaged(values, self.samples)

    def _averaged(self, values: Array, weight: Array) -> Array:
        total = jnp.sum(weight)
        return jnp.where(total > 0, safe_ratio(jnp.sum(jnp.where(weight > 0, weight * values, 0.0)), total), jnp.nan)


Judge = Callable[[Array, Array, Array], tuple[Array, Array]]


def score(data: TaskData, likelihood: Likelihood, judge: Judge, whose: Array | None, clients: Array) -> Scores:
    """Mean loss and error of the labels of every task.

    Args:
      data: samples to predict.
      likelihood: of their labels.
      judge: ``judge(client, x, y)``, the losses and errors ``[b]`` of samples by a client's network: of what it sees
        of them and their labels, as `likelihood` has them.
      whose: ``[m]`` int32 the client whose network predicts a node's samples; None: all of them, on average.
      clients: ``[k]`` which clients have data.
    """
    m, n = data.y.shape
    rows = min(n, ROWS)
    more = -n % rows

    def one(samples: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array]:
        client, x, y, weight = samples

        def some(part: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            x, y, weight = part
            x, y = likelihood.parts(x.astype(y.dtype), y)
            count = jnp.where(weight > 0, likelihood.count(y), 0)
            if whose is None:
                everyone = lax.map(lambda c: judge(c, x, y), jnp.arange(len(clients), dtype=jnp.int32))
                share = clients.astype(y.dtype) / jnp.maximum(jnp.sum(clients, dtype=y.dtype), 1.0)
                predictions = tuple(jnp.einsum("k,kb->b", share, jnp.where(clients[:, None], a, 0.0)) for a in everyone)
            else:
                predictions = judge(client, x, y)
            loss, error = (jnp.sum(jnp.where(count > 0, count.astype(a.dtype) * a, 0.0)) for a in predictions)
            return loss, error, jnp.sum(count, dtype=jnp.int32)

        parts = tuple(
            jnp.pad(a, [(0, more)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, rows, *a.shape[1:]) for a in (x, y, weight)
        )
        loss, error, count = lax.map(some, parts)
        return jnp.sum(loss), jnp.sum(error), jnp.sum(count, dtype=jnp.int32)

    client = jnp.zeros(m, jnp.int32) if whose is None else whose
    samples = client, data.x, data.y, data.weight

    def nodes(first: Array | int, width: int) -> tuple[Array, Array, Array]:
        return jax.vmap(one)(jax.tree.map(lambda a: nodes_of(a, first, width), samples))

    loss, error, count = in_blocks(nodes, m, rows, _AT_ONCE)
    loss, error, number = (data.to_tasks(a) for a in (loss, error, count.astype(data.dtype)))
    loss, error = (jnp.where(number > 0, safe_ratio(a, number), jnp.nan) for a in (loss, error))
    return Scores(loss, error, number)


def own_network(problem: Prediction) -> Array | None:
    """Return the client whose network scores each judged node; None averages over all clients."""
    data, test = problem.data, problem.judged_on
    if data.num_tasks == 1 and not data.shared:  # there is but one
        return jnp.zeros(test.num_nodes, jnp.int32)
    if problem.test is None:
        return jnp.arange(data.num_nodes, dtype=jnp.int32)
    if test.num_tasks == 1:
        return None
    if data.shared:
        raise ValueError(
            "Prediction: several clients share a task and have networks of their own, so that which of them is to "
            "predict its held-out samples is open; leave test out, or give every client a task."
        )
    if test.num_tasks != data.num_tasks:
        raise ValueError(
            f"Prediction: every client has its own network, so that held-out samples must be of their tasks: test has "
            f"{test.num_tasks} tasks, and {data.num_nodes} clients work on {data.num_tasks}."
        )
    return test.task


def evaluation(scores: Scores, loss: Array, diverged: Array, alive: Array, exhausted: Array) -> Evaluation:
    """The means over tasks and over samples, and the training loss."""
    error, of_samples = scores.mean(scores.error), scores.mean_over_samples(scores.error)
    return Evaluation(error, loss, scores.mean(scores.loss), error, of_samples, diverged, alive, exhausted)


@on_purpose
def real_labels(data: TaskData, likelihood: Likelihood) -> np.ndarray | None:
    """Return the labels of all samples; None where they are traced."""
    y, weight = check.concrete(likelihood.parts(data.x, data.y)[1]), check.concrete(data.weight)
    return None if y is None or weight is None else y[weight > 0]


class Predicted(Pytree):
    """An average over draws of the networks, and how far they disagree."""

    mean: Array  # [b, c] probabilities of classes, or means of real labels
    std: Array  # [b, c] their standard deviation over draws: what more data would settle
    entropy: Array  # [b] of the averaged probabilities: the total uncertainty; NaN for real labels
    mutual_information: Array  # [b] the part of it that the networks' disagreement makes, >= 0; NaN for real labels

    @classmethod
    def of(cls, likelihood: Likelihood, values: Array) -> Predicted:
        """Summarise what every draw predicts, ``[draws, b, c]``."""
        mean, std = jnp.mean(values, axis=0), jnp.std(values, axis=0)
        if not likelihood.classes:
            nothing = jnp.full(mean.shape[:-1], jnp.nan, mean.dtype)
            return cls(mean, std, nothing, nothing)
        entropy = _entropy(mean)
        return cls(mean, std, entropy, jnp.maximum(entropy - jnp.mean(_entropy(values), axis=0), 0.0))


def _entropy(probabilities: Array) -> Array:
    return -jnp.sum(
        jnp.where(probabilities > 0, probabilities * jnp.log(jnp.maximum(probabilities, 1e-30)), 0.0), axis=-1
    )
