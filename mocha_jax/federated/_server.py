"""The server of a federation: all that the central node does, without a sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, tree
from mocha_jax._core.transfers import on_purpose
from mocha_jax._data.task_data import SCALINGS
from mocha_jax._problem.quality import Quality
from mocha_jax.federated._message import Down, Refused, Up, arrays_of, check_arrays, check_header
from mocha_jax.federated._sides import Heard, ServerSide, sides_of


class ServerState(Pytree):
    """All that a server carries from round to round."""

    round: Array  # [] int32 rounds done
    life: Array  # [] int32 of this server
    held: Array  # [m] int32 the round of every node's last answer that it holds; 0: none
    counts: Array  # [m] int32 samples of every node, 1 before it has said so; 0: it takes no part
    inner: Any = tree()  # of the algorithm


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a round.

    Args:
      round: its number, from 1.
      heard: tasks whose answers were taken.
      refused: a sentence for every other answer, by task.
      quality: what the answers say of the model that was sent down, a `Certificate` of a convex problem. Its numbers
        are infinite where too few have answered to know them; its lower bound holds in every round. Of networks a
        `Training`.
    """

    round: int
    heard: tuple[int, ...]
    refused: Mapping[int, str]
    quality: Any


class Server:
    """The central node. It knows how many tasks and features there are, and how they are regularised; never a sample.

    Pure: its state is handed in and out; `save` and `load` write it to a file.

    Args:
      algorithm: the same as the nodes'.
      regularizer: from `mocha_jax.regularizers`; None for networks.
      num_tasks: m, a node for each.
      num_features: d, an appended intercept included.
      loss_scaling: as in `pack_tasks`, the same as the nodes'.
      dtype: of the arithmetic and the messages; default JAX's default float.
      federation: its name.
      max_staleness: answers to messages of that many rounds before the current one are taken; default all are.
    """

    def __init__(
        self, algorithm: Algorithm[Any], regularizer: Any, num_tasks: int, num_features: int, *,
        loss_scaling: str = "sum", dtype: DTypeLike | None = None, federation: str = "mocha",
        max_staleness: int | None = None,
    ) -> None:  # fmt: skip
        check.instance("Server", "algorithm", algorithm, Algorithm, "Mocha()")
        check.integer("Server", 1, num_tasks=num_tasks, num_features=num_features)
        check.one_of("Server", "loss_scaling", loss_scaling, SCALINGS)
        if not isinstance(federation, str):
            raise ValueError(f"Server: federation must be a text, got {check.shown(federation)}.")
        if max_staleness is not None:
            check.integer("Server", 0, max_staleness=max_staleness)
        self.federation, self.num_tasks, self.max_staleness = federation, num_tasks, max_staleness
        dtype = np.dtype(jnp.zeros((), dtype).dtype)
        sides = sides_of("Server", algorithm)
        self._side: ServerSide = sides.server(algorithm, regularizer, num_tasks, num_features, dtype, loss_scaling)
        self._like = self._side.like_up()
        self._sent: tuple[Any, Any] | None = None  # the last state of which messages were made, and what they hold

    @on_purpose
    def init(self, life: int = 0) -> ServerState:
        """Return the state before the first round.

        Args:
          life: any number >= 0; take another one, e.g. the time, wherever a server begins anew that nodes may have
            known before.
        """
        check.integer("Server", 0, life=life)
        nobody, each = jnp.zeros((self.num_tasks,), jnp.int32), jnp.ones((self.num_tasks,), jnp.int32)
        return ServerState(
            jnp.zeros((), jnp.int32), jnp.asarray(life, jnp.int32), nobody, each, _init(self._side, each)
        )

    @on_purpose
    def down(self, state: ServerState, task: int, *, steps: int | None = None) -> Down:
        """Make the message to a node that begins its next round.

        Args:
          state: of the server.
          task: of the node.
          steps: local steps that it is asked for; default those of a full round.
        """
        task = self._task("down", task)
        if self._sent is None or self._sent[0] is not state:
            self._sent = state, jax.device_get(_down(self._side, state.inner))
        record = self._sent[1]
        if steps is not None:
            check.integer("Server.down", 0, steps=steps)
            record = record.exchange(steps=np.full_like(record.steps, steps))
        arrays = arrays_of(jax.tree.map(lambda a: a[task : task + 1] if len(a) > 1 else a, record))
        round, life, held = int(state.round) + 1, int(state.life), int(state.held[task])
        return Down(self.federation, task, round, life, held, type(record).__name__, arrays)

    @on_purpose
    def step(self, state: ServerState, ups: Mapping[int, Up]) -> tuple[ServerState, Report]:
        """Take the answers that there are, of any nodes, and do a round of the central node.

        Args:
          state: the state before.
          ups: answers by task. Those that cannot be believed are left out, and `Report.refused` says why.

        Returns:
          The state after, and what happened.
        """
        if not isinstance(ups, Mapping):
            raise ValueError(f"Server.step: ups must be a mapping of tasks to answers, got {check.shown(ups)}.")
        taken, refused = {}, {}
        for task, up in ups.items():
            try:
                taken[self._task("step", task)] = self._believed(state, task, up), up
            except Refused as why:
                refused[task] = str(why)
        m, now = self.num_tasks, int(state.round) + 1
        record = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), self._like)
        answers = np.full((3, m), -1, np.int32)  # heard, round, held
        for task, (arrays, up) in taken.items():
            jax.tree.map(lambda all, one, task=task: all.__setitem__(task, one[0]), record, arrays)
            answers[:, task] = 1, up.round, up.held
        held = np.asarray(state.held)
        heard = Heard(
            any=answers[0] > 0, now=answers[1] == now, exact=(answers[0] > 0) & (answers[2] == held),
            ever=(answers[0] > 0) | (held > 0),
        )  # fmt: skip
        state, quality = _combine(self._side, state, record, heard, answers[1])
        return state, Report(now, tuple(sorted(taken)), refused, quality)

    @on_purpose
    def leave(self, state: ServerState, task: int) -> ServerState:
        """Go on without a node that has left for good: its samples are no part of the problem any more."""
        return self._with_count(state, self._task("leave", task), 0)

    @on_purpose
    def join(self, state: ServerState, task: int) -> ServerState:
        """Count on a node again, or for the first time, that had left."""
        return self._with_count(state, self._task("join", task), 1)

    def weights(self, state: ServerState) -> Any:
        """Return the model, ``[num_tasks, d]``; a network's parameters."""
        return self._side.weights(state.inner)

    def relation(self, state: ServerState) -> Any:
        """Return Omega as the regularizer keeps it; None where it is given."""
        return self._side.relation(state.inner)

    @on_purpose
    def omega(self, state: ServerState) -> Array:
        """Return Omega ``[num_tasks, num_tasks]``."""
        return self._side.omega(state.inner)

    def _with_count(self, state: ServerState, task: int, count: int) -> ServerState:
        counts = state.counts.at[task].set(count)
        held = state.held if count else state.held.at[task].set(0)
        return state.replace(counts=counts, held=held, inner=_resume(self._side, state.inner, counts))

    def _task(self, what: str, task: object) -> int:
        if (
            isinstance(task, bool | np.bool_)
            or not isinstance(task, int | np.integer)
            or not 0 <= task < self.num_tasks
        ):
            raise Refused(
                f"Server.{what}: there is no task {check.shown(task)}; tasks are 0 to {self.num_tasks - 1}."
            )  # fmt: skip
        return int(cast(int, task))

    def _believed(self, state: ServerState, task: int, up: object) -> Any:
        """The record of an answer, as far as can be seen one of this node to a message of this server."""
        sender = f"the node of task {task}"
        check_header("Server", sender, up, Up, self.federation)
        assert isinstance(up, Up)
        now, held, life = int(state.round) + 1, int(state.held[task]), int(state.life)
        why = ""
        if up.task != task:
            why = f"says that it is that of task {up.task}"
        elif not int(state.counts[task]):
            why = "takes no part in the federation any more; see Server.join"
        elif up.life != life:
            why = f"answers another life of the server, {up.life}, where this one is {life}"
        elif not 0 < up.round <= now:
            why = f"answers round {up.round}, where there were rounds 1 to {now}"
        elif up.round <= held:
            why = f"answers round {up.round}, and its answer to round {held} is here already"
        elif self.max_staleness is not None and now - up.round > self.max_staleness:
            why = f"answers round {up.round}, {now - up.round} rounds late, where {self.max_staleness} are waited for"
        if why:
            raise Refused(f"Server: {sender} {why}.")
        record = check_arrays("Server", sender, up, {type(self._like).__name__: self._like})
        if why := self._side.doubts(state.inner, task, up.round == now, record):
            raise Refused(f"Server: {sender} {why}.")
        return record


_init = jax.jit(lambda side, counts: side.init(counts))
_resume = jax.jit(lambda side, inner, counts: side.resume(inner, counts))


@jax.jit
def _down(side: ServerSide, inner: Any) -> Any:
    return side.down(inner)


@jax.jit
def _combine(side: ServerSide, state: ServerState, up: Any, heard: Heard, rounds: Array) -> tuple[ServerState, Quality]:
    round = state.round + 1
    inner, quality = side.combine(state.inner, round, up, heard)
    held = jnp.where(heard.any, rounds, state.held)
    counts = jnp.where(heard.any, up.samples, state.counts)
    return ServerState(round, state.life, held, counts, inner), quality
