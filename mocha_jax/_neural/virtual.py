r"""VIRTUAL: variational inference over a server's network and the clients' own (Corinzia and Buhmann 2019)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.bayesian import BayesianTrainer, VirtualState, each_of, product
from mocha_jax._neural.clients import clients_at_once, over_clients, whose_turn
from mocha_jax._neural.gaussian import NOISES, DiagonalGaussian, draw
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.refinement import How, Own, RefinementAnswer, RefinementInputs, no_answer, refine
from mocha_jax._neural.trainer import info, resumed
from mocha_jax.likelihoods import Likelihood
from mocha_jax.networks import Network, Params
from mocha_jax.systems._base import Info, Request, Work


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
    $p_i = p^{1/K}$, and exact factors multiply to the posterior (1); with ``prior="each"`` $p_i = p$, as
    published in (3).

    **The server sees more than s.** The paper claims that a server that knows only s never learns a factor. But it sees
    s before and after the turn of a single client, and their quotient is that client's change
    $s_i^{new} / s_i$. Factors stay with the clients only if the changes of several are multiplied before the server
    sees them, as a secure sum of both vectors of `parallel` refinements would do.

    **Several at once**: ``parallel=True`` and ``systems=mj.systems.Sampled(q)`` refine a share q of the m clients in a
    round; ``damping=1 / (q m)`` is then as bold as the default for all. A tree of servers that multiply what their
    clients send changes no number: a product of factors is a sum of precisions and shifts, in whatever order.

    **All clients begin with the same private parameters**, as in FedAvg all begin with the same network: shared layers
    then suit all clients from the first refinement.

    Args:
      model: `networks.Lateral`, or any other with `networks.SplitParameters` for parameters; where they are not, all
        are shared.
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
        ``"start"``, as in Algorithm 1: shares of the density at which training begins, which bind the first
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

    References:
      [Corinzia et al., Variational Federated Multi-Task Learning](https://arxiv.org/abs/1906.06268), 2019.
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
        *apart, join = self.apart(problem.data.dtype)
        key = jax.random.key(0)
        return join(
            *(draw(key, v, v, to, self.noise) for v, to in zip(self.vectors(problem.data.dtype), apart, strict=True))
        )

    def init(self, problem: Prediction) -> VirtualState:
        return self.first_state(problem.data.sizes > 0, *self.vectors(problem.data.dtype))

    def first_state(self, real: Array, first: Array, own: Array) -> VirtualState:
        """Factors that multiply to the prior, or to where training begins.

        Args:
          real: ``[m]`` bool which clients have data.
          first: ``[p]`` the first shared parameters.
          own: ``[q]`` the first private ones.
        """
        (m,), dtype = real.shape, first.dtype
        factor = self.whole(first) ** each_of(real, dtype)
        has_data = real.astype(dtype)[:, None]
        factors = DiagonalGaussian(has_data * factor.precision[None, :], has_data * factor.shift[None, :])
        private = jnp.broadcast_to(own, (m, own.size))
        precision = jnp.full_like(private, jnp.asarray(self.first_scale, dtype) ** -2)
        return VirtualState(
            jnp.zeros((), jnp.int32), product(factors), factors, DiagonalGaussian.of(private, precision), first,
            jnp.full(m, jnp.inf, dtype), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32),
        )  # fmt: skip

    def whole(self, first: Array) -> DiagonalGaussian:
        """Return the density that the first factors multiply to, ``[p]``."""
        if self.factors == "start":
            return DiagonalGaussian.of(first, jnp.full_like(first, jnp.asarray(self.first_scale, first.dtype) ** -2))
        return DiagonalGaussian.around_zero(self.prior_scale, first)

    def resume(self, state: VirtualState, problem: Prediction) -> VirtualState:
        return resumed("Virtual", state, self.init, problem)

    def message(self, problem: Prediction) -> tuple[float, float]:
        """Means and precisions of the client that is refined; of a part of them, with their places.

        Algorithm 1 sends the posterior to all clients after every refinement; here one gets it when its turn comes.
        """
        count = len(jax.eval_shape(lambda: self.vectors(problem.data.dtype)[0]))
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
        data = problem.data
        budget = work.budget(self.request(problem, state.round).steps)

        def client(
            inputs: RefinementInputs, data: TaskData, place: Array, node: Array, budget: Array, own: Own
        ) -> tuple[Own, RefinementAnswer]:
            return self.refine(inputs, data, place, node, budget, own, own.factor)

        each = each_of(data.sizes > 0, data.dtype)
        inputs = self.inputs(key, state.posterior, state.mean, state.private.precision[0], problem.likelihood, each)
        own = Own(state.factors, state.private, state.losses)
        own, total = over_clients(
            data, budget, clients_at_once(self.at_once), client, inputs, own, no_answer(state.first)
        )
        return state.heard(own, total), info(self, problem, budget)

    def inputs(
        self, key: Array, posterior: DiagonalGaussian, begin: Array, own: Array, likelihood: Likelihood, each: Array
    ) -> RefinementInputs:
        """The inputs of a client in a round.

        Args:
          key: of the round.
          posterior: ``[p]`` s.
          begin: ``[p]`` shared parameters to begin with.
          own: any numbers like the private parameters ``[q]``.
          likelihood: of the labels.
          each: [] one over the number of clients.
        """
        dtype = begin.dtype
        share = each if self.prior == "once" else jnp.ones((), dtype)
        shared_prior = DiagonalGaussian.around_zero(self.prior_scale, begin) ** share
        private_prior = DiagonalGaussian.around_zero(self.prior_scale, own)
        first = each * jnp.asarray(self.first_scale, dtype) ** -2
        damping = self.damping
        if damping is None:
            damping = each if self.parallel else 1.0
        numbers = (jnp.asarray(a, dtype) for a in (damping, first, self.temperature, self.rate))
        return RefinementInputs(key, posterior, begin, likelihood, shared_prior, private_prior, *numbers)

    def refine(
        self,
        inputs: RefinementInputs,
        data: TaskData,
        place: Array,
        node: Array,
        budget: Array,
        own: Own,
        latest: DiagonalGaussian,
    ) -> tuple[Own, RefinementAnswer]:
        """One client's refinement, see `refinement.refine`."""
        how = How(self.model, self.apart(data.dtype), self.noise, self.samples, self.sent, self.schedule,
                  self.client_optimizer)  # fmt: skip
        return refine(how, inputs, data, place, node, budget, own, latest)
