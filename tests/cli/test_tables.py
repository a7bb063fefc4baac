"""From a CSV file to a saved model and its predictions, without a line of Python."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.cli import main

pytestmark = pytest.mark.filterwarnings("error")

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"

GROUPS = {"ash": 30, "elm": 24, "oak": 36}


def write(path, rows, header):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tables of numbers and of classes, and what fit makes of them."""
    path = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(0)
    who = np.repeat(list(GROUPS), list(GROUPS.values()))
    x = rng.normal(size=(len(who), 2)) * [1.0, 1000.0]
    slope = np.array([{"ash": 1.0, "elm": 1.2, "oak": -1.0}[name] for name in who])
    y = slope * x[:, 0] + 0.001 * x[:, 1] + np.array([{"ash": 50.0, "elm": -20.0, "oak": 0.0}[name] for name in who])
    y = y + 0.1 * rng.normal(size=len(y))
    header = ["tree", "hours", "size", "score"]
    write(path / "school.csv", [[w, *row, v] for w, row, v in zip(who, x.tolist(), y.tolist(), strict=True)], header)
    passed = np.where(slope * x[:, 0] > 0, "yes", "no")
    write(path / "passed.csv", [[w, *row, v] for w, row, v in zip(who, x.tolist(), passed, strict=True)], header)
    return path


def fit(folder, table, *options):
    arguments = ["fit", str(folder / table), "--label", "score", "--group", "tree", "--quiet", "--folds", "3",
                 "--lambdas", "1", "0.01", "0.0001", "--picture", str(folder / "pictures" / "c.png"), "--force", *options]  # fmt: skip
    return main(arguments)


@pytest.fixture(scope="module")
def fitted(folder):
    assert fit(folder, "school.csv", "--model", str(folder / "school.npz")) == 0
    assert fit(folder, "school.csv", "--model", str(folder / "global.npz"), "--save", "global") == 0
    return folder


@pytest.mark.slow
def test_fit_compares_and_saves(fitted, capsys):
    assert fit(fitted, "passed.csv", "--model", str(fitted / "passed.npz"), "--standardize", "task") == 0
    out = capsys.readouterr().out
    assert "90 rows, 3 groups, 2 features; two classes to predict" in out
    assert {line.split()[0] for line in out.splitlines() if line} >= {"global", "local", "mean", "related", "Model:"}
    assert (fitted / "pictures" / "c.png").read_bytes().startswith(b"\x89PNG")
    model = mj.load_model(fitted / "passed.npz")
    assert model.names == mj.Names(tasks=tuple(GROUPS), features=("hours", "size"), classes=("no", "yes"))
    assert model.trained["standardized"] == "task"


@pytest.mark.slow
def test_what_there_is_to_say_of_a_search_stands_below_the_table(folder, capsys):
    arguments = ["--lambdas", "1000", "100", "--model", str(folder / "edge.npz")]
    assert fit(folder, "school.csv", *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    caption = next(i for i, line in enumerate(lines) if line.startswith("3 tasks; less is better"))
    said = [
        i
        for i, line in enumerate(lines)
        if "lam" in line and line.startswith(("global: ", "local: ", "mean: ", "related: "))
    ]
    assert said == list(range(caption + 1, caption + 1 + len(said)))
    assert said


def words(text):
    """The lines that are there, numbers and rulers aside, without what is said of a search."""
    text = re.sub(r"\n  (?=\S)", " ", text)  # of long lines
    text = re.sub(r"^(Model: \S+) \(.*\)$", r"\1", text, flags=re.M)  # whichever is best
    masked = (re.sub(r"[-+]?\d[\d.e+-]*", "#", re.sub(r"--+", "--", line)).split() for line in text.splitlines())
    return [" ".join(line) for line in masked if line and line[0] not in ("global:", "local:", "mean:", "related:")]


@pytest.mark.skipif(not PAGE.exists(), reason="the tests are running away from the repository")
@pytest.mark.slow
def test_the_picture_of_the_docs_has_the_words_of_a_run(folder, capsys):
    (block,) = re.findall(r"^```text\n\$ (.*?)\n(.*?)^```\n", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert block[0].split()[:2] == ["mocha-jax", "fit"]
    assert fit(folder, "school.csv", "--model", str(folder / "model.npz"), "--save", "mean") == 0
    out = capsys.readouterr().out.replace(f"{folder}/pictures/c.png", "comparison.png").replace(f"{folder}/", "")
    assert words(out) == words(block[1])


@pytest.mark.slow
def test_the_model_knows_the_table(fitted):
    model = mj.load_model(fitted / "school.npz")
    assert {k: model.trained[k] for k in ("label", "group")} == {"label": "score", "group": "tree"}
    assert model.trained["kind"] in ("local", "mean", "related")
    np.testing.assert_allclose(model.weights[:, 0], [1.0, 1.2, -1.0], atol=0.1)
    np.testing.assert_allclose(model.weights[:, 1], 0.001, rtol=0.1)
    np.testing.assert_allclose(model.intercept, [50.0, -20.0, 0.0], atol=0.2)  # which nothing draws to 0
    text = json.loads(np.load(fitted / "school.npz")["about.json"])
    assert text["trained"]["lambda"] in (1.0, 0.01, 0.0001)


@pytest.mark.slow
def test_predict_writes_a_table_in_any_order_of_columns(fitted, capsys):
    new = write(fitted / "new.csv", [[1000.0, "elm", 2.0], [0.0, "oak", 1.0]], ["size", "tree", "hours"])
    assert main(["predict", str(fitted / "school.npz"), str(new)]) == 0
    head, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert head == ["tree", "prediction"]
    model = mj.load_model(fitted / "school.npz")
    expected = model.predict([[2.0, 1000.0], [1.0, 0.0]], ["elm", "oak"])
    assert [row[0] for row in rows] == ["elm", "oak"]
    np.testing.assert_allclose([float(row[1]) for row in rows], expected)
    assert main(["predict", str(fitted / "global.npz"), str(new), "--out", str(fitted / "out.csv")]) == 0
    assert len((fitted / "out.csv").read_text().splitlines()) == 3


@pytest.mark.slow
def test_unknown_groups_are_an_error_or_the_mean(fitted, capsys):
    new = write(fitted / "yew.csv", [["yew", 2.0, 0.0]], ["tree", "hours", "size"])
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(fitted / "school.npz"), str(new)])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "yew.csv, line 2, column 'tree': 'yew' is not among the 3 that are known" in said
    assert "--unseen mean predicts by the mean of all groups' weights." in said
    assert main(["predict", str(fitted / "school.npz"), str(new), "--unseen", "mean"]) == 0
    model = mj.load_model(fitted / "school.npz")
    mean = float(model.weights.mean(0) @ [2.0, 0.0] + model.intercept.mean())
    assert float(capsys.readouterr().out.splitlines()[1].split(",")[1]) == pytest.approx(mean)


@pytest.mark.slow
def test_compare_scores_models_on_a_table(fitted, capsys):
    paths = [str(fitted / "global.npz"), str(fitted / "school.npz")]
    assert main(["compare", *paths, str(fitted / "school.csv")]) == 0
    out = capsys.readouterr().out
    assert "root mean squared error" in out
    model = mj.load_model(paths[1])
    table = mj.datasets.read_table(fitted / "school.csv")
    error = (model.predict(table.numbers(["hours", "size"]), table.names("tree")) - table.column("score")) ** 2
    own = [np.sqrt(error[table.names("tree") == name].mean()) for name in GROUPS]
    line = next(line for line in out.splitlines() if line.startswith(paths[1]))
    assert float(line.split()[1]) == pytest.approx(np.mean(own), abs=0.005)  # as printed
    assert "100 %" in line or "100" in line  # of the groups are better than by one model for all


@pytest.mark.slow
def test_inspect_says_what_it_is(fitted, capsys):
    assert main(["inspect", str(fitted / "school.npz"), "--task", "elm"]) == 0
    out = capsys.readouterr().out
    assert "groups (3): ash, elm, oak" in out
    assert "label: score" in out
    model = mj.load_model(fitted / "school.npz")
    assert f"{model.weights[1, 0]: .6g}" in out
    assert f"{model.intercept[1]: .6g}" in out
