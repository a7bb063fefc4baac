"""A federation through the day: who answers when, and the gap that closes in spite of it."""

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

data = mj.datasets.federation(jax.random.key(0), 20, 15).data
problem = mj.Problem(data, mj.losses.SmoothedHinge(0.5), mj.regularizers.MeanRegularized(0.05, 0.02))
world = mj.systems.DayNight(24.0, 0.5) & mj.systems.Outages(0.1, groups=np.arange(20) // 5, length=6)
_, history = mj.run(problem, mj.Mocha(), jax.random.key(0), num_rounds=96, systems=world, watch=mj.Watch())

figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True)
above.imshow(np.asarray(history.nodes.answered).T, aspect="auto", cmap="Greens", interpolation="nearest")
above.set(ylabel="node", title="who answered: day and night, and outages of groups of five")
below.semilogy(history.relative_gap)
below.set(xlabel="round", ylabel="relative gap")
save(figure, __file__)
