"""The comparison with other libraries: splits, scores, resuming."""

import argparse
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "experiments").exists(), reason="the tests run away from the repository")


@pytest.fixture
def baselines(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from experiments.baselines import __main__, mixed, report, rivals, tables
    from experiments.baselines.cells import Cell
    from experiments.rows import read

    return argparse.Namespace(
        main=__main__, mixed=mixed, report=report, rivals=rivals, tables=tables, Cell=Cell, read=read
    )


@pytest.mark.parametrize("name", ["school", "landmine", "har", "new person"])
def test_splits_keep_blocks_whole_and_new_persons_apart(baselines, name):
    tables, rows = baselines.tables, baselines.tables.load(None, name)
    train, test = tables.split(name, rows, 3)
    tasks, new = set(rows.group), set(test.group) - set(train.group)
    assert not set(train.block) & set(test.block)
    assert new == (set(test.group) if name == "new person" else set())
    assert len(new) == (len(tasks) // 5 if name == "new person" else 0)
    if name != "new person":
        assert len(train.y) + len(test.y) == len(rows.y)
        assert abs(len(train.y) / len(rows.y) - tables.TRAINING[name]) < 0.05
    parts = tables.folds(tables.KINDS[name], train, 3, 0)
    assert sorted(np.concatenate([held_out for _, held_out in parts])) == list(range(len(train.y)))
    for training, held_out in parts:
        assert not set(train.block[training]) & set(train.block[held_out])
        for task in np.unique(train.group):  # within every task, as evenly as whole blocks allow
            blocks, share = (len(np.unique(part.block)) for part in (train.of(task), train.take(held_out).of(task)))
            assert share - blocks // 3 in (0, 1, 2 if name == "landmine" else 0)  # each of two labels by itself
    again = tables.split(name, rows, 4).train
    assert len(again.y) != len(train.y) or not np.array_equal(again.x, train.x)


def test_the_rare_class_is_divided_alike_in_every_task(baselines):
    rows = baselines.tables.load(None, "landmine")
    train, test = baselines.tables.split("landmine", rows, 0)
    for task in np.unique(rows.group):
        one, other = (np.sum(part.of(task).y > 0) for part in (train, test))
        assert abs(int(one) - int(other)) <= 1


def test_scores_of_tasks(baselines):
    rows = baselines.tables.Rows
    y, said = np.array([1.0, -1, 1, -1, -1, -1]), np.array([0.9, 0.1, 0.2, 0.3, 0.0, 0.0])
    test = rows(np.zeros((6, 1)), y, np.array([0, 0, 1, 1, 2, 2]), np.arange(6))
    overall, each = baselines.report.scores("rare", test, said, np.arange(3))["AUC %"]
    assert (overall, *each[:2]) == (0.5, 1.0, 0.0)
    assert np.isnan(each[2])  # without the rare class no place can be ranked
    found = baselines.report.scores("numbers", test, 0.5 * y, np.arange(4))
    assert found["RMSE"][0] == pytest.approx(0.5)
    assert found["explained variance %"][0] == pytest.approx(1 - 0.25 / np.var(y))
    assert np.isnan(found["RMSE"][1][3])


@pytest.mark.parametrize(
    ("name", "method"), [
        ("school", "scikit-learn, pooled"), ("school", "scikit-learn, each task"),
        ("school", "statsmodels MixedLM, intercept, 3 slopes"), ("landmine", "statsmodels BayesMixedGLM, all slopes"),
        ("school", "GPBoost linear, intercept, slopes"), ("landmine", "GPBoost trees, intercept"),
        ("school", "LightGBM, the task a category"), ("school", "GPBoost trees, intercept"), ("school", "MERF, intercept"), ("har", "scikit-learn, each task"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_methods_know_more_than_the_mean(baselines, name, method):
    (one,) = [m for m in baselines.main.METHODS if m.name == method]
    pytest.importorskip(one.needs)
    train, test = baselines.tables.split(name, baselines.tables.load(None, name), 0)
    kind = baselines.tables.KINDS[name]
    said = one.fit(baselines.Cell(kind, train, 0)).predict(test.x, test.group)
    first, (score, _) = next(iter(baselines.report.scores(kind, test, said, np.unique(train.group)).items()))
    of_nothing = {"RMSE": test.y.std(), "AUC %": -0.5, "error %": 2 / 3}[first]
    assert (-score if first == "AUC %" else score) < 0.95 * of_nothing


def test_columns_that_are_sums_of_others_are_left_out(baselines):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3))
    design = baselines.mixed._Design(np.c_[x, x[:, 0] + x[:, 1], np.ones(50)])
    assert len(design.columns) == 4
    assert np.linalg.matrix_rank(design(np.c_[x, x[:, 0] + x[:, 1], np.ones(50)])) == 4


def test_cells_are_resumed_and_what_is_not_installed_is_named(baselines, tmp_path, capsys, monkeypatch):
    def main(seeds):
        monkeypatch.setattr(
            "sys.argv",
            ["baselines", "--tables", "school", "--methods", "scikit-learn, pooled", "--seeds", seeds, "--out", str(tmp_path)],
        )  # fmt: skip
        baselines.main.main()
        return capsys.readouterr().out

    one = main("1")
    assert one.count("school 0 ") == 4  # two methods, two metrics
    two = main("2")
    assert (two.count("school 0 "), two.count("school 1 ")) == (0, 4)
    assert "| school, 2 splits | RMSE | explained variance % |" in two
    monkeypatch.setattr(baselines.main.importlib.util, "find_spec", lambda name: None)
    assert "| scikit-learn, pooled | sklearn is not installed |" in main("2")
    assert len(baselines.read(tmp_path / "cells.csv", baselines.report.Row)) == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_methods_of_the_library_are_beside_scikit_learns(baselines, tmp_path, capsys, monkeypatch):
    def main(table, methods):
        monkeypatch.setattr(
            "sys.argv",
            ["baselines", "--tables", table, "--methods", methods, "--seeds", "1", "--out", str(tmp_path)],
        )  # fmt: skip
        baselines.main.main()
        rows = baselines.read(tmp_path / "cells.csv", baselines.report.Row)
        return {row.method: row.score for row in rows if row.metric in ("RMSE", "error %")}

    main("school", "scikit-learn")
    score = main("school", "mocha_jax")
    assert score["mocha_jax, global"] == pytest.approx(score["scikit-learn, pooled"], rel=0.02)
    assert score["mocha_jax, local"] == pytest.approx(score["scikit-learn, each task"], rel=0.05)
    assert score["mocha_jax, learned"] < 0.8 * score["mocha_jax, global"]  # the made-up tasks are of two kinds
    assert "| mocha_jax, local |" in capsys.readouterr().out
    new = main("new person", "mocha_jax, learned")["mocha_jax, learned"]
    assert new < 0.55  # by chance two in three are wrong
