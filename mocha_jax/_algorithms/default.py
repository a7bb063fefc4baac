"""The default algorithm: the fastest on one machine."""

from __future__ import annotations

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._algorithms.interior_point import InteriorPoint, InteriorState
from mocha_jax._algorithms.mocha import Mocha
from mocha_jax._algorithms.newton import Newton, NewtonState
from mocha_jax._core import check
from mocha_jax._problem.problem import Federated, Problem

# Size of a task's system up to which second derivatives pay: for the squared loss, which needs one round of them, and
# for losses with kinks, of which coordinate ascent needs many passes; for the latter where tasks have nothing in
# common; and for other smooth losses. Of these, where tasks have something in common and fewer rows than features,
# coordinate ascent is quicker, but for small problems, which compile in half the time by second derivatives. Measured:
# `benchmarks.default_algorithm`.
_SIZE, _SIZE_ALONE, _SIZE_IF_SMOOTH, _SMALL = 128, 512, 64, 2**20


def default_algorithm(problem: Federated, state: object = None, *, federation: bool = False) -> Algorithm:
    """Choose the algorithm of `solve` if none is given.

    For a given relationship and few features it is `Newton` with smooth losses and `InteriorPoint` with `Hinge`,
    `Absolute`, `Quantile`, `EpsilonInsensitive`, `Ordinal`, and with `PerTask` where all tasks have the same one of
    these. Few are up to 128, or 64 with a smooth loss that is not quadratic. With `Independent` few samples of the
    largest node will do, and for losses with kinks few are up to 512. With other regularizers, a smooth loss that is
    not quadratic and more features than rows of the largest node it is `Newton` only where all second derivatives are
    less than a million numbers. It is `Mocha` for all other losses, for relationships that are learned, for more
    features, for data that are sharded over devices, and for a federation.

    Args:
      problem: what to solve.
      state: what to continue from; it belongs to one of the three.
      federation: whether nodes are watched, timed or disturbed: they send no second derivatives unless they are asked.

    Returns:
      `Newton()`, `InteriorPoint()` or `Mocha()`.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> near_the_mean = mj.regularizers.MeanRegularized(0.1, 0.01)
      >>> mj.default_algorithm(mj.Problem(data, mj.losses.Logistic(), near_the_mean))
      Newton()
      >>> mj.default_algorithm(mj.Problem(data, mj.losses.Hinge(), near_the_mean))
      InteriorPoint()
      >>> type(mj.default_algorithm(mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(0.1)))).__name__
      'Mocha'
    """
    check.instance("default_algorithm", "problem", problem, Federated, "Problem(data, loss, regularizer)")
    check.flag("default_algorithm", federation=federation)
    if state is not None:
        kinds: dict[type, Algorithm] = {NewtonState: Newton(), InteriorState: InteriorPoint()}
        return kinds.get(type(state), Mocha())
    if federation or not isinstance(problem, Problem) or problem.data.sharding is not None:
        return Mocha()
    data, loss, regularizer = problem.data, problem.loss, problem.regularizer
    d, rows, smooth = data.num_features, data.y.shape[1], loss.smoothness is not None
    alone = regularizer.separate and not data.shared
    size = min(d, rows) if alone else d
    if smooth:
        few = size <= (_SIZE if loss.quadratic else _SIZE_IF_SMOOTH)
    else:
        few = size <= (_SIZE_ALONE if alone else _SIZE)
    ascent = smooth and not loss.quadratic and size > rows and data.num_nodes * d**2 > _SMALL
    if regularizer.learned or ascent or not few:
        return Mocha()
    return Newton() if smooth else InteriorPoint() if loss.piecewise_linear else Mocha()
