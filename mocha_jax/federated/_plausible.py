r"""Finding answers of dual methods that no node can have computed, without a sample.

Of losses and conjugates that belong to a model W and a vector $v = \sum_i c_i\beta_i x_i$ a server knows this, whatever
the samples are:

- $\sum_i c_i[\ell(z_i) + \ell^*(-\beta_i)] + \langle w, v\rangle \ge 0$, a sum of Fenchel-Young terms, for the model
  that was sent and the duals after the round;
- with the duals before the round that sum is the node's share of the gap, and if these are the ones of the answer that
  is held, all of it but the losses is here;
- the adaptive server gets the slope from where a node stands to what it found, which has both vectors in it;
- no step of the local work makes the subproblem (4) worse, so $\sum_i c_i\ell^*(-\beta_i) + \langle w, u\rangle +
  \tfrac q2\|u\|^2$ is at most what it was at u = 0, where the node went on from the answer that is held;
- the vector is no longer than its error's bound allows: of that the samples' length and the duals are factors too.

All up to rounding, in units of the terms of these sums. Of answers to an earlier round the model is no longer here, and
of a node that had gone further than its last answer its start: then only what does not need them is looked at.

Where terms of a gap do not fit the vector that is held, one of two answers is false, and it may be the earlier one
(`DENIES`): what was concluded from that, the lower bound, is then forgotten.

**What cannot be found out** is a node that lies consistently: one that works on other samples than its own, or makes
some up, answers just as an honest one that has them. So does one that reports losses of samples which it did not work
on, as long as the sums above allow that. Where the node's model is 0 no sum has the vector in it: a vector of zeros,
with otherwise honest numbers, is then what a node answers whose samples cancel. A bound on the length of v, agreed on
beforehand (`Server`, ``max_norm``), limits what such a node can do to the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from mocha_jax._problem.gap import DualTerms
from mocha_jax.federated._sides import DENIES, ReceivedAnswers

if TYPE_CHECKING:
    from mocha_jax.federated._adaptive_sides import AdaptiveDown, AdaptiveUp
    from mocha_jax.federated._dual_sides import DualDown, DualUp

# A rounding of a sum counts for so much of its terms at most: who says that it has billions of samples gains nothing.
_MOST = 0.01


def implausible_vectors(
    v: Array, terms: DualTerms, down: DualDown, up: DualUp, received: ReceivedAnswers
) -> dict[str, Array]:
    """Mark answers that cannot be, ``[m]`` bool each, by a sentence of which the node is the subject.

    Args:
      v: the vectors that the server holds ``[m, d]``.
      terms: of the same duals; all 0 where it holds nothing.
      down: the message of this round.
      up: the answers.
      received: which of them there are.
    """
    has_vector, u = terms.size > 0, up.v - v
    marks, slack = _implausible(v, terms, down, up, (up.terms,), received, has_vector)
    least = jnp.where(has_vector, terms.conjugate, up.gap - up.value)
    quadratic = 0.5 * down.curvature * jnp.sum(u**2, axis=1)
    worse = up.terms.conjugate + jnp.sum(down.start * u, axis=1) + quadratic - least
    of_squares = _rounding(up) * down.curvature * (_norm(up.v) ** 2 + _norm(v) ** 2)
    marks["sent a vector that is worse for its subproblem than the one that it began with"] = (
        received.now & received.exact & (worse > 4.0 * (slack + of_squares))
    )
    return marks


def implausible_points(
    v: Array, terms: DualTerms, down: AdaptiveDown, up: AdaptiveUp, received: ReceivedAnswers
) -> dict[str, Array]:
    """Mark answers of the adaptive server's nodes that cannot be, as `implausible_vectors` does.

    Args:
      v: the vectors of the points where nodes stand, as the server has mixed them ``[m, d]``.
      terms: of these points, bounds.
      down: the message of this round.
      up: the answers.
      received: which of them there are.
    """
    # The server knows where a node stands once it has reported it; the slope to the found point has both points in it.
    has_vector = (up.anew == 0) & (terms.size > 0)
    before = up.stands.replace(error=jnp.maximum(up.stands.error, terms.error))
    marks, slack = _implausible(v, before, down.as_dual, up.as_dual, (up.stands, up.found), received, has_vector)
    slope = up.found.conjugate - up.stands.conjugate + jnp.sum(down.start * (up.vector - v), axis=1)
    marks["says neither that it begins anew nor that it does not"] = (up.anew < 0) | (up.anew > 1)
    marks["sent a slope that is not that from where it stood to the vector that it found"] = (
        received.now & received.exact & has_vector & (jnp.abs(up.slope[:, 0] - slope) > 4.0 * slack)
    )
    return marks


def _implausible(
    v: Array, terms: DualTerms, down: DualDown, up: DualUp, reported: tuple[DualTerms, ...], received: ReceivedAnswers,
    has_vector: Array,
) -> tuple[dict[str, Array], Array]:  # fmt: skip
    """The marks that do not depend on the server, and the roundings of the sums ``[m]``.

    Args:
      v: the vectors with which the nodes began, as the server has them ``[m, d]``.
      terms: of the same duals.
      down: the message of this round.
      up: the answers.
      reported: all terms that are in them.
      received: which of them there are.
      has_vector: ``[m]`` bool of which nodes the server has vectors.
    """
    eps, d = jnp.finfo(v.dtype).eps, v.shape[1]
    samples, rounding = jnp.maximum(up.samples, 1).astype(v.dtype), _rounding(up)
    length, size = _norm(up.v), _norm(down.model) + _norm(down.start)
    # Of v and of the predictions that it stands for; other roundings are of the terms of sums.
    unit = size * (2.0 + d / (2.0 + samples))
    lost_after = rounding * (jnp.abs(up.value) + up.terms.size + size * length) + unit * up.terms.error
    lost_before = rounding * (terms.size + size * _norm(v) + jnp.abs(up.gap)) + unit * terms.error
    slack = lost_after + lost_before
    # With the duals after the round, and with those before it, for the model that was sent.
    after = up.value + up.terms.conjugate + jnp.sum(down.model * up.v, axis=1)
    before = up.value + terms.conjugate + jnp.sum(down.model * v, axis=1)
    most = jnp.finfo(v.dtype).max / (1e3 * len(v))
    return {
        "sent a vector so long that its square is no number": ~(length**2 * (1.0 + down.curvature) < most),
        "says that its work was not from 0 to 1 of a full round's": (up.share < 0) | (up.share > 1),
        "says that it has no sample": up.samples < 1,
        "sent a bound below 0 on the error of its vector": _any(t.error < 0 for t in reported),
        "sent a vector longer than the bound on its error allows": (
            0.5 * eps * (2.0 + samples) * length * (1.0 - rounding) > up.terms.error + jnp.finfo(v.dtype).tiny
        ),
        "sent a sum of conjugates that is larger than that of their sizes": _any(
            jnp.abs(t.conjugate) > (1.0 + rounding) * t.size for t in reported
        ),
        "sent terms of a gap whose sum is below 0": up.gap < -lost_after,
        "sent losses, conjugates and a vector that do not belong together, for they make a duality gap below 0": (
            received.now & (after < -lost_after)
        ),
        DENIES: received.now & received.exact & has_vector & (jnp.abs(up.gap - before) > 4.0 * slack),
    }, slack


def _rounding(up: DualUp) -> Array:
    samples = jnp.maximum(up.samples, 1).astype(up.v.dtype)
    return jnp.minimum(jnp.finfo(up.v.dtype).eps * (64.0 + 4.0 * (samples + up.v.shape[1])), _MOST)


def _any(marks: Iterable[Array]) -> Array:
    return jnp.stack(list(marks)).any(axis=0)


def _norm(rows: Array) -> Array:
    return jnp.sqrt(jnp.sum(rows**2, axis=1))
