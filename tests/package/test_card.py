"""The runner of `benchmarks.card`: steps that fail, hang or are killed cost themselves alone, and a run is resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.card import _reference
from benchmarks.card._inside import ROOT, Inside
from benchmarks.card._results import Results
from benchmarks.card._runner import Options, Runner
from benchmarks.card._steps import STEPS, Step

# A step without JAX, in a fraction of a second.
BEGIN = "import os, sys, time, subprocess; from benchmarks.card._inside import Inside, step; here = Inside.from_environment()\n"
GOOD = BEGIN + "here.figure('speed', 3.0, 'us', predicted=1.0); step(lambda here: None)"


def step(name, code=GOOD, seconds=1.0):
    return Step("x", name, seconds, "something", code)


def run(out, steps, chosen=None, minutes=0.5, **options):
    runner = Runner(Options(out, minutes, **options), steps, steps if chosen is None else chosen)
    failed = runner.run(probe=False)
    return failed, json.loads((out / "card.json").read_text())["steps"]


def test_a_step_that_fails_costs_itself_alone(tmp_path, capfd):
    steps = [
        step("fails", BEGIN + "here.note('so far'); raise RuntimeError('broken')"),
        step("wrong", BEGIN + "step(lambda here: here.wrong('two is three'))"),
        step("dies", BEGIN + "here.figure('before', float('nan'), 's'); os.abort()"),
        step("says nothing", "pass"),
        step("good"),
        step("elsewhere", BEGIN + "step(lambda here: here.left_out('not here'))"),
        step("partly", BEGIN + "step(lambda here: here.unfinished('the rest'))"),
    ]
    failed, found = run(tmp_path, steps)
    assert failed == 4
    status = {name: result["status"] for name, result in found.items()}
    assert status == {
        "fails": "failed", "wrong": "wrong", "dies": "failed", "says nothing": "failed", "good": "complete",
        "elsewhere": "left out", "partly": "unfinished",
    }  # fmt: skip
    assert found["fails"]["notes"] == ["so far"]
    assert found["fails"]["said"] == "RuntimeError: broken"
    assert found["dies"]["figures"][0]["what"] == "before"
    log, table = ((tmp_path / name).read_text() for name in ("card.log", "card.txt"))
    assert "Traceback" in log
    assert "WRONG: two is three" in table
    assert "x 3.00 <<" in table  # three times its prediction
    assert table in capfd.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.json", "card.log", "card.txt"]


@pytest.mark.slow
def test_a_step_that_hangs_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.card._process.GRACE", 0.2)
    monkeypatch.setattr("benchmarks.card._runner._LEAST", 0.5)
    lasting = f"subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])"
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    hangs = BEGIN + deaf + f"child = {lasting}; here.note(str(child.pid)); here.note('so far'); time.sleep(60)"
    began = time.perf_counter()
    failed, found = run(tmp_path, [step("hangs", hangs, 2.0), step("good", GOOD, 9.0)], minutes=0.2)
    assert time.perf_counter() - began < 10.0
    assert failed == 1
    assert found["hangs"]["status"] == "stopped"
    child, said = found["hangs"]["notes"]
    assert said == "so far"
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)
    assert found["good"]["status"] == "complete"


def test_a_child_that_hangs_leaves_what_it_said(tmp_path):
    rows = str(tmp_path / "rows")
    here = Inside({"rows": rows, "end": time.time() + 60.0, "full": True, "seed": 0, "out": str(tmp_path)})
    lasting = f"subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(4)'])"  # which holds the pipe
    said = """print('{"a": 1}', flush=True)"""
    found = here.child(["-c", f"import subprocess, time; {lasting}; {said}; time.sleep(60)"], seconds=1.0)
    assert found.code is None
    assert found.results == [{"a": 1}]
    assert here.child(["-c", "print('not a record'); raise SystemExit(3)"]) == (3, "not a record\n")


def test_what_is_complete_is_not_run_again(tmp_path):
    mark = "open(os.path.join(here.out, 'runs'), 'a').write('{}'); "
    steps = [step(name, BEGIN + mark.format(name) + "step(lambda here: None)") for name in "ab"]
    steps.append(step("c", BEGIN + mark.format("c") + "step(lambda here: here.unfinished('more'))"))
    runs = lambda: (tmp_path / "runs").read_text()  # noqa: E731
    run(tmp_path, steps, steps[:1])
    assert runs() == "a"
    failed, found = run(tmp_path, steps)
    assert failed == 0
    assert runs() == "abc"
    run(tmp_path, steps)
    assert runs() == "abcc"  # what is not finished goes on
    run(tmp_path, steps, steps[:1], again=True)
    assert runs() == "abcca"
    assert list(found) == ["a", "b", "c"]


def test_a_step_that_gets_no_time_counts(tmp_path):
    failed, found = run(tmp_path, [step("good")], minutes=0.01)
    assert failed == 1
    assert found["good"]["status"] == "no time"


def test_the_table_of_a_run_that_is_ended_is_written(tmp_path):
    code = (
        "import signal, sys; from pathlib import Path; from benchmarks.card._runner import Options, Runner\n"
        "from benchmarks.card._steps import Step; signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        f"s = [Step('x', 'hangs', 1.0, '', {BEGIN + 'here.note(str(os.getpid())); time.sleep(60)'!r})]\n"
        f"Runner(Options(Path({str(tmp_path)!r}), 1.0), s, s).run(probe=False); assert 'jax' not in sys.modules"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    until = time.perf_counter() + 20.0
    while time.perf_counter() < until and not (tmp_path / "hangs.log").exists():
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=10.0)
    assert "hangs" in (tmp_path / "card.txt").read_text()
    assert json.loads((tmp_path / "card.json").read_text())["steps"]["hangs"]["status"] == "stopped"


def test_the_command_line_chooses(tmp_path):
    def status(*options):
        command = [sys.executable, "-m", "benchmarks.card", "--out", str(tmp_path), "--minutes", "0.001", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, Results(tmp_path).steps

    code, found = status("--only", "facts", "scale", "--skip", "scale")
    assert code == 1
    assert {name for name, result in found.items() if result["status"] == "no time"} == {"facts"}
    assert set(found) == {step.name for step in STEPS}
    assert all((ROOT / "benchmarks" / "card" / f"{step.name}.py").exists() for step in STEPS)


def test_the_reference_steps_to_the_minimum():
    rng = np.random.default_rng(0)
    beta, g, y = np.zeros(50), rng.normal(size=50), rng.normal(size=50)
    kappa = rng.uniform(0.1, 2.0, 50)
    squared = _reference.dual_step(_reference.DERIVATIVES["squared"], beta, g, y, kappa)
    np.testing.assert_allclose(squared, (y - g) / (1 + kappa), rtol=1e-12)
    signs = np.sign(y)
    hinge = _reference.dual_step(_reference.DERIVATIVES["hinge"], beta, g, signs, kappa)
    np.testing.assert_allclose(hinge, signs * np.clip((1 - signs * g) / kappa, 0, 1), rtol=1e-9, atol=1e-12)


def test_all_pairs_are_held():
    factors: dict[str, Sequence[Any]] = {"a": [1, 2, 3], "b": ["x", "y"], "c": [None, 0.5]}
    cases = list(_reference.pairs(factors, 20, np.random.default_rng(0)))
    assert _reference.count_pairs(cases, list(factors)) == 3 * 2 + 3 * 2 + 2 * 2
    assert len(cases) < 12


def test_nothing_of_the_runner_needs_jax():
    code = "import sys, benchmarks.card.__main__; assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(ROOT), check=True)
