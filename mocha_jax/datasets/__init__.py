r"""Data sets: synthetic federations whose weights and relationship are known, and readers of files.

**Synthetic** ones are made in three steps, each a pure function of a key: a task covariance, weights
$W \sim \mathcal{MN}(0, \Omega \otimes I)$, and samples. `federation` does all three.

**From files**, LEAF's folders and texts as rows of symbols, come lists with an array for each client, as `pack_tasks`
takes them:

```python
train = mj.datasets.leaf("femnist/data/train")
test = mj.datasets.leaf("femnist/data/test", users=train.names)
problem = mj.Prediction(mj.pack_tasks(train.xs, train.ys), test=mj.pack_tasks(test.xs, test.ys))
```

and for LEAF's Shakespeare, with every symbol of a row predicted from those before it,

```python
rows = [np.column_stack([x, y]) for x, y in zip(train.xs, train.ys)]  # [n_t, 81]
data = mj.pack_tasks(rows, [np.full(len(y), 80) for y in train.ys])
problem = mj.Prediction(data, mj.likelihoods.NextSymbol())
```

It may import `_core`, `_numerics`, `_data` and `spectral`.
"""

from mocha_jax.datasets._made import Federation as Federation
from mocha_jax.datasets._made import classification as classification
from mocha_jax.datasets._made import clusters as clusters
from mocha_jax.datasets._made import federation as federation
from mocha_jax.datasets._made import low_rank as low_rank
from mocha_jax.datasets._made import regression as regression
from mocha_jax.datasets._made import sample_weights as sample_weights
from mocha_jax.datasets._made import skewed_sizes as skewed_sizes
from mocha_jax.datasets._made import sparse_graph as sparse_graph
from mocha_jax.datasets._readers import ALPHABET as ALPHABET
from mocha_jax.datasets._readers import Users as Users
from mocha_jax.datasets._readers import leaf as leaf
from mocha_jax.datasets._readers import symbols as symbols
from mocha_jax.datasets._readers import windows as windows

__all__ = [
    "ALPHABET",
    "classification",
    "clusters",
    "Federation",
    "federation",
    "leaf",
    "low_rank",
    "regression",
    "sample_weights",
    "skewed_sizes",
    "sparse_graph",
    "symbols",
    "Users",
    "windows",
]


def __dir__() -> list[str]:
    return __all__
