"""Strict arithmetic, eight CPU devices, fixed seeds. All of it is set before JAX starts."""

import gc
import os
from pathlib import Path
from typing import Any

import jax

gc.set_threshold(100_000, 20, 100)  # programs and their caches live on: the collector would look at them in vain
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
if "MOCHA_JAX_TESTS_OPTIMIZED" not in os.environ:
    # The suite compiles much and computes little; so do the processes that tests start.
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    if jax.__version_info__[:2] == (0, 10):  # three times as quick to compile; later versions know only the other way
        quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # else the command line and the estimators fill the user's
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

import hypothesis
import numpy as np
import pytest

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40, database=None)
hypothesis.settings.load_profile("fixed")


def pytest_configure(config):
    """Let solves end at max_rounds: many tests want so many rounds. No other warning, of that kind either, is let go."""
    said = "(solve. tol=.* was not reached|lambda_path. candidates)"
    config.addinivalue_line("filterwarnings", f"ignore:{said}:mocha_jax.NotConverged")


@pytest.hookimpl(tryfirst=True)  # before the default's `-m` looks at marks
def pytest_collection_modifyitems(items):
    """Of a test marked `thin(k)` k of the cases, evenly spread, are as they are and the others are slow."""
    thin: dict[Any, Any] = {}
    for item in items:
        marker = item.get_closest_marker("thin")
        if marker and not item.get_closest_marker("slow"):
            thin.setdefault((item.path, item.originalname, *marker.args), []).append(item)
    for (*_, count), cases in thin.items():
        kept = {i * len(cases) // count for i in range(count)}
        for i, item in enumerate(cases):
            if i not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Free what modules compiled when it is much: programs take memory maps, and a process may have 65,530 of them.

    Programs of modules before are kept until then: modules compile many that others have compiled.
    """
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()


@pytest.fixture
def key():
    return jax.random.key(20170531)


@pytest.fixture
def buckets_of_any_size(monkeypatch):
    """Put nodes of few samples into buckets too: there it is not worth the time to compile."""
    monkeypatch.setattr("mocha_jax._node.buckets._BUCKET_NUMBERS", 0)


@pytest.fixture
def real_data():
    """Load a real task set by name from the folder `MOCHA_JAX_DATA`; skips where it is not there."""

    def load(name):
        path = Path(os.environ.get("MOCHA_JAX_DATA", "")) / f"{name}.npz"
        if "MOCHA_JAX_DATA" not in os.environ or not path.exists():
            pytest.skip(f"{path.name} is not here; set MOCHA_JAX_DATA to the folder that holds it")
        return np.load(path, allow_pickle=False)

    return load
