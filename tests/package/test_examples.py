"""The scripts of the gallery run and leave their pictures, and the page of the gallery shows all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("_"))

pytestmark = pytest.mark.skipif(not SCRIPTS, reason="the tests are running away from the repository")


def test_the_gallery_shows_every_script():
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert len(SCRIPTS) >= 10
    for script in SCRIPTS:
        assert f"assets/gallery/{script.stem}.png" in page, script.name
        assert (ROOT / "docs" / "assets" / "gallery" / f"{script.stem}.png").exists(), script.name


def run(scripts, folder):
    """Run scripts one after the other in one process."""
    source = "import runpy, sys\n" + "".join(
        f"sys.argv = ['', {str(folder)!r}]; runpy.run_path({str(script)!r}, run_name='__main__')\n"
        for script in scripts
    )
    return subprocess.run(
        [sys.executable, "-W", "ignore::UserWarning", "-c", source], capture_output=True, text=True, check=False,
        cwd=folder, timeout=900,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), *sys.path])},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("scripts", [SCRIPTS[::2], SCRIPTS[1::2]], ids=["even", "odd"])
def test_the_scripts_run(scripts, tmp_path):
    done = run(scripts, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.stem for path in tmp_path.glob("*.png")} == {script.stem for script in scripts}
