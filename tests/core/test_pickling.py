"""Records go to other processes and come back; copies stay where they are."""

import copy
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax._core import pickling
from mocha_jax._files.fingerprint import fingerprint
from tests import zoo

MODEL = mj.networks.MLP(4, 2, (3,))


def labelled(by):
    """A schedule within a function, and one within that."""

    def schedule(step, *, scale=0.5):
        halved = [lambda rate, k=k: rate * k for k in (1.0, scale)]
        return halved[1](by) if scale else by

    return schedule


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam on a schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 50)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.yogi(0.1)),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "wrapped": lambda: optax.apply_if_finite(optax.masked(optax.lion(0.1), True), 3),
    "own schedule": lambda: optax.sgd(labelled(0.1)),
}


def back(record):
    return pickle.loads(pickle.dumps(record))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_comes_back_does_the_same(name):
    made = OPTIMIZERS[name]()
    algorithm = mj.FedAvg(MODEL, made, made)
    again = back(algorithm)
    assert fingerprint(again) == fingerprint(algorithm)
    params = {"w": np.linspace(-1, 1, 6).reshape(2, 3)}
    updates = []
    for optimizer in (made, again.client_optimizer, again.server_optimizer):
        with jax.numpy_dtype_promotion("standard"):  # optimizers assume it
            state = optimizer.init(params)
            for _ in range(3):
                update, state = optimizer.update(params, state, params)
        updates.append(update)
    chex.assert_trees_all_equal(*updates)


TRAINERS = {
    "averaging": mj.FedAvg(MODEL, optax.sgd(0.1), optax.adam(0.1)),
    "separate": mj.Local(MODEL, optax.adam(0.1)),
    "virtual": mj.Virtual(mj.networks.Lateral(4, 2, (3,)), optax.adam(0.01), samples=2),
}


@pytest.mark.slow
def test_a_trainer_goes_to_another_process_as_it_is(tmp_path):
    for name, trainer in TRAINERS.items():
        (tmp_path / name).write_bytes(pickle.dumps(trainer))
    code = (
        "import pickle, sys, pathlib; from mocha_jax._files.fingerprint import fingerprint\n"
        "print(*(fingerprint(pickle.loads(pathlib.Path(path).read_bytes())) for path in sys.argv[1:]))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, *(str(tmp_path / name) for name in TRAINERS)], capture_output=True, text=True,
        check=True, cwd=Path(__file__).parents[2],
    ).stdout  # fmt: skip
    assert said.split() == [fingerprint(trainer) for trainer in TRAINERS.values()]


def test_a_loss_made_of_a_function_within_a_function_comes_back():
    loss = mj.losses.from_scalar(lambda z, y: jax.nn.softplus(-y * z), binary=True)
    again, half, one = back(loss), jnp.asarray(0.5), jnp.asarray(1.0)
    assert again.value(half, one) == loss.value(half, one)
    part = pickling.portable(partial(labelled(0.1), scale=0.0))
    assert back(part)(0) == 0.1


def test_what_cannot_come_back_is_said_when_it_leaves_or_arrives(monkeypatch):
    def itself(n):
        return itself(n - 1) if n else 0

    names: dict[str, Any] = {"__name__": "nowhere"}
    exec("def outer():\n    return lambda: 1", names)  # noqa: S102
    for function, message in ((itself, "refers to itself"), (names["outer"](), "no function")):
        with pytest.raises(pickle.PicklingError, match=message):
            pickle.dumps(pickling.portable(function))
    gone = pickle.dumps(pickling.portable(labelled(0.1)))
    monkeypatch.setitem(globals(), "labelled", lambda by: by)
    with pytest.raises(pickle.UnpicklingError, match="labelled.* is written otherwise here"):
        pickle.loads(gone)


def test_copies_stay_where_they_are():
    algorithm, problem = (
        TRAINERS["averaging"],
        mj.shard(mj.Problem(zoo.data(), mj.losses.Hinge(), mj.regularizers.Independent(0.1))),
    )
    for twin in (copy.copy(algorithm), copy.deepcopy(algorithm)):
        chex.assert_trees_all_equal_structs(twin, algorithm)  # it compiles nothing anew
    for there in (copy.copy(problem), copy.deepcopy(problem)):
        assert there.data.sharding is problem.data.sharding
        assert there.data.x.sharding == problem.data.x.sharding
        np.testing.assert_array_equal(there.data.x, problem.data.x)
    assert back(problem).data.sharding is None
