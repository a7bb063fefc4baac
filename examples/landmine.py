"""Land mines, a class of one in sixteen: ``python examples/landmine.py FOLDER landmine.npz``.

The file holds ``X [N, d]``, ``y [N]`` of -1 and 1, and ``task [N]``, the field. Without one, a table of the same shape
is made up. The second half shows what goes wrong where features are not standardised and lambda is not chosen.
"""

import pathlib
import sys
import tempfile
import warnings

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

# The table: nine features of a radar's picture, a mine or clutter, and the field. Fields are of two kinds of ground.
if len(sys.argv) > 2:
    table = np.load(sys.argv[2], allow_pickle=False)
    x, mine, number = table["X"], table["y"], table["task"]
else:
    rng = np.random.default_rng(0)
    number = np.repeat(np.arange(29), 50)
    x = rng.normal(size=(len(number), 9))
    ways = rng.normal(size=(2, 9))[(number >= 15).astype(int)] + 0.4 * rng.normal(size=(29, 9))[number]
    said = np.einsum("nd,nd->n", x, ways) + 2.0 * rng.normal(size=len(number))
    mine = np.where(said > np.quantile(said, 0.94), 1, -1)
field = np.array([f"field_{k:02}" for k in number])
label = np.where(mine > 0, "mine", "clutter")
units = np.array([1.0, 1.0, 1000.0, 1.0, 0.01, 1.0, 1.0, 1.0, 1.0])  # as a sensor may well write two of its columns
data = mj.pack_tasks(x * units, label, field, loss_scaling="task_mean", intercept=True, dtype="float32")
train, test = data.split(jax.random.key(1), 0.5)
print(f"{len(mine)} places of {data.num_tasks} fields, {100 * (mine > 0).mean():.1f} % are mines")

# The error rate rewards a model that has never seen a mine: rank places instead, by the area under the ROC curve.
never = np.zeros_like(train.x[:, 0])
never[:, -1] = -1.0
print(f"'clutter' for every place: error {100 * float(mj.metrics.error_rate(never, test)):.1f} %")

# Lambda by cross-validation of the logistic loss, standardised within every fold; all models on the same folds.
problem = mj.Problem(train, mj.losses.Logistic(), mj.regularizers.Independent(1.0))
lams = [1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001]
candidates = {
    "local": mj.grid(mj.regularizers.Independent, lam=lams),
    "learned": mj.grid(mj.regularizers.Probabilistic, lam=lams),
}
found = {
    name: mj.cross_validate(problem, grid, folds=3, standardize="pooled", metric="mean_loss")
    for name, grid in candidates.items()
}
scores = {name: mj.metrics.auc(one.solution, test, per_task=True) for name, one in found.items()}
print(mj.metrics.compare(scores, test.sizes, baseline="local", maximise=True, tasks=test.names.tasks))

# A model that ranks the places of a field by name, with probabilities; a new field has the mean of all.
path = pathlib.Path(tempfile.mkdtemp()) / "mines.npz"
found["learned"].solution.model.save(path)
model = mj.load_model(path)
places = (x * units)[:3]
print("field_05:", model.predict_proba(places, task="field_05")[:, 1].round(3), "of", model.names.classes[1])
print("a new field:", model.predict_proba(places, task="field_30", unseen="mean")[:, 1].round(3))

# What goes wrong: two columns in other units, so that one is penalised a million times more lightly than the rest and
# the other ten thousand times as much; and lambda as it comes.
scaled = problem.replace(data=train.standardized("pooled"))
curves = {}
for name, one in {"standardised": scaled, "as they are": problem}.items():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        along = mj.lambda_path(one, candidates["learned"], tol=1e-3, max_rounds=100)
    seen = test.standardized(like=one.data) if one is scaled else test
    curves[name] = [float(mj.metrics.auc(weights, seen)) for weights in along.weights]
    print(f"columns {name}: AUC", dict(zip(lams, np.round(curves[name], 3).tolist(), strict=True)))
    for each in (one for one in said if issubclass(one.category, mj.NotConverged)):
        print(f"  {each.message}")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
for name, areas in curves.items():
    left.plot(lams, areas, "o-", label=f"columns {name}")
left.axvline(float(found["learned"].regularizer.lam), color="0.5", ls=":", label="chosen by cross-validation")
left.set(xscale="log", xlabel="lambda", ylabel="AUC of test places, mean of fields", title="A learned relationship")
left.legend()
picture = right.imshow(found["learned"].solution.correlation, vmin=0, vmax=1, cmap="viridis")
order = [name.removeprefix("field_") for name in data.names.tasks]
right.set_xticks(range(len(order)), order, fontsize=6, rotation=90)
right.set_yticks(range(len(order)), order, fontsize=6)
right.set_title("Which fields are alike, as learned")
figure.colorbar(picture, ax=right)
save(figure, __file__)
