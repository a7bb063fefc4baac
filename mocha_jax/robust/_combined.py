"""An algorithm whose server combines by a rule."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mocha_jax._core import check
from mocha_jax._core.pytree import PyTree, Tree
from mocha_jax._neural.client import Client
from mocha_jax._neural.composed import Composed, Sampling
from mocha_jax._neural.method import Answer, Method, ServerParts, ServerRound
from mocha_jax._neural.trees import as_tree, as_vector, first_row
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.robust._rules import Rule


def combined(algorithm: Sampling, rule: Rule) -> Composed:
    r"""Let an algorithm's server combine what clients send by a rule in place of the average.

    Where the server of the algorithm takes $\sum_k c_k u_k / \sum_k c_k$ of the clients' vectors $u_k$, it takes
    the rule's vector of them. With `Mean` nothing changes. The server then needs every client's vector by itself: it
    cannot be combined with secure aggregation.

    Args:
      algorithm: `FedAvg`, or one of `mocha_jax.personalized` whose server sums up: all but ``fedu``, ``fedamp`` and
        ``afl``. With ``ifca``, `Median` and `TrimmedMean` do not train clusters of less than half of the clients,
        because the others send zeros for them.
      rule: e.g. ``robust.Median()``.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 10, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.FedAvg(mj.networks.MLP(5, 2), optax.sgd(0.1))
      >>> attack = mj.robust.SignFlip(20.0)
      >>> for rule in (mj.robust.Mean(), mj.robust.Median()):
      ...     attacked = mj.robust.combined(algorithm, mj.robust.Attacked(rule, attack, (0, 1)))
      ...     solution = mj.solve(problem, attacked, tol=None, max_rounds=10)
      ...     print(type(rule).__name__, bool(solution.history.test_loss[-1] < solution.history.test_loss[0]))
      Mean False
      Median True
    """
    check.instance("combined", "algorithm", algorithm, Sampling, "FedAvg(model, optax.sgd(0.1))")
    check.instance("combined", "rule", rule, Rule, "robust.Median()")
    method = algorithm.declared().method
    if method.decodes is not None:
        raise ValueError("combined: the clients' vectors are compressed; a rule needs them as they are.")
    name = f"{algorithm.name} combined by {type(rule).__name__}"
    ruled = method._replace(client=_Client(method), sends=_Sends(method), server=_Server(method, rule), name=name)
    return algorithm.with_method(ruled)


@dataclass(frozen=True)
class _Client:
    """A client's round, with a vector of its own in place of its part of a sum."""

    method: Method

    def __call__(self, c: Client, own: Tree) -> tuple[PyTree, Answer]:
        kept, answer = self.method.client(c, own)
        vector = jax.tree.map(lambda a: safe_ratio(a, c.weight), answer.total)
        return kept, Answer((), (vector, answer.row), answer.loss)


@dataclass(frozen=True)
class _Sends:
    """The shapes of such answers."""

    method: Method

    def __call__(self, shared: Tree, row: Tree) -> Answer:
        like = Answer(shared) if self.method.sends is None else self.method.sends(shared, row)
        if not jax.tree.leaves(like.total):
            raise ValueError("combined: the algorithm's server needs every client's model, and sums up none of them.")
        if jax.tree.leaves(like.row):
            raise ValueError("combined: the algorithm's server believes numbers of each client that no rule looks at.")
        return Answer((), (like.total, like.row))


@dataclass(frozen=True)
class _Server:
    """The server's round, on the rule's vector times the weight of all in place of a sum."""

    method: Method
    rule: Rule

    def __call__(self, s: ServerRound) -> ServerParts:
        vectors, rows = s.sent
        found = s.weight * self.rule.combine(jax.vmap(as_vector)(vectors), jnp.where(s.answered, s.weights, 0.0))
        total = as_tree(found, jax.tree.map(first_row, vectors))
        return self.method.server(s._replace(total=total, sent=rows))
