"""Whatever is handed in, the library says in one sentence what is wrong with which argument, or is right."""

import collections

import pytest

from tests.bad_calls.outcomes import GOOD
from tests.bad_calls.sweep import cases, swept
from tests.bad_calls.table import calls, public, without

# Callables that cost next to nothing: constructors, and what deals samples to clients.
CHEAP = (
    *("regularizers.", "losses.", "systems.", "costs.Cost", "networks.", "likelihoods.", "partition.", "coupling."),
    *("Mocha", "Cocoa", "MiniBatchSdca", "MiniBatchSgd", "FedAvg", "Local", "Virtual", "Watch", "Implicit", "Unrolled"),
)


def cheap(name):
    return name.startswith(CHEAP) and " in use" not in name and not name[0].isupper() or name in CHEAP


def test_everything_public_is_called():
    known = {name.partition(",")[0].removesuffix(" in use") for name in calls()}
    missing = sorted(name for name in public() if name not in known and without(name) is None)
    assert not missing, f"add a right call of each to tests/bad_calls, or the reason for none to its table: {missing}"


def verdict(some):
    counts: collections.Counter[str] = collections.Counter()
    bad: list[tuple[str, ...]] = []
    for name, argument, label, result, _ in swept(some):
        counts[result.sort] += 1
        if result.sort not in GOOD:
            bad.append((result.sort, name, argument, label, result.detail))
    return counts, bad


@pytest.mark.slow
def test_a_sample_of_bad_calls_ends_well():
    counts, bad = verdict([case for case in cases() if cheap(case[0])][::480])
    assert sum(counts.values()) > 50
    assert len(bad) <= 0.01 * sum(counts.values()), bad
    assert not [case for case in bad if case[0] in ("wrongly accepted", "too long")], bad


@pytest.mark.slow
def test_all_bad_calls_end_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what is taken for a path is written here
    counts, bad = verdict(cases())
    assert sum(counts.values()) >= 20_000
    assert len(bad) <= 0.02 * sum(counts.values()), bad
    assert not [case for case in bad if case[0] in ("wrongly accepted", "too long")], bad
