"""Mixtures: of a client's own model and that of all, and of several models: APFL, IFCA, FedEM."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Tree
from mocha_jax._neural.client import Client, Phase
from mocha_jax._neural.clients import Batch
from mocha_jax._neural.composed import Composed
from mocha_jax._neural.fedavg import averaged, first_model
from mocha_jax._neural.method import Answer, Beginning, Method, ServerParts, ServerRound
from mocha_jax._neural.trees import difference, inner_product, scaled
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.networks import Mixture, MixtureParameters, Network, Params
from mocha_jax.personalized._parts import TrainingOptions, check_made_of, composed

_CHOICE = "choice"  # of a private client's model, when training is over


def apfl(
    model: Network, client_optimizer: optax.GradientTransformation, *, mixing: Hyperparameter = 0.5,
    mixing_rate: Hyperparameter = 0.0, **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose APFL: each client predicts by a mixture $\bar v_k = \alpha_k v_k + (1-\alpha_k) w$ of two models.

    In a step the client moves its copy of $w$ along $\nabla f_k(w)$ and its own $v_k$ along
    $\alpha_k \nabla f_k(\bar v_k)$, both at the old point. Once a round its share moves,

    $$
    \alpha_k \leftarrow \big[\alpha_k - \eta_\alpha \langle v_k - w, \nabla f_k(\bar v_k) \rangle\big]_0^1,
    $$

    at the beginning of the round, with the gradient of all its samples.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of both models; it begins anew in every round.
      mixing: $\alpha_k$ at the beginning, in [0, 1].
      mixing_rate: $\eta_\alpha$; 0 keeps the shares as they are.
      **options: of `Composed`.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.apfl(mj.networks.MLP(5, 2), optax.sgd(0.1), mixing_rate=0.1)
      >>> mj.solve(problem, algorithm, tol=None, max_rounds=5).weights[0].w.shape
      (6, 5, 2)

    References:
      - [Deng et al., Adaptive Personalized Federated Learning](https://arxiv.org/abs/2003.13461), 2020, Algorithm 1.
    """
    check.in_unit_interval("apfl", mixing=mixing)
    check.nonnegative("apfl", mixing_rate=mixing_rate)
    numbers: dict[str, Hyperparameter] = {"mixing": mixing}
    if not (isinstance(mixing_rate, int | float) and mixing_rate == 0):
        numbers["mixing_rate"] = mixing_rate
    return composed("apfl", APFL, model, client_optimizer, numbers, options, gradients=2.0)


class MixedModel(NamedTuple):
    """A client's own model and its share, and in a round the client's copy of the server's."""

    own: Params
    share: Array | tuple[()] = ()  # []
    shared: Params = ()


def _first_mixed(b: Beginning, node: Array) -> MixedModel:
    return MixedModel(b.begin(0), b.numbers["mixing"])


def _interpolated(share: Array, own: Params, shared: Params) -> Params:
    return jax.tree.map(lambda v, w: share * v + (1.0 - share) * w, own, shared)


def _apfl_client(c: Client, kept: MixedModel) -> tuple[MixedModel, Answer]:
    share = jnp.asarray(kept.share)
    if "mixing_rate" in c.numbers:
        uphill = jax.grad(c.loss)(_interpolated(share, kept.own, c.shared))
        slope = inner_product(uphill, difference(kept.own, c.shared))
        share = jnp.clip(share - c.numbers["mixing_rate"] * slope, 0.0, 1.0)

    def objective(both: MixedModel, batch: Batch, key: Array) -> Array:
        mixed = _interpolated(share, both.own, jax.tree.map(lax.stop_gradient, both.shared))
        return c.mean_loss(both.shared, batch, key) + c.mean_loss(mixed, batch, key)

    done = c.train(MixedModel(kept.own, shared=c.shared), objective)
    change = scaled(c.weight, difference(c.shared, done.params.shared))
    return MixedModel(done.params.own, share), Answer(change, loss=done.loss)


def _mixed_model(shared: Params, row: Tree, own: MixedModel) -> Params:
    return _interpolated(jnp.asarray(own.share), own.own, shared)


def _own_as_shared(shared: Params, row: Tree, first: MixedModel) -> MixedModel:
    return first._replace(own=shared)


APFL = Method(first_model, _apfl_client, averaged, own=_first_mixed, personal_model=_mixed_model, joins=_own_as_shared)


def ifca(
    model: Network, client_optimizer: optax.GradientTransformation, *, clusters: int = 2, classes: bool = True,
    **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose IFCA: several models at the server, of which each client trains the one that fits it best.

    A client receives all $\theta_1, \dots, \theta_K$, takes $j = \arg\min_j f_k(\theta_j)$ over all its samples and
    trains $\theta_j$; the server averages the answers of each cluster (model averaging). Clients predict by the model
    that fits their samples best. Models that begin alike stay alike: try several seeds. A private client
    (`privacy.with_budget`) chooses by the noisy losses of a batch, which is one of its steps, and at the end by
    those of an epoch.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round.
      clusters: K.
      classes: whether the model's outputs are logits of classes, see `networks.Mixture`.
      **options: of `Composed`.

    Returns:
      The algorithm, to be used like `FedAvg`; its parameters are those of a `networks.Mixture` with one share of 1.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.ifca(mj.networks.MLP(5, 2), optax.sgd(0.1), clusters=3)
      >>> weights = mj.solve(problem, algorithm, tol=None, max_rounds=5).weights
      >>> weights.components[0].w.shape, weights.shares.shape
      ((3, 5, 2), (6, 3))

    References:
      - [Ghosh et al., An Efficient Framework for Clustered Federated Learning](https://arxiv.org/abs/2006.04088), 2020,
        Algorithm 1.
    """
    check_made_of("ifca", model, client_optimizer)
    check.integer("ifca", 1, clusters=clusters)
    mixture = Mixture(model, clusters, classes)
    return composed("ifca", IFCA, mixture, client_optimizer, {}, options, tuning=(Phase(_CHOICE, epochs=1),))


class ClusterChange(NamedTuple):
    """Changes of models ``[k, ...]``, each times its clients' weight, and the weights."""

    models: Params
    weight: Array  # [k]


def _components(b: Beginning) -> ServerParts:
    params = b.begin(0).components
    return ServerParts(params, (), b.optimizer.init(params))


def _of_components(shared: Params, row: Tree) -> Answer:
    return Answer(ClusterChange(shared, jnp.zeros(len(jax.tree.leaves(shared)[0]), jax.tree.leaves(shared)[0].dtype)))


def _one(c: Client) -> Client:
    """The client with the network that its mixture is of."""
    assert isinstance(c.network, Mixture)
    return c._replace(network=c.network.network)


def _least(losses: Array) -> Array:
    """Mark the least of some losses, ``[k]``."""
    return jax.nn.one_hot(jnp.argmin(losses), len(losses), dtype=losses.dtype)


def _best(c: Client, own: Tree) -> Array:
    """Mark the component with the least loss on the client's samples, ``[k]``; a private client's by an epoch."""
    return _least(_one(c).compared(c.shared, c.steps[_CHOICE], _CHOICE)[0])


def _ifca_client(c: Client, own: Tree) -> tuple[Tree, Answer]:
    losses, client = _one(c).compared(c.shared)
    mark = _least(losses)
    begin = jax.tree.map(lambda a: a[jnp.argmax(mark)], c.shared)
    done = client.train(begin)
    change = jax.tree.map(lambda a: jnp.multiply.outer(c.weight * mark, a), difference(begin, done.params))
    return own, Answer(ClusterChange(change, c.weight * mark), loss=done.loss)


def _each_averaged(s: ServerRound) -> ServerParts:
    change, weight = s.total
    gradient = jax.tree.map(lambda a: safe_ratio(a, weight.reshape(-1, *(1,) * (a.ndim - 1))), change)
    params, state = s.step(gradient, s.parts.shared, s.parts.kept)
    return s.parts._replace(shared=params, kept=state)


def _mixture(shared: Params, row: Tree, own: Array) -> MixtureParameters:
    return MixtureParameters(shared, own)


IFCA = Method(_components, _ifca_client, _each_averaged, _of_components, personal_model=_mixture, ready=_best)


def fedem(
    model: Network, client_optimizer: optax.GradientTransformation, *, components: int = 3, classes: bool = True,
    **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose FedEM: a mixture of models that all clients share, with shares of every client's own.

    A client receives all components, computes for each of its samples which may have made it,

    $$
    q_{ij} \propto \pi_{kj}\, \exp\big(-\ell_i(\theta_j)\big), \qquad \pi_{kj} \leftarrow
    \frac{\sum_i c_{ki}\, q_{ij}}{\sum_i c_{ki}},
    $$

    and trains every component on samples weighed by $q_{ij}$. It predicts by $\sum_j \pi_{kj}\, p_j(y \mid x)$.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round.
      components: of the mixture, which begin with other draws.
      classes: whether the model's outputs are logits of classes, see `networks.Mixture`.
      **options: of `Composed`.

    Returns:
      The algorithm, to be used like `FedAvg`; its parameters are those of a `networks.Mixture`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.fedem(mj.networks.MLP(5, 2), optax.sgd(0.1))
      >>> weights = mj.solve(problem, algorithm, tol=None, max_rounds=5).weights
      >>> weights.components[0].w.shape, weights.shares.shape
      ((3, 5, 2), (6, 3))

    References:
      - [Marfoq et al., Federated Multi-Task Learning under a Mixture of Distributions](https://arxiv.org/abs/2108.10252),
        2021, Algorithm 1.
    """
    check_made_of("fedem", model, client_optimizer)
    check.integer("fedem", 1, components=components)
    mixture = Mixture(model, components, classes)
    return composed("fedem", FEDEM, mixture, client_optimizer, {}, options)


def _first_shares(b: Beginning, node: Array) -> Array:
    return b.begin(0).shares


def _fedem_client(c: Client, own: Array) -> tuple[Array, Answer]:
    one, weight = _one(c), c.data.weight[c.place]
    losses = lax.map(one.losses, c.shared)  # [k, n]
    least = jnp.finfo(losses.dtype).tiny ** 0.5
    responsibility = jnp.maximum(jax.nn.softmax(jnp.log(own)[:, None] - losses, axis=0), least)
    shares = safe_ratio(responsibility @ weight, c.weight)
    each = safe_ratio(c.weight, jnp.sum(weight > 0, dtype=weight.dtype))

    def objective(params: Params, batch: Batch, key: Array) -> Array:
        # The batch's mean over its samples, not over their responsibilities.
        count = jnp.sum(batch.weight > 0, dtype=weight.dtype)
        return one.mean_loss(params, batch, key) * safe_ratio(jnp.sum(batch.weight), each * count)

    done = jax.vmap(lambda params, weight: one.train(params, objective, weight=weight))(
        c.shared, responsibility * weight[None, :]
    )
    return shares, Answer(scaled(c.weight, difference(c.shared, done.params)), loss=jnp.sum(done.loss))


FEDEM = Method(_components, _fedem_client, averaged, own=_first_shares, personal_model=_mixture)
