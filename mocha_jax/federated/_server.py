"""The server of a federation: the work of the central node, without samples."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import PyTree, Pytree, Relation, Tree
from mocha_jax._data.task_data import SCALINGS
from mocha_jax._problem.problem import Quality
from mocha_jax.compression import Sending
from mocha_jax.federated._coded_answers import like_coded
from mocha_jax.federated._inbox import FederationState, Inbox
from mocha_jax.federated._message import Down, Refused, Up, arrays_of, plain_integer, shown
from mocha_jax.federated._sides import ReceivedAnswers, ServerSide, sides_of
from mocha_jax.regularizers import Regularizer


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The outcome of a round.

    Args:
      round: its number, from 1.
      accepted: tasks whose answers were accepted.
      refused: a sentence for every other answer, by task.
      quality: of the model that was sent down: for a convex problem a `Certificate`, whose numbers are infinite if
        too few nodes have answered, and whose lower bound holds in every round; for networks a
        `Training`.
    """

    round: int
    accepted: tuple[int, ...]
    refused: Mapping[int, str]
    quality: Any

    def __repr__(self) -> str:
        first = next(iter(self.refused.values()), "").rstrip(".")
        refused = f", refused {len(self.refused)}: {first}" if self.refused else ""
        return f"Report(round {self.round}, accepted {len(self.accepted)} answers{refused}, {self.quality})"


class Server:
    r"""The central node. It knows the numbers of tasks and features and the regularizer, never a sample.

    Pure: its state is handed in and out; `save` and `load` write it to a file.

    Args:
      algorithm: the same as the nodes'.
      regularizer: from `mocha_jax.regularizers`; None for networks.
      num_tasks: m, a node for each.
      num_features: d, an appended intercept included.
      loss_scaling: as in `pack_tasks`, the same as the nodes'.
      dtype: of the arithmetic and the messages; default JAX's default float.
      federation: its name.
      max_staleness: answers to messages up to that many rounds old are accepted; default all are.
      max_norm: answers with a longer vector are refused; default none are. For a dual method $\|v_t\| \le
        \sum_i c_i\,|\beta_i|\,\|x_i\|$, so with a loss of Lipschitz constant L, samples no longer than B and
        ``loss_scaling="task_mean"`` at most LB.
      receiving: a form in which vectors may arrive besides the plain one, the `sending` of nodes.
    """

    def __init__(
        self, algorithm: Algorithm, regularizer: Regularizer | None, num_tasks: int, num_features: int, *,
        loss_scaling: str = "sum", dtype: DTypeLike | None = None, federation: str = "mocha",
        max_staleness: int | None = None, max_norm: float | None = None, receiving: Sending | None = None,
    ) -> None:  # fmt: skip
        check.instance("Server", "algorithm", algorithm, Algorithm, "Mocha()")
        check.integer("Server", 1, num_tasks=num_tasks, num_features=num_features)
        check.one_of("Server", "loss_scaling", loss_scaling, SCALINGS)
        if not isinstance(federation, str):
            raise ValueError(f"Server: federation must be a text, got {check.shown(federation)}.")
        if max_staleness is not None:
            check.integer("Server", 0, max_staleness=max_staleness)
        if max_norm is not None:
            check.scalar("Server", max_norm=max_norm)
            check.positive("Server", max_norm=max_norm)
            max_norm = float(max_norm)
        self.federation, self.num_tasks = federation, num_tasks
        dtype = np.dtype(jnp.zeros((), dtype).dtype)
        sides = sides_of("Server", algorithm)
        self._side: ServerSide = sides.server(algorithm, regularizer, num_tasks, num_features, dtype, loss_scaling)
        like = self._side.like_up()
        self._accepted: dict[str, Tree] = {type(like).__name__: like}
        if receiving is not None:
            check.instance("Server", "receiving", receiving, Sending, "compression.Quantized()")
            self._accepted["Coded"] = like_coded(receiving, like)
        late = self._side.patience if max_staleness is None else min(self._side.patience, max_staleness)
        self._inbox = Inbox(federation, self._side, like, self._accepted, receiving, late, max_norm)
        # The last state of which messages were made, and their record.
        self._sent: tuple[FederationState, Pytree] | None = None

    @property
    def judged(self) -> bool:
        """Tell whether reports judge the model that was sent down, the one before their round, as certificates do."""
        return self._side.judges

    @property
    def only_asked(self) -> bool:
        """Tell whether a round is of the nodes asked alone, with no other one in place of a silent one."""
        return self._side.only_asked

    @on_purpose
    def init(self, incarnation: int = 0) -> FederationState:
        """Return the state before the first round.

        Args:
          incarnation: any number >= 0; take another one, e.g. the time, wherever a server begins anew that nodes may
            have known before.
        """
        check.integer("Server", 0, incarnation=incarnation)
        none, each = jnp.zeros((self.num_tasks,), jnp.int32), jnp.ones((self.num_tasks,), jnp.int32)
        return FederationState(
            jnp.zeros((), jnp.int32), jnp.asarray(incarnation, jnp.int32), none, each, none > 0,
            self._side.renewed(_init(self._side, each)),
        )  # fmt: skip

    @on_purpose
    def asked(self, key: Array, state: FederationState) -> tuple[int, ...]:
        """Return the tasks whose nodes are asked in the next round: all present ones, or the algorithm's selection.

        Args:
          key: a JAX random key, the same in every round; with the one of a simulation the same nodes are selected.
          state: of the server.
        """
        check.key("Server", key)
        present = np.asarray(state.counts) > 0
        selected = _asked(key, self._side, state.inner)
        return tuple(np.flatnonzero(present if selected is None else present & np.asarray(selected)).tolist())

    @on_purpose
    def down(self, state: FederationState, task: int, *, steps: int | None = None) -> Down:
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
            record = record.exchange(steps=np.full((self.num_tasks,), steps, np.int32))
        arrays = arrays_of(jax.tree.map(lambda a: a[task : task + 1] if len(a) > 1 else a, record))
        round, incarnation, held = int(state.round) + 1, int(state.incarnation), int(state.held[task])
        return Down(self.federation, task, round, incarnation, held, type(record).__name__, arrays)

    @on_purpose
    def step(self, state: FederationState, ups: Mapping[int, Up]) -> tuple[FederationState, Report]:
        """Do a round of the central node with the answers of any nodes.

        Args:
          state: the state before.
          ups: answers by task. Implausible ones are left out, and `Report.refused` gives the reasons. If an answer
            contradicts the one that the server holds of its node, either may be false: the
            lower bound is discarded, and unknown until the server accepts the node again.

        Returns:
          The state after, and what happened.
        """
        if not isinstance(ups, Mapping):
            raise ValueError(f"Server.step: ups must be a mapping of tasks to answers, got {check.shown(ups)}.")
        inbox, accepted, refused = self._inbox, dict[int, tuple[Pytree, Up]](), dict[int, str]()
        for sender, up in ups.items():
            try:
                task = inbox.task_of(state, sender)
                accepted[task] = inbox.record_of(state, task, up), up
            except Refused as why:
                refused[sender] = str(why)
        record, received, rounds = inbox.together(state, accepted)
        implausible, denied = inbox.implausible(state, record, received)
        if implausible:
            refused |= {task: f"Server: the node of task {task} {why}." for task, why in implausible.items()}
            accepted = {task: answer for task, answer in accepted.items() if task not in implausible}
            record, received, rounds = inbox.together(state, accepted, denied)
        now = int(state.round) + 1
        state = state.replace(inner=self._side.renewed(state.inner))
        state, quality = _combine(self._side, state, record, received, rounds)
        return state, Report(now, tuple(sorted(accepted)), refused, quality)

    @on_purpose
    def restarted(self, state: FederationState, incarnation: int) -> FederationState:
        """Resume from a saved state, perhaps of some rounds ago.

        Nodes may have answered messages since then that the state does not record. A new incarnation tells them that
        these no longer count; each sends its vector once without further work.

        Args:
          state: from a file.
          incarnation: a number >= 0 that the server has not had before, e.g. the time in seconds or a random one.
        """
        check.integer("Server", 0, incarnation=incarnation)
        if int(incarnation) == int(state.incarnation):
            raise ValueError(
                f"Server.restarted: incarnation must be another one than that of the state, {int(incarnation)}."
            )
        return state.replace(incarnation=jnp.asarray(incarnation, jnp.int32))

    @on_purpose
    def leave(self, state: FederationState, task: int) -> FederationState:
        """Go on without a node that has left for good: its samples are no part of the problem any more."""
        return self._with_count(state, self._task("leave", task), 0)

    @on_purpose
    def join(self, state: FederationState, task: int) -> FederationState:
        """Count on a node again, or for the first time, that had left."""
        return self._with_count(state, self._task("join", task), 1)

    def weights(self, state: FederationState) -> PyTree:
        """Return the model, ``[num_tasks, d]``; a network's parameters."""
        return self._side.weights(state.inner)

    def relation(self, state: FederationState) -> Relation:
        """Return Omega as the regularizer keeps it; None where it is given."""
        return self._side.relation(state.inner)

    @on_purpose
    def omega(self, state: FederationState) -> Array:
        """Return Omega ``[num_tasks, num_tasks]``."""
        return self._side.omega(state.inner)

    def like_up(self) -> Mapping[str, Tree]:
        """Return records of the shapes and dtypes of what may come up, with an axis of tasks, by their names."""
        return self._accepted

    def like_down(self) -> Mapping[str, Tree]:
        """Return those of what goes down."""
        record = jax.eval_shape(lambda: self._side.down(self._side.init(jnp.ones((self.num_tasks,), jnp.int32))))
        return {type(record).__name__: record}

    def _with_count(self, state: FederationState, task: int, count: int) -> FederationState:
        counts = state.counts.at[task].set(count)
        held = state.held if count else state.held.at[task].set(0)
        denied = state.denied.at[task].set(False)
        # The model changes: answers to messages in transit do not answer the next ones.
        round = state.round + jnp.ones_like(state.round)
        inner = _resume(self._side, state.inner, counts)
        return state.replace(round=round, counts=counts, held=held, denied=denied, inner=inner)

    def _task(self, what: str, task: object) -> int:
        number = plain_integer(task)
        if number is None or not 0 <= number < self.num_tasks:
            raise ValueError(f"Server.{what}: there is no task {shown(task)}; tasks are 0 to {self.num_tasks - 1}.")
        return number


_init = jax.jit(lambda side, counts: side.init(counts))
_resume = jax.jit(lambda side, inner, counts: side.resume(inner, counts))


@jax.jit
def _asked(key: Array, side: ServerSide, inner: Tree) -> Array | None:
    return side.asked(key, inner)


@jax.jit
def _down(side: ServerSide, inner: Tree) -> Pytree:
    return side.down(inner)


@jax.jit
def _combine(
    side: ServerSide, state: FederationState, up: PyTree, received: ReceivedAnswers, rounds: Array
) -> tuple[FederationState, Quality]:
    round = state.round + 1
    inner, quality = side.combine(state.inner, round, up, received)
    held = jnp.where(received.any, rounds, state.held)
    counts = jnp.where(received.any, up.samples, state.counts)
    return FederationState(round, state.incarnation, held, counts, received.denied, inner), quality


def message_numbers(server: Server) -> dict[str, dict[str, int]]:
    """Count the numbers of one message of every kind, by their dtype; its header comes on top.

    Of dual methods with d features, against d numbers each way that `mocha_jax.costs` counts:

    | | floats | 32-bit integers | 8-bit integers | more than counted |
    |---|---|---|---|---|
    | `DualDown` | 2 d + 1 | 1 | | the model, a curvature, how many steps |
    | `DualUp` | d + 6 | 1 | | a share of a round's work, five terms of certificates, how many samples |
    | `Coded`, `Quantized` | 6, and 1 of float32 | 2 | d | those, a scale, to which answer it refers |

    Args:
      server: of the federation; what it sends and takes is in its dtype.

    Examples:
      >>> import mocha_jax as mj
      >>> server = mj.federated.Server(mj.Mocha(), mj.regularizers.Probabilistic(0.1), 20, 100, dtype="float32")
      >>> message_numbers(server)
      {'DualDown': {'float32': 201, 'int32': 1}, 'DualUp': {'float32': 106, 'int32': 1}}
    """
    check.instance("message_numbers", "server", server, Server, "federated.Server(...)")
    numbers = {}
    for name, record in {**server.like_down(), **server.like_up()}.items():
        counts: Counter[str] = Counter()
        for leaf in jax.tree.leaves(record):  # of one node
            counts[np.dtype(leaf.dtype).name] += math.prod(leaf.shape[1:])
        numbers[name] = dict(sorted(counts.items()))
    return numbers


def as_table(numbers: Mapping[str, Mapping[str, int]]) -> str:
    """Write `message_numbers` as a table in Markdown, with the bytes of each message.

    Examples:
      >>> print(as_table({"DualUp": {"float32": 106, "int32": 1}}))
      | message | float32 | int32 | bytes |
      |---|---|---|---|
      | `DualUp` | 106 | 1 | 428 |
    """
    if not isinstance(numbers, Mapping) or not all(isinstance(counts, Mapping) for counts in numbers.values()):
        raise ValueError(f"as_table: numbers must be those of message_numbers(server), got {check.shown(numbers)}.")
    dtypes = sorted({dtype for counts in numbers.values() for dtype in counts})
    rows = [["message", *dtypes, "bytes"], ["---"] * (len(dtypes) + 2)]
    for name, counts in numbers.items():
        size = sum(np.dtype(dtype).itemsize * count for dtype, count in counts.items())
        rows.append([f"`{name}`", *(str(counts.get(dtype, 0)) for dtype in dtypes), str(size)])
    lines = ["|".join(row) if row[0] == "---" else " | ".join(row) for row in rows]
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)
