"""Budgets of example-level privacy: noise for an epsilon, and the epsilon that a run has used."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from mocha_jax._algorithms.base import OwnState
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._neural.client_server import ClientServer
from mocha_jax._neural.private_gradients import ExampleLevel, headroom
from mocha_jax._neural.training_state import TrainingState
from mocha_jax.privacy._accounting import accounting, check_delta
from mocha_jax.privacy._sdca import PrivateSdca, PrivateSdcaState

Private = TypeVar("Private", ClientServer, PrivateSdca)
OwnProblem = Any  # of the kind that the algorithm solves

ACCOUNTANTS = ("rdp", "pld")

# Orders of Renyi divergences: of integers they are sums, of others series that do not always converge.
_ORDERS = (*range(2, 65), 80, 96, 128, 256, 512, 1024)

# Noise is chosen to within this share, upwards.
_CLOSE = 1e-3


@on_purpose
def with_budget(
    algorithm: Private, problem: OwnProblem, *, epsilon: ArrayLike, delta: ArrayLike, rounds: int, clip: float = 1.0,
    accountant: str = "rdp",
) -> Private:  # fmt: skip
    r"""Make an algorithm's clients train with differential privacy of every sample.

    Every client gets the least noise with which all its work of so many full rounds is
    $(\varepsilon, \delta)$-differentially private, and the steps of these rounds as its limit. What is protected is
    one sample of one client, against all who see messages of that client, other models, or the result; neighbouring
    data sets differ in one sample more or less. See `ExampleLevel` and `PrivateSdca` for the mechanisms.

    Args:
      algorithm: `FedAvg`, `Local`, or one of `mocha_jax.personalized` whose clients read samples by gradients alone:
        all but ``pfedme``, ``per_fedavg``, ``apfl``, ``fedem``, ``q_ffl`` and ``afl``; or ``ifca``, which compares
        models in one step of a round; or `PrivateSdca`, of which a round is one step.
      problem: has the clients' numbers of samples, which are taken to be public.
      epsilon: the budget of all clients, or ``[m]`` of each.
      delta: the same.
      rounds: to pay for. Clients tuned at the end, as by ``fine_tuned``, or that choose a model there, as by ``ifca``,
        have that work in the budget, too.
      clip: C, the length that gradients of samples are cut to, or a sample's step times its features.
      accountant: ``"rdp"``, by Renyi divergences, or ``"pld"``, by distributions of the privacy loss, which is
        tighter and slower.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.mr_mtl(mj.networks.MLP(5, 2), optax.sgd(0.1), strength=0.1)
      >>> private = mj.privacy.with_budget(algorithm, problem, epsilon=3.0, delta=1e-3, rounds=5)
      >>> solution = mj.solve(problem, private, tol=None, max_rounds=5)
      >>> used = mj.privacy.spent(private, problem, solution.state, delta=1e-3)
      >>> bool((used <= 3.0).all() and (used > 2.9).all())
      True
    """
    owner = "with_budget"
    _check(owner, algorithm, problem)
    check.integer(owner, 1, rounds=rounds)
    check.positive(owner, clip=clip)
    check.one_of(owner, "accountant", accountant, ACCOUNTANTS)
    sizes = np.asarray(problem.data.sizes)
    m = len(sizes)
    budgets, deltas = (_of_each(owner, name, value, m) for name, value in (("epsilon", epsilon), ("delta", delta)))
    plan = algorithm.replace(privacy=ExampleLevel(1.0, 0, clip))
    steps = np.asarray(plan.planned_steps(problem, rounds))
    noise = [
        noise_of(owner, *_question(plan, problem, n, t), e, d, accountant) if n else 0.0
        for n, t, e, d in zip(sizes, steps, budgets, deltas, strict=True)
    ]
    level = ExampleLevel(np.asarray(noise, np.float32), steps.astype(np.int32), clip)
    return algorithm.replace(privacy=level)


@on_purpose
def spent(
    algorithm: ClientServer | PrivateSdca, problem: OwnProblem, state: OwnState, *, delta: ArrayLike,
    accountant: str = "rdp",
) -> np.ndarray:  # fmt: skip
    r"""Compute what every client of a run has spent: $\varepsilon$ ``[m]``, of all its work up to this state.

    A state that was continued with other noise or other batches is counted as if all of its steps had had the least
    noise and the largest batches among them. Clients tuned at the end, as by ``fine_tuned``, are counted as if they had
    been.

    Args:
      algorithm: with an `ExampleLevel`.
      problem: of the run.
      state: after it, e.g. ``solution.state``; also one of a checkpoint.
      delta: of all clients, or ``[m]`` of each.
      accountant: as in `with_budget`.
    """
    owner = "spent"
    _check(owner, algorithm, problem)
    kind = PrivateSdcaState if isinstance(algorithm, PrivateSdca) else TrainingState
    check.instance(owner, "state", state, kind, "solution.state")
    check.one_of(owner, "accountant", accountant, ACCOUNTANTS)
    if algorithm.privacy is None:
        raise ValueError("spent: the algorithm is not private; with_budget(algorithm, problem, ...) makes it so.")
    sizes, taken = np.asarray(problem.data.sizes), jax.device_get(algorithm.taken(problem, state))
    if taken.steps.shape != sizes.shape:
        raise ValueError(f"spent: the state is of {taken.steps.size} clients, and the problem has {len(sizes)}.")
    deltas = _of_each(owner, "delta", delta, len(sizes))
    return np.array([
        epsilon_of(*_question(algorithm, problem, n, t, q), float(z), d, accountant) if n and t else 0.0
        for n, t, z, q, d in zip(sizes, taken.steps, taken.noise, taken.share, deltas, strict=True)
    ])  # fmt: skip


@on_purpose
def epsilon(
    noise: float, samples: int, batch_size: int | None, steps: int, *, delta: float, accountant: str = "rdp"
) -> float:
    r"""Compute $\varepsilon$ of so many steps of `ExampleLevel` at one client.

    Each step is a Gaussian mechanism of sensitivity C with noise zC on a Poisson sample. Batches have room for more
    than `batch_size` samples; that a draw exceeds it has a chance that is part of delta.

    Args:
      noise: z.
      samples: of the client.
      batch_size: B, samples of a step in the mean; None for all.
      steps: taken.
      delta: the chance that the bound does not hold.
      accountant: as in `with_budget`.

    Examples:
      >>> import mocha_jax as mj
      >>> round(mj.privacy.epsilon(1.0, 1000, 100, 200, delta=1e-5), 2)
      11.14
    """
    owner = "epsilon"
    check.nonnegative(owner, noise=noise)
    check.scalar(owner, noise=noise)
    share, over, delta = _of_batches(owner, samples, batch_size, steps, delta, accountant)
    return epsilon_of(share, int(steps), over, float(noise), delta, accountant) if steps else 0.0


@on_purpose
def noise(
    epsilon: float, samples: int, batch_size: int | None, steps: int, *, delta: float, accountant: str = "rdp"
) -> float:
    r"""Compute the least noise z with which so many steps of `ExampleLevel` stay within a budget, to a thousandth.

    Args:
      epsilon: the budget.
      samples: of the client.
      batch_size: as in `privacy.epsilon`, as are the others.
      steps: to take.
      delta: the chance that the bound does not hold.
      accountant: as in `with_budget`.

    Examples:
      >>> import mocha_jax as mj
      >>> z = mj.privacy.noise(3.0, 1000, 100, 200, delta=1e-5)
      >>> 2.99 < mj.privacy.epsilon(z, 1000, 100, 200, delta=1e-5) <= 3.0
      True
    """
    owner = "noise"
    check.positive(owner, epsilon=epsilon)
    check.scalar(owner, epsilon=epsilon)
    share, over, delta = _of_batches(owner, samples, batch_size, steps, delta, accountant)
    return noise_of(owner, share, int(steps), over, float(epsilon), delta, accountant) if steps else 0.0


def _of_batches(
    owner: str, samples: int, batch_size: int | None, steps: int, delta: float, accountant: str
) -> tuple[float, float, float]:
    """A client's share of samples in a batch, the chance that a batch has no room for those drawn, and delta."""
    check.scalar(owner, delta=delta)
    check.integer(owner, 1, samples=samples)
    if batch_size is not None:
        check.integer(owner, 1, batch_size=batch_size)
    check.integer(owner, 0, steps=steps)
    check.one_of(owner, "accountant", accountant, ACCOUNTANTS)
    size = int(samples) if batch_size is None else min(int(batch_size), int(samples))
    over = 0.0 if batch_size is None else _overflow(int(samples), size)
    return size / int(samples), over, float(_of_each(owner, "delta", delta, 1)[0])


def _of_each(owner: str, name: str, value: ArrayLike, m: int) -> np.ndarray:
    """A number for each client."""
    check.positive(owner, **{name: value})
    if name == "delta":
        check_delta(owner, value)
    values = np.asarray(value, float)
    if values.shape not in ((), (m,)):
        raise ValueError(f"{owner}: {name} must be a number, or one for each of {m} clients; got {values.shape}.")
    return np.broadcast_to(values, (m,))


def _check(owner: str, algorithm: ClientServer | PrivateSdca, problem: OwnProblem) -> None:
    if not isinstance(algorithm, PrivateSdca):
        check.instance(owner, "algorithm", algorithm, ClientServer, "FedAvg(model, optax.sgd(0.1))")
    check.instance(owner, "problem", problem, algorithm.solves, f"{algorithm.solves.__name__}(data)")


def _question(
    algorithm: ClientServer | PrivateSdca, problem: OwnProblem, n: int, steps: int, used: float = 0.0
) -> tuple[float, int, float]:
    """A client's share of samples in a batch, its steps, and the chance that a batch has no room for those drawn.

    It has used some share before; what is the same number but for its rounding is the same.
    """
    share, has_room = algorithm.sampling(problem, int(n))
    share = share if used <= share * (1.0 + 1e-6) else float(used)
    return share, int(steps), 0.0 if has_room else _overflow(int(n), round(share * n))


def _overflow(samples: int, size: int) -> float:
    """Bernstein's bound on the chance that more samples are drawn than a batch has room for."""
    more = headroom(size) - size
    variance = size * (1.0 - size / samples)
    return 0.0 if headroom(size) >= samples else math.exp(-0.5 * more**2 / (variance + more / 3.0))


@cache
def epsilon_of(share: float, steps: int, over: float, noise: float, delta: float, accountant: str) -> float:
    """Epsilon of a client.

    Without room for all that are drawn the messages are those of another mechanism, but for an event of the chance
    ``steps over``: delta has (1 + e^epsilon) times that besides.
    """
    if noise < 1e-6:
        return math.inf
    dp = accounting()
    event = dp.PoissonSampledDpEvent(share, dp.GaussianDpEvent(noise)) if share < 1 else dp.GaussianDpEvent(noise)
    of_run = dp.rdp.RdpAccountant(_ORDERS) if accountant == "rdp" else dp.pld.PLDAccountant()
    of_run.compose(event, steps)
    found = float(of_run.get_epsilon(delta))
    for _ in range(3 if over else 0):  # it grows by next to nothing
        rest = delta - steps * over * (1.0 + math.exp(min(found, 700.0)))
        if rest <= 0:
            return math.inf
        found = float(of_run.get_epsilon(rest))
    return found


@cache
def noise_of(owner: str, share: float, steps: int, over: float, epsilon: float, delta: float, accountant: str) -> float:
    """The least noise with which a client stays within its budget."""

    def enough(noise: float) -> bool:
        return epsilon_of(share, steps, over, noise, delta, accountant) <= epsilon

    low, high = 0.0, 1.0
    while not enough(high):
        low, high = high, 2.0 * high
        if high > 1e6:
            raise ValueError(f"{owner}: no noise reaches epsilon {epsilon:g} at delta {delta:g} in {steps} steps.")
    while high - low > _CLOSE * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    # As it is stored: a number of 32 bits, not below it.
    return float(np.nextafter(np.float32(high), np.float32(np.inf)))
