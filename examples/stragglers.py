"""What stragglers and networks cost: the gap over simulated seconds on WiFi, LTE and 3G."""

import jax
from _figure import plt, save

import mocha_jax as mj

data = mj.datasets.federation(jax.random.key(0), 24, 30).data
problem = mj.Problem(data, mj.losses.SmoothedHinge(0.5), mj.regularizers.MeanRegularized(0.05, 0.02))
world = mj.systems.Dropout(0.3) & mj.systems.PartialEpochs(0.1, 1.0)

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
for name, cost in {"WiFi": mj.costs.wifi(), "LTE": mj.costs.lte(), "3G": mj.costs.cellular_3g()}.items():
    for side, systems in zip(axes, (mj.systems.Full(), world), strict=True):
        _, history = mj.run(problem, mj.Mocha(), jax.random.key(0), num_rounds=60, systems=systems, cost=cost)
        side.loglog(history.simulated_time, history.relative_gap, label=name)
for side, title in zip(axes, ("everyone does a full epoch", "30 % drop out, others do 10-100 %"), strict=True):
    side.set(xlabel="simulated seconds", title=title)
axes[0].set_ylabel("relative gap")
axes[0].legend()
save(figure, __file__)
