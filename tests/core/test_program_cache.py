"""Compiled programs kept on disk for the command line and the estimators: where, when not, and how many."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from mocha_jax._core import kept_programs, program_cache

NAMES = [
    "jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
]  # fmt: skip


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """The folder where this system keeps caches, with JAX's own cache not yet chosen, and all of it put back."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.setattr(program_cache, "_caches", lambda: tmp_path)
    yield tmp_path
    kept_programs.keep_in(None)
    for name, value in before.items():
        jax.config.update(name, value)


def chosen():
    return jax.config.jax_compilation_cache_dir


def test_programs_of_every_size_are_kept_in_a_folder_of_this_version_and_machine(caches):
    program_cache.keep_programs()
    folder = Path(chosen())
    assert folder.parent == caches / "mocha_jax"
    assert folder.is_dir()
    assert jax.__version__ in folder.name
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert jax.config.jax_persistent_cache_min_entry_size_bytes == -1


@pytest.mark.parametrize(
    ("name", "value"), [("jax_compilation_cache_dir", "mine"), ("jax_enable_compilation_cache", False)]
)
def test_the_users_choice_goes_first(caches, name, value):
    jax.config.update(name, value)
    program_cache.keep_programs()
    assert getattr(jax.config, name) == value
    assert not list(caches.iterdir())


def test_without_a_folder_there_is_no_cache(caches):
    (caches / "mocha_jax").write_text("a file, no folder")
    program_cache.keep_programs()
    assert not chosen()


def test_the_oldest_programs_make_room(caches, monkeypatch):
    monkeypatch.setattr(program_cache, "_MOST", 1000)
    folder = caches / "mocha_jax" / "another version"
    folder.mkdir(parents=True)
    for age in range(4):
        (folder / f"{age}").write_bytes(b"0" * 260)
        os.utime(folder / f"{age}", (1e9 - age, 1e9 - age))
    program_cache.keep_programs()
    assert sorted(path.name for path in folder.iterdir()) == ["0"]  # 260 bytes, of at most 500


@pytest.mark.extended
def test_a_second_process_compiles_nothing(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["group,x,y", *(f"{i % 3},{i % 7},{i % 5 > 2}" for i in range(60))]))
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path)}
    call = f"fit {table} --group group --label y --model m.npz --models local --quiet --force".split()
    kept = []
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-m", "mocha_jax", *call], check=True, cwd=tmp_path, env=environment, capture_output=True
        )
        kept.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*-cache")})
    assert len(kept[0]) > 5
    assert kept[0] == kept[1]
