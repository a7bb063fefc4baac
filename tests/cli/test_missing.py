"""Numbers that are missing become medians, of the rows that a model is trained on."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Ridge

import mocha_jax as mj
from mocha_jax.cli import _fit, main

SIZES = {"ash": 20, "elm": 12, "oak": 28}


def samples():
    """Samples of three groups, a third of whose numbers are missing, and the mask of those."""
    rng = np.random.default_rng(0)
    who, x = np.repeat(list(SIZES), list(SIZES.values())), rng.normal(size=(60, 3)) + 5.0
    return x, x @ [1.0, -2.0, 0.5] + rng.normal(size=60), who, rng.random((60, 3)) < 0.3


def test_medians_are_of_samples_for_training_alone():
    x, y, who, mask = samples()
    data = mj.pack_tasks(np.where(mask, 0.0, x), y, who, loss_scaling="task_mean", intercept=True)
    absent = np.asarray(mj.pack_tasks(mask.astype(float), y, who).x) > 0
    rows = np.asarray(data.weight > 0) & (np.random.default_rng(1).random(data.y.shape) < 0.7)
    training, held_out = data.keep(jnp.asarray(rows)), data.keep(jnp.asarray(~rows & np.asarray(data.weight > 0)))
    known = np.where(absent, np.nan, np.asarray(data.x[..., :3]))
    imputer = SimpleImputer(strategy="median").fit(known[rows])
    apply = _fit._Preparation("none", True, absent)(training)
    for part in (training, held_out):
        real = np.asarray(part.weight > 0)
        np.testing.assert_allclose(np.asarray(apply(part).x[..., :3])[real], imputer.transform(known[real]))
        np.testing.assert_array_equal(apply(part).x[..., 3], part.x[..., 3])
    # Whatever is held out, it makes no difference to what is trained on.
    other = training.replace(x=jnp.where(jnp.asarray(rows)[..., None], training.x, 7.0))
    standardized = _fit._Preparation("pooled", True, absent)
    for one, two in zip(
        np.asarray(standardized(training)(training).x)[rows],
        np.asarray(standardized(other)(other).x)[rows],
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)


@pytest.mark.extended
def test_scores_and_model_are_those_of_an_imputer_within_the_folds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x, y, who, mask = samples()
    cells = np.where(mask, "", x.round(6).astype(str))

    def write(path, cells):
        with open(path, "w", newline="") as file:
            rows = ([w, *row, repr(float(v))] for w, row, v in zip(who, cells, y, strict=True))
            csv.writer(file).writerows([["tree", "a", "b", "c", "y"], *rows])

    write("t.csv", cells)
    arguments = [
        "fit",
        "t.csv",
        "--label",
        "y",
        "--group",
        "tree",
        "--impute",
        "median",
        "--models",
        "global",
        "--lambdas",
        "0.01",
        "--folds",
        "3",
    ]
    assert main([*arguments, "--standardize", "none", "--quiet"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("global"))

    # The same folds, with scikit-learn: an intercept that is the weight of tens, tasks that count alike.
    data = mj.pack_tasks(np.where(mask, 0.0, x), y, who, loss_scaling="task_mean", intercept=True)
    folds = np.asarray(data.folds(jax.random.fold_in(jax.random.key(0), 0), 3))
    part = np.concatenate([folds[t][: SIZES[name]] for t, name in enumerate(SIZES)])
    known, errors = np.where(mask, np.nan, x.round(6)), np.zeros((3, 3))
    for k in range(3):
        train = part != k
        fill = SimpleImputer(strategy="median").fit(known[train])
        z = np.c_[fill.transform(known), np.full(60, 10.0)]
        ridge = Ridge(alpha=2 * 0.01 * train.sum(), fit_intercept=False).fit(z[train], y[train])
        for t, name in enumerate(SIZES):
            held = ~train & (who == name)
            errors[k, t] = np.sqrt(np.mean((ridge.predict(z[held]) - y[held]) ** 2))
    assert float(line.split()[1]) == pytest.approx(errors.mean(), rel=2e-3)

    # The model fills in the medians of all rows, here and in new tables.
    fill = SimpleImputer(strategy="median").fit(known)
    model = mj.load_model("model.npz")
    assert model.trained["medians"] == pytest.approx(dict(zip("abc", fill.statistics_, strict=True)))
    assert main(["predict", "model.npz", "t.csv", "--out", "one.csv"]) == 0
    write("filled.csv", fill.transform(known))
    assert main(["predict", "model.npz", "filled.csv", "--out", "two.csv"]) == 0
    with open("one.csv") as one, open("two.csv") as two:
        first, second = ([row[1:] for row in csv.reader(file)][1:] for file in (one, two))
    np.testing.assert_allclose(np.array(first, float), np.array(second, float))


@pytest.mark.slow
def test_every_model_is_trained_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x, y, who, _ = samples()
    with open("t.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [["tree", "a", "b", "c", "y"], *([w, *row, v] for w, row, v in zip(who, x, y, strict=True))]
        )
    arguments = ["--models", *_fit._MODELS, "--lambdas", "0.1", "0.01", "--folds", "2", "--quiet"]
    assert main(["fit", "t.csv", "--label", "y", "--group", "tree", *arguments]) == 0
    out = capsys.readouterr().out
    assert {line.split()[0] for line in out.splitlines() if line} >= set(_fit._MODELS)
    assert mj.load_model("model.npz").trained["kind"] in _fit._MODELS
