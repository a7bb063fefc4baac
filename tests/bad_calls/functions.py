"""Right calls of functions and methods."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mocha_jax as mj
from mocha_jax import costs, coupling, datasets, metrics, partition, plotting, spectral, theory
from tests.bad_calls import world
from tests.bad_calls.kinds import (
    any_numbers,
    anything,
    count,
    covariance,
    either,
    flag,
    function,
    instance,
    key,
    marks,
    number,
    optional,
    reals,
    word,
)
from tests.bad_calls.outcomes import Arg, Call

# How sentences about one task's samples and labels call them.
SAMPLES, LABELS = ("x", "samples", "features"), ("y", "label", "labels")
UNIT = number(0, 1, shapes=[()])
POSITIVE = number(above=0, shapes=[()])
SCALE = number(0, shapes=[()])


def key_arg(valid=None):
    return Arg(world.key() if valid is None else valid, key)


def optional_key():
    return Arg(world.key(), optional(key))


def of(kind, valid, fits=lambda value: True, *words):
    return Arg(valid, instance(kind, fits), words)


def same_shape(value):
    """A `TaskData` of the world's sizes."""
    return value.y.shape == world.data().y.shape and value.num_features == world.D


def scored(value, tasks):
    """Scores of three tasks, or of seeds and three tasks."""
    shape = np.shape(value)
    return (
        len(shape) in (1, 2)
        and shape[-1] == 3
        and np.asarray(value).dtype.kind in "fiub"
        and not np.isnan(np.asarray(value, float)).all()
    )


def whose(value):
    """One task of the world's model, or one for each of two samples."""
    if (
        isinstance(value, list | tuple | collections.deque | np.ndarray | jax.Array)
        and np.ndim(np.asarray(value, object)) == 1
    ):
        return len(value) == 2 and all(whose(each) for each in value)
    return isinstance(value, int | float | np.number | np.bool_) and value in range(world.M)


def as_objects(*shape):
    """Numbers as Python has them, as some columns of data frames are."""

    def holds(value):
        return (
            np.shape(value) == (12, *shape)
            and np.asarray(value).dtype == object
            and all(isinstance(each, float) for each in np.ravel(value))
        )

    return holds


def one_each(least):
    """Weights of at least so many classes, for each of the world's tasks or for all."""

    def allows(value):
        return any(reals(None, m, world.D, least=1)(value) for m in (1, world.M)) and len(value) >= least

    return allows


def alphabet(value):
    return isinstance(value, str) and len(set(value)) == len(value) > 0


def problem_arg(valid=None, *words):
    return of(mj.Problem, world.problem() if valid is None else valid, lambda value: True, *words)


def weights_arg():
    return Arg(world.weights(), reals(world.M, world.D))


def budget():
    return {"tol": Arg(0.5, SCALE), "max_rounds": Arg(2, count(1)), "record_every": Arg(1, count(1))}


def several():
    """What functions of several classes are given."""
    return {
        "data": of(mj.TaskData, world.classes(), same_shape, "labels"), "make": Arg(world.make_problem, function),
        "algorithm": algorithm_arg(), "key": optional_key(),
    }  # fmt: skip


def algorithm_arg():
    return Arg(world.safe(), optional(instance(mj.Algorithm, lambda a: a.solves is mj.Problem)))


def functions():
    return drivers() | measures() | spectra() | made_data() | dealt() | pictures()


def drivers():
    r = mj.regularizers.Regularizer
    run = {
        "systems": Arg(mj.systems.Full(), optional(instance(mj.systems.System))), "cost": Arg(costs.Cost(), optional(instance(costs.Cost))),
        "watch": Arg(mj.Watch(), optional(instance(mj.Watch))), "state": Arg(world.before, optional(lambda v: v is world.before())),
    }  # fmt: skip
    return {
        "solve": Call(mj.solve, run | {
            "problem": problem_arg(), "algorithm": algorithm_arg(), "key": optional_key(), "tol": Arg(0.5, optional(SCALE)),
            "joint_tol": Arg(0.5, optional(SCALE)), "max_rounds": Arg(2, count(0)), "record_every": Arg(1, count(1)), "chunk": Arg(2, count(1)),
            "progress": Arg(False, flag), "callback": Arg(lambda *_: None, optional(function)), "checkpoint": Arg(None, optional(lambda v: isinstance(v, str) and v != "" or hasattr(v, "__fspath__"))),
            "adjoint": Arg(None, optional(instance(mj.Adjoint))),
        }),
        "default_algorithm": Call(mj.default_algorithm, {"problem": problem_arg(), "state": Arg(None, anything), "federation": Arg(False, flag)}),
        "run": Call(mj.run, run | {
            "key": key_arg(), "algorithm": of(mj.Algorithm, world.safe()), "problem": problem_arg(), "num_rounds": Arg(2, count(1)), "record_every": Arg(1, count(1)),
        }),
        "certificate": Call(mj.certificate, {"problem": problem_arg(None, "beta"), "beta": Arg(np.zeros((world.M, world.N)), reals(world.M, world.N)), "relation": Arg(None, lambda v: v is None)}),
        "certificate, Omega learned": Call(mj.certificate, {
            "problem": problem_arg(world.learned(), "beta"), "beta": Arg(np.zeros((world.M, world.N)), reals(world.M, world.N)),
            "relation": Arg(coupling.LowRank(jnp.float32(0.25), jnp.zeros((3, 2), jnp.float32)), optional(instance(coupling.LowRank))),
        }),
        "free_intercept": Call(mj.free_intercept, {
            "problem": problem_arg(world.with_intercept(), "beta"), "beta": Arg(np.zeros((world.M, world.N)), reals(world.M, world.N)), "relation": Arg(None, lambda v: v is None), "weights": weights_arg(),
        }),
        "free_intercept, Omega learned": Call(mj.free_intercept, {
            "problem": problem_arg(world.with_intercept().replace(regularizer=mj.regularizers.Probabilistic(0.5)), "beta"), "beta": Arg(np.zeros((world.M, world.N)), reals(world.M, world.N)),
            "relation": Arg(coupling.LowRank(jnp.float32(0.25), jnp.zeros((3, 2), jnp.float32)), optional(instance(coupling.LowRank))), "weights": weights_arg(),
        }),
        "objective": Call(mj.objective, {"problem": problem_arg(None, "weights"), "weights": weights_arg(), "relation": Arg(None, lambda v: v is None)}),
        "objective, Omega learned": Call(mj.objective, {
            "problem": problem_arg(world.learned(), "weights"), "weights": weights_arg(),
            "relation": Arg(coupling.LowRank(jnp.float32(0.25), jnp.zeros((3, 2), jnp.float32)), optional(instance(coupling.LowRank))),
        }),
        "lambda_path": Call(mj.lambda_path, budget() | {
            "problem": problem_arg(), "candidates": Arg(world.candidates(), instance(r, lambda v: v is world.candidates())), "algorithm": algorithm_arg(), "key": optional_key(), "standardize": Arg(None, optional(either(function, word("pooled", "task", "within")))),
        }),
        "cross_validate": Call(mj.cross_validate, budget() | {
            "problem": problem_arg(), "candidates": Arg(world.candidates(), instance(r, lambda v: v is world.candidates())), "algorithm": algorithm_arg(), "key": optional_key(),
            "folds": Arg(2, count(2)), "trials": Arg(1, count(1)), "groups": Arg(None, optional(reals(world.M, world.N, whole=True))),
            "metric": Arg("error_rate", optional(either(function, word("error_rate", "auc", "rmse")))), "maximise": Arg(None, optional(flag)),
            "scored_as": Arg(None, optional(instance(mj.TaskData, same_shape))), "standardize": Arg(None, optional(either(function, word("pooled", "task", "within")))), "chunk": Arg(1, optional(count(1))), "refit": Arg(False, flag), "progress": Arg(False, flag),
        }),
        "tune": Call(mj.tune, budget() | {
            "problem": problem_arg(), "make": Arg(None, optional(function)), "start": Arg(None, optional(anything)),
            "score": Arg(None, optional(function)), "standardize": Arg(None, optional(either(function, word("pooled", "task", "within")))), "folds": Arg(2, lambda v: count(2)(v) and v <= world.N), "stopping": Arg(1, lambda v: count(0)(v) and v < 2), "prior": Arg(1.0, number(above=0, shapes=[()], infinite=True)), "optimizer": Arg(optax.sgd(0.5), optional(lambda v: isinstance(v, optax.GradientTransformation))), "steps": Arg(1, count(1)), "algorithm": algorithm_arg(), "key": optional_key(),
            "max_rounds": Arg(30, count(1)), "adjoint": Arg(mj.Implicit(), optional(instance(mj.Implicit))), "callback": Arg(None, optional(function)),
        }),
        "hypergradient": Call(mj.hypergradient, {
            "fn": Arg(world.add, function), "solution": of(mj.Solution, world.solution), "adjoint": Arg(mj.Implicit(), optional(instance(mj.Implicit))),
        }),
        "one_vs_rest": Call(mj.one_vs_rest, budget() | {
            "data": of(mj.TaskData, world.classes(), lambda value: True, "labels"), "make": Arg(world.make_problem, function), "algorithm": algorithm_arg(), "classes": Arg(2, optional(count(2))), "key": optional_key(),
        }),
        "multiclass.lambda_path": Call(mj.multiclass.lambda_path, budget() | several() | {
            "standardize": Arg(None, optional(either(function, word("pooled", "task", "within")))),
            "candidates": Arg(world.candidates(), instance(r, lambda v: v is world.candidates())), "classes": Arg(2, optional(count(2))),
        }),
        "multiclass.cross_validate": Call(mj.multiclass.cross_validate, budget() | several() | {
            "candidates": Arg(world.candidates(), instance(r, lambda v: v is world.candidates())), "classes": Arg(2, optional(count(2))),
            "folds": Arg(2, count(2)), "trials": Arg(1, count(1)), "groups": Arg(None, optional(reals(world.M, world.N, whole=True))),
            "metric": Arg("error_rate", optional(either(function, word("error_rate")))), "maximise": Arg(None, optional(flag)), "keep_rare": Arg(True, flag),
            "scored_as": Arg(None, optional(instance(mj.TaskData, same_shape))), "standardize": Arg(None, optional(either(function, word("pooled", "task", "within")))), "chunk": Arg(1, optional(count(1))), "refit": Arg(False, flag), "progress": Arg(False, flag),
        }),
        "multiclass.calibrated": Call(mj.multiclass.calibrated, budget() | several() | {
            "model": of(mj.OneVsRest, world.rest), "folds": Arg(2, count(2)), "groups": Arg(None, optional(reals(world.M, world.N, whole=True))),
        }),
        "shard": Call(mj.shard, {
            "problem": of(mj.Problem, world.problem()), "mesh": Arg(None, optional(instance(jax.sharding.Mesh))), "axes": Arg("nodes", optional(lambda v: v in ("nodes", ("nodes",)) if isinstance(v, str | tuple) else False)),
        }),
        "from_process_local": Call(mj.from_process_local, {
            "data": of(mj.TaskData, world.data()), "mesh": Arg(None, optional(instance(jax.sharding.Mesh))), "axes": Arg("nodes", optional(lambda v: v in ("nodes", ("nodes",)) if isinstance(v, str | tuple) else False)),
            "task": Arg(None, optional(reals(world.M, whole=True, low=0, high=2))),
        }),
        "grid": Call(mj.grid, {
            "make": Arg(mj.regularizers.Independent, function), "lam": Arg([0.5, 1.0], number(above=0)),
        }),
        "graphical_lasso": Call(mj.graphical_lasso, {
            "covariance": Arg(np.array([[1.0, 0.5], [0.5, 1.0]]), covariance(2)), "penalty": Arg(0.5, number(0, shapes=[(), (2, 2)])), "mask": Arg(np.array([True, True]), optional(marks(2))),
            "start": Arg(np.eye(2), optional(covariance(2))), "tol": Arg(1e-3, optional(SCALE)), "max_iterations": Arg(30, count(0)),
        }),
        "datasets.cells": Call(mj.datasets.cells, {"path": Arg(world.mat, lambda v: v == world.mat())}),
        **tables(),
        "datasets.har": Call(mj.datasets.har, {"folder": Arg(world.har, lambda v: v == world.har()), "part": Arg("train", optional(word("train", "test")))}),
        "datasets.vehicle": Call(mj.datasets.vehicle, {"folder": Arg(world.vehicle, lambda v: v == world.vehicle())}),
        "datasets.leaf": Call(mj.datasets.leaf, {
            "folder": Arg(world.leaf, lambda v: v == world.leaf()), "users": Arg(["A", "B"], optional(lambda v: list(v) in (["A"], ["B"], ["A", "B"], ["B", "A"]))),
            "alphabet": Arg("abc", alphabet),
        }),
        "datasets.symbols": Call(mj.datasets.symbols, {"text": Arg("", lambda v: isinstance(v, str) and set(v) <= set("abc")), "alphabet": Arg("abc", alphabet)}),
        "datasets.windows": Call(mj.datasets.windows, {
            "sequence": Arg(np.arange(5), lambda v: reals(None, whole=True, low=0, least=2)(v)), "length": Arg(2, count(1)),
        }),
        "pack_tasks": Call(mj.pack_tasks, {
            "xs": Arg(world.xs(), lambda v: v is world.xs(), SAMPLES), "ys": Arg(world.ys(), lambda v: v is world.ys(), LABELS), "groups": Arg(None, lambda v: v is None),
            "like": Arg(None, lambda v: v is None), "task": Arg(None, optional(either(reals(world.M, whole=True, low=0, high=2), lambda v: np.shape(v) == (world.M,) and np.asarray(v).dtype.kind == "U"))), "loss_scaling": Arg("sum", word("sum", "task_mean")), "intercept": Arg(False, either(flag, number(0, shapes=[()]))),
            "dtype": Arg("float32", optional(lambda v: v in ("float32", "float16", "bfloat16", np.float32) if isinstance(v, str | type) else False)),
            "rows": Arg(5, optional(count(1))),
        }),
        "pack_tasks, one array": Call(mj.pack_tasks, {
            "xs": Arg(np.concatenate(world.xs()), either(reals(12, None, finite=True), marks(12, world.D), as_objects(world.D)), SAMPLES), "ys": Arg(np.concatenate(world.ys()), either(reals(12, finite=True), marks(12), as_objects(), lambda v: np.shape(v) == (12,) and np.asarray(v).dtype.kind == "U"), LABELS),
            "groups": Arg(np.repeat(np.arange(3), 4), lambda v: np.shape(v) == (12,)), "dtype": Arg("float32", optional(lambda v: v in ("float32", "float16", "bfloat16"))),
        }),
        "losses.from_scalar": Call(mj.losses.from_scalar, {
            "fn": Arg(world.fair, function), "smoothness": Arg(1.0, optional(POSITIVE)), "lipschitz": Arg(1.0, optional(POSITIVE)), "binary": Arg(False, flag),
        }),
        **methods(),
    }  # fmt: skip


def tables():
    """What reads tables, from files and others' libraries."""
    packed = {
        "loss_scaling": Arg("sum", word("sum", "task_mean")), "intercept": Arg(False, flag), "like": Arg(None, lambda v: v is None),
        "dtype": Arg("float32", optional(lambda v: v in ("float32", "float16", "bfloat16", np.float32) if isinstance(v, str | type) else False)),
    }  # fmt: skip

    def columns(*known):
        return lambda v: (
            isinstance(v, list | tuple | np.ndarray)
            and all(isinstance(c, str) and c in known for c in v)
            and len(set(v)) == len(v)
        )

    path, column, found = (
        Arg(world.table, lambda v: v == world.table()),
        word("hours", "town", "school", "score"),
        world.columns(),
    )
    delimiter = Arg(",", optional(lambda v: v == ","), ("delimiter", "header"))
    return {
        "datasets.csv": Call(mj.datasets.csv, packed | {
            "path": path, "label": Arg("score", word("score"), ("column",)), "group": Arg("school", word("school"), ("column",)), "features": Arg(["hours"], optional(columns("hours")), ("column", "columns")),
            "categories": Arg("refuse", either(word("refuse", "encode"), columns("hours", "town"), lambda v: isinstance(v, np.ndarray | collections.deque) and len(v) == 0), ("column", "columns")), "delimiter": delimiter,
        }),
        "datasets.read_table": Call(mj.datasets.read_table, {
            "path": path, "delimiter": Arg(",", optional(lambda v: v == ",")), "texts": Arg(["school"], lambda v: not isinstance(v, str | bytes) and all(isinstance(c, str) for c in v)),
        }),
        "datasets.svmlight": Call(mj.datasets.svmlight, packed | {
            "path": Arg(world.clicks, lambda v: v == world.clicks()), "group": Arg(np.array([1, 1, 2]), lambda v: np.shape(v) == (3,), ("groups",)),
            "num_features": Arg(2, optional(lambda v: count(2)(v) and v < 10**6)), "zero_based": Arg(False, either(lambda v: flag(v) and not v, word("auto")), ("feature",)), "limit_gb": Arg(1.0, number(above=1e-7, infinite=True, shapes=[()])),
        }),
        "datasets.from_partitions": Call(mj.datasets.from_partitions, packed | {
            "parts": Arg(world.parts, lambda v: v is world.parts(), ("x",)), "label": Arg("label", lambda v: isinstance(v, str) and bool(v)), "features": Arg(None, optional(lambda v: not isinstance(v, str | bytes) and all(isinstance(c, str) for c in v))),
        }),
        "datasets.Table.column": Call(found.column, {"name": Arg("town", column, ("column",))}),
        "datasets.Table.holds_texts": Call(found.holds_texts, {"name": Arg("town", column, ("column",))}),
        "datasets.Table.texts": Call(found.texts, {"name": Arg("town", column, ("column",))}),
        "datasets.Table.names": Call(found.names, {"name": Arg("school", column, ("column",)), "known": Arg(["A", "B"], optional(lambda v: isinstance(v, list | tuple) and {"A", "B"} <= set(v)))}),
        "datasets.Table.numbers": Call(found.numbers, {"names": Arg(["hours", "score"], columns("hours", "score"), ("column",))}),
    }  # fmt: skip


def methods():
    data, classes = world.data(), world.classes()
    fedavg, virtual = world.fedavg(), world.virtual()
    predict = {
        "problem": of(mj.Prediction, world.prediction()), "node": Arg(1, number(0, world.M - 1, shapes=[()], whole=True), ("client",)),
        "x": Arg(world.xs()[0], either(reals(None, world.D, least=1), marks(4, world.D))),
    }  # fmt: skip
    model = world.model()
    asked = {
        "x": Arg(np.ones((2, world.D)), either(reals(None, world.D), lambda v: np.shape(v)[1:] == (world.D,) and np.asarray(v).dtype == bool)), "task": Arg(0, lambda v: whose(v)),
        "unseen": Arg("error", word("error", "mean")),
    }  # fmt: skip
    rest = mj.OneVsRest(jnp.ones((2, world.M, world.D), jnp.float32), None, None, np.ones(2, int))  # type: ignore[arg-type]
    path = mj.Path(mj.regularizers.Independent(np.ones(2)), jnp.ones((2, 3, 2)), None, None, jnp.ones(2, int))  # type: ignore[arg-type]
    safe = world.safe()
    return {
        "TaskData.split": Call(data.split, {"key": key_arg(), "fraction": Arg(0.5, number(above=0, below=1, shapes=[()])), "stratify": Arg(True, optional(flag))}),
        "TaskData.folds": Call(data.folds, {"key": key_arg(), "count": Arg(2, count(2)), "groups": Arg(np.zeros((3, 4), int), optional(reals(3, 4, whole=True)))}),
        "TaskData.pad": Call(data.pad, {"nodes": Arg(4, optional(count(3))), "rows": Arg(5, optional(count(4)))}),
        "TaskData.standardized": Call(data.standardized, {"by": Arg("pooled", word("pooled", "task", "within")), "labels": Arg(False, flag), "like": Arg(None, optional(lambda v: False))}),
        "TaskData.join": Call(world.named().join, {"other": of(mj.TaskData, world.named())}),
        "TaskData.append": Call(data.append, {"other": of(mj.TaskData, data, lambda d: d.num_features == 2)}),
        "TaskData.keep": Call(data.keep, {"rows": Arg(np.ones((3, 4), bool), marks(3, 4))}),
        "TaskData.replace": Call(data.replace, {
            "x": Arg(np.asarray(data.x), reals(3, 4, None, finite=True), ("y",)), "y": Arg(np.asarray(data.y), reals(3, 4, finite=True)),
            "weight": Arg(np.ones((3, 4)), reals(3, 4, finite=True, low=0)), "loss_scaling": Arg("sum", word("sum", "task_mean")),
        }),
        "systems.Controller.cycle": Call(mj.systems.Controller(costs.lte()).cycle, {
            "data": of(mj.TaskData, data, same_shape, "request"), "request": Arg(world.request(), lambda v: v is world.request(), ("data",)),
        }),
        "costs.Cost.check_nodes": Call(costs.Cost().check_nodes, {"num_nodes": Arg(3, count(1))}),
        "costs.Cost.message_seconds": Call(costs.lte().message_seconds, {"down": Arg(2.0, any_numbers), "up": Arg(2.0, any_numbers)}),
        "costs.Cost.seconds": Call(costs.lte().seconds, {"flops": Arg(2.0, any_numbers), "down": Arg(2.0, any_numbers), "up": Arg(2.0, any_numbers)}),
        "costs.Cost.round_seconds": Call(costs.lte().round_seconds, {"node_seconds": Arg(np.ones(3), reals(None, least=1))}),
        "coupling.Coupling.sigma_prime": Call(coupling.Dense(jnp.eye(3)).sigma_prime, {
            "rule": Arg("per_task", word("lemma9", "per_task", "spectral")), "gamma": Arg(0.5, number(above=0, high=1, shapes=[()])), "nodes": Arg(np.ones(3), optional(reals(3, low=0, finite=True))),
        }),
        "Mocha.add_tasks": Call(safe.add_tasks, {"state": Arg(world.before, lambda v: v is world.before()), "problem": problem_arg()}),
        "Mocha.init": Call(safe.init, {"problem": problem_arg()}),
        "Mocha.resume": Call(safe.resume, {"state": Arg(world.before, lambda v: v is world.before()), "problem": problem_arg()}),
        "Mocha.request": Call(safe.request, {"problem": problem_arg(), "round": Arg(0, number(0, below=2**31, shapes=[()], whole=True))}),
        "metrics.over_tasks": Call(metrics.over_tasks, {
            "scores": Arg(np.arange(3.0), lambda v: scored(v, None)), "sizes": Arg(np.ones(3), optional(reals(3, low=0))), "baseline": Arg(np.ones(3), optional(lambda v: scored(v, 3))),
            "maximise": Arg(False, flag), "level": Arg(0.9, number(above=0, below=1, shapes=[()])), "seed": Arg(0, count(0)),
        }),
        "metrics.compare": Call(metrics.compare, {
            "methods": Arg({"one": np.arange(3.0), "two": np.ones(3)}, lambda v: isinstance(v, dict) and len(v) > 0 and all(np.ndim(one) in (1, 2) for one in v.values())), "sizes": Arg(np.ones(3), optional(reals(3, low=0))), "baseline": Arg("one", optional(word("one", "two"))),
            "maximise": Arg(False, flag), "level": Arg(0.9, number(above=0, below=1, shapes=[()])), "seed": Arg(0, count(0)), "tasks": Arg(["a", "b", "c"], optional(lambda v: len(v) == len(set(v)) == 3)),
        }),
        "LinearModel.predict": Call(model.predict, asked),
        "LinearModel.decision_function": Call(model.decision_function, asked),
        "LinearModel.predict_proba": Call(model.predict_proba, asked),
        "LinearModel.weights_for": Call(model.weights_for, {"data": of(mj.TaskData, data, same_shape)}),
        "read_history": Call(mj.read_history, {"path": Arg(world.checkpoint, lambda v: v == world.checkpoint())}),
        "callbacks.EachRecord": Call(mj.callbacks.EachRecord, {"function": Arg(print, function), "after": Arg(0, count(0))}),
        "callbacks.TensorBoard": Call(mj.callbacks.TensorBoard, {
            "writer": Arg(world.Writer(), instance(world.Writer)), "prefix": Arg("", lambda v: isinstance(v, str)), "after": Arg(0, count(0)),
        }),
        "load_model": Call(mj.load_model, {
            "path": Arg(world.saved, lambda v: v == world.saved()), "network": Arg(None, lambda v: v is None), "likelihood": Arg(None, lambda v: v is None),
        }),
        "OneVsRest.predict": Call(rest.predict, {"data": of(mj.TaskData, classes, same_shape, "weights")}),
        **{f"OneVsRest.{name}": Call(getattr(rest, name), {"data": of(mj.TaskData, classes, same_shape, "weights"), "per_task": Arg(False, flag)})
           for name in ("error_rate", "confusion", "scores")},
        "OneVsRest.decision_function": Call(rest.decision_function, {"data": of(mj.TaskData, classes, same_shape, "weights")}),
        "OneVsRest.predict_proba": Call(rest.replace(loss=mj.losses.Logistic()).predict_proba, {"data": of(mj.TaskData, classes, same_shape, "weights")}),
        "OneVsRest.weights_for": Call(rest.weights_for, {"data": of(mj.TaskData, classes, same_shape, "weights")}),
        **{f"MulticlassModel.{name}": Call(getattr(world.class_model(), name), asked) for name in ("predict", "decision_function", "predict_proba")},
        **{f"NetworkModel.{name}": Call(getattr(world.network_model(), name), asked) for name in ("predict", "predict_proba")},
        "Prediction.seen": Call(world.prediction().seen, {"samples": Arg(3, count(1))}),
        "FedAvg.predict": Call(fedavg.predict, predict | {"state": Arg(world.trained, lambda v: v is world.trained())}),
        "FedAvg.scores": Call(fedavg.scores, {"state": Arg(world.trained, lambda v: v is world.trained()), "problem": of(mj.Prediction, world.prediction())}),
        "Virtual.predict": Call(virtual.predict, predict | {"state": Arg(world.refined, lambda v: v is world.refined()), "key": Arg(world.key(), optional(key))}),
        "systems.Work.budget": Call(mj.systems.Work(jnp.arange(3), jnp.ones(3, bool)).budget, {"request": Arg(np.array([1, 2, 3]), reals(3, whole=True))}),
        "Path.__getitem__": Call(path.__getitem__, {
            "i": Arg(1, either(number(-2, 1, shapes=[()], whole=True), lambda v: isinstance(v, slice)), ("number",)),
        }),
    }  # fmt: skip


def measures():
    data, scored = (
        world.data(),
        {
            "weights": weights_arg(),
            "data": of(mj.TaskData, world.data(), same_shape, "weights"),
            "per_task": Arg(False, flag),
        },
    )
    problem, start, unit = problem_arg(), number(above=0), number(0, 1)
    omega = Arg(None, lambda v: v is None)
    rule = {
        "sigma_prime": Arg("per_task", word("lemma9", "per_task", "spectral")),
        "gamma": Arg(0.5, number(above=0, high=1, shapes=[()])),
    }
    return {
        **{f"metrics.{name}": Call(getattr(metrics, name), scored) for name in (
            "error_rate", "balanced_error", "f1", "log_loss", "auc", "average_precision", "rmse", "r2", "explained_variance",
        )},
        "metrics.ndcg": Call(metrics.ndcg, scored | {"top": Arg(2, optional(count(1)))}),
        "metrics.poisson_deviance": Call(metrics.poisson_deviance, scored | {"data": of(mj.TaskData, world.classes(), lambda d: same_shape(d) and bool((d.y >= 0).all()), "weights")}),
        "metrics.mean_loss": Call(metrics.mean_loss, scored | {"loss": of(mj.losses.Loss, mj.losses.Hinge())}),
        "metrics.absolute_error": Call(metrics.absolute_error, scored | {"loss": Arg(mj.losses.Hinge(), optional(instance(mj.losses.Loss)))}),
        "metrics.quadratic_kappa": Call(metrics.quadratic_kappa, scored | {"loss": of(mj.losses.Loss, mj.losses.Hinge())}),
        **{f"multiclass.{name}": Call(getattr(mj.multiclass, name), {
            "weights": Arg(np.ones((2, world.M, world.D)), one_each(2 if name != "error_rate" else 1)),
            "data": of(mj.TaskData, world.classes(), same_shape, "weights"), "per_task": Arg(False, flag),
        }) for name in ("error_rate", "log_loss", "confusion", "class_scores")},
        "multiclass.by_pair": Call(mj.multiclass.by_pair, {
            "data": of(mj.TaskData, world.classes(), lambda value: True, "labels"), "classes": Arg(2, count(2)),
        }),
        "multiclass.weights_of_classes": Call(mj.multiclass.weights_of_classes, {
            "weights": Arg(np.ones((3, 4)), reals(None, None, least=1)), "classes": Arg(2, lambda v: count(2)(v) and 4 % v == 0),
        }),
        "multiclass.pair_model": Call(mj.multiclass.pair_model, {
            "solution": of(mj.Solution, world.paired), "data": of(mj.TaskData, world.classes(), same_shape, "solution"),
        }),
        "multiclass.by_threshold": Call(mj.multiclass.by_threshold, {
            "data": of(mj.TaskData, world.classes(), lambda value: True, "labels"), "levels": Arg(2, count(2)), "size": Arg(1.0, POSITIVE),
        }),
        "multiclass.thresholds_of": Call(mj.multiclass.thresholds_of, {
            "weights": Arg(np.ones((3, 4)), reals(None, None, finite=True)), "levels": Arg(3, lambda v: count(2)(v) and v <= 4), "size": Arg(1.0, POSITIVE),
        }),
        "features.landmarks": Call(mj.features.landmarks, {
            "data": of(mj.TaskData, world.data()), "count": Arg(2, optional(lambda v: count(1)(v) and v <= 12)), "key": Arg(world.key(), optional(key)),
        }),
        "features.transform": Call(mj.features.transform, {
            "data": of(mj.TaskData, world.data()), "feature_map": Arg(jnp.square, function), "intercept": Arg(False, either(flag, number(0, shapes=[()]))),
        }),
        "metrics.predicted": Call(metrics.predicted, {"weights": weights_arg(), "data": scored["data"]}),
        "metrics.mean_over_tasks": Call(metrics.mean_over_tasks, {"values": Arg(np.ones((3, 4)), reals(3, 4)), "data": of(mj.TaskData, data, same_shape, "values"), "per_task": Arg(False, flag)}),
        "theory.sigma": Call(theory.sigma, {"problem": problem, "relation": omega, "tol": Arg(0.5, POSITIVE)}),
        "theory.rate": Call(theory.rate, {"problem": problem, "relation": omega} | rule),
        "theory.assumption2": Call(theory.assumption2, {"theta": Arg(np.array([[1.0, 0.5], [0.25, 0.5]]), reals(None, None, low=0, high=1, least=1))}),
        "theory.dual_bound": Call(theory.dual_bound, {
            "start": Arg(2.0, number(0)), "rounds": Arg(3, number(0)), "s": Arg(0.5, unit), "theta_bar": Arg(0.5, unit), "gamma": Arg(0.5, number(above=0, high=1)),
        }),
        "theory.gap_bound": Call(theory.gap_bound, {
            "start": Arg(2.0, number(0)), "rounds": Arg(3, number(0)), "s": Arg(0.5, unit), "theta_bar": Arg(0.5, unit), "gamma": Arg(0.5, number(above=0, high=1)),
        }),
        "theory.lemma5": Call(theory.lemma5, rule | {
            "problem": problem_arg(None, "beta"), "beta": Arg(np.zeros((world.M, world.N)), reals(world.M, world.N)), "s": Arg(0.5, UNIT),
            "theta_bar": Arg(0.5, number(0, 1, shapes=[(), (world.M,)])), "relation": omega,
        }),
        "theory.lemma7": Call(theory.lemma7, {"problem": problem, "relation": omega}),
        "theory.theorem1": Call(theory.theorem1, {
            "start": Arg(2.0, number(0)), "tol": Arg(0.5, start), "s": Arg(0.5, unit), "theta_bar": Arg(0.5, unit), "gamma": Arg(0.5, number(above=0, high=1)),
        }),
        "theory.theorem2": Call(theory.theorem2, rule | {
            "problem": problem, "start": Arg(2.0, number(0)), "tol": Arg(0.5, start), "theta_bar": Arg(0.5, unit), "relation": omega,
        }),
        "theory.corollary8": Call(theory.corollary8, {"p": Arg(np.full((5, 2), 0.5), reals(None, None, low=0, high=1, least=4, finite=True)), "theta_hat": Arg(0.5, number(0, 1))}),
        "theory.lemma4": Call(theory.lemma4, {
            "problem": problem, "algorithm": of(mj.Mocha, world.safe()), "before": Arg(world.before, lambda v: v is world.before()), "after": Arg(world.after, lambda v: v is world.after() or v is world.before()),
        }),
    }  # fmt: skip


def spectra():
    matrix, square, values = (
        Arg(world.weights(), reals(None, None)),
        Arg(np.eye(3), lambda v: reals(None, None)(v) and len(set(np.shape(v))) == 1),
        Arg(np.array([4.0, 2.0, 1.0]), reals(None, least=1)),
    )
    mapped = {"fn": Arg(world.shrink, function), "w": matrix, "params": Arg(0.5, anything)}
    return {
        "spectral.safe_sqrt": Call(spectral.safe_sqrt, {"x": Arg(np.ones(3), any_numbers)}),
        "spectral.thin_svd": Call(spectral.thin_svd, {"w": matrix}),
        "spectral.singular_values": Call(spectral.singular_values, {"w": matrix}),
        "spectral.spectral_map": Call(lambda fn, w, params: spectral.spectral_map(fn, w, params), mapped),
        "spectral.left_spectral_map": Call(lambda fn, w, params: spectral.left_spectral_map(fn, w, params), mapped | {"w": Arg(world.weights().T, reals(None, None))}),
        "spectral.matrix_sqrt": Call(spectral.matrix_sqrt, {"a": square}),
        "spectral.water_fill": Call(spectral.water_fill, {"s": values, "floor": Arg(0.25, number(0, infinite=True, shapes=[()])), "total": Arg(2.0, number(0, infinite=True, shapes=[()]))}),
        "coupling.as_matrix": Call(coupling.as_matrix, {"coupling": of(coupling.Coupling, coupling.Dense(jnp.eye(3)))}),
        "coupling.correlation": Call(coupling.correlation, {"covariance": square}),
    }  # fmt: skip


def made_data():
    w, sizes = weights_arg(), Arg(np.array([3, 4, 5]), reals(3, whole=True, low=1, high=2**31 - 1))
    w = Arg(world.weights(), reals(3, None, finite=True, least=1), ("sizes",))
    m = Arg(4, count(1))
    return {
        "datasets.clusters": Call(datasets.clusters, {"num_tasks": m, "num_clusters": Arg(2, lambda v: count(1)(v) and v <= 4), "within": Arg(0.5, number(0, below=1, shapes=[()])), "across": Arg(0.25, number(-1, 1, shapes=[()]), ("covariance",))}),
        "datasets.low_rank": Call(datasets.low_rank, {"key": key_arg(), "num_tasks": m, "rank": Arg(2, count(1)), "noise": Arg(0.5, UNIT)}),
        "datasets.sparse_graph": Call(datasets.sparse_graph, {"key": key_arg(), "num_tasks": m, "degree": Arg(2.0, SCALE), "strength": Arg(2.0, SCALE)}),
        "datasets.sample_weights": Call(datasets.sample_weights, {"key": key_arg(), "covariance": Arg(np.eye(3), covariance(None)), "num_features": Arg(2, count(1))}),
        "datasets.skewed_sizes": Call(datasets.skewed_sizes, {"key": key_arg(), "num_tasks": m, "smallest": Arg(2, lambda v: count(1)(v) and v <= 4), "largest": Arg(4, count(2))}),
        "datasets.classification": Call(datasets.classification, {"key": key_arg(), "weights": w, "sizes": sizes, "label_noise": Arg(0.5, UNIT), "loss_scaling": Arg("sum", word("sum", "task_mean"))}),
        "datasets.regression": Call(datasets.regression, {"key": key_arg(), "weights": w, "sizes": sizes, "noise": Arg(0.5, SCALE), "loss_scaling": Arg("sum", word("sum", "task_mean"))}),
        "datasets.federation": Call(datasets.federation, {
            "key": key_arg(), "num_tasks": Arg(3, count(1), ("covariance",)), "num_features": Arg(2, count(1)), "covariance": Arg(np.eye(3), optional(covariance(3))),
            "smallest": Arg(2, lambda v: count(1)(v) and v <= 4), "largest": Arg(4, count(2)), "label_noise": Arg(0.5, UNIT),
        }),
    }  # fmt: skip


def dealt():
    labels = np.array([0, 1, 0, 1, 2, 2, 0, 1])
    deal = {"key": key_arg(), "clients": Arg(2, lambda v: count(1)(v) and v <= 8)}
    row = np.ndarray | jax.Array | list | tuple | range | collections.deque

    def labelling(value):
        return isinstance(value, row) and np.asarray(value).ndim == 1 and len(value) >= 2

    named = Arg(labels, labelling, ("label", "labels", "samples"))
    total = Arg(8, count(2), ("samples",))
    least = Arg(1, lambda v: count(1)(v) and v <= 4)
    return {
        "partition.iid": Call(partition.iid, deal | {"count": total}),
        "partition.shards": Call(
            partition.shards, deal | {"labels": named, "per_client": Arg(2, lambda v: count(1)(v) and v <= 4)}
        ),
        "partition.dirichlet": Call(
            partition.dirichlet, deal | {"labels": named, "alpha": Arg(0.5, POSITIVE), "least": least}
        ),
        "partition.quantity": Call(
            partition.quantity, deal | {"count": total, "sigma": Arg(0.5, SCALE), "least": least}
        ),
        "partition.by_group": Call(
            partition.by_group,
            {"groups": Arg(labels, lambda v: labelling([*v, 0]) and isinstance(v, row), ("label", "labels"))},
        ),
        "partition.permuted": Call(
            partition.permuted,
            {
                "key": key_arg(),
                "xs": Arg(world.xs(), lambda v: v is world.xs() or reals(None, None, None)(v), ("samples",)),
            },
        ),
    }


def pictures():
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    axes = of(Axes, Figure().subplots(1, 1))
    title = Arg("", lambda v: isinstance(v, str))
    histories = Arg(
        world.histories, lambda v: isinstance(v, dict) and all(isinstance(h, mj.History) for h in v.values())
    )
    square = Arg(np.eye(3), lambda v: reals(None, None, least=1)(v) and len(set(np.shape(v))) == 1)
    return {
        "plotting.compare": Call(plotting.compare, {
            "methods": Arg({"one": np.arange(3.0), "two": np.ones(3)}, either(instance(mj.metrics.Comparison), lambda v: isinstance(v, dict) and len(v) > 0 and all(np.ndim(one) in (1, 2) for one in v.values()))), "score": title, "title": title,
        }),
        "plotting.convergence": Call(plotting.convergence, {"axes": axes, "histories": histories, "against": Arg("round", word("round", "simulated_time"))}),
        "plotting.similarity": Call(plotting.similarity, {"axes": axes, "weights": Arg(world.weights(), reals(None, None, least=1)), "title": title}),
        "plotting.label_distribution": Call(plotting.label_distribution, {"axes": axes, "data": of(mj.TaskData, world.data()), "title": title}),
        "plotting.overview": Call(plotting.overview, {"histories": histories, "weights": Arg({"one": world.weights()}, lambda v: isinstance(v, dict) and all(reals(None, None)(w) for w in v.values()))}),
        "plotting.tuning": Call(plotting.tuning, {"tuned": of(mj.Tuned, world.tuned)}),
        "plotting.cluster_order": Call(plotting.cluster_order, {"correlation": square}),
        "plotting.relationship": Call(plotting.relationship, {"solution": of(mj.Solution, world.solution), "title": title}),
        "costs.wifi": Call(costs.wifi, {"flops_per_second": Arg(2.0, number(above=0))}),
        "costs.lte": Call(costs.lte, {"flops_per_second": Arg(2.0, number(above=0))}),
        "costs.cellular_3g": Call(costs.cellular_3g, {"flops_per_second": Arg(2.0, number(above=0))}),
        "costs.relative": Call(costs.relative, {"ratio": Arg(2.0, number(above=0))}),
    }  # fmt: skip
