r"""The convergence theory of the paper (section 4, appendices C and D) as functions of measured quantities.

Everything is in the units of this library: the objective is the sum (1), not its mean, and samples
have weights c. With $\|\beta\|_c^2 = \sum_i c_i\beta_i^2$ in place of the paper's Euclidean norm every proof
stands as it is; with unit weights the two agree. $\sigma'$ may differ from task to task (Remark 5).

It may import `_core`, `_numerics`, `_problem`, `servers` and `_algorithms`.

Examples:
  The bound of Theorem 1 beside what happened, with 30 % of the nodes missing in every round:

  >>> import jax, mocha_jax as mj
  >>> from mocha_jax import theory
  >>> data = mj.datasets.federation(jax.random.key(0), 5, 4, smallest=6, largest=12).data
  >>> problem = mj.Problem(data, mj.losses.SmoothedHinge(1.0), mj.regularizers.MeanRegularized(1.0, 1.0))
  >>> run = dict(num_rounds=20, systems=mj.systems.Dropout(0.3), watch=mj.Watch(theta=1e-6))
  >>> state, history = mj.run(problem, mj.Mocha(server="dual", sigma_prime="per_task"), jax.random.key(1), **run)
  >>> seen = theory.assumption2(history.nodes.theta)
  >>> seen.holds
  True
  >>> s = theory.rate(problem)
  >>> start = float(mj.certificate(problem, 0 * problem.data.y).gap)
  >>> tolerance = 1e-2 * float(history.primal[-1])
  >>> allowed = theory.theorem1(start, tolerance, s, seen.theta_bar)
  >>> needed = int((history.gap > tolerance).sum()) + 1
  >>> needed < 6 < int(allowed)
  True
"""

from mocha_jax.theory._assumptions import Assumption2 as Assumption2
from mocha_jax.theory._assumptions import Corollary8 as Corollary8
from mocha_jax.theory._assumptions import assumption2 as assumption2
from mocha_jax.theory._assumptions import corollary8 as corollary8
from mocha_jax.theory._bounds import dual_bound as dual_bound
from mocha_jax.theory._bounds import gap_bound as gap_bound
from mocha_jax.theory._bounds import theorem1 as theorem1
from mocha_jax.theory._bounds import theorem2 as theorem2
from mocha_jax.theory._constants import rate as rate
from mocha_jax.theory._constants import sigma as sigma
from mocha_jax.theory._lemmas import Lemma5 as Lemma5
from mocha_jax.theory._lemmas import lemma4 as lemma4
from mocha_jax.theory._lemmas import lemma5 as lemma5
from mocha_jax.theory._lemmas import lemma7 as lemma7

__all__ = [
    "Assumption2",
    "assumption2",
    "Corollary8",
    "corollary8",
    "dual_bound",
    "gap_bound",
    "lemma4",
    "Lemma5",
    "lemma5",
    "lemma7",
    "rate",
    "sigma",
    "theorem1",
    "theorem2",
]


def __dir__() -> list[str]:
    return __all__
