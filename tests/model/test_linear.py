"""A model predicts by name what the functions predict by place, and comes back from its file."""

import json
import subprocess
import sys
from functools import cache

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import mocha_jax as mj
from tests import zoo
from tests.files.rewriting import rewritten

R = mj.regularizers
NAMES = ("fir", "ash", "oak", "elm", "yew")


def solved(loss="squared", regularizer=None, intercept=True, classes=False):
    binary = loss in zoo.CLASSIFICATION_LOSSES
    xs, ys = zoo.ragged(regression=not binary)
    if classes:
        ys = [np.where(y > 0, "yes", "no") for y in ys]
    data = mj.pack_tasks(dict(zip(NAMES, xs, strict=True)), dict(zip(NAMES, ys, strict=True)),
                         loss_scaling="task_mean", intercept=intercept, dtype=np.float64)  # fmt: skip
    regularizer = R.Probabilistic(0.05) if regularizer is None else regularizer
    return mj.solve(mj.Problem(data, zoo.LOSSES[loss], regularizer), tol=1e-3), xs


@cache
def usual():
    return solved()


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_predictions_are_those_of_the_tasks_by_name(seed):
    solution, _ = usual()
    rng = np.random.default_rng(seed)
    x, who = rng.normal(size=(9, 4)), rng.choice(NAMES, 9)
    w = np.asarray(solution.weights)
    want = [np.r_[row, 1.0] @ w[NAMES.index(name)] for row, name in zip(x, who, strict=True)]
    model = solution.model
    np.testing.assert_allclose(model.predict(x, who), want, rtol=1e-10)
    np.testing.assert_allclose(model.decision_function(x, list(who)), want, rtol=1e-10)
    np.testing.assert_allclose(model.predict(x[:2], who[0]), np.c_[x[:2], np.ones(2)] @ w[NAMES.index(who[0])])


@pytest.mark.slow
def test_labels_are_classes_and_odds_probabilities():
    solution, xs = solved("logistic", classes=True)
    model, x = solution.model, xs[0]
    z = model.decision_function(x, "fir")
    assert model.predict(x, "fir").tolist() == np.where(z > 0, "yes", "no").tolist()
    np.testing.assert_allclose(model.predict_proba(x, "fir")[:, 1], 1 / (1 + np.exp(-z)), rtol=1e-12)
    np.testing.assert_allclose(model.predict_proba(x, "fir").sum(axis=1), 1.0)
    assert np.isfinite(mj.LinearModel(np.eye(1) * 1e4, np.zeros(1), logistic=True).predict_proba([[-9.0]])).all()
    signs = solved("hinge")[0].model
    assert set(signs.predict(x, "oak").tolist()) <= {-1.0, 1.0}
    with pytest.raises(ValueError, match=r"trained with Hinge\(\) has no probabilities; train with losses.Logistic"):
        signs.predict_proba(x, "oak")


@pytest.mark.slow
def test_each_task_decides_by_its_own_loss():
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(12, 3)) for _ in range(3)]
    ys = [np.sign(xs[0][:, 0]), xs[1][:, 0], np.digitize(xs[2][:, 0], [-0.5, 0.5])]
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean", dtype=np.float64)
    loss = mj.losses.PerTask([mj.losses.Hinge(), mj.losses.Squared(), mj.losses.Ordinal([-0.5, 0.5])])
    solution = mj.solve(mj.Problem(data, loss, R.Independent(0.01)), tol=1e-2)
    z = np.asarray(data.predictions(solution.weights))
    model = solution.model
    assert model.decides == ("sign", "value", "level")
    np.testing.assert_array_equal(model.predict(xs[0], 0), np.sign(z[0]))
    np.testing.assert_allclose(model.predict(xs[1], 1), z[1])
    np.testing.assert_array_equal(model.predict(xs[2], 2), np.digitize(z[2], [-0.5, 0.5]))


def test_a_new_task_of_levels_has_the_mean_of_the_thresholds():
    model = mj.LinearModel(
        np.ones((2, 1)), np.zeros(2), decides=("level",) * 2, thresholds=np.array([[0.0, 1.0], [2.0, 5.0]])
    )
    x = [[0.5], [1.5], [2.5], [3.5]]
    assert model.predict(x, 0).tolist() == [1, 2, 2, 2]
    assert model.predict(x, 1).tolist() == [0, 0, 1, 1]
    assert model.predict(x, "new", unseen="mean").tolist() == [0, 1, 1, 2]
    mixed = mj.LinearModel(np.ones((2, 1)), np.zeros(2), decides=("sign", "value"))
    assert mixed.predict([[-2.0], [-2.0]], [0, 1]).tolist() == [-1.0, -2.0]
    with pytest.raises(ValueError, match="tasks decide in different ways"):
        mixed.predict(x, "new", unseen="mean")


@pytest.mark.slow
def test_a_solve_without_a_finite_gap_is_saved_too(tmp_path):
    problem = usual()[0].problem.replace(regularizer=R.Independent(1e-3))
    diverged = mj.solve(problem, mj.MiniBatchSgd(8, step_size=1e40), max_rounds=20, tol=None)
    assert not np.isfinite(diverged.relative_gap)
    diverged.model.save(tmp_path / "m.npz")
    assert "relative_gap" not in json.loads(np.load(tmp_path / "m.npz")["about.json"])["trained"]
    with pytest.raises(ValueError, match="must be texts or finite numbers"):
        mj.LinearModel(np.eye(1), np.zeros(1), trained={"gap": float("inf")}).save(tmp_path / "n.npz")


def test_a_new_task_gets_what_was_asked_for():
    solution, xs = usual()
    model, x = solution.model, xs[0]
    with pytest.raises(ValueError, match="task 'larch' is not among the 5 that are known: 'fir', 'ash'"):
        model.predict(x, "larch")
    design = np.c_[x, np.ones(len(x))]
    w, c = np.asarray(solution.weights), np.asarray(solution.covariance)
    np.testing.assert_allclose(model.predict(x, "larch", unseen="mean"), design @ w.mean(axis=0))
    # What the covariance expects of a task that is related to each as the average task is.
    expected = (c.mean(axis=0) @ np.linalg.pinv(c, rcond=1e-9)) @ w
    np.testing.assert_allclose(expected, w.mean(axis=0), atol=1e-6)
    both = model.predict(x[:2], ["ash", "larch"], unseen="mean")
    np.testing.assert_allclose(both, [design[0] @ w[1], design[1] @ w.mean(axis=0)])


def test_predict_takes_the_tables_that_pack_tasks_takes():
    pandas = pytest.importorskip("pandas")
    plain = pandas.DataFrame({"a": np.arange(6.0), "wet": [1.0, 0, 0, 1, 1, 0], "tree": list("pqqppq"), "y": 1.0})
    w = np.array([[1.0, 10.0], [-1.0, 5.0]])
    model = mj.LinearModel(w, np.array([0.0, 2.0]), mj.Names(tasks=("p", "q"), features=("a", "wet")))
    want = [w[0] @ [0, 1], w[1] @ [1, 0] + 2, w[1] @ [2, 0] + 2, w[0] @ [3, 1], w[0] @ [4, 1], w[1] @ [5, 0] + 2]
    booleans = plain.astype({"wet": bool})
    tables = {
        "booleans": booleans, "nullable": plain.convert_dtypes(), "categories of numbers": plain.astype({"wet": "category"}),
        "objects": plain.astype({"a": object}), "another order": booleans[["y", "wet", "tree", "a"]],
        "groups as categories": booleans.astype({"tree": "category"}),
    }  # fmt: skip
    for name, table in tables.items():
        packed = mj.pack_tasks(table[["tree", "a", "wet", "y"]], "y", "tree", dtype=np.float64)
        assert packed.names.features == ("a", "wet"), name
        np.testing.assert_array_equal(model.predict(table, table["tree"]), want, err_msg=name)
        np.testing.assert_array_equal(model.predict(table, "tree"), want, err_msg=name)
    np.testing.assert_array_equal(model.predict(booleans[["a", "wet"]].to_numpy(), list(plain["tree"])), want)
    new = plain.assign(tree="new", wet=True)
    np.testing.assert_array_equal(model.predict(new, "tree", unseen="mean"), w.mean(0) @ [new.a, new.wet] + 1.0)
    with pytest.raises(ValueError, match="task 'new' is not among the 2 that are known: 'p', 'q'"):
        model.predict(new, "tree")
    with pytest.raises(ValueError, match="predict: column 'wet' holds what is no number, e.g. 'yes'"):
        model.predict(plain.assign(wet="yes"), "tree")
    table = plain.convert_dtypes()
    table.loc[4, ["wet", "tree"]] = pandas.NA
    with pytest.raises(ValueError, match="predict: column 'wet' has no value in row 4"):
        model.predict(table, "p")
    with pytest.raises(ValueError, match="predict: task must be names, but that of sample 4 is <NA>"):
        model.predict(table.assign(wet=1.0), "tree")


def test_a_column_of_tasks_is_no_feature_and_a_task_of_its_name_comes_first():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"g": ["p", "q"], "a": [1.0, 2.0]})
    weights = np.array([[1.0], [10.0]])
    assert mj.LinearModel(weights, np.zeros(2), mj.Names(tasks=("p", "q"))).predict(table, "g").tolist() == [1, 20]
    for features in (None, ("a",)):  # "g" is a task too
        model = mj.LinearModel(weights, np.zeros(2), mj.Names(tasks=("p", "g"), features=features))
        assert model.predict(table if features else table[["a"]], "g").tolist() == [10, 20]
    shared = mj.LinearModel(np.array([[3.0, 1.0]]), np.zeros(1), mj.Names(features=("g", "a")))
    assert shared.predict(table.assign(g=[1.0, 2.0]), "g").tolist() == [4, 8]  # trained on it, so it is one


def test_metrics_find_the_tasks_of_a_solution():
    solution, xs = usual()
    ys = [np.arange(float(len(x))) for x in xs]
    names = ["oak", "fir", "yew"]
    test = mj.pack_tasks({n: xs[NAMES.index(n)] for n in names}, {n: ys[NAMES.index(n)] for n in names},
                         intercept=True, dtype=np.float64)  # fmt: skip
    w = np.asarray(solution.weights)
    want = np.mean([np.sqrt(np.mean((np.c_[xs[t], np.ones(len(xs[t]))] @ w[t] - ys[t]) ** 2))
                    for t in (NAMES.index(n) for n in names)])  # fmt: skip
    assert float(mj.metrics.rmse(solution, test)) == pytest.approx(want)
    assert float(mj.metrics.rmse(solution.model, test)) == pytest.approx(want)
    with pytest.raises(ValueError, match="weights must be"):
        mj.metrics.rmse(solution.weights, test)
    plain = mj.pack_tasks({"oak": xs[2]}, {"oak": ys[2]}, dtype=np.float64)
    with pytest.raises(ValueError, match="has an intercept, and the data was packed without one"):
        mj.metrics.rmse(solution, plain)
    strange = mj.pack_tasks({"larch": xs[0]}, {"larch": ys[0]}, intercept=True, dtype=np.float64)
    with pytest.raises(ValueError, match="task 'larch' is not among"):
        mj.metrics.rmse(solution, strange)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.thin(1)
def test_a_file_gives_the_model_back(loss, tmp_path):
    model = solved(loss, classes=loss == "logistic")[0].model
    path = tmp_path / "model.npz"
    model.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.npz"]
    again, x = mj.load_model(path), np.random.default_rng(0).normal(size=(5, 4))
    for name in NAMES:
        np.testing.assert_array_equal(again.predict(x, name), model.predict(x, name))
        np.testing.assert_array_equal(again.decision_function(x, name), model.decision_function(x, name))
    assert again.names == model.names
    assert again.trained == dict(model.trained)
    assert repr(again) == repr(model)


def test_numpy_alone_reads_a_file(tmp_path):
    model = usual()[0].model
    model.save(tmp_path / "model.npz")
    program = """
import json, sys
import numpy as np
file = np.load(sys.argv[1], allow_pickle=False)
about = json.loads(file["about.json"])
t = about["tasks"].index("oak")
print(repr(float(np.arange(4.0) @ file["weights"][t] + file["intercept"][t])))
assert "jax" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model.npz")], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(model.predict([np.arange(4.0)], "oak")[0], rel=1e-12)


def test_nothing_of_the_samples_is_in_it():
    solution, _ = usual()
    d, m = 4, 5
    arrays = {k: np.shape(v) for k, v in vars(solution.model).items() if isinstance(v, np.ndarray)}
    assert arrays == {"weights": (m, d), "intercept": (m,)}


def test_broken_files_are_refused_in_a_sentence(tmp_path):
    model, path = usual()[0].model, tmp_path / "model.npz"
    model.save(path)
    whole = path.read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is no file of this library, or it is damaged"):
            mj.load_model(path)
    np.savez(path, x=np.ones(2))
    with pytest.raises(ValueError, match="is no file of this library"):
        mj.load_model(path)
    path.write_bytes(rewritten(whole, lambda about, _: about.update(version=99)))
    with pytest.raises(ValueError, match="is of version 99, and this library reads up to 1."):
        mj.load_model(path)
    path.write_bytes(mj.federated.to_bytes({"weights": np.ones(2)}))
    with pytest.raises(ValueError, match="load_model: .* is of the kind 'state', and 'model' is wanted."):
        mj.load_model(path)
    path.write_bytes(rewritten(whole, lambda about, _: about.pop("tasks")))
    with pytest.raises(ValueError, match="lacks a part of a model"):
        mj.load_model(path)
    with pytest.raises(ValueError, match="there is none at"):
        mj.load_model(tmp_path / "none.npz")
    odd = mj.LinearModel(np.eye(2), np.zeros(2), mj.Names(tasks=((1, 2), frozenset())))
    with pytest.raises(ValueError, match="must be texts or finite numbers"):
        odd.save(path)


BAD = {
    "no task": (lambda m: m.predict(np.ones((1, 4))), "say whose samples they are: task is one of 'fir'"),
    "too few": (lambda m: m.predict(np.ones((2, 4)), ["fir"]), "one for each of the 2 samples; got"),
    "width": (lambda m: m.predict(np.ones((2, 3)), "fir"), r"x must be samples \[k, 4\] of numbers, got"),
    "texts": (lambda m: m.predict([["a"] * 4], "fir"), r"x must be samples \[k, 4\] of numbers, got"),
    "unseen": (lambda m: m.predict(np.ones((1, 4)), "fir", unseen="guess"), "unseen must be"),
    "decides": (lambda m: mj.LinearModel(np.eye(2), np.zeros(2), decides=("value",)), "for each of the 2 tasks"),
    "intercept": (lambda m: mj.LinearModel(np.eye(2), np.zeros(3)), "weights has 2 rows and intercept 3 numbers"),
    "tasks": (lambda m: named(tasks=("a", "b", "c")), "LinearModel: names has 3 tasks, but weights are of 2"),
    "features": (lambda m: named(features=("a",)), "names has 1 features, but weights are of 3"),
    "classes": (lambda m: named(("sign",) * 2, classes=("a", "b", "c")), "names has 3 classes, but weights are of 2"),
    "NaN": (lambda m: mj.LinearModel(np.full((2, 2), np.nan), np.zeros(2)), "weights must be finite, but some are NaN"),
    "infinity": (lambda m: mj.LinearModel(np.eye(2), np.array([0.0, np.inf])), "intercept must be finite"),
}


def named(decides=(), **names):
    return mj.LinearModel(np.ones((2, 3)), np.zeros(2), mj.Names(**names), decides)


@pytest.mark.parametrize("change", [{"tasks": ["a", "b"]}, {"features": ["a"]}, {"weights": np.full((5, 4), np.nan)}])
def test_a_file_whose_parts_do_not_fit_is_refused(change, tmp_path):
    path = tmp_path / "model.npz"
    usual()[0].model.save(path)

    def changed(about, arrays):
        for name, value in change.items():
            (arrays if name in arrays else about)[name] = value

    path.write_bytes(rewritten(path.read_bytes(), changed))
    with pytest.raises(ValueError, match=r"model.npz lacks a part of a model, or it is damaged: LinearModel: "):
        mj.load_model(path)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make(usual()[0].model)


@pytest.mark.slow
def test_one_task_with_a_name_is_not_everybodys():
    solution, xs = solved()
    one = mj.pack_tasks({"fir": xs[0]}, {"fir": np.arange(float(len(xs[0])))}, dtype=np.float64)
    model = mj.solve(mj.Problem(one, mj.losses.Squared(), R.Independent(0.1)), tol=1e-4).model
    assert model.predict(xs[0], "fir").tolist() == model.predict(xs[0]).tolist()
    with pytest.raises(ValueError, match="task 'oak' is not among the 1"):
        model.predict(xs[0], "oak")
    other = mj.pack_tasks({"oak": xs[0]}, {"oak": np.ones(len(xs[0]))}, dtype=np.float64)
    with pytest.raises(ValueError, match="task 'oak' is not among the 1"):
        mj.metrics.rmse(model, other)


@pytest.mark.slow
def test_a_global_model_needs_no_task():
    solution, xs = solved()
    pooled = mj.solve(mj.Problem(solution.problem.data.pooled(), mj.losses.Squared(), R.Independent(0.1)), tol=1e-4)
    want = np.c_[xs[0], np.ones(len(xs[0]))] @ np.asarray(pooled.weights)[0]
    np.testing.assert_allclose(pooled.model.predict(xs[0]), want, rtol=1e-10)
    np.testing.assert_allclose(pooled.model.predict(xs[0], "anybody"), want, rtol=1e-10)
    assert jnp.ndim(pooled.model.intercept) == 1


def test_pictures_and_messages_have_the_names():
    figure = mj.plotting.relationship(usual()[0])
    assert {label.get_text() for label in figure.axes[0].get_xticklabels()} == set(NAMES)
    data = usual()[0].problem.data
    with pytest.raises(ValueError, match="task 'fir': has label .* but Hinge needs"):
        mj.Problem(data, mj.losses.Hinge(), R.Independent(1.0))
