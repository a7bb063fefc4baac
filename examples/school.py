"""Exam scores of 139 schools, from a table to a saved model: ``python examples/school.py FOLDER school.npz``.

The file holds ``X [N, d]``, ``y [N]`` and ``task [N]``. Without one, a smaller table with columns of the same kinds is
made up. The second half shows what goes wrong where features are not standardised and lambda is not chosen.
"""

import pathlib
import sys
import tempfile
import warnings

import jax
import numpy as np
from _figure import plt, save

import mocha_jax as mj

# The table: a row for each pupil, with the school's name. Some columns are percentages, others 0 or 1.
if len(sys.argv) > 2:
    table = np.load(sys.argv[2], allow_pickle=False)
    x, score, number = table["X"], table["y"], table["task"]
else:
    rng = np.random.default_rng(0)
    number = np.repeat(np.arange(30), rng.integers(15, 50, size=30))
    poor, bands = rng.uniform(5, 60, size=30)[number], rng.integers(3, size=len(number))
    x = np.column_stack([poor, *(bands == band for band in range(3)), rng.random((len(number), 4)) < 0.3])
    gain = np.array([8.0, 0.0, -7.0]) + 3.0 * rng.normal(size=(30, 3))
    level = 22.0 + 2.0 * rng.normal(size=30)[number] - 0.1 * poor
    score = np.round(level + gain[number, bands] + 6.0 * rng.normal(size=len(number)))
school = np.array([f"school_{k}" for k in number])
data = mj.pack_tasks(x, score, school, loss_scaling="task_mean", intercept=True, dtype="float32")
train, test = data.split(jax.random.key(0), 0.75)
print(f"{len(score)} pupils of {data.num_tasks} schools, {x.shape[1]} columns")

# Lambda by cross-validation. Within every fold, features and scores lose the mean of their school, and features are
# divided by one standard deviation for all: so no school's level is penalised.
lams = [10.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.001]
local, learned = (mj.grid(kind, lam=lams) for kind in (mj.regularizers.Independent, mj.regularizers.Probabilistic))
problem = mj.Problem(train, mj.losses.Squared(), mj.regularizers.Independent(1.0))
found = {
    name: mj.cross_validate(problem, candidates, folds=3, standardize="within")
    for name, candidates in {"local": local, "learned": learned}.items()
}
errors = {name: mj.metrics.rmse(one.solution, test, per_task=True) for name, one in found.items()}
print(mj.metrics.compare(errors, test.sizes, baseline="local", tasks=test.names.tasks))

# A file without anybody's scores, which predicts by name; for a school that is not in it, by the mean of all.
path = pathlib.Path(tempfile.mkdtemp()) / "school.npz"
found["learned"].solution.model.save(path)
model = mj.load_model(path)
print("school_17:", model.predict(x[::200][:3], task="school_17").round(1))
print("a new one:", model.predict(x[::200][:3], task="school_140", unseen="mean").round(1))

# What goes wrong. The columns as they are: percentages outweigh zeros and ones, levels are penalised, solves are slow.
# And lambda as it comes: too small, every school is nearly by itself; too large, no school has a slope.
scaled = problem.replace(data=train.standardized("within", labels=True))
curves = {}
for label, one in {"standardised": scaled, "as they are": problem}.items():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        path = mj.lambda_path(one, learned, tol=1e-3, max_rounds=100)
    seen = test.standardized(like=one.data) if one is scaled else test
    curves[label] = [float(mj.metrics.rmse(weights, seen)) for weights in path.weights]
    print(f"columns {label}: RMSE", dict(zip(lams, np.round(curves[label], 2).tolist(), strict=True)))
    for each in (one for one in said if issubclass(one.category, mj.NotConverged)):
        print(f"  {each.message}")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for label, errors_along in curves.items():
    left.plot(lams, errors_along, "o-", label=f"columns {label}")
left.axvline(float(found["learned"].regularizer.lam), color="0.5", ls=":", label="chosen by cross-validation")
left.set(xscale="log", xlabel="lambda", ylabel="RMSE of test pupils", title="A learned relationship")
left.legend()
right.scatter(errors["local"], errors["learned"], s=3 + 0.3 * np.asarray(test.sizes), alpha=0.6)
span = [float(np.min(list(errors.values()))), float(np.max(list(errors.values())))]
right.plot(span, span, color="0.5", lw=1)
right.set(xlabel="RMSE of the local model", ylabel="RMSE, learned relationship", title="Every school's test pupils")
save(figure, __file__)
