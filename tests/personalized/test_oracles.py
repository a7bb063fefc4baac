"""Identities between the oracles, and closed forms on quadratics, that the papers imply: pure NumPy, no library."""

import numpy as np
import pytest

from tests.personalized import oracles

K = 4
WEIGHTS = np.array([3.0, 1.0, 2.0, 5.0])
NAMES = ("body", "head")
EVERYBODY = list(range(K))


def flat(w):
    return np.concatenate([w[name] for name in NAMES])


def named(vector):
    return {"body": np.array(vector[:2], dtype=float), "head": np.array(vector[2:], dtype=float)}


class Quadratics:
    """f_k(w) = 1/2 (w - a_k)' H_k (w - a_k) + level, eigenvalues of H_k between 0.5 and 2."""

    def __init__(self, seed=0, level=0.0, number=K):
        rng = np.random.default_rng(seed)
        self.a = rng.normal(size=(number, 4))
        self.h = np.empty((number, 4, 4))
        for k in range(number):
            basis = np.linalg.qr(rng.normal(size=(4, 4)))[0]
            self.h[k] = basis @ np.diag(rng.uniform(0.5, 2.0, size=4)) @ basis.T
        self.level = level

    def grad(self, k, w):
        return named(self.h[k] @ (flat(w) - self.a[k]))

    def loss(self, k, w):
        return 0.5 * (flat(w) - self.a[k]) @ self.h[k] @ (flat(w) - self.a[k]) + self.level

    def optimum(self, weights=None, curvature=None):
        """argmin of sum_k weights[k] 1/2 (w - a_k)' curvature[k] (w - a_k)."""
        curvature = self.h if curvature is None else curvature
        weights = np.ones(len(self.a)) if weights is None else weights
        return np.linalg.solve(
            np.einsum("k,kij->ij", weights, curvature), np.einsum("k,kij,kj->i", weights, curvature, self.a)
        )

    def local(self, k, start, steps, lr):
        """Gradient steps in closed form: a + (I - lr H)^steps (start - a)."""
        shrink = np.linalg.matrix_power(np.eye(4) - lr * self.h[k], steps)
        return self.a[k] + shrink @ (start - self.a[k])


@pytest.fixture(name="f")
def quadratics():
    return Quadratics()


FIRST = named([0.3, -0.2, 0.5, 0.1])


def run(state, step, rounds, chosen=EVERYBODY):
    for t in range(rounds):
        state = step(state, chosen(t) if callable(chosen) else chosen)
    return state


def half(t):
    """Two clients a round, each pair of neighbours in its turn."""
    return [t % K, (t + 1) % K]


def close(actual, desired, rtol=1e-9, atol=1e-11):
    actual = flat(actual) if isinstance(actual, dict) else actual
    desired = flat(desired) if isinstance(desired, dict) else desired
    np.testing.assert_allclose(actual, desired, rtol=rtol, atol=atol)


def fedavg(f, weights=None, steps=3, lr=0.2):
    return lambda state, chosen: oracles.round_of_fedavg(state, chosen, f.grad, weights=weights, steps=steps, lr=lr)


# --- FedAvg ----------------------------------------------------------------------------------------------------------


def test_fedavg_is_the_weighted_mean_of_closed_form_local_steps(f):
    state = fedavg(f, WEIGHTS)(oracles.start_of_fedavg(FIRST), [0, 2, 3])
    ends = [f.local(k, flat(FIRST), 3, 0.2) for k in (0, 2, 3)]
    close(state["model"], np.average(ends, axis=0, weights=WEIGHTS[[0, 2, 3]]))
    close(oracles.model_of_fedavg(state, 1), state["model"])
    tuned = oracles.model_of_fedavg(state, 1, f.grad, steps=4, lr=0.1)
    close(tuned, f.local(1, flat(state["model"]), 4, 0.1))


def test_a_round_changes_no_state_in_place(f):
    state = oracles.start_of_ditto(FIRST, K)
    before = [flat(state["model"]).copy(), *(flat(v).copy() for v in state["own"])]
    oracles.round_of_ditto(state, EVERYBODY, f.grad, steps=2, lr=0.2, lam=0.3)
    for old, w in zip(before, [state["model"], *state["own"]], strict=True):
        assert np.array_equal(old, flat(w))


# --- Ditto, MR-MTL, pFedMe: closed forms of their objectives ----------------------------------------------------------


def test_ditto_of_lambda_zero_trains_locally_beside_fedavg(f):
    state = run(
        oracles.start_of_ditto(FIRST, K),
        lambda s, c: oracles.round_of_ditto(s, c, f.grad, steps=3, lr=0.2, lam=0.0),
        2,
        half,
    )
    reference = run(oracles.start_of_fedavg(FIRST), fedavg(f), 2, half)
    close(state["model"], reference["model"])
    for k, rounds in enumerate([1, 2, 1, 0]):
        close(oracles.model_of_ditto(state, k), f.local(k, flat(FIRST), 3 * rounds, 0.2))


def test_ditto_uses_the_model_received_and_its_own_steps(f):
    state = oracles.start_of_ditto(FIRST, K)
    new = oracles.round_of_ditto(state, [1], f.grad, steps=2, lr=0.2, lam=0.7, own_steps=1, own_lr=0.1)
    again = oracles.round_of_ditto(new, [2], f.grad, steps=2, lr=0.2, lam=0.7, own_steps=1, own_lr=0.1)
    v = flat(FIRST)
    close(again["own"][2], v - 0.1 * (f.h[2] @ (v - f.a[2]) + 0.7 * (v - flat(new["model"]))))


def test_ditto_converges_to_its_bilevel_solution(f):
    lam = 0.8
    state = run(
        oracles.start_of_ditto(FIRST, K),
        lambda s, c: oracles.round_of_ditto(s, c, f.grad, steps=1, lr=0.3, lam=lam),
        150,
    )
    w = f.optimum()
    close(state["model"], w)
    for k in EVERYBODY:
        desired = np.linalg.solve(f.h[k] + lam * np.eye(4), f.h[k] @ f.a[k] + lam * w)
        close(oracles.model_of_ditto(state, k), desired)
        close(oracles.new_client_of_ditto(state, k, f.grad, steps=150, lr=0.3, lam=lam), desired)


def test_mrmtl_of_lambda_zero_trains_locally(f):
    state = run(
        oracles.start_of_mrmtl(FIRST, K),
        lambda s, c: oracles.round_of_mrmtl(s, c, f.grad, steps=2, lr=0.2, lam=0.0),
        3,
    )
    for k in EVERYBODY:
        close(oracles.model_of_mrmtl(state, k), f.local(k, flat(FIRST), 6, 0.2))


@pytest.mark.parametrize("server", ["uploads", "changes"])
@pytest.mark.parametrize("share", [None, WEIGHTS])
@pytest.mark.parametrize("steps", [1, 3])
def test_mrmtl_converges_to_the_optimum_of_its_objective(f, server, share, steps):
    lam = 0.8
    state = run(
        oracles.start_of_mrmtl(FIRST, K),
        lambda s, c: oracles.round_of_mrmtl(s, c, f.grad, steps=steps, lr=0.3, lam=lam, share=share, server=server),
        240 // steps,
    )
    portions = oracles.portions_of(EVERYBODY, share)
    system = np.zeros((4 * K, 4 * K))  # (H_k + lam) w_k - lam sum_j p_j w_j = H_k a_k
    for k in EVERYBODY:
        system[4 * k : 4 * k + 4, 4 * k : 4 * k + 4] += f.h[k] + lam * np.eye(4)
        for j in EVERYBODY:
            system[4 * k : 4 * k + 4, 4 * j : 4 * j + 4] -= lam * portions[j] * np.eye(4)
    desired = np.linalg.solve(system, np.einsum("kij,kj->ki", f.h, f.a).ravel()).reshape(K, 4)
    close(np.array([flat(w) for w in state["own"]]), desired)
    close(state["mean"], portions @ desired)


def test_pfedme_converges_to_the_optimum_of_the_moreau_envelopes(f):
    lam, eye = 1.5, np.eye(4)
    envelopes = np.array([lam * np.linalg.solve(h + lam * eye, h) for h in f.h])  # Hessians; the minimisers are the a_k
    w = f.optimum(curvature=envelopes)
    for beta, warm in [(1.0, True), (2.0, False)]:
        state = run(
            oracles.start_of_pfedme(FIRST, K),
            lambda s, c, beta=beta, warm=warm: oracles.round_of_pfedme(
                s, c, f.grad, steps=1, lr=0.8, lam=lam, inner_steps=26, inner_lr=0.3, beta=beta, warm=warm
            ),
            60,
        )
        close(state["model"], w)
        for k in EVERYBODY:
            desired = np.linalg.solve(f.h[k] + lam * eye, f.h[k] @ f.a[k] + lam * w)
            close(oracles.model_of_pfedme(state, k), desired)
            close(oracles.new_client_of_pfedme(state, k, f.grad, lam=lam, inner_steps=30, inner_lr=0.3), desired)


def test_pfedme_of_exact_minimisers_steps_along_the_envelope(f):
    lam, lr, eye = 1.5, 0.2, np.eye(4)
    options = {"steps": 3, "lr": lr, "lam": lam, "inner_steps": 40, "inner_lr": 0.3}
    state = oracles.round_of_pfedme(oracles.start_of_pfedme(FIRST, K), [2], f.grad, **options)
    w = flat(FIRST)
    for _ in range(3):
        last, w = w, w - lr * lam * np.linalg.solve(f.h[2] + lam * eye, f.h[2] @ (w - f.a[2]))
    close(state["model"], w)
    close(state["own"][2], np.linalg.solve(f.h[2] + lam * eye, f.h[2] @ f.a[2] + lam * last))
    everybody = oracles.round_of_pfedme(oracles.start_of_pfedme(FIRST, K), [2], f.grad, trained=EVERYBODY, **options)
    close(everybody["model"], state["model"])
    assert not np.allclose(flat(everybody["own"][0]), flat(state["own"][0]))


@pytest.mark.parametrize("warm", [True, False])
def test_pfedme_starts_theta_at_the_last_theta_or_at_w(f, warm):
    options = {"steps": 2, "lr": 0.2, "lam": 1.5, "inner_steps": 1, "inner_lr": 0.1}
    state = oracles.round_of_pfedme(
        oracles.start_of_pfedme(FIRST, K), [1, 3], f.grad, beta=0.6, warm=warm, share=WEIGHTS, **options
    )
    ends = []
    for k in (1, 3):
        w = theta = flat(FIRST)
        for _ in range(2):
            theta = theta if warm else w
            theta = theta - 0.1 * (f.h[k] @ (theta - f.a[k]) + 1.5 * (theta - w))
            w = w - 0.2 * 1.5 * (w - theta)
        close(state["own"][k], theta)
        ends.append(w)
    close(state["model"], 0.4 * flat(FIRST) + 0.6 * np.average(ends, axis=0, weights=WEIGHTS[[1, 3]]))


# --- A shared part and a part of one's own ----------------------------------------------------------------------------


def joint(name, f, steps=2, lr=0.2, weights=None):
    if name == "fedbn":
        return lambda s, c: oracles.round_of_fedbn(s, c, f.grad, share=weights, steps=steps, lr=lr)
    method = {"fedper": oracles.round_of_fedper, "lg_fedavg": oracles.round_of_lg_fedavg}[name]
    return lambda s, c: method(s, c, f.grad, weights=weights, steps=steps, lr=lr)


@pytest.mark.parametrize("name", ["fedper", "lg_fedavg", "fedbn"])
def test_all_shared_is_fedavg_and_none_shared_is_local_training(f, name):
    state = run(oracles.start_of_partial(FIRST, K, set(NAMES)), joint(name, f, weights=WEIGHTS), 3, half)
    reference = run(oracles.start_of_fedavg(FIRST), fedavg(f, WEIGHTS, steps=2), 3, half)
    close(oracles.model_of_partial(state, 3), reference["model"])
    state = run(oracles.start_of_partial(FIRST, K, set()), joint(name, f, weights=WEIGHTS), 3)
    for k in EVERYBODY:
        close(oracles.model_of_partial(state, k), f.local(k, flat(FIRST), 6, 0.2))


def optimum_of_partial(f, shared):
    """min over the shared part s and parts o_k of sum_k f_k(s, o_k): one linear system."""
    own = [i for i in range(4) if i not in shared]
    reduced, right = np.zeros((len(shared), len(shared))), np.zeros(len(shared))
    for h, a in zip(f.h, f.a, strict=True):
        solved = np.linalg.solve(h[np.ix_(own, own)], h[np.ix_(own, shared)])
        schur = h[np.ix_(shared, shared)] - h[np.ix_(shared, own)] @ solved
        reduced, right = reduced + schur, right + schur @ a[shared]
    s = np.linalg.solve(reduced, right)
    models = np.empty((K, 4))
    for k, (h, a) in enumerate(zip(f.h, f.a, strict=True)):
        models[k, shared] = s
        models[k, own] = a[own] - np.linalg.solve(h[np.ix_(own, own)], h[np.ix_(own, shared)] @ (s - a[shared]))
    return models


@pytest.mark.parametrize(("name", "shared"), [("fedper", "body"), ("lg_fedavg", "head"), ("fedbn", "body")])
def test_one_joint_step_converges_to_the_best_shared_part(f, name, shared):
    state = run(oracles.start_of_partial(FIRST, K, {shared}), joint(name, f, steps=1, lr=0.4), 300)
    desired = optimum_of_partial(f, [0, 1] if shared == "body" else [2, 3])
    close(np.array([flat(oracles.model_of_partial(state, k)) for k in EVERYBODY]), desired)


def test_fedrep_converges_to_the_best_shared_part(f):
    start = oracles.start_of_fedrep(FIRST, K, {"body"})
    state = run(start, lambda s, c: oracles.round_of_fedrep(s, c, f.grad, head_steps=5, lr=0.4), 250)
    desired = optimum_of_partial(f, [0, 1])
    close(np.array([flat(oracles.model_of_fedrep(state, k)) for k in EVERYBODY]), desired)
    close(oracles.new_client_of_fedrep(state, 1, f.grad, {"head": np.zeros(2)}, head_steps=150, lr=0.4), desired[1])


def test_fedrep_fits_the_head_to_the_old_body_and_the_body_to_the_new_head(f):
    start = oracles.start_of_fedrep(FIRST, K, {"body"})
    state = oracles.round_of_fedrep(start, [1, 3], f.grad, head_steps=3, lr=0.2, share=WEIGHTS)
    bodies = []
    for k in (1, 3):
        w = flat(FIRST)
        for _ in range(3):
            w[2:] -= 0.2 * (f.h[k] @ (w - f.a[k]))[2:]
        close(state["own"][k]["head"], w[2:])
        bodies.append(w[:2] - 0.2 * (f.h[k] @ (w - f.a[k]))[:2])
    close(state["shared"]["body"], np.average(bodies, axis=0, weights=WEIGHTS[[1, 3]]))
    close(state["own"][0]["head"], FIRST["head"])


def test_lg_fedavg_gives_a_new_client_the_models_of_all(f):
    state = joint("lg_fedavg", f)(oracles.start_of_lg_fedavg(FIRST, K, {"head"}), EVERYBODY)
    models = oracles.new_client_of_lg_fedavg(state)
    assert len(models) == K
    close(models[2], oracles.model_of_lg_fedavg(state, 2))


# --- SCAFFOLD and FedDyn: heterogeneous clients, local steps, and still the global optimum ----------------------------


def scaffold(f, option=2, steps=4, lr=0.15, server_lr=1.0):
    return lambda s, c: oracles.round_of_scaffold(s, c, f.grad, steps=steps, lr=lr, option=option, server_lr=server_lr)


@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_of_one_client_is_gradient_descent(option):
    f = Quadratics(number=1)
    state = run(oracles.start_of_scaffold(FIRST, 1), scaffold(f, option), 3, [0])
    close(oracles.model_of_scaffold(state), f.local(0, flat(FIRST), 12, 0.15))


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("chosen", [EVERYBODY, half])
def test_scaffold_reaches_the_global_optimum_and_fedavg_does_not(f, option, chosen):
    state = run(oracles.start_of_scaffold(FIRST, K), scaffold(f, option, steps=3), 200, chosen)
    close(state["model"], f.optimum(), rtol=1e-7, atol=1e-8)
    close(state["control"], np.mean([flat(c) for c in state["own"]], axis=0), atol=1e-12)
    for k in EVERYBODY:
        close(state["own"][k], f.h[k] @ (f.optimum() - f.a[k]), rtol=1e-6, atol=1e-7)
    reference = run(oracles.start_of_fedavg(FIRST), fedavg(f, steps=3, lr=0.15), 60)
    assert np.linalg.norm(flat(reference["model"]) - f.optimum()) > 1e-2


def test_scaffold_controls_are_gradients_at_x_or_along_the_way(f):
    start = oracles.start_of_scaffold(FIRST, K)
    state = oracles.round_of_scaffold(start, [0, 3], f.grad, steps=2, lr=0.1, option=1, server_lr=0.5)
    close(state["own"][3], f.grad(3, FIRST))
    close(state["control"], (flat(f.grad(0, FIRST)) + flat(f.grad(3, FIRST))) / K)
    ends = [f.local(k, flat(FIRST), 2, 0.1) for k in (0, 3)]  # controls are zero in the first round
    close(state["model"], 0.5 * flat(FIRST) + 0.5 * np.mean(ends, axis=0))
    state = oracles.round_of_scaffold(start, [0, 3], f.grad, steps=2, lr=0.1, option=2)
    passed = [flat(f.grad(3, FIRST)), flat(f.grad(3, named(f.local(3, flat(FIRST), 1, 0.1))))]
    close(state["own"][3], np.mean(passed, axis=0))


@pytest.mark.parametrize("alpha", [0.5, 2.0])
@pytest.mark.parametrize("chosen", [EVERYBODY, half])
def test_feddyn_reaches_the_global_optimum(f, alpha, chosen):
    state = run(
        oracles.start_of_feddyn(FIRST, K),
        lambda s, c: oracles.round_of_feddyn(s, c, f.grad, steps=8, lr=0.25, alpha=alpha),
        150,
        chosen,
    )
    close(oracles.model_of_feddyn(state), f.optimum(), rtol=1e-7, atol=1e-8)
    close(state["h"], np.mean([flat(g) for g in state["own"]], axis=0), atol=1e-12)
    for k in EVERYBODY:
        close(state["own"][k], f.h[k] @ (f.optimum() - f.a[k]), rtol=1e-6, atol=1e-7)


def test_feddyn_keeps_the_gradient_of_an_exact_minimiser(f):
    state = oracles.start_of_feddyn(FIRST, K)
    for chosen in ([0, 1], [1, 2]):
        old, state = state, oracles.round_of_feddyn(state, chosen, f.grad, steps=400, lr=0.25, alpha=0.7)
    right = f.h[1] @ f.a[1] + flat(old["own"][1]) + 0.7 * flat(old["model"])
    end = np.linalg.solve(f.h[1] + 0.7 * np.eye(4), right)
    close(state["own"][1], f.h[1] @ (end - f.a[1]))
    close(state["own"][3], np.zeros(4))


# --- Per-FedAvg ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [1e-2, 1.0])
def test_perfedavg_finite_differences_are_exact_on_quadratics(f, delta):
    alpha, beta, steps = 0.3, 0.2, 3
    state = oracles.round_of_perfedavg(
        oracles.start_of_perfedavg(FIRST), [1], f.grad, steps=steps, alpha=alpha, beta=beta, order="free", delta=delta
    )
    w, lookahead = flat(FIRST), np.eye(4) - alpha * f.h[1]
    for _ in range(steps):
        w = w - beta * lookahead @ f.h[1] @ lookahead @ (w - f.a[1])
    close(state["model"], w)


@pytest.mark.parametrize(("order", "power"), [("first", 1), ("free", 2)])
def test_perfedavg_fixed_points_are_those_of_their_direction(f, order, power):
    alpha = 0.3
    state = run(
        oracles.start_of_perfedavg(FIRST),
        lambda s, c: oracles.round_of_perfedavg(s, c, f.grad, steps=1, alpha=alpha, beta=0.6, order=order),
        300,
    )
    curvature = np.array([np.linalg.matrix_power(np.eye(4) - alpha * h, power) @ h for h in f.h])
    close(state["model"], f.optimum(curvature=curvature))
    close(oracles.model_of_perfedavg(state, 2, f.grad, alpha=alpha), f.local(2, flat(state["model"]), 1, alpha))


def test_perfedavg_of_alpha_zero_is_fedavg(f):
    for order in ("first", "free"):
        state = run(
            oracles.start_of_perfedavg(FIRST),
            lambda s, c, order=order: oracles.round_of_perfedavg(
                s, c, f.grad, steps=3, alpha=0.0, beta=0.2, order=order
            ),
            2,
            half,
        )
        close(state["model"], run(oracles.start_of_fedavg(FIRST), fedavg(f), 2, half)["model"])


# --- APFL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_apfl_trains_the_shared_model_by_fedavg(f, alpha):
    state = run(
        oracles.start_of_apfl(FIRST, K, alpha),
        lambda s, c: oracles.round_of_apfl(s, c, f.grad, steps=3, lr=0.2),
        2,
        half,
    )
    close(state["model"], run(oracles.start_of_fedavg(FIRST), fedavg(f), 2, half)["model"])
    if alpha == 0.0:
        close(oracles.model_of_apfl(state, 1), state["model"])
        close(state["own"][1], FIRST)
    if alpha == 1.0:
        close(oracles.model_of_apfl(state, 1), f.local(1, flat(FIRST), 6, 0.2))


def test_apfl_steps_take_all_gradients_at_the_old_point(f):
    alpha, lr = 0.4, 0.2
    state = oracles.round_of_apfl(oracles.start_of_apfl(FIRST, K, alpha), [2], f.grad, steps=2, lr=lr)
    w = v = flat(FIRST)
    for _ in range(2):
        mixed = alpha * v + (1 - alpha) * w
        w, v = w - lr * f.h[2] @ (w - f.a[2]), v - lr * alpha * f.h[2] @ (mixed - f.a[2])
    close(state["own"][2], v)


def test_apfl_personal_models_reach_the_local_optimum(f):
    step = lambda s, c: oracles.round_of_apfl(s, c, f.grad, steps=1, lr=0.4)  # noqa: E731
    state = run(oracles.start_of_apfl(FIRST, K, 0.6), step, 500)
    for k in EVERYBODY:
        close(oracles.model_of_apfl(state, k), f.a[k], rtol=1e-7, atol=1e-8)


def test_apfl_adapts_alpha_along_the_derivative_of_the_mixed_loss(f):
    step = lambda s, c, **kw: oracles.round_of_apfl(s, c, f.grad, steps=2, lr=0.2, **kw)  # noqa: E731
    state = step(oracles.start_of_apfl(FIRST, K, 0.4), EVERYBODY)
    new = step(state, [1], adapt=True, alpha_lr=0.05)
    v, w = flat(state["own"][1]), flat(state["model"])
    value = [f.loss(1, named((0.4 + e) * v + (0.6 - e) * w)) for e in (1e-4, -1e-4)]
    assert new["alpha"][1] == pytest.approx(0.4 - 0.05 * (value[0] - value[1]) / 2e-4, abs=1e-10)
    assert new["alpha"][0] == 0.4
    fixed = step(state, [1])
    close(new["model"], fixed["model"])
    assert not np.allclose(flat(new["own"][1]), flat(fixed["own"][1]))  # the second step has the new alpha
    far = step(state, EVERYBODY, adapt=True, alpha_lr=1e6)
    assert set(far["alpha"]) <= {0.0, 1.0}


# --- IFCA ------------------------------------------------------------------------------------------------------------


def test_ifca_of_one_model_is_fedavg_or_gradient_descent(f):
    state = run(
        oracles.start_of_ifca([FIRST]),
        lambda s, c: oracles.round_of_ifca(s, c, f.grad, f.loss, lr=0.2, steps=3, share=WEIGHTS),
        2,
        half,
    )
    close(state["models"][0], run(oracles.start_of_fedavg(FIRST), fedavg(f, WEIGHTS), 2, half)["model"])
    state = run(
        oracles.start_of_ifca([FIRST]),
        lambda s, c: oracles.round_of_ifca(s, c, f.grad, f.loss, lr=0.2, averaging="gradient"),
        2,
    )
    close(state["models"][0], run(oracles.start_of_fedavg(FIRST), fedavg(f, steps=1), 2)["model"])


@pytest.mark.parametrize("averaging", ["model", "gradient"])
def test_ifca_finds_two_clusters_and_leaves_an_empty_model(averaging):
    f = Quadratics()
    f.a[:2], f.a[2:] = f.a[0] + 3.0, f.a[2] - 3.0
    firsts = [named(np.full(4, 1.0)), named(np.full(4, -1.0)), named(np.full(4, 100.0))]
    state = run(
        oracles.start_of_ifca(firsts),
        lambda s, c: oracles.round_of_ifca(s, c, f.grad, f.loss, lr=0.4, steps=2, averaging=averaging),
        200,
    )
    assert [oracles.cluster_of_ifca(state, k, f.loss) for k in EVERYBODY] == [0, 0, 1, 1]
    for k in EVERYBODY:
        close(oracles.model_of_ifca(state, k, f.loss), f.a[k], rtol=1e-7, atol=1e-8)
    close(state["models"][2], firsts[2])


def test_ifca_divides_gradients_by_all_machines(f):
    state = oracles.start_of_ifca([FIRST])
    new = oracles.round_of_ifca(state, [1, 2], f.grad, f.loss, lr=0.2, averaging="gradient", machines=K)
    moved = 0.2 / K * (flat(f.grad(1, FIRST)) + flat(f.grad(2, FIRST)))
    close(new["models"][0], flat(FIRST) - moved)


# --- FedEM -----------------------------------------------------------------------------------------------------------


class Regressions:
    """Least squares, l_i(w) = 1/2 (x_i . w - y_i)^2, with labels of two laws in parts that differ by client."""

    def __init__(self):
        rng = np.random.default_rng(1)
        self.laws = rng.normal(size=(2, 4)) * 2.0
        self.sizes = [12, 20, 16, 9]
        self.x = [rng.normal(size=(n, 4)) for n in self.sizes]
        law = [(rng.random(n) < p).astype(int) for n, p in zip(self.sizes, (0.1, 0.9, 0.5, 0.3), strict=True)]
        self.y = [np.sum(x * self.laws[z], axis=1) for x, z in zip(self.x, law, strict=True)]
        self.rate = [z.mean() for z in law]

    def sample_losses(self, k, w):
        return 0.5 * (self.x[k] @ flat(w) - self.y[k]) ** 2

    def weighted_grad(self, k, w, q):
        return named(self.x[k].T @ (q * (self.x[k] @ flat(w) - self.y[k])) / self.sizes[k])

    def grad(self, k, w):
        return self.weighted_grad(k, w, np.ones(self.sizes[k]))

    def objective(self, state):
        """The negative log-likelihood, sum over k and i of -log sum_m pi_km exp(-l_i(theta_m))."""
        value = 0.0
        for k in EVERYBODY:
            density = np.exp(-np.stack([self.sample_losses(k, w) for w in state["models"]], axis=1))
            value -= np.log(density @ state["pi"][k]).sum()
        return value


def fedem(g, steps=2, lr=0.1, absent="out"):
    return lambda s, c: oracles.round_of_fedem(
        s, c, g.sample_losses, g.weighted_grad, weights=g.sizes, steps=steps, lr=lr, absent=absent
    )


def test_fedem_of_one_component_is_fedavg():
    g = Regressions()
    state = run(oracles.start_of_fedem([FIRST], K), fedem(g), 3, half)
    reference = oracles.start_of_fedavg(FIRST)
    step = lambda s, c: oracles.round_of_fedavg(s, c, g.grad, weights=g.sizes, steps=2, lr=0.1)  # noqa: E731
    close(state["models"][0], run(reference, step, 3, half)["model"])
    np.testing.assert_array_equal(state["pi"], np.ones((K, 1)))
    staying = fedem(g, absent="stay")(oracles.start_of_fedem([FIRST], K), [0, 1])
    alone = fedem(g)(oracles.start_of_fedem([FIRST], K), [0, 1])
    part = (12 + 20) / 57
    close(staying["models"][0], part * flat(alone["models"][0]) + (1 - part) * flat(FIRST))


def test_fedem_never_raises_the_negative_log_likelihood_and_finds_the_laws():
    g = Regressions()
    state = oracles.start_of_fedem([named(law + 0.5) for law in g.laws], K)
    values = [g.objective(state)]
    for _ in range(100):
        state = fedem(g, steps=1)(state, EVERYBODY)
        values.append(g.objective(state))
    assert np.all(np.diff(values) < 1e-10)
    pi, models = oracles.model_of_fedem(state, 0)
    for theta, law in zip(models, g.laws, strict=True):
        assert np.abs(flat(theta) - law).max() < 0.2
    assert pi.sum() == pytest.approx(1.0)
    assert np.abs(state["pi"][:, 1] - g.rate).max() < 0.15


def test_fedem_weighs_a_new_client_at_the_fixed_point_of_its_steps():
    g = Regressions()
    state = fedem(g)(oracles.start_of_fedem([named(law) for law in g.laws], K), EVERYBODY)
    pi, models = oracles.new_client_of_fedem(state, 2, g.sample_losses, rounds=600)
    again = oracles.responsibilities(2, models, pi, g.sample_losses).mean(axis=0)
    np.testing.assert_allclose(again, pi, atol=1e-10)
    q = oracles.responsibilities(2, models, np.array([1.0, 0.0]), g.sample_losses)
    np.testing.assert_array_equal(q, np.tile([1.0, 0.0], (16, 1)))


# --- FedU and FedAMP -------------------------------------------------------------------------------------------------


GRAPH = np.array([[0.0, 1.0, 0.0, 0.5], [1.0, 0.0, 0.7, 0.0], [0.0, 0.7, 0.0, 0.2], [0.5, 0.0, 0.2, 0.0]])
LAPLACIAN = np.kron(np.diag(GRAPH.sum(axis=1)) - GRAPH, np.eye(4))


def block(f):
    matrix = np.zeros((4 * K, 4 * K))
    for k in EVERYBODY:
        matrix[4 * k : 4 * k + 4, 4 * k : 4 * k + 4] = f.h[k]
    return matrix


def test_fedu_of_no_coupling_trains_locally(f):
    state = run(
        oracles.start_of_fedu(FIRST, K),
        lambda s, c: oracles.round_of_fedu(s, c, f.grad, GRAPH, steps=2, lr=0.2, eta=0.0),
        2,
    )
    for k in EVERYBODY:
        close(oracles.model_of_fedu(state, k), f.local(k, flat(FIRST), 4, 0.2))


def test_fedu_converges_to_its_objective_as_the_step_shrinks(f):
    eta, h, a = 0.6, block(f), f.a.ravel()
    optimum = np.linalg.solve(h + eta * LAPLACIAN, h @ a)
    distances = []
    for lr in (0.24, 0.12, 0.06):
        state = run(
            oracles.start_of_fedu(FIRST, K),
            lambda s, c, lr=lr: oracles.round_of_fedu(s, c, f.grad, GRAPH, steps=1, lr=lr, eta=eta),
            int(32 / lr),
        )
        w = np.concatenate([flat(w) for w in state["own"]])
        pull = (np.eye(4 * K) - lr * eta * LAPLACIAN) @ h  # w = (I - lr eta L)(w - lr h (w - a))
        close(w, np.linalg.solve(pull + eta * LAPLACIAN, pull @ a))
        distances.append(np.linalg.norm(w - optimum))
    ratios = np.array(distances[:-1]) / distances[1:]
    assert np.all((ratios > 1.8) & (ratios < 2.2)), ratios


def test_fedu_moves_clients_of_the_round_alone(f):
    options = {"steps": 2, "lr": 0.1, "eta": 0.5}
    first = oracles.start_of_fedu(FIRST, K)
    state = oracles.round_of_fedu(first, [0, 1], f.grad, GRAPH, **options)
    ends = [f.local(k, flat(FIRST), 2, 0.1) for k in (0, 1)]
    close(state["own"][0], ends[0] - 0.2 * 0.5 * GRAPH[0, 1] * (ends[0] - ends[1]))
    close(state["own"][3], FIRST)
    staying = oracles.round_of_fedu(first, [0, 1], f.grad, GRAPH, absent="stay", **options)
    pull = GRAPH[0, 1] * (ends[0] - ends[1]) + GRAPH[0, 3] * (ends[0] - flat(FIRST))
    close(staying["own"][0], ends[0] - 0.2 * 0.5 * pull)


def test_fedamp_clouds_are_combinations_of_the_models(f):
    models = [named(a) for a in f.a]
    clouds = oracles.clouds_of_fedamp(models, sigma=5.0, alpha=0.5)
    squares = np.sum((f.a[:, None] - f.a[None]) ** 2, axis=2)
    attention = 0.5 * np.exp(-squares / 5.0) / 5.0
    np.fill_diagonal(attention, 0.0)
    np.fill_diagonal(attention, 1.0 - attention.sum(axis=1))
    close(np.array([flat(u) for u in clouds]), attention @ f.a)
    heuristic = oracles.heuristic_clouds_of_fedamp(models, scale=3.0, own_weight=0.4)
    unit = f.a / np.linalg.norm(f.a, axis=1, keepdims=True)
    attention = np.exp(3.0 * unit @ unit.T)
    np.fill_diagonal(attention, 0.0)
    attention *= 0.6 / attention.sum(axis=1, keepdims=True)
    np.fill_diagonal(attention, 0.4)
    close(np.array([flat(u) for u in heuristic]), attention @ f.a)
    same = oracles.clouds_of_fedamp([FIRST] * K, sigma=5.0, alpha=0.5)
    close(same[1], FIRST)


def test_fedamp_fixed_points_are_stationary_with_half_the_attention(f):
    lam, sigma, alpha = 0.8, 5.0, 0.7
    state = run(
        oracles.start_of_fedamp([FIRST] * K),
        lambda s, c: oracles.round_of_fedamp(s, c, f.grad, steps=3, lr=0.25, lam=lam, sigma=sigma, alpha=alpha),
        200,
    )
    w = np.array([flat(oracles.model_of_fedamp(state, k)) for k in EVERYBODY])

    def objective(points):
        squares = np.sum((points[:, None] - points[None]) ** 2, axis=2)
        value = sum(f.loss(k, named(points[k])) for k in EVERYBODY)
        return value + lam / 2 * np.sum(np.triu(1.0 - np.exp(-squares / sigma), 1))

    for k in EVERYBODY:
        for i in range(4):
            step = np.zeros_like(w)
            step[k, i] = 1e-5
            assert abs(objective(w + step) - objective(w - step)) / 2e-5 < 1e-8
    assert np.abs(w - f.a).max() > 0.05
    with pytest.raises(AssertionError):
        oracles.round_of_fedamp(state, [0], f.grad, steps=3, lr=0.25, lam=lam, sigma=sigma, alpha=alpha)


# --- q-FFL and AFL ---------------------------------------------------------------------------------------------------


def test_qfedavg_of_q_zero_is_the_uniform_fedavg():
    f = Quadratics(level=0.5)
    for lipschitz in (5.0, 2.0):  # 1 / lr, and any other
        state = run(
            oracles.start_of_qffl(FIRST),
            lambda s, c, lipschitz=lipschitz: oracles.round_of_qfedavg(
                s, c, f.grad, f.loss, q=0.0, lipschitz=lipschitz, steps=3, lr=0.2
            ),
            2,
            half,
        )
        close(oracles.model_of_qffl(state), run(oracles.start_of_fedavg(FIRST), fedavg(f), 2, half)["model"])


def test_qfedavg_of_one_step_is_qfedsgd():
    f = Quadratics(level=0.5)
    first = oracles.start_of_qffl(FIRST)
    one = oracles.round_of_qfedsgd(first, half(1), f.grad, f.loss, q=1.5, lipschitz=5.0)
    other = oracles.round_of_qfedavg(first, half(1), f.grad, f.loss, q=1.5, lipschitz=5.0, steps=1, lr=0.2)
    close(one["model"], other["model"])
    gradients = np.array([flat(f.grad(k, FIRST)) for k in half(1)])
    losses = np.array([f.loss(k, FIRST) for k in half(1)])
    scale = np.sum(1.5 * losses**0.5 * np.sum(gradients**2, axis=1) + 5.0 * losses**1.5)
    close(one["model"], flat(FIRST) - (losses**1.5) @ gradients / scale)


def test_qfedsgd_lowers_its_objective_and_with_q_the_worst_loss():
    f = Quadratics(level=0.5)
    worst = []
    for q in (0.0, 2.0, 8.0):
        state, values = oracles.start_of_qffl(FIRST), []
        for _ in range(150):
            values.append(sum(f.loss(k, state["model"]) ** (q + 1) for k in EVERYBODY))
            state = oracles.round_of_qfedsgd(state, EVERYBODY, f.grad, f.loss, q=q, lipschitz=2.0)
        assert np.all(np.diff(values) < 1e-10 * values[0])
        worst.append(max(f.loss(k, state["model"]) for k in EVERYBODY))
    assert worst[0] > worst[1] + 1e-3
    assert worst[1] > worst[2] + 1e-3


def test_projection_onto_the_simplex_is_the_nearest_point():
    rng = np.random.default_rng(2)
    for _ in range(20):
        y = rng.normal(size=5) * rng.choice([0.1, 1.0, 10.0])
        point = oracles.onto_simplex(y)
        assert point.min() >= 0.0
        assert point.sum() == pytest.approx(1.0, abs=1e-12)
        corners = np.eye(5)  # the obtuse-angle condition holds for all points when it holds for the corners
        assert np.max((corners - point) @ (y - point)) < 1e-12
    np.testing.assert_allclose(oracles.onto_simplex(np.array([0.2, 0.3, 0.5])), [0.2, 0.3, 0.5], atol=1e-15)


def test_afl_takes_both_steps_at_the_old_pair(f):
    mixture = np.array([0.1, 0.2, 0.3, 0.4])
    state = oracles.round_of_afl(
        oracles.start_of_afl(FIRST, K, mixture), EVERYBODY, f.grad, f.loss, lr=0.2, mixture_lr=0.01
    )
    close(state["model"], flat(FIRST) - 0.2 * mixture @ [flat(f.grad(k, FIRST)) for k in EVERYBODY])
    raised = mixture + 0.01 * np.array([f.loss(k, FIRST) for k in EVERYBODY])
    np.testing.assert_allclose(state["mixture"], raised - (raised.sum() - 1.0) / K, rtol=1e-12)
    close(oracles.model_of_afl(state), state["model"])


def test_afl_equalizes_the_losses_of_two_clients():
    f = Quadratics(number=2)
    state = run(
        oracles.start_of_afl(FIRST, 2),
        lambda s, c: oracles.round_of_afl(s, c, f.grad, f.loss, lr=0.1, mixture_lr=0.02),
        800,
        [0, 1],
    )
    last = [f.loss(k, oracles.model_of_afl(state, averaged=False)) for k in (0, 1)]
    assert last[0] == pytest.approx(last[1], abs=1e-6)
    balance = f.optimum(state["mixture"])  # of the saddle point: w minimizes the mixture that lambda names
    close(state["model"], balance, rtol=1e-5, atol=1e-6)
    assert max(f.loss(k, oracles.model_of_afl(state)) for k in (0, 1)) < max(
        f.loss(k, named(f.optimum())) for k in (0, 1)
    )
    with pytest.raises(AssertionError):
        oracles.round_of_afl(state, [0], f.grad, f.loss, lr=0.1, mixture_lr=0.02)
