"""Names of tasks, features and classes: kept, and what data are matched by."""

from typing import Any

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
@pytest.mark.slow
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
    "texts of one task's frame": (lambda d: mj.pack_tasks([Frame({"a": X[:, 0], "town": WHO.astype(object)})], [Y]), "column 'town' holds what is no number, e.g. 'oak'"),
    "texts in a mapping": (lambda d: mj.pack_tasks({"p": Frame({"town": WHO})}, {"p": Y}), "column 'town' holds what is no number, e.g. 'oak'"),
    "texts only": (lambda d: mj.pack_tasks(Frame({"town": WHO}), Y, WHO), "column 'town' holds what is no number, e.g. 'oak'"),
    "dates only": (lambda d: mj.pack_tasks(Frame({"day": np.array(["2020-01-01"] * 6, "datetime64[D]")}), Y, WHO), "column 'day' holds what is no number, .*; make numbers of it, such as days, or leave"),
    "dates as numbers": (lambda d: mj.pack_tasks(Dates({"day": X[:, 0]}), Y, WHO), "column 'day' holds dates or times"),
    "a value is missing": (lambda d: mj.pack_tasks(Frame({"a": X[:, 0], "b": np.array([1, 2, NAType(), 4, 5, 6], object)}), Y, WHO), "column 'b' has no value in row 2"),
    "none of a value": (lambda d: mj.pack_tasks(Frame({"a": X[:, 0], "b": np.array([1, 2, None, 4, 5, 6], object)}), Y, WHO), "group 'oak': x is NaN or infinite in row 2 of the table"),
    "a plan of a table": (lambda d: mj.pack_tasks(LazyFrame({"a": X[:, 0]}), Y, WHO), "xs is a LazyFrame, which is no data frame; pass xs.collect"),
    "tables of another kind": (lambda d: mj.pack_tasks([Arrow({"a": X[:, 0]})], [Y]), r"xs is a Arrow, which is no data frame; pass xs\[...\].to_pandas"),
    "a class twice": (lambda d: mj.Names(classes=("a", "a")), "classes must differ"),
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


class NAType:
    """As pandas has it."""


class LazyFrame(Frame):
    def collect(self):
        raise AssertionError


class Arrow(Frame):
    column_names = ("a",)

    def to_pandas(self):
        raise AssertionError


class Dates(Frame):
    """As polars has them."""

    class Date:
        def is_temporal(self):
            return True

    dtypes = [Date()]


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


def test_names_that_end_with_a_null_character_are_names_of_their_own():
    data = mj.pack_tasks(np.ones((3, 1)), np.arange(3.0), np.array(["A\0", "A", "A\0"], object))
    assert (data.names.tasks, data.sizes.tolist()) == (("A", "A\0"), [1, 2])


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


@pytest.mark.slow
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


NAMES = ("ash", "elm", "fir", "oak")


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_any_tasks_and_columns_come_out_right_or_as_one_sentence(seed):
    """Tasks and columns in any order, some missing, some unknown, some twice."""
    rng = np.random.default_rng(seed)
    who = rng.choice(NAMES[: rng.integers(2, 5)], 12)
    columns = [str(name) for name in rng.choice(["a", "b", "c"], rng.integers(1, 5))]
    x, y = rng.integers(-9, 9, (12, 3)).astype("f"), rng.normal(size=12).round(2).astype("f")
    by_name = dict(zip("abc", x.T, strict=True))
    train = mj.pack_tasks(
        {name: X[:2] for name in ("oak", "elm", "ash")}, {name: Y[:2] for name in ("ash", "elm", "oak")}
    )
    train = train.replace(names=train.names.replace(features=("b", "a")))
    table = Frame({name: by_name[name] for name in columns})
    if len(set(columns)) < len(columns):
        table.__class__ = type("Repeated", (Frame,), {"columns": columns})
    expected = [
        ("occur more than once", len(set(columns)) < len(columns)), ("features 'c' are not among", "c" in columns),
        ("lacks feature", not {"a", "b"} <= set(columns)), ("task 'fir' is not among the 3", "fir" in who),
    ]  # fmt: skip
    message = next((words for words, wrong in expected if wrong), None)
    if message is not None:
        with pytest.raises(ValueError, match=message) as error:
            mj.pack_tasks(table, y, who, like=train)
        assert "\n" not in str(error.value)
        return
    data = mj.pack_tasks(table, y, who, like=train)
    assert data.names == train.names
    for t, name in enumerate(("oak", "elm", "ash")):
        rows = np.flatnonzero(who == name)
        assert data.sizes[t] == len(rows)
        np.testing.assert_array_equal(data.x[t, : len(rows)], np.stack([by_name["b"], by_name["a"]], 1)[rows])
        np.testing.assert_array_equal(data.y[t, : len(rows)], y[rows])


def test_data_frames_of_objects_and_other_kinds_are_read():
    whole = {"a": X[:, 0].astype(object), "b": np.array([True, False] * 3, object)}
    data = mj.pack_tasks({"p": Frame(whole)}, {"p": Y})
    np.testing.assert_array_equal(data.x[0], np.stack([X[:, 0], [1, 0, 1, 0, 1, 0]], 1))
    assert mj.pack_tasks(Dates({"day": X[:, 0]}).data["day"][:, None], Y, WHO).num_features == 1
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(
        {"a": X[:, 0], "b": pandas.array(X[:, 1], "Int64"), "score": Y, "tree": WHO}, index=range(6, 0, -1)
    )
    table["tree"] = table["tree"].astype("category")
    found, plain = mj.pack_tasks(table, "score", "tree"), mj.pack_tasks(frame(), "score", "tree")
    assert found.names == plain.names
    np.testing.assert_array_equal(found.x, plain.x)
    table.loc[3, "b"] = pandas.NA
    with pytest.raises(ValueError, match="column 'b' has no value in row 3"):
        mj.pack_tasks(table, "score", "tree")


def test_polars_frames_are_read():
    polars = pytest.importorskip("polars")
    table = polars.DataFrame({"a": X[:, 0], "b": X[:, 1], "score": Y, "tree": WHO})
    found, plain = mj.pack_tasks(table, "score", "tree"), mj.pack_tasks(frame(), "score", "tree")
    assert found.names == plain.names
    np.testing.assert_array_equal(found.x, plain.x)
    with pytest.raises(ValueError, match=r"pass xs.collect\(\)"):
        mj.pack_tasks(table.lazy(), "score", "tree")


def test_sparse_samples_are_refused_at_once():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random(6, 20_000, density=0.01, format="csr", random_state=0)
    for kind in ("csr", "csc", "coo", "lil", "dok", "bsr"):
        one = x.asformat(kind)
        for samples in (one, [one], (one,), {"a": one}, [np.eye(6), one], iter([one])):
            with pytest.raises(
                ValueError, match=r"xs is sparse, and samples are stored dense: \[6, 20000\] takes 0.00048 GB"
            ):
                mj.pack_tasks(samples, Y, WHO if samples is one else None)
    with pytest.raises(
        ValueError, match=r"2 arrays such as \[6, 20000\] take 0.00096 GB .* Pass xs\[...\].toarray\(\)"
    ):
        mj.pack_tasks({"a": x, "b": x}, {"a": Y, "b": Y})
    with pytest.raises(ValueError, match="ys is sparse"):
        mj.pack_tasks(X, x[:, 0], WHO)
    with pytest.raises(ValueError, match="predict: x is sparse"):
        mj.LinearModel(np.ones((1, 2)), np.zeros(1)).predict(x)


@pytest.mark.parametrize("kind", ["BCOO", "BCSR"])
@pytest.mark.thin(1)
def test_sparse_arrays_of_jax_are_refused_at_once(kind):
    from jax.experimental import sparse

    x = getattr(sparse, kind).fromdense(jnp.zeros((40, 2000)), nse=7)  # read number by number it takes minutes
    y = np.ones(40)
    calls: list[tuple[Any, Any, Any]] = [
        (x, y, y), ([np.eye(3), x], [np.ones(3), y], None), (iter([x]), [y], None), ({"a": np.eye(3), "b": x}, {"a": np.ones(3), "b": y}, None),
    ]  # fmt: skip
    for xs, ys, groups in calls:
        with pytest.raises(ValueError, match=r"xs is sparse.*Pass xs(\[...\])?.todense\(\) where that fits"):
            mj.pack_tasks(xs, ys, groups)
    with pytest.raises(ValueError, match=r"x must hold numbers|x must be an array"):
        mj.TaskData(x, jnp.asarray(y[None]), jnp.asarray(y[None]), jnp.zeros(1, int))


def test_sparse_frames_are_refused_with_what_they_take():
    pandas, sparse = pytest.importorskip("pandas"), pytest.importorskip("scipy.sparse")
    table = pandas.DataFrame.sparse.from_spmatrix(sparse.csr_array(X))
    for samples, labels, groups in ((table, Y, WHO), ([table], [Y], None), ({"a": table}, {"a": Y}, None)):
        with pytest.raises(ValueError, match=r"xs is sparse.*\[6, 2\] takes .*astype\(\"float32\"\)"):
            mj.pack_tasks(samples, labels, groups)
    dense = mj.pack_tasks(table.astype("float32"), Y, WHO)
    np.testing.assert_array_equal(dense.x, mj.pack_tasks(X, Y, WHO).x)
