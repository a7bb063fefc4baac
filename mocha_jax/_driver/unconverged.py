"""Words on a solve that ran out of rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from mocha_jax._driver.solution import Solution, Status


def unconverged(solution: Solution[Any]) -> str | None:
    """A sentence on a solve that ended above the requested tolerance; None if it did not.

    Networks are trained for so many rounds: a tolerance there says when to stop earlier.
    """
    problem, residual = solution.problem, float(solution.quality.residual)
    if solution.tol is None or not solution.rounds or not problem.convex or not np.isfinite(residual):
        return None
    said = f"tol={solution.tol:g} was not reached: {solution.message}"
    if solution.status == Status.PRECISION and float(solution.history.residual[-1]) > solution.tol:
        return f"{said}."
    if solution.status != Status.MAX_ROUNDS:
        return None
    if residual <= problem.rounding_level:
        dtype = np.dtype(problem.data.dtype)
        return f"{said}, where rounding in {dtype} slows the last digits down: compute in float64, or ask for less."
    return f"{said}; pass more max_rounds, or a tol that is worth them."
