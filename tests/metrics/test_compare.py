"""Methods side by side: the numbers are those of `over_tasks`, and the table says so."""

import json

import numpy as np
import pytest

import mocha_jax as mj

compare, over_tasks = mj.metrics.compare, mj.metrics.over_tasks


def methods(tasks=40, seeds=3):
    rng = np.random.default_rng(0)
    local = rng.gamma(4.0, 0.08, size=(seeds, tasks))
    return {
        "local": local,
        "learned": local - 0.03 + 0.05 * rng.normal(size=(seeds, tasks)),
        "global": 1.1 * local.mean(0),
    }


def test_every_number_is_that_of_over_tasks():
    scores, sizes = methods(), np.arange(1, 41)
    found = compare(scores, sizes, baseline="local", level=0.9, seed=3)
    assert found.summaries["local"] == over_tasks(scores["local"], sizes, level=0.9, seed=3)
    assert found.summaries["learned"] == over_tasks(
        scores["learned"], sizes, baseline=scores["local"], level=0.9, seed=3
    )
    alike = np.broadcast_to(scores["global"], (3, 40))  # one row counts for every seed
    assert found.summaries["global"] == over_tasks(alike, sizes, baseline=scores["local"], level=0.9, seed=3)
    np.testing.assert_allclose(found.scores["learned"], scores["learned"].mean(0))
    better = [
        [np.mean(a.mean(0) < b.mean(0)) for b in map(np.atleast_2d, scores.values())]
        for a in map(np.atleast_2d, scores.values())
    ]
    np.testing.assert_allclose(found.wins, np.array(better) + 0.5 * np.eye(3))
    np.testing.assert_allclose(found.wins + found.wins.T, 1.0)


def test_more_can_be_better():
    scores = methods()
    less, more = (
        compare(scores, baseline="local"),
        compare({k: -v for k, v in scores.items()}, baseline="local", maximise=True),
    )
    np.testing.assert_array_equal(less.wins, more.wins)
    assert less.summaries["learned"].better == more.summaries["learned"].better
    assert less.summaries["learned"].worst_tenth == pytest.approx(-more.summaries["learned"].worst_tenth)
    assert "less is better" in str(less)
    assert "more is better" in str(more)


def test_the_table_as_text_as_markdown_and_as_numbers():
    found = compare(methods(), np.arange(1, 41), baseline="local")
    header, ruler, *rows, caption = str(found).split("\n")
    assert [row.split()[0] for row in rows] == ["local", "learned", "global"]
    assert header.split()[-6:] == ["tasks", "better", "minus", "local", "[95", "%]"]
    assert caption == "40 tasks; less is better; intervals of 95 % over tasks and seeds"
    one = found.summaries["learned"]
    assert f"{one.mean:.4f} [{one.interval[0]:.4f}, {one.interval[1]:.4f}]" in rows[1]
    assert f"{100 * (one.better or 0.0):.0f} %" in rows[1]
    cells = [line.strip("| ").split(" | ") for line in found.to_markdown().split("\n")]
    assert {len(row) for row in cells[:2]} == {9}
    assert cells[3][0] == "learned"
    columns = json.loads(json.dumps(found.to_dict()))
    assert columns["method"] == ["local", "learned", "global"]
    assert {len(column) for column in columns.values()} == {3}
    assert columns["difference"] == [None, one.difference, found.summaries["global"].difference]
    assert columns["mean_high"][1] == one.interval[1]
    plain = str(compare(methods()))
    assert "by samples" not in plain
    assert "better  " not in plain
    assert r"a\|b" in compare({"a|b": [1.0, 2.0]}).to_markdown()
    assert "1234.5" not in str(compare({"large": [1234.5, 1236.5]}))  # four digits are enough
    assert "0.0001235" in str(compare({"small": [1.235e-4, 1.235e-4]}))


def test_tasks_without_a_score_are_left_out_by_name():
    found = compare({"a": [1.0, np.nan, 2.0], "b": [2.0, np.nan, 1.0]}, tasks=["oak", "elm", "ash"])
    assert found.tasks == ("oak", "ash")
    assert found.scores["b"].tolist() == [2.0, 1.0]
    assert found.wins[0, 1] == 0.5


BAD = {
    "a list": (lambda: compare([1.0, 2.0]), "methods must be a dictionary of scores by name"),  # type: ignore[arg-type]
    "nothing": (lambda: compare({}), "methods must be a dictionary"),
    "texts": (lambda: compare({"a": ["x"]}), r"methods\['a'\] must be \[num_tasks\] or \[seeds, num_tasks\]"),
    "other tasks": (lambda: compare({"a": [1.0, 2.0], "b": [1.0]}), r"as many tasks.*got \[1, 2\] of 'a', \[1, 1\] of 'b'"),
    "other seeds": (lambda: compare({"a": np.ones((2, 3)), "b": np.ones((4, 3))}), "as many tasks, and seeds"),
    "a gap": (
        lambda: compare({"a": [1.0, 2.0], "b": [1.0, np.nan]}, tasks=["oak", "elm"]), "task 'elm' has one by 'a' and none by 'b'",
    ),
    "another gap": (lambda: compare({"a": [1.0, np.nan], "b": [1.0, 2.0]}), "task 1 has one by 'b' and none by 'a'"),
    "baseline": (lambda: compare({"a": [1.0]}, baseline="b"), "baseline must be one of 'a'"),
    "names": (lambda: compare({"a": [1.0, 2.0]}, tasks=["oak"]), "tasks must be 2 names"),
    "a name that is none": (lambda: compare({"a": [1.0, 2.0]}, tasks=["oak", np.nan]), "tasks must be 2 names"),
    "methods twice": (lambda: compare({"1": [1.0], 1: [2.0]}), "differ as texts, but '1' occur"),  # type: ignore[dict-item]
    "no score": (lambda: compare({"a": [np.nan], "b": [np.nan]}), "methods must have scores, but all of them are NaN"),
    "infinity": (lambda: compare({"a": [1.0, np.inf]}), r"methods\['a'\] must be finite, or NaN where a task has no"),
    "names twice": (lambda: compare({"a": [1.0, 2.0]}, tasks=["oak", "oak"]), "tasks must differ"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()
