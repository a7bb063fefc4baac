"""Right calls of the estimators. Samples, labels and their weights are checked by scikit-learn, in its own words."""

import functools

import numpy as np

import mocha_jax as mj
from mocha_jax.sklearn import MochaClassifier, MochaRegressor
from tests.bad_calls import world
from tests.bad_calls.kinds import count, either, flag, instance, number, optional, word
from tests.bad_calls.outcomes import Arg, Call

X, GROUPS = np.concatenate(world.xs()), np.repeat(np.arange(3), 4)
LABELS = {MochaRegressor: X[:, 0], MochaClassifier: np.concatenate(world.ys())}
LOSSES = {MochaRegressor: ("squared", "huber"), MochaClassifier: ("logistic", "hinge")}
POSITIVE = number(above=0)


@functools.cache
def fitted(kind):
    return kind(regularizer="independent", lam=0.1, unseen="error").fit(X, LABELS[kind], GROUPS)


def one_each(value):
    """A name for each of the rows."""
    names = np.asarray(value)
    return (
        not np.ma.is_masked(value) and names.shape == GROUPS.shape and not any(each != each for each in names.tolist())
    )


def known(value):
    """A group that was there, for each of the rows."""
    return one_each(value) and set(np.asarray(value).tolist()) <= {0, 1, 2}


def estimators():
    found: dict[str, Call] = {}
    asked = {"groups": Arg(GROUPS, known, ("task", "tasks"))}
    for kind in (MochaRegressor, MochaClassifier):

        def trained(kind=kind, **parameters):
            return kind(**parameters).fit(X, LABELS[kind]).coef_

        binary, name = kind is MochaClassifier, f"sklearn.{kind.__name__}"

        def of_the_loss(loss, binary=binary):
            return isinstance(loss, mj.losses.Loss) and loss.binary == binary

        found |= {
            name: Call(trained, {
                "groups": Arg(None, optional(number(-2, 1, shapes=[()], whole=True)), ("columns", "column")),
                "regularizer": Arg("independent", either(word("independent", "pooled", "mean"), instance(mj.regularizers.Regularizer)), ("lam",)),
                "lam": Arg(0.5, optional(either(POSITIVE, word("cv")))),
                "loss": Arg(LOSSES[kind][0], optional(either(word(*LOSSES[kind]), of_the_loss))),
                "loss_scaling": Arg("sum", word("sum", "task_mean")), "intercept": Arg(True, flag), "unseen": Arg("error", word("error", "mean", "warn")),
                "standardize": Arg("usual", optional(word("usual", "pooled", "task", "within", "centred"))),
                "tol": Arg(1e-3, number(0, shapes=[()])), "max_iter": Arg(5, count(1)), "random_state": Arg(0, optional(count(0))),
            }),
            f"{name}.fit": Call(
                lambda groups, kind=kind: kind(regularizer="independent", lam=0.1).fit(X, LABELS[kind], groups).coef_,
                {"groups": Arg(GROUPS, one_each)},
            ),
            f"{name}.predict": Call(lambda groups, kind=kind: fitted(kind).predict(X, groups), asked),
            f"{name}.score": Call(lambda groups, kind=kind: fitted(kind).score(X, LABELS[kind], groups=groups), asked),
        }  # fmt: skip
    found["sklearn.MochaClassifier.decision_function"] = Call(
        lambda groups: fitted(MochaClassifier).decision_function(X, groups), asked
    )
    return found
