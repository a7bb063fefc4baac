"""Training is resumed as it was, whatever its optimizer keeps and its functions read."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import mocha_jax as mj
from mocha_jax._files.fingerprint import fingerprint
from tests.neural.problems import MODEL, make_problem


@pytest.mark.slow
def test_a_resumed_solve_ends_where_a_whole_one_does(key, tmp_path):
    problem, path = make_problem(), tmp_path / "run.npz"

    def solve(rounds, rate=0.05, **more):
        algorithm = mj.FedAvg(MODEL, optax.adam(rate), optax.sgd(1.0, momentum=0.9), fraction=0.6, batch_size=4)
        return mj.solve(problem, algorithm, key=key, tol=None, max_rounds=rounds, chunk=2, **more)

    whole = solve(6)
    solve(4, checkpoint=path)
    resumed = solve(6, checkpoint=path)
    chex.assert_trees_all_equal(whole.weights, resumed.weights)
    chex.assert_trees_all_equal(whole.history, resumed.history)
    with pytest.raises(mj.CheckpointError, match="another run"):
        solve(6, rate=0.06, checkpoint=path)


OPTIMIZERS = [
    lambda: optax.sgd(0.1),
    lambda: optax.sgd(0.2),
    lambda: optax.sgd(0.1, momentum=0.9),
    lambda: optax.sgd(optax.exponential_decay(0.1, 10, 0.9)),
    lambda: optax.sgd(optax.exponential_decay(0.1, 10, 0.8)),
    lambda: optax.adam(1e-3),
    lambda: optax.adam(1e-3, b1=0.8),
    lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1)),
]


class Net:
    """A module of another library."""

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, w, x):
        return self.slope * (x @ w)

    def apply(self, w, x):
        return self(w, x)


def scaled(scale):
    def predict(w, x, *, by=scale):
        return by * (x @ w)

    return predict


RECORD = SimpleNamespace(scale=1.0)


def test_a_checkpoint_knows_the_records_that_functions_read(monkeypatch):
    one = fingerprint(lambda x: RECORD.scale * x)
    assert one == fingerprint(lambda x: RECORD.scale * x)
    monkeypatch.setattr(RECORD, "scale", 2.0)
    assert one != fingerprint(lambda x: RECORD.scale * x)


@pytest.mark.slow
def test_a_checkpoint_knows_what_functions_do():
    made = [[fingerprint(make()) for make in OPTIMIZERS] for _ in range(2)]
    assert made[0] == made[1]
    assert len(set(made[0])) == len(OPTIMIZERS)
    assert fingerprint(Net(1.0).apply) == fingerprint(Net(1.0).apply) != fingerprint(Net(2.0).apply)
    assert fingerprint(scaled(1.0)) == fingerprint(scaled(1.0)) != fingerprint(scaled(2.0))
    code = "from mocha_jax._files.fingerprint import fingerprint; from tests.neural import test_saved_training as t\n"
    code += "print([fingerprint(make()) for make in t.OPTIMIZERS], fingerprint(lambda x: x in {'a', 'b', 'c'}))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert len(said) == 1


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
        lambda: optax.noisy_sgd(0.1, key=jax.random.key(3)),
    ],
    ids=["bfloat16", "keys"],
)
@pytest.mark.slow
def test_any_state_of_an_optimizer_is_saved(optimizer, key, tmp_path):
    problem, path = make_problem(), tmp_path / "run.npz"
    algorithm = mj.Local(MODEL, optimizer(), batch_size=4)

    def solve(rounds, **more):
        return mj.solve(problem, algorithm, key=key, tol=None, max_rounds=rounds, **more)

    whole = solve(4)
    solve(2, checkpoint=path)
    chex.assert_trees_all_equal(whole.weights, solve(4, checkpoint=path).weights)
