"""The reception of answers at a server: their validation and combination."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from mocha_jax._core.pytree import PyTree, Pytree, Tree, tree
from mocha_jax.compression import Sending
from mocha_jax.federated._coded_answers import Coded, decoded
from mocha_jax.federated._message import Refused, Up, check_arrays, check_header, plain_integer, shown
from mocha_jax.federated._sides import DENIES, ReceivedAnswers, ServerSide


class FederationState(Pytree):
    """The state of a server between rounds."""

    round: Array  # [] int32 rounds done
    incarnation: Array  # [] int32 of this server
    held: Array  # [m] int32 the round of every node's last answer that it holds; 0: none
    counts: Array  # [m] int32 samples of every node, 1 before it has said so; 0: it takes no part
    denied: Array  # [m] bool a later answer, which was refused, does not agree with the one that is held
    inner: PyTree = tree()  # of the algorithm


@dataclasses.dataclass(frozen=True)
class Inbox:
    """Validates the answers that a server receives.

    Args:
      federation: the name that messages must have.
      side: what the server does.
      like: a record of the shapes and dtypes of plain answers.
      accepted: records of the shapes and dtypes of all kinds of answers, by their names.
      receiving: a form in which vectors may come.
      max_staleness: how many rounds late an answer may be.
      max_norm: how large it may be.
    """

    federation: str
    side: ServerSide
    like: Pytree
    accepted: Mapping[str, Tree]
    receiving: Sending | None
    max_staleness: int
    max_norm: float | None

    def task_of(self, state: FederationState, sender: object) -> int:
        """The task of a sender that says which one it is."""
        task = plain_integer(sender)
        if task is None or not 0 <= task < len(state.held):
            raise Refused(
                f"Server: the node of task {shown(sender)} is not in this federation, whose tasks are 0 to "
                f"{len(state.held) - 1}."
            )
        return task

    def record_of(self, state: FederationState, task: int, up: object) -> Pytree:
        """The record of an answer, as far as can be seen one of this node to a message of this server."""
        sender = f"the node of task {task}"
        check_header("Server", sender, up, Up, self.federation)
        assert isinstance(up, Up)
        now, held, incarnation = int(state.round) + 1, int(state.held[task]), int(state.incarnation)
        why = ""
        if up.task != task:
            why = f"says that it is that of task {up.task}"
        elif not int(state.counts[task]):
            why = "takes no part in the federation any more; see Server.join"
        elif up.incarnation != incarnation:
            why = f"answers incarnation {up.incarnation} of the server, and this one is {incarnation}"
        elif not 0 < up.round <= now:
            why = f"answers round {up.round}, where there were rounds 1 to {now}"
        elif up.held >= up.round:
            why = f"answers round {up.round} and says that an answer to round {up.held} had come before"
        elif up.round <= held:
            why = f"answers round {up.round}, and its answer to round {held} is here already"
        elif now - up.round > self.max_staleness:
            why = f"answers round {up.round}, {now - up.round} rounds late, where {self.max_staleness} are waited for"
        elif self.side.from_held and up.held != held:
            why = f"goes on from its answer to round {up.held}, where that to round {held} is here"
        if why:
            raise Refused(f"Server: {sender} {why}.")
        record = check_arrays("Server", sender, up, self.accepted)
        assert isinstance(record, Pytree)
        relative = self.receiving is not None and self.receiving.relative
        if relative and isinstance(record, Coded) and (base := int(record.base[0])) != held:
            raise Refused(
                f"Server: {sender} sent a difference from its answer to round {base}, and the one that is held is "
                f"that to round {held}."
            )
        return record

    def together(
        self, state: FederationState, answers: Mapping[int, tuple[Pytree, Up]], denied: Sequence[int] = ()
    ) -> tuple[Pytree, ReceivedAnswers, np.ndarray]:
        """The records of answers in one, which of them there are, and the rounds that they answer.

        Args:
          state: of the server.
          answers: records and messages by task.
          denied: tasks whose nodes deny what is held of them.
        """
        m, now, held = len(state.held), int(state.round) + 1, np.asarray(state.held)
        all_tasks = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), self.like)
        answered, rounds, went_on_from = np.zeros(m, bool), np.full(m, -1, np.int32), np.full(m, -1, np.int32)
        records = {task: record for task, (record, _) in answers.items()}
        if self.receiving is not None:
            like = self.accepted["Coded"]
            assert isinstance(like, Coded)
            records = decoded(self.receiving, like, records, self.side.held_vectors(state.inner))
        for task, (_, up) in answers.items():
            jax.tree.map(lambda all, one, task=task: all.__setitem__(task, one[0]), all_tasks, records[task])
            answered[task], rounds[task], went_on_from[task] = True, up.round, up.held
        late = np.where(answered, now - rounds, 0).astype(np.int32)
        denying = ~answered & (np.asarray(state.denied) | np.isin(np.arange(m), denied))
        ever = answered | ((held > 0) & ~denying)
        marks: Any = answered, rounds == now, answered & (went_on_from == held), ever, late, denying
        return all_tasks, ReceivedAnswers(*marks), rounds

    def implausible(
        self, state: FederationState, record: Pytree, received: ReceivedAnswers
    ) -> tuple[dict[int, str], list[int]]:
        """Reasons why answers cannot be, by their tasks, and the tasks whose earlier answers may be the false ones."""
        marks, norms = jax.device_get(_implausible(self.side, state.inner, record, received))
        if self.max_norm is not None:
            marks[f"sent an answer whose norm is more than {self.max_norm:g}"] = norms > self.max_norm
        answered = np.flatnonzero(received.any)
        reasons = {int(task): why for why in sorted(marks, reverse=True) for task in answered if marks[why][task]}
        return reasons, [task for task in reasons if DENIES in marks and marks[DENIES][task]]


@jax.jit
def _implausible(side: ServerSide, inner: Tree, up: Tree, received: ReceivedAnswers) -> tuple[dict[str, Array], Array]:
    return dict(side.implausible(inner, up, received)), side.norms(up)
