"""Table 1 of the paper, prediction error of global, local and multi-task models: ``python -m experiments.table1``.

With ``--data har.npz ...`` for real task sets; see `experiments.protocol` for what is done.
"""

from __future__ import annotations

from experiments import protocol

# Means and standard errors in the paper, error in %, by the name of the file.
PAPER = {
    "har": {"global": "2.23 (0.30)", "local": "1.34 (0.21)", "MTL": "0.46 (0.11)"},
    "vehicle": {"global": "13.4 (0.26)", "local": "7.81 (0.13)", "MTL": "6.59 (0.21)"},
    "vehicles": {"global": "13.4 (0.26)", "local": "7.81 (0.13)", "MTL": "6.59 (0.21)"},
}

if __name__ == "__main__":
    protocol.study(protocol.command_line("experiments.table1", __doc__, "table1"), PAPER)
