"""Table 4 of the paper, the same for highly skewed data: ``python -m experiments.table4 [--data har.npz ...]``.

Of each task's training samples some are kept, so that sizes differ by two orders of magnitude; see
`experiments.protocol`.
"""

from __future__ import annotations

from experiments import protocol

# Means and standard errors in the paper, error in %, by the name of the file.
PAPER = {
    "har": {"global": "2.41 (0.30)", "local": "3.87 (0.37)", "MTL": "1.93 (0.44)"},
    "vehicle": {"global": "13.58 (0.23)", "local": "8.15 (0.19)", "MTL": "6.91 (0.21)"},
    "vehicles": {"global": "13.58 (0.23)", "local": "8.15 (0.19)", "MTL": "6.91 (0.21)"},
}

if __name__ == "__main__":
    protocol.study(protocol.command_line("experiments.table4", __doc__, "table4", skew=True), PAPER)
