"""Names of tasks, features and classes: kept, and what data are matched by."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import mocha_jax as mj
from mocha_jax._data.names import NAMELESS

WHO = np.array(["oak", "elm", "oak", "ash", "elm", "oak"])
X = np.arange(12.0, dtype=np.float32).reshape(6, 2)
Y = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


class Frame:
    """The little of a data frame that the library asks for."""

    ndim = 2

    def __init__(self, columns):
        self.data = columns

    @property
    def columns(self):
        return list(self.data)

    def __getitem__(self, name):
        return Frame({each: self.data[each] for each in name}) if isinstance(name, list) else self.data[name]

    def __array__(self, dtype=None, copy=None):
        whole = np.stack([np.asarray(column) for column in self.data.values()], axis=1)
        return whole if dtype is None else whole.astype(dtype)


def frame(order=("a", "b", "score", "tree"), rows=slice(None)):
    whole = {"a": X[:, 0], "b": X[:, 1], "score": Y, "tree": WHO.astype(object)}
    return Frame({name: whole[name][rows] for name in order})


def test_groups_columns_and_classes_have_names():
    data = mj.pack_tasks(frame(), "score", "tree")
    assert data.names == mj.Names(tasks=("ash", "elm", "oak"), features=("a", "b"))
    assert data.sizes.tolist() == [1, 2, 3]
    assert data.y[2].tolist() == [1.0, 3.0, 6.0]
    said = np.where(Y > 2, "yes", "no")
    assert mj.pack_tasks(X, said, WHO).names.classes == ("no", "yes")
    assert np.unique(np.asarray(mj.pack_tasks(X, said, WHO).y)).tolist() == [-1, 1]
    three = mj.pack_tasks(X, np.array(["c", "a", "b", "a", "b", "c"], object), WHO)
    assert three.names.classes == ("a", "b", "c")
    assert three.y[0, 0] == 0.0
    assert three.y[2].tolist() == [2.0, 1.0, 2.0]
    named = mj.pack_tasks({"p": X[:2], "q": X[2:]}, {"q": Y[2:], "p": Y[:2]})
    assert named.names.tasks == ("p", "q")
    assert named.y[0, :2].tolist() == [1.0, 2.0]
    assert mj.pack_tasks([X], [Y]).names == NAMELESS
    assert mj.pack_tasks([X, X, X], [Y, Y, Y], task=["w", "v", "w"]).names.tasks == ("v", "w")


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), absent=st.integers(0, 2))
def test_data_are_matched_by_name_in_any_order(seed, absent):
    rng = np.random.default_rng(seed)
    train = mj.pack_tasks(frame(), "score", "tree", intercept=True, loss_scaling="task_mean")
    rows = rng.permutation(np.flatnonzero(("ash", "elm", "oak")[absent] != WHO))
    columns = [("a", "b", "score", "tree")[i] for i in rng.permutation(4)]
    test = mj.pack_tasks(frame(columns, rows), "score", "tree", like=train)
    assert test.names == train.names
    assert test.intercept
    assert test.loss_scaling == "task_mean"
    for t, name in enumerate(("ash", "elm", "oak")):
        own = [i for i in rows if WHO[i] == name]
        assert test.sizes[t] == len(own)
        np.testing.assert_array_equal(test.x[t, : len(own), :2], X[own])
        np.testing.assert_array_equal(test.y[t, : len(own)], Y[own])
    weights = rng.normal(size=(3, 3))
    by_hand = [np.mean((np.c_[X, np.ones(6)] @ weights[t] - Y)[[i for i in rows if WHO[i] == n]] ** 2) ** 0.5
               for t, n in enumerate(("ash", "elm", "oak")) if t != absent]  # fmt: skip
    assert float(mj.metrics.rmse(weights, test)) == pytest.approx(np.mean(by_hand))


BAD = {
    "unknown task": (lambda d: mj.pack_tasks(X, Y, np.where(WHO == "oak", "fir", WHO), like=d), "task 'fir' is not among the 3"),
    "unknown tasks": (lambda d: mj.pack_tasks(X, Y, np.array(list("uvwuvw")), like=d), "tasks 'u', 'v', 'w' are not among"),
    "no names here": (lambda d: mj.pack_tasks([X], [Y], like=d), "the tasks need names"),
    "no names there": (lambda d: mj.pack_tasks(X, Y, WHO, like=mj.pack_tasks([X], [Y])), "like has no names of tasks"),
    "task beside like": (lambda d: mj.pack_tasks(X, Y, WHO, like=d, task=[0, 0, 0]), "task must be left out"),
    "another feature": (lambda d: mj.pack_tasks(Frame({**frame().data, "c": Y}), "score", "tree", like=d), "features 'c' are not among"),
    "a feature less": (lambda d: mj.pack_tasks(frame(("a", "score", "tree")), "score", "tree", like=d), "xs lacks feature 'b'"),
    "other width": (lambda d: mj.pack_tasks(X[:, :1], Y, WHO, like=d), "xs has 1 features, where like has 2"),
    "no such column": (lambda d: mj.pack_tasks(frame(), "scores", "tree"), "column 'scores' is not among the 4"),
    "a column of what": (lambda d: mj.pack_tasks(X, "score", WHO), "ys names a column, 'score', but xs is no data frame"),
    "texts among samples": (lambda d: mj.pack_tasks(Frame({"a": X[:, 0], "town": WHO.astype(object)}), Y, WHO), "column 'town' holds what is no number, e.g. 'oak'"),
    "columns twice": (lambda d: mj.pack_tasks(Twice(), Y, WHO), "column names must differ, but 'a' occur"),
    "groups of two kinds": (lambda d: mj.pack_tasks(X, Y, np.array(["a", 1, "a", 1, "a", 1], object)), "groups mixes labels"),
    "a group is missing": (lambda d: mj.pack_tasks(X, Y, np.array(["a", float("nan"), "a", "b", "b", "b"], object)), "groups is NaN in row 1"),
    "no group": (lambda d: mj.pack_tasks(X, Y, np.array(["a", None, "a", "b", "b", "b"], object)), "groups is NaN in row 1"),
    "one class": (lambda d: mj.pack_tasks(X, ["yes"] * 6, WHO), "one class only, 'yes'"),
    "unknown class": (lambda d: mj.pack_tasks(X, np.array(list("abcabc")), WHO, like=mj.pack_tasks(X, np.array(list("ababab")), WHO)), "class 'c' is not among the 2"),
    "labels of other codes": (lambda d: mj.pack_tasks(X, np.arange(6.0) % 2, WHO, like=mj.pack_tasks(X, np.array(list("ababab")), WHO)), "classes of like are 'a', 'b', coded as -1.0, 1.0; ys has the label 0"),
    "names of one mapping": (lambda d: mj.pack_tasks({"p": X}, {"q": Y}), "must name the same tasks; 'p', 'q' are in one"),
    "half a mapping": (lambda d: mj.pack_tasks({"p": X}, [Y]), "so must ys be"),
    "row of the table": (lambda d: mj.pack_tasks(np.where(X == 5, np.nan, X), Y, WHO), "group 'oak': x is NaN or infinite in row 2 of the table"),
    "too many names": (lambda d: d.replace(names=mj.Names(tasks=("a", "b"))), "names has 2 tasks, but there are 3"),
    "names twice": (lambda d: mj.Names(tasks=("a", "b", "a")), "tasks must differ, but 'a' occur"),
    "appended twice": (lambda d: d.append(d), "tasks 'ash', 'elm', 'oak' are in both"),
}  # fmt: skip


class Twice(Frame):
    def __init__(self):
        super().__init__({"a": X[:, 0]})

    columns = ["a", "a"]


@pytest.mark.parametrize("name", BAD)
def test_bad_names_get_one_clear_sentence(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        make(mj.pack_tasks(frame(), "score", "tree"))
    assert "\n" not in str(error.value)


def test_names_follow_the_tasks():
    data = mj.pack_tasks(frame(), "score", "tree")
    assert data.pooled().names == mj.Names(features=("a", "b"))
    assert data.merged().names == mj.Names(features=("a", "b"))
    assert data.pad(nodes=8, rows=9).names == data.names
    assert all(part.names == data.names for part in data.split(jax.random.key(0), 0.5))
    fir = mj.pack_tasks(Frame({"a": X[:, 0], "b": X[:, 1]}), Y, ["fir"] * 6)
    assert data.append(fir).names.tasks == ("ash", "elm", "oak", "fir")
    wider = mj.features.transform(data, lambda x: jnp.concatenate([x, x], axis=2))
    assert wider.names == mj.Names(tasks=("ash", "elm", "oak"))
    mapped = mj.features.transform(data, lambda x: x, intercept=True)
    assert mapped.names == wider.names  # features of the same number are others
    assert mapped.intercept


def test_other_names_compile_nothing_anew(key):
    def solved(prefix):
        groups = np.array([prefix + name for name in WHO])
        data = mj.pack_tasks(X / 10, np.sign(X[:, 0] - 5), groups, loss_scaling="task_mean", intercept=True)
        problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
        mj.run(problem, mj.Mocha(), key, num_rounds=2)
        mj.lambda_path(problem, mj.grid(mj.regularizers.Independent, lam=[1.0, 0.1]), max_rounds=5)
        return mj.solve(problem, max_rounds=5, tol=None)

    assert solved("").model.tasks == ("ash", "elm", "oak")
    compiled = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert solved("big ").model.tasks == ("big ash", "big elm", "big oak")
        assert not compiled
        jax.jit(lambda a: 3.0 * a)(1.0)
        assert compiled  # it would have been heard
    finally:
        jax.monitoring.clear_event_listeners()


def test_names_travel_through_transformations(key):
    data = mj.pack_tasks(frame(), "score", "tree")
    other = data.replace(names=mj.Names(tasks=("x", "y", "z")))
    twice = jax.jit(lambda d: d.replace(y=2.0 * d.y))
    assert twice(data).names == data.names
    assert twice(other).names == other.names
    assert hash(mj.Names(tasks=("a",))) == hash(mj.Names(tasks=("a",)))


def test_sparse_samples_are_refused_at_once():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random(6, 20_000, density=0.01, format="csr", random_state=0)
    for samples in (x, [x], {"a": x}):
        with pytest.raises(
            ValueError, match=r"xs is sparse, and samples are stored dense: \[6, 20000\] takes 0.00048 GB"
        ):
            mj.pack_tasks(samples, Y, WHO)
    from jax.experimental.sparse import BCOO

    with pytest.raises(ValueError, match=r"Pass xs.todense\(\) where that fits"):
        mj.pack_tasks(BCOO.fromdense(jnp.asarray(X)), Y, WHO)  # type: ignore[arg-type]
