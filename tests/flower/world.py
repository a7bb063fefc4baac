"""A federation over Flower in one process: a grid that hands messages over, with or without an accident."""

import itertools
import time
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import mocha_jax as mj
from mocha_jax.flower._node_store import NodeStore
from mocha_jax.flower._records import from_record, to_record
from tests import zoo

M, D, SEED = 4, 4, 3
LOSS, REGULARIZER = mj.losses.SmoothedHinge(0.5), mj.regularizers.Probabilistic(0.05)
OPTIONS: dict[str, Any] = {"dtype": np.float32, "loss_scaling": "task_mean"}


def tables():
    return zoo.ragged(seed=5, m=M, d=D, dtype=np.float32)


def problem():
    xs, ys = tables()
    return mj.Problem(mj.pack_tasks(xs, ys, **OPTIONS), LOSS, REGULARIZER)


def make_node(config):
    """The node of a task, as a worker makes it too."""
    if config.get("broken"):
        raise KeyError("the patient's name")
    xs, ys = tables()
    t = int(config["task"])
    return mj.federated.Node(xs[t], ys[t], LOSS, mj.Mocha(), rows=max(map(len, xs)), **OPTIONS)


def make_server(config=None, **options):
    return mj.federated.Server(mj.Mocha(), REGULARIZER, M, D, **OPTIONS, **options)


def keepers(folder):
    """All nodes, with their files."""
    found = []
    for t in range(M):
        (folder / f"{t}").mkdir(exist_ok=True)
        found.append(NodeStore(str(folder / f"{t}"), make_node({"task": t}), t))
    return found


def answering(keeper):
    """A node of Flower that has a keeper."""

    def answer(message):
        header, arrays = from_record(message.content)
        if header["what"] == "task?":
            return {"what": "task", "task": keeper.task}, {}
        return keeper.answer(header, arrays)

    return answer


class LoopGrid(Grid):
    """A grid whose nodes are functions from messages to header and arrays, None for no answer at all.

    Args:
      nodes: by Flower's number.
      late: seconds that the answer to a node's k-th message of a round takes, a function of node and k.
    """

    def __init__(self, nodes, late=lambda node, k: 0.0):
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.nodes, self.late, self.count = dict(nodes), late, dict.fromkeys(nodes, 0)
        self.answers, self.sent, self.names = {}, {}, itertools.count(1)

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        found = []
        for message in messages:
            node, name = message.metadata.dst_node_id, f"message {next(self.names)}"
            if node not in self.nodes:
                found.append("")
                continue
            message.metadata.__dict__["_message_id"] = name
            self.sent[name] = message
            delay = 0.0
            if message.metadata.message_type == "train":
                self.count[node] = self.count.get(node, 0) + 1
                delay = self.late(node, self.count[node])
            answer = self.nodes[node](message)
            if answer is not None:
                content = answer if isinstance(answer, Error) else to_record(*answer)
                self.answers[name] = time.monotonic() + delay, Message(content, reply_to=message)
            found.append(name)
        return found

    def pull_messages(self, message_ids):
        now = time.monotonic()
        ready = [name for name in message_ids if name in self.answers and self.answers[name][0] <= now]
        return [self.answers.pop(name)[1] for name in ready]

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


def context(**config):
    return Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
