r"""Data sets: synthetic federations whose weights and relationship are known, and readers of files.

**Synthetic** ones are made in three steps, each a pure function of a key: a task covariance, weights
$W \sim \mathcal{MN}(0, \Omega \otimes I)$, and samples. `federation` does all three.

**From files and other libraries** come `TaskData` at once: `csv`, `svmlight`, `from_partitions`; `read_table` reads
what has no labels, to predict for. **The data sets of papers** come as lists with an array for each client, as
`pack_tasks` takes them. The MOCHA paper's are `har`, `vehicle` and, in the form of its authors' code, `cells`:

```python
sensors = mj.datasets.vehicle("events")
data = mj.pack_tasks(sensors.xs, sensors.ys, loss_scaling="task_mean", intercept=True)
```

LEAF's folders have a part for training and one for testing,

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

It may import `_core`, `_numerics`, `spectral` and `_data`.
"""

from mocha_jax.datasets._csv import csv as csv
from mocha_jax.datasets._made import Federation as Federation
from mocha_jax.datasets._made import classification as classification
from mocha_jax.datasets._made import clusters as clusters
from mocha_jax.datasets._made import federation as federation
from mocha_jax.datasets._made import low_rank as low_rank
from mocha_jax.datasets._made import regression as regression
from mocha_jax.datasets._made import sample_weights as sample_weights
from mocha_jax.datasets._made import skewed_sizes as skewed_sizes
from mocha_jax.datasets._made import sparse_graph as sparse_graph
from mocha_jax.datasets._partitions import from_partitions as from_partitions
from mocha_jax.datasets._readers import ALPHABET as ALPHABET
from mocha_jax.datasets._readers import Users as Users
from mocha_jax.datasets._readers import leaf as leaf
from mocha_jax.datasets._readers import symbols as symbols
from mocha_jax.datasets._readers import windows as windows
from mocha_jax.datasets._sensors import cells as cells
from mocha_jax.datasets._sensors import har as har
from mocha_jax.datasets._sensors import vehicle as vehicle
from mocha_jax.datasets._svmlight import svmlight as svmlight
from mocha_jax.datasets._tables import Table as Table
from mocha_jax.datasets._tables import read_table as read_table

__all__ = [
    "ALPHABET",
    "cells",
    "classification",
    "clusters",
    "csv",
    "Federation",
    "federation",
    "from_partitions",
    "har",
    "leaf",
    "low_rank",
    "read_table",
    "regression",
    "sample_weights",
    "skewed_sizes",
    "sparse_graph",
    "svmlight",
    "symbols",
    "Table",
    "Users",
    "vehicle",
    "windows",
]


def __dir__() -> list[str]:
    return __all__
