"""What speaks against a choice is said."""

import re
from typing import Any

import jax
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax._data.splits_and_folds import class_sizes
from mocha_jax._selection import caveats
from tests.selection.problems import regression

R = mj.regularizers


@pytest.mark.slow
def test_what_speaks_against_a_choice_is_said_once_each(key):
    problem = mj.Problem(regression(), mj.losses.Squared(), R.Independent(1.0))
    with pytest.warns(UserWarning, match="cross_validate") as said:
        mj.cross_validate(
            problem, mj.grid(R.Independent, lam=[1e3, 1.0]), key=key, folds=3, tol=1e-14, max_rounds=1, refit=False
        )
    assert len(said) == 2
    assert all(w.filename == __file__ for w in said)
    assert re.match(
        r"cross_validate: candidates (0 \(.+\), )?1 \(.+\) did not reach tol=1e-14 in max_rounds=1 rounds, .* raise max_rounds",
        str(said[0].message),
    )
    assert "the best candidate, 1, is at the edge of the grid: lam=1 is the smallest tried, add smaller" in str(
        said[1].message
    )


def test_candidates_that_did_not_converge_are_named_with_how_far_they_got():
    residuals, rounds = np.full((2, 3, 9), 1e-6), np.full((2, 3, 9), 200)
    assert caveats.unfinished(residuals, rounds, 1e-3, 200) is None
    residuals[1, 2, 4], residuals[0, 0, 7] = 0.02, np.inf  # of the latter nothing is known
    said = str(caveats.unfinished(residuals, rounds, 1e-3, 200))
    assert said.startswith("candidates 4 (2.0e-02) did not reach tol=0.001")
    assert said.endswith("as far as they got; raise max_rounds.")
    rounds[1, 2, 4] = 15  # where no more rounds were done, more of them do not help
    assert "floats certify no more" in str(caveats.unfinished(residuals, rounds, 1e-3, 200))
    many = str(caveats.unfinished(np.full((1, 1, 9), 0.01), np.full((1, 1, 9), 200), 1e-3, 200))
    assert "(1.0e-02) and 4 more did not reach" in many


SIGMAS, THREE = [np.inf, 1.0, 0.1], [10.0, 1.0, 0.1]


EDGES = {
    "inside": (mj.grid(R.Independent, lam=THREE), [3.0, 1.0, 2.0], False, None),
    "smallest": (mj.grid(R.Independent, lam=THREE), [3.0, 2.0, 1.0], False, "lam=0.1 is the smallest tried, add smaller"),
    "largest": (mj.grid(R.Independent, lam=THREE), [1.0, 2.0, 3.0], False, "lam=10 is the largest tried, add larger"),
    "of a gain": (mj.grid(R.Independent, lam=THREE), [1.0, 2.0, 3.0], True, "lam=0.1 is the smallest"),
    "as good inside": (mj.grid(R.Independent, lam=THREE), [1.0, 1.0, 3.0], False, None),
    "nothing else": (mj.grid(R.Independent, lam=[1.0]), [1.0], False, None),
    "unknown inside": (mj.grid(R.Independent, lam=THREE), [1.0, np.nan, np.nan], False, None),
    "infinity is an end": (mj.grid(R.Probabilistic, lam=[1.0], sigma2=SIGMAS), [1.0, 2.0, 3.0], False, None),
    "a finite end": (mj.grid(R.Probabilistic, lam=[1.0], sigma2=SIGMAS), [3.0, 2.0, 1.0], False, "sigma2=0.1 is the smallest"),
    "0 is an end": (mj.grid(R.MeanRegularized, lam1=[0.0, 1.0, 2.0], lam2=[1.0]), [1.0, 2.0, 3.0], False, None),
    "counts are no strengths": (mj.grid(lambda k: R.Clustered(1.0, 1.0, k), k=[1.0, 2.0]), [1.0, 2.0], False, None),
    "two axes": (
        mj.grid(R.MeanRegularized, lam1=[1.0, 2.0], lam2=[3.0, 4.0]), [4.0, 3.0, 2.0, 1.0], False,
        "lam1=2 is the largest tried, add larger ones; lam2=4 is the largest",
    ),
    "many numbers a candidate": (mj.grid(lambda a: R.Independent(a * np.ones(3)), a=[1.0, 2.0]), [1.0, 2.0], False, None),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_a_best_value_with_nothing_beyond_it_is_named(name):
    candidates, mean, more_is_better, message = EDGES[name]
    best = int(np.nanargmax(mean) if more_is_better else np.nanargmin(mean))
    said = caveats.at_the_edge(candidates, np.asarray(mean), best, more_is_better)
    assert said is None if message is None else message in str(said)


def test_classes_are_counted_by_task_and_group():
    y = np.array([[1.0, -1, -1, 1], [1, -1, 1, 1], [-1, -1, -1, -1]])
    real, task = np.array([[True] * 4, [True] * 3 + [False], [True] * 4]), np.array([0, 0, 1])
    assert class_sizes(y > 0, real, task, 3, 2, None).tolist() == [[3, 4], [4, 0], [0, 0]]
    groups = np.array([[5, 5, 5, 9], [5, 5, 5, 9], [1, 2, 1, 2]])
    assert class_sizes(y > 0, real, task, 3, 2, groups).tolist() == [[2, 3], [2, 0], [0, 0]]


def wearers(seed, counts, m=12, d=20, kinds=7):
    """So many samples of every kind from every wearer, who has ways of his own; kind 0 is to be found."""
    rng = np.random.default_rng(seed)
    ways = (rng.normal(size=(kinds, d)) + 0.8 * rng.normal(size=(m, kinds, d))) / np.sqrt(d)
    for count in counts:
        kind = np.repeat(np.arange(kinds), count)
        xs = [way[kind] + 0.15 * rng.normal(size=(len(kind), d)) / np.sqrt(d) for way in ways]
        yield mj.pack_tasks(xs, [np.where(kind == 0, 1.0, -1.0)] * m, loss_scaling="task_mean", intercept=True)


@pytest.mark.slow
def test_a_class_of_one_sample_a_task_does_not_make_the_trivial_model_best():
    # Were it held out, it would belong to a task trained without any: the more a model learns, the worse it would do.
    train, test = wearers(0, (1, 10))
    problem = mj.Problem(train, mj.losses.Hinge(), R.Independent(1.0))
    grid = mj.grid(R.Probabilistic, lam=[1.0, 0.1, 0.01, 0.001])
    options: Any = dict(key=jax.random.key(0), folds=3, tol=1e-2)
    few = r"in 12 of 12 tasks a class has fewer samples or groups than folds=3 \(task 0: 1 of label \+1\)"
    with pytest.warns(UserWarning, match=f"{few}.*; 12 of 84 samples are alone in their class and stay in training"):
        found: Any = mj.cross_validate(problem, grid, **options)
    assert mj.metrics.error_rate(found.solution.weights, test) < 0.01  # of a trivial model 1 / 7
    with pytest.warns(UserWarning, match="say little of it; take fewer folds"):
        plain = mj.cross_validate(problem, grid, refit=False, keep_rare=False, **options)
    assert plain.best == 0  # the trivial one


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross_validate")
def test_recognising_walks_of_wearers_with_one_sample_of_each_kind(real_data):
    # Human activities: 15.5 % of test samples wrong with the trivial model, about 2 % with the better half of the path.
    har, rng = real_data("har"), np.random.default_rng(0)
    taught, asked = [], []
    for wearer in np.unique(har["subject"])[:20]:
        rows = [rng.permutation(np.flatnonzero((har["subject"] == wearer) & (har["y"] == k))) for k in range(1, 7)]
        taught.append([r[0] for r in rows])
        asked.append(np.concatenate([r[1:16] for r in rows]))
    train, test = (
        mj.pack_tasks([har["X"][r] for r in rows], [np.where(har["y"][r] == 2, 1.0, -1.0) for r in rows],
                      loss_scaling="task_mean", intercept=True, dtype="float32")
        for rows in (taught, asked)
    )  # fmt: skip
    problem = mj.Problem(train, mj.losses.Hinge(), R.Independent(1.0))
    grid = mj.grid(R.Probabilistic, lam=[10.0, 1.0, 0.1, 0.01])
    found: Any = mj.cross_validate(problem, grid, folds=3, tol=1e-2)
    assert mj.metrics.error_rate(found.solution.weights, test) < 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross_validate")
def test_unrelated_tasks_need_sigma2_among_what_is_tuned():
    # The default, infinity, ties tasks together that have nothing in common; see `Probabilistic`.
    lams, errors = [1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001], []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        truth = rng.normal(size=(12, 20))
        xs = [[rng.normal(size=(n, 20)) for _ in truth] for n in (15, 500)]
        train, test = (
            mj.pack_tasks(x, [np.sign(a @ w) for a, w in zip(x, truth, strict=True)], loss_scaling="task_mean")
            for x in xs
        )
        problem = mj.Problem(train, mj.losses.Hinge(), R.Independent(1.0))
        grids = (
            mj.grid(R.Independent, lam=lams),
            mj.grid(R.Probabilistic, lam=lams),
            mj.grid(R.Probabilistic, sigma2=[np.inf, 1.0, 0.1, 0.01], lam=lams),
        )
        found: list[Any] = [mj.cross_validate(problem, grid, key=jax.random.key(seed)) for grid in grids]
        errors.append([float(mj.metrics.error_rate(f.solution.weights, test)) for f in found])
    local, default, tuned = np.mean(errors, axis=0)
    assert default > local + 0.01
    assert tuned < local + 0.01
