"""What the processes of `test_processes` do: ``python -m tests.driver.scenarios NAME SETTINGS``."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.multihost_utils import process_allgather, sync_global_devices

import mocha_jax as mj
from mocha_jax._files import checkpoint
from mocha_jax._files.container import Container
from tests.driver import test_processes as shared
from tests.files.rewriting import closed, opened, rewritten


def data_of(counts, process, **more):
    first = sum(counts[:process])
    return shared.pack(first, first + counts[process], **more)


def killed(counts, process, folder, kill, victim):
    """Train, and be killed: in the middle of writing a part, or the file that makes parts count, or after that."""
    seen: list[int] = []

    def now(doing):
        return doing == kill and process == victim and bool(seen) and seen[-1] >= shared.KILLED_AT - shared.CHUNK

    def write(content, to):
        if now("file" if "history/round" in content.arrays else "part"):
            to.write(b"half of it")
            to.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write_all(content, to)

    def together(owner, work):
        if now("told") and "write" not in work.__code__.co_names:  # its part is written, the file is not its own
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return all_together(owner, work)

    write_all, all_together = Container.write, checkpoint.together
    Container.write = write  # type: ignore[method-assign]
    checkpoint.together = together
    problem = mj.shard(shared.problem_of(mj.from_process_local(data_of(counts, process))))
    shared.solve(problem, checkpoint=f"{folder}/run.npz", callback=lambda round, _: seen.append(round))


def resumed(counts, process, folder, rounds=shared.ROUNDS):
    """Go on from the checkpoint, and end to the last bit where these processes would have ended without it."""
    seen: list[int] = []
    problem = mj.shard(shared.problem_of(mj.from_process_local(data_of(counts, process))))
    found = shared.solve(
        problem, checkpoint=f"{folder}/run.npz", max_rounds=rounds, callback=lambda round, _: seen.append(round)
    )
    straight = shared.solve(problem, max_rounds=rounds)
    for a, b in zip(shared.numbers(found), shared.numbers(straight), strict=True):
        np.testing.assert_array_equal(a, b)

    assert problem.data.x.addressable_shards[0].data.shape[0] == max(counts)
    mixed = mj.from_process_local(
        data_of(counts, process), task=(np.arange(12) % 3)[sum(counts[:process]) :][: counts[process]]
    )
    weights, shared_weight = process_allgather((found.weights, mixed.weight), tiled=True)
    mistakes(counts, process)
    damaged(problem, folder, process)
    if process == 0:
        np.savez(
            f"{folder}/out.npz",
            weights=weights,
            gap=found.history.gap,
            utilisation=found.utilisation,
            first=seen[0],
            shared_weight=shared_weight,
        )


def damaged(problem, folder, process):
    """Every process is told, whichever part is damaged or gone."""
    there = Path(folder, "copy")
    if process == 0:
        there.mkdir()
        for file in Path(folder).glob("run.npz*"):
            shutil.copy(file, there)
    sync_global_devices("copied")
    [part] = there.glob("run.npz.1-of-*.part")
    sync_global_devices("found")
    if process == 1:
        about, arrays = opened(part.read_bytes())
        name = max(arrays, key=lambda name: arrays[name].size)
        arrays[name].reshape(-1)[0] += 1
    for what, message in (
        ("torn", "is damaged"),
        ("changed", "is damaged"),
        ("other", "is damaged"),
        ("gone", "is missing"),
    ):
        if process == 1:
            match what:
                case "torn":
                    part.write_bytes(part.read_bytes()[:-9])
                case "changed":
                    part.write_bytes(closed(about, arrays))
                case "other":
                    part.write_bytes(rewritten(closed(about, arrays), lambda *_: None))
                case "gone":
                    part.unlink()
        sync_global_devices("done")
        with pytest.raises(mj.CheckpointError, match=message):
            shared.solve(problem, checkpoint=there / "run.npz")
        sync_global_devices("told")


def mistakes(counts, process):
    """Every process is told, whoever made the mistake."""
    own = data_of(counts, process)
    cases = {
        "disagree in features: 3 in process 0, 4 in process 1": own.replace(x=own.x[..., process == 0 :]),
        "disagree in loss_scaling": own.replace(loss_scaling=("sum", "task_mean")[process]) if process < 2 else own,
        "disagree in dtype of samples": own.replace(x=own.x.astype(np.float32)) if process else own,
        "data must be a TaskData|process 1 failed: .* data must be a TaskData": None if process == 1 else own,
    }
    for message, data in cases.items():
        with pytest.raises(ValueError, match=message):
            mj.from_process_local(data)
    with pytest.raises(ValueError, match="disagree in whether task is given"):
        mj.from_process_local(own, task=None if process else own.task)
    with pytest.raises(ValueError, match="no node of any process works on task 0"):
        mj.from_process_local(own, task=own.task + 1)


def continued(counts, process, folder, rounds):
    """Go on from a checkpoint of another number of processes."""
    problem = mj.shard(shared.problem_of(mj.from_process_local(data_of(counts, process))))
    found = shared.solve(problem, checkpoint=f"{folder}/run.npz", max_rounds=rounds)
    assert len(found.history.round) == rounds
    assert len(json.loads(np.load(f"{folder}/run.npz")["about.json"])["parts"]) == len(counts)


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    jax.config.update("jax_num_cpu_devices", given.pop("devices"))
    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(
        f"localhost:{given.pop('port')}", num_processes=len(given["counts"]), process_id=given["process"]
    )
    globals()[sys.argv[1]](**given)
