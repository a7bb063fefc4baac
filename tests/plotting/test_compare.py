"""The picture of methods side by side shows the numbers of the comparison."""

import numpy as np
import pytest

import mocha_jax as mj

plotting = pytest.importorskip("mocha_jax.plotting")


def methods(tasks):
    rng = np.random.default_rng(0)
    local = rng.gamma(20.0, 0.5, tasks)
    return {
        "local": local,
        "global": local + 0.3 + rng.normal(size=tasks),
        "learned": local - 0.4 + 0.5 * rng.normal(size=tasks),
    }


def points(axes):
    """The values of all tasks, by colour."""
    found: dict[str, list[float]] = {}
    for line in axes.lines:
        if line.get_marker() == "o":
            found.setdefault(line.get_color(), []).extend(line.get_xdata())
    return {colour: sorted(values) for colour, values in found.items()}


def means(axes):
    return [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "D"]


@pytest.mark.parametrize("tasks", [1, 8, 139])
@pytest.mark.parametrize("maximise", [False, True])
@pytest.mark.thin(3)
def test_every_task_is_a_point_and_every_mean_a_diamond(tasks, maximise, tmp_path):
    found = mj.metrics.compare(methods(tasks), baseline="local", maximise=maximise)
    figure = plotting.compare(found, score="RMSE", title="tasks")
    figure.savefig(tmp_path / "picture.png")
    left, right = figure.axes
    colours = dict(zip(found.scores, plotting.COLOURS, strict=False))
    for name, values in found.scores.items():
        np.testing.assert_allclose(points(left)[colours[name]], np.sort(values))
        if name != "local":
            np.testing.assert_allclose(points(right)[colours[name]], np.sort(values - found.scores["local"]))
    np.testing.assert_allclose(means(left), [one.mean for one in found.summaries.values()])
    np.testing.assert_allclose(
        means(right), [float(found.summaries[name].difference or 0.0) for name in ("global", "learned")]
    )
    labels = [label.get_text() for label in right.get_yticklabels()]
    assert labels == [
        f"{name}\nbetter in {100 * (found.summaries[name].better or 0.0):.0f} %" for name in ("global", "learned")
    ]
    assert left.get_xlabel() == f"RMSE ({'more' if maximise else 'less'} is better)"
    rows = [y for line in right.lines if line.get_marker() == "o" for y in line.get_ydata()]
    assert all(abs(y - round(y + 0.1)) < 0.55 for y in rows)  # every point within its row


def test_few_tasks_have_their_names_in_the_order_of_the_baseline():
    scores = {"a": [3.0, 1.0, 2.0], "b": [1.0, 1.0, 1.0]}
    figure = plotting.compare(mj.metrics.compare(scores, baseline="a", tasks=["oak", "elm", "ash"]))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["elm", "ash", "oak", "mean"]


def test_scores_alone_will_do_and_their_first_is_the_baseline():
    figure = plotting.compare({"local": np.arange(50.0), "learned": np.arange(50.0)})
    assert len(figure.axes) == 2
    assert "that of local" in figure.axes[1].get_xlabel()
    assert len(plotting.compare(mj.metrics.compare(methods(8))).axes) == 1  # no baseline, no differences
    with pytest.raises(ValueError, match="compare: methods must be a dictionary of scores by name"):
        plotting.compare([1.0, 2.0])
