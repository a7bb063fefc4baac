"""MATLAB's cells, UCI's HAR and the vehicle sensors, from files written here."""

import shutil
import sys
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse

import mocha_jax as mj

RNG = np.random.default_rng(0)


def in_cells(arrays, column=False):
    cells = np.empty((len(arrays), 1) if column else (1, len(arrays)), object)
    for t, array in enumerate(arrays):
        cells.flat[t] = array
    return cells


def saved(path, x, y):
    scipy.io.savemat(path, {"X": x, "Y": y, "other": "passed over"})
    return path


SIZES = (3, 1, 5)
XS = [RNG.normal(size=(n, 2)) for n in SIZES]
YS = [RNG.choice([-1.0, 1.0], n) for n in SIZES]


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("lying", [False, True])
def test_cells_lie_in_rows_or_columns(tmp_path, column, lying):
    ys = [y[None, :] if lying else y[:, None] for y in YS]
    found = mj.datasets.cells(str(saved(tmp_path / "tasks.mat", in_cells(XS, column), in_cells(ys, not column))))
    assert found.names == ["1", "2", "3"]
    for x, y, want, labels in zip(found.xs, found.ys, XS, YS, strict=True):
        assert x.dtype == y.dtype == np.float32
        np.testing.assert_array_equal(x, np.float32(want))
        np.testing.assert_array_equal(y, labels)
    assert mj.pack_tasks(found.xs, found.ys).x.shape == (3, 5, 2)


@pytest.mark.parametrize("labels", [(0, 1), (1, 2), (False, True), (3.5, 69.0)])
def test_labels_are_left_as_they_are(tmp_path, labels):
    ys = [np.array([labels] * 2).reshape(4, 1)] * 2
    found = mj.datasets.cells(saved(tmp_path / "tasks.mat", in_cells([np.eye(4)] * 2), in_cells(ys)))
    assert found.ys[1].tolist() == [float(label) for label in labels] * 2


def test_sparse_cells_are_read(tmp_path):
    x = np.array([[0.0, 2.0], [3.0, 0.0]])
    cells = in_cells([scipy.sparse.csc_array(x), x])
    found = mj.datasets.cells(saved(tmp_path / "tasks.mat", cells, in_cells([np.ones((2, 1))] * 2)))
    np.testing.assert_array_equal(found.xs[0], x)


ONES, TWO = np.ones((2, 1)), np.ones((2, 2))
CELLS: dict[str, tuple[Any, str]] = {
    "no Y": ({"X": in_cells([TWO])}, "tasks.mat has no Y; it must hold cells X and Y, one for each task"),
    "neither": ({"A": 1.0}, "tasks.mat has no X and Y;"),
    "a matrix": ({"X": TWO, "Y": in_cells([ONES])}, "tasks.mat: X is no array of cells"),
    "no cells": ({"X": in_cells([]), "Y": in_cells([])}, "tasks.mat: X is no array of cells"),
    "fewer cells": ({"X": in_cells([TWO, TWO]), "Y": in_cells([ONES])}, "tasks.mat has 2 cells X but 1 cells Y"),
    "fewer labels": (([TWO, TWO], [ONES, np.ones((3, 1))]), r"task 2 has 2 samples in X, which Y of shape \[3, 1\] does not give"),
    "labels of two columns": (([TWO, np.ones((4, 2))], [ONES, TWO]), r"task 2 has 4 samples in X, which Y of shape \[2, 2\]"),
    "other widths": (([TWO, np.ones((2, 3))], [ONES, ONES]), "task 2 has samples of length 3, where those of task 1 have 2"),
    "no samples": (([TWO, np.ones((0, 2))], [ONES, np.ones((0, 1))]), "tasks.mat: task 2 has no samples"),
    "words": (([TWO, TWO], [ONES, "ab"]), "task 2 has samples or labels that are no matrix of numbers"),
    "complex": (([TWO, TWO * 1j], [ONES, ONES]), "task 2 has samples or labels that are no matrix of numbers"),
    "cells in cells": (([TWO, in_cells([TWO])], [ONES, ONES]), "task 2 has samples or labels that are no matrix"),
    "NaN": (([TWO, TWO * np.nan], [ONES, ONES]), "task 2 has samples or labels that are not finite"),
    "too large": (([TWO, TWO], [ONES, ONES * 1e300]), "task 2 has samples or labels that are not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", CELLS)
def test_a_broken_cell_is_named_with_its_task(tmp_path, name):
    content, message = CELLS[name]
    if isinstance(content, tuple):
        content = {"X": in_cells(content[0]), "Y": in_cells(content[1])}
    scipy.io.savemat(tmp_path / "tasks.mat", content)
    with pytest.raises(ValueError, match=message) as error:
        mj.datasets.cells(tmp_path / "tasks.mat")
    assert "\n" not in str(error.value)


def test_a_file_that_is_none_of_matlab_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"cells: path must be that of a .mat file"):
        mj.datasets.cells(tmp_path / "nowhere.mat")
    path = saved(tmp_path / "tasks.mat", in_cells(XS), in_cells([y[:, None] for y in YS]))
    whole = path.read_bytes()
    # A header of 116 bytes, then in eight more where MATLAB has what it need not, the version and the order of bytes.
    hdf5 = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(384) + b"\x89HDF\r\n\x1a\n"
    for content in (b"", b"X and Y", b"no MATLAB file " * 40, whole[:200], whole[: len(whole) // 2], hdf5):
        path.write_bytes(content)
        message = (
            "version 7.3; save it with -v7" if content is hdf5 else "tasks.mat is no MATLAB file, or a broken one: "
        )
        with pytest.raises(ValueError, match=message) as error:
            mj.datasets.cells(path)
        assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ImportError, match=r"tasks.mat needs SciPy \(pip install scipy\)"):
        mj.datasets.cells(path)


def uci(folder, **changes):
    """Both parts of three subjects, of whom the first is in both."""
    tables: dict[str, Any] = {
        "X_train": np.arange(8.0).reshape(4, 2), "y_train": [1, 2, 3, 4], "subject_train": [11, 2, 11, 2],
        "X_test": -np.arange(4.0).reshape(2, 2), "y_test": [5, 6], "subject_test": [30, 11],
    }  # fmt: skip
    for name, table in (tables | changes).items():
        place = folder / "UCI HAR Dataset" / name.partition("_")[2]
        place.mkdir(parents=True, exist_ok=True)
        if isinstance(table, str):
            (place / f"{name}.txt").write_text(table)
        elif table is not None:
            np.savetxt(place / f"{name}.txt", table)
    return folder


def test_har_is_dealt_to_its_subjects(tmp_path):
    found = mj.datasets.har(uci(tmp_path))
    assert found.names == ["2", "11", "30"]
    assert [x.tolist() for x in found.xs] == [[[2, 3], [6, 7]], [[0, 1], [4, 5], [-2, -3]], [[0, -1]]]
    assert [y.tolist() for y in found.ys] == [[2, 4], [1, 3, 6], [5]]
    train, test = (mj.datasets.har(str(tmp_path), part=part) for part in ("train", "test"))
    assert (train.names, test.names) == (["2", "11"], ["11", "30"])
    assert train.ys[1].tolist() + test.ys[0].tolist() == found.ys[1].tolist()
    assert mj.pack_tasks(found.xs, found.ys).x.shape == (3, 3, 2)


HAR: dict[str, tuple[dict[str, Any], str]] = {
    "no X_train": (dict(X_train=None), "har: there is no X_train.txt in"),
    "no X_test": (dict(X_test=None), "har: there is no X_test.txt in"),
    "no subjects": (dict(subject_test=None), "har: there is no .*subject_test.txt"),
    "fewer labels": (dict(y_train=[1, 2, 3]), "y_train.txt has 3 lines of 1 numbers, where X_train.txt has 4 samples"),
    "more columns of labels": (dict(y_train=TWO.repeat(2, axis=0)), "y_train.txt has 4 lines of 2 numbers, where X_train.txt"),
    "half a subject": (dict(subject_test=[1, 2.5]), "subject_test.txt has numbers that are not whole"),
    "other widths": (dict(X_test=np.ones((2, 3))), "X_test.txt of .* has 3 columns, where X_train.txt has 2"),
    "ragged": (dict(X_test="1 2\n3\n"), "X_test.txt is no table of numbers: the number of columns changed from 2 to 1 at row 2\\.$"),
    "words": (dict(y_test="sitting\nlying\n"), "y_test.txt is no table of numbers: could not convert string 'sitting'"),
    "bytes": (dict(y_test="\udcff\n"), "y_test.txt is no table of numbers"),
    "nothing": (dict(X_train=""), "X_train.txt is empty"),
    "NaN": (dict(X_train="1 nan\n" * 4), "X_train.txt has numbers that are not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", HAR)
def test_a_broken_file_of_har_is_named(tmp_path, name):
    changes, message = HAR[name]
    if name == "bytes":
        uci(tmp_path)
        (tmp_path / "UCI HAR Dataset" / "test" / "y_test.txt").write_bytes(b"\xff\xfe\x00\n")
    else:
        uci(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        mj.datasets.har(tmp_path)
    assert "\n" not in str(error.value)


def test_what_of_har_is_not_there_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"har: folder must be one with X_train.txt and X_test.txt in it, got"):
        mj.datasets.har(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="har: part must be one of 'train', 'test', got 'both'"):
        mj.datasets.har(uci(tmp_path), part="both")
    assert mj.datasets.har(uci(tmp_path / "half", X_test=None), part="train").names == ["2", "11"]
    shutil.copytree(tmp_path / "UCI HAR Dataset", tmp_path / "copy")
    with pytest.raises(ValueError, match=r"there is more than one \(3\) X_train.txt in"):
        mj.datasets.har(tmp_path)


def spectra(n, columns):
    table = np.zeros((n, columns))
    table[:, :50] = RNG.normal(size=(n, 50)).round(4)
    table[:, 50:] = 7.0  # the class, which a reader of features must not read
    return table


def recorded(folder, run, sensor, n, place=None):
    """The two files of a recording, named as Duarte and Hu name them; sound has a column more."""
    place = folder / "events" / "runs" / run / (place or f"n{sensor}")
    place.mkdir(parents=True, exist_ok=True)
    tables = [spectra(n, columns) for columns in (54, 53)]
    for kind, table in enumerate(tables, 1):
        np.savetxt(place / f"{run}evfeat{sensor}_1_{kind}.txt", table, fmt=" %.7e")
        np.savetxt(place / f"{run}event{sensor}_1_{kind}.txt", table[:, :1])
    return np.concatenate([table[:, :50] for table in tables], axis=1)


@pytest.mark.slow
def test_vehicles_are_dealt_to_the_sensors(tmp_path):
    one = {run: recorded(tmp_path, run, 1, n) for run, n in (("dw2", 2), ("aav10", 3), ("aav3", 1))}
    last = recorded(tmp_path, "aav3", 41, 4)
    stray = recorded(tmp_path, "dw2", 5, 2, place="n41")  # the files of sensor 5 in the folder of 41
    by_kind = tmp_path / "events" / "runs" / "aav3" / "acoustic_1" / "features"
    by_kind.mkdir(parents=True)
    np.savetxt(by_kind / "aav3evfeat41_1_1.txt", np.ones((9, 54)))
    found = mj.datasets.vehicle(tmp_path / "events")
    assert found.names == ["n1", "n5", "n41"]
    np.testing.assert_allclose(found.xs[0], np.concatenate([one["aav3"], one["aav10"], one["dw2"]]), rtol=1e-6)
    np.testing.assert_allclose(found.xs[1], stray, rtol=1e-6)
    np.testing.assert_allclose(found.xs[2], last, rtol=1e-6)
    assert [y.tolist() for y in found.ys] == [[1, 1, 1, 1, -1, -1], [-1, -1], [1, 1, 1, 1]]
    data = mj.pack_tasks(found.xs, found.ys)
    assert np.isfinite(
        mj.solve(mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(1.0, 1.0))).weights
    ).all()


SOUND, VIBRATION = "aav3evfeat1_1_1.txt", "aav3evfeat1_1_2.txt"
VEHICLE: dict[str, tuple[dict[str, Any], str]] = {
    "no sound": ({SOUND: None}, f"{VIBRATION} comes without the file of the sound, which ends in _1.txt"),
    "no vibration": ({VIBRATION: None}, f"{SOUND} comes without the file of the vibration, which ends in _2.txt"),
    "fewer lines": ({VIBRATION: np.ones((2, 53))}, f"{SOUND} has 3 samples, where the vibration has 2"),
    "fewer columns": ({SOUND: np.ones((3, 49))}, f"{SOUND} has 49 columns, where a spectrum has 50"),
    "words": ({VIBRATION: "a b"}, f"{VIBRATION} is no table of numbers"),
    "nothing": ({VIBRATION: ""}, f"{VIBRATION} is empty"),
    "infinite": ({SOUND: np.full((3, 53), np.inf)}, f"{SOUND} has numbers that are not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", VEHICLE)
def test_a_broken_file_of_a_sensor_is_named(tmp_path, name):
    changes, message = VEHICLE[name]
    recorded(tmp_path, "aav3", 1, 3)
    for file, content in changes.items():
        path = tmp_path / "events" / "runs" / "aav3" / "n1" / file
        if content is None:
            path.unlink()
        elif isinstance(content, str):
            path.write_text(content)
        else:
            np.savetxt(path, content)
    with pytest.raises(ValueError, match=message) as error:
        mj.datasets.vehicle(tmp_path)
    assert "\n" not in str(error.value)


def test_what_of_the_vehicles_is_not_there_is_said(tmp_path):
    with pytest.raises(ValueError, match="vehicle: folder must be one with runs such as aav3 and dw2 in it, got"):
        mj.datasets.vehicle(tmp_path / "nowhere")
    (tmp_path / "aav3" / "acoustic_1").mkdir(parents=True)
    (tmp_path / "aav3" / "acoustic_1" / SOUND).write_text("1 " * 53)
    with pytest.raises(
        ValueError, match=r"vehicle: there is no run in .*, with files such as aav3/n41/aav3evfeat41_1_1.txt"
    ):
        mj.datasets.vehicle(tmp_path)
    recorded(tmp_path, "aav3", 1, 3)
    recorded(tmp_path, "aav3", 1, 3, place="n2")
    with pytest.raises(ValueError, match=r"n2.aav3evfeat1_1_1.txt is in .*n1 too"):
        mj.datasets.vehicle(tmp_path)
