"""Imports go one way, and every folder imports what its docstring says and nothing else."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import mocha_jax

ROOT = Path(mocha_jax.__file__).parent

# From what all stand on to what stands on all: a room imports rooms of earlier lines only.
ORDER = """
_core
_numerics _files costs likelihoods
spectral losses networks _data
coupling datasets partition systems
features regularizers _model
_problem
_node servers metrics
_algorithms
_derivatives
_driver _neural theory
compression
_selection callbacks personalized privacy robust
federated
multiclass
plotting sklearn flower
cli
"""
FLOOR = {room: i for i, line in enumerate(ORDER.strip().splitlines()) for room in line.split()}


def rooms():
    """Every folder and public module, with what it imports of the library."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in ("__init__", "__main__"):
            continue
        imports = found.setdefault(parts[0], set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mocha_jax":
                inner = (node.module or "").split(".")[1:]
                imports |= {inner[0]} if inner else {alias.name for alias in node.names}
        imports.discard(parts[0])
    return found


ROOMS = rooms()


def test_every_room_has_its_place():
    assert set(ROOMS) == set(FLOOR)
    entries = {p.stem for p in ROOT.iterdir() if p.name != "__pycache__"}
    assert len(entries) <= 41, sorted(entries)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room):
    assert {other for other in ROOMS[room] if FLOOR[other] >= FLOOR[room]} == set()


@pytest.mark.parametrize("room", [room for room in ROOMS if (ROOT / room).is_dir()])
def test_a_folder_imports_what_it_says(room):
    doc = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    said = re.search(r"It may import (nothing of the library|[^.]*)\.", doc)
    assert said, f"{room}/__init__.py says in a sentence 'It may import ...'"
    assert set(re.findall(r"`(\w+)`", said.group(1))) == ROOMS[room]


def test_a_path_has_one_underscore():
    for path in ROOT.rglob("*.py"):
        parts = [p for p in path.relative_to(ROOT).with_suffix("").parts if not p.startswith("__")]
        assert sum(p.startswith("_") for p in parts) <= 1, path
        assert len(parts) <= 2, path


def test_names_of_modules_and_classes_are_unique():
    paths = [path for path in ROOT.rglob("*.py") if path.stem.strip("_") not in ("base", "init", "main")]
    nodes = [node for path in ROOT.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    modules = Counter(path.stem.lstrip("_") for path in paths)
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert not {name for names in (modules, classes) for name, count in names.items() if count > 1}


def test_tests_lie_where_their_room_does():
    tests = Path(__file__).parents[1]
    folders = {
        p.name
        for p in tests.iterdir()
        if p.is_dir() and p.name not in ("__pycache__", "package", "bad_calls", "faults")
    }
    assert folders == {p.name.lstrip("_") for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"}
    modules = {p.stem.removeprefix("test_") for p in tests.glob("test_*.py")}
    assert modules <= {p.stem for p in ROOT.glob("*.py")}
