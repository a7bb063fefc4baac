"""Predictions by weights, and weights for other data: all that linear models share."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from mocha_jax._data.task_data import TaskData
from mocha_jax._model.named import NamedModel, matched


class WeightsModel(NamedModel):
    """Base class of models with weights of every task, ``[..., num_tasks, d]``."""

    weights: np.ndarray
    intercept: np.ndarray  # [..., num_tasks]

    @property
    def num_tasks(self) -> int:
        """The number of tasks; 1 of a global model."""
        return self.weights.shape[-2]

    @property
    def num_features(self) -> int:  # type: ignore[override]
        """Length of a sample, without the intercept."""
        return self.weights.shape[-1]

    def weights_for(self, data: TaskData) -> np.ndarray:
        """The weights of the tasks of a data set, found by their names ``[..., tasks of the data, d + intercept]``."""
        order, columns = matched(self.names, self.num_tasks, self.weights.shape[-1], data)
        found, intercept = self.weights[..., order, :][..., columns], self.intercept[..., order]
        if data.scaling is not None:
            found, intercept = data.scaling.of_raw(found, intercept)
        if np.any(intercept) and not data.intercept:
            raise ValueError("model: it has an intercept, and the data was packed without one; pass intercept=True.")
        return np.concatenate([found, intercept[..., None] / data.intercept], axis=-1) if data.intercept else found

    def _scored(self, x: ArrayLike, task: object, unseen: str) -> tuple[np.ndarray, np.ndarray]:
        """Predictions ``[..., k]``, and the task of each sample; -1 of one that is new."""
        samples, where = self._asked(x, task, unseen)
        samples = samples.astype(self.weights.dtype)
        weights, intercept = self.weights, self.intercept
        if (where < 0).any():
            weights = np.concatenate([weights, weights.mean(axis=-2, keepdims=True)], axis=-2)
            intercept = np.concatenate([intercept, intercept.mean(axis=-1, keepdims=True)], axis=-1)
        z = [np.einsum("kd,kd->k", samples, each[where]) for each in weights.reshape(-1, *weights.shape[-2:])]
        return np.reshape(z, (*weights.shape[:-2], len(samples))) + intercept[..., where], where
