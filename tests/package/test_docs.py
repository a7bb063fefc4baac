"""Every page of the documentation runs, and the pages for extenders do with public names alone."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

import mocha_jax as mj
from tests import zoo

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the tests are running away from the repository")
PAGES = sorted(p for p in DOCS.rglob("*.md") if "```python" in p.read_text())


def code(page):
    """Return the code blocks of a page, one after the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S))


# Pages whose programs take long to compile.
LONG = {
    "choosing.md", "classes.md", "compression.md", "derivatives.md", "federated.md", "models.md", "networks.md",
    "primer.md", "private.md", "reports.md", "sklearn.md", "tutorial.md",
}  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "long"),
    [(".", False), pytest.param("extending", False, marks=pytest.mark.slow),
     pytest.param(".", True, marks=pytest.mark.slow)],
    ids=[".", "extending", "long"],
)  # fmt: skip
@pytest.mark.extended
def test_pages_run(folder, long, tmp_path):
    """As a reader runs them: one after the other, in a process with JAX as it is."""
    pages = [page for page in PAGES if page.parent == DOCS / folder and (page.name in LONG) == long]
    assert pages
    source = "import traceback, sys\n" + "".join(
        f"try:\n    exec(compile({code(page)!r}, {page.name!r}, 'exec'), {{}})\n"
        f"except BaseException:\n    print({page.name!r}, file=sys.stderr); traceback.print_exc(); sys.exit(1)\n"
        for page in pages
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore::UserWarning", "-c", source], capture_output=True, text=True, check=False,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", sorted(DOCS.glob("extending/*.md")), ids=lambda p: p.stem)
def test_extenders_need_public_names_only(page):
    assert not re.findall(r"^(?:from|import) \S*\._\w+|mj\._\w+|mocha_jax\._\w+", code(page), flags=re.M)


def test_no_page_is_left_out_of_the_site():
    nav = (DOCS.parent / "mkdocs.yml").read_text()
    missing = [str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if str(p.relative_to(DOCS)) not in nav]
    assert missing == []


def test_links_between_pages_lead_somewhere():
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+\.(?:md|png|py))", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_what_a_program_prints_is_drawn_letter_by_letter():
    terminal = runpy.run_path(str(DOCS / "terminal.py"))
    page = (DOCS / "commands.md").read_text()
    (text,) = terminal["blocks"](page)
    drawn = terminal["on_page_markdown"](page)
    assert text not in drawn
    assert drawn.count("```text") == page.count("```text") - 1
    (picture,) = re.findall(r"<svg.*</svg>", drawn)
    rows = ["".join(row.itertext()) for row in ElementTree.fromstring(picture).iter() if row.tag.endswith("tspan")]
    assert [row.rstrip() for row in rows] == text.rstrip("\n").split("\n")


def provoked():
    """The errors of the page of errors, in its order, as the library raises them."""

    def problem(data, regularizer=None):
        return mj.Problem(
            data, mj.losses.Hinge(), mj.regularizers.Independent(0.1) if regularizer is None else regularizer
        )

    xs, ys = zoo.ragged()
    wrong = [*ys[:3], np.abs(ys[3] > 0).astype(float), ys[4]]
    spoilt = [*xs[:3], xs[3].copy(), xs[4]]
    spoilt[3][7] = np.nan
    lams = np.array([0.1, 0.2, 0.3, 0.4])
    four = jax.vmap(lambda lam: mj.solve(problem(zoo.data(), mj.regularizers.Independent(lam)), max_rounds=2))(lams)
    labels = mj.pack_tasks(xs, [(y > 0).astype(float) for y in ys])
    return [
        lambda: problem(mj.pack_tasks(xs, wrong)),
        lambda: mj.pack_tasks(spoilt, ys),
        lambda: four.status,
        lambda: mj.solve(mj.Prediction(labels), mj.Mocha()),  # type: ignore[misc]
        lambda: mj.solve(problem(zoo.data(), mj.regularizers.SparsePrecision(0.1, 1.0, 0.0, 0.1)), mj.Mocha(server="proximal")),
    ]  # fmt: skip


@pytest.mark.extended
def test_the_page_of_errors_has_the_messages_that_are_raised():
    page = (DOCS / "errors.md").read_text()
    messages = re.findall(r"^\| `(.*?)` \|", page.split("## How a solve ends")[0], flags=re.M)
    for message, provoke in zip(messages, provoked(), strict=True):
        with pytest.raises(ValueError, match=".") as error:
            provoke()
        assert message in str(error.value)


def rows_of(page, *columns):
    """The rows of the tables of a page that begin with these columns."""
    head = re.escape("| " + " | ".join(columns))
    found = []
    for table in re.findall(rf"^{head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", (DOCS / page).read_text(), flags=re.M):
        found += [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
    return found


def test_the_page_of_papers_names_what_is_there():
    rows = rows_of("papers.md", "item", "here")
    verified = {item for item, _ in rows_of("validation.md", "item", "verified by")}
    assert len(rows) > 60
    for item, here, *experiment in rows:
        for name in re.findall(r"`mj\.([\w.]+)`", here):
            thing = mj
            for part in name.split("."):
                assert hasattr(thing, part), f"{item}: mj.{name}"
                thing = getattr(thing, part)
        assert item in verified or re.search(r"\bnot\b|nothing", here), f"{item}: nothing shows it, unexplained"
        for name in re.findall(r"`experiments\.(\w+)`", " ".join(experiment)):
            assert (DOCS.parent / "experiments" / f"{name}.py").exists(), f"{item}: experiments.{name}"


def test_the_page_of_validation_names_tests_that_are_there():
    items = {item for item, *_ in rows_of("papers.md", "item", "here")}
    for item, verified in rows_of("validation.md", "item", "verified by"):
        assert item in items, f"{item}: not on the page of papers"
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", verified)
        assert tests, f"{item}: names no test"
        for path, name in tests:
            assert f"def {name}(" in (DOCS.parent / path).read_text(), f"{item}: {path}::{name}"


def docstrings():
    """The module that rewrites docstrings for the site."""
    pytest.importorskip("griffe")
    return runpy.run_path(str(DOCS / "docstrings.py"))


@pytest.mark.parametrize("room", ["losses", "regularizers", "servers"])
def test_tables_of_docstrings_are_tables_of_the_site(room):
    module = getattr(mj, room)
    text = docstrings()["in_markdown"](module.__doc__, module.__name__, set(dir(module)))
    assert "====" not in text
    assert "may import" not in text
    rows = [line for line in text.split("\n") if line.startswith("|")]
    width = len(re.findall(r"(?<!\\)\|", rows[0]))
    assert width > 2
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [width] * len(rows)
    linked = re.findall(rf"\[`(\w+)`\]\[mocha_jax.{room}.(\w+)\]", text)
    assert len(linked) == len(rows) - 2
    assert all(name == place and hasattr(module, name) for name, place in linked)


def test_a_cell_that_goes_on_in_the_next_row_is_one_cell():
    text = "Rooms.\n\n=====  =======\nname   is\n=====  =======\n`a` 1  |x|_1 <\n       2\n`b`    y\n=====  =======\n\nMore.\n"
    want = "Rooms.\n\n| name | is |\n| --- | --- |\n| [`a`][m.a] 1 | \\|x\\|\\_1 &lt; 2 |\n| `b` | y |\n\nMore.\n"
    assert docstrings()["in_markdown"](text, "m", {"a"}) == want
