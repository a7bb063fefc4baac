"""Right calls of the constructors."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mocha_jax as mj
from mocha_jax import networks
from tests.bad_calls import world
from tests.bad_calls.kinds import (
    any_numbers,
    anything,
    as_real,
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

MATRICES = "omega", "table", "groups", "of", "cost", "length"
POSITIVE, UNIT = number(above=0), number(0, 1)


def sequence(least, *, size=None, also=lambda value: False):
    """A tuple or list of whole numbers."""

    def allows(value):
        if also(value):
            return True
        known = (
            isinstance(value, tuple | list | collections.deque | np.ndarray | jax.Array | range) and np.ndim(value) == 1
        )
        return known and size in (None, len(value)) and all(count(least)(one) for one in value)

    return allows


def differing(value):
    """Some names, no two of them the same."""
    return isinstance(value, list | tuple) and len(set(value)) == len(value)


def rising(value):
    """Finite numbers, none below the one before."""
    known = isinstance(value, tuple | list | collections.deque | np.ndarray | jax.Array | range) and np.ndim(value) in (
        1,
        2,
    )
    array = as_real(value) if known else None
    return (
        array is not None and array.size > 0 and bool(np.isfinite(array).all() and (np.diff(array, axis=0) >= 0).all())
    )


def each(value):
    """A likelihood of one label."""
    return isinstance(value, mj.likelihoods.Likelihood) and not isinstance(value, mj.likelihoods.Positions)


def optimizer(value):
    return isinstance(value, optax.GradientTransformation)


def constructors():
    r, s, losses, c = mj.regularizers, mj.systems, mj.losses, mj.coupling
    dual = {
        "omega_every": Arg((2, 3), optional(either(count(1), lambda v: sequence(1)(v) and len(v) > 0))),
        "smoothing": Arg(0.5, number(0)), "initial_omega": Arg(np.eye(3) / 3, optional(covariance(None))),
    }  # fmt: skip
    subproblem = dual | {
        "sigma_prime": Arg("per_task", word("lemma9", "per_task", "spectral")),
        "gamma": Arg(0.5, number(above=0, high=1)),
        "server": Arg("dual", optional(word("dual", "proximal"))),
        "backend": Arg("xla", word("auto", "xla", "pallas")),
    }
    batch = {"batch": Arg(2, number(1, below=2**31, whole=True)), "limit": Arg(3, optional(count(2)))}
    trainer = {
        "client_optimizer": Arg(optax.sgd(0.5), optimizer),
        "local_epochs": Arg(1, count(1)),
        "batch_size": Arg(2, optional(count(1))),
        "rate": Arg(0.5, number(0, shapes=[()])),
        "seed": Arg(3, number(0, below=2**31, whole=True)),
        "at_once": Arg(2, optional(count(1))),
    }
    model = {"model": Arg(world.network(), instance(networks.Network))}
    level = Arg(mj.privacy.ExampleLevel(1.0, 5), optional(instance(mj.privacy.ExampleLevel)))
    return {
        "Names": Call(mj.Names, {name: Arg(("a", "b"), optional(differing)) for name in ("tasks", "features", "classes")}),
        "LinearModel": Call(mj.LinearModel, {
            "weights": Arg(np.ones((3, 2)), reals(3, None, finite=True)), "intercept": Arg(np.zeros(3), reals(3, finite=True)),
            "names": Arg(mj.Names(), instance(mj.Names)), "decides": Arg((), lambda v: not len(v) or len(v) == 3 and set(v) <= {"value", "sign", "level"}),
            "logistic": Arg(False, flag),
        }),
        "MulticlassModel": Call(mj.MulticlassModel, {
            "weights": Arg(np.ones((2, 3, 2)), reals(2, 3, None, least=1, finite=True)), "intercept": Arg(np.zeros((2, 3)), reals(2, 3, finite=True)),
            "names": Arg(mj.Names(), instance(mj.Names)), "logistic": Arg(False, flag), "calibration": Arg(np.ones((2, 2)), optional(reals(2, 2, finite=True))),
            "method": Arg("one_vs_rest", word("one_vs_rest", "by_pair")),
        }),
        "NetworkModel": Call(mj.NetworkModel, {
            "network": Arg(world.network(), lambda v: v is world.network()), "parameters": Arg(world.parameters(), lambda v: v is world.parameters()),
            "num_features": Arg(world.D, lambda v: count(1)(v) and v == world.D), "likelihood": Arg(mj.likelihoods.Categorical(), instance(mj.likelihoods.Categorical)),
            "names": Arg(mj.Names(), instance(mj.Names)), "appended": Arg(0.0, lambda v: number(0, shapes=[()])(v) and float(v) == 0.0),
            "scaling": Arg(None, optional(lambda v: False)),
        }),
        "coupling.Diagonal": Call(c.Diagonal, {"scale": Arg(np.ones(3), reals(None, least=1))}),
        "coupling.FeatureDiagonal": Call(c.FeatureDiagonal, {"scale": Arg(np.ones(3), reals(None, least=1)), "num_tasks": Arg(3, count(1))}),
        "coupling.Scaled": Call(c.Scaled, {
            "of": Arg(c.Diagonal(jnp.ones(3)), instance(c.Coupling)), "scale": Arg(np.ones(2), reals(None, least=1)),
        }),
        "coupling.Exchangeable": Call(c.Exchangeable, {
            "within": Arg(0.5, any_numbers), "common": Arg(1.0, any_numbers),
            "num_tasks": Arg(3, count(1)),
        }),
        "coupling.Dense": Call(c.Dense, {"matrix": Arg(np.eye(3), lambda v: reals(None, None)(v) and np.shape(v)[0] == np.shape(v)[1])}),
        "coupling.LowRank": Call(c.LowRank, {
            "base": Arg(0.5, any_numbers), "factor": Arg(np.ones((3, 2)), reals(None, None)),
        }),
        "coupling.AboutMean": Call(c.AboutMean, {
            "common": Arg(0.5, any_numbers), "deviations": Arg(c.LowRank(jnp.float32(0.5), jnp.ones((3, 2))), instance(c.LowRank)),
        }),
        "regularizers.MeanCovariance": Call(r.MeanCovariance, {
            "lam0": Arg(0.5, POSITIVE), "lam": Arg(0.5, POSITIVE), "sigma2": Arg(1.0, number(above=0, infinite=True)),
        }),
        "regularizers.Independent": Call(r.Independent, {"lam": Arg(0.5, POSITIVE)}),
        "regularizers.PerFeature": Call(r.PerFeature, {
            "regularizer": Arg(r.Independent(0.5), instance(r.Regularizer, lambda v: not v.learned)), "factor": Arg(np.ones(2), lambda v: reals(None, least=1)(v) and number(above=0)(v)),
        }),
        "regularizers.MeanRegularized": Call(r.MeanRegularized, {"lam1": Arg(0.5, number(0)), "lam2": Arg(0.5, POSITIVE)}),
        "regularizers.Graph": Call(r.Graph, {
            "omega": Arg(np.eye(3), covariance(None)), "lam1": Arg(0.5, number(0)), "lam2": Arg(0.5, POSITIVE),
        }),
        "regularizers.Clustered": Call(r.Clustered, {"lam": Arg(0.5, POSITIVE), "eta": Arg(0.5, POSITIVE), "k": Arg(2.0, POSITIVE)}),
        "regularizers.Probabilistic": Call(r.Probabilistic, {"lam": Arg(0.5, POSITIVE), "sigma2": Arg(1.0, number(above=0, infinite=True))}),
        "regularizers.MatrixNormal": Call(r.MatrixNormal, {
            "lam": Arg(0.5, POSITIVE), "sigma2": Arg(1.0, number(above=0, infinite=True)), "floor": Arg(0.5, POSITIVE),
        }),
        "regularizers.TraceNorm": Call(r.TraceNorm, {"lam": Arg(0.5, POSITIVE), "lam2": Arg(0.5, POSITIVE)}),
        "regularizers.JointSparse": Call(r.JointSparse, {"lam": Arg(0.5, POSITIVE), "lam2": Arg(0.5, POSITIVE)}),
        "regularizers.SparsePrecision": Call(r.SparsePrecision, {
            "lam": Arg(0.5, POSITIVE), "sigma2": Arg(1.0, number(above=0, infinite=True)), "lam1": Arg(0.5, number(0)), "lam2": Arg(0.5, POSITIVE),
        }),
        "losses.SmoothedHinge": Call(losses.SmoothedHinge, {"gamma": Arg(0.5, POSITIVE)}),
        "losses.EpsilonInsensitive": Call(losses.EpsilonInsensitive, {"epsilon": Arg(0.5, number(0))}),
        "losses.Huber": Call(losses.Huber, {"delta": Arg(0.5, POSITIVE)}),
        "losses.Quantile": Call(losses.Quantile, {"tau": Arg(0.5, number(above=0, below=1))}),
        "losses.Ordinal": Call(losses.Ordinal, {"thresholds": Arg([-0.5, 0.5], rising)}),
        "features.GaussianKernel": Call(mj.features.GaussianKernel, {"gamma": Arg(0.5, POSITIVE)}),
        "features.RandomFourier": Call(mj.features.RandomFourier, {
            "key": Arg(world.key(), key), "num_inputs": Arg(3, count(1)), "num_features": Arg(4, lambda v: count(2)(v) and v % 2 == 0),
            "gamma": Arg(0.5, number(above=0, shapes=[()])),
        }),
        "features.Nystroem": Call(mj.features.Nystroem, {
            "kernel": Arg(mj.features.GaussianKernel(0.5), callable), "landmarks": Arg(np.ones((2, 3), np.float32), reals(None, None)),
        }),
        "features.Body": Call(mj.features.Body, {
            "network": Arg(networks.MLP(3, 2), instance(networks.Network)),
            "params": Arg(networks.MLP(3, 2).init(world.key()), lambda v: v is None),
        }),
        "losses.PerTask": Call(losses.PerTask, {
            "losses": Arg([losses.Hinge(), losses.Huber(0.5)], either(
                lambda v: isinstance(v, list | tuple) and len(v) == 2 and all(isinstance(one, losses.Loss) for one in v),
            )),
            "which": Arg([0, 1, 0], optional(reals(None, low=0, high=1, whole=True, least=1))),
        }),
        "likelihoods.Gaussian": Call(mj.likelihoods.Gaussian, {"noise": Arg(0.5, number(above=0, shapes=[()]))}),
        "likelihoods.Sequence": Call(mj.likelihoods.Sequence, {"each": Arg(mj.likelihoods.Categorical(), each)}),
        "likelihoods.NextSymbol": Call(mj.likelihoods.NextSymbol, {"each": Arg(mj.likelihoods.Categorical(), each)}),
        "networks.LSTM": Call(networks.LSTM, {
            "vocabulary": Arg(5, count(1)), "embedding": Arg(2, count(1)), "hidden": Arg(3, count(1)), "layers": Arg(2, count(1)),
            "outputs": Arg(4, optional(count(1))),
        }),
        "networks.MLP": Call(networks.MLP, {
            "features": Arg(2, count(1)), "outputs": Arg(3, count(1)), "hidden": Arg((4,), sequence(1)),
            "dropout": Arg(0.5, number(0, below=1, shapes=[()])),
        }),
        "networks.Lateral": Call(networks.Lateral, {
            "features": Arg(2, count(1)), "outputs": Arg(3, count(1)),
            "hidden": Arg((4,), lambda value: sequence(1)(value) and len(value) > 0), "dropout": Arg(0.5, number(0, below=1, shapes=[()])),
        }),
        "networks.CNN": Call(networks.CNN, {
            "shape": Arg((8, 8, 1), lambda v: sequence(1, size=3)(v) and min(v[:2]) >= 4), "outputs": Arg(3, count(1)),
            "channels": Arg((2, 3), sequence(1, size=2)), "hidden": Arg(4, count(1)),
        }),
        "networks.LateralCNN": Call(networks.LateralCNN, {
            "shape": Arg((8, 8, 1), lambda v: sequence(1, size=3)(v) and min(v[:2]) >= 4), "outputs": Arg(3, count(1)),
            "channels": Arg((2, 3), sequence(1, size=2)), "hidden": Arg(4, count(1)),
        }),
        "networks.Model": Call(networks.Model, {
            "initialise": Arg(lambda key: jnp.ones((2, 2)), function), "predict": Arg(lambda w, x: x @ w, function), "stochastic": Arg(False, flag),
        }),
        "costs.Cost": Call(mj.costs.Cost, {
            **{name: Arg(2.0, POSITIVE) for name in ("flops_per_second", "download", "upload", "bytes_per_number")},
            **{name: Arg(0.5, number(0)) for name in ("latency", "cycle", "server")},
        }),
        "systems.Dropout": Call(s.Dropout, {"p": Arg(0.5, UNIT)}),
        "systems.Outages": Call(s.Outages, {
            "p": Arg(0.5, UNIT), "groups": Arg(np.array([0, 0, 1]), optional(number(0, below=2**31, whole=True))), "length": Arg(2, count(1)),
        }),
        "systems.NeverAnswers": Call(s.NeverAnswers, {"nodes": Arg((1,), sequence(0, also=count(0)))}),
        "systems.Sampled": Call(s.Sampled, {"fraction": Arg(0.5, number(above=0, high=1))}),
        "systems.Trace": Call(s.Trace, {"table": Arg(np.array([[1, 0, 1]]), reals(None, None, finite=True, flags=True, least=1))}),
        "systems.DayNight": Call(s.DayNight, {"period": Arg(24.0, POSITIVE), "share": Arg(0.5, UNIT), "phase": Arg(0.5, optional(UNIT))}),
        "systems.PartialEpochs": Call(s.PartialEpochs, {"low": Arg(0.25, number(0, 0.5)), "high": Arg(0.5, number(0.25, 1))}),
        "systems.UniformBudget": Call(s.UniformBudget, {
            "low": Arg(0.25, number(0, 0.5)), "high": Arg(0.5, number(0.25, 1)), "of": Arg("own", word("own", "smallest")),
        }),
        "systems.Controller": Call(s.Controller, {"cost": Arg(mj.costs.lte(), instance(mj.costs.Cost)), "epoch_theta": Arg(0.5, number(above=0, below=1))}),
        "systems.Deadline": Call(s.Deadline, {"seconds": Arg(2.0, POSITIVE), "cost": Arg(mj.costs.lte(), instance(mj.costs.Cost))}),
        "systems.Both": Call(s.Both, {
            "first": Arg(s.Full(), instance(s.System), ("the left side",)), "second": Arg(s.Full(), instance(s.System), ("the right side",)),
        }),
        "systems.Work": Call(s.Work, {
            "steps": Arg(np.array([1, 2, 3]), reals(3, whole=True, low=0), ("active",)), "active": Arg(np.array([True, False, True]), marks(3)),
        }),
        "Watch": Call(mj.Watch, {"theta": Arg(0.5, optional(number(above=0, shapes=[()])))}),
        "Implicit": Call(mj.Implicit, {
            "tol": Arg(0.5, optional(number(above=0, shapes=[()]))), "max_steps": Arg(3, count(1)), "worst": Arg(0.5, number(above=0, shapes=[()])),
        }),
        "Unrolled": Call(mj.Unrolled, {"checkpoint": Arg(True, flag)}),
        "Mocha": Call(mj.Mocha, subproblem | {
            "local_epochs": Arg(1.0, number(above=0, shapes=[()])), "memory": Arg(3, count(1)),
            "sigma_prime": Arg("adaptive", word("lemma9", "per_task", "spectral", "adaptive")),
        }),
        "Averaged": Call(mj.Averaged, {
            "algorithm": Arg(mj.algorithm1(), instance(mj.DualMethod)), "after": Arg(3, number(0)),
        }),
        "algorithm1": Call(mj.algorithm1, {
            "local_epochs": Arg(1.0, number(above=0, shapes=[()])), "sigma_prime": Arg("lemma9", word("lemma9", "per_task", "spectral")),
            "gamma": subproblem["gamma"], "omega_every": dual["omega_every"],
            "initial_omega": dual["initial_omega"],
        }),
        "Cocoa": Call(mj.Cocoa, subproblem | {
            "theta": Arg(0.5, number(0, below=1)), "max_epochs": Arg(3, lambda v: count(1)(v) or (isinstance(v, int | np.integer) and not isinstance(v, bool) and bool(v > 0))),
        }),
        "MiniBatchSdca": Call(mj.MiniBatchSdca, dual | batch | {"beta": Arg(2.0, number(1))}),
        "MiniBatchSgd": Call(mj.MiniBatchSgd, {k: v for k, v in dual.items() if k != "initial_omega"} | batch | {
            "step_size": Arg(0.5, POSITIVE), "power": Arg(0.5, number(0)), "horizon": Arg(1.0, POSITIVE),
        }),
        "Newton": Call(mj.Newton, {}),
        "InteriorPoint": Call(mj.InteriorPoint, {}),
        "FedAvg": Call(mj.FedAvg, model | trainer | {
            "server_optimizer": Arg(optax.sgd(1.0), optimizer), "fraction": Arg(0.5, number(0, 1, shapes=[()])),
            "proximal": Arg(0.5, optional(number(0, shapes=[()]))), "privacy": level,
        }),
        "Local": Call(mj.Local, model | trainer | {"privacy": level}),
        "Virtual": Call(mj.Virtual, model | trainer | {
            "prior_scale": Arg(0.5, number(above=0, shapes=[()])), "first_scale": Arg(0.5, number(above=0, shapes=[()])),
            "temperature": Arg(0.5, number(0, shapes=[()])), "samples": Arg(2, count(1)), "noise": Arg("local", word("shared", "flipout", "local")),
            "parallel": Arg(False, flag), "damping": Arg(0.5, optional(number(above=0, high=1))), "sent": Arg(0.5, number(above=0, high=1, shapes=[()])),
            "order": Arg((0, 1), lambda v: v is None or word("random")(v) or (sequence(0)(v) and len(v) > 0)), "prior": Arg("each", word("once", "each")),
            "factors": Arg("start", word("prior", "start")), "draws": Arg(2, count(1)),
        }),
        "Problem": Call(mj.Problem, {
            "data": Arg(world.data(), instance(mj.TaskData)), "loss": Arg(mj.losses.Hinge(), instance(mj.losses.Loss)),
            "regularizer": Arg(mj.regularizers.Independent(0.5), instance(mj.regularizers.Regularizer)),
        }),
        "Prediction": Call(mj.Prediction, {
            "data": Arg(world.classes(), instance(mj.TaskData, lambda d: d.num_features == 2 and np.asarray(d.y).min() >= 0), ("labels",)),
            "likelihood": Arg(mj.likelihoods.Categorical(), instance(mj.likelihoods.Likelihood)),
            "test": Arg(world.classes(), optional(instance(mj.TaskData, lambda d: np.asarray(d.y).min() >= 0)), ("labels",)),
        }),
        "TaskData": Call(mj.TaskData, task_data()),
    }  # fmt: skip


def task_data():
    x, y = np.stack(world.xs()), np.stack(world.ys())
    m, n, d = x.shape
    return {
        "x": Arg(x, reals(m, n, None, finite=True), ("y",)),
        "y": Arg(y, reals(m, n, finite=True)),
        "weight": Arg(np.ones((m, n)), reals(m, n, finite=True, low=0)),
        "task": Arg(np.arange(m), reals(m, whole=True, low=0, high=m - 1)),
        "num_tasks": Arg(3, either(count(3), lambda v: type(v) is int and v == -1)),
        "shared": Arg(False, flag),
        "loss_scaling": Arg("sum", word("sum", "task_mean")),
        "layout": Arg(None, anything),
        "sharding": Arg(None, optional(lambda v: False)),
    }


def in_use():
    """The same numbers where they are used: then their shape matters too."""
    data, loss, r = world.data(), mj.losses.Hinge(), mj.regularizers
    labels = data.replace(y=data.y / 2)

    def with_loss(make):
        return lambda **given: mj.objective(
            mj.Problem(labels if not make.binary else data, make(**given), r.Independent(0.5)), world.weights()
        )

    def with_regularizer(make):
        return lambda **given: mj.objective(mj.Problem(data, loss, make(**given)), world.weights())

    def at_work(make):
        return lambda **given: make(**given).work(world.key(), data, world.request())

    one, some = [()], [(), (3,)]
    shapes = {
        "losses.SmoothedHinge": one, "losses.EpsilonInsensitive": one, "losses.Huber": one, "losses.Quantile": one,
        "regularizers.Independent": some, "regularizers.MeanRegularized": one, "regularizers.Graph": one,
        "regularizers.Clustered": one, "regularizers.Probabilistic": one, "regularizers.SparsePrecision": one,
        "regularizers.TraceNorm": one, "regularizers.JointSparse": one, "regularizers.MeanCovariance": one,
        "systems.Dropout": None, "systems.Sampled": one, "systems.DayNight": some, "systems.PartialEpochs": some,
        "systems.UniformBudget": some, "systems.Deadline": some, "systems.Controller": some, "systems.Outages": some, "systems.Trace": None,
    }  # fmt: skip
    tiny, huge = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

    def narrow(kind, shapes, cast):
        def allows(value):
            size = None if value is None or isinstance(value, jax.ShapeDtypeStruct) else as_real(value)
            if size is None or not kind(value):
                return value is None and kind(value)
            size = np.abs(size)
            fits = shapes is None or size.shape in shapes
            return fits and (not cast or bool(((size == 0) | (size >= tiny) & (size <= huge) | np.isinf(size)).all()))

        return allows

    found = {}
    for name, call in constructors().items():
        if name in shapes:
            use = with_loss if name.startswith("losses") else with_regularizer if name.startswith("reg") else at_work
            args = {
                k: a if k in MATRICES else Arg(a.valid, narrow(a.kind, shapes[name], not name.startswith("systems")))
                for k, a in call.args.items()
            }
            found[f"{name} in use"] = Call(use(call.function), args)
    return found
