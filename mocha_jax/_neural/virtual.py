r"""VIRTUAL: variational inference over a server's network and the clients' own (Corinzia and Buhmann 2019)."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._model.likelihoods import Likelihood
from mocha_jax._neural.bayesian import BayesianTrainer
from mocha_jax._neural.clients import at_once, over_clients, whose_turn
from mocha_jax._neural.fedavg import info, resumed
from mocha_jax._neural.gaussian import NOISES, Gaussian, draw
from mocha_jax._neural.posterior import VirtualState
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.refinement import Refinement, Trained, most_of
from mocha_jax._neural.trainer import all_finite, failures, mean_loss
from mocha_jax._neural.training import Batch, train
from mocha_jax.networks import Network, Params
from mocha_jax.systems._work import Info, Request, Work

# Rounds after which the posterior is multiplied up afresh from its factors, against the drift of sums and differences.
_REFRESH_EVERY = 64

# As `Virtual.step` names them.
Given = tuple[Array, Gaussian, Array, Likelihood, Gaussian, Gaussian, tuple[Array, ...]]


class Virtual(BayesianTrainer):
    r"""VIRTUAL: Algorithm 1 and proposition 1 of the paper, for networks of which one part is shared.

    The posterior over shared parameters is approximated by a product of one factor for each client,
    $s(\theta) = \prod_i s_i(\theta)$, that over private ones by $c_i(\phi_i)$; all are mean-field
    Gaussians. A refinement of client i trains $s^{new} = s_i^{new}\, s / s_i$ and $c_i$ on the free
    energy (3),

    $$
    D_{KL}\big(s^{new} \,\|\, p_i\, s / s_i\big) + D_{KL}\big(c_i \,\|\, p(\phi_i)\big)
    - E\big[\log p(D_i \mid \theta, \phi_i)\big],
    $$

    by gradient descent on Monte-Carlo estimates (reparametrisation trick), and sends $s^{new}$ to the server.
    A round is one refinement, of clients in the given order; with ``parallel=True`` all clients are refined at once
    from the same s, and every factor goes a part of its way,
    $s_i \leftarrow s_i^{1-\delta} (s_i^{new})^{\delta}$,
    so that $\prod_i s_i = s$ holds at all times.

    **Precisions are positive by construction.** What is trained is the logarithm of the precision of
    $s_i^{new}$, to which that of $s / s_i$, a sum of positive numbers, is added; damping mixes positive
    numbers. No cavity and no posterior can therefore lose its density, as quotients of freely trained Gaussians do.

    **The prior counts once.** In (3) the paper puts $p(\theta)$ into every refinement, so that its fixed point
    has $p^K$ where (1) divides $K - 1$ of them out again. With ``prior="once"`` (default)
    $p_i = p^{1/K}$, and exact factors multiply to the posterior (1); with ``prior="each"`` $p_i = p$, the
    letter of (3).

    **The server sees more than s.** The paper has it that a server that knows s only never learns a factor. It sees s
    before and after the turn of a single client, though, and their quotient is that client's change
    $s_i^{new} / s_i$. Factors stay with the clients only where the changes of several are multiplied before anybody
    sees them, as a secure sum of both vectors of `parallel` refinements would do.

    **Several at once**: ``parallel=True`` and ``systems=mj.systems.Sampled(q)`` refine a share q of the m clients in a
    round; ``damping=1 / (q m)`` is then as bold as the default for all. A tree of servers that multiply what their
    clients send changes no number: a product of factors is a sum of precisions and shifts, in whatever order.

    **All clients begin with the same private parameters**, as in FedAvg all begin with the same network: shared layers
    then suit everybody from the first refinement.

    Args:
      model: `networks.Lateral`, or any other with `networks.Parts` for parameters; where they are not, all are shared.
      client_optimizer: of means and logarithms of precisions, from optax; it begins anew in every refinement.
      prior_scale: standard deviation of the prior of every parameter.
      first_scale: standard deviation at which training begins: of private parameters, and of shared ones when all
        clients have begun, each with 1/K of that precision.
      temperature: weight T of both divergences; below 1 every sample counts 1 / T times, a "cold posterior". The free
        energy of a network has far more parameters to pay for than samples to win by, and at T = 1 the prior can
        silence its shared layers.
      samples: draws of a Monte-Carlo estimate.
      noise: ``"shared"``, matrices drawn once for all rows of a batch; ``"flipout"``, one draw with random signs for
        every row (the paper's choice); ``"local"``, a draw for every row (Kingma et al. 2015). The latter two vary less
        from step to step, and need a model that multiplies by matrices as those in `networks` do.
      parallel: refine all clients in every round.
      damping: delta, in (0, 1]. Default 1; with ``parallel=True`` one over the number of clients, because each moves
        the posterior with the precision of all, and so many whole moves together can diverge.
      sent: share of the changes of s, those of most standard deviations, that clients send; the others do not happen.
      order: clients in the order of their refinements, again and again; default all, as they come; ``"random"``: all in
        a new random order in every cycle, which depends on `seed`.
      prior: ``"once"`` or ``"each"``.
      factors: to begin with: ``"prior"``, $p^{1/K}$ each, so that nothing binds a client that no data have said; or
        ``"start"``, the letter of Algorithm 1: shares of the density at which training begins, which bind the first
        clients to it.
      draws: networks that predictions average over.
      local_epochs: passes of a client over its samples in a refinement.
      batch_size: samples of a step; None for all of a client's.
      rate: factor of the clients' updates, a learning rate to map over.
      seed: of the first parameters.
      at_once: clients trained together, see `Local`.

    Examples:
      >>> import jax, numpy as np, optax, mocha_jax as mj
      >>> xs = np.random.default_rng(0).normal(size=(4, 30, 5))
      >>> data = mj.pack_tasks(list(xs), [x[:, 0] > 0 for x in xs], dtype="float32")
      >>> train, test = data.split(jax.random.key(1), 0.75)
      >>> problem = mj.Prediction(train, test=test)
      >>> model = mj.networks.Lateral(5, 2, (8,))
      >>> algorithm = mj.Virtual(model, optax.adam(1e-2), local_epochs=5, samples=2)
      >>> solution = mj.solve(problem, algorithm, tol=None, max_rounds=8)
      >>> found = algorithm.predict(solution.state, problem, 0, test.x[0])
      >>> found.mean.shape == (*test.y[0].shape, 2), bool((found.mutual_information >= 0).all())
      (True, True)
    """

    prior_scale: Hyperparameter = dataclasses.field(default=1.0, kw_only=True)
    first_scale: Hyperparameter = dataclasses.field(default=0.05, kw_only=True)
    temperature: Hyperparameter = dataclasses.field(default=1.0, kw_only=True)
    samples: int = static(default=5, kw_only=True)
    noise: str = static(default="shared", kw_only=True)
    parallel: bool = static(default=False, kw_only=True)
    damping: Hyperparameter | None = dataclasses.field(default=None, kw_only=True)
    sent: float = static(default=1.0, kw_only=True)
    order: tuple[int, ...] | str | None = static(default=None, kw_only=True)
    prior: str = static(default="once", kw_only=True)
    factors: str = static(default="prior", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.scalar("Virtual", prior_scale=self.prior_scale, first_scale=self.first_scale,
                      temperature=self.temperature)  # fmt: skip
        check.positive("Virtual", prior_scale=self.prior_scale, first_scale=self.first_scale)
        check.nonnegative("Virtual", temperature=self.temperature)
        check.integer("Virtual", 1, samples=self.samples, draws=self.draws)
        check.flag("Virtual", parallel=self.parallel)
        check.scalar("Virtual", sent=self.sent)
        check.in_unit_interval("Virtual", open_left=True, sent=self.sent)
        if self.damping is not None:
            check.in_unit_interval("Virtual", open_left=True, damping=self.damping)
        check.one_of("Virtual", "prior", self.prior, ("once", "each"))
        check.one_of("Virtual", "factors", self.factors, ("prior", "start"))
        check.one_of("Virtual", "noise", self.noise, NOISES)
        if self.order is not None and self.parallel:
            raise ValueError("Virtual: with parallel=True all clients are refined at once; leave order out.")
        if isinstance(self.order, str):
            check.one_of("Virtual", "order", self.order, ("random",))
        elif self.order is not None:
            check.integers("Virtual", 0, order=self.order)
            if np.ndim(self.order) != 1 or not len(self.order):
                raise ValueError(f"Virtual: order must name clients, such as (0, 2, 1); got {self.order!r}.")
            object.__setattr__(self, "order", tuple(int(i) for i in self.order))

    @classmethod
    def paper(
        cls,
        model: Network,
        client_optimizer: optax.GradientTransformation,
        local_epochs: int = 100,
        *,
        samples: int = 20,
        noise: str = "flipout",
        first_scale: Hyperparameter = 0.05,
        batch_size: int | None = 16,
        seed: Hyperparameter | int = 0,
    ) -> Virtual:
        r"""Return Algorithm 1 and the free energy (3) as they stand.

        Clients in fixed order, temperature 1, $p(\theta)$ in every refinement, and factors $s_i^{(0)}$ that multiply to
        the $s^{(0)}$ at which training begins; 20 draws with the signs of flipout.

        Args:
          model: `networks.Lateral` or `networks.LateralCNN`.
          client_optimizer: of means and logarithms of precisions.
          local_epochs: passes of a client over its samples in a refinement.
          samples: draws of a Monte-Carlo estimate.
          noise: of the draws, see `Virtual`.
          first_scale: standard deviation at which training begins; the paper has none.
          batch_size: samples of a step.
          seed: of the first parameters.

        Examples:
          >>> import optax, mocha_jax as mj
          >>> letter = mj.Virtual.paper(mj.networks.Lateral(5, 2, (8,)), optax.adam(1e-3))
          >>> letter.temperature, letter.prior, letter.factors, letter.samples
          (1.0, 'each', 'start', 20)
        """
        return cls(
            model, client_optimizer, local_epochs=local_epochs, samples=samples, noise=noise, first_scale=first_scale,
            batch_size=batch_size, seed=seed, temperature=1.0, prior="each", factors="start",
        )  # fmt: skip

    def check(self, problem: Prediction) -> None:
        super().check(problem)
        if problem.data.loss_scaling != "sum":
            raise ValueError("Virtual: likelihoods count every sample; pack the data with loss_scaling='sum'.")
        if self.noise != "shared":
            self.tried(problem, self._noisy, f" with noise={self.noise!r}, which wants h @ w of every matrix")

    def _noisy(self, problem: Prediction) -> Params:
        """A draw of the first parameters, to try the model on."""
        *apart, join = self._apart(problem.data.dtype)
        key = jax.random.key(0)
        return join(*(draw(key, v, v, to, self.noise) for v, to in zip(self._vectors(problem), apart, strict=True)))

    def init(self, problem: Prediction) -> VirtualState:
        """Factors that multiply to the prior, or to where training begins."""
        m, dtype = problem.data.num_nodes, problem.data.dtype
        first, own = self._vectors(problem)
        private = jnp.broadcast_to(own, (m, own.size))
        real = (problem.data.sizes > 0).astype(dtype)[:, None]
        whole = Gaussian.around_zero(self.prior_scale, first)
        if self.factors == "start":
            whole = Gaussian.of(first, jnp.full_like(first, jnp.asarray(self.first_scale, dtype) ** -2))
        factor = whole ** self._each(problem)
        factors = Gaussian(real * factor.precision[None, :], real * factor.shift[None, :])
        precision = jnp.full_like(private, jnp.asarray(self.first_scale, dtype) ** -2)
        return VirtualState(
            jnp.zeros((), jnp.int32), _product(factors), factors, Gaussian.of(private, precision), first,
            jnp.full(m, jnp.inf, dtype), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32),
        )  # fmt: skip

    def resume(self, state: VirtualState, problem: Prediction) -> VirtualState:
        return resumed("Virtual", state, self.init, problem)

    def message(self, problem: Prediction) -> tuple[float, float]:
        """Means and precisions of the client that is refined; of a part of them, with their places.

        Algorithm 1 sends the posterior to all clients after every refinement; here one gets it when its turn comes.
        """
        count = len(jax.eval_shape(lambda: self._vectors(problem)[0]))
        return 2.0 * count, 2.0 * count if self.sent == 1.0 else 3.0 * self.sent * count

    def step_flops(self, problem: Prediction) -> Array:
        return super().step_flops(problem) * self.samples * (1.0 if self.noise == "shared" else 2.0)

    def request(self, problem: Prediction, round: Array | int = 0) -> Request:
        """One client's refinement, or with ``parallel=True`` all clients'."""
        request, data = super().request(problem, round), problem.data
        if self.parallel:
            return request
        if isinstance(self.order, tuple) and max(self.order) >= data.num_nodes:
            raise ValueError(f"Virtual: order names client {max(self.order)}, but there are {data.num_nodes}.")
        turn = whose_turn(data.sizes > 0, request.round, self.order, self.seed)
        return request.replace(steps=jnp.where(turn, request.steps, 0))

    def step(self, key: Array, state: VirtualState, problem: Prediction, work: Work) -> tuple[VirtualState, Info]:
        data, dtype = problem.data, problem.data.dtype
        budget = work.budget(self.request(problem, state.round).steps)
        share = self._each(problem) if self.prior == "once" else jnp.ones((), dtype)
        shared_prior = Gaussian.around_zero(self.prior_scale, state.first) ** share
        private_prior = Gaussian.around_zero(self.prior_scale, state.private.precision[0])
        to_shared, to_private, join = self._apart(problem.data.dtype)
        first = self._each(problem) * jnp.asarray(self.first_scale, dtype) ** -2
        damping = self.damping
        if damping is None:
            damping = self._each(problem) if self.parallel else 1.0

        def client(
            given: Given,
            data: TaskData,
            place: Array,
            node: Array,
            budget: Array,
            own: tuple[Gaussian, Gaussian, Array],
        ) -> tuple[tuple[Gaussian, Gaussian, Array], tuple[Gaussian, Array, Array]]:
            key, posterior, begin, likelihood, shared_prior, private_prior, numbers = given
            damping, first, temperature, rate = numbers
            factor, private, before = own
            refinement = Refinement.of(posterior, factor, shared_prior, private_prior)
            total = jnp.sum(data.weight[place])

            def loss(v: Trained, batch: Batch, key: Array) -> Array:
                scale, own_scale = refinement.posterior(v).scale, refinement.own(v).scale

                def one(key: Array) -> Array:
                    keys = jax.random.split(key, 3)
                    params = join(
                        draw(keys[0], v.mean, scale, to_shared, self.noise),
                        draw(keys[1], v.own_mean, own_scale, to_private, self.noise),
                    )
                    return mean_loss(self.model, likelihood, params, batch, keys[2])

                expected = jnp.mean(jax.vmap(one)(jax.random.split(key, self.samples)))
                return expected + temperature * refinement.divergences(v) / total

            start = refinement.begin(begin, factor, private, first, jnp.isinf(before))
            done = train(jax.random.fold_in(key, node), data, place, budget, self.schedule, self.client_optimizer,
                         loss, start, self.client_optimizer.init(start), rate)  # fmt: skip
            new_private = refinement.own(done.params)
            new = factor ** (1.0 - damping) * refinement.factor(done.params) ** damping
            if self.sent < 1.0:
                new = most_of(self.sent, factor, new, posterior)
            finite = all_finite((new, new_private, done.loss))
            new, new_private, value = jax.tree.map(
                partial(jnp.where, finite), (new, new_private, done.loss), (factor, private, before)
            )
            return (new, new_private, value), (new / factor, finite.astype(jnp.int32), (~finite).astype(jnp.int32))

        numbers = tuple(jnp.asarray(a, dtype) for a in (damping, first, self.temperature, self.rate))
        given = key, state.posterior, state.mean, problem.likelihood, shared_prior, private_prior, numbers
        own = state.factors, state.private, state.losses
        zero = jax.tree.map(jnp.zeros_like, state.posterior), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        (factors, private, losses), (change, good, bad) = over_clients(
            data, budget, at_once(self.at_once), client, given, own, zero
        )
        round = state.round + 1
        posterior = lax.cond(round % _REFRESH_EVERY == 0, lambda: _product(factors), lambda: state.posterior * change)
        failed = failures(state.failed, good, bad)
        after = VirtualState(round, posterior, factors, private, state.first, losses, state.diverged + bad, failed)
        return after, info(self, problem, budget)

    def _each(self, problem: Prediction) -> Array:
        """1 / K."""
        count = jnp.sum(problem.data.sizes > 0, dtype=jnp.int32).astype(problem.data.dtype)
        return 1.0 / jnp.maximum(count, 1.0)


def _product(factors: Gaussian) -> Gaussian:
    return Gaussian(jnp.sum(factors.precision, axis=0), jnp.sum(factors.shift, axis=0))
