"""The README's code runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="the tests are running away from the repository")
@pytest.mark.extended
def test_the_code_in_the_readme_runs(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL))
    assert "mj.solve" in code
    code += "\nassert solution.status == mj.Status.CONVERGED and solution.relative_joint_gap <= 1e-3\n"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Solution(converged" in result.stdout


@pytest.mark.skipif(not README.exists(), reason="the tests are running away from the repository")
def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = README.read_text()
    assert len(text.splitlines()) <= 90
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (README.parent / target).exists(), target
