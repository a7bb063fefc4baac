"""Data sets of the MOCHA paper from files: MATLAB's cells, UCI's HAR, and a network of vehicle sensors."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import numpy as np

from mocha_jax._core import check
from mocha_jax.datasets._readers import Users

# Features that the sensor network computes of a window, of sound and of vibration alike.
_SPECTRUM = 50


def cells(path: str | os.PathLike[str]) -> Users:
    """Read a ``.mat`` file of the MOCHA authors' code, with cells ``X`` and ``Y`` of one task each.

    ``X`` has samples ``[n_t, d]`` in every cell and ``Y`` their labels, in a row or a column; the cells lie in a row or
    a column too. Labels are left as they are. The ``vehicle.mat`` and ``school.mat`` of later papers have this form.
    It needs SciPy, and a file that MATLAB saved as -v7 or earlier.

    Returns:
      Samples by task. The names count from "1", as MATLAB does.

    Examples:
      >>> import pathlib, tempfile, scipy.io
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "two.mat"
      >>> x, y = np.empty((1, 2), object), np.empty((1, 2), object)
      >>> x[0, 0], x[0, 1] = np.ones((3, 2)), np.zeros((4, 2))
      >>> y[0, 0], y[0, 1] = np.ones((3, 1)), -np.ones((4, 1))
      >>> scipy.io.savemat(path, {"X": x, "Y": y})
      >>> found = cells(path)
      >>> found.names, [x.shape for x in found.xs], found.ys[0].tolist()
      (['1', '2'], [(3, 2), (4, 2)], [1.0, 1.0, 1.0])
    """
    if not isinstance(path, str | os.PathLike) or not str(path) or not Path(path).is_file():
        raise ValueError(f"cells: path must be that of a .mat file, got {check.shown(path)}.")
    file = _loaded(path)
    if missing := [name for name in ("X", "Y") if name not in file]:
        raise ValueError(
            f"cells: {path} has no {' and '.join(missing)}; it must hold cells X and Y, one for each task."
        )
    for name in ("X", "Y"):
        if file[name].dtype != object or not file[name].size:
            raise ValueError(f"cells: {path}: {name} is no array of cells, one for each task.")
    xs, ys = file["X"].ravel(), file["Y"].ravel()
    if len(xs) != len(ys):
        raise ValueError(f"cells: {path} has {len(xs)} cells X but {len(ys)} cells Y.")
    names = [str(t + 1) for t in range(len(xs))]
    series = [
        _samples(f"cells: {path}: task {name}", x, y)
        for name, x, y in zip(names, xs, ys, strict=True)
    ]  # fmt: skip
    width = series[0][0].shape[1]
    for name, (x, _) in zip(names, series, strict=True):
        if x.shape[1] != width:
            raise ValueError(
                f"cells: {path}: task {name} has samples of length {x.shape[1]}, where those of task 1 have {width}."
            )
    return Users(names, [x for x, _ in series], [y for _, y in series])


def har(folder: str | os.PathLike[str], *, part: str | None = None) -> Users:
    r"""Read Human Activity Recognition with smartphones (Anguita et al. 2013) as UCI has it, one client a subject.

    The files are ``X_train.txt``, ``y_train.txt`` and ``subject_train.txt`` in one folder, and those of ``test`` in
    another. Labels are the activities: 1 walking, 2 upstairs, 3 downstairs, 4 sitting, 5 standing, 6 lying. The MOCHA
    paper tells sitting from the rest.

    Args:
      folder: where they are, at any depth.
      part: "train" or "test"; default both, for no subject is in both and clients need samples of their own to test on.

    Returns:
      Samples by subject, in the order of their numbers, which are the names.

    Examples:
      >>> import pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> for name, lines in dict(X="0.5 1\n0 1\n1 1\n", y="4\n4\n6\n", subject="2\n1\n2\n").items():
      ...     _ = (folder / f"{name}_train.txt").write_text(lines)
      >>> found = har(folder, part="train")
      >>> found.names, found.xs[1].tolist(), found.ys[1].tolist()
      (['1', '2'], [[0.5, 1.0], [1.0, 1.0]], [4.0, 6.0])
    """
    _check_folder("har", folder, "X_train.txt and X_test.txt in it")
    if part is not None:
        check.one_of("har", "part", part, ("train", "test"))
    parts = [_har_part(Path(folder), name) for name in (("train", "test") if part is None else (part,))]
    widths = [x.shape[1] for x, _, _ in parts]
    if len(set(widths)) > 1:
        raise ValueError(f"har: X_test.txt of {folder} has {widths[1]} columns, where X_train.txt has {widths[0]}.")
    x, y, subject = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    numbers = np.unique(subject)
    rows = [subject == number for number in numbers]
    return Users([str(number) for number in numbers], [x[one] for one in rows], [y[one] for one in rows])


def vehicle(folder: str | os.PathLike[str]) -> Users:
    """Read the vehicles of a sensor network (Duarte & Hu 2004), one client a sensor: tracked (AAV) or wheeled (DW).

    The folder is ``events`` of their ``event.zip``, whose ``runs/aav3/n41`` has what sensor 41 recorded in run 3 of
    vehicle AAV. A sample is a line of ``aav3evfeat41_1_1.txt``, the spectrum of the sound, and the same line of
    ``aav3evfeat41_1_2.txt``, that of the vibration: 50 numbers each, and behind them the class. 20 runs and 23 sensors
    have 49,264 samples of 100 features; LIBSVM's SensIT has twice as many, half of which are noise. The folders
    ``acoustic_1`` and ``seismic_2``, with the same by kind of sensor, and the time series, ``aav3event41_1_1.txt``,
    are passed over.

    The source of the layout is the files, and the reader of the VIRTUAL authors (``lucori/virtual``,
    ``source/data_utils.py``). That one leaves out folders with the files of two sensors; they are read here.

    Args:
      folder: where the runs are, at any depth.

    Returns:
      Samples by sensor, in the order of their numbers: "n1", "n2" and so on. Labels are +1 for AAV and -1 for DW.

    Examples:
      >>> import pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> for run in ("aav3", "dw2"):
      ...     (folder / run / "n41").mkdir(parents=True)
      ...     for kind in (1, 2):
      ...         path = folder / run / "n41" / f"{run}evfeat41_1_{kind}.txt"
      ...         _ = path.write_text(50 * f" {kind / 4}" + " 1 0 0")
      >>> found = vehicle(folder)
      >>> found.names, found.xs[0].shape, found.xs[0][0, 49:51].tolist(), found.ys[0].tolist()
      (['n41'], (2, 100), [0.25, 0.5], [1.0, -1.0])
    """
    _check_folder("vehicle", folder, "runs such as aav3 and dw2 in it")
    pairs_of: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for (sensor, name, _), files in _recordings(Path(folder)).items():
        x = _spectra(files)
        pairs_of.setdefault(sensor, []).append((x, np.full(len(x), 1.0 if name == "aav" else -1.0, np.float32)))
    if not pairs_of:
        raise ValueError(f"vehicle: there is no run in {folder}, with files such as aav3/n41/aav3evfeat41_1_1.txt.")
    xs, ys = ([np.concatenate([pair[i] for pair in pairs]) for pairs in pairs_of.values()] for i in (0, 1))
    return Users([f"n{sensor}" for sensor in pairs_of], xs, ys)


def _line(error: Exception) -> str:
    """The reason of an error on one line, without NumPy's advice behind a semicolon."""
    return " ".join(str(error).partition(";")[0].split()).rstrip(".")


def _loaded(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The variables X and Y of a MATLAB file."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ImportError(f"cells: reading {path} needs SciPy (pip install scipy).") from error
    try:
        return loadmat(path, appendmat=False, variable_names=("X", "Y"))
    except NotImplementedError as error:  # HDF5, which SciPy does not read
        raise ValueError(f"cells: {path} is of MATLAB's version 7.3; save it with -v7 to be read here.") from error
    except Exception as error:  # a file cut short ends in whatever its bytes lead SciPy to
        raise ValueError(f"cells: {path} is no MATLAB file, or a broken one: {_line(error)}.") from error


def _samples(owner: str, x: object, y: object) -> tuple[np.ndarray, np.ndarray]:
    """Samples ``[n, d]`` and labels ``[n]`` of a task, from cells that may be sparse."""
    dense = [np.asarray(cell.toarray() if hasattr(cell, "toarray") else cell) for cell in (x, y)]
    if any(cell.ndim != 2 or cell.dtype.kind not in "biuf" for cell in dense):
        raise ValueError(f"{owner} has samples or labels that are no matrix of numbers.")
    rows, labels = dense
    if not rows.size:
        raise ValueError(f"{owner} has no samples.")
    if labels.size != len(rows) or 1 not in labels.shape:
        raise ValueError(
            f"{owner} has {len(rows)} samples in X, which Y of shape {list(labels.shape)} does not give one label each."
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, which is said below
        rows, labels = rows.astype(np.float32), labels.ravel().astype(np.float32)
    if not (np.isfinite(rows).all() and np.isfinite(labels).all()):
        raise ValueError(f"{owner} has samples or labels that are not finite.")
    return rows, labels


def _check_folder(owner: str, folder: object, content: str) -> None:
    if not isinstance(folder, str | os.PathLike) or not str(folder) or not Path(folder).is_dir():
        raise ValueError(f"{owner}: folder must be one with {content}, got {check.shown(folder)}.")


def _table(owner: str, path: Path) -> np.ndarray:
    """The numbers of a text file, ``[lines, columns]`` float32."""
    if not path.is_file():
        raise ValueError(f"{owner}: there is no {path}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty file, which is said below
            table = np.loadtxt(path, dtype=np.float32, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{owner}: {path} is no table of numbers: {_line(error)}.") from error
    if not table.size:
        raise ValueError(f"{owner}: {path} is empty.")
    if not np.isfinite(table).all():
        raise ValueError(f"{owner}: {path} has numbers that are not finite.")
    return table


def _har_part(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The samples, activities and subjects of a part."""
    name = f"X_{part}.txt"
    paths = sorted(folder.rglob(name))
    if len(paths) != 1:
        count = "no" if not paths else f"more than one ({len(paths)})"
        raise ValueError(f"har: there is {count} {name} in {folder}.")
    x = _table("har", paths[0])
    columns = []
    for other in ("y", "subject"):
        path = paths[0].with_name(f"{other}_{part}.txt")
        column = _table("har", path)
        if column.shape != (len(x), 1):
            raise ValueError(
                f"har: {path} has {len(column)} lines of {column.shape[1]} numbers, where {name} has {len(x)} samples."
            )
        if not (column == np.rint(column)).all():
            raise ValueError(f"har: {path} has numbers that are not whole.")
        columns.append(column[:, 0])
    return x, columns[0], columns[1].astype(int)


def _recordings(folder: Path) -> dict[tuple[int, str, int], dict[str, Path]]:
    """The two files of every recording, which is of a sensor, a vehicle and a run, in this order."""
    files_of: dict[tuple[int, str, int], dict[str, Path]] = {}
    for path in sorted(folder.rglob("*evfeat*.txt")):
        # The sensor is that of the file: the folder n4 of run aav7 has the files of sensors 4 and 5.
        name = re.fullmatch(r"(aav|dw)(\d+)evfeat(\d+)_1_([12])\.txt", path.name)
        if name is None or not re.fullmatch(r"n\d+", path.parent.name):
            continue
        files = files_of.setdefault((int(name[3]), name[1], int(name[2])), {})
        if name[4] in files:
            raise ValueError(f"vehicle: {path} is in {files[name[4]].parent} too.")
        files[name[4]] = path
    return dict(sorted(files_of.items()))


def _spectra(files: dict[str, Path]) -> np.ndarray:
    """Samples of a recording: the spectra of its sound and of its vibration, side by side."""
    first = next(iter(files.values()))
    spectra = []
    for kind, what in (("1", "sound"), ("2", "vibration")):
        if kind not in files:
            raise ValueError(f"vehicle: {first} comes without the file of the {what}, which ends in _{kind}.txt.")
        table = _table("vehicle", files[kind])
        if table.shape[1] < _SPECTRUM:
            raise ValueError(f"vehicle: {files[kind]} has {table.shape[1]} columns, where a spectrum has {_SPECTRUM}.")
        spectra.append(table[:, :_SPECTRUM])
    if len(spectra[0]) != len(spectra[1]):
        raise ValueError(f"vehicle: {first} has {len(spectra[0])} samples, where the vibration has {len(spectra[1])}.")
    return np.concatenate(spectra, axis=1)
