"""Some forty ways to break the library by a line: each is a mistake that somebody could make."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A line as it is and as it must not be; `near` are the folders of tests that should see it first."""

    name: str
    file: str
    right: str
    wrong: str
    near: tuple[str, ...]


FAULTS = (
    Fault(
        "the hinge's step is not clipped from above", "losses/_margin.py",
        "return jnp.clip(a + saturating_ratio(1.0 - p, kappa), 0.0, 1.0)",
        "return jnp.maximum(a + saturating_ratio(1.0 - p, kappa), 0.0)", ("losses", "node"),
    ),
    Fault(
        "the conjugate of the logistic loss has the wrong sign in one term", "losses/_margin.py",
        "return _xlogx(a) + (1.0 - a) * jnp.log1p(", "return _xlogx(a) - (1.0 - a) * jnp.log1p(", ("losses",),
    ),
    Fault(
        "the quantile loss takes the other quantile", "losses/_residual.py",
        "return jnp.clip(beta - saturating_ratio(e, kappa), self.tau - 1.0, self.tau)",
        "return jnp.clip(beta - saturating_ratio(e, kappa), -self.tau, 1.0 - self.tau)", ("losses",),
    ),
    Fault(
        "padded rows take steps", "_node/local_solver.py",
        "visit = (weight > 0) & (done < steps)", "visit = (weight >= 0) & (done < steps)", ("node", "algorithms"),
    ),
    Fault(
        "budgets are not kept", "_node/kernel.py",
        "visit, curvature = (weight > 0) & (done < steps), wide(q)", "visit, curvature = weight > 0, wide(q)", ("node",),
    ),
    Fault(
        "sigma' is not multiplied with the tasks' curvature", "servers/_dual.py",
        "return DualState(relation, coupling, sigma, own, sigma * own,", "return DualState(relation, coupling, sigma, own, own,",
        ("servers", "theory", "algorithms"),
    ),
    Fault(
        "Omega is never replaced", "servers/_dual.py",
        "return lax.cond(due, lambda: self._relearn(problem, learned, state, beta, v), lambda: state)",
        "return lax.cond(due & False, lambda: self._relearn(problem, learned, state, beta, v), lambda: state)", ("servers",),
    ),
    Fault(
        "the weighing forgets the strength of the coupling", "servers/_quadratic_programs.py",
        "return Iterate(iterate.h + RELAXATION * (combine(jnp.stack(a)) - iterate.h + pulled), a), asked",
        "return Iterate(iterate.h + RELAXATION * (combine(jnp.stack(a)) - iterate.h), a), asked", ("servers",),
    ),
    Fault(
        "rounding is not counted in a certificate", "_problem/certificate.py",
        "return terms, value, moved + 8.0 * eps * jnp.abs(value)", "return terms, value, 0.0 * moved", ("problem",),
    ),
    Fault(
        "an older bound counts although it is worse", "_problem/gap.py",
        "better = by_bound < self.joint_gap", "better = by_bound > self.joint_gap", ("problem", "driver", "servers"),
    ),
    Fault(
        "drop-outs are the other nodes", "systems/_availability.py",
        "return Work(request.steps, per_node(key, request, p.dtype) >= p)",
        "return Work(request.steps, per_node(key, request, p.dtype) < p)", ("systems", "algorithms"),
    ),
    Fault(
        "a round lasts as long as its quickest node", "costs.py",
        "longest = jnp.max(", "longest = jnp.min(", ("test_costs.py", "systems"),
    ),
    Fault(
        "uploads are charged at the price of downloads", "costs.py",
        "return latency + width * down / self.download + width * up / self.upload",
        "return latency + width * down / self.download + width * up / self.download", ("test_costs.py",),
    ),
    Fault(
        "a solve goes on beyond its tolerance", "_driver/rounds.py",
        "ended = (record.residual <= tol)", "ended = (record.residual <= 0.0 * tol)",
        ("driver",),
    ),
    Fault(
        "a run that has converged says that it has not", "_driver/host.py",
        "Status.CONVERGED: residual <= tol,", "Status.CONVERGED: residual < 0.1 * tol,", ("driver",),
    ),
    Fault(
        "a damaged checkpoint is taken", "_files/container.py",
        'about["digest"] != _digest(about, arrays)', 'not about["digest"]', ("files", "driver"),
    ),
    Fault(
        "hypergradients forget the direct part", "_derivatives/optimum.py",
        "gradient = jax.tree.map(lambda a, b: a if a.dtype == jax.dtypes.float0 else a + b, direct, through)",
        "gradient = jax.tree.map(lambda a, b: a if a.dtype == jax.dtypes.float0 else b, direct, through)", ("derivatives",),
    ),
    Fault(
        "MINRES loses a rotation", "_numerics/linear_systems.py",
        "delta, gbar, bar = cs * dbar + sn * alfa, sn * dbar - cs * alfa, (-cs * off, sn * off)",
        "delta, gbar, bar = cs * dbar + sn * alfa, sn * dbar + cs * alfa, (-cs * off, sn * off)", ("derivatives",),
    ),
    Fault(
        "federated averaging weighs every client alike", "_neural/client.py",
        "return jnp.sum(self.data.weight[self.place])",
        "return jnp.ones((), self.data.dtype)", ("personalized", "neural"),
    ),
    Fault(
        "a Gaussian's shift is its mean", "_neural/gaussian.py",
        "return cls(precision, precision * mean)", "return cls(precision, mean)", ("neural",),
    ),
    Fault(
        "folds are dealt by row, not in random order", "_data/splits_and_folds.py",
        "order = np.lexsort((draw, run, least[run], node))", "order = np.lexsort((run, least[run], node))", ("data", "selection"),
    ),
    Fault(
        "standardising ignores the mean", "_data/moments.py",
        "return w, np.asarray(intercept, np.float64) - np.sum(w * self.mean, axis=-1) + self.level",
        "return w, np.asarray(intercept, np.float64) + self.level", ("data", "sklearn"),
    ),
    Fault(
        "ties count as losses in the area under the curve", "metrics/_rankings.py",
        "_above(z, negative) + _at_least(z, negative)", "2 * _at_least(z, negative)", ("metrics",),
    ),
    Fault(
        "errors of one kind count twice", "metrics/_classes.py",
        "jnp.where(z * data.y > 0, 0.0, jnp.ones_like(z))", "jnp.where(z * data.y > 0, 0.0, 1.0 + (data.y > 0))", ("metrics",),
    ),
    Fault(
        "quantised vectors lose their scale", "compression/_forms.py",
        "return centred * code.scale.astype(like.dtype)[:, None]", "return centred", ("compression",),
    ),
    Fault(
        "the classes of a saved model come back in another order", "_model/linear.py",
        "labels[signs] = self._classes((z[signs] > 0).astype(int), (-1.0, 1.0))",
        "labels[signs] = self._classes((z[signs] <= 0).astype(int), (-1.0, 1.0))", ("model",),
    ),
    Fault(
        "the least likely class is predicted", "multiclass/_one_vs_rest.py",
        "return jnp.argmax(_scores.said(self, data), axis=0).astype(jnp.int32)",
        "return jnp.argmin(_scores.said(self, data), axis=0).astype(jnp.int32)", ("multiclass",),
    ),
    Fault(
        "scores of the last fits are those of the first", "_selection/by_fold.py",
        "which = np.minimum(np.arange(start, start + size), total - 1)",
        "which = np.minimum(np.arange(size), total - 1)", ("selection",),
    ),
    Fault(
        "svmlight's indices begin at the wrong end", "datasets/_svmlight.py",
        "index.extend([int(i) for i, _ in pairs])", "index.extend([int(i) + 1 for i, _ in pairs])", ("datasets",),
    ),
    Fault(
        "the proximal server forgets who did not answer", "servers/_proximal.py",
        "model, step = prox.weights, since.share[:, None] * (prox.weights - state.center)",
        "model, step = prox.weights, prox.weights - state.center", ("servers",),
    ),
    Fault(
        "a Newton step forgets what tasks share", "coupling/_simple.py",
        "more, less = own.solve(rest + common[None], slopes)", "more, less = own.solve(rest, slopes)", ("algorithms",),
    ),
    Fault(
        "Newton keeps weights that are worse", "_algorithms/newton.py",
        "slopes, bend), kept, caution\n", "slopes, bend), jnp.ones_like(kept), caution\n", ("algorithms",),
    ),
    Fault(
        "a system of the size of the samples forgets its right side", "_algorithms/second_derivatives.py",
        "slopes / root - root * data.predictions(right), system)", "slopes / root, system)", ("algorithms",),
    ),
    Fault(
        "an interior point goes on without an answer", "_algorithms/interior_point.py",
        "answered, better = jnp.all(steps >= full), numbers", "answered, better = jnp.array(True), numbers", ("algorithms",),
    ),
    Fault(
        "gradients of samples are not clipped", "_neural/private_gradients.py",
        "shorter = jnp.minimum(1.0, safe_ratio(how.clip, length))", "shorter = jnp.ones_like(length)", ("privacy",),
    ),
    Fault(
        "steps that privacy allows are not counted", "_neural/budgeted_trainer.py",
        "return budget, self._after(spent, budget, data, nodes)", "return budget, spent", ("privacy",),
    ),
    Fault(
        "a published answer is taken for the minimiser", "privacy/_release.py",
        "sensitivity = moved + 2.0 * math.sqrt(2.0 * gap)", "sensitivity = moved", ("privacy",),
    ),
    Fault(
        "clients' changes are not cut", "_neural/private_clients.py",
        "Clipped(scaled(cut, change), within)", "Clipped(change, within)", ("privacy",),
    ),
    Fault(
        "rounds that privacy of clients allows are not counted", "_neural/private_clients.py",
        "later, kept.used + 1", "later, kept.used", ("privacy",),
    ),
)  # fmt: skip
