"""Federated averaging, with and without a proximal term, beside networks that are trained alone."""

import jax
import numpy as np
import optax
from _figure import plt, save

import mocha_jax as mj

rng = np.random.default_rng(0)
samples = rng.normal(size=(1500, 10)).astype("float32")
labels = (samples[:, :4] + 0.3 * rng.normal(size=(1500, 4))).argmax(1)
parts = mj.partition.dirichlet(jax.random.key(0), labels, 15, 0.3, least=8)
pairs = [samples[rows] for rows in parts], [labels[rows] for rows in parts]
train, test = mj.pack_tasks(*pairs).split(jax.random.key(1), 0.7)
problem, model = mj.Prediction(train, test=test), mj.networks.MLP(10, 4, (32,))

figure, axes = plt.subplots(figsize=(6, 4))
trainers = {
    "FedAvg": mj.FedAvg(model, optax.sgd(0.2), batch_size=10),
    "FedProx, mu = 0.1": mj.FedAvg(model, optax.sgd(0.2), batch_size=10, proximal=0.1),
    "alone": mj.Local(model, optax.sgd(0.2), batch_size=10),
}
for name, algorithm in trainers.items():
    _, history = mj.run(problem, algorithm, jax.random.key(0), num_rounds=40)
    axes.plot(history.round, history.error, label=name)
axes.set(xlabel="rounds", ylabel="error on held-out samples, mean over clients", ylim=(0, None))
axes.legend()
save(figure, __file__)
