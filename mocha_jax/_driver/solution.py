"""The solution of a problem."""

from __future__ import annotations

import enum
from typing import Any, Generic

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax import networks
from mocha_jax._algorithms.base import Kind, OwnState
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Pytree, Relation, static, summary, tree
from mocha_jax._core.values import is_traced
from mocha_jax._data.standardize import advice
from mocha_jax._driver.history import History
from mocha_jax._model.file import described
from mocha_jax._model.network import NetworkModel
from mocha_jax._problem.gap import Certificate
from mocha_jax._problem.problem import Problem, Quality
from mocha_jax._problem.to_model import linear_model
from mocha_jax.coupling import correlation

# A node that was silent in so many rounds is worth a warning; in fewer it may be chance.
PATIENCE = 10

Number = Array | float  # a Python number; inside a transformation, or of many solutions, an array

# Tasks up to which a matrix over all pairs is built on request.
_LARGEST_MATRIX = 20_000


class Status(enum.IntEnum):
    """Why a solve ended."""

    CONVERGED = 0
    MAX_ROUNDS = 1
    NON_FINITE = 2
    STOPPED = 3
    PRECISION = 4  # rounding may hide more than the tolerance, and more rounds would not help

    __str__ = enum.Enum.__str__  # the name, not the number


class Solution(Pytree, Generic[Kind]):
    """The result of `solve`, with its certified accuracy.

    Inside a transformation its numbers are traced arrays, and `history` holds the last record alone. A mapped solve
    returns one `Solution` whose arrays have a leading axis.
    """

    problem: Kind
    weights: Array = tree()  # [num_tasks, d]; of networks their parameters
    state: OwnState = tree()  # a `State`, the algorithm's own
    relation: Relation  # Omega, e.g. factored; None where it is given
    quality: Quality  # how good the answer is: a `Certificate`, of networks an `Evaluation`
    history: History  # of NumPy arrays, one entry per recorded round
    code: Array | int  # [] the status as a number
    rounds: Array | int  # [] rounds of this solve
    silent: Array | np.ndarray  # [m] bool nodes with data that never did any work
    owner: Array | np.ndarray  # [m] the task of each node
    utilisation: Array | np.ndarray  # [m] share of the simulated time in which each node was busy
    network: networks.Network | None = tree(default=None)  # whose parameters the weights are; None of a linear model
    tol: float | None = static(default=None)

    @property
    def status(self) -> Status:
        """Why the solve ended."""
        self._expect_one()
        return Status(int(self.code))

    @property
    def message(self) -> str:
        """The status in a sentence, with the accuracy that was reached."""
        self._expect_one()
        name = self.problem.criterion_name
        residual, rounds = float(self.quality.residual), int(self.rounds)
        text = {
            Status.CONVERGED: f"converged: {name} {residual:.2g} <= {self.tol} after {rounds} rounds",
            Status.MAX_ROUNDS: f"stopped at max_rounds after {rounds} rounds with {name} {residual:.2g}",
            Status.NON_FINITE: f"the {self.problem.objective_name} became infinite or NaN at round {rounds}; check the "
            f"data's scale and step sizes",
            Status.PRECISION: f"after {rounds} rounds the {name} is at most {residual:.2g}, more than {self.tol}: "
            f"rounding in {np.dtype(self.problem.data.dtype)} may hide the rest; bring the features to similar sizes, "
            f"or compute in float64",
            Status.STOPPED: f"stopped by the callback after {rounds} rounds with {name} {residual:.2g}",
        }[self.status]
        if self.missing_nodes:
            tasks = sorted(set(np.asarray(self.owner)[list(self.silent_nodes)].tolist()))
            names = self.problem.data.names.tasks
            shown = [str(t) if names is None else repr(names[t]) for t in tasks[:10]]
            which = ", ".join(shown) + (f" and {len(tasks) - 10} more" if len(tasks) > 10 else "")
            text += f"; {len(self.silent_nodes)} node(s) never answered, so the gap of task(s) {which} is not closed"
        if self.status == Status.MAX_ROUNDS and self.problem.convex and (hint := advice(self.problem.data)):
            text += f"; {hint}"
        return text + self.problem.remarks(self.quality)

    @property
    def certificate(self) -> Certificate:
        """The certificate of a convex problem's answer."""
        if not isinstance(self.quality, Certificate):
            raise AttributeError(f"a {type(self.problem).__name__} has no certificate; see solution.quality")
        return self.quality

    @property
    @on_purpose
    def model(self) -> Any:
        """The model that predicts by name, without samples: a `LinearModel` or a `NetworkModel`."""
        self._expect_one()
        if not isinstance(self.problem, Problem):
            return self._network_model()
        gaps = {"relative_gap": self.relative_gap, "relative_joint_gap": self.relative_joint_gap}
        finite = {name: float(gap) for name, gap in gaps.items() if gap is not None and np.isfinite(gap)}
        return linear_model(self.problem, self.weights, {"message": self.message, "rounds": int(self.rounds), **finite})

    def _network_model(self) -> NetworkModel:
        if self.network is None:
            raise AttributeError(
                "this solution was pickled without its network, which is none of mocha_jax.networks; give it to "
                "solution.problem.network_model(network, solution.weights, {})"
            )
        error = float(self.quality.residual)
        finite = {self.problem.criterion_name: error} if np.isfinite(error) else {}
        trained = {"message": self.message, "rounds": int(self.rounds), **finite}
        return self.problem.network_model(self.network, self.weights, trained)

    def __getstate__(self) -> dict[str, object]:
        """Leave out a network that a person wrote: its functions may have no name to find them by."""
        named = self.network is None or described(self.network, networks) is not None
        return {**super().__getstate__(), **({} if named else {"network": None})}

    @property
    def silent_nodes(self) -> tuple[int, ...]:
        """Nodes with data that never did any work."""
        self._expect_one()
        return tuple(np.flatnonzero(self.silent).tolist()) if int(self.rounds) else ()

    @property
    def missing_nodes(self) -> bool:
        """Tell whether silent nodes keep a convex problem from its optimum. Of networks always False."""
        patient = self.status != Status.CONVERGED and int(self.rounds) >= PATIENCE
        return patient and bool(self.silent_nodes) and self.problem.convex

    @property
    @on_purpose
    def omega(self) -> Array:
        """The relationship matrix of the model, ``[num_tasks, num_tasks]``."""
        return self.problem.relationship(self._num_tasks_squared(), self.relation)

    @property
    @on_purpose
    def covariance(self) -> Array:
        """The covariance of the tasks' weights, up to scale, ``[num_tasks, num_tasks]``."""
        return self.problem.covariance(self._num_tasks_squared(), self.relation)

    @property
    @on_purpose
    def correlation(self) -> Array:
        """The covariance with unit diagonal: the similarity of tasks, from -1 to 1."""
        return correlation(self.covariance)

    def _num_tasks_squared(self) -> int:
        """The number of tasks, where a matrix over pairs of them is a thing to build."""
        self._expect_one()
        m = self.problem.data.num_tasks
        if m > _LARGEST_MATRIX:
            raise ValueError(
                f"{m} tasks have {m:,}^2 pairs; no matrix of them was or will be built. solution.relation keeps Omega "
                f"as base * I + factor @ factor.T."
            )
        return m

    def _expect_one(self) -> None:
        if np.ndim(self.code):
            raise ValueError(
                f"these are {np.size(self.code)} solutions of a mapped solve; look at one of them, "
                f"jax.tree.map(lambda a: a[i], solution), or at their arrays."
            )

    @property
    def primal(self) -> Number:
        """Objective at `weights`, to within `rounding`."""
        return _number(self.certificate.primal)

    @property
    def rounding(self) -> Number:
        """Bound on the distance of `primal` from the objective at `weights`."""
        return _number(jnp.asarray(self.certificate.rounding))

    @property
    def dual(self) -> Number:
        """A lower bound on the optimum."""
        return _number(self.certificate.dual)

    @property
    def gap(self) -> Number:
        """Bound on the distance of the objective at `weights` from the optimum, all rounding counted."""
        return _number(self.certificate.gap)

    @property
    def relative_gap(self) -> Number:
        """The gap over the size of the objective."""
        return _number(self.certificate.relative_gap)

    @property
    def task_gaps(self) -> Array:
        """Each task's share of the gap, ``[num_tasks]``."""
        return self.certificate.task_gaps

    @property
    def joint_gap(self) -> Number | None:
        """A bound on the distance from the optimum over W and Omega; None if that problem is not convex."""
        return _number(self.certificate.joint_gap) if self.problem.jointly_convex else None

    @property
    def relative_joint_gap(self) -> Number | None:
        """The joint gap over the size of the objective."""
        return _number(self.certificate.relative_joint_gap) if self.problem.jointly_convex else None

    def __repr__(self) -> str:
        if is_traced(self.code) or np.ndim(self.code):
            return summary(self, {"weights": self.weights, "code": self.code, "rounds": self.rounds})
        return f"Solution({self.message})"


def _number(value: Array) -> Number:
    """A Python number; inside a transformation, or of many solutions, the array."""
    return value if is_traced(value) or np.ndim(value) else float(value)
