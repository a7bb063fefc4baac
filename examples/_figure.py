"""Where pictures go: ``python examples/NAME.py [FOLDER]``, by default beside the documentation."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402


def save(figure: plt.Figure, script: str) -> None:
    """Save a script's picture under the script's name."""
    default = Path(__file__).parents[1] / "docs" / "assets" / "gallery"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{Path(script).stem}.png", dpi=90, bbox_inches="tight")
    print(f"saved {Path(script).stem}.png")
