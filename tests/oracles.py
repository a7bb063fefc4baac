"""Optima by tools not written here: a generic convex solver."""

import warnings

import cvxpy as cp
import numpy as np


def _loss(name, z, y):
    margin = 1 - cp.multiply(y, z)
    residual = z - y
    return {
        "hinge": lambda: cp.pos(margin),
        "smoothed_hinge": lambda: _smoothed_hinge(margin, 0.5),
        "squared_hinge": lambda: cp.square(cp.pos(margin)),
        "logistic": lambda: cp.logistic(-cp.multiply(y, z)),
        "squared": lambda: 0.5 * cp.square(residual),
        "absolute": lambda: cp.abs(residual),
        "epsilon_insensitive": lambda: cp.pos(cp.abs(residual) - 0.2),
        "huber": lambda: 0.5 * 0.7**2 * cp.huber(residual / 0.7, 1),
        "quantile": lambda: cp.maximum(-0.3 * residual, 0.7 * residual),
    }[name]()


def all_thresholds(thresholds):
    """The all-threshold hinge loss of labels 0, 1, ...; thresholds are numbers or variables."""

    def loss(z, y):
        sign = np.where(y[:, None] > np.arange(thresholds.shape[0]), 1.0, -1.0)
        return cp.sum(cp.pos(1 - cp.multiply(sign, z[:, None] - thresholds[None])), axis=1)

    return loss


def _smoothed_hinge(r, gamma):
    # An infimal convolution: min over 0 <= s of s^2/(2 gamma) + max(r - s, 0), s <= gamma.
    s = cp.Variable(r.shape, nonneg=True)
    return cp.square(s) / (2 * gamma) + cp.pos(r - s)


def optimum(data, loss, regularizer, tol=1e-11):
    """The optimal value and weights; `loss` is a name or a function, or one per task, `regularizer` maps the weight variable to R(W)."""
    x, y, c, task = (np.asarray(a, float) for a in (data.x, data.y, data.weight, data.task))
    w = cp.Variable((data.num_tasks, x.shape[2]))
    penalty = regularizer(w)
    penalty, constraints = penalty if isinstance(penalty, tuple) else (penalty, [])
    terms = [penalty]
    for k in range(len(x)):
        real = c[k] > 0
        if real.any():
            z, labels = x[k][real] @ w[int(task[k])], y[k][real]
            own = loss if isinstance(loss, str) or callable(loss) else loss[int(task[k])]
            terms.append(cp.sum(cp.multiply(c[k][real], own(z, labels) if callable(own) else _loss(own, z, labels))))
    problem = cp.Problem(cp.Minimize(cp.sum(terms)), constraints)
    with warnings.catch_warnings():  # the semidefinite problems end a little short of the tolerance
        warnings.filterwarnings("ignore", "Solution may be inaccurate")
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=tol, tol_gap_rel=tol, tol_feas=tol, max_iter=500)
    assert problem.status in ("optimal", "optimal_inaccurate")
    return problem.value, w.value


def independent(lam):
    return lambda w: (
        lam * cp.sum_squares(w) if np.ndim(lam) == 0 else cp.sum(cp.multiply(lam, cp.sum(cp.square(w), axis=1)))
    )


def mean_regularized(lam1, lam2):
    def value(w):
        m = w.shape[0]
        return lam1 * cp.sum_squares((np.eye(m) - np.full((m, m), 1 / m)) @ w) + lam2 * cp.sum_squares(w)

    return value


def graph(omega, lam1, lam2):
    values, vectors = np.linalg.eigh(np.asarray(omega, float))
    root = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
    return lambda w: lam1 * cp.sum_squares(root @ w) + lam2 * cp.sum_squares(w)


def squared_nuclear_norm(lam, sigma2):
    """(14) minimised over Omega."""
    return lambda w: lam * cp.square(cp.normNuc(w)) + (lam / sigma2) * cp.sum_squares(w)


def clustered(lam, eta, k):
    """(12) minimised over Omega: lam tr(W' inv(eta I + Omega) W) by its Schur complement."""

    def value(w):
        m, d = w.shape
        omega, s = cp.Variable((m, m), symmetric=True), cp.Variable((d, d), symmetric=True)
        block = cp.bmat([[s, w.T], [w, eta * np.eye(m) + omega]])
        constraints = [block >> 0, omega >> 0, np.eye(m) - omega >> 0, cp.trace(omega) == k]
        return lam * cp.trace(s), constraints

    return value
