"""Privacy of whole clients: noise for an epsilon, and the epsilon that a run has used."""

from __future__ import annotations

import numpy as np

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._neural.composed import Sampling
from mocha_jax._neural.private_clients import ClientLevel, PrivateClients, QuantileClip
from mocha_jax._neural.training_state import TrainingState
from mocha_jax.privacy._accounting import check_delta
from mocha_jax.privacy._budget import ACCOUNTANTS, epsilon_of, noise_of


def private_clients(algorithm: Sampling, level: ClientLevel) -> PrivateClients:
    """Make the server of an algorithm release nothing but noisy sums of its clients' changes, by `ClientLevel`.

    Args:
      algorithm: `FedAvg`, or one of `mocha_jax.personalized` whose server takes the sum of vectors like its own: all
        but ``ifca``, ``fedu``, ``fedamp``, ``q_ffl`` and ``afl``. Its `fraction` is the probability q of every client.
      level: noise, rounds and clipping.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 100, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.FedAvg(mj.networks.MLP(5, 2), optax.sgd(0.5), fraction=0.5)
      >>> level = mj.privacy.ClientLevel(noise=1.0, rounds=10, clip=mj.privacy.QuantileClip())
      >>> private = mj.privacy.private_clients(algorithm, level)
      >>> solution = mj.solve(problem, private, tol=None, max_rounds=20)
      >>> round(mj.privacy.client_epsilon(private, solution.state, delta=1e-3), 2)
      9.1
      >>> int(solution.history.exhausted[-1])
      100
    """
    check.instance("private_clients", "algorithm", algorithm, Sampling, "FedAvg(model, optax.sgd(0.1))")
    check.instance("private_clients", "level", level, ClientLevel, "privacy.ClientLevel(noise=1.0, rounds=100)")
    if isinstance(algorithm, PrivateClients):
        raise ValueError("private_clients: the algorithm is private already; replace its `level`.")
    return PrivateClients.of(algorithm, level)


@on_purpose
def with_client_budget(
    algorithm: Sampling, *, epsilon: float, delta: float, rounds: int, clip: Hyperparameter | QuantileClip = 1.0,
    accountant: str = "rdp",
) -> PrivateClients:  # fmt: skip
    r"""Make an algorithm private at the level of clients, with the least noise for a budget.

    So many rounds are $(\varepsilon, \delta)$-differentially private: neighbouring federations differ in one client
    more or less, with all its samples. See `ClientLevel` for the mechanism and what it covers.

    Args:
      algorithm: as in `private_clients`.
      epsilon: the budget.
      delta: the chance that the bound does not hold; well below one over the number of clients.
      rounds: to pay for; the server's model stays as it is after them.
      clip: C, the length that changes of clients are cut to, or a `QuantileClip`.
      accountant: ``"rdp"``, by Renyi divergences, or ``"pld"``, by distributions of the privacy loss, which is
        tighter and slower.

    Examples:
      >>> import optax, mocha_jax as mj
      >>> algorithm = mj.FedAvg(mj.networks.MLP(5, 2), optax.sgd(0.5), fraction=0.1)
      >>> private = mj.privacy.with_client_budget(algorithm, epsilon=4.0, delta=1e-4, rounds=100)
      >>> round(float(private.level.noise), 2)
      1.36
    """
    owner = "with_client_budget"
    check.scalar(owner, epsilon=epsilon, delta=delta)
    check.positive(owner, epsilon=epsilon)
    check_delta(owner, delta)
    check.integer(owner, 1, rounds=rounds)
    check.one_of(owner, "accountant", accountant, ACCOUNTANTS)
    rounds = int(rounds)
    private = private_clients(algorithm, ClientLevel(0.0, rounds, clip))
    noise = noise_of(owner, _share(private), rounds, 0.0, float(epsilon), float(delta), accountant)
    return private.replace(level=ClientLevel(noise, rounds, clip))


@on_purpose
def client_epsilon(algorithm: PrivateClients, state: TrainingState, *, delta: float, accountant: str = "rdp") -> float:
    r"""Compute what a run has spent: $\varepsilon$ of the rounds in which its model has changed, up to this state.

    Args:
      algorithm: of `private_clients` or `with_client_budget`.
      state: e.g. ``solution.state``; also one of a checkpoint, or ``state.inner.state`` of a `federated.Server`.
      delta: the chance that the bound does not hold.
      accountant: as in `with_client_budget`.
    """
    owner = "client_epsilon"
    check.instance(owner, "algorithm", algorithm, PrivateClients, "privacy.private_clients(algorithm, level)")
    check.instance(owner, "state", state, TrainingState, "solution.state")
    check.scalar(owner, delta=delta)
    check_delta(owner, delta)
    check.one_of(owner, "accountant", accountant, ACCOUNTANTS)
    rounds = int(state.kept.used)
    if not rounds:
        return 0.0
    return epsilon_of(_share(algorithm), rounds, 0.0, float(algorithm.level.noise), float(delta), accountant)


def _share(algorithm: PrivateClients) -> float:
    """The probability of a client in a round, not below the one that it has in numbers of 32 bits."""
    share = float(algorithm.fraction)
    return min(1.0, float(np.nextafter(np.float32(share), np.float32(2.0)))) if share < 1 else 1.0
