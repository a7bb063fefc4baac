r"""Models that are not linear: pairs of pure functions, ``init(key)`` and ``apply(params, x, key)``.

`MLP`, `CNN` and, for sequences, `LSTM` come with the library, `Lateral` and `LateralCNN` are the two-part networks of
VIRTUAL, `Parted` keeps a part of any network private, `Mixture` averages several, and `Model` takes the functions of
any other library. Of flax, for instance,

```python
net = flax.linen.Dense(10)
model = mj.networks.Model(lambda key: net.init(key, jnp.zeros((1, 784))), net.apply)
```

of equinox, whose models are pytrees with non-arrays in them,

```python
params, static = eqx.partition(eqx.nn.MLP(784, 10, 200, 2, key=key), eqx.is_array)
model = mj.networks.Model(
    lambda key: eqx.partition(eqx.nn.MLP(784, 10, 200, 2, key=key), eqx.is_array)[0],
    lambda params, x: jax.vmap(eqx.combine(params, static))(x),
)
```

and of haiku, ``net = hk.without_apply_rng(hk.transform(f))``,
``Model(lambda key: net.init(key, jnp.zeros((1, 784))), net.apply)``.

Weights multiply from the right, ``h @ w + b``, in all models here; a model that is written so can be trained with
noise for every row (see `Virtual`).

It may import `_core`.
"""

from mocha_jax.networks._base import Layer as Layer
from mocha_jax.networks._base import Model as Model
from mocha_jax.networks._base import Network as Network
from mocha_jax.networks._base import Params as Params
from mocha_jax.networks._dense_layers import MLP as MLP
from mocha_jax.networks._dense_layers import Lateral as Lateral
from mocha_jax.networks._dense_layers import LateralLayer as LateralLayer
from mocha_jax.networks._dense_layers import SplitParameters as SplitParameters
from mocha_jax.networks._pictures import CNN as CNN
from mocha_jax.networks._pictures import LateralCNN as LateralCNN
from mocha_jax.networks._sequences import LSTM as LSTM
from mocha_jax.networks._sequences import LSTMLayer as LSTMLayer
from mocha_jax.networks._wrapped import Mixture as Mixture
from mocha_jax.networks._wrapped import MixtureParameters as MixtureParameters
from mocha_jax.networks._wrapped import Parted as Parted

__all__ = [
    "CNN",
    "Lateral",
    "LateralCNN",
    "LateralLayer",
    "Layer",
    "LSTM",
    "LSTMLayer",
    "Mixture",
    "MixtureParameters",
    "MLP",
    "Model",
    "Network",
    "Parted",
    "SplitParameters",
]


def __dir__() -> list[str]:
    return __all__
