"""Words on a solve that ran out of rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from mocha_jax._driver.solution import Solution, Status


def unconverged(solution: Solution[Any]) -> str | None:
    """A sentence on a solve that ended at its number of rounds above the tolerance asked for; None where it did not.

    Networks are trained for so many rounds: a tolerance there says when to stop earlier.
    """
    if solution.tol is None or solution.status != Status.MAX_ROUNDS or not solution.rounds:
        return None
    if not solution.problem.convex or not np.isfinite(solution.quality.residual):
        return None
    remedy = "pass more max_rounds, or a tol that is worth them"
    return f"tol={solution.tol:g} was not reached: {solution.message}; {remedy}."
