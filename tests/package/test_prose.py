"""Docstrings begin with a verb or a noun that names their subject, and sentences name theirs."""

import ast
import io
import re
import tokenize
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


# Riddles: the subject is withheld, or a figure of speech stands for the technical term.
RIDDLES = r"\b(nobody|whoever|somebody|anybody|to the letter|in a hurry|that is none|what is left)\b"


def _sentences(path):
    """The docstrings and comments of a module, or a page."""
    text = path.read_text()
    if path.suffix == ".md":
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    return "\n".join(
        [*comments, *(ast.get_docstring(n) or "" for n in ast.walk(ast.parse(text)) if isinstance(n, documented))]
    )


def test_sentences_name_their_subject():
    project = Path(__file__).resolve().parents[2]
    pages = [*project.glob("*.md"), *project.glob("docs/**/*.md")]
    wrong = [
        f"{path.relative_to(project)}: {said}"
        for path in [*sorted(ROOT.rglob("*.py")), *sorted(pages)]
        for said in re.findall(RIDDLES, _sentences(path), flags=re.IGNORECASE)
    ]
    assert wrong == []
