"""How samples are dealt to clients: the labels of every client under four partitions."""

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

labels = np.random.default_rng(0).integers(0, 10, size=2000)
samples, key = np.zeros((2000, 1), "float32"), jax.random.key(0)
partitions = {
    "independent": mj.partition.iid(key, 2000, 15),
    "two shards each": mj.partition.shards(key, labels, 15),
    "Dirichlet(0.3)": mj.partition.dirichlet(key, labels, 15, 0.3),
    "skewed sizes": mj.partition.quantity(key, 2000, 15, 1.0),
}
figure, axes = plt.subplots(1, 4, figsize=(13, 3.2))
for side, (name, parts) in zip(axes, partitions.items(), strict=True):
    data = mj.pack_tasks([samples[rows] for rows in parts], [labels[rows] for rows in parts])
    mj.plotting.label_distribution(side, data, title=name)
save(figure, __file__)
