"""Right calls of rules of combining and attacks."""

import mocha_jax as mj
from tests.bad_calls import world
from tests.bad_calls.kinds import count, instance, number
from tests.bad_calls.outcomes import Arg, Call

SCALE = {"scale": Arg(2.0, number(0, shapes=[()]))}


def clients(value):
    return isinstance(value, tuple) and all(count(0)(one) for one in value)


def calls():
    r = mj.robust
    rule = Arg(r.Median(), instance(r.Rule))
    return {
        "robust.TrimmedMean": Call(r.TrimmedMean, {"share": Arg(0.1, number(0, below=0.5, shapes=[()]))}),
        "robust.GeometricMedian": Call(r.GeometricMedian, {
            "steps": Arg(3, count(1)), "smallest": Arg(1e-3, number(above=0, shapes=[()])),
        }),
        "robust.Krum": Call(r.Krum, {"hostile": Arg(1, count(0)), "keep": Arg(2, count(1))}),
        "robust.Bulyan": Call(r.Bulyan, {"hostile": Arg(1, count(0))}),
        "robust.SignFlip": Call(r.SignFlip, SCALE),
        "robust.InnerProduct": Call(r.InnerProduct, SCALE),
        "robust.RandomVectors": Call(r.RandomVectors, SCALE | {"seed": Arg(3, number(0, below=2**31, whole=True))}),
        "robust.ALittleIsEnough": Call(r.ALittleIsEnough, {"deviations": Arg(1.0, number(0, shapes=[()]))}),
        "robust.Attacked": Call(r.Attacked, {
            "rule": rule, "attack": Arg(r.SignFlip(), instance(r.Attack)), "hostile": Arg((0, 1), clients),
        }),
        "robust.combined": Call(r.combined, {
            "algorithm": Arg(world.fedavg(), instance((mj.FedAvg, mj.personalized.Composed))), "rule": rule,
        }),
    }  # fmt: skip
