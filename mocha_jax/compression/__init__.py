r"""Messages of nodes in fewer bytes, with error feedback: nothing that is left out of a message is lost.

A `Sending` is the form of a vector in a message. Nodes of dual methods take one, ``federated.Node(..., sending=form)``;
`compressed` gives one to the clients of `FedAvg` and of the methods of `mocha_jax.personalized`.

It may import `_core`, `_numerics`, `networks` and `_neural`.
"""

from mocha_jax.compression._compressed import compressed as compressed
from mocha_jax.compression._forms import Quantized as Quantized
from mocha_jax.compression._forms import RandomK as RandomK
from mocha_jax.compression._forms import Rotated as Rotated
from mocha_jax.compression._forms import Stochastic as Stochastic
from mocha_jax.compression._forms import TopK as TopK
from mocha_jax.compression._sending import Difference as Difference
from mocha_jax.compression._sending import Sending as Sending
