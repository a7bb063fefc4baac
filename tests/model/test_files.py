"""Files of models: written whole from any number of threads, and refused in a sentence where they are damaged."""

import io
import json
import threading
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

import mocha_jax as mj
from tests.files.rewriting import closed, opened, rewritten

SAVED = Path(__file__).parent / "saved"


@pytest.fixture
def path(tmp_path):
    """A file of a model."""
    rng = np.random.default_rng(0)
    names = mj.Names(tasks=("ash", "elm", "oak"), features=("hours", "size"))
    mj.LinearModel(rng.normal(size=(3, 2)), rng.normal(size=3), names).save(tmp_path / "model.npz")
    return tmp_path / "model.npz"


def arrays_of(model):
    network = isinstance(model, mj.NetworkModel)
    return jax.tree.leaves(model.parameters if network else [model.weights, model.intercept])


def damaged(rng, content):
    """A content with one to three bits changed, or cut short."""
    if rng.random() < 0.2:
        return content[: rng.integers(len(content))]
    changed = bytearray(content)
    for place in rng.integers(len(content), size=rng.integers(1, 4)):
        changed[place] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def check_damages(path, content, count):
    """Whatever is damaged is refused in a sentence, or it reads as what was saved."""
    rng, refused = np.random.default_rng(0), 0
    path.write_bytes(content)
    whole = arrays_of(mj.load_model(path))
    for _ in range(count):
        path.write_bytes(damaged(rng, content))
        try:
            found = arrays_of(mj.load_model(path))
        except ValueError as error:
            assert str(error).startswith("load_model: "), error  # noqa: PT017
            refused += 1
        else:
            assert all(map(np.array_equal, found, whole))
    assert refused > count / 2


def test_a_damaged_file_is_refused_in_a_sentence(path):
    check_damages(path, path.read_bytes(), 200)


@pytest.mark.extended
@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["linear", "multiclass", "fedavg", "virtual"])
def test_damaged_files_of_all_kinds_are_refused_in_a_sentence(path, name):
    check_damages(path, (SAVED / f"{name}.npz").read_bytes(), 1000)


def crafted(path, text=None, **changes):
    """The file with another text, or parts of it changed; an ellipsis takes one away."""

    def change(about, _):
        about.update(changes)
        for name in [name for name, value in about.items() if value is ...]:
            del about[name]

    content = path.read_bytes()
    path.write_bytes(rewritten(content, change) if text is None else closed(text, opened(content)[1]))


@pytest.mark.parametrize("version", [None, "1", -5, 0, 1.0, True, [1], ...], ids=repr)
def test_a_version_is_an_integer(path, version):
    crafted(path, version=version)
    with pytest.raises(ValueError, match=r"^load_model: .* damaged"):
        mj.load_model(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "[" * 100_000},
        {"text": "[]"},
        {"text": '"a text"'},
        {"text": '{"version": NaN}'},
        {"model": ["linear"]},
        {"model": "network"},
        {"model": "network", "network": 5, "likelihood": {}},
        {"model": "network", "network": {"class": "MLP", "inputs": 10**12}, "likelihood": {}},
        {"model": "network", "network": {"class": "Pytree"}, "likelihood": {}},
        {"tasks": 5},
        {"tasks": [["ash"], ["elm"], ["oak"]]},
        {"decides": 7},
        {"trained": 1},
    ],
    ids=lambda changes: str(changes)[:30],
)
def test_a_text_that_says_nonsense_is_refused_in_a_sentence(path, changes):
    crafted(path, **changes)
    with pytest.raises(ValueError, match=r"^load_model: .* damaged"):
        mj.load_model(path)


@pytest.mark.parametrize("shape", [(10**12, 2), (2**40, 2**40), (-1, 2)], ids=str)
def test_an_array_is_as_large_as_it_says(path, shape):
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w") as file:
        text = parts["about.json"].replace(b"[3, 2]", json.dumps(shape).encode())
        for name, content in (parts | {"about.json": text, "weights.npy": header.getvalue() + bytes(48)}).items():
            file.writestr(name, content)
    with pytest.raises(ValueError, match=r"^load_model: .* damaged"):
        mj.load_model(path)


def test_an_encrypted_part_and_an_unknown_compression_are_refused_in_a_sentence(path):
    whole = path.read_bytes()
    local, central = whole.index(b"PK\x03\x04"), whole.index(b"PK\x01\x02")
    for offset, value in ((0, 1), (2, 97)):  # of the flags, and of the compression
        changed = bytearray(whole)
        changed[local + 6 + offset] = changed[central + 8 + offset] = value
        path.write_bytes(bytes(changed))
        with pytest.raises(ValueError, match=r"^load_model: .* damaged"):
            mj.load_model(path)


@pytest.mark.parametrize("name", [".", "a\0b", "model.npz/model.npz"])
def test_what_cannot_be_read_is_said(path, name):
    with pytest.raises(ValueError, match="^load_model: .* cannot be read: "):
        mj.load_model(path.parent / name)


def test_threads_save_to_one_path(path):
    rng, wrong = np.random.default_rng(0), []
    models = [mj.LinearModel(rng.normal(size=(m, 20)), np.zeros(m)) for m in (30, 50, 70, 90)]

    def work(model):
        try:
            for _ in range(6):
                model.save(path)
                assert mj.load_model(path).num_tasks in (30, 50, 70, 90)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [each.name for each in path.parent.iterdir()] == ["model.npz"]


def test_a_link_to_a_model_is_followed(path):
    link = path.with_name("link.npz")
    link.symlink_to("model.npz")
    mj.LinearModel(np.eye(2), np.zeros(2)).save(link)
    assert link.is_symlink()
    assert mj.load_model(path).num_tasks == 2
