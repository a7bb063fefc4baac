"""Right calls of nodes and servers. What arrives as a message is swept in `tests/federated/test_messages.py`."""

import functools
import os
import tempfile

import jax
import numpy as np

import mocha_jax as mj
from tests.bad_calls import world
from tests.bad_calls.kinds import count, either, flag, instance, key, number, optional, reals, word
from tests.bad_calls.outcomes import Arg, Call

POSITIVE = number(above=0, shapes=[()])
SAFE = mj.Mocha(server="dual", sigma_prime="per_task")
METHOD = Arg(SAFE, instance(mj.SubproblemMethod), ("Algorithm",))


@functools.cache
def server():
    return mj.federated.Server(SAFE, mj.regularizers.MeanRegularized(0.5, 0.25), world.M, world.D, dtype="float32")


@functools.cache
def state():
    return server().init()


@functools.cache
def node():
    return mj.federated.Node(world.xs()[0], world.ys()[0], mj.losses.SmoothedHinge(0.5), SAFE, dtype="float32")


@functools.cache
def kept():
    return node().init()


@functools.cache
def down():
    return server().down(state(), 0)


@functools.cache
def blob():
    return mj.federated.to_bytes(kept())


@functools.cache
def written():
    path = os.path.join(tempfile.mkdtemp(), "kept.npz")
    mj.federated.save(path, kept())
    return path


def of_arrays(value):
    """A tree of arrays of numbers or booleans."""
    return all(
        isinstance(leaf, np.ndarray | np.generic | jax.Array)
        and not isinstance(leaf, np.ma.MaskedArray)
        and (jax.numpy.issubdtype(leaf.dtype, np.number) or leaf.dtype == bool)
        for leaf in jax.tree.leaves(value)
    )


def text(value):
    return isinstance(value, str)


def the(thing):
    return Arg(thing, lambda value: value is thing())


def federations():
    f, s = mj.federated, mj.systems
    x, y = world.xs()[0], world.ys()[0]
    binary = instance(mj.losses.Loss, lambda loss: loss.binary)
    task = Arg(1, number(0, world.M - 1, shapes=[()], whole=True), ("task",))
    rates = number(0, 1)
    return {
        "federated.Node": Call(lambda **given: jax.tree.leaves(f.Node(**given).init()), {
            "x": Arg(x, reals(world.N, None, finite=True), ("xs", "samples", "features", "task 0")),
            "y": Arg(y, lambda v: reals(world.N)(v) and set(np.ravel(v).tolist()) <= {-1, 1}, ("ys", "label", "labels", "task 0")),
            "loss": Arg(mj.losses.Hinge(), binary), "algorithm": METHOD, "loss_scaling": Arg("sum", word("sum", "task_mean")),
            "intercept": Arg(False, either(flag, number(0, 1e30, shapes=[()])), ("a value",)), "rows": Arg(5, optional(count(world.N))),
            "federation": Arg("ours", optional(text)),
        }),
        "federated.Node.step": Call(lambda key, down: node().step(key, kept(), down)[1].arrays["v"], {
            "key": Arg(world.key, key), "down": Arg(down, lambda v: v is down(), ("server",)),
        }),
        "federated.Node.weights": Call(lambda down: node().weights(kept(), down), {
            "down": Arg(down, lambda v: v is down(), ("server",)),
        }),
        "federated.Server.asked": Call(lambda key: server().asked(key, state()) == (), {"key": Arg(world.key, key)}),
        "federated.Server": Call(lambda **given: f.Server(**given).init().held, {
            "algorithm": METHOD, "regularizer": Arg(mj.regularizers.MeanRegularized(0.5, 0.25), instance(mj.regularizers.Regularizer)),
            "num_tasks": Arg(world.M, count(1)), "num_features": Arg(world.D, count(1)), "loss_scaling": Arg("sum", word("sum", "task_mean")),
            "federation": Arg("ours", text), "max_staleness": Arg(2, optional(count(0))),
        }),
        "federated.Server.init": Call(lambda incarnation: server().init(incarnation).held, {"incarnation": Arg(3, count(0))}),
        "federated.Server.down": Call(lambda task, steps: server().down(state(), task, steps=steps).arrays["start"], {
            "task": task, "steps": Arg(2, optional(count(0))),
        }),
        "federated.Server.step": Call(lambda ups: server().step(state(), ups)[1].accepted, {"ups": Arg({}, lambda v: isinstance(v, dict))}),
        "federated.Server.restarted": Call(lambda incarnation: server().restarted(state(), incarnation).held, {
            "incarnation": Arg(3, lambda v: count(0)(v) and int(np.asarray(v)) != 0),
        }),
        "federated.message_numbers": Call(f.message_numbers, {"server": Arg(server, instance(f.Server))}),
        "federated.as_table": Call(f.as_table, {"numbers": Arg({"DualUp": {"float32": 3}}, lambda v: isinstance(v, dict) and not v)}),
        "federated.save": Call(f.save, {"file": Arg("kept.npz", lambda v: isinstance(v, str | bytes | os.PathLike) and len(os.fspath(v)) > 0), "record": Arg(kept, of_arrays)}),
        "federated.to_bytes": Call(f.to_bytes, {"record": Arg(kept, of_arrays)}),
        "federated.load": Call(f.load, {"file": Arg(written, lambda v: v is written(), ("the file",)), "like": Arg(kept, lambda v: v is kept(), ("record that is wanted", "belongs to another"))}),
        "federated.from_bytes": Call(f.from_bytes, {"data": Arg(blob, lambda v: v is blob(), ("blob",)), "like": Arg(kept, lambda v: v is kept(), ("record that is wanted", "belongs to another"))}),
        "federated.Server.leave": Call(lambda task: server().leave(state(), task).held, {"task": task}),
        "federated.Server.join": Call(lambda task: server().join(state(), task).held, {"task": task}),
        "federated.OverChannel": Call(f.OverChannel, {
            "algorithm": METHOD, "channel": Arg(s.Unreliable(0.3), instance(s.Channel)), "max_staleness": Arg(2, optional(count(0))),
            "sending": Arg(mj.compression.TopK(0.1), optional(instance(mj.compression.Sending))),
        }),
        "systems.Unreliable": Call(s.Unreliable, {
            "lost": Arg(0.25, rates), "late": Arg(0.25, rates), "duplicated": Arg(0.25, rates), "most": Arg(3, count(1)),
        }),
        "systems.Clock": Call(s.Clock, {
            "cycle": Arg(2.0, POSITIVE), "cost": Arg(mj.costs.lte(), instance(mj.costs.Cost)), "most": Arg(3, count(1)),
        }),
    }  # fmt: skip
