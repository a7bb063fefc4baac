r"""Methods of personalised federated learning, as compositions: functions that return an algorithm.

An algorithm of these is used like `FedAvg`: by `solve` and `run` on a `Prediction`, with every system, checkpoint and
transformation, and over messages by `federated`. What differs between methods is in a `Method`: the server's first
trees, a client's round, the server's round, what a client keeps, and which parameters predict. A client's function is
put together from the operations of a `Client`; a method of one's own is one more `Method`.

Weights of clients are $c_k$, the total weight of their samples: their number with ``loss_scaling="sum"``, alike with
``"task_mean"``, which most of the papers take.

It may import `_core`, `_data`, `_numerics`, `networks` and `_neural`.
"""

from mocha_jax._neural.client import Client as Client
from mocha_jax._neural.client import Phase as Phase
from mocha_jax._neural.clients import Pull as Pull
from mocha_jax._neural.composed import Composed as Composed
from mocha_jax._neural.fedavg import averaged as averaged
from mocha_jax._neural.fedavg import first_model as first_model
from mocha_jax._neural.fedavg import send_change as send_change
from mocha_jax._neural.method import Answer as Answer
from mocha_jax._neural.method import Beginning as Beginning
from mocha_jax._neural.method import Method as Method
from mocha_jax._neural.method import ServerParts as ServerParts
from mocha_jax._neural.method import ServerRound as ServerRound
from mocha_jax._neural.training_state import TrainingState as TrainingState
from mocha_jax._neural.trees import difference as difference
from mocha_jax._neural.trees import scaled as scaled
from mocha_jax.personalized._corrected import feddyn as feddyn
from mocha_jax.personalized._corrected import scaffold as scaffold
from mocha_jax.personalized._fair import afl as afl
from mocha_jax.personalized._fair import q_ffl as q_ffl
from mocha_jax.personalized._graphs import fedamp as fedamp
from mocha_jax.personalized._graphs import fedu as fedu
from mocha_jax.personalized._mixed import apfl as apfl
from mocha_jax.personalized._mixed import fedem as fedem
from mocha_jax.personalized._mixed import ifca as ifca
from mocha_jax.personalized._parts import own_model as own_model
from mocha_jax.personalized._parts import same_model as same_model
from mocha_jax.personalized._pulled import ditto as ditto
from mocha_jax.personalized._pulled import mr_mtl as mr_mtl
from mocha_jax.personalized._pulled import pfedme as pfedme
from mocha_jax.personalized._split import fedbn as fedbn
from mocha_jax.personalized._split import fedper as fedper
from mocha_jax.personalized._split import fedrep as fedrep
from mocha_jax.personalized._split import lg_fedavg as lg_fedavg
from mocha_jax.personalized._tuned import fine_tuned as fine_tuned
from mocha_jax.personalized._tuned import per_fedavg as per_fedavg

__all__ = [
    "afl",
    "Answer",
    "apfl",
    "averaged",
    "Beginning",
    "Client",
    "Composed",
    "difference",
    "ditto",
    "fedamp",
    "fedbn",
    "feddyn",
    "fedem",
    "fedper",
    "fedrep",
    "fedu",
    "fine_tuned",
    "first_model",
    "ifca",
    "lg_fedavg",
    "Method",
    "mr_mtl",
    "own_model",
    "per_fedavg",
    "pfedme",
    "Phase",
    "Pull",
    "q_ffl",
    "same_model",
    "scaffold",
    "scaled",
    "send_change",
    "ServerParts",
    "ServerRound",
    "TrainingState",
]


def __dir__() -> list[str]:
    return __all__
