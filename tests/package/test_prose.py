"""Docstrings begin with a verb or a noun that names their subject."""

import ast
import re
from pathlib import Path

import mocha_jax

ROOT = Path(mocha_jax.__file__).parent

# First words of fragments: relative clauses and prepositional phrases where a statement is expected.
FRAGMENTS = ("What", "How", "Of", "The same", "Where", "Whether", "Which", "With", "From", "As", "So many")


def test_docstrings_begin_with_a_statement():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if any(re.match(rf"{word}\b", first) for word in FRAGMENTS):
                    wrong.append(f"{path.relative_to(ROOT)}: {first}")
    assert wrong == []
