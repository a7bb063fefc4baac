"""Checkpoints: coming back from the dead, and one file for one solve."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax._files import container, fingerprint, owned_file
from tests import zoo
from tests.driver.test_solve import SYSTEMS, same
from tests.files.rewriting import closed, opened, rewritten


@pytest.fixture
def problem():
    return mj.Problem(zoo.data(), mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.02))


def options(path, **more):
    return dict(key=jax.random.key(5), tol=None, max_rounds=60, chunk=8, systems=SYSTEMS, checkpoint=path) | more


def test_resume_is_the_straight_run_bit_for_bit(problem, tmp_path):
    straight = mj.solve(problem, **options(None))
    path = tmp_path / "sub" / "run.npz"
    mj.solve(problem, **options(path, max_rounds=24))
    resumed = mj.solve(problem, **options(path))
    same(straight, resumed)
    same(straight, mj.solve(problem, **options(path)))  # finished: nothing left to do
    assert sorted(p.name for p in path.parent.iterdir()) == ["run.npz"]


@pytest.mark.slow
def test_data_in_half_precision_is_resumed(problem, tmp_path):
    half = problem.replace(data=problem.data.replace(x=problem.data.x.astype(jnp.bfloat16)))
    straight, path = mj.solve(half, **options(None)), tmp_path / "run.npz"
    mj.solve(half, **options(path, max_rounds=24))
    same(straight, mj.solve(half, **options(path)))


def test_resume_after_the_callback_raised(problem, tmp_path):
    def fail(round, history):
        if round >= 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mj.solve(problem, **options(tmp_path / "run.npz", callback=fail))
    same(mj.solve(problem, **options(None)), mj.solve(problem, **options(tmp_path / "run.npz")))


def test_a_fingerprint_by_rows_knows_their_order_and_not_who_holds_them():
    rows = np.arange(24.0).reshape(8, 3)
    by_rows = fingerprint.by_rows
    parts = sum(fingerprint._digest_of_rows(at, rows[at : at + 2]) for at in (2, 0, 6, 4))
    assert by_rows(rows) == (parts % 2**128).to_bytes(16, "little")
    others = rows[::-1], rows.astype(np.float32), np.concatenate([rows, rows]), rows + 1e-9
    assert len({by_rows(one) for one in (rows, *others)}) == 5


@pytest.mark.parametrize("change", ["lam", "data", "loss", "key", "systems", "algorithm", "record_every"])
@pytest.mark.thin(4)
def test_a_checkpoint_of_another_run_is_refused(problem, tmp_path, change):
    path = tmp_path / "run.npz"
    mj.solve(problem, **options(path, max_rounds=8))
    before = path.read_bytes()
    other, more = problem, dict[str, Any]()
    match change:
        case "lam":
            other = problem.replace(regularizer=mj.regularizers.MeanRegularized(0.1, 0.021))
        case "data":
            other = problem.replace(data=problem.data.replace(x=problem.data.x.at[0, 0, 0].add(1e-9)))
        case "loss":
            other = problem.replace(loss=mj.losses.SmoothedHinge(1.0))
        case "key":
            more = dict(key=jax.random.key(6))
        case "systems":
            more = dict(systems=mj.systems.Dropout(0.3))
        case "algorithm":
            more = dict(algorithm=mj.Mocha(gamma=0.9))
        case "record_every":
            more = dict(record_every=2)
    differs = {"lam": "regularizer differs", "data": r"data \(nodes that `shard` .* too\) differs"}
    with pytest.raises(
        mj.CheckpointError, match=f"another run: its {differs.get(change, f'{change} differs')} from this"
    ):
        mj.solve(other, **options(path, **more))
    assert path.read_bytes() == before


def test_all_that_differs_from_a_checkpoint_is_named(problem, tmp_path):
    path = tmp_path / "run.npz"
    mj.solve(problem, **options(path, max_rounds=2))
    other = problem.replace(loss=mj.losses.SmoothedHinge(1.0))
    with pytest.raises(mj.CheckpointError, match="its loss, cost and record_every differ from this call's; choose"):
        mj.solve(other, **options(path, record_every=2, cost=mj.costs.Cost(latency=1.0)))
    network = mj.FedAvg(mj.networks.MLP(problem.data.num_features, 2), optax.sgd(0.1))
    prediction = mj.Prediction(problem.data.replace(y=(problem.data.y > 0).astype(problem.data.dtype)))
    with pytest.raises(mj.CheckpointError, match="its kind of problem, data, .*loss.* differ from this call's"):
        mj.solve(prediction, **options(path, algorithm=network))
    mj.solve(problem, **options(path, max_rounds=3))


@pytest.mark.slow
def test_scalar_losses_are_told_apart_by_what_they_compute(problem, tmp_path):
    make = lambda a: mj.losses.from_scalar(lambda z, y: a * jax.nn.softplus(-y * z), binary=True)  # noqa: E731
    path = tmp_path / "run.npz"
    mj.solve(problem.replace(loss=make(1.0)), **options(path, max_rounds=2))
    mj.solve(problem.replace(loss=make(1.0)), **options(path, max_rounds=3))
    with pytest.raises(mj.CheckpointError, match="belongs to another run"):
        mj.solve(problem.replace(loss=make(5.0)), **options(path, max_rounds=3))


def test_torn_and_foreign_files_are_refused(problem, tmp_path):
    path = tmp_path / "run.npz"
    mj.solve(problem, **options(path, max_rounds=16))
    whole = path.read_bytes()
    npz = tmp_path / "other.npz"
    np.savez(npz, a=np.ones(3))
    contents = [whole[: len(whole) // 2], whole[:-7], b"", b"not a checkpoint", npz.read_bytes()]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(mj.CheckpointError, match=r"run\.npz is") as error:
            mj.solve(problem, **options(path))
        assert "\n" not in str(error.value)
        assert path.read_bytes() == content


def test_no_flipped_bit_goes_unnoticed(problem, tmp_path):
    path = tmp_path / "run.npz"
    solution = mj.solve(problem, **options(path, max_rounds=16))
    whole = path.read_bytes()
    refused = 0
    for at in np.random.default_rng(0).integers(0, len(whole), size=60):
        torn = bytearray(whole)
        torn[at] ^= 0x10
        path.write_bytes(bytes(torn))
        try:
            same(solution, mj.solve(problem, **options(path, max_rounds=16)))  # it hit an unused byte
        except mj.CheckpointError:
            refused += 1
    assert refused > 40


def test_what_has_a_digest_but_not_what_the_run_needs_is_refused(problem, tmp_path):
    path = tmp_path / "run.npz"
    mj.solve(problem, **options(path, max_rounds=16))
    whole = path.read_bytes()
    about, arrays = opened(whole)
    one, records = arrays["progress/1"], arrays["history/quality.gap"]

    def without(name):
        return rewritten(whole, lambda about, arrays: (arrays if name in arrays else about).pop(name))

    def other(name, value):
        return rewritten(whole, lambda _, arrays: arrays.update({name: value}))

    wrong = [without(name) for name in ("progress/1", "history/round", "run")]
    wrong += [other("progress/1", a) for a in (one[1:], one.astype(np.float32), np.array("text"), np.array(1.0))]
    wrong += [other("history/quality.gap", a) for a in (records[1:], records.astype(int), records[0])]
    wrong.append(rewritten(whole, lambda about, _: about.update(kind="part of a checkpoint")))
    wrong.append(closed(about, arrays | {"progress/1": 2 * one}))  # each array can be read, and one is another
    for content in wrong:
        path.write_bytes(content)
        with pytest.raises(mj.CheckpointError, match=r"run\.npz (is|does|belongs)"):
            mj.solve(problem, **options(path))


UNUSABLE = {
    "a number": (5, "checkpoint must be the path of a file"),
    "bytes": (b"run.npz", "checkpoint must be the path of a file"),
    "a flag": (True, "checkpoint must be the path of a file"),
    "a null character": ("run\0.npz", "cannot be the path"),
    "a folder": (".", "is not a file"),
    "no file": ("/dev/null", "is not a file"),
    "a folder that cannot be": (f"{__file__}/run.npz", "cannot be saved to"),
    "a long name": ("a" * 250, "cannot be saved to: File name too long"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_path_that_cannot_be_saved_to_is_refused_before_the_first_round(problem, tmp_path, name, monkeypatch):
    monkeypatch.setattr("mocha_jax._driver.host.run_chunk_in_place", None)  # no round is done
    path, message = UNUSABLE[name]
    path = tmp_path / path if isinstance(path, str) else path
    with pytest.raises(ValueError, match=message) as error:
        mj.solve(problem, **options(path))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk():
    """Files can grow to so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_read_for_a_while_costs_a_warning_and_no_solution(problem, tmp_path, monkeypatch):
    straight, load = mj.solve(problem, **options(None)), container.load

    def broken(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fail(round, history):
        monkeypatch.setattr(container, "load", broken if 8 <= round < 16 else load)

    with pytest.warns(UserWarning, match="could not be saved to after round .*Input/output error") as warned:
        solution = mj.solve(problem, **options(tmp_path / "run.npz"), callback=fail)
    assert len(warned) == 1
    same(solution, straight)


def test_a_full_disk_costs_no_solution_and_leaves_nothing_behind(problem, tmp_path, small_disk):
    straight, path = mj.solve(problem, **options(None)), tmp_path / "run.npz"
    kept: list[bytes] = []

    def fill(round, history):
        if round >= 16 and not kept:
            kept.append(path.read_bytes())
            small_disk(5000)

    with pytest.warns(UserWarning, match="could not be saved to after round 24: File too large") as warned:
        same(straight, mj.solve(problem, **options(path, callback=fill)))
    assert [said.filename for said in warned] == [__file__]
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]
    assert path.read_bytes() == kept[0]
    with pytest.raises(mj.CheckpointError, match="cannot be saved to: File too large"):
        mj.solve(problem, **options(tmp_path / "other.npz"))
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]


def no_locks(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)


def no_links(monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)


WORLDS = {
    "all": lambda _: None,
    "no locks": no_locks,
    "no links": no_links,
    "neither": lambda patch: (no_locks(patch), no_links(patch)),
    "windows": lambda patch: patch.setattr(owned_file, "fcntl", None),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.thin(3)
def test_one_of_two_solves_of_a_file_is_told_and_the_other_ends_as_if_alone(problem, tmp_path, world, monkeypatch):
    WORLDS[world](monkeypatch)
    straight, path = mj.solve(problem, **options(None)), tmp_path / "run.npz"
    others: list[Any] = []

    def second(round, history):
        if round == 16:
            try:
                others.append(mj.solve(problem, **options(path)))
            except mj.CheckpointError as error:
                others.append(error)

    first: Any
    try:
        first = mj.solve(problem, **options(path, callback=second))
    except mj.CheckpointError as error:
        first = error
    told, ended = (others[0], first) if world in ("all", "no links") else (first, others[0])
    assert ("is in use" if told is others[0] else "is no longer what this solve saved there") in str(told)
    same(straight, ended)
    same(straight, mj.solve(problem, **options(path)))
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]


@pytest.mark.parametrize("world", WORLDS)
def test_who_comes_second_to_a_new_file_is_told(tmp_path, world, monkeypatch):
    WORLDS[world](monkeypatch)
    path = tmp_path / "run.npz"
    first, second = owned_file.OwnedFile(path), owned_file.OwnedFile(path)
    for file in (first, second):
        file.claim()
    first.replace(lambda to: to.write(b"first"))
    with pytest.raises(mj.CheckpointError, match="is in use"):
        second.replace(lambda to: to.write(b"second"))
    assert path.read_bytes() == b"first"
    first.replace(lambda to: to.write(b"again"))
    for file in (first, second):
        file.release()
    third = owned_file.OwnedFile(path)
    third.claim()
    third.replace(lambda to: to.write(b"third"))
    third.release()
    assert path.read_bytes() == b"third"
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]


def test_a_link_stays_one_and_is_the_file_it_points_to(problem, tmp_path):
    path, link = tmp_path / "run.npz", tmp_path / "link.npz"
    link.symlink_to(path)
    mj.solve(problem, **options(link, max_rounds=16))
    assert link.is_symlink()
    same(mj.solve(problem, **options(None)), mj.solve(problem, **options(path)))


def test_what_the_dead_left_half_written_is_removed_and_nothing_else(problem, tmp_path):
    path = tmp_path / "run.npz"
    mj.solve(problem, **options(path, max_rounds=24))
    left = ".run.npz.partial", ".run.npz.0123456789ab.partial"
    others = ".other.npz.0123456789ab.partial", ".run.npz.not-one-of-ours.partial"
    for name in (*left, *others):
        (tmp_path / name).write_bytes(b"torn")
    living = owned_file.OwnedFile(path)._begin()
    (tmp_path / ".run.npz.ba9876543210.partial").mkdir()
    same(mj.solve(problem, **options(None)), mj.solve(problem, **options(path)))
    kept = {"run.npz", *others, os.path.basename(living.name), ".run.npz.ba9876543210.partial"}
    assert {p.name for p in tmp_path.iterdir()} == kept
    living.close()
    mj.solve(problem, **options(path))
    assert {p.name for p in tmp_path.iterdir()} == kept - {os.path.basename(living.name)}


CHILD = """
import sys, jax
jax.config.update("jax_enable_x64", True)
import numpy as np
import mocha_jax as mj
rng = np.random.default_rng(0)
xs = [rng.normal(size=(n, 30)) for n in (40, 200, 90, 150)]
data = mj.pack_tasks(xs, [np.sign(x[:, 0] + rng.normal(size=len(x))) for x in xs], loss_scaling="task_mean")
problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(1e-3, 1e-3))
solution = mj.solve(
    problem, mj.Mocha(), key=jax.random.key(1), tol=None, max_rounds=600, chunk=5,
    systems=mj.systems.Dropout(0.2), checkpoint=sys.argv[1] if sys.argv[1] else None,
)
np.savez(sys.argv[2], beta=solution.state.beta, w=solution.weights, gap=solution.history.gap)
"""


def child(checkpoint, out):
    code = [sys.executable, "-c", CHILD, str(checkpoint), str(out)]
    with open(f"{out}.log", "w") as log:
        return subprocess.Popen(code, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=log)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What comes of the child when nothing happens to it."""
    path = tmp_path_factory.mktemp("straight") / "out.npz"
    assert child("", path).wait(timeout=240) == 0
    with np.load(path) as file:
        return dict(file)


def equal(out, straight):
    with np.load(out) as file:
        for name in file.files:
            np.testing.assert_array_equal(file[name], straight[name])


@pytest.mark.slow
def test_two_processes_on_one_path(tmp_path, straight):
    path, outs = tmp_path / "run.npz", [tmp_path / f"{i}.npz" for i in range(2)]
    processes = [child(path, out) for out in outs]
    told = [process.wait(timeout=240) != 0 for process in processes]
    assert sum(told) <= 1  # none where one had ended when the other began
    for out, lost in zip(outs, told, strict=True):
        log = out.with_name(f"{out.name}.log")
        if lost:
            last = log.read_text().strip().splitlines()[-1]
            assert last.startswith("mocha_jax._files.owned_file.CheckpointError")
            assert "another solve" in last
        else:
            equal(out, straight)
            out.unlink()
        log.unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed(tmp_path, straight):
    resumed, path = tmp_path / "out.npz", tmp_path / "run.npz"
    rng = np.random.default_rng(7)
    kills = 0
    for _ in range(4):
        process = child(path, resumed)
        until = time.monotonic() + 120
        seen = path.stat().st_mtime_ns if path.exists() else None
        while process.poll() is None and time.monotonic() < until:  # wait for it to save something new
            if path.exists() and path.stat().st_mtime_ns != seen:
                break
            time.sleep(0.001)
        time.sleep(float(rng.uniform(0, 0.05)))  # then strike anywhere: computing, writing, renaming
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills > 0
    assert child(path, resumed).wait(timeout=240) == 0
    equal(resumed, straight)
    assert {p.name for p in tmp_path.iterdir()} == {"run.npz", "out.npz", "out.npz.log"}
