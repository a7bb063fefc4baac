"""Models that were saved by an earlier version, of JAX and of this library, predict what they did.

The files lie in ``saved``, and what their models predicted when they were trained with them. They are never trained
anew, and from the first release on not written anew either: a version that cannot read them must not be released. One
of a new kind joins by a line in MODELS and ``python -m tests.model.test_saved NAME``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import mocha_jax as mj

PLACE = Path(__file__).parent / "saved"
NAMES = ("fir", "ash", "oak")


def samples(dtype="float32"):
    """Samples of three tasks, and the classes of each."""
    rng = np.random.default_rng(0)
    xs = {name: rng.normal(size=(12, 3)).astype(dtype) * [1.0, 3.0, 0.5] + 1.0 for name in NAMES}
    return xs, {name: np.where(x[:, 0] > 1.5, "many", np.where(x[:, 1] > 1.0, "some", "few")) for name, x in xs.items()}


def linear():
    xs, ys = samples("float64")
    two = {name: np.where(y == "few", "few", "many") for name, y in ys.items()}
    data = mj.pack_tasks(xs, two, loss_scaling="task_mean", intercept=True, dtype="float64").standardized("pooled")
    return mj.solve(mj.Problem(data, mj.losses.Logistic(), mj.regularizers.Probabilistic(0.05)), tol=1e-3).model


def multiclass():
    xs, ys = samples()
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean", intercept=True, dtype="float32")

    def problem(one):
        return mj.Problem(one, mj.losses.Logistic(), mj.regularizers.Probabilistic(0.05))

    return mj.one_vs_rest(data, problem, tol=1e-2).model


def trained(make, network, **more):
    xs, ys = samples()
    problem = mj.Prediction(mj.pack_tasks(xs, ys, dtype="float32").standardized("pooled"))
    return mj.solve(problem, make(network, optax.adam(0.05), **more), tol=None, max_rounds=10).model


MODELS = {
    "linear": linear,
    "multiclass": multiclass,
    "fedavg": lambda: trained(mj.FedAvg, mj.networks.MLP(3, 3, (4,))),
    "local": lambda: trained(mj.Local, mj.networks.MLP(3, 3, (4,))),
    "virtual": lambda: trained(mj.Virtual, mj.networks.Lateral(3, 3, (4,)), samples=1),
}


def predicted(model):
    """Probabilities and labels of the first samples of every task, in plain lists."""
    xs, _ = samples("float64")
    x, who = np.concatenate([xs[name][:3] for name in NAMES]), np.repeat(NAMES, 3)
    found: dict[str, Any] = {
        "probabilities": model.predict_proba(x, who).astype(float).tolist(), "labels": model.predict(x, who).tolist(),
        "of a new task": model.predict_proba(x[:2], "yew", unseen="mean").astype(float).tolist(),
        "tasks": list(model.tasks), "classes": list(model.names.classes), "trained": dict(model.trained),
    }  # fmt: skip
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_an_earlier_version_predicts_what_it_did(name):
    then = json.loads((PLACE / f"{name}.json").read_text())
    now = predicted(mj.load_model(PLACE / f"{name}.npz"))
    for what in ("probabilities", "of a new task"):
        np.testing.assert_allclose(now.pop(what), then.pop(what), rtol=1e-5, atol=1e-7)
    del then["jax"]
    assert now == then


def test_files_are_small():
    assert {path.suffix for path in PLACE.iterdir()} == {".npz", ".json"}
    assert sum(path.stat().st_size for path in PLACE.iterdir()) < 50_000


if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for name in sys.argv[1:]:
        model = MODELS[name]()
        model.save(PLACE / f"{name}.npz")
        (PLACE / f"{name}.json").write_text(json.dumps({"jax": jax.__version__, **predicted(model)}, indent=1) + "\n")
