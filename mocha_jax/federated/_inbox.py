"""The reception of answers at a server: their validation and combination."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from mocha_jax._core.pytree import Pytree, Tree, tree
from mocha_jax.federated._message import Refused, Up, check_arrays, check_header, shown, whole
from mocha_jax.federated._sending import Coded, Sending, decoded
from mocha_jax.federated._sides import DENIES, Heard, ServerSide


class ServerState(Pytree):
    """The state of a server between rounds."""

    round: Array  # [] int32 rounds done
    life: Array  # [] int32 of this server
    held: Array  # [m] int32 the round of every node's last answer that it holds; 0: none
    counts: Array  # [m] int32 samples of every node, 1 before it has said so; 0: it takes no part
    denied: Array  # [m] bool a later answer, which was refused, does not agree with the one that is held
    inner: Any = tree()  # of the algorithm


@dataclasses.dataclass(frozen=True)
class Reception:
    """Validates the answers that a server receives.

    Args:
      federation: the name that messages must have.
      side: what the server does.
      taken: records of the shapes and dtypes of answers, by their names.
      receiving: a form in which vectors may come.
      max_staleness: how many rounds late an answer may be.
      max_norm: how large it may be.
    """

    federation: str
    side: ServerSide
    taken: Mapping[str, Tree]
    receiving: Sending | None
    max_staleness: int
    max_norm: float | None

    @property
    def like(self) -> Any:
        """The record of answers as they are."""
        return next(iter(self.taken.values()))

    def known(self, state: ServerState, sender: object) -> int:
        """The task of a sender that says which one it is."""
        task = whole(sender)
        if task is None or not 0 <= task < len(state.held):
            raise Refused(
                f"Server: the node of task {shown(sender)} is none of this federation, whose tasks are 0 to "
                f"{len(state.held) - 1}."
            )
        return task

    def believed(self, state: ServerState, task: int, up: object) -> Any:
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
        record: Any = check_arrays("Server", sender, up, self.taken)
        relative = self.receiving is not None and self.receiving.relative and isinstance(record, Coded)
        if relative and (base := int(record.base[0])) != held:
            raise Refused(
                f"Server: {sender} sent a difference from its answer to round {base}, and the one that is held is "
                f"that to round {held}."
            )
        return record

    def together(
        self, state: ServerState, taken: Mapping[int, tuple[Any, Up]], denied: Sequence[int] = ()
    ) -> tuple[Any, Heard, np.ndarray]:
        """The records of answers in one, which of them there are, and the rounds that they answer.

        Args:
          state: of the server.
          taken: the answers.
          denied: tasks whose nodes deny what is held of them.
        """
        m, now, held = len(state.held), int(state.round) + 1, np.asarray(state.held)
        record = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), self.like)
        answers = np.full((3, m), -1, np.int32)  # heard, round, held
        records = {task: arrays for task, (arrays, _) in taken.items()}
        if self.receiving is not None:
            like: Any = self.taken["Coded"]
            records = decoded(self.receiving, like, records, self.side.held(state.inner))
        for task, (_, up) in taken.items():
            jax.tree.map(lambda all, one, task=task: all.__setitem__(task, one[0]), record, records[task])
            answers[:, task] = 1, up.round, up.held
        came: Any = answers[0] > 0
        late: Any = np.where(came, now - answers[1], 0).astype(np.int32)
        doubted: Any = ~came & (np.asarray(state.denied) | np.isin(np.arange(m), denied))
        ever = came | ((held > 0) & ~doubted)
        heard = Heard(came, answers[1] == now, came & (answers[2] == held), ever, late, doubted)
        return record, heard, answers[1]

    def doubtful(self, state: ServerState, record: Any, heard: Heard) -> tuple[dict[int, str], list[int]]:
        """Reasons why answers cannot be, by their tasks, and the tasks whose earlier answers may be the false ones."""
        marks, norms = jax.device_get(_doubts(self.side, state.inner, record, heard))
        if self.max_norm is not None:
            marks[f"sent an answer whose norm is more than {self.max_norm:g}"] = norms > self.max_norm
        came = np.flatnonzero(heard.any)
        why = {int(task): why for why in sorted(marks, reverse=True) for task in came if marks[why][task]}
        return why, [task for task in why if DENIES in marks and marks[DENIES][task]]


@jax.jit
def _doubts(side: ServerSide, inner: Any, up: Any, heard: Heard) -> tuple[dict[str, Array], Array]:
    return dict(side.doubts(inner, up, heard)), side.norms(up)
