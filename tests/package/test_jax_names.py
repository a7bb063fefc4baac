"""What the library uses of JAX beyond its public interface: each name in the files named here, and nothing else.

JAX may change such a name in any release (https://docs.jax.dev/en/latest/api_compatibility.html), so a new one has to be
wanted, and kept to one place.
"""

import ast
from collections import defaultdict
from pathlib import Path
from typing import cast

import mocha_jax

PACKAGE = Path(mocha_jax.__file__).parent
NOT_PUBLIC = {"core", "experimental", "extend", "interpreters", "lib"}

EXPECTED = {
    "jax.core.Tracer": {"_core/values.py"},
    "jax.experimental.layout.Format": {"_core/devices.py"},
    "jax.experimental.layout.Layout": {"_core/devices.py"},
    "jax.experimental.multihost_utils": {"_core/processes.py"},
    "jax.experimental.pallas": {
        "_node/kernel_triton.py", "_node/kernel_gpu.py", "_node/kernel_tpu.py", "servers/_quadratic_programs_triton.py",
        "servers/_quadratic_programs_gpu.py", "_numerics/tall_gpu.py",
    },
    "jax.experimental.pallas.mosaic_gpu": {
        "_core/mosaic.py", "_node/kernel_gpu.py", "servers/_quadratic_programs_gpu.py", "_numerics/tall_gpu.py",
    },
    "jax.experimental.pallas.tpu": {"_node/kernel_tpu.py"},
    "jax.experimental.pallas.triton": {"_node/kernel_triton.py", "servers/_quadratic_programs_triton.py"},
    "jax.experimental.serialize_executable": {"_core/kept_programs.py"},
    "jax.extend.backend.get_default_device": {"_core/mosaic.py"},
}  # fmt: skip


def names_in(tree):
    """Names of JAX, from its root on, as far as they are written down."""
    roots = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "jax":
                    yield alias.name
                    roots[alias.asname or "jax"] = alias.name if alias.asname else "jax"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            parts, at = [], cast(ast.expr, node)
            while isinstance(at, ast.Attribute):
                inner.add(at)
                parts.append(at.attr)
                at = at.value
            if isinstance(at, ast.Name) and at.id in roots:
                yield ".".join([roots[at.id], *reversed(parts)])


def is_public(name):
    _, *parts = name.split(".")
    hidden = [part for part in parts[:2] if part.startswith("_") and not part.endswith("__")]
    return not parts or (parts[0] not in NOT_PUBLIC and not hidden)


def found_in(package):
    found = defaultdict(set)
    for path in package.rglob("*.py"):
        for name in names_in(ast.parse(path.read_text())):
            if not is_public(name):
                found[name].add(path.relative_to(package).as_posix())
    return dict(found)


def test_no_other_name_of_jax_is_used():
    assert found_in(PACKAGE) == EXPECTED


def test_the_search_finds_what_is_not_public(tmp_path):
    (tmp_path / "one.py").write_text(
        "import jax\nimport jax._src.core\nfrom jax.extend import core as c\njax.core.Tracer\njax.numpy.ones(3)\n"
        "def f():\n    from jax.experimental import pallas\n    return jax.jit\n"
    )
    wanted = {"jax._src.core", "jax.extend.core", "jax.core.Tracer", "jax.experimental.pallas"}
    assert found_in(tmp_path) == dict.fromkeys(wanted, {"one.py"})
