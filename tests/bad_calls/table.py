"""All right calls by name, and what of the public surface has none, with the reason."""

import functools
import importlib.util
import inspect
import types

import mocha_jax as mj

MODULES = (
    "", "callbacks", "compression", "coupling", "costs", "datasets", "features", "federated", "likelihoods", "losses", "metrics", "multiclass", "networks", "partition", "personalized", "plotting", "privacy", "regularizers", "robust",
    "servers", "sklearn", "spectral", "systems", "theory", *(["flower"] if importlib.util.find_spec("flwr") else []),
)  # fmt: skip

# What algorithms and models are made of. Drivers call their methods inside compiled programs, with arrays of their own.
CONTRACTS = (
    mj.Algorithm, mj.Adjoint, mj.losses.Loss, mj.regularizers.Regularizer, mj.coupling.Coupling, mj.coupling.Operator, mj.coupling.Curvature, mj.coupling.OwnSystems, mj.likelihoods.Likelihood, mj.likelihoods.Positions,
    mj.robust.Rule, mj.robust.Attack, mj.networks.Network, mj.systems.System, mj.systems.Channel, mj.federated.NodeSide, mj.federated.ServerSide, mj.compression.Sending, mj.compression.Difference, mj.Trainer, mj.DualMethod, mj.servers.Aggregator, mj.Federated, mj.Quality,
    mj.features.FeatureMap, mj.regularizers.OptimalityConditions, mj.losses.MarginLoss, mj.losses.ResidualLoss, mj.regularizers.Learned, mj.regularizers.TraceLimited, mj.regularizers.Spectral,
)  # fmt: skip

# What the library makes and hands out.
RESULTS = {
    "Hypergradient", "Info", "CheckpointError", "NotConverged", "CrossValidation", "MochaState", "servers.AdaptiveState", "servers.DualState", "servers.ProximalState", "servers.ServerState", "GraphicalLasso", "History", "OneVsRest", "metrics.OverTasks", "metrics.Comparison", "multiclass.ClassScores",
    "datasets.Users", "datasets.Table", "flower.Served", "networks.LSTMLayer",
    "Evaluation", "NodeUpdate", "State", "Certificate", "Path", "Solution", "Status", "Tuned", "datasets.Federation", "networks.Layer",
    "federated.ChannelState", "federated.Down", "federated.Header", "federated.FederationState", "federated.Message", "federated.ReceivedAnswers", "federated.Refused", "federated.Report", "federated.Sides", "federated.Training", "federated.Up", "systems.Fate",
    "networks.SplitParameters", "privacy.PrivateSdcaState", "losses.Piece", "privacy.Release", "privacy.Perturbed", "networks.MixtureParameters", "networks.LateralLayer", "coupling.Parts", "coupling.Parts.together", "systems.Request", "theory.Assumption2", "theory.Corollary8", "theory.Lemma5",
}  # fmt: skip

# What such results and data compute with inside compiled programs, layers of networks; and constructors once more.
PARTS = {
    "Pytree.replace", "Pytree.exchange", "Names.replace", "Names.task", "LinearModel.save", "MulticlassModel.save", "NetworkModel.save", "servers.AdaptiveServer", "servers.DualServer", "servers.DualServer.update_model", "servers.ProximalServer", "coupling.LowRank.energy", "coupling.LowRank.largest", "coupling.AboutMean.energy", "coupling.FeatureDiagonal.energy", "Certificate.with_bound",
    "Problem.aim", "personalized.own_model", "personalized.same_model", "privacy.ExampleLevel.left", "privacy.ExampleLevel.of", "privacy.ExampleLevel.noise_of", "Implicit.differentiable", *(f"privacy.PrivateSdca.{name}" for name in ("model", "planned_steps", "published", "sampling", "taken", "updated")), *(f"FedAvg.{name}" for name in ("answer", "first_state", "heard", "inputs")), *(f"Virtual.{name}" for name in ("first_state", "inputs", "refine", "whole")), *(f"compression.{form}.{name}" for form in ("Sending", "Difference", "Quantized", "Stochastic", "TopK", "RandomK", "Rotated") for name in ("encode", "decode", "compress", "expand")),
    "SubproblemMethod.improve", "Mocha.improve", "Cocoa.improve", "SubproblemMethod.laid_out", "servers.AdaptiveServer.blank", "servers.AdaptiveServer.followed", "servers.AdaptiveServer.weigh", "federated.Server.weights", "federated.Server.relation", "federated.Server.omega", "federated.register", "SubproblemMethod.subproblems", "static", "systems.per_node", "coupling.Dense.conjugate_bound", "spectral.contract", "spectral.Contracted", "regularizers.MatrixNormal.curvature_of", "regularizers.MatrixNormal.fit_eigenvalues", *(f"TaskData.{name}" for name in (
        "to_nodes", "to_tasks", "replicated", "constrain_tasks", "pad_settings", "predictions", "node_predictions",
        "node_vectors", "dual_vectors", "weighted", "weighted_sums", "map_rows", "map_samples", "renewed", "sum_over_rows", "with_features_scaled",
    )),
}  # fmt: skip


@functools.cache
def calls():
    """A right call of everything that takes an argument of a person."""
    from tests.bad_calls import compression, estimators, federations, functions, personalized, privacy, records, robust

    found = records.constructors() | records.in_use() | functions.functions()
    found |= (
        estimators.estimators()
        | federations.federations()
        | personalized.methods()
        | privacy.calls()
        | robust.calls()
        | compression.calls()
    )
    if "flower" in MODULES:
        from tests.bad_calls import deployments

        found |= deployments.deployments()
    return found


@functools.cache
def public():
    """Every public function, constructor and method of the package, by name."""
    found, seen = {}, set()
    for module_name in MODULES:
        module = getattr(mj, module_name) if module_name else mj
        names = (
            module.__all__ if module_name in ("", "flower") else list(vars(module))
        )  # those that are imported late too
        for name in names:
            thing = getattr(module, name)
            home = str(getattr(thing, "__module__", ""))
            ours = home.startswith(module.__name__) or (module_name == "systems" and home == "mocha_jax.systems._base")
            if name.startswith("_") or isinstance(thing, types.ModuleType) or not callable(thing) or not ours:
                continue
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            label = f"{module_name}.{name}".lstrip(".")
            found[label] = thing
            if inspect.isclass(thing):
                found |= {
                    f"{label}.{k}": v for k, v in vars(thing).items() if inspect.isfunction(v) and _by_a_person(k)
                }
    return found


def _by_a_person(method):
    return not method.startswith("_") or method == "__getitem__"


def without(name):
    """Why something public has no right call here, or None."""
    thing = public()[name]
    owner = public().get(name.rpartition(".")[0])
    if name in RESULTS:
        return "made by the library"
    if name in PARTS:
        return "works on the arrays of a compiled program"
    if inspect.isclass(thing) and (inspect.isabstract(thing) or thing in (*CONTRACTS, mj.Pytree)):
        return "abstract"
    if inspect.isclass(owner) and any(issubclass(owner, c) and hasattr(c, name.rpartition(".")[2]) for c in CONTRACTS):
        return "part of a contract"
    if not [p for p in inspect.signature(thing).parameters if p != "self"]:
        return "takes no argument"
    return None
