"""The base of all methods that train networks."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from mocha_jax._algorithms.base import Algorithm, OwnState, State
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Hyperparameter, PyTree, Tree, static
from mocha_jax._neural.clients import Batch, Schedule
from mocha_jax._neural.prediction import (
    Evaluation,
    Judge,
    Predicted,
    Prediction,
    Scores,
    evaluation,
    own_network,
    real_labels,
    score,
)
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.problem import Federated
from mocha_jax.likelihoods import Likelihood
from mocha_jax.networks import Network, Params
from mocha_jax.networks._base import outputs
from mocha_jax.systems._base import Info, Request

Carried = TypeVar("Carried", bound=State)

Equation: TypeAlias = Any  # of a program; JAX's own type of it knows no shapes


class Trainer(Algorithm[Prediction]):
    """An algorithm that trains a network by mini-batches at the clients. Its state has fields `loss` and `diverged`.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients, from optax.
      local_epochs: passes of a client over its samples in a round.
      batch_size: samples of a step; None for all of a client's.
      rate: factor of the clients' updates, a learning rate to map over.
      seed: of the first parameters.
      at_once: clients trained together by `vmap`, the rest in turn; default 1 on a CPU, whose caches that suits best,
        and 16 elsewhere.
    """

    solves: ClassVar[type[Federated]] = Prediction
    carries: ClassVar[type] = object  # its state

    model: Network
    client_optimizer: optax.GradientTransformation = static()
    local_epochs: int = static(default=1, kw_only=True)
    batch_size: int | None = static(default=10, kw_only=True)
    rate: Hyperparameter = dataclasses.field(default=1.0, kw_only=True)
    seed: Hyperparameter | int = dataclasses.field(default=0, kw_only=True)
    at_once: int | None = static(default=None, kw_only=True)

    def __post_init__(self) -> None:
        name = self.name
        check.instance(name, "model", self.model, Network, "networks.MLP(784, 10, (200, 200))")
        of_optax(name, "client_optimizer", self.client_optimizer, "optax.sgd(0.1)")
        check.integer(name, 1, local_epochs=self.local_epochs)
        if self.batch_size is not None:
            check.integer(name, 1, batch_size=self.batch_size)
        if self.at_once is not None:
            check.integer(name, 1, at_once=self.at_once)
        check.scalar(name, rate=self.rate)
        check.nonnegative(name, rate=self.rate)
        check.seed(name, self.seed)

    @property
    def network(self) -> Network:
        return self.model

    @property
    def schedule(self) -> Schedule:
        """The schedule of a client's epochs."""
        return Schedule(self.local_epochs, self.batch_size)

    def start(self, problem: Prediction, node: Array | int = 0) -> Params:
        """The first parameters, in the data's precision; other ones for every node."""
        return self.begin(problem.data.dtype, node)

    def begin(self, dtype: DTypeLike, node: Array | int = 0) -> Params:
        """The first parameters in that precision."""
        key = jax.random.fold_in(jax.random.key(jnp.asarray(self.seed, jnp.uint32)), node)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            params = self.model.init(key)
        return jax.tree.map(lambda a: jnp.asarray(a).astype(dtype), params)

    def size(self, problem: Prediction) -> int:
        """Count the model's parameters."""
        shapes = jax.eval_shape(lambda: self.start(problem))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    def full_work(self, problem: Prediction) -> Array:
        return self.schedule.steps(problem.data)

    def step_flops(self, problem: Prediction) -> Array:
        """Three times those of predicting a batch, ``[m]``: the gradient takes twice as many again.

        Batches of an epoch have a client's samples between them; a step is priced at their average.
        """
        data, room = problem.data, self.schedule.room(problem.data)
        params = jax.eval_shape(lambda: self.start(problem))
        x, y = problem.seen(room)
        each = 3.0 * flops(lambda p, x: outputs(self.model, p, x, y.shape), params, x) / room
        return each * safe_ratio(data.sizes.astype(data.dtype), self.schedule.per_epoch(data).astype(data.dtype))

    def message(self, problem: Prediction) -> tuple[float, float]:
        """Numbers that a client receives and sends in a round."""
        return (float(self.size(problem)),) * 2

    def request(self, problem: Prediction, round: Array | int = 0) -> Request:
        down, up = self.message(problem)
        return (
            super()
            .request(problem, round)
            .replace(down=jnp.asarray(down, problem.data.dtype), up=jnp.asarray(up, problem.data.dtype))
        )

    def check(self, problem: Prediction) -> None:
        """Raise if the model cannot predict the problem's labels."""
        shape = self.tried(problem, self.start, "")
        labels = [
            y for data in (problem.data, problem.test)
            if data is not None and (y := real_labels(data, problem.likelihood)) is not None
        ]  # fmt: skip
        known_labels = np.concatenate(labels) if labels else None
        problem.likelihood.check_outputs(self.name, shape.shape[-1], known_labels)

    def tried(self, problem: Prediction, make: Callable[[Prediction], Params], how: str) -> jax.ShapeDtypeStruct:
        """Try the model with such parameters on two samples; raise an error that names both where it cannot."""
        seen, labels = problem.seen(2)
        try:
            return jax.eval_shape(lambda x: outputs(self.model, make(problem), x, labels.shape), seen)
        except (TypeError, ValueError, AttributeError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{self.name}: the model {type(self.model).__name__} cannot predict samples of "
                f"{seen.shape[1]} features{how}: {reason}"
            ) from error

    def expect_both(self, state: object, problem: object) -> None:
        """Raise if these are not a state and a problem of the algorithm."""
        self.expect(problem)
        check.instance(self.name, "state", state, self.carries, "solution.state")

    @abstractmethod
    def parameters(self, state: OwnState, problem: Prediction, node: Array | int) -> PyTree:
        """The network that predicts a client's samples, as the model wants it: ``model.apply(parameters, x)``."""

    @on_purpose
    def predict(self, state: OwnState, problem: Prediction, node: Array | int, x: Array) -> Predicted:
        """Predict by a client's network.

        Args:
          state: e.g. ``solution.state``.
          problem: of the solve.
          node: which client.
          x: samples ``[b, d]``, as the network sees them: of sequences the inputs ``[b, T]``.
        """
        self.expect_both(state, problem)
        node, x = known_client(self, problem, node), samples(self, problem, x)
        predicted = outputs(self.model, self.parameters(state, problem, node), x, problem.seen(len(x))[1].shape)
        return Predicted.of(problem.likelihood, problem.likelihood.predictive(predicted)[None])

    def judge(self, state: OwnState, problem: Prediction) -> Judge:
        """Losses and errors of samples, by a client's network."""
        return self.judge_by(lambda client: self.parameters(state, problem, client), problem)

    def judge_by(self, parameters: Callable[[Array], Params], problem: Prediction) -> Judge:
        """Losses and errors of samples, by the parameters of a client."""

        def judged(client: Array, x: Array, y: Array) -> tuple[Array, Array]:
            predicted = outputs(self.model, parameters(client), x, y.shape)
            return problem.likelihood.loss(predicted, y), problem.likelihood.error(predicted, y)

        return judged

    def whose(self, problem: Prediction) -> Array | None:
        """The client whose network is to predict each node judged; None: all of them."""
        return own_network(problem)

    @on_purpose
    def scores(self, state: State, problem: Prediction) -> Scores:
        """Loss and error of every task on the samples that the problem is judged on."""
        self.expect_both(state, problem)
        return score(problem.judged_on, problem.likelihood, self.judge(state, problem), self.whose(problem),
                     problem.data.sizes > 0)  # fmt: skip

    def certify(self, state: OwnState, problem: Prediction) -> Evaluation:
        clients = jnp.sum(problem.data.sizes > 0, dtype=jnp.int32)
        alive = state.failed < jnp.maximum(clients, 1)
        return evaluation(
            self.scores(state, problem), state.loss, state.diverged, alive, self.exhausted(state, problem)
        )

    def exhausted(self, state: OwnState, problem: Prediction) -> Array:
        """Count the clients whose privacy allows them no more steps, [] int32."""
        return jnp.zeros((), jnp.int32)


def failures(before: Array, good: Array, bad: Array) -> Array:
    """Trainings in a row that were not finite."""
    return jnp.where(good > 0, 0, before + bad)


def mean_of_known(losses: Array) -> Array:
    """Mean over the clients that have trained; infinite, as the loss of one that has not, where none has."""
    has_loss = jnp.isfinite(losses)
    count = jnp.sum(has_loss, dtype=losses.dtype)
    return jnp.where(count > 0, safe_ratio(jnp.sum(jnp.where(has_loss, losses, 0.0)), count), jnp.inf)


def known_client(owner: Trainer, problem: Prediction, node: Array | int) -> Array:
    """A client's number, where it is one."""
    check.scalar(owner.name, node=node)
    check.integers(owner.name, 0, node=node)
    number = check.concrete(node)
    if number is not None and not number < problem.data.num_nodes:
        raise ValueError(f"{owner.name}: there is no client {number}; they are 0 to {problem.data.num_nodes - 1}.")
    return jnp.asarray(node, jnp.int32)


def samples(owner: Trainer, problem: Prediction, x: ArrayLike) -> Array:
    """Samples ``[b, d]`` in the data's precision."""
    as_floats = check.floats(owner.name, "x", x, ("b", problem.seen(1)[0].shape[1]), "fiub")
    return as_floats.astype(problem.data.dtype)


def of_optax(owner: str, name: str, value: object, example: str) -> None:
    """An optimizer."""
    if not isinstance(value, optax.GradientTransformation):
        raise ValueError(f"{owner}: {name} must be of optax, e.g. {example}; got {check.shown(value)}.")


def mean_loss(model: Network, likelihood: Likelihood, params: Params, batch: Batch, key: Array | None) -> Array:
    """Return the weighted mean loss of a batch."""
    x, y = likelihood.parts(batch.x, batch.y)
    losses = likelihood.loss(outputs(model, params, x, y.shape, key), y)
    total = jnp.sum(batch.weight)
    return jnp.sum(jnp.where(batch.weight > 0, batch.weight * losses, 0.0)) / jnp.where(total > 0, total, 1.0)


def all_finite(tree: Tree) -> Array:
    """Tell whether every number is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def info(algorithm: Trainer, problem: Prediction, budget: Array) -> Info:
    """Record that every client did its budget."""
    flops = budget.astype(problem.data.dtype) * algorithm.step_flops(problem)
    return Info(budget, flops, jnp.zeros(len(budget), bool))


def resumed(owner: str, state: Carried, init: Callable[[Prediction], Carried], problem: Prediction) -> Carried:
    """The state, if it is one of this algorithm for such a problem."""
    wanted = jax.eval_shape(init, problem)
    same = str(jax.tree.structure(state)) == str(jax.tree.structure(wanted))
    if not same or any(a.shape != b.shape for a, b in zip(*map(jax.tree.leaves, (state, wanted)), strict=True)):
        raise ValueError(f"{owner}: the state belongs to another algorithm, another model or other data.")
    return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), state, wanted)


def flops(fn: Callable[..., Tree], *args: Tree) -> float:
    """Operations of ``fn(*args)``; arguments may be shapes (`jax.ShapeDtypeStruct`).

    Examples:
      >>> import jax.numpy as jnp
      >>> flops(lambda a, b: a @ b + 1.0, jnp.ones((3, 4)), jnp.ones((4, 5)))
      135.0
    """
    return _count(jax.make_jaxpr(fn)(*args).eqns)


def _count(program: Sequence[Equation]) -> float:
    return float(sum(map(_operations, program)))


def _operations(equation: Equation) -> float:
    inner = [part for value in equation.params.values() for part in _programs(value)]
    if inner:
        times = equation.params.get("length", 1)  # of a scan; loops with an open end count once
        return float(times * max(map(_count, inner)))
    made = float(sum(math.prod(out.aval.shape) for out in equation.outvars))
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * made * math.prod(equation.invars[0].aval.shape[i] for i in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * made * math.prod(kernel) / outputs
    return made


def _programs(value: object) -> list[Sequence[Equation]]:
    if hasattr(value, "eqns"):
        return [value.eqns]
    if isinstance(value, tuple | list):
        return [program for item in value for program in _programs(item)]
    return []
