"""What is wrong with a command ends in one sentence that names the option, before anything is trained or replaced."""

import csv
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.cli import main

ROWS = 24
COLUMNS = {
    "shop": ["Oslo", "Rome", "Kiel"] * 8,
    "price": [f"{1 + i / 8:.3f}" for i in range(ROWS)],
    "day": [f"2024-03-{i + 1:02d}" for i in range(ROWS)],
    "way": ["web", "phone"] * 12,
    "comma": [f"{i},5" for i in range(ROWS)],
    "name": [f"item {i}" for i in range(ROWS)],
    "mixed": ["1", "2", "3a", "4"] * 6,
    "gap": ["1", "", "n/a", "NaN"] * 6,
    "none": [""] * ROWS,
    "three": ["a", "b", "c"] * 8,
    "one": ["a"] * ROWS,
    "sold": [f"{i % 7}.5" for i in range(ROWS)],
}


def write(path, columns):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return str(path)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to work in, with tables and the file of a model."""
    monkeypatch.chdir(tmp_path)
    write("t.csv", COLUMNS)
    write("index.csv", {"": range(ROWS)} | {name: COLUMNS[name] for name in ("shop", "price", "sold")})
    names = mj.Names(tasks=("Kiel", "Oslo", "Rome"), features=("price", "gap"))
    model = mj.LinearModel(np.arange(6.0).reshape(3, 2), np.ones(3), names, trained={"group": "shop", "label": "sold"})
    model.save("m.npz")
    Path("folder").mkdir()
    return tmp_path


def refused(capsys, *arguments, code=2):
    """Run a command that must end in one sentence; that sentence."""
    before = contents(".")
    found: str | int | None
    try:
        found = main(arguments)
    except SystemExit as stop:
        found = stop.code
    said = capsys.readouterr()
    assert (found, said.out) == (code, "")
    assert contents(".") == before
    (sentence,) = [line for line in said.err.splitlines() if "error:" in line]
    assert sentence.endswith((".", ")"))
    return sentence


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in Path(folder).rglob("*")}


def fit(*options, features=("price",), label="sold", group="shop"):
    return [
        "fit",
        "t.csv",
        "--label",
        label,
        "--group",
        group,
        "--features",
        *features,
        "--folds",
        "3",
        "--quiet",
        *options,
    ]


FITS = {
    "no file": (["fit", "nope.csv", "--label", "y", "--group", "g"], "error: nope.csv: no such file."),
    "a folder": (["fit", "folder", "--label", "y", "--group", "g"], "folder: is no file, but a folder."),
    "label": (fit(label="y"), "--label: t.csv has no column 'y'; its columns are 'shop', 'price'"),
    "group": (fit(group="y"), "--group: t.csv has no column 'y'"),
    "both": (fit(group="sold"), "--label and --group must be two columns, got 'sold' for both"),
    "features": (fit(features=["size"]), "--features: t.csv has no column 'size'"),
    "label in features": (fit(features=["price", "sold"]), "--features: 'sold' is the column of the label"),
    "exclude": (fit("--exclude", "size"), "--exclude: t.csv has no column 'size'"),
    "nothing left": (fit("--exclude", "price"), "there is no column left to predict from"),
    "categories": (fit("--categories", "size"), "--categories: t.csv has no column 'size'"),
    "no name": (["fit", "index.csv", "--label", "sold", "--group", "shop"], "column 1 has no name, as row numbers have none; --exclude '' leaves it out"),
    "texts": (fit(features=["way"]), "column 'way': holds texts such as 'web'; --encode makes a feature of every value, --exclude way leaves it out."),
    "dates": (fit("--encode", features=["day"]), "column 'day': holds dates such as '2024-03-01'; --exclude day leaves it out, --categories day encodes"),
    "commas": (fit("--encode", features=["comma"]), "column 'comma': holds numbers with decimal commas such as '0,5'; --decimal-comma reads them."),
    "names": (fit("--encode", features=["name"]), "column 'name': holds 24 different texts in 24 rows, as names or ids do, such as 'item 0'; --exclude name"),
    "mixed": (fit("--encode", features=["mixed"]), "t.csv, line 4, column 'mixed': '3a' is no number; --exclude mixed leaves it out, --categories mixed"),
    "missing": (fit(features=["price", "gap", "none"]), "t.csv: 24 of 24 rows lack a value (gap: 18, none: 24); --drop-missing leaves these rows out, --impute median fills in numbers."),
    "all missing": (fit("--impute", "median", features=["none"]), "column 'none': has no value at all; --exclude none leaves it out."),
    "dropped": (fit("--drop-missing", features=["none"]), "no row has all its values; --exclude leaves columns out."),
    "label of commas": (fit(label="comma"), "column 'comma': holds numbers with decimal commas such as '0,5'; --decimal-comma reads them."),
    "label of classes": (fit(label="three"), "--label: column 'three' holds 3 different texts, and fit predicts numbers or two classes"),
    "label of one class": (fit(label="one"), "--label: column 'one' holds 1 different texts"),
    "missing labels": (fit("--impute", "median", label="gap"), "18 of 24 rows lack a value (gap: 18); --drop-missing leaves these rows out."),
    "groups of a row": (fit(group="name"), "--group: column 'name' has 24 different values in 24 rows, less than two rows for each; name a column whose values repeat"),
    "many folds": (fit("--folds", "9"), "--folds: must be at most 8, the rows of the largest group, got 9."),
    "one fold": (fit("--folds", "1"), "argument --folds: must be an integer >= 2, got '1'."),
    "lambdas": (fit("--lambdas", "1", "nan"), "argument --lambdas: must be a number > 0, got 'nan'."),
    "seed": (fit("--seed", "-1"), "argument --seed: must be an integer >= 0, got '-1'."),
    "delimiter": (fit("--delimiter", "ab"), "argument --delimiter: must be one character such as \";\", got 'ab'."),
    "save": (fit("--save", "trace"), "--save: trace is not among the --models global local mean related."),
    "a model that is there": (fit("--model", "m.npz"), "--model: m.npz is there already; --force replaces it, or name another file."),
    "a picture that is there": (fit("--picture", "m.npz.png", "--model", "n.npz"), "--picture: m.npz.png is there already; --force replaces it"),
    "the table": (fit("--force", "--model", "t.csv"), "--model: t.csv is read; give another file."),
    "one file for both": (fit("--model", "a.png", "--picture", "a.png"), "--picture: a.png is written by --model; give another file."),
    "form": (fit("--picture", "a.xyz"), "--picture: must end in one of "),
}  # fmt: skip


@pytest.mark.parametrize("name", FITS)
def test_fit_says_what_is_wrong_before_it_trains(place, capsys, monkeypatch, name):
    monkeypatch.setattr(mj, "cross_validate", None)
    Path("m.npz.png").write_bytes(b"a picture")
    arguments, sentence = FITS[name]
    assert sentence in refused(capsys, *arguments)


@pytest.mark.parametrize("option", ["--model", "--picture"])
@pytest.mark.parametrize("path", ["folder", "t.csv/m.png", "/proc/nope/m.png"])
def test_fit_finds_out_before_it_trains_what_cannot_be_written(place, capsys, monkeypatch, option, path):
    monkeypatch.setattr(mj, "cross_validate", None)
    assert f"{option}: {path} cannot be written: " in refused(capsys, *fit(option, path), code=1)


def test_fit_is_interrupted_in_a_sentence_and_leaves_nothing(place, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(mj, "cross_validate", interrupted)
    before = contents(".")
    assert main(fit()) == 130
    assert capsys.readouterr().err == "\nmocha-jax: interrupted.\n"
    assert contents(".") == before


SAVED = {
    "no model": (["predict", "nope.npz", "t.csv"], "error: nope.npz: no such file."),
    "no table": (["predict", "m.npz", "nope.csv"], "error: nope.csv: no such file."),
    "no model's file": (["predict", "t.csv", "t.csv"], "load_model: t.csv is no file of this library, or it is damaged."),
    "group": (["predict", "m.npz", "t.csv", "--group", "wood"], "--group: t.csv has no column 'wood'"),
    "unseen": (["predict", "m.npz", "few.csv", "--group", "three"], "'a' is not among the 3 that are known: 'Kiel', 'Oslo', 'Rome'; --unseen mean predicts by"),
    "missing": (["predict", "m.npz", "t.csv"], "t.csv: 18 of 24 rows lack a value (gap: 18); fill them in, or leave these rows out, or train with --impute median."),
    "probabilities": (["predict", "m.npz", "t.csv", "--probabilities"], "18 of 24 rows"),
    "the model": (["predict", "m.npz", "t.csv", "--out", "m.npz"], "--out: m.npz is read; give another file."),
    "label": (["compare", "m.npz", "t.csv", "--label", "grade"], "--label: t.csv has no column 'grade'"),
    "twice": (["compare", "m.npz", "m.npz", "few.csv"], "m.npz is named twice"),
    "task": (["inspect", "m.npz", "--task", "fir"], "--task: must be one of the model's groups, got 'fir'."),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_the_commands_of_saved_models_say_what_is_wrong(place, capsys, name):
    arguments, sentence = SAVED[name]
    write("few.csv", {name: COLUMNS[name] for name in ("shop", "three", "price", "sold")} | {"gap": range(ROWS)})
    assert sentence in refused(capsys, *arguments)


@pytest.fixture
def new(place):
    return write(place / "new.csv", {"shop": ["Rome", "Oslo"], "price": [2, 3], "gap": [1, 0]})


def test_predictions_take_the_place_of_old_ones_whole(place, new, capsys, monkeypatch):
    assert main(["predict", "m.npz", new, "--out", "p.csv"]) == 0
    assert Path("p.csv").read_text() == "shop,prediction\nRome,14.0\nOslo,7.0\n"

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "p.csv")

    write("new.csv", {"shop": ["Kiel"], "price": [1], "gap": [1]})
    before = contents(".")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(["predict", "m.npz", new, "--out", "p.csv"]) == 1
    assert capsys.readouterr().err == "mocha-jax: error: p.csv: No space left on device.\n"
    assert contents(".") == before
    assert main(["predict", "m.npz", new, "--out", "p.csv"]) == 0
    assert Path("p.csv").read_text() == "shop,prediction\nKiel,2.0\n"


def test_predictions_go_through_links_and_into_pipes(place, new):
    os.mkfifo("pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(Path("pipe").read_text()))
    reader.start()
    assert main(["predict", "m.npz", new, "--out", "pipe"]) == 0
    reader.join(timeout=10)
    Path("link").symlink_to("folder/p.csv")
    assert main(["predict", "m.npz", new, "--out", "link"]) == 0
    assert Path("link").is_symlink()
    assert got == [Path("folder/p.csv").read_text()]
    assert Path("pipe").is_fifo()


def test_missing_numbers_are_the_medians_of_training(place, capsys):
    model = mj.load_model("m.npz")
    mj.LinearModel(
        model.weights, model.intercept, model.names, trained={**model.trained, "medians": {"price": 5.0, "gap": 3.0}}
    ).save("i.npz")
    table = write("new.csv", {"shop": ["Rome", "Oslo"], "price": [2, ""], "gap": ["n/a", 0]})
    assert main(["predict", "i.npz", table]) == 0
    filled = write("filled.csv", {"shop": ["Rome", "Oslo"], "price": [2, 5], "gap": [3, 0]})
    assert main(["predict", "m.npz", filled]) == 0
    one, two = capsys.readouterr().out.split("shop,prediction\n")[1:]
    assert one == two
    assert main(["inspect", "i.npz"]) == 0
    assert "medians: price 5, gap 3" in capsys.readouterr().out


def test_decimal_commas_are_read_where_one_says_so(place, new, capsys):
    table = write("commas.csv", {"shop": ["Rome", "Oslo"], "price": ["2,0", "3"], "gap": ["1", "0,0"]})
    assert main(["predict", "m.npz", table, "--decimal-comma"]) == 0
    assert main(["predict", "m.npz", new]) == 0
    one, two = capsys.readouterr().out.split("shop,prediction\n")[1:]
    assert one == two
    assert "column 'price': holds numbers with decimal commas such as '2,0'; --decimal-comma reads them." in refused(
        capsys, "predict", "m.npz", table
    )


@pytest.mark.extended
def test_a_process_ends_without_a_traceback(place, new):
    here = {**os.environ, "PYTHONPATH": str(Path(mj.__file__).parents[1])}
    command = [sys.executable, "-m", "mocha_jax"]
    # A disk that is full after 20 bytes.
    limited = "import resource, runpy, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20)); " \
              "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); runpy.run_module('mocha_jax', run_name='__main__')"  # fmt: skip
    Path("p.csv").write_text("old")
    done = subprocess.run(
        [sys.executable, "-B", "-c", limited, "predict", "m.npz", new, "--out", "p.csv"],
        env=here, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n"), Path("p.csv").read_text()) == (1, 1, "old"), done.stderr
    # A reader who has enough.
    write("long.csv", {"shop": ["Rome"] * 20_000, "price": [1] * 20_000, "gap": [1] * 20_000})
    with subprocess.Popen(
        [*command, "predict", "m.npz", "long.csv"], env=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout
        assert running.stdout.readline() == b"shop,prediction\n"
        running.stdout.close()
        assert running.stderr
        assert running.stderr.read() == b""
    assert running.returncode == 1
