"""The rounds of a server over Flower's Grid."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import time

import jax
import numpy as np
from flwr.serverapp import Grid
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import PyTree
from mocha_jax._problem.problem import Quality
from mocha_jax.federated import FederationState, Report, Server, Training, Up, load, save
from mocha_jax.flower._messenger import Messenger

_log = logging.getLogger("flwr")


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The arguments of `serve`, checked."""

    max_rounds: int = 1000
    tol: float = 1e-3
    round_seconds: float = 60.0
    message_seconds: float = 0.0
    min_answers: int = 1
    asynchronous: bool = False
    start_seconds: float = 600.0
    leave_after: int = 0
    seed: int = 0
    poll_seconds: float = 0.1
    checkpoint: str = ""

    def __post_init__(self) -> None:
        check.integer("serve", 1, max_rounds=self.max_rounds, min_answers=self.min_answers)
        check.integer("serve", 0, leave_after=self.leave_after, seed=self.seed)
        for name in ("round_seconds", "tol", "message_seconds", "start_seconds", "poll_seconds"):
            value = getattr(self, name)
            check.scalar("serve", **{name: value})
            (check.positive if name == "round_seconds" else check.nonnegative)("serve", **{name: value})
            object.__setattr__(self, name, float(value))
        for name in ("max_rounds", "min_answers", "leave_after", "seed"):
            object.__setattr__(self, name, int(getattr(self, name)))
        check.flag("serve", asynchronous=self.asynchronous)
        if not isinstance(self.checkpoint, str | os.PathLike):
            raise ValueError(f"serve: checkpoint must be the path of a file, got {check.shown(self.checkpoint)}.")


@dataclasses.dataclass(frozen=True, repr=False)
class Served:
    """The outcome of the rounds of a server.

    Args:
      weights: the model of the last report; for networks the parameters after the last round.
      rounds: the number of the last round whose answers are in the weights, as of ``mj.run(num_rounds=rounds)``.
      state: of the server, after the last round.
      report: of the last round.
      converged: whether the tolerance was reached.
    """

    weights: PyTree
    rounds: int
    state: FederationState
    report: Report
    converged: bool

    def __repr__(self) -> str:
        return f"Served({'' if self.converged else 'not '}converged after {self.rounds} rounds: {self.report})"


def serve(
    grid: Grid, server: Server, *, max_rounds: int = 1000, tol: float = 1e-3, round_seconds: float = 60.0,
    message_seconds: float = 0.0, min_answers: int = 1, asynchronous: bool = False, start_seconds: float = 600.0,
    leave_after: int = 0, seed: int = 0, poll_seconds: float = 0.1, checkpoint: str = "",
) -> Served:  # fmt: skip
    """Do the rounds of a server with nodes that Flower reaches.

    A round sends a message to every selected node, see `Server.asked`, without a pending one. It ends when all of them
    have answered or its time is over. Later answers count in later rounds; meanwhile their nodes get no message. If an
    algorithm selects nodes and too few of them are online, other free nodes replace them, but for an algorithm that is
    private at the level of clients. Nodes that are new, or come back with another node id, are asked for their task and
    take part from then on.

    Args:
      grid: of a ServerApp.
      server: of the federation.
      max_rounds: rounds whose answers may be in the weights, those before a restart included. Except with networks one
        more round judges the model of these.
      tol: the rounds end when the residual of the certificate, the relative gap (of a model whose relation is learned
        too, the joint one), is at most this.
      round_seconds: a round ends after this time, if `min_answers` have arrived.
      message_seconds: a message without an answer for this time is lost, and its node is asked again; default 3 times
        `round_seconds`.
      min_answers: no round ends with fewer, but for rounds in which fewer nodes are asked.
      asynchronous: end a round as soon as `min_answers` have arrived, and begin the next one at once.
      start_seconds: the first round begins when all nodes are online, or with `min_answers` of them after this time.
      leave_after: a node that did not answer in this many rounds is excluded, see `Server.leave`, until it answers
        again; 0: it stays.
      seed: of the nodes' random numbers, as ``jax.random.key(seed)`` of a simulation.
      poll_seconds: between two polls for answers.
      checkpoint: path of a file for the server's state after every round; if it exists, the rounds resume
        from it.
    """
    check.instance("serve", "server", server, Server, "federated.Server(...)")
    options = ServeOptions(
        max_rounds, tol, round_seconds, message_seconds, min_answers, asynchronous, start_seconds, leave_after, seed,
        poll_seconds, checkpoint,
    )  # fmt: skip
    return Rounds(grid, server, options).run()


class Rounds:
    """The loop of `serve`."""

    def __init__(self, grid: Grid, server: Server, options: ServeOptions) -> None:
        if options.min_answers > server.num_tasks:
            raise ValueError(
                f"serve: min_answers={options.min_answers} answers cannot come from {server.num_tasks} tasks; lower it."
            )
        if options.asynchronous and server.only_asked:
            raise ValueError(
                "serve: asynchronous is not for privacy of clients, whose answers count in their own round."
            )
        self.server, self.options = server, options
        seconds = options.message_seconds or 3.0 * options.round_seconds
        self.messenger = Messenger(
            grid, server.num_tasks, seconds, options.seed, look=min(1.0, 10.0 * options.poll_seconds)
        )
        self.last = options.max_rounds + 1 if server.judged else options.max_rounds
        self.resumed = bool(options.checkpoint) and os.path.exists(options.checkpoint)
        self.state = self._first()
        self.silent = dict.fromkeys(range(server.num_tasks), 0)  # rounds since a node answered
        self.asked: set[int] = set()  # in this round
        self.left: set[int] = set(np.flatnonzero(np.asarray(self.state.counts) == 0).tolist())
        self.back: set[int] = set()

    def run(self) -> Served:
        """Do all rounds."""
        options, server = self.options, self.server
        self._gather()
        while True:
            begin, down, up = time.monotonic(), self.messenger.bytes_down, self.messenger.bytes_up
            self._join()
            ups = self._round()
            before = self.state
            self.state, report = server.step(before, ups)
            self._leave(report)
            self._save()
            converged = float(report.quality.residual) <= options.tol
            sizes = self.messenger.bytes_down - down, self.messenger.bytes_up - up
            self._report(report, time.monotonic() - begin, *sizes)
            if converged or report.round >= self.last:
                # A model is returned with the report on it.
                judged = before if server.judged else self.state
                return Served(jax.device_get(server.weights(judged)), int(judged.round), self.state, report, converged)

    def _first(self) -> FederationState:
        path = self.options.checkpoint
        fresh = self.server.init(_incarnation())
        if not path or not os.path.exists(path):
            return fresh
        try:
            state = load(path, fresh)
        except Exception as error:
            raise ValueError(
                f"serve: {path} is no checkpoint of this server; take the file away or name another one."
            ) from error
        if int(state.round) >= self.last:
            raise ValueError(
                f"serve: the run of {path} has ended, after {int(state.round)} rounds; raise max_rounds, now "
                f"{self.options.max_rounds}, to go on, or take the file away to begin anew."
            )
        _log.info("The rounds go on after round %d, from %s.", int(state.round), path)
        return state

    def _gather(self) -> None:
        """Wait for the nodes."""
        end = time.monotonic() + self.options.start_seconds
        wanted = set(range(self.server.num_tasks)) - self.left
        while True:
            self._look()
            late = time.monotonic() > end and len(self.messenger.tasks) >= self.options.min_answers
            if late or wanted <= self.messenger.tasks:
                break
            time.sleep(self.options.poll_seconds)
        missing = sorted(wanted - self.messenger.tasks)
        _log.info("%d of %d nodes are there%s.", len(self.messenger.tasks), len(wanted), _but(missing))

    def _round(self) -> dict[int, Up]:
        """Send what is to be sent, and wait for answers."""
        options, messenger, server, now = self.options, self.messenger, self.server, int(self.state.round) + 1
        begin, sent = time.monotonic(), set[tuple[int, int]]()
        self.asked = set(server.asked(jax.random.key(options.seed), self.state)) - self.left
        enough = 0 if server.only_asked else max(min(options.min_answers, len(self.asked)), 1)
        ups: dict[int, Up] = {}
        while True:
            idle = {
                task: node
                for task, node in messenger.idle().items()
                if task in self.asked and task not in ups and (task, node) not in sent
            }
            sent |= set(idle.items())
            messenger.send({task: server.down(self.state, task) for task in idle})
            for task, up in self._look():
                if task in self.left:  # it was left out; it may come back in the next round
                    self.back.add(task)
                elif task not in ups or _number(up) > _number(ups[task]):
                    ups[task] = up
            late = time.monotonic() - begin > options.round_seconds
            if len(ups) >= enough and (options.asynchronous or late or not messenger.waiting(now)):
                self.resumed = False
                return ups
            if (late or not messenger.waiting(now)) and (others := self._others(enough - len(ups))):
                self.asked |= others  # in place of those that were selected
                begin = time.monotonic()
            elif late:
                if self.resumed and not ups:
                    # Presumably an older checkpoint was restored, and nodes do not answer a round twice.
                    self.state = server.restarted(self.state, _incarnation())
                    _log.warning("No node answers; the rounds go on as another incarnation of the server.")
                self.resumed = False
                sent = set()  # too few answers: ask all free nodes again
                begin = time.monotonic()
            time.sleep(options.poll_seconds)

    def _others(self, count: int) -> set[int]:
        """Choose so many tasks whose nodes are free and were not selected, the next ones in turn."""
        free = [task for task in self.messenger.idle() if task not in self.asked and task not in self.left]
        turn, m = int(self.state.round), self.server.num_tasks
        return set(sorted(free, key=lambda task: (task - turn) % m)[:count])

    def _look(self) -> list[tuple[int, Up]]:
        self.messenger.look()
        before = self.messenger.tasks
        ups, warnings = self.messenger.pull()
        for warning in warnings:
            _log.warning("%s", warning)
        self.back |= (self.messenger.tasks - before) & self.left
        return ups

    def _join(self) -> None:
        for task in sorted(self.back):
            self.state = self.server.join(self.state, task)
            self.silent[task] = 0
            _log.warning("the node of task %d answers again, and takes part.", task)
        if self.back:
            self._save()  # before a message of the round that it begins goes down
        self.left -= self.back
        self.back = set()

    def _save(self) -> None:
        if self.options.checkpoint:
            save(self.options.checkpoint, self.state)

    def _leave(self, report: Report) -> None:
        for task in self.silent:
            if task in report.accepted or task in report.refused:
                self.silent[task] = 0
            elif task in self.asked:
                self.silent[task] += 1
            if self.options.leave_after and task not in self.left and self.silent[task] >= self.options.leave_after:
                self.state = self.server.leave(self.state, task)
                self.left.add(task)
                _log.warning(
                    "the node of task %d was asked in %d rounds and did not answer; it is left out.",
                    task,
                    self.silent[task],
                )

    def _report(self, report: Report, seconds: float, down: int, up: int) -> None:
        for sentence in report.refused.values():
            _log.warning("refused: %s", sentence)
        _log.info(
            "round %d: %s, accepted %d of %d, refused %d, %.1f s, %d bytes down, %d up",
            report.round, in_words(report.quality), len(report.accepted),
            self.server.num_tasks - len(self.left), len(report.refused), seconds, down, up,
        )  # fmt: skip


def in_words(quality: Quality) -> str:
    """Describe the quality of a model, as far as it is known."""
    if isinstance(quality, Training):
        diverged = int(quality.diverged)
        return f"loss {_known(quality.loss, '.6g')}" + (f", {diverged} diverged" if diverged else "")
    bound = max(float(quality.bound), float(getattr(quality, "joint_dual", -np.inf)))
    return f"gap {_known(quality.residual, '.2e')}, bound {_known(bound, '.6g')}"


def _number(up: Up) -> int:
    return up.round if isinstance(up.round, int) else 0


def _known(number: Array | float, form: str) -> str:
    return f"{float(number) + 0.0:{form}}" if np.isfinite(number) else "unknown"  # no -0


def _but(missing: list[int]) -> str:
    if not missing:
        return ""
    shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
    return f", all but those of tasks {shown}"


def _incarnation() -> int:
    """Draw the number by which nodes know a server that has been started anew: clocks repeat themselves."""
    return secrets.randbelow(2**31)
