"""Activities of persons who were never seen: ``python examples/har.py FOLDER har.npz``.

The file holds ``X [N, d]``, ``y [N]`` of 1 to 6, and ``subject [N]``. Without one, a smaller table is made up. The
second half shows what goes wrong where features are not standardised and lambda is not chosen.
"""

import pathlib
import sys
import tempfile

import numpy as np
from _figure import plt, save

import mocha_jax as mj

# The table: windows of a phone's sensors, what its wearer does, and who that is.
names = np.array(["walking", "upstairs", "downstairs", "sitting", "standing", "lying"])
if len(sys.argv) > 2:
    table = np.load(sys.argv[2], allow_pickle=False)
    every = slice(None, None, 4)  # windows overlap, and a quarter of them will do here
    x, activity, number = table["X"][every].astype("float32"), names[table["y"][every] - 1], table["subject"][every]
else:
    rng = np.random.default_rng(0)
    number = np.repeat(np.arange(1, 31), 80)
    which = rng.integers(6, size=len(number))
    middle = 0.7 * rng.normal(size=(6, 30)) + 0.7 * rng.normal(size=(31, 6, 30))
    x = (middle[number, which] + 1.5 * rng.normal(size=(len(number), 30))) * np.geomspace(0.03, 3.0, 30)
    x, activity = x.astype("float32"), names[which]
person = np.array([f"person_{k:02}" for k in number])

# The question decides the split: the model is for new persons, so lambda is chosen by persons that it has not seen.
training, validation, new = number <= 20, (number > 20) & (number <= 25), number > 25


def pack(rows):
    """Pack the rows of some persons."""
    return mj.pack_tasks(x[rows], activity[rows], person[rows], loss_scaling="task_mean", intercept=True)


def make(data):
    """Write down the problem of one class against the rest."""
    return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))


def train(data, candidates):
    """Train with all candidates, one after the other."""
    found = mj.multiclass.lambda_path(data, make, candidates, tol=1e-2, max_rounds=100)
    return [one.model for one in found]


def error(model, rows):
    """Count wrong activities in per cent; a new person has the mean of all persons' weights."""
    return 100 * np.mean(model.predict(x[rows], task=person[rows], unseen="mean") != activity[rows])


lams = [1.0, 0.1, 0.01, 0.001, 0.0001]
candidates = mj.grid(mj.regularizers.MeanRegularized, lam1=[0.1], lam2=lams)
data = pack(training)
scaled = train(data.standardized("pooled"), candidates)
chosen = int(np.argmin([error(model, validation) for model in scaled]))
print(f"{len(x)} windows of {x.shape[1]} features; lam2 {lams[chosen]:g} by persons 21 to 25,", end=" ")
print(f"{error(scaled[chosen], validation):.1f} % of whose windows are wrong")
print(f"persons 26 to 30: {error(scaled[chosen], new):.1f} % wrong")

# A file that knows persons and activities by name.
path = pathlib.Path(tempfile.mkdtemp()) / "activities.npz"
scaled[chosen].save(path)
model = mj.load_model(path)
print("person_07:", model.predict(x[new][:3], task="person_07"))
print("person_26:", model.predict(x[new][:3], task="person_26", unseen="mean"), "in truth", activity[new][:3])

# Once new persons have labelled five windows of each activity, they are tasks like the others.
first = np.zeros(len(x), bool)
for one in np.unique(person[new]):
    for what in names:
        first |= np.isin(np.arange(len(x)), np.flatnonzero((person == one) & (activity == what))[:5])
best = mj.grid(mj.regularizers.MeanRegularized, lam1=[0.1], lam2=[lams[chosen]])
joined = train(data.join(pack(first)).standardized("pooled"), best)[0]
later = new & ~first
print(f"their other windows: {error(scaled[chosen], later):.1f} % wrong before, {error(joined, later):.1f} % after")

# What goes wrong: features as they are, of very different sizes; and lambda as it comes.
raw = train(data, candidates)
for label, models in {"standardised": scaled, "as they are": raw}.items():
    said = ", ".join(f"{error(model, new):.1f} at {lam:g}" for lam, model in zip(lams, models, strict=True))
    print(f"features {label}: % wrong of new persons {said}")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
for label, models in {"standardised": scaled, "as they are": raw}.items():
    for rows, style in ((validation, "o--"), (new, "o-")):
        whom = "validation" if rows is validation else "new"
        left.plot(lams, [error(m, rows) for m in models], style, label=f"{label}, {whom} persons")
left.set(xscale="log", xlabel="lam2", ylabel="% wrong", title="Persons who were not there in training")
left.legend()
said = scaled[chosen].predict(x[new], task=person[new], unseen="mean")
counts = np.array([[np.sum((activity[new] == a) & (said == b)) for b in names] for a in names])
right.imshow(counts, cmap="Blues")
right.set_xticks(range(6), names, rotation=45, ha="right")
right.set_yticks(range(6), names)
for (i, j), count in np.ndenumerate(counts):
    right.text(j, i, count, ha="center", va="center", color="white" if count > counts.max() / 2 else "black")
right.set(xlabel="predicted", ylabel="in truth", title="New persons")
save(figure, __file__)
