"""Parts that others have dealt: pairs, mappings, tables, and partitioners with the methods that Flower's have."""

from typing import Any

import numpy as np
import pytest

import mocha_jax as mj

RNG = np.random.default_rng(0)
X = RNG.integers(-9, 9, (12, 2, 3)).astype("f")
AGE = RNG.integers(0, 99, 12)
Y = RNG.integers(0, 3, 12)


class Classes:
    names = ["red", "blue", "green"]


class Rows:
    """A data set as Hugging Face has it, as far as it is asked."""

    def __init__(self, columns, classes=None, numbers=False):
        self.columns_, self.classes, self.numbers = columns, classes, numbers

    @property
    def column_names(self):
        return list(self.columns_)

    @property
    def features(self):
        return {name: self.classes if name == "label" else object() for name in self.columns_}

    def with_format(self, kind):
        assert kind == "numpy"
        return Rows(self.columns_, self.classes, numbers=True)

    def to_pandas(self):
        raise AssertionError

    def __getitem__(self, rows):
        assert self.numbers
        assert rows == slice(None)
        return {name: np.asarray(column) for name, column in self.columns_.items()}


class Partitioner:
    num_partitions = 3

    def __init__(self, dataset):
        self.dataset = dataset

    def load_partition(self, partition_id):
        assert 0 <= partition_id < 3
        rows = slice(partition_id, None, 3)
        return Rows({name: column[rows] for name, column in self.dataset.columns_.items()}, self.dataset.classes)


class ByName(Partitioner):
    partition_id_to_natural_id = {0: "oak", 1: "elm", 2: "ash"}


def whole(classes=None, labels=Y):
    return Rows({"pixels": X.tolist(), "label": labels.tolist(), "age": AGE.tolist()}, classes)


def test_pairs_are_packed_as_pack_tasks_packs_lists():
    pairs = [(X[:5], Y[:5]), (X[5:], Y[5:])]
    found = mj.datasets.from_partitions(iter(pairs), intercept=True, loss_scaling="task_mean")
    flat = [x.reshape(len(x), 6) for x, _ in pairs]
    expected = mj.pack_tasks(flat, [y for _, y in pairs], intercept=True, loss_scaling="task_mean", dtype=found.x.dtype)
    for ours, theirs in zip((found.x, found.y, found.weight), (expected.x, expected.y, expected.weight), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert found.names == mj.Names()
    named = mj.datasets.from_partitions({"oak": pairs[0], "elm": pairs[1]})
    assert named.names.tasks == ("oak", "elm")
    test = mj.datasets.from_partitions({"elm": pairs[0]}, like=named)
    assert test.sizes.tolist() == [0, 5]


@pytest.mark.parametrize(("kind", "names"), [(Partitioner, (0, 1, 2)), (ByName, ("oak", "elm", "ash"))])
def test_partitioners_deal_as_their_parts_say(kind, names):
    data = mj.datasets.from_partitions(kind(whole()))
    assert data.names.tasks == names
    assert data.names.features == (*(f"pixels[{k}]" for k in range(6)), "age")
    for t in range(3):
        np.testing.assert_array_equal(data.x[t, :, :6], X[t::3].reshape(4, 6))
        np.testing.assert_array_equal(data.x[t, :, 6], AGE[t::3])
        np.testing.assert_array_equal(data.y[t], Y[t::3])
    some = mj.datasets.from_partitions(kind(whole()), "age", ["label"])
    np.testing.assert_array_equal(some.y[1], AGE[1::3])
    np.testing.assert_array_equal(some.x[1, :, 0], Y[1::3])


def test_classes_keep_their_names_and_order():
    data = mj.datasets.from_partitions(Partitioner(whole(Classes())))
    assert data.names.classes == ("red", "blue", "green")
    np.testing.assert_array_equal(data.y[0], Y[::3])
    two: Any = type("Two", (), {"names": ["yes", "no"]})()
    signs = mj.datasets.from_partitions(ByName(whole(two, Y % 2)))
    assert signs.names.classes == ("yes", "no")
    np.testing.assert_array_equal(signs.y[2], 2 * (Y % 2)[2::3] - 1)
    swapped: Any = type("Two", (), {"names": ["no", "yes"]})()
    again = mj.datasets.from_partitions(ByName(whole(swapped, 1 - Y % 2)), like=signs)
    np.testing.assert_array_equal(again.y, signs.y)
    assert again.names == signs.names
    texts = mj.datasets.from_partitions([{"x": [1.0, 2.0], "label": ["b", "a"]}])
    assert texts.names == mj.Names(features=("x",), classes=("a", "b"))


def test_features_are_matched_by_name():
    train = mj.datasets.from_partitions(
        {"oak": {"a": [1.0], "b": [2.0], "label": [1]}, "elm": {"a": [3.0], "b": [4.0], "label": [1]}}
    )
    test = mj.datasets.from_partitions({"elm": {"label": [0], "b": [6.0], "a": [5.0]}}, like=train)
    assert test.x[1].tolist() == [[5.0, 6.0]]
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"b": [6.0], "label": [0], "a": pandas.array([5], "Int64")})
    again = mj.datasets.from_partitions({"elm": frame}, like=train)
    np.testing.assert_array_equal(again.x, test.x)


TABLE = {"a": [1.0, 2.0], "label": [1, 0]}
BROKEN: dict[str, tuple[Any, str]] = {
    "no parts": ([], "parts must be one a task, got none"),
    "one table": (Rows(TABLE), r"parts must be an iterable of parts, one a task, got .*; for one table see pack_tasks"),
    "a number": (3, "parts must be an iterable of parts, one a task, got 3"),
    "a text": ("abc", "parts must be an iterable of parts"),
    "triples": ([(X, Y, Y)], "part 0 must be a pair of samples and labels, or a table with columns by name"),
    "samples alone": ({"oak": X}, "part 'oak' must be a pair of samples and labels"),
    "no label": ({"oak": {"a": [1.0]}}, "part 'oak': column 'label' is not among the 1 that are known: 'a'"),
    "no features": ([{"label": [1]}], "part 0 has no column besides the label 'label'"),
    "texts": ({"oak": {"a": ["x"], "label": [1]}}, "part 'oak': column 'a' holds what is no number, or arrays of different shapes, e.g. x; encode it"),
    "ragged": ([{"a": [[1.0], [1.0, 2.0]], "label": [1, 2]}], "part 0: column 'a' holds what is no number, or arrays of different shapes; encode it"),
    "lengths": ([{"a": [1.0], "b": [1.0, 2.0], "label": [1, 2]}], "part 0 has columns of different lengths: 1, 2"),
    "fewer labels": ({"oak": {"a": [1.0, 2.0], "label": [1]}}, r"task 'oak': y must be \[2\] to match its x"),
    "nothing dealt": ({"oak": {"a": [], "label": []}}, "task 'oak': has no samples; leave it out"),
    "other columns": ([TABLE, {"b": [1.0], "label": [1]}], "task 1: has other columns than task 0"),
    "other classes": ([Rows(TABLE, Classes()), Rows(TABLE)], "part 1 has other classes than the first"),
    "no class": ([Rows({"a": [1.0], "label": [-1]}, Classes())], "part 0: column 'label' must hold numbers of its 3 classes"),
    "not finite": ({"oak": {"a": [1.0, np.nan], "label": [1, 2]}}, "task 'oak': x is NaN or infinite in row 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_named_by_part_and_column(name):
    parts, message = BROKEN[name]
    with pytest.raises(ValueError, match=message) as error:
        mj.datasets.from_partitions(parts)
    assert "\n" not in str(error.value)
