"""Rows of three schools, as arrays and as a data frame."""

import numpy as np
import pandas as pd

NAMES = np.array(["ash", "elm", "oak"])
FEATURES = ["hours", "age", "class"]


def rows(count=120, seed=0):
    """Samples, labels and the school of each, of schools of different sizes."""
    rng = np.random.default_rng(seed)
    school = rng.choice(NAMES, count, p=[0.2, 0.3, 0.5])
    X = rng.normal(size=(count, 3))
    own = {"ash": [1.0, 0.5, 0.0], "elm": [-1.0, 0.5, 0.0], "oak": [1.0, 0.0, 0.5]}
    y = np.einsum("kd,kd->k", X, np.array([own[name] for name in school])) + 0.1 * rng.normal(size=count) + 0.3
    return X, y, school


def frame(**how):
    """The same, with the school in a column between the features."""
    X, y, school = rows(**how)
    table = pd.DataFrame(X, columns=FEATURES)
    table.insert(1, "school", school)
    return table, y
