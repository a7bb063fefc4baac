"""Names are imported when they are asked for, and those of a stub are those of its package."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import mocha_jax as mj

ROOT = Path(mj.__file__).parent


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)


def test_the_package_alone_needs_no_jax():
    done = run("import sys, mocha_jax; mocha_jax.__version__; dir(mocha_jax); sys.exit('jax' in sys.modules)")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_importing_starts_no_device():
    done = run(
        "import mocha_jax as mj, jax._src.xla_bridge as bridge\n"
        "[getattr(mj, name) for name in mj.__all__]\n"
        "assert not bridge.backends_are_initialized()"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_nothing_of_a_trace_is_left_in_modules_that_it_imported():
    done = run(
        "import jax, sys, mocha_jax as mj\n"
        "def value(w):\n"
        "    [getattr(mj, name) for name in mj.__all__]\n"
        "    return mj.losses.SmoothedHinge(0.5).value(w, 1.0)\n"
        "assert jax.jit(value)(0.3) == value(0.3)\n"
        "ours = [module for name, module in sys.modules.items() if name.startswith('mocha_jax')]\n"
        "assert len(ours) > 100\n"
        "assert not any(isinstance(v, jax.core.Tracer) for module in ours for v in vars(module).values())"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", getattr(mj, "__all__"))  # noqa: B009
def test_every_name_is_there(name):
    assert getattr(mj, name) is getattr(mj, name)
    assert name in dir(mj)


def test_a_stub_lists_every_name_once():
    for stub in ROOT.rglob("*.pyi"):
        names = [
            a.asname
            for node in ast.walk(ast.parse(stub.read_text()))
            if isinstance(node, ast.ImportFrom)
            for a in node.names
        ]
        assert len(names) == len(set(names)), stub


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mocha_jax' has no attribute 'no_such_name'"):
        getattr(mj, "no_such_name")  # noqa: B009


def test_a_name_is_an_attribute_or_a_module(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.pyi").write_text(
        "import other\nfrom os import sep as sep\nfrom some_package import inner as inner\n"
        "from some_package.inner import VALUE as renamed, missing as missing\n"
    )
    (package / "__init__.py").write_text(
        "from mocha_jax._core import lazy\n__getattr__, names = lazy.attach(__name__)\n"
    )
    (package / "inner.py").write_text("VALUE = [1]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    package_itself = importlib.import_module("some_package")
    assert package_itself.names == ["inner", "renamed", "missing"]
    assert package_itself.renamed is package_itself.inner.VALUE
    with pytest.raises(ImportError, match="cannot import name 'missing' from 'some_package.inner'"):
        package_itself.missing  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'sep'"):
        package_itself.sep  # noqa: B018
