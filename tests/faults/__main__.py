"""Break the library in one place after the other and see who notices: ``python -m tests.faults [--only WORD ...]``.

Each fault of the table is put into a copy of the checkout, where the tests run until one fails: first those of the
folders that should see it, then all. With ``--marks`` other tests than the default ones, such as
``--marks "not slow"``. It prints a line a fault; the exit status counts those that nobody saw.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.table import FAULTS, Fault

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="faults whose names have one of these words")
    parser.add_argument("--marks", help="which tests, as pytest's -m; default those of the README")
    parser.add_argument("--near", action="store_true", help="look in the folders alone that should see the fault")
    options = parser.parse_args()
    chosen = [f for f in FAULTS if not options.only or any(word in f.name for word in options.only)]
    unseen = 0
    for fault in chosen:
        began = time.perf_counter()
        seen = who_sees(fault, options.marks, options.near)
        unseen += seen is None
        print(f"{fault.name:65} {seen or 'NOBODY':60} {time.perf_counter() - began:6.0f} s", flush=True)
    print(f"{len(chosen) - unseen} of {len(chosen)} seen")
    return unseen


def who_sees(fault: Fault, marks: str | None, near: bool) -> str | None:
    """The first test that fails with this fault, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__"))
        plant(fault, copy / "mocha_jax")
        first = [f"tests/{name}" for name in fault.near]
        return failing(copy, first, marks) or (None if near else failing(copy, ["tests"], marks))


def plant(fault: Fault, package: Path) -> None:
    """Put the fault where it says, in one place."""
    path = package / fault.file
    text = path.read_text()
    if text.count(fault.right) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has the line {text.count(fault.right)} times: {fault.right}")
    path.write_text(text.replace(fault.right, fault.wrong))


def failing(copy: Path, places: list[str], marks: str | None) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command += ["--no-loadscope-reorder", "--ignore", "tests/faults", *places, *(["-m", marks] if marks else [])]
    said = subprocess.run(command, cwd=copy, capture_output=True, text=True).stdout
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return found[1] if found else None


if __name__ == "__main__":
    sys.exit(min(main(), 1))
