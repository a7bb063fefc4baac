"""Right calls of what runs a federation over Flower, where that is installed."""

import pathlib
import re
import tempfile

import numpy as np

import mocha_jax as mj
from tests.bad_calls.kinds import count, flag, instance, number, optional
from tests.bad_calls.outcomes import Arg, Call
from tests.flower import world

SECONDS = number(0, shapes=[()])


def served(server, **options):
    folder = pathlib.Path(tempfile.mkdtemp())
    grid = world.LoopGrid({t: world.answering(keeper) for t, keeper in enumerate(world.keepers(folder))})
    return mj.flower.serve(grid, server, **options).weights


def function_of_a_module(value):
    parts = re.split(
        r"[.:]",
        value if isinstance(value, str) else f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}",
    )
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def deployments():
    return {
        "flower.serve": Call(served, {
            "server": Arg(world.make_server(), instance(mj.federated.Server)),
            "max_rounds": Arg(1, lambda value: count(1)(value) and value < 1000), "tol": Arg(100.0, SECONDS),
            "round_seconds": Arg(30.0, number(above=0, shapes=[()])), "message_seconds": Arg(0.0, SECONDS),
            "min_answers": Arg(1, lambda value: count(1)(value) and value <= world.M), "asynchronous": Arg(False, flag),
            "start_seconds": Arg(1.0, SECONDS), "leave_after": Arg(0, count(0)), "seed": Arg(0, count(0)), "poll_seconds": Arg(0.1, SECONDS),
        }),
        "flower.client_app": Call(lambda **args: mj.flower.client_app(**args) is None, {
            "make_node": Arg("tests.flower.world:make_node", function_of_a_module),
            "worker": Arg(True, lambda value: isinstance(value, bool)),
            "idle_seconds": Arg(900.0, lambda value: isinstance(value, int | float | np.integer | np.floating) and number(above=0, below=1e9, shapes=[()])(value)),
        }),
        "flower.server_app": Call(lambda **args: mj.flower.server_app(**args) is None, {
            "make_server": Arg(world.make_server, callable), "make_model": Arg(None, optional(callable)),
            "result": Arg("", lambda value: isinstance(value, str)),
        }),
    }  # fmt: skip
