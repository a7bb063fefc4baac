"""Data that came later: found by name, after the samples that are there, and a solve that goes on."""

import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj

NAMES = ["ash", "elm", "oak", "yew"]


def table(sizes, seed=0):
    rng = np.random.default_rng(seed)
    who = np.repeat(list(sizes), list(sizes.values()))
    x = rng.normal(size=(len(who), 3))
    slope = np.array([[1.0, 0.5 * NAMES.index(w), -1.0] for w in who])
    return x, np.sum(x * slope, axis=1) + 0.3 * rng.normal(size=len(x)), who


def packed(rows, **options):
    return mj.pack_tasks(*rows, loss_scaling="task_mean", intercept=True, **options)


def together(*tables):
    return tuple(np.concatenate(each) for each in zip(*tables, strict=True))


OLD, NEW = table({"ash": 20, "elm": 12, "oak": 7}), table({"oak": 9, "yew": 15, "ash": 1}, seed=1)


def test_it_is_the_data_packed_at_once():
    joined, whole = packed(OLD).join(packed(NEW)), packed(together(OLD, NEW))
    assert joined.names == whole.names
    assert joined.sizes.tolist() == whole.sizes.tolist()
    for t, n in enumerate(whole.sizes.tolist()):
        np.testing.assert_array_equal(joined.x[t, :n], whole.x[t, :n])
        np.testing.assert_array_equal(joined.y[t, :n], whole.y[t, :n])
    np.testing.assert_allclose(joined.weight.sum(1), 1.0)
    np.testing.assert_array_equal(joined.weight > 0, whole.weight > 0)


@pytest.mark.parametrize(
    "regularizer",
    [
        mj.regularizers.Probabilistic(0.05, 10.0),
        pytest.param(mj.regularizers.MeanRegularized(0.1, 0.01), marks=pytest.mark.slow),
    ],
    ids=["learned", "given"],
)  # fmt: skip
@pytest.mark.slow
def test_a_solve_goes_on_and_needs_fewer_rounds(regularizer):
    algorithm = mj.Mocha()
    old = mj.Problem(packed(OLD), mj.losses.Squared(), regularizer)
    solution = mj.solve(old, algorithm, tol=1e-6)
    larger = old.replace(data=old.data.join(packed(NEW)))
    state = algorithm.add_tasks(solution.state, larger)
    for t, n in enumerate(old.data.sizes.tolist()):  # the old samples have their duals
        np.testing.assert_array_equal(state.beta[t, :n], solution.state.beta[t, :n])
    on, anew = (mj.solve(larger, algorithm, state=start, tol=1e-4, max_rounds=2000) for start in (state, None))
    assert on.status == anew.status == mj.Status.CONVERGED
    assert on.rounds <= anew.rounds
    np.testing.assert_allclose(on.primal, anew.primal, rtol=2e-4)


@pytest.mark.slow
def test_a_task_that_left_weighs_nothing():
    problem = mj.Problem(packed(OLD), mj.losses.Squared(), mj.regularizers.MeanRegularized(0.1, 0.01))
    algorithm = mj.Mocha()
    solution = mj.solve(problem, algorithm, tol=1e-6)
    stays = np.asarray(problem.data.weight) > 0
    stays[1] = False
    smaller = problem.replace(data=problem.data.keep(jnp.asarray(stays)))
    on = mj.solve(smaller, algorithm, tol=1e-6, state=algorithm.warm_start(solution.state, smaller))
    assert on.status == mj.Status.CONVERGED
    anew = mj.solve(smaller, algorithm, tol=1e-6)
    np.testing.assert_allclose(on.primal, anew.primal, rtol=2e-6)


@pytest.mark.slow
def test_standardised_data_takes_what_is_packed_like_it():
    old = packed(OLD).standardized("task", labels=True)
    some = NEW[2] != "yew"
    new = tuple(each[some] for each in NEW)
    like = packed_like(new, old)
    joined = old.join(like)
    assert joined.scaling == old.scaling
    assert joined.sizes.tolist() == [21, 12, 16]
    with pytest.raises(ValueError, match="must have the intercept and the scaling of this data"):
        old.join(packed(new))


def packed_like(rows, data):
    return mj.pack_tasks(*rows, like=data)


BAD = {
    "unnamed": (lambda: packed(OLD).join(mj.pack_tasks([OLD[0]], [OLD[1]])), "other must have names of tasks"),
    "width": (lambda: packed(OLD).join(packed((NEW[0][:, :2], *NEW[1:]))), "features"),
    "weights": (lambda: packed(OLD).join(mj.pack_tasks(*NEW, intercept=True)), "loss_scaling"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_named(case):
    call, sentence = BAD[case]
    with pytest.raises(ValueError, match=sentence):
        call()


def test_weights_of_ones_own_stay():
    data = packed(OLD)
    data = data.replace(weight=data.weight * jnp.where(jnp.arange(data.y.shape[1])[None] == 0, 3.0, 1.0))
    joined = data.join(packed(NEW))
    for t, n in enumerate(joined.sizes.tolist()):
        expected = np.ones(n)
        if t < 3:
            expected[0] = 3.0
        np.testing.assert_allclose(joined.weight[t, :n], expected / n)


def test_data_with_other_intercepts_are_not_put_together():
    other = mj.pack_tasks(*table({"yew": 5}), loss_scaling="task_mean", intercept=10.0)
    with pytest.raises(ValueError, match="the intercept is 1 here and 10 there"):
        packed(OLD).join(other)
