"""A model of several classes predicts by name what the weights say, and comes back from its file."""

import json
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from scipy.special import expit

import mocha_jax as mj
from tests.multiclass.problems import CLASSES, NAMES, hinge, logistic, named

DATA, TABLE, LABELS, GROUPS = named()


@cache
def found():
    return mj.one_vs_rest(DATA, logistic)


def test_predictions_are_those_of_the_tasks_by_name():
    model = found().model
    x, who = TABLE[::7], GROUPS[::7]
    w = np.asarray(found().weights)
    tasks = [DATA.names.tasks.index(name) for name in who]
    z = np.array([w[:, t] @ np.r_[row, 1.0] for row, t in zip(np.asarray(x), tasks, strict=True)])
    np.testing.assert_allclose(model.decision_function(x, who), z, rtol=1e-9)
    assert model.predict(x, who).tolist() == [CLASSES[k] for k in z.argmax(1)]
    p = expit(z) / expit(z).sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(x, who), p, rtol=1e-9)
    assert model.predict(x[list("edcba")], who).tolist() == model.predict(x, who).tolist()
    new = np.c_[np.asarray(x), np.ones(len(x))] @ w.mean(axis=1).T
    np.testing.assert_allclose(model.decision_function(x, "yew", unseen="mean"), new, rtol=1e-9)
    assert repr(model).startswith("MulticlassModel(4 classes, 3 tasks, 5 features, each class against the rest")


def test_probabilities_of_values_that_are_far_out():
    model = mj.MulticlassModel(np.array([[[1e3]], [[2e3]], [[-1e3]]]), np.zeros((3, 1)), logistic=True)
    p = model.predict_proba([[1.0], [-1.0], [0.0]])
    np.testing.assert_allclose(p, [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3]], atol=1e-12)
    same = model.predict_proba([[-30.0]])
    assert np.isfinite(same).all()
    assert mj.MulticlassModel(np.ones((2, 1, 1)), np.zeros((2, 1))).predict([[1.0]]).tolist() == [0]


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_file_gives_the_model_back(calibrated, tmp_path):
    solution = (
        found().replace(calibration=np.array([[2.0, 0.1], [1.0, 0.0], [1.5, -0.3], [1.0, 1.0]]))
        if calibrated
        else found()
    )
    model, path = solution.model, tmp_path / "model.npz"
    model.save(path)
    again = mj.load_model(path)
    assert isinstance(again, mj.MulticlassModel)
    for ask in ("predict", "decision_function", "predict_proba"):
        np.testing.assert_array_equal(getattr(again, ask)(TABLE, GROUPS), getattr(model, ask)(TABLE, GROUPS))
    assert again.names == model.names
    assert again.trained == dict(model.trained)
    assert repr(again) == repr(model)
    about = json.loads(np.load(path)["about.json"])
    assert about["model"] == "one_vs_rest"
    assert {"loss", "regularizer", "message", "relative_gap"} <= set(about["trained"])
    if calibrated:
        z = model.decision_function(TABLE, GROUPS)
        p = expit(z * model.calibration[:, 0] + model.calibration[:, 1])
        np.testing.assert_allclose(model.predict_proba(TABLE, GROUPS), p / p.sum(1, keepdims=True), rtol=1e-9)


def test_numpy_alone_reads_a_file(tmp_path):
    found().model.save(tmp_path / "model.npz")
    program = """
import json, sys
import numpy as np
file = np.load(sys.argv[1], allow_pickle=False)
about = json.loads(file["about.json"])
t = about["tasks"].index("oak")
says = file["weights"][:, t] @ np.arange(5.0) + file["intercept"][:, t]
print(about["classes"][says.argmax()])
assert "jax" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model.npz")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == found().model.predict([np.arange(5.0)], "oak")[0]


def test_nothing_of_the_samples_is_in_it():
    arrays = {k: np.shape(v) for k, v in vars(found().model).items() if isinstance(v, np.ndarray)}
    assert arrays == {"weights": (4, 3, 5), "intercept": (4, 3)}
    held = [np.shape(leaf) for leaf in vars(found()).values() if hasattr(leaf, "shape")]
    assert (3, *DATA.y.shape) not in held


def test_metrics_of_several_classes_take_a_model():
    model = found().model
    np.testing.assert_allclose(mj.multiclass.error_rate(model, DATA), found().error_rate(DATA))
    np.testing.assert_allclose(mj.multiclass.log_loss(model, DATA), mj.multiclass.log_loss(found(), DATA))
    right = np.mean([(model.predict(TABLE[n == GROUPS], n) == LABELS[n == GROUPS]).mean() for n in NAMES])
    np.testing.assert_allclose(1 - found().error_rate(DATA), right)


BAD = {
    "task": (lambda m: m.predict(TABLE), "say whose samples they are: task is one of 'ash', 'fir', 'oak'"),
    "unknown": (lambda m: m.predict(TABLE, "larch"), "task 'larch' is not among the 3 that are known"),
    "column": (lambda m: m.predict(TABLE[["a", "b"]], "oak"), "lacks features 'c', 'd', 'e'"),
    "intercept": (lambda m: mj.MulticlassModel(np.ones((2, 3, 1)), np.zeros(2)), r"intercept must be an array"),
    "shapes": (lambda m: mj.MulticlassModel(np.ones((2, 3, 1)), np.zeros((3, 2))), r"intercept must be \[2, 3\] numbers"),
    "classes": (
        lambda m: mj.MulticlassModel(np.ones((2, 3, 1)), np.zeros((2, 3)), mj.Names(classes=("a",))),
        "names has 1 classes, but weights are of 2",
    ),
    "method": (lambda m: mj.MulticlassModel(np.ones((2, 3, 1)), np.zeros((2, 3)), method="softmax"), "method must be one of"),
    "probabilities": (lambda m: mj.one_vs_rest(DATA, hinge).model.predict_proba(TABLE, GROUPS), "have no probabilities"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.slow
def test_bad_input_is_named(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make(found().model)
