r"""Differential privacy: training whose messages hardly depend on any one sample, and weights that may be published.

Each function and class states what it protects, against whom, and by which theorem. Accounting is by
[dp-accounting](https://pypi.org/project/dp-accounting/): ``pip install 'mocha_jax[privacy]'``.

It may import `_core`, `_numerics`, `_data`, `losses`, `systems`, `coupling`, `_problem`, `servers`,
`_algorithms`, `_driver` and `_neural`.
"""

from mocha_jax._neural.private_clients import ClientLevel as ClientLevel
from mocha_jax._neural.private_clients import QuantileClip as QuantileClip
from mocha_jax._neural.private_gradients import ExampleLevel as ExampleLevel
from mocha_jax.privacy._budget import epsilon as epsilon
from mocha_jax.privacy._budget import noise as noise
from mocha_jax.privacy._budget import spent as spent
from mocha_jax.privacy._budget import with_budget as with_budget
from mocha_jax.privacy._client_budget import client_epsilon as client_epsilon
from mocha_jax.privacy._client_budget import private_clients as private_clients
from mocha_jax.privacy._client_budget import with_client_budget as with_client_budget
from mocha_jax.privacy._perturbation import Perturbed as Perturbed
from mocha_jax.privacy._perturbation import objective_perturbation as objective_perturbation
from mocha_jax.privacy._release import Release as Release
from mocha_jax.privacy._release import release as release
from mocha_jax.privacy._release import release_to_nodes as release_to_nodes
from mocha_jax.privacy._sdca import PrivateSdca as PrivateSdca
from mocha_jax.privacy._sdca import PrivateSdcaState as PrivateSdcaState
