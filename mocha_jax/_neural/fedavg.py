"""Federated averaging and its relatives: one network for all clients."""

from __future__ import annotations

import dataclasses

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Tree
from mocha_jax._neural.client import Client
from mocha_jax._neural.clients import Pull
from mocha_jax._neural.composed import Sampling
from mocha_jax._neural.method import Answer, Beginning, Declared, Method, ServerParts, ServerRound
from mocha_jax._neural.trees import difference, scaled


def first_model(b: Beginning) -> ServerParts:
    """Beginning with a network for all clients and an optimizer at the server."""
    params = b.begin(0)
    return ServerParts(params, (), b.optimizer.init(params))


def send_change(c: Client, own: Tree) -> tuple[Tree, Answer]:
    """Train the server's network and send how it changed; a `proximal` term keeps it near where it began."""
    pull = Pull(c.numbers["proximal"], c.shared) if "proximal" in c.numbers else None
    done = c.train(c.shared, pull=pull)
    return own, Answer(scaled(c.weight, difference(c.shared, done.params)), loss=done.loss)


def averaged(s: ServerRound) -> ServerParts:
    """Take the average change for a gradient of the server's network."""
    params, state = s.step(s.average(s.total), s.parts.shared, s.parts.kept)
    return s.parts._replace(shared=params, kept=state)


AVERAGING = Method(first_model, send_change, averaged)


class FedAvg(Sampling):
    r"""Federated averaging (McMahan et al. 2017), and its variants by settings.

    In a round a share C of the clients each begin with the server's parameters $\theta$, train on their own
    samples for E epochs of mini-batches of B, and return what they have, $\theta_k$. The server takes the average
    change for a gradient,

    $$
    g = \sum_{k \in S} \frac{c_k}{\sum_{j\in S} c_j} (\theta - \theta_k), \qquad
    \theta \leftarrow \theta + \mathrm{update}(g),
    $$

    $c_k$ the total weight of a client's samples, their number with ``loss_scaling="sum"``. By default the update
    is $-g$, and $\theta$ becomes the average of those that answered.

    * **FedSGD**: ``local_epochs=1, batch_size=None``, one step on all samples.
    * **FedProx** (Li et al. 2020): ``proximal=mu`` adds $\tfrac\mu2\|\theta_k-\theta\|^2$ to the clients' losses.
    * **FedAvgM, FedAdam, FedYogi** (Hsu et al. 2019, Reddi et al. 2021):
      ``server_optimizer=optax.sgd(1.0, momentum=0.9)``, ``optax.adam(1e-2, eps=1e-3)``, ``optax.yogi(1e-2)``.

    An update that is not finite is left out, as if its client had not answered, and counted. Systems apply: a budget
    cuts a client's steps, and clients that do not answer are not averaged.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round. What it draws, as ``optax.add_noise`` does, is
        drawn for every client and round by itself.
      server_optimizer: of the server; default ``optax.sgd(1.0)``.
      local_epochs: E.
      batch_size: B; None for all samples at once.
      fraction: C, the share of the clients with data that is asked in a round; at least one is.
      proximal: mu.
      rate: factor of the clients' updates, a learning rate to map over.
      seed: of the first parameters.
      at_once: clients trained together, see `Local`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> train, test = data.replace(y=(data.y > 0).astype(data.dtype)).split(jax.random.key(1), 0.75)
      >>> problem = mj.Prediction(train, test=test)
      >>> algorithm = mj.FedAvg(mj.networks.MLP(5, 2, (16,)), optax.sgd(0.1), batch_size=10)
      >>> solution = mj.solve(problem, algorithm, tol=None, max_rounds=10)
      >>> bool(solution.history.loss[-1] < solution.history.loss[0])
      True

    References:
      - [McMahan et al., Communication-Efficient Learning of Deep Networks](https://arxiv.org/abs/1602.05629), 2017.
      - [Li et al., Federated Optimization in Heterogeneous Networks](https://arxiv.org/abs/1812.06127), 2020.
      - [Hsu et al., Measuring the Effects of Non-Identical Data Distribution](https://arxiv.org/abs/1909.06335), 2019.
      - [Reddi et al., Adaptive Federated Optimization](https://arxiv.org/abs/2003.00295), 2021.
    """

    proximal: Hyperparameter | None = dataclasses.field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proximal is not None:
            check.scalar("FedAvg", proximal=self.proximal)
            check.nonnegative("FedAvg", proximal=self.proximal)
            if isinstance(self.proximal, int | float) and self.proximal == 0:
                object.__setattr__(self, "proximal", None)  # a term of 0 would only cost time

    def declared(self) -> Declared:
        numbers = {} if self.proximal is None else {"proximal": self.proximal}
        return Declared(AVERAGING, numbers, optimizer=self.server_optimizer)
