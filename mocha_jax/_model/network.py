"""A network for every task, or one for all, that predicts by name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from mocha_jax import likelihoods, networks
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.moments import Scaling
from mocha_jax._data.names import NAMELESS, Names
from mocha_jax._model.base import HowTrained, NamedModel
from mocha_jax._model.file import described, write
from mocha_jax._model.parameters import by_path, checked_parameters, owned, rows
from mocha_jax.likelihoods import Categorical, Likelihood, Positions
from mocha_jax.networks import Network, Params
from mocha_jax.networks._base import outputs

# Samples that are predicted at once: a network's activations of all of them may not fit into memory.
_ROWS = 512


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NetworkModel(NamedModel):
    r"""A network with its parameters, and the names of tasks, features and classes; from ``solution.model``.

    It holds NumPy arrays and plain values, and none of the samples that it was trained on. To predict it needs JAX,
    and on the same machine it predicts the same to the bit.

    Of `FedAvg` it has one network for all tasks, of `Local` one for each, of `Virtual` what is shared and each task's
    own part, both at the means of the posterior. Averages over draws, which know how sure they are, are those of
    `Virtual.predict`.

    Args:
      network: from `mocha_jax.networks`.
      parameters: as ``network.init`` makes them; an array may have an axis of tasks before its own,
        ``[num_tasks, ...]``, and is then each task's own.
      num_features: d, length of a sample, without the intercept; of a sequence the inputs T.
      likelihood: of the labels, from `mocha_jax.likelihoods`.
      names: of tasks, features and classes, as far as there are some.
      appended: the constant that samples have for an intercept, after their features; 0 for none.
      scaling: what was taken from samples and labels in training, as ``data.scaling`` has it.
      trained: how, and how well: texts and numbers.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> local = mj.Local(mj.networks.MLP(5, 2, (8,)), optax.adam(1e-2))
      >>> model = mj.solve(problem, local, tol=None, max_rounds=3).model
      >>> model.predict(data.x[2, :3], task=2).shape, model.predict_proba(data.x[2, :3], task=2).shape
      ((3,), (3, 2))
    """

    network: Network
    parameters: Params
    num_features: int
    likelihood: Likelihood = Categorical()
    names: Names = NAMELESS
    appended: float = 0.0
    scaling: Scaling | None = None
    trained: HowTrained = dataclasses.field(default_factory=dict)

    @on_purpose
    def __post_init__(self) -> None:
        owner = "NetworkModel"
        check.instance(owner, "network", self.network, Network, "networks.MLP(784, 10, (200, 200))")
        parameters, tasks = checked_parameters(owner, self.network, self.parameters)
        object.__setattr__(self, "parameters", parameters)
        check.integer(owner, 1, num_features=self.num_features)
        check.instance(owner, "likelihood", self.likelihood, Likelihood, "likelihoods.Categorical()")
        check.instance(owner, "names", self.names, Names, "that of pack_tasks(...)")
        check.scalar(owner, appended=self.appended)
        check.nonnegative(owner, appended=self.appended)
        if self.scaling is not None:
            check.instance(owner, "scaling", self.scaling, Scaling, "that of data.standardized()")
        check.instance(owner, "trained", self.trained, Mapping, "{}")
        self._check_counts(owner, tasks)

    def _check_counts(self, owner: str, tasks: int | None) -> None:
        counts = {"parameters": tasks, "names": None if self.names.tasks is None else len(self.names.tasks)}
        if self.scaling is not None:
            if isinstance(self.likelihood, Positions) or self.scaling.mean.shape[1] != self.num_features:
                raise ValueError(f"{owner}: scaling must be of the {self.num_features} features of a sample.")
            if not len(self.scaling.mean):
                raise self.scaling.lost()
            counts["scaling"] = len(self.scaling.mean) if len(self.scaling.mean) > 1 else None
        known_counts = {name: count for name, count in counts.items() if count is not None}
        if len(set(known_counts.values())) > 1:
            shown = ", ".join(f"{name} {count}" for name, count in known_counts.items())
            raise ValueError(f"{owner}: all must be of the same tasks, but there are of {shown}.")
        object.__setattr__(self, "_tasks", next(iter(known_counts.values()), 1))
        features = self.names.features
        if features is not None and len(features) != self.num_features:
            raise ValueError(f"{owner}: names has {len(features)} features, and a sample {self.num_features}.")
        width = self._tried(owner)
        if self.likelihood.classes and self.names.classes is not None and len(self.names.classes) != width:
            raise ValueError(
                f"{owner}: names has {len(self.names.classes)} classes, and the network {width} outputs; give it one "
                f"for each class."
            )

    def _tried(self, owner: str) -> int:
        """Count the outputs for a label."""
        one = rows(self.parameters, self._own, 0)
        x = jax.ShapeDtypeStruct((2, self.num_features + bool(self.appended)), self.dtype)
        try:
            with jax.enable_x64(self.dtype == np.float64):
                shape = jax.eval_shape(lambda p, x: outputs(self.network, p, x, self._labels(x)), one, x)
        except (TypeError, ValueError, AttributeError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{owner}: the network {type(self.network).__name__} cannot predict samples of "
                f"{x.shape[1]} features, as num_features and appended have it: {reason}"
            ) from error
        self.likelihood.check_outputs(f"{owner}: likelihood", shape.shape[-1], None)
        return int(shape.shape[-1])

    @cached_property
    def _own(self) -> tuple[bool, ...]:
        """Tell of every array of the parameters whether it has a row for each task."""
        return owned(self.network, self.parameters)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of all arithmetic."""
        return jax.tree.leaves(self.parameters)[0].dtype

    @property
    def num_tasks(self) -> int:
        """The number of tasks; 1 of a global model without names."""
        return int(vars(self)["_tasks"])

    @property
    def personal(self) -> bool:
        """Tell whether tasks differ: in parameters, or in what was taken from their samples."""
        return any(self._own) or (self.scaling is not None and len(self.scaling.mean) > 1)

    @property
    def _for_everybody(self) -> bool:
        return not self.personal or super()._for_everybody

    def predict(self, x: ArrayLike, task: object = None, *, unseen: str = "error") -> np.ndarray:
        """Predict labels ``[k]``: numbers, or classes, by name if they have names; for sequences ``[k, T]``.

        Args:
          x: samples ``[k, d]`` without the intercept, or a data frame with the features among its columns, in any order
            and of the types that `pack_tasks` takes.
          task: whose samples they are: the name of a task, one name a sample, or the name of the frame's column that
            has them (a task of that name comes first); of one network for all left out.
          unseen: what to do for a task that was not there in training: ``"error"``, or ``"mean"``, the mean of what the
            networks of all tasks predict: numbers, or probabilities. One network for all predicts samples of any task.
        """
        predicted = self._predictive(x, task, unseen)
        if self.likelihood.classes:
            best = np.argmax(predicted, axis=-1)
            return best if self.names.classes is None else np.asarray(self.names.classes)[best]
        return predicted[..., 0] if predicted.shape[-1] == 1 else predicted

    def predict_proba(self, x: ArrayLike, task: object = None, *, unseen: str = "error") -> np.ndarray:
        """The probabilities of all classes ``[k, classes]``; arguments as `predict`."""
        if not self.likelihood.classes:
            raise ValueError(
                f"predict_proba: the labels of a {type(self.likelihood).__name__} likelihood are numbers, which have "
                f"no probabilities; train with likelihoods.Categorical()."
            )
        return self._predictive(x, task, unseen)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save to one file of NumPy arrays and JSON, to be read by `load_model`.

        A network of `mocha_jax.networks` is described by its name and its settings. Of one that you wrote the file has
        the parameters alone, and `load_model` must be given the network.
        """
        arrays = {f"parameters/{name}": array for name, array in by_path(self.parameters).items()}
        if self.scaling is not None:
            arrays |= {f"scaling/{name}": array for name, array in self.scaling.moments._asdict().items()}
        own = {"class": type(self.network).__name__, "own": True}
        write(path, "network", arrays, {
            "tasks": self.names.tasks, "features": self.names.features, "classes": self.names.classes,
            "network": described(self.network, networks) or own,
            "likelihood": described(self.likelihood, likelihoods) or {**own, "class": type(self.likelihood).__name__},
            "num_features": self.num_features, "appended": float(self.appended),
            "scaled": None if self.scaling is None else self.scaling.by, "trained": dict(self.trained),
        })  # fmt: skip

    @on_purpose
    def _predictive(self, x: ArrayLike, task: object, unseen: str) -> np.ndarray:
        """Probabilities, or means of labels, ``[k, ..., c]``."""
        samples, tasks = self._asked(x, task, unseen)
        if not len(tasks):
            return self._of_task(0, np.zeros((1, self.num_features)))[:0]
        if not self.personal:
            return self._of_task(0, samples)
        predicted: np.ndarray | None = None
        for t in np.unique(tasks):
            some = samples[tasks == t]
            whose = range(self.num_tasks) if t < 0 else [int(t)]
            part = np.asarray(sum(self._of_task(i, some) for i in whose) / len(whose))
            predicted = np.empty((len(tasks), *part.shape[1:]), part.dtype) if predicted is None else predicted
            predicted[tasks == t] = part
        assert predicted is not None
        return predicted

    def _of_task(self, task: int, samples: np.ndarray) -> np.ndarray:
        """Predict samples by the network of a task."""
        moments = None if self.scaling is None else self.scaling.rows(np.array([task]))
        if moments is not None:
            samples = (samples - moments.mean[0]) / moments.scale[0]
        samples = samples.astype(self.dtype)
        if self.appended:
            samples = np.concatenate([samples, np.full((len(samples), 1), self.appended, self.dtype)], axis=1)
        params = rows(self.parameters, self._own, task)
        parts = [self._of_rows(params, samples[i : i + _ROWS]) for i in range(0, len(samples), _ROWS)]
        predicted = np.concatenate(parts)
        return predicted if moments is None else predicted + moments.level[0].astype(self.dtype)

    def _of_rows(self, params: Params, samples: np.ndarray) -> np.ndarray:
        # Padded to a power of two: of tasks with all sorts of sizes a few programs are compiled.
        padded = np.pad(samples, [(0, (1 << (len(samples) - 1).bit_length()) - len(samples)), (0, 0)])
        with jax.enable_x64(self.dtype == np.float64):  # else a new process rounds to single precision
            predicted = _predicted(self.network, self.likelihood, params, jnp.asarray(padded), self._labels(padded))
            return np.asarray(predicted)[: len(samples)]

    def _labels(self, x: Array | np.ndarray | jax.ShapeDtypeStruct) -> tuple[int, ...]:
        """The shape of the labels of samples."""
        return tuple(x.shape) if isinstance(self.likelihood, Positions) else (len(x),)

    def _size(self) -> str:
        which = "of their own" if any(self._own) else "one for all"
        return f"{type(self.network).__name__}, {super()._size()}, {which}"


@partial(jax.jit, static_argnums=4)
def _predicted(network: Network, likelihood: Likelihood, params: Params, x: Array, labels: tuple[int, ...]) -> Array:
    return likelihood.predictive(outputs(network, params, x, labels))
