"""What checkpoints survive: ``python -m benchmarks.survival``.

Solves that save after every round are killed (SIGKILL) at random moments, up to four times in a row, and started again;
their files are damaged in every way that came to mind; two processes solve on one path; the disk is full. A solve that
ends must end, bit for bit, where an undisturbed one does; one that cannot go on must say so in one sentence; and no
file must be left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import mocha_jax as mj
from benchmarks._damages import damages
from mocha_jax import regularizers, systems
from mocha_jax._files import checkpoint_parts
from mocha_jax._files.checkpoint import KIND
from mocha_jax._files.fingerprint import fingerprint

ROUNDS, IN_A_ROW, NAME = 120, 4, "run.npz"


def data() -> mj.TaskData:
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 12)).astype("f") for n in (40, 90, 60, 120, 30)]
    return mj.pack_tasks(xs, [np.sign(x[:, 0] + x[:, t + 1]) for t, x in enumerate(xs)], loss_scaling="task_mean")


def problem(regularizer: Any) -> mj.Problem:
    return mj.Problem(data(), mj.losses.Hinge(), regularizer)


def prediction() -> mj.Prediction:
    samples = data()
    samples = samples.replace(y=(samples.y > 0).astype(samples.dtype), loss_scaling="sum")
    train, test = samples.split(jax.random.key(1), 0.75)
    return mj.Prediction(train, test=test)


NEAR = regularizers.MeanRegularized(0.01, 0.01)
DROPS = systems.Dropout(0.3)
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "adaptive": lambda: dict(problem=problem(NEAR), algorithm=mj.Mocha()),
    "proximal": lambda: dict(problem=problem(regularizers.Probabilistic(0.01))),
    "deadline": lambda: dict(
        problem=problem(NEAR), systems=DROPS & systems.Deadline(0.1, mj.costs.lte()), cost=mj.costs.lte()
    ),
    "alternation": lambda: dict(
        problem=problem(regularizers.Probabilistic(0.01)), algorithm=mj.Mocha(server="dual", omega_every=7),
        record_every=3, systems=DROPS,
    ),
    "averaging": lambda: dict(
        problem=prediction(),
        algorithm=mj.FedAvg(mj.networks.MLP(12, 2, (8,)), optax.sgd(0.1), optax.adam(1e-2), fraction=0.6),
    ),
    "virtual": lambda: dict(
        problem=prediction(), algorithm=mj.Virtual(mj.networks.Lateral(12, 2, (8,)), optax.adam(1e-2), samples=2)
    ),
    "clustered": lambda: dict(
        problem=problem(regularizers.Clustered(2, 0.01, 0.1)), systems=DROPS, watch=mj.Watch()
    ),
    "mini-batch": lambda: dict(problem=problem(NEAR), algorithm=mj.MiniBatchSdca(batch=8)),
    "safe": lambda: dict(problem=problem(NEAR), algorithm=mj.Mocha(sigma_prime="per_task")),
}  # fmt: skip


def solved(setting: str, checkpoint: Path | None, rounds: int = ROUNDS, **more: Any) -> mj.Solution:
    options = dict(key=jax.random.key(3), tol=None, max_rounds=rounds, chunk=1, checkpoint=checkpoint) | more
    return mj.solve(**SETTINGS[setting](), **options)


def digest(solution: mj.Solution) -> str:
    """Of all that a solution says."""
    return fingerprint([np.asarray(leaf) for leaf in jax.tree.leaves(solution.replace(problem=None))])


class Child:
    """A process that solves and prints the digest of its solution."""

    def __init__(self, setting: str, checkpoint: Path | None) -> None:
        code = [sys.executable, "-m", "benchmarks.survival", "--child", setting, str(checkpoint or "")]
        self.process = subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self) -> tuple[str, str]:
        """The digest, and the last line of what it complained of."""
        out, complaint = self.process.communicate()
        return out.strip(), (complaint.strip().splitlines() or [""])[-1]

    def strike(self, checkpoint: Path, after: float) -> bool:
        """Kill it so long after it first saved; whether it still lived."""
        before = changed(checkpoint)
        while self.process.poll() is None and changed(checkpoint) == before:
            time.sleep(0.0005)
        time.sleep(after)
        if lived := self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
        return lived


def changed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def whole(path: Path) -> int | None:
    """How many records a checkpoint holds; None where it is damaged."""
    try:
        return len(checkpoint_parts.read(path, KIND).arrays["history/round"])
    except mj.CheckpointError:
        return None


def killed(rng: np.random.Generator, kills: int, folder: Path) -> Counter[str]:
    """Kill, look at what is there, start again."""
    counts: Counter[str] = Counter()
    straight, seconds = {}, {}
    for setting in SETTINGS:
        scratch = folder / f"straight-{setting}.npz"
        straight[setting] = Child(setting, None).end()[0]
        child = Child(setting, scratch)  # how long do the rounds take?
        while changed(scratch) is None:
            time.sleep(0.0005)
        began = time.perf_counter()
        counts["undisturbed runs with a checkpoint that differ"] += child.end()[0] != straight[setting]
        seconds[setting] = time.perf_counter() - began
    while counts["kills"] < kills:
        setting = list(SETTINGS)[counts["finished"] % len(SETTINGS)]
        place = folder / f"{counts['finished']}"
        place.mkdir()
        path, records = place / NAME, 0
        for _ in range(min(int(rng.integers(1, IN_A_ROW + 1)), kills - counts["kills"])):
            child = Child(setting, path)
            if not child.strike(path, float(rng.uniform(0, seconds[setting]))):
                break
            counts["kills"] += 1
            counts["kills in a write"] += any(place.glob("*.partial"))
            now = whole(path)
            counts["files damaged"] += now is None
            counts["files with fewer rounds than before"] += now is not None and now < records
            records = records if now is None else now
        counts["finished"] += 1
        counts["finished that differ"] += Child(setting, path).end()[0] != straight[setting]
        counts["files left behind"] += sum(p.name != NAME for p in place.iterdir())
    return counts


def damaged(rng: np.random.Generator, count: int, folder: Path) -> dict[str, Counter[str]]:
    """What a solve makes of each: the right answer, a sentence, or something worse."""
    folder.mkdir()
    path, trace = folder / NAME, folder.parent / "trace"
    straight = digest(solved("adaptive", path, 20))
    good = path.read_bytes()
    other_path = folder.parent / "other.npz"
    solved("safe", other_path, 20)
    outcomes: dict[str, Counter[str]] = {}
    for (kind, content), _ in zip(damages(rng, good, other_path.read_bytes(), trace), range(count), strict=False):
        shutil.rmtree(folder)
        folder.mkdir()
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)
        try:
            outcome = "right" if digest(solved("adaptive", path, 20)) == straight else "WRONG"
        except mj.CheckpointError as error:
            intact = not isinstance(content, bytes) or path.read_bytes() == content
            outcome = "refused" if "\n" not in str(error) and intact else "REFUSED BADLY"
        except Exception as error:
            outcome = f"{type(error).__name__}"
        if trace.exists():
            outcome = "UNPICKLED"
        if len(list(folder.iterdir())) != 1:
            outcome += " and left a file behind"
        outcomes.setdefault(kind, Counter())[outcome] += 1
    return outcomes


def contested(rng: np.random.Generator, pairs: int, folder: Path) -> Counter[str]:
    """Two processes on one path, the second a little later, and somebody who reads what is there."""
    counts: Counter[str] = Counter()
    straight = Child("adaptive", None).end()[0]
    for pair in range(pairs):
        place = folder / f"pair-{pair}"
        place.mkdir()
        path = place / NAME
        children = [Child("adaptive", path)]
        time.sleep(float(rng.uniform(0, 1)) * (pair % 2))
        children.append(Child("adaptive", path))
        while any(child.process.poll() is None for child in children):
            if path.exists():
                counts["reads"] += 1
                counts["reads of a damaged file"] += whole(path) is None
            time.sleep(0.01)
        ends = [child.end() for child in children]
        counts["pairs"] += 1
        counts["solves that ended as if alone"] += sum(found == straight for found, _ in ends)
        counts["solves told of the other"] += sum("another solve" in complaint for _, complaint in ends)
        counts["solves that ended otherwise"] += sum(
            found != straight and "another solve" not in complaint for found, complaint in ends
        )
        counts["pairs of which none finished"] += all(found != straight for found, _ in ends)
        counts["files damaged"] += whole(path) is None
        counts["files left behind"] += sum(p.name != NAME for p in place.iterdir())
    return counts


def filled(folder: Path) -> Counter[str]:
    """Files can no longer grow, from some round on or from the start."""
    counts: Counter[str] = Counter()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))

    for setting in SETTINGS:
        place = folder / f"full-{setting}"
        place.mkdir()
        path = place / NAME
        kept: list[bytes] = []

        def fill(round: int, _: Any, path: Path = path, kept: list[bytes] = kept) -> None:
            if round >= 6 and not kept:
                kept.append(path.read_bytes())
                limit(len(kept[0]) // 2)

        straight = digest(solved(setting, None, 20))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found = digest(solved(setting, path, 20, callback=fill))
                counts["solutions lost"] += found != straight
                counts["old files that changed"] += path.read_bytes() != kept[0]
                counts["solves with other than one warning"] += len(said) != 1
                solved(setting, place / "new.npz", 20)
                counts["new files not refused"] += 1
            except mj.CheckpointError:
                counts["new files refused before the first round"] += 1
            finally:
                limit(unlimited[0])
        counts["solves"] += 1
        counts["files left behind"] += sum(p.name != NAME for p in place.iterdir())
        counts["resumed that differ"] += digest(solved(setting, path, 20)) != straight
    return counts


def main() -> None:
    """All of it, or as a child one solve."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survival", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="processes to kill (default %(default)s)")
    parser.add_argument("--damages", type=int, default=300, help="files to damage (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of processes (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default %(default)s)")
    parser.add_argument("--json", type=Path, help="file to save to")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        setting, checkpoint = options.child
        print(digest(solved(setting, Path(checkpoint) if checkpoint else None)))
        return
    rng, results = np.random.default_rng(options.seed), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; {len(SETTINGS)} settings, {ROUNDS} rounds")
        parts: dict[str, Callable[[], Any]] = {
            "full disk": lambda: filled(folder),
            "damaged files": lambda: damaged(rng, options.damages, folder / "damaged"),
            "two processes on one path": lambda: contested(rng, options.pairs, folder),
            "killed": lambda: killed(rng, options.kills, folder),
        }
        for title, part in parts.items():
            began = time.perf_counter()
            results[title] = part()
            print(f"\n{title} ({time.perf_counter() - began:.0f} s)")
            for what, count in results[title].items():
                print(f"  {what}: {dict(count) if isinstance(count, Counter) else count}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
