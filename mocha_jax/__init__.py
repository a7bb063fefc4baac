"""mocha_jax: federated multi-task learning as array programs.

The public surface is what this file re-exports: data and problem, the two drivers, the
algorithms, the certificate, and the modules `losses`, `regularizers`, `coupling`, `systems`,
`costs`, `metrics`, `datasets` and `spectral`.
"""

from mocha_jax import costs as costs
from mocha_jax import coupling as coupling
from mocha_jax import datasets as datasets
from mocha_jax import likelihoods as likelihoods
from mocha_jax import losses as losses
from mocha_jax import metrics as metrics
from mocha_jax import networks as networks
from mocha_jax import partition as partition
from mocha_jax import regularizers as regularizers
from mocha_jax import spectral as spectral
from mocha_jax import systems as systems
from mocha_jax import theory as theory
from mocha_jax._adjoint import Adjoint as Adjoint
from mocha_jax._adjoint import Hypergradient as Hypergradient
from mocha_jax._adjoint import Implicit as Implicit
from mocha_jax._adjoint import Unrolled as Unrolled
from mocha_jax._adjoint import hypergradient as hypergradient
from mocha_jax._algorithm import Algorithm as Algorithm
from mocha_jax._algorithm import Info as Info
from mocha_jax._cocoa import Cocoa as Cocoa
from mocha_jax._cross_validation import CrossValidation as CrossValidation
from mocha_jax._cross_validation import cross_validate as cross_validate
from mocha_jax._data import TaskData as TaskData
from mocha_jax._dual import MochaState as MochaState
from mocha_jax._graphical_lasso import GraphicalLasso as GraphicalLasso
from mocha_jax._graphical_lasso import graphical_lasso as graphical_lasso
from mocha_jax._history import History as History
from mocha_jax._history import Watch as Watch
from mocha_jax._minibatch import MiniBatchSdca as MiniBatchSdca
from mocha_jax._minibatch import MiniBatchSgd as MiniBatchSgd
from mocha_jax._mocha import Mocha as Mocha
from mocha_jax._multiclass import OneVsRest as OneVsRest
from mocha_jax._multiclass import one_vs_rest as one_vs_rest
from mocha_jax._neural._fedavg import FedAvg as FedAvg
from mocha_jax._neural._fedavg import Local as Local
from mocha_jax._neural._prediction import Evaluation as Evaluation
from mocha_jax._neural._prediction import Prediction as Prediction
from mocha_jax._neural._virtual import Virtual as Virtual
from mocha_jax._objective import Certificate as Certificate
from mocha_jax._objective import objective as objective
from mocha_jax._owned_file import CheckpointError as CheckpointError
from mocha_jax._pack import pack_tasks as pack_tasks
from mocha_jax._path import Path as Path
from mocha_jax._path import lambda_path as lambda_path
from mocha_jax._problem import Problem as Problem
from mocha_jax._proof import certificate as certificate
from mocha_jax._pytree import Pytree as Pytree
from mocha_jax._pytree import grid as grid
from mocha_jax._run import run as run
from mocha_jax._sharding import shard as shard
from mocha_jax._solution import Solution as Solution
from mocha_jax._solution import Status as Status
from mocha_jax._solve import solve as solve
from mocha_jax._tuning import Tuned as Tuned
from mocha_jax._tuning import tune as tune

__version__ = "0.1.0"
