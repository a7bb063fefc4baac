"""The table of faults fits the library: each can be planted, in one place."""

import shutil
from pathlib import Path

import mocha_jax
from tests.faults.__main__ import plant
from tests.faults.table import FAULTS


def test_each_fault_can_be_planted(tmp_path):
    package = Path(mocha_jax.__file__).parent
    for fault in FAULTS:
        copy = tmp_path / fault.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / fault.file, copy)
        plant(fault, tmp_path)
        compile(copy.read_text(), fault.file, "exec")


def test_their_names_and_folders_are_right():
    assert len({f.name for f in FAULTS}) == len(FAULTS) == 39
    tests = Path(__file__).parents[1]
    assert all((tests / place).exists() for fault in FAULTS for place in fault.near)
