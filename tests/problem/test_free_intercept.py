"""The certificate of models whose intercept is not penalised, against a convex solver."""

import cvxpy as cp
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj

M, D, LAM = 4, 3, 0.02
LOSSES = {
    "hinge": (mj.losses.Hinge(), lambda z, y: cp.pos(1 - cp.multiply(y, z))),
    "logistic": (mj.losses.Logistic(), lambda z, y: cp.logistic(-cp.multiply(y, z))),
    "absolute": (mj.losses.Absolute(), lambda z, y: cp.abs(z - y)),
}
REGULARIZERS = {
    "mean": (mj.regularizers.MeanRegularized(LAM, 0.01),
             lambda w: LAM * cp.sum_squares((np.eye(M) - 1 / M) @ w) + 0.01 * cp.sum_squares(w)),
    "learned": (mj.regularizers.Probabilistic(LAM, 10.0), lambda w: LAM * (cp.sum_squares(w) / 10 + cp.normNuc(w) ** 2)),
}  # fmt: skip


def federation(loss):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, D)) for n in (20, 30, 15, 25)]
    ys = [x[:, 0] + t - 1.5 + 0.5 * rng.normal(size=len(x)) for t, x in enumerate(xs)]
    return xs, [np.sign(y) if loss.binary else y for y in ys]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("penalty", REGULARIZERS)
@pytest.mark.slow
def test_it_bounds_the_optimum_without_a_penalty(name, penalty):
    (loss, term), (regularizer, r) = LOSSES[name], REGULARIZERS[penalty]
    xs, ys = federation(loss)
    w, b = cp.Variable((M, D)), cp.Variable(M)
    cost = sum(cp.sum(term(xs[t] @ w[t] + b[t], ys[t])) / len(ys[t]) for t in range(M)) + r(w)
    best = cp.Problem(cp.Minimize(cost)).solve(solver="CLARABEL")
    gaps = []
    for size in (0.1, 10.0):
        problem = mj.Problem(
            mj.pack_tasks(xs, ys, loss_scaling="task_mean", intercept=size), loss, regularizer
        )  # fmt: skip
        s = mj.solve(problem, tol=1e-5, max_rounds=3000)
        found = mj.free_intercept(problem, s.state.beta, s.relation, s.weights)
        assert found.joint_dual <= best + 1e-6
        assert -1e-6 <= found.joint_primal - best <= found.joint_gap + 1e-6
        own = found.primal - sum(  # the penalty has no intercept in it
            float(
                jnp.mean(loss.value(jnp.asarray(xs[t]) @ s.model.weights[t] + s.model.intercept[t], jnp.asarray(ys[t])))
            )
            for t in range(M)
        )
        alone = regularizer.value(jnp.asarray(s.weights)[:, :-1], s.relation)
        np.testing.assert_allclose(own, alone, rtol=1e-6)
        gaps.append(float(found.joint_gap))
    assert gaps[1] < 0.2 * gaps[0]


def test_mistakes_are_named():
    loss = mj.losses.Hinge()
    xs, ys = federation(loss)
    problem = mj.Problem(mj.pack_tasks(xs, ys), loss, mj.regularizers.Independent(0.1))
    beta, weights = jnp.zeros(problem.data.y.shape), jnp.zeros((M, D))
    with pytest.raises(ValueError, match="free_intercept: problem must have samples with an intercept"):
        mj.free_intercept(problem, beta, None, weights)
    joint = problem.replace(
        data=mj.pack_tasks(xs, ys, intercept=5.0), regularizer=mj.regularizers.JointSparse(0.1, 0.1)
    )
    with pytest.raises(ValueError, match="JointSparse learns a scale of the intercept"):
        mj.free_intercept(joint, beta, None, jnp.zeros((M, D + 1)))
