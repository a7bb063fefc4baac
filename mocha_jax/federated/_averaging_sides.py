r"""Both sides of federated averaging: FedSGD, FedAvg and FedProx, with any optimizer at the server.

What comes down are the server's parameters $\theta$. A node trains them on its samples to $\theta_k$ and sends
$c_k (\theta - \theta_k)$ and $c_k$, the total weight of its samples; the server adds up both. **Nodes keep nothing.**
An answer that was lost is one of a node that was not asked, and a node that begins from nothing is as good as any. An
answer to an earlier message is a change from the parameters of that time, and is applied to the present ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._core.pytree import Pytree, Tree, static, tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.rounds import NO_ROUND
from mocha_jax._neural.clients import at_once, over_clients
from mocha_jax._neural.fedavg import FedAvg, FedAvgAnswer, FedAvgState, no_answer
from mocha_jax._neural.prediction import Prediction
from mocha_jax.federated._absent_data import absent
from mocha_jax.federated._network_sides import (
    Training,
    check_paths,
    implausible_numbers,
    no_regularizer,
    problem_of,
    row_of,
    steps_of,
    total_of,
    training,
)
from mocha_jax.federated._sides import Header, NodeSide, ReceivedAnswers, ServerSide, Sides, register, where
from mocha_jax.likelihoods import Likelihood
from mocha_jax.systems import Full
from mocha_jax.systems._base import Request

Record = TypeVar("Record")


class AveragingDown(Pytree):
    """The message of the server."""

    params: Tree = tree()  # [m, ...] of the model
    steps: Array  # [m] int32 how many to do; below 0 those of a full round


class AveragingUp(Pytree):
    """The answer of nodes."""

    change: Tree = tree()  # [m, ...] of the parameters, from where they end to where they began, times the weight
    weight: Array  # [m] of the samples; 0 without a step, or where the training was not finite
    loss: Array  # [m] mean over the training, times the weight
    diverged: Array  # [m] int32 1 where it was not finite
    samples: Array  # [m] int32


class AveragingNodeSide(NodeSide[tuple[()], AveragingDown, AveragingUp]):
    """Nodes that train the server's parameters."""

    algorithm: FedAvg
    problem: Prediction

    @classmethod
    def of(cls, algorithm: FedAvg, data: TaskData, likelihood: Likelihood) -> AveragingNodeSide:
        problem = problem_of(algorithm, data, likelihood)
        check_paths(algorithm, jax.eval_shape(lambda: algorithm.begin(data.dtype)))
        return cls(algorithm, problem)

    def init(self) -> tuple[()]:
        return ()

    def like_down(self) -> Mapping[str, Tree]:
        def some() -> AveragingDown:
            m, dtype = self.problem.data.num_nodes, self.problem.data.dtype
            return AveragingDown(of_each(self.algorithm.begin(dtype), m), jnp.zeros((m,), jnp.int32))

        return {"AveragingDown": jax.eval_shape(some)}

    def weights(self, state: tuple[()], down: AveragingDown) -> Tree:
        return down.params

    def work(
        self, key: Array, state: tuple[()], header: Header, down: AveragingDown
    ) -> tuple[tuple[()], Array, AveragingUp]:
        algorithm, problem, data = self.algorithm, self.problem, self.problem.data

        def client(
            down: AveragingDown, data: TaskData, place: Array, node: Array, budget: Array, _: FedAvgAnswer
        ) -> tuple[FedAvgAnswer, tuple[()]]:
            inputs = algorithm.inputs(key, row_of(down.params, node), problem)
            return algorithm.answer(inputs, data, place, header.task[node], budget), ()

        none = of_each(no_answer(algorithm.begin(data.dtype), data.dtype), data.num_nodes)
        budget = steps_of(down.steps, algorithm.full_work(problem))
        answer, _ = over_clients(data, budget, at_once(algorithm.at_once), client, down, none, ())
        # A node that keeps nothing is never ahead of what the server knows.
        return (), header.held, AveragingUp(answer.change, answer.weight, answer.loss, answer.diverged, data.sizes)


class AveragingServerState(Pytree):
    """The state of the server between rounds."""

    counts: Array  # [m] int32 samples of every node; 0 of one that has left
    state: FedAvgState


class AveragingServerSide(ServerSide[AveragingServerState, AveragingUp]):
    """The server of federated averaging."""

    judges = False

    algorithm: FedAvg
    num_tasks: int = static()
    dtype: DTypeLike = static()
    loss_scaling: str = static()

    @classmethod
    def of(
        cls, algorithm: FedAvg, regularizer: object, num_tasks: int, num_features: int, dtype: DTypeLike, scaling: str
    ) -> AveragingServerSide:
        # The features are the model's: of sequences it does not see all of them.
        no_regularizer(algorithm, regularizer)
        check_paths(algorithm, jax.eval_shape(lambda: algorithm.begin(dtype)))
        return cls(algorithm, num_tasks, dtype, scaling)

    def init(self, counts: Array) -> AveragingServerState:
        return AveragingServerState(counts, self.algorithm.first_state(self.dtype))

    def resume(self, state: AveragingServerState, counts: Array) -> AveragingServerState:
        return state.replace(counts=counts)

    def asked(self, key: Array, state: AveragingServerState) -> Array | None:
        zero = jnp.zeros((), self.dtype)
        request = Request(state.state.round, jnp.ones_like(state.counts), zero, zero, zero, zero)
        selected, data = self.algorithm.select_nodes(Full()), absent(state.counts, 1, self.dtype)
        return selected.work(jax.random.fold_in(key, NO_ROUND), data, request).active

    def down(self, state: AveragingServerState) -> AveragingDown:
        return AveragingDown(of_each(state.state.params, 1), jnp.full((self.num_tasks,), -1, jnp.int32))

    def like_up(self) -> AveragingUp:
        def some() -> AveragingUp:
            none = of_each(no_answer(self.algorithm.begin(self.dtype), self.dtype), self.num_tasks)
            return AveragingUp(none.change, none.weight, none.loss, none.diverged, none.diverged)

        return jax.eval_shape(some)

    def combine(
        self, state: AveragingServerState, round: Array, up: AveragingUp, received: ReceivedAnswers
    ) -> tuple[AveragingServerState, Training]:
        counts = where(received.any & (state.counts > 0), up.samples, state.counts)
        total = total_of(received.any, FedAvgAnswer(up.change, up.weight, up.loss, up.diverged))
        after = self.algorithm.heard(state.state, total)
        return AveragingServerState(counts, after), training(after, counts)

    def weights(self, state: AveragingServerState) -> Tree:
        return self.algorithm.weights(state.state)

    def implausible(
        self, state: AveragingServerState, up: AveragingUp, received: ReceivedAnswers
    ) -> Mapping[str, Array]:
        most = up.samples.astype(up.weight.dtype) if self.loss_scaling == "sum" else jnp.ones_like(up.weight)
        light = (up.weight >= 0) & (up.weight <= most * (1.0 + 1e-3))
        return {
            **implausible_numbers(up.samples, diverged=up.diverged),
            "says that its samples weigh less than nothing, or more than so many can": ~light,
        }


def of_each(record: Record, m: int) -> Record:
    """The record of each of m nodes."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a[None], (m, *a.shape)), record)


register(FedAvg, Sides(AveragingNodeSide.of, AveragingServerSide.of))
