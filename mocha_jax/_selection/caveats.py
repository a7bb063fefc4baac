"""Reasons not to trust a choice by cross-validation, each one sentence, or None."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import numpy as np

from mocha_jax.regularizers import Regularizer

_NAMED = 5  # candidates; a longer list is cut


def unfinished(
    residuals: np.ndarray,
    rounds: np.ndarray,
    tol: float,
    max_rounds: int,
    advice: str = "",
    then: str = "are scored as far as they got",
    of: str = "candidates",
    names: Sequence[Hashable] | None = None,
) -> str | None:
    """Candidates, or others, whose solves ended before they reached the tolerance.

    Args:
      residuals: ``[..., c]``; not finite where a method certifies nothing or came to nothing.
      rounds: after which they ended, like them.
      tol: what they should have reached.
      max_rounds: what they were given.
      advice: what else may help.
      then: what becomes of them.
      of: what they are called.
      names: of each ``[c]``; default their numbers.
    """
    count = residuals.shape[-1]
    worst = np.where(np.isfinite(residuals), residuals, 0.0).reshape(-1, count).max(0)
    late = np.flatnonzero(worst > tol)
    early = ((residuals > tol) & (rounds < max_rounds)).any()
    if not len(late):
        return None
    named = ", ".join(f"{i if names is None else names[i]} ({worst[i]:.1e})" for i in late[:_NAMED])
    more = f" and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
    return (
        f"{of} {named}{more} did not reach tol={tol:g} in max_rounds={max_rounds} rounds, by the residual in "
        f"brackets, and {then}; "
        + ("where fewer rounds were done, floats certify no more: scale the features or use float64" if early else "")
        + ("; else " if early else "")
        + "raise max_rounds"
        + (f"; {advice}." if advice else ".")
    )


def at_the_edge(candidates: Regularizer, mean: np.ndarray, best: int, more_is_better: bool) -> str | None:
    """A best value with nothing beyond it; 0 and infinity are ends by nature.

    Args:
      candidates: with a leading axis [c].
      mean: score of each ``[c]``.
      best: the chosen one.
      more_is_better: of scores.
    """
    cost = -mean if more_is_better else mean
    ends = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(candidates):
        name, values = jax.tree_util.keystr(path).lstrip("."), np.asarray(leaf)
        if values.ndim != 1 or name in candidates.frozen_fields or values[best] in (0.0, np.inf):
            continue
        for end, which, further in ((values.min(), "smallest", "smaller"), (values.max(), "largest", "larger")):
            inside = cost[values != end]
            # Where one inside is as good, nothing draws the choice outwards.
            if values[best] == end and not np.isnan(inside).all() and cost[best] < np.nanmin(inside):
                ends.append(f"{name}={end:g} is the {which} tried, add {further} ones")
    return f"the best candidate, {best}, is at the edge of the grid: {'; '.join(ends)}." if ends else None


def rare_classes(sizes: np.ndarray, folds: int, kept: int, labels: Sequence[Hashable] = ("-1", "+1")) -> str | None:
    """Tasks that cannot have every class in every part.

    Args:
      sizes: samples of each class in each task, or groups with such, ``[num_tasks, classes]``.
      folds: how many parts.
      kept: samples that stay in training for that reason.
      labels: of the classes.
    """
    rare = (sizes > 0) & (sizes < folds) & ((sizes > 0).sum(1, keepdims=True) > 1)
    if not rare.any():
        return None
    task, label = np.argwhere(rare)[0]
    stay = (
        f"; {kept} of {sizes.sum()} samples are alone in their class and stay in training, where their scores are too "
        f"good"
    )
    return (
        f"in {int(rare.any(1).sum())} of {len(sizes)} tasks a class has fewer samples or groups than folds={folds} "
        f"(task {task}: {sizes[task, label]} of label {labels[label]}), so that scores say little of it"
        f"{stay if kept else ''}; take fewer folds or more samples."
    )
