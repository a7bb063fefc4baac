"""The demo, as a person runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mocha_jax as mj
from mocha_jax.cli import main

ARGUMENTS = ["demo", "--quiet", "--tasks", "8", "--features", "4", "--max-rounds", "30"]


def command_line(*arguments, **kwargs):
    command = [sys.executable, "-m", "mocha_jax", *arguments]
    here = {**os.environ, "PYTHONPATH": str(Path(mj.__file__).parents[1])}  # the package under test, from any folder
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=here, **kwargs)


@pytest.mark.slow
def test_demo_prints_a_table_and_saves_a_picture(tmp_path):
    result = command_line(*ARGUMENTS, "--out", "pictures/demo.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:2] == ["model", "test"])
    assert [line.split()[0] for line in lines[header + 1 : header + 5]] == ["global", "local", "known", "learned"]
    picture = (tmp_path / "pictures" / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "0"], "argument --tasks: must be an integer >= 4"),
        (["--drop", "2"], "argument --drop: must be a number from 0 to 1, got '2'"),
        (["--out", "demo.xyz"], "--out: must end in one of "),
        (["--max-rounds", "0"], "argument --max-rounds: must be an integer >= 1"),
    ],
)
def test_bad_options_get_one_sentence(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(["demo", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
