"""MOCHA: Algorithm 1 for a given coupling."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax import _check
from mocha_jax._algorithm import Algorithm, Info
from mocha_jax._local import ascend, time_major
from mocha_jax._objective import Certificate, certify, dual_vectors
from mocha_jax._problem import Problem
from mocha_jax._pytree import Hyperparameter, Pytree, static
from mocha_jax.coupling import SIGMA_PRIME_RULES, Coupling
from mocha_jax.systems import Work

# Rounds between two recomputations of V from beta. Adding a round's change to V costs one
# rounding error; this keeps their sum below what a certificate in float32 can see.
_REFRESH_EVERY = 64


class MochaState(Pytree):
    """All that MOCHA carries from round to round."""

    round: Array  # [] int32
    beta: Array  # [m, n] dual variables
    v: Array  # [num_tasks, d] v_t = sum_i c_i beta_i x_i
    w: Array  # [num_tasks, d] W = coupling.apply(V)
    coupling: Coupling
    sigma: Array  # [num_tasks] sigma'_t


class Mocha(Algorithm):
    r"""MOCHA (Smith et al. 2017): dual coordinate ascent on all nodes, coupled once a round.

    A round: every node improves its subproblem (4) for as many coordinate steps as its work
    allows, returns :math:`\Delta v`, the server adds them up and broadcasts :math:`W = \bar M V`.

    .. math::
        \beta \leftarrow \beta + \gamma\,\Delta\beta, \qquad
        V \leftarrow V + \gamma\,\Delta V, \qquad W = \bar M V

    Args:
      local_epochs: passes over a node's own data in a full round, > 0; need not be whole.
      sigma_prime: rule for :math:`\sigma'`, see `Coupling.sigma_prime`.
      gamma: aggregation parameter :math:`\gamma \in (0, 1]` (Appendix C); an array leaf.

    >>> import jax, numpy as np, mocha_jax as mj
    >>> rng = np.random.default_rng(0)
    >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
    >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs])
    >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(1.0, 1.0))
    >>> algorithm = Mocha()
    >>> state = algorithm.init(problem)
    >>> work = mj.systems.Full().work(jax.random.key(0), data, algorithm.full_work(problem))
    >>> state, info = algorithm.step(jax.random.key(1), state, problem, work)
    >>> info.steps.tolist()
    [20, 20, 20, 20]
    """

    local_epochs: float = static(default=1.0)
    sigma_prime: str = static(default="per_task")
    gamma: Hyperparameter = 1.0

    def __post_init__(self) -> None:
        _check.positive("Mocha", local_epochs=self.local_epochs)
        _check.one_of("Mocha", "sigma_prime", self.sigma_prime, SIGMA_PRIME_RULES)
        _check.in_unit_interval("Mocha", open_left=True, gamma=self.gamma)

    def prepare(self, problem: Problem) -> Problem:
        return problem.replace(layout=time_major(problem.data))

    def init(self, problem: Problem) -> MochaState:
        """Start from beta = 0, projected on the dual domain."""
        return self._at(jnp.zeros((), jnp.int32), jnp.zeros_like(problem.data.y), problem)

    def adopt(self, state: MochaState, problem: Problem) -> MochaState:
        """Keep the duals and the round; derive everything else from the problem."""
        if state.beta.shape != problem.data.y.shape:
            raise ValueError(
                f"Mocha: the state has duals {state.beta.shape} but the data is {problem.data.y.shape}; it belongs to "
                f"other data."
            )
        return self._at(state.round, state.beta.astype(problem.data.y.dtype), problem)

    def _at(self, round: Array, beta: Array, problem: Problem) -> MochaState:
        data = problem.data
        coupling = problem.regularizer.coupling(data.num_tasks)
        gamma = jnp.asarray(self.gamma, data.x.dtype)
        sigma = coupling.sigma_prime(self.sigma_prime, gamma, data.nodes_per_task)
        beta = problem.loss.project(beta, data.y)
        v = dual_vectors(data, beta)
        return MochaState(round, beta, v, coupling.apply(v), coupling, sigma)

    def full_work(self, problem: Problem) -> Array:
        sizes = problem.data.sizes
        steps = jnp.round(self.local_epochs * sizes.astype(problem.data.x.dtype)).astype(jnp.int32)
        return jnp.maximum(steps, jnp.minimum(sizes, 1))

    def step(self, key: Array, state: MochaState, problem: Problem, work: Work) -> tuple[MochaState, Info]:
        data, loss = problem.data, problem.loss
        rows = problem.layout if problem.layout is not None else time_major(data)
        beta, du, steps = ascend(
            key, loss, rows, state.beta,
            w=data.to_nodes(state.w),
            q=data.to_nodes(state.sigma * state.coupling.diagonal()),
            steps=work.budget(),
            passes=math.ceil(self.local_epochs),
        )  # fmt: skip
        gamma = jnp.asarray(self.gamma, data.x.dtype)
        beta = loss.project(state.beta + gamma * (beta - state.beta), data.y)
        round = state.round + 1
        v = lax.cond(
            round % _REFRESH_EVERY == 0,
            lambda: dual_vectors(data, beta),
            lambda: state.v + gamma * data.to_tasks(du),
        )
        return state.replace(round=round, beta=beta, v=v, w=state.coupling.apply(v)), Info(steps)

    def certify(self, state: MochaState, problem: Problem) -> Certificate:
        return certify(problem, state.beta, state.v, state.w)

    def weights(self, state: MochaState) -> Array:
        return state.w
