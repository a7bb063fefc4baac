"""Federated training as a client's and a server's function: methods are declarations of these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import PyTree, Tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.budgeted_trainer import BudgetedTrainer
from mocha_jax._neural.client import LOCAL, Client, Phase, PhaseTraining, divided
from mocha_jax._neural.clients import clients_at_once, over_clients
from mocha_jax._neural.method import Answer, Beginning, Declared, ServerParts, ServerRound
from mocha_jax._neural.prediction import Judge, Prediction
from mocha_jax._neural.trainer import all_finite, failures, info, resumed
from mocha_jax._neural.training_state import Heard, RoundInputs, Sent, TrainingState
from mocha_jax._neural.trees import count_numbers, first_row, mapped, nans_like, told_if_nan, zeros_like
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.networks import Params
from mocha_jax.systems._base import Info, Work

# Folded into the key of the algorithm's seed, beyond the numbers of clients.
_TUNING = np.uint32(2**32 - 3)


class ClientServer(BudgetedTrainer):
    r"""Federated training by a client's and a server's function, which a `Method` declares.

    In a round the clients receive the server's trees, train, and answer; the server combines the answers. Systems
    apply: a budget cuts the steps of a client's phases, each in proportion, and clients that do not answer keep what
    they had.
    """

    carries = TrainingState

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.privacy is not None:
            phases = *self.all_phases.values(), *self._as_first(self.declared().tuning).values()
            if any(phase.gradients != 1.0 for phase in phases):
                name = self.name
                raise ValueError(f"{name}: privacy is for methods whose steps compute one gradient of a batch each.")

    @abstractmethod
    def declared(self) -> Declared:
        """The functions, and what they are given."""

    @property
    def all_phases(self) -> dict[str, PhaseTraining]:
        """The phases of a round by name, the first one in front."""
        declared, wraps = self.declared(), self.declared().method.wraps
        optimizer = self.client_optimizer if wraps is None else wraps(self.client_optimizer)
        return {LOCAL: PhaseTraining(optimizer, self.schedule, declared.gradients), **self._as_first(declared.phases)}

    def _as_first(self, phases: tuple[Phase, ...]) -> dict[str, PhaseTraining]:
        """Other phases by name, with the settings of the first one where they name none."""
        first = PhaseTraining(self.client_optimizer, self.schedule)
        return {phase.name: first.of(phase) for phase in phases}

    def init(self, problem: Prediction) -> TrainingState:
        m, dtype = problem.data.num_nodes, problem.data.dtype
        parts = self.first_parts(m, dtype)
        own = self.first_own(jnp.arange(m, dtype=jnp.int32), dtype)
        state = TrainingState(
            jnp.zeros((), jnp.int32), *parts, own, (), jnp.full((), jnp.inf, dtype),
            jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), self.first_spent(m),
        )  # fmt: skip
        return state.replace(ready=nans_like(jax.eval_shape(self.made_ready, state, problem)))

    def first_parts(self, m: int, dtype: DTypeLike) -> ServerParts:
        """The server's trees before the first round."""
        return self.declared().method.start(self._beginning(m, dtype))

    def first_own(self, nodes: Array, dtype: DTypeLike) -> PyTree:
        """The trees that clients keep before it, ``[m, ...]``, of their numbers ``[m]`` int32."""
        own = self.declared().method.own
        return () if own is None else jax.vmap(partial(own, self._beginning(len(nodes), dtype)))(nodes)

    def _beginning(self, m: int, dtype: DTypeLike) -> Beginning:
        declared = self.declared()
        return Beginning(partial(self.begin, dtype), self._numbers(dtype), declared.optimizer, m)

    def _numbers(self, dtype: DTypeLike) -> dict[str, Array]:
        return {name: jnp.asarray(value, dtype) for name, value in self.declared().numbers.items()}

    def resume(self, state: TrainingState, problem: Prediction) -> TrainingState:
        state = resumed(self.name, state, self.init, problem)
        return state.replace(ready=self.made_ready(state, problem))

    def full_work(self, problem: Prediction) -> Array:
        return sum((p.schedule.steps(problem.data) for p in self.all_phases.values()), jnp.zeros((), jnp.int32))

    def step_flops(self, problem: Prediction) -> Array:
        """Average the operations of the steps of all phases, ``[m]``."""
        data, one, phases = problem.data, super().step_flops(problem), self.all_phases
        if len(phases) == 1:
            return one * phases[LOCAL].gradients
        rows = safe_ratio(data.sizes.astype(data.dtype), self.schedule.per_epoch(data).astype(data.dtype))
        passes = sum(phase.gradients * phase.schedule.epochs for phase in phases.values())
        work = jnp.asarray(passes, data.dtype) * data.sizes.astype(data.dtype)
        return safe_ratio(one, rows) * safe_ratio(work, self.full_work(problem).astype(data.dtype))

    def message(self, problem: Prediction) -> tuple[float, float]:
        def both() -> tuple[ServerParts, Answer]:
            parts = self.first_parts(1, problem.data.dtype)
            return parts, self.answer_like(parts)

        parts, answer = jax.eval_shape(both)
        return count_numbers((parts.shared, parts.rows)), count_numbers((answer.total, answer.row))

    def answer_like(self, parts: ServerParts) -> Answer:
        """Shapes of one client's answer to trees of these shapes."""
        sends, row = self.declared().method.sends, jax.tree.map(first_row, parts.rows)
        return Answer(parts.shared) if sends is None else sends(parts.shared, row)

    def inputs(self, key: Array, shared: Tree, problem: Prediction) -> RoundInputs:
        """The inputs of the clients in a round with that key."""
        dtype = problem.data.dtype
        return RoundInputs(key, shared, self._numbers(dtype), jnp.asarray(self.rate, dtype), problem.likelihood)

    def at_client(
        self, inputs: RoundInputs, row: Tree, data: TaskData, place: Array, node: Array, budget: Array,
        phases: Mapping[str, PhaseTraining] | None = None,
    ) -> Client:  # fmt: skip
        """A client in a round.

        Args:
          inputs: of the round.
          row: what the server sends to it alone.
          data: has its samples.
          place: [] int32 where.
          node: [] int32 its number among all.
          budget: [] int32 steps to do.
          phases: of its training; default those of a round.
        """
        phases, privacy = self.all_phases if phases is None else phases, None
        if self.privacy is not None:
            weight, size = data.weight[place], self.schedule.size(data.y.shape[1])
            expected = jnp.maximum(jnp.minimum(data.sizes[place], size), 1).astype(data.dtype)
            privacy = self.privacy.of(node, data.dtype, expected, jnp.max(weight))
        return Client(
            inputs.shared, row, inputs.numbers, inputs.rate, jax.random.fold_in(inputs.key, node), data, place, node,
            divided(budget, phases, data, place), phases, self.model, inputs.likelihood, privacy,
        )  # fmt: skip

    def answer(self, c: Client, own: Tree, sent: Sent) -> tuple[tuple[PyTree, Sent], Heard]:
        """One client's round: what it keeps and its row, those before where the answer is not finite; and its sums."""
        new, answer = self.declared().method.client(c, own)
        finite = all_finite((new, answer))
        weight = jnp.where(finite, c.weight, 0.0)
        total = jax.tree.map(lambda a: jnp.where(finite, a, jnp.zeros_like(a)), answer.total)
        kept = jax.tree.map(partial(jnp.where, finite), (new, answer.row), (own, sent.row))
        loss = jnp.where(finite & (self.privacy is None), weight * answer.loss, 0.0)
        return (kept[0], Sent(kept[1], finite)), Heard(total, weight, loss, (~finite).astype(jnp.int32))

    def step(self, key: Array, state: TrainingState, problem: Prediction, work: Work) -> tuple[TrainingState, Info]:
        budget, spent = self.allowed(work.budget(self.full_work(problem)), state.spent, problem.data)
        own, sent, heard = self._at_clients(key, state, problem, budget)
        weights = jnp.sum(problem.data.weight, axis=1)
        # Of the server's new trees no client has made anything ready.
        after = self.heard(state, heard, sent, weights).replace(own=own, ready=nans_like(state.ready), spent=spent)
        return after, info(self, problem, budget)

    def tuning_steps(self, data: TaskData) -> Array:
        """Steps by which each client is made ready, ``[m]`` int32."""
        phases = self._as_first(self.declared().tuning).values()
        return sum((phase.schedule.steps(data) for phase in phases), jnp.zeros((), jnp.int32))

    def _at_clients(
        self, key: Array, state: TrainingState, problem: Prediction, budget: Array
    ) -> tuple[PyTree, Sent, Heard]:
        """The clients' part of a round: what they keep, their rows and the sum of their answers."""
        data = problem.data
        like = self.answer_like(ServerParts(state.shared, state.rows))
        m, zero = data.num_nodes, jnp.zeros((), data.dtype)
        sent = Sent(zeros_like(like.row, m), jnp.zeros((m,), bool))

        def client(
            inputs: RoundInputs, data: TaskData, place: Array, node: Array, budget: Array,
            own: tuple[PyTree, PyTree, Sent],
        ) -> tuple[tuple[PyTree, PyTree, Sent], Heard]:  # fmt: skip
            kept, row, sent = own
            (kept, sent), heard = self.answer(self.at_client(inputs, row, data, place, node, budget), kept, sent)
            return (kept, row, sent), heard

        inputs = self.inputs(key, state.shared, problem)
        none = Heard(zeros_like(like.total), zero, zero, jnp.zeros((), jnp.int32))
        (own, _, sent), heard = over_clients(
            data, budget, clients_at_once(self.at_once), client, inputs, (state.own, state.rows, sent), none
        )
        return own, sent, heard

    @on_purpose
    def join(self, state: TrainingState, problem: Prediction, key: Array, rounds: int = 1) -> TrainingState:
        """Make personal models of clients that took no part, with the server as it is.

        The new clients do their part of some rounds, of which the server does not hear. They begin with what the server
        has, where a paper does not say otherwise; one of `fine_tuned`, `per_fedavg` or `ifca` needs no round.

        Args:
          state: of a run of this algorithm.
          problem: of the new clients.
          key: of their draws.
          rounds: how many.

        Returns:
          A state of the problem, to predict by: ``algorithm.scores(state, problem)``, ``algorithm.weights(state)``.

        Examples:
          >>> import jax, optax, mocha_jax as mj
          >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
          >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
          >>> algorithm = mj.personalized.ditto(mj.networks.MLP(5, 2), optax.sgd(0.1))
          >>> state, _ = mj.run(problem, algorithm, jax.random.key(0), num_rounds=5)
          >>> other = mj.datasets.federation(jax.random.key(1), 3, 5).data
          >>> new = mj.Prediction(other.replace(y=(other.y > 0).astype(other.dtype)))
          >>> algorithm.weights(algorithm.join(state, new, jax.random.key(2)))[0].w.shape
          (3, 5, 2)
        """
        self.expect_both(state, problem)
        check.key("join", key)
        check.integer("join", 0, rounds=rounds)
        self.check(problem)
        return _joined(key, self, state, problem, rounds)

    def _join(self, state: TrainingState, problem: Prediction, key: Array, rounds: int) -> TrainingState:
        method, data = self.declared().method, problem.data
        m, full = data.num_nodes, self.full_work(problem)
        rows = jax.tree.map(lambda a: jnp.broadcast_to(jnp.mean(a, axis=0), (m, *a.shape[1:])), state.rows)
        own = self.first_own(jnp.arange(m, dtype=jnp.int32), data.dtype)
        if method.joins is not None:
            own = jax.vmap(partial(method.joins, state.shared))(rows, own)
        kept_by_server = method.personal_model is not None and method.own is None

        def one(state: TrainingState, r: Array) -> tuple[TrainingState, None]:
            budget, spent = self.allowed(full, state.spent, data)
            own, sent, _ = self._at_clients(jax.random.fold_in(key, r), state, problem, budget)
            return state.exchange(own=own, rows=sent.row if kept_by_server else state.rows, spent=spent), None

        began = state.exchange(rows=rows, own=own, ready=(), spent=self.first_spent(m))
        after, _ = lax.scan(one, began, jnp.arange(rounds, dtype=jnp.int32))
        return after.exchange(ready=self.made_ready(after, problem))

    def heard(self, state: TrainingState, heard: Heard, sent: Sent, weights: Array) -> TrainingState:
        """The server's part of a round: the state after it.

        Args:
          state: the state before.
          heard: the sum of the answers.
          sent: rows of clients ``[m, ...]``.
          weights: ``[m]`` of all clients.
        """
        before, declared = ServerParts(state.shared, state.rows, state.kept), self.declared()
        after = declared.method.server(
            ServerRound(before, heard.total, sent.row, sent.answered, heard.weight, weights,
                        self._numbers(weights.dtype), declared.optimizer)
        )  # fmt: skip
        some = heard.weight > 0
        parts = jax.tree.map(partial(jnp.where, some), after, before)
        return TrainingState(
            state.round + 1, parts.shared, parts.rows, parts.kept, state.own, state.ready,
            self.reported(jnp.where(some, safe_ratio(heard.loss, heard.weight), state.loss)),
            state.diverged + heard.diverged, failures(state.failed, some.astype(jnp.int32), heard.diverged),
            state.spent,
        )  # fmt: skip

    def made_ready(self, state: TrainingState, problem: Prediction) -> PyTree:
        """`Method.ready` of every client, ``[m, ...]``; nothing of a method without."""
        if self.declared().method.ready is None:
            return ()
        inputs = self.inputs(self.tuning_key, state.shared, problem)
        return self.ready_at(lambda node: inputs, state.rows, state.own, problem)

    @property
    def tuning_key(self) -> Array:
        """The key of the draws by which clients are made ready, none of a round's nor of first parameters."""
        return jax.random.fold_in(jax.random.key(jnp.asarray(self.seed, jnp.uint32)), _TUNING)

    def ready_at(
        self, inputs: Callable[[Array], RoundInputs], rows: PyTree, own: PyTree, problem: Prediction
    ) -> PyTree:
        """`Method.ready` of every client, of the inputs of each."""
        declared, data = self.declared(), problem.data
        ready, phases = declared.method.ready, self._as_first(declared.tuning)
        assert ready is not None

        def at(data: TaskData, place: Array, node: Array, budget: Array, own: PyTree, row: PyTree) -> PyTree:
            return ready(self.at_client(inputs(node), row, data, place, node, budget, phases), own)

        def client(
            _: tuple[()], data: TaskData, place: Array, node: Array, budget: Array, held: tuple[PyTree, PyTree, PyTree]
        ) -> tuple[tuple[PyTree, PyTree, PyTree], tuple[()]]:
            return (*held[:2], at(data, place, node, budget, *held[:2])), ()

        zero = jnp.zeros((), jnp.int32)
        like = jax.eval_shape(lambda *first: at(data, zero, zero, zero, *first), *jax.tree.map(first_row, (own, rows)))
        budget = jnp.maximum(self.tuning_steps(data), (data.sizes > 0).astype(jnp.int32))  # it may need no step
        begin = own, rows, zeros_like(like, data.num_nodes)
        return over_clients(data, budget, clients_at_once(self.at_once), client, (), begin, ())[0][2]

    def judge(self, state: TrainingState, problem: Prediction) -> Judge:
        current = state.exchange(ready=self.made_ready(state, problem))
        return self.judge_by(lambda client: self._of_client(current, client), problem)

    def parameters(self, state: TrainingState, problem: Prediction, node: Array | int) -> PyTree:
        return self._of_client(state.exchange(ready=self.made_ready(state, problem)), node)

    def _of_client(self, state: TrainingState, node: Array | int) -> PyTree:
        """The parameters that predict at a client, of a state whose clients are ready."""
        model = self.declared().method.personal_model
        if model is None:
            return self.weights(state)
        return model(state.shared, *jax.tree.map(lambda a: a[node], self._own(state)))

    def weights(self, state: TrainingState) -> Params:
        """The parameters that predict: those for all clients, or ``[m, ...]`` of each.

        Of a method with `Method.ready` they are NaN after a round, with a warning: ``settle`` makes the clients ready,
        and `solve` ends with it.
        """
        method = self.declared().method
        if method.personal_model is not None:
            return mapped(method.personal_model, state.shared, *self._own(state))
        return state.shared if method.global_model is None else method.global_model(state.shared, state.kept)

    def _own(self, state: TrainingState) -> tuple[PyTree, PyTree]:
        """Rows and what stands for the clients' own trees, ``[m, ...]``."""
        return state.rows, state.own if self.declared().method.ready is None else told_if_nan(self.name, state.ready)

    def whose(self, problem: Prediction) -> Array | None:
        if self.declared().method.personal_model is None:
            return jnp.zeros(problem.judged_on.num_nodes, jnp.int32)
        return super().whose(problem)


def _join(key: Array, algorithm: ClientServer, state: TrainingState, problem: Prediction, rounds: int) -> TrainingState:
    return algorithm._join(state, problem, key, rounds)


_joined = jax.jit(_join, static_argnums=4)
