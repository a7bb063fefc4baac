"""Federated multi-task learning as array programs.

What most programs need is here: data and problem, the drivers `run` and `solve`, the algorithms, the certificate. The
rest is in modules: `losses`, `regularizers`, `systems`, `costs`, `servers`, `coupling`, `metrics`, `datasets`,
`features`, `partition`, `networks`, `likelihoods`, `callbacks`, `spectral`, `theory`; `plotting`, which needs
matplotlib, `sklearn`, estimators for scikit-learn, which needs that, and `flower`, federations over Flower, which needs
that.
"""

import importlib
from types import ModuleType

from mocha_jax import costs as costs
from mocha_jax import coupling as coupling
from mocha_jax import datasets as datasets
from mocha_jax import features as features
from mocha_jax import federated as federated
from mocha_jax import losses as losses
from mocha_jax import metrics as metrics
from mocha_jax import multiclass as multiclass
from mocha_jax import networks as networks
from mocha_jax import regularizers as regularizers
from mocha_jax import servers as servers
from mocha_jax import systems as systems
from mocha_jax import theory as theory
from mocha_jax._algorithms.averaged import Averaged as Averaged
from mocha_jax._algorithms.base import Algorithm as Algorithm
from mocha_jax._algorithms.base import State as State
from mocha_jax._algorithms.cocoa import Cocoa as Cocoa
from mocha_jax._algorithms.dual_method import DualMethod as DualMethod
from mocha_jax._algorithms.dual_method import MochaState as MochaState
from mocha_jax._algorithms.minibatch import MiniBatchSdca as MiniBatchSdca
from mocha_jax._algorithms.minibatch import MiniBatchSgd as MiniBatchSgd
from mocha_jax._algorithms.mocha import Mocha as Mocha
from mocha_jax._algorithms.mocha import algorithm1 as algorithm1
from mocha_jax._algorithms.subproblem_method import SubproblemMethod as SubproblemMethod
from mocha_jax._core.pytree import Hyperparameter as Hyperparameter
from mocha_jax._core.pytree import Pytree as Pytree
from mocha_jax._core.pytree import static as static
from mocha_jax._core.warnings import NotConverged as NotConverged
from mocha_jax._data import partition as partition
from mocha_jax._data.names import Names as Names
from mocha_jax._data.pack import pack_tasks as pack_tasks
from mocha_jax._data.task_data import TaskData as TaskData
from mocha_jax._driver import callbacks as callbacks
from mocha_jax._driver.adjoint import Adjoint as Adjoint
from mocha_jax._driver.adjoint import Hypergradient as Hypergradient
from mocha_jax._driver.adjoint import Implicit as Implicit
from mocha_jax._driver.adjoint import Unrolled as Unrolled
from mocha_jax._driver.adjoint import hypergradient as hypergradient
from mocha_jax._driver.history import History as History
from mocha_jax._driver.history import Watch as Watch
from mocha_jax._driver.owned_file import CheckpointError as CheckpointError
from mocha_jax._driver.records import read_history as read_history
from mocha_jax._driver.run import run as run
from mocha_jax._driver.solution import Solution as Solution
from mocha_jax._driver.solution import Status as Status
from mocha_jax._driver.solve import solve as solve
from mocha_jax._model import likelihoods as likelihoods
from mocha_jax._model.linear import LinearModel as LinearModel
from mocha_jax._model.load import load_model as load_model
from mocha_jax._model.multiclass import MulticlassModel as MulticlassModel
from mocha_jax._model.network import NetworkModel as NetworkModel
from mocha_jax._neural.fedavg import FedAvg as FedAvg
from mocha_jax._neural.local import Local as Local
from mocha_jax._neural.prediction import Evaluation as Evaluation
from mocha_jax._neural.prediction import Prediction as Prediction
from mocha_jax._neural.trainer import Trainer as Trainer
from mocha_jax._neural.virtual import Virtual as Virtual
from mocha_jax._numerics import spectral as spectral
from mocha_jax._numerics.graphical_lasso import GraphicalLasso as GraphicalLasso
from mocha_jax._numerics.graphical_lasso import graphical_lasso as graphical_lasso
from mocha_jax._problem.certificate import Certificate as Certificate
from mocha_jax._problem.certificate import objective as objective
from mocha_jax._problem.problem import Federated as Federated
from mocha_jax._problem.problem import Problem as Problem
from mocha_jax._problem.process_local import from_process_local as from_process_local
from mocha_jax._problem.proof import certificate as certificate
from mocha_jax._problem.proof import free_intercept as free_intercept
from mocha_jax._problem.quality import Quality as Quality
from mocha_jax._problem.sharding import shard as shard
from mocha_jax._selection.cross_validation import cross_validate as cross_validate
from mocha_jax._selection.grid import grid as grid
from mocha_jax._selection.path import lambda_path as lambda_path
from mocha_jax._selection.records import CrossValidation as CrossValidation
from mocha_jax._selection.records import Path as Path
from mocha_jax._selection.tuning import Tuned as Tuned
from mocha_jax._selection.tuning import tune as tune
from mocha_jax.multiclass import OneVsRest as OneVsRest
from mocha_jax.multiclass import one_vs_rest as one_vs_rest
from mocha_jax.servers._base import NodeUpdate as NodeUpdate
from mocha_jax.servers._base import Server as Server
from mocha_jax.systems._work import Info as Info

__version__ = "0.1.0"

__all__ = [
    "Adjoint",
    "Algorithm",
    "algorithm1",
    "Averaged",
    "callbacks",
    "Certificate",
    "certificate",
    "CheckpointError",
    "Cocoa",
    "costs",
    "coupling",
    "cross_validate",
    "CrossValidation",
    "datasets",
    "DualMethod",
    "Evaluation",
    "features",
    "FedAvg",
    "Federated",
    "federated",
    "free_intercept",
    "from_process_local",
    "graphical_lasso",
    "GraphicalLasso",
    "grid",
    "History",
    "hypergradient",
    "Hypergradient",
    "Hyperparameter",
    "Implicit",
    "Info",
    "lambda_path",
    "likelihoods",
    "LinearModel",
    "load_model",
    "Local",
    "losses",
    "metrics",
    "MiniBatchSdca",
    "MiniBatchSgd",
    "Mocha",
    "MochaState",
    "multiclass",
    "MulticlassModel",
    "Names",
    "NetworkModel",
    "networks",
    "NodeUpdate",
    "NotConverged",
    "objective",
    "one_vs_rest",
    "OneVsRest",
    "pack_tasks",
    "partition",
    "Path",
    "plotting",
    "Prediction",
    "Problem",
    "Pytree",
    "Quality",
    "read_history",
    "regularizers",
    "run",
    "Server",
    "servers",
    "shard",
    "Solution",
    "solve",
    "spectral",
    "State",
    "static",
    "Status",
    "SubproblemMethod",
    "systems",
    "TaskData",
    "theory",
    "Trainer",
    "tune",
    "Tuned",
    "Unrolled",
    "Virtual",
    "Watch",
]


def __dir__() -> list[str]:
    return [*__all__, "flower", "sklearn", "__version__"]  # no part of *, which would hide scikit-learn itself


def __getattr__(name: str) -> ModuleType:
    """Import `flower`, `plotting` or `sklearn` when it is asked for: they need what the package does not."""
    if name not in ("flower", "plotting", "sklearn"):
        raise AttributeError(f"module 'mocha_jax' has no attribute {name!r}")
    return importlib.import_module(f"mocha_jax.{name}")
