"""Files that an earlier version wrote are read by this one."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import mocha_jax as mj
from tests.files import kept
from tests.files.rewriting import opened, rewritten

VERSIONS = sorted(path for path in Path(kept.__file__).parent.iterdir() if (path / "linear.npz").exists())


@pytest.fixture(params=VERSIONS, ids=[path.name for path in VERSIONS])
def folder(request):
    return request.param


def test_there_are_files_of_every_kind_and_of_one_form(folder):
    kinds = {
        "checkpoint": "checkpoint", "classes": "model", "down": "Down", "linear": "model", "network": "model",
        "node": "state", "server": "state", "up": "Up",
    }  # fmt: skip
    assert {path.stem for path in folder.iterdir()} == {*kinds, "predicted"}
    for name, kind in kinds.items():
        about, _ = opened((folder / f"{name}.npz").read_bytes())
        assert [about[what] for what in ("format", "version", "kind")] == ["mocha_jax", 1, kind]


@pytest.mark.parametrize("name", ["linear", "classes", "network"])
def test_a_model_predicts_what_it_did(folder, name):
    x, _, names = kept.frame()
    predicted = mj.load_model(folder / f"{name}.npz").predict(x, names)
    np.testing.assert_allclose(predicted, np.load(folder / "predicted.npz")[name], rtol=1e-5)


@pytest.mark.extended
def test_a_federation_goes_on(folder):
    """The answer to the first message is a round's, and the next round follows the states that were kept."""
    server, node = kept.server(), kept.nodes()[0]
    state = mj.federated.load(folder / "server.npz", server.init())
    own = mj.federated.load(folder / "node.npz", node.init())
    assert mj.federated.load(folder / "down.npz", mj.federated.Down).round == 1
    assert mj.federated.load(folder / "up.npz", mj.federated.Up).round == 1
    _, up = node.step(kept.KEY, own, server.down(state, 0))
    _, report = server.step(state, {0: up})
    assert report.accepted == (0,)


def test_a_checkpoint_is_continued(folder, tmp_path):
    path = tmp_path / "checkpoint.npz"
    shutil.copy(folder / path.name, path)
    assert mj.read_history(path).round.tolist() == [4, 8]
    solution = mj.solve(kept.problem(), kept.ALGORITHM, tol=1e-3, key=kept.KEY, record_every=4, checkpoint=path)
    assert solution.status is mj.Status.CONVERGED
    assert solution.rounds > 8


def test_a_checkpoint_of_a_later_version_is_refused_by_its_number(folder, tmp_path):
    path = tmp_path / "checkpoint.npz"
    before = rewritten((folder / path.name).read_bytes(), lambda about, _: about.update(version=2))
    path.write_bytes(before)
    with pytest.raises(
        mj.CheckpointError, match="is of version 2, and this library reads up to 1; choose another path"
    ):
        mj.solve(kept.problem(), kept.ALGORITHM, key=kept.KEY, record_every=4, checkpoint=path)
    assert path.read_bytes() == before
