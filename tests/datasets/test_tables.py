"""CSV files written here and by pandas, read back; whatever is wrong in them is named by file, line and column."""

import csv
import gzip
import io
import re
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import mocha_jax as mj
from mocha_jax._data import read as of_frames
from mocha_jax.datasets import _column_types

SCHOOL = """school,hours,town,score
007,1.5,Oslo,3
012,2,Bergen,4
007,0,Oslo,1
012,-25e-2,"Åre, Duved",2.5
"""


def write(folder, text, name="school.csv"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_becomes_tasks_features_and_labels(tmp_path):
    path = write(tmp_path, SCHOOL)
    data = mj.datasets.csv(path, "score", "school", features=["hours"], loss_scaling="task_mean", intercept=True)
    assert data.names == mj.Names(tasks=("007", "012"), features=("hours",))
    np.testing.assert_array_equal(data.x[:, :, 0], [[1.5, 0], [2, -0.25]])
    np.testing.assert_array_equal(data.y, [[3, 1], [4, 2.5]])
    assert (data.loss_scaling, data.intercept, data.dtype) == ("task_mean", True, jnp.result_type(float))
    assert mj.datasets.csv(str(path), "score", "school", features=["hours"], dtype="bfloat16").x.dtype == "bfloat16"
    encoded = mj.datasets.csv(path, "score", "school", categories="encode")
    assert encoded.names.features == ("hours", "town=Bergen", "town=Oslo", "town=Åre, Duved")
    np.testing.assert_array_equal(encoded.x[1], [[2, 1, 0, 0], [-0.25, 0, 0, 1]])
    groups = mj.datasets.csv(write(tmp_path, "a,t,y\n1,10,0\n2,9,1\n", "i.csv"), "y", "t")
    assert groups.names.tasks == (9, 10)  # integers in their order


def test_labels_that_are_texts_are_classes(tmp_path):
    train = mj.datasets.csv(write(tmp_path, "x,t,y\n1,A,good\n2,A,bad\n3,B,bad\n"), "y", "t")
    assert train.names.classes == ("bad", "good")
    np.testing.assert_array_equal(train.y, [[1, -1], [-1, -1]])
    test = mj.datasets.csv(write(tmp_path, "y,t,x,more\ngood,B,5,?\n"), "y", "t", like=train)
    np.testing.assert_array_equal(test.y[1], [1])
    with pytest.raises(ValueError, match=r"school.csv, line 3, column 'y': 'so so' is not among the 2 that are known"):
        mj.datasets.csv(write(tmp_path, "y,t,x\ngood,B,5\nso so,B,5\n"), "y", "t", like=train)


def test_new_data_are_encoded_as_the_old(tmp_path):
    train = mj.datasets.csv(
        write(tmp_path, "kind,town,school,y\n01,Oslo,3,1\n2,Bergen,4,2\n01,Bergen,4,2\n"), "y", "school", categories=["kind", "town"]
    )  # fmt: skip
    assert train.names == mj.Names(tasks=(3, 4), features=("kind=01", "kind=2", "town=Bergen", "town=Oslo"))
    test = mj.datasets.csv(write(tmp_path, "town,school,y,other,kind\nOslo,4,7,9,01\n"), "y", "school", like=train)
    assert test.names == train.names
    assert test.sizes.tolist() == [0, 1]
    np.testing.assert_array_equal(test.x[1], [[1, 0, 0, 1]])
    model = mj.LinearModel(np.arange(8.0).reshape(2, 4), np.zeros(2), train.names)
    path = write(tmp_path, "town,school,kind\nOslo,4,01\nBergen,3,2\n")
    table = mj.datasets.read_table(path, texts=["school", *(model.names.features or ())])
    x, school = table.numbers(model.names.features), table.names("school", model.tasks)
    expected = [model.weights[1][[0, 3]].sum(), model.weights[0][[1, 2]].sum()]
    np.testing.assert_allclose(model.predict(x, school), expected, rtol=1e-6)
    for text, message in {
        "town,school,y,kind\nOslo,4,1,01\nBonn,4,1,2\n": r"line 3, column 'town': 'Bonn' is not among the 2 values",
        "town,school,y,kind\nOslo,4,1,1\n": r"line 2, column 'kind': '1' is not among the 2 values that are known: '01', '2'",
        "town,school,y,kind\nOslo,5,1,2\n": r"line 2, column 'school': '5' is not among the 2 that are known: 3, 4",
        "town,school,y\nOslo,4,1\n": r"column 'kind=01' is not among the 3 that are known",
    }.items():
        with pytest.raises(ValueError, match=message):
            mj.datasets.csv(write(tmp_path, text), "y", "school", like=train)


def test_a_table_without_labels_gives_its_columns(tmp_path):
    table = mj.datasets.read_table(write(tmp_path, SCHOOL))
    assert table.columns == ("school", "hours", "town", "score")
    assert len(table) == 4
    assert "4 rows" in repr(table)
    np.testing.assert_array_equal(table.numbers(["score", "school"]), [[3, 7], [4, 12], [1, 7], [2.5, 12]])
    assert table.column("town").tolist() == ["Oslo", "Bergen", "Oslo", "Åre, Duved"]
    assert table.names("school").tolist() == [7, 12, 7, 12]
    assert table.names("school", known=("12", "7")).tolist() == ["7", "12", "7", "12"]
    assert table.names("school", known=(12, 7.0)).tolist() == [7.0, 12, 7.0, 12]
    assert table.texts("hours") == ["1.5", "2", "0", "-0.25"]
    assert table.holds_texts("town")
    assert not table.holds_texts("hours")
    assert table.lines.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiters_are_found_or_given(tmp_path, delimiter):
    text = delimiter.join(["a b", "t", "y"]) + "\r\n" + delimiter.join(["1", "u", "2"]) + "\r\n"
    path = write(tmp_path, "\ufeff" + text)
    for told in (None, delimiter):
        assert mj.datasets.csv(path, "y", "t", delimiter=told).names == mj.Names(tasks=("u",), features=("a b",))
    packed = tmp_path / "school.csv.gz"
    packed.write_bytes(gzip.compress(("\ufeff" + text).encode()))
    np.testing.assert_array_equal(mj.datasets.read_table(packed).numbers(["a b", "y"]), [[1, 2]])


CELLS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr), st.integers(-9, 10**9).map(str),
    st.text(st.sampled_from('ab1 _,;"\n\r\u00e9'), max_size=5),
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.one_of(CELLS), st.floats(-9, 9).map(repr), CELLS), min_size=1, max_size=12),
    first=st.integers(1, 4), lines=st.integers(1, 3), quoted=st.booleans(),
)  # fmt: skip
def test_whatever_a_writer_wrote_is_read(tmp_path, monkeypatch, rows, first, lines, quoted):
    monkeypatch.setattr(_column_types, "_FIRST", first)
    monkeypatch.setattr(_column_types, "_LINES", lines)
    buffer = io.StringIO(newline="")
    csv.writer(buffer, quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL).writerows([("p", "q", "r"), *rows])
    with open(tmp_path / "t.csv", "w", encoding="utf-8", newline="") as file:
        file.write(buffer.getvalue())
    table = mj.datasets.read_table(tmp_path / "t.csv")
    for name, column in zip("pqr", zip(*rows, strict=True), strict=True):
        found = table.column(name)
        if found.dtype == float:
            assert found.tolist() == [float(cell) for cell in column]
            assert not any("_" in cell for cell in column)
        else:
            assert [cell.strip() for cell in found] == [cell.strip() for cell in column]
    starts, before = [], 0
    reader = csv.reader(io.StringIO(buffer.getvalue(), newline=""))
    for _ in reader:
        starts.append(before + 1)
        before = reader.line_num
    assert table.lines.tolist() == starts[1:]


def test_one_column_may_have_blank_lines(tmp_path):
    table = mj.datasets.read_table(write(tmp_path, "a\n" + "x\n" * 120 + "\n\ny\n"))
    assert len(table) == 121
    assert table.lines[-1] == 124


def test_columns_that_are_texts_late_are_read_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.setattr(_column_types, "_LINES", 10)
    rows = [f"{i},00{i},{i}.50\n" for i in range(300)]
    rows[250] = "x7,0250,n/a\n"
    table = mj.datasets.read_table(write(tmp_path, "a,b,c\n" + "".join(rows)), texts=["b"])
    assert table.column("a")[[0, 250, 299]].tolist() == ["0", "x7", "299"]
    assert table.column("b")[[0, 299]].tolist() == ["000", "00299"]
    assert table.column("c")[1] == "1.50"
    with pytest.raises(ValueError, match=r"school.csv, line 252, column 'c': 'n/a' is no number; impute it"):
        table.numbers(["c"])


def test_pandas_reads_the_same(tmp_path):
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    table = pandas.DataFrame(rng.normal(size=(500, 3)) * 10.0 ** rng.integers(-200, 200, (500, 3)), columns=list("abc"))
    table.insert(1, "who", rng.choice(["oak", "elm", 'big "ash"'], 500))
    path = tmp_path / "wide.csv"
    table.to_csv(path, index=False)
    found = mj.datasets.read_table(path)
    np.testing.assert_array_equal(found.numbers(["a", "b", "c"]), table[["a", "b", "c"]])
    small = table.assign(a=1.0, b=table.b.rank(), c=table.c.rank())
    small.to_csv(path, index=False)
    ours, theirs = mj.datasets.csv(path, "c", "who"), mj.pack_tasks(small, "c", "who", dtype="float32")
    assert ours.names == theirs.names
    np.testing.assert_array_equal(ours.x, theirs.x)
    np.testing.assert_array_equal(ours.y, theirs.y)
    small.to_csv(path)
    with pytest.raises(ValueError, match="line 1: column 1 has no name, as row numbers that pandas writes have none"):
        mj.datasets.csv(path, "c", "who")


BROKEN = {
    "a word": ("x,t,y\n1,u,2\n1,u,n/a\n", "school.csv, line 3, column 'y': 'n/a' is no number; impute it, or leave the row out."),
    "an empty field": ("x,t,y\n1,u,2\n,u,3\n", "school.csv, line 3, column 'x': is empty; fill it in, or leave the row out."),
    "a null character": ("x,t,y\n1,A,2\n1,A\0,3\n", r"school.csv, line 3, column 't': 'A\x00' ends with a null character"),
    "only empty fields": ("x,t,y\n,u,2\n,u,3\n", "school.csv, line 2, column 'x': is empty; fill it in"),
    "no group": ("x,t,y\n1,u,2\n2,,3\n", "school.csv, line 3, column 't': is empty; fill it in"),
    "NaN": ("x,t,y\n1,u,2\nnan,u,3\n", "school.csv, line 3, column 'x': nan is no finite number"),
    "infinity": ("x,t,y\n1,u,2\n1,u,inf\n", "school.csv, line 3, column 'y': inf is no finite number"),
    "a decimal comma": ("x;t;y\n1;u;2\n1,5;u;3\n", "school.csv, line 3, column 'x': '1,5' is no number; write it with a decimal point."),
    "an underscore": ("x,t,y\n1_000,u,2\n1,u,3\n", "school.csv, line 2, column 'x': '1_000' is no number"),
    "texts": ("x,t,y\nOslo,u,2\nOslo,u,3\n", "school.csv, line 2, column 'x': 'Oslo' is a text; encode the column as categories, or leave it out of the features."),
    "a field less": ("x,t,y\n1,u,2\n1,u\n", "school.csv, line 3: has 2 fields, where the header has 3; quote what holds a delimiter, which is ','."),
    "a field more after a break": ('x,t,y\n1,"u\nv",2\n\n1,u,2,3\n', "school.csv, line 5: has 4 fields"),
    "line breaks": ('x,t,y\n1,"u\nv",2\n\n?,u,2\n', "school.csv, line 5, column 'x': '?' is no number"),
    "an open quote": ('x,t,y\n1,"u,2\n1,u,3\n', "school.csv, line 2: cannot be read, unexpected end of data."),
    "a quote within": ('x,t,y\n1,"u"v,2\n', "school.csv, line 2: cannot be read, ',' expected after '\"'."),
    "nothing": ("", "school.csv: is empty; its first line must name the columns."),
    "no rows": ("x,t,y\n", "school.csv: has no rows below the names of its columns."),
    "no header": ("1,2,3\n1,2,3\n", "school.csv, line 1: must name the columns, and holds numbers only: '1', '2', '3'."),
    "names twice": ("x,t,y,x\n1,2,3,4\n", "school.csv, line 1: column names must differ, but 'x' occur more than once."),
    "no label": ("x,t\n1,2\n", "school.csv: column 'y' is not among the 2 that are known: 'x', 't'."),
    "one class": ("x,t,y\n1,2,no\n", "ys has one class only, 'no'"),
    "no feature": ("t,y\n1,2\n", "school.csv: has no column besides the label and the group"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("first", [1, 100])
def test_what_is_wrong_is_named_by_file_line_and_column(tmp_path, monkeypatch, name, first):
    monkeypatch.setattr(_column_types, "_FIRST", first)
    text, message = BROKEN[name]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        mj.datasets.csv(write(tmp_path, text), "y", "t")
    assert "\n" not in str(error.value)


class Counted(str):
    """A name that counts how often it is compared or hashed."""

    looked_at = 0

    def __eq__(self, other):
        Counted.looked_at += 1
        return str.__eq__(self, other)

    def __hash__(self):
        Counted.looked_at += 1
        return str.__hash__(self)


def test_many_columns_are_looked_up_once_each():
    count, rows = 300, np.ones((2, 300))
    names = [Counted(f"c{j}") for j in range(count)] + [Counted("town")]
    table = mj.datasets.Table("a.csv", tuple(names), (*rows.T, np.array(["Oslo", "Bergen"], object)), np.array([2, 3]))
    Counted.looked_at = 0
    assert table.numbers([*names[:-1], "town=Oslo", "town=Bergen"])[:, -2:].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert Counted.looked_at < 10 * count
    like = mj.Names(tasks=("u",), features=tuple(names[:-1]))
    frame = of_frames.Ragged([rows], [np.ones(2)], ["task 'u'"], None, like)
    Counted.looked_at = 0
    assert of_frames._in_order_of(frame, like).names is like
    assert Counted.looked_at < 10 * count


def test_the_longest_column_that_a_level_may_be_of_is_meant(tmp_path):
    table = mj.datasets.read_table(write(tmp_path, "a,a=b,n\nb=c,c,1\nb=c,d,2\n"))
    assert table.numbers(["a=b=c", "a=b=d"]).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_files_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "old.csv"
    path.write_bytes("x,t,y\n1,u,2\n1,Åre,2\n".encode("latin-1"))
    with pytest.raises(ValueError, match="old.csv, line 3: is no UTF-8; save the file as UTF-8"):
        mj.datasets.read_table(path)
    path = tmp_path / "not.csv.gz"
    path.write_text("x,t,y\n1,u,2\n")
    with pytest.raises(ValueError, match="not.csv.gz: cannot be read, Not a gzipped file"):
        mj.datasets.read_table(path)
    path.write_bytes(gzip.compress(SCHOOL.encode() * 50)[:60])
    with pytest.raises(ValueError, match="not.csv.gz: cannot be read, Compressed file ended"):
        mj.datasets.read_table(path)
    wrongs: list[Any] = [tmp_path, tmp_path / "nowhere", 3, "", "a\0b"]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="csv: path must be that of a file"):
            mj.datasets.csv(wrong, "y", "t")


def test_arguments_that_do_not_fit_are_named(tmp_path):
    path = write(tmp_path, SCHOOL)
    cases: dict[str, dict[str, Any]] = {
        "label and group must be two columns": {"label": "school"},
        "features must be a list of different names": {"features": ["hours", "hours"]},
        "features must not hold the label or the group": {"features": ["hours", "score"]},
        "column 'ours' is not among the 4": {"features": ["ours"]},
        "column 'tow' is not among the 4": {"categories": ["tow"]},
        "categories must be one of 'refuse', 'encode'": {"categories": "drop"},
        'delimiter must be one character such as ";"': {"delimiter": ";;"},
        "like must be a TaskData": {"like": 3},
    }
    for message, wrong in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            mj.datasets.csv(path, **{"label": "score", "group": "school", **wrong})
    twice = write(tmp_path, "town,town=Oslo,t,y\nOslo,1,u,2\n")
    with pytest.raises(ValueError, match="features must differ, but 'town=Oslo' occur more than once"):
        mj.datasets.csv(twice, "y", "t", categories="encode")
