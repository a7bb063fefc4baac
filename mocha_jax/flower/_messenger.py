"""The messages between a server and its nodes over Flower's Grid."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from mocha_jax.federated import Down, Up
from mocha_jax.flower._records import Arrays, Header, from_record, to_record

_log = logging.getLogger("flwr")

# Seconds between two queries to the SuperLink for its nodes, and to a node without a task for its task.
_LOOK, _AGAIN = 1.0, 60.0

_FIELDS = (*Up.integers, *Up.texts)


@dataclasses.dataclass(frozen=True)
class _Sent:
    """A message that is not answered."""

    node: int
    round: int  # 0: it asks for the task


class Messenger:
    """Knows which of Flower's nodes has which task, and which messages are under way.

    Args:
      grid: of Flower.
      num_tasks: m.
      seconds: a message and its answer are waited for so long.
      seed: of the nodes' draws.
      look: seconds between two queries for the nodes.
      clock: of seconds.
    """

    def __init__(
        self, grid: Grid, num_tasks: int, seconds: float, seed: int, *, look: float = _LOOK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.grid, self.num_tasks, self.seconds, self.seed = grid, num_tasks, seconds, seed
        self.bytes_down = self.bytes_up = 0
        self._look, self._clock, self._looked = look, clock, -float("inf")
        self._online: set[int] = set()
        self._task: dict[int, int] = {}  # of Flower's nodes
        self._node: dict[int, int] = {}  # the last one that said that it has a task
        self._later: dict[int, float] = {}  # when nodes that have no task here are asked again
        self._open: dict[str, _Sent] = {}

    @property
    def tasks(self) -> set[int]:
        """Return the tasks whose nodes are there."""
        return {task for task, node in self._node.items() if node in self._online}

    def idle(self) -> dict[int, int]:
        """Return the nodes that are there and have nothing to do, by their tasks."""
        busy = {sent.node for sent in self._open.values() if sent.round}
        return {
            task: node for task, node in self._node.items() if node in self._online and node not in busy
        }  # fmt: skip

    def waiting(self, round: int) -> bool:
        """Return whether some of the nodes that are there have not answered this round's message."""
        return any(
            sent.round == round and sent.node in self._online and self._node.get(self._task[sent.node]) == sent.node
            for sent in self._open.values()
        )

    def look(self) -> None:
        """Find the online nodes, and ask new ones for their task."""
        if self._clock() - self._looked < self._look:
            return
        self._looked = self._clock()
        self._online = set(self.grid.get_node_ids())
        asked = {sent.node for sent in self._open.values()}
        asked |= {node for node, when in self._later.items() if self._clock() < when}
        new = self._online - set(self._task) - asked
        self._push([(node, 0, to_record({"what": "task?"}), MessageType.QUERY) for node in sorted(new)])

    def send(self, downs: Mapping[int, Down]) -> None:
        """Send messages of a round, by task."""
        messages = []
        for task, down in downs.items():
            self.bytes_down += down.nbytes
            record = to_record({"what": "down", **down.header, "seed": self.seed}, down.arrays)
            messages.append((self._node[task], down.round, record, MessageType.TRAIN))
        self._push(messages)

    def pull(self) -> tuple[list[tuple[int, Up]], list[str]]:
        """Return the answers that have come since the last time, by task, and warnings about other replies."""
        ups: list[tuple[int, Up]] = []
        warnings: list[str] = []
        for reply in self.grid.pull_messages(list(self._open)) if self._open else ():
            sent = self._open.pop(reply.metadata.reply_to_message_id, None)
            if sent is None:
                continue
            sender = f"the node of task {self._task[sent.node]}" if sent.round else f"node {sent.node}"
            try:
                header, arrays = self._content(reply)
            except ValueError as why:
                warnings.append(f"{sender}: {why}")
                continue
            if header.get("what") == "failed":
                kind = str(header.get("kind", ""))
                kind = kind if kind.isidentifier() else "nameless exception"
                warnings.append(f"{sender}: it failed with a {kind}; its own log says more.")
                self._later[sent.node] = self._clock() + _AGAIN
            elif not sent.round:
                warnings += self._learn(sent.node, header.get("task"))
            else:
                fields: Header = {name: header.get(name) for name in _FIELDS}
                up = Up(**fields, arrays=arrays)
                self.bytes_up += up.nbytes
                ups.append((self._task[sent.node], up))
        return ups, warnings

    def _content(self, reply: Message) -> tuple[Header, Arrays]:
        if reply.has_error():
            raise ValueError(f"no answer, says Flower (error {reply.error.code}: {reply.error.reason}).")
        return from_record(reply.content)

    def _learn(self, node: int, task: object) -> Iterable[str]:
        if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < self.num_tasks:
            self._later[node] = self._clock() + _AGAIN
            yield f"node {node}: it has task {task!r:.20}, and tasks are 0 to {self.num_tasks - 1}; it is left out."
            return
        before = self._node.get(task)
        if before is not None and before in self._online:
            yield f"node {node}: it has task {task}, as node {before} had, which is not asked any more."
        self._task[node], self._node[task] = task, node

    def _push(self, messages: list[tuple[int, int, RecordDict, str]]) -> None:
        if not messages:
            return
        names = self.grid.push_messages([
            Message(record, node, kind, ttl=self.seconds, group_id=str(round))
            for node, round, record, kind in messages
        ])  # fmt: skip
        for (node, round, *_), name in zip(messages, names, strict=False):
            if name:  # none where the node is gone
                self._open[name] = _Sent(node, round)
