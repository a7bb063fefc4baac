"""Preparation of samples by what those for training say: fitted within a fold, it has not seen what is held out."""

from __future__ import annotations

from collections.abc import Callable

from mocha_jax._core import check
from mocha_jax._data.scaling import WAYS, Standardize
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.problem import Problem
from mocha_jax.losses import ResidualLoss

# From samples for training to what is done with any; pure, since it runs within compiled programs.
Preparation = Callable[[TaskData], Callable[[TaskData], TaskData]]


def preparation(owner: str, standardize: str | Preparation | None, problem: Problem) -> Preparation | None:
    """The rule for samples that is asked for: by name, or a function of the user's own."""
    if standardize is None:
        return None
    if not isinstance(standardize, str):
        check.function(owner, "standardize", standardize, "lambda training: lambda data: data")
        return standardize
    check.one_of(owner, "standardize", standardize, WAYS)
    return Standardize(standardize, labels=_of_residuals(problem))


def prepared(problem: Problem, prepare: Preparation | None, *others: TaskData) -> tuple[Problem, list[TaskData]]:
    """The problem with its samples prepared, and other data in the same way."""
    if not isinstance(prepare, Standardize):
        return fitted(problem, prepare, *others)
    data = problem.data.standardized(prepare.by, labels=prepare.labels)  # which remembers how
    return problem.replace(data=data), [other.standardized(like=data) for other in others]


def fitted(problem: Problem, prepare: Preparation | None, *others: TaskData) -> tuple[Problem, list[TaskData]]:
    """Prepare within compiled programs, where nothing is remembered."""
    if prepare is None:
        return problem, list(others)
    apply = prepare(problem.data)
    check.function("standardize", "what it returns", apply, "lambda data: data")
    found = [apply(data) for data in (problem.data, *others)]
    for data in found:
        check.instance("standardize", "what is returned for data", data, TaskData, "data.replace(x=...)")
    return problem.replace(data=found[0]), found[1:]


def anonymous(data: TaskData, prepare: Preparation | None) -> TaskData:
    """Data without names, which still says whether it has an intercept where that is asked."""
    return data.unnamed() if prepare is None else data.unnamed().exchange(intercept=data.intercept)


def _of_residuals(problem: Problem) -> bool:
    """Tell whether the loss knows labels by their distance from predictions alone, so that both may be moved."""
    return all(isinstance(problem.loss.of_task(t), ResidualLoss) for t in range(problem.data.num_tasks))
