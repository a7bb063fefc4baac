"""Whatever public record is printed, it is a sentence or a small table: no wall of shapes, numbers or addresses."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax._selection.descent import TuningTrace
from tests.bad_calls.table import public

M, D = 300, 40


def large(cls, **known):
    """A record whose fields are large arrays, those apart that are known."""
    record = object.__new__(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    vars(record).update({name: known.get(name, jnp.zeros((M, D))) for name in names})
    return record


def problem():
    data = mj.pack_tasks(
        {f"school {t}": np.ones((t % 3 + 1, D), "f") for t in range(M)}, {f"school {t}": np.ones(t % 3 + 1) for t in range(M)},
        loss_scaling="task_mean", intercept=True, dtype="float32",
    )  # fmt: skip
    return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(np.full(M, 0.1)))


def records():
    """Instances, by the names of their classes, of those that say more than their fields."""
    there, weights, one = problem(), jnp.zeros((M, D + 1)), jnp.float32(0.25)
    certificate = large(mj.Certificate, **dict.fromkeys([f.name for f in dataclasses.fields(mj.Certificate)], one))
    several = jax.tree.map(lambda a: jnp.stack([a] * 3), certificate)
    rounds = jnp.arange(3)
    history = large(mj.History, round=rounds, quality=several)
    solution = large(
        mj.Solution, problem=there, weights=weights, quality=certificate, history=history, code=1, rounds=40,
        silent=np.zeros(M, bool), tol=None, network=None,
    )  # fmt: skip
    scores = np.random.default_rng(0).random((2, 5, 60, M))
    lam = mj.regularizers.Independent(0.1)
    over = mj.metrics.over_tasks(scores[0, 0, 0])
    users = [f"u{t}" for t in range(M)]
    names = mj.Names(tasks=tuple(users), features=tuple(f"f{j}" for j in range(D)))
    up = mj.federated.Up("mocha", 3, 7, 1, 6, "DualUp", {"v": np.zeros(D), "terms.size": np.zeros(M)})
    report = mj.federated.Report(7, tuple(range(M)), {5: "Server: the node of task 5 sent an array."}, certificate)
    found = {
        "TaskData": there.data, "Problem": there, "Certificate": certificate, "History": history, "Solution": solution,
        "Hypergradient": large(mj.Hypergradient, value=one, gradient=there, error=there),
        "Path": large(mj.Path, regularizer=there.regularizer, certificate=several, rounds=rounds, weights=np.zeros((M, D))),
        "CrossValidation": mj.CrossValidation(there.regularizer, scores, scores, scores, 7, lam, None, "rmse"),
        "Tuned": mj.Tuned({"lam": jnp.ones(M), "sigma2": one}, there, solution, 0.5, 1, large(TuningTrace, gap=rounds)),
        "OneVsRest": large(mj.OneVsRest, weights=jnp.zeros((10, M, D)), certificate=several, rounds=rounds),
        "Names": names, "LinearModel": mj.LinearModel(np.zeros((M, D)), np.zeros(M), names, trained={"message": "done"}),
        "MulticlassModel": mj.MulticlassModel(np.zeros((9, M, D)), np.zeros((9, M)), names),
        "NetworkModel": mj.NetworkModel(mj.networks.MLP(D, 2, (8,)), mj.networks.MLP(D, 2, (8,)).init(jax.random.key(0)), D),
        "FedAvg": mj.FedAvg(mj.networks.MLP(D, 2, (8,)), optax.adam(1e-3)),
        "datasets.Users": mj.datasets.Users(users, [np.zeros((4, D))] * M, [np.zeros(4)] * M),
        "datasets.Table": mj.datasets.Table("table.csv", tuple(users), tuple(np.zeros((M, 9))), np.arange(9)),
        "datasets.Federation": mj.datasets.Federation(there.data, weights, weights),
        "federated.Up": up, "federated.Report": report, "flower.Served": None,
        "metrics.OverTasks": over, "metrics.Comparison": mj.metrics.compare({"a": scores[0, 0, 0], "b": scores[0, 0, 1]}),
        "multiclass.ClassScores": mj.multiclass.ClassScores(rounds, rounds, rounds, rounds, names=tuple("abc")),
    }  # fmt: skip
    if hasattr(mj.flower, "Served"):
        found["flower.Served"] = mj.flower.Served({"w": weights}, 3, large(mj.federated.FederationState), report, True)
    return found


# Base classes, functions of an algorithm, and what has the form of another one here.
LEFT = {"Pytree", "federated.Sides", "federated.Message", "federated.Down"}


def texts():
    known, found = records(), {}
    for name, cls in public().items():
        if not inspect.isclass(cls) or inspect.isabstract(cls) or name in LEFT:
            continue
        if name in known:
            found[name] = known.pop(name)
        elif issubclass(cls, mj.Pytree):
            found[name] = large(cls)
        elif issubclass(cls, tuple):
            found[name] = cls(*[jnp.zeros((M, D))] * len(inspect.signature(cls).parameters))
        elif dataclasses.is_dataclass(cls):  # static: of numbers
            found[name] = large(cls, **{field.name: 0.25 for field in dataclasses.fields(cls)})
    assert [name for name, record in known.items() if record is not None] == []
    return found


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
def test_public_records_print_as_a_sentence_or_a_small_table():
    found = texts()
    assert len(found) > 90
    for name, record in found.items():
        for text in {str(record), str(record) if name == "metrics.OverTasks" else repr(record)}:
            lines = text.splitlines()
            assert len(lines) <= 10, f"{name}: {text}"
            assert max(map(len, lines)) <= 260, f"{name}: {text}"
            assert text.count("float64[") <= 8, f"{name}: {text}"
            assert " at 0x" not in text, f"{name}: {text}"
            assert "Array(" not in text, f"{name}: {text}"


def test_what_records_say():
    known = records()
    said = {
        "TaskData": "TaskData(300 tasks of 1 to 3 samples, 40 features and an intercept, float32)",
        "Certificate": "Certificate(primal=0.25, dual=0.25, gap=0.25, relative_gap=0.25, joint_gap=0.25, relative_joint_gap=0.25)",
        "History": "History(3 records up to round 2, residual 0.25 to 0.25, also of every node; see to_dict and to_frame)",
        "Path": "Path(regularizer=Independent(lam=float32[300]), relative_gap=[0.25, 0.25, 0.25], rounds=[0, 1, 2], weights=float64[300, 40])",
        "OneVsRest": "OneVsRest(10 classes, 300 tasks, each class against the rest, after up to 2 rounds with residuals up to 0.25)",
        "federated.Up": "Up(DualUp of round 7, task 3, 2720 bytes)",
    }  # fmt: skip
    for name, text in said.items():
        assert repr(known[name]) == text
    dealt = mj.pack_tasks([np.ones((9, 2), "f"), np.ones((3, 2), "f")], [np.ones(9), np.ones(3)], rows=3)
    assert repr(dealt) == "TaskData(2 tasks on 4 nodes of 3 to 9 samples, 2 features, float64)"
    assert str(mj.Status.CONVERGED) == "Status.CONVERGED"
    assert repr(mj.regularizers.Independent(jnp.array([0.5, 2.0]))) == "Independent(lam=[0.5, 2])"

    @jax.jit
    def traced(data):
        assert repr(data).startswith("TaskData(x=float64[4, 3, 2], y=")
        return data.y

    traced(dealt)
