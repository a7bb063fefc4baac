"""Right calls of forms of few bytes."""

import mocha_jax as mj
from tests.bad_calls import world
from tests.bad_calls.kinds import instance, number
from tests.bad_calls.outcomes import Arg, Call

BITS = {"bits": Arg(4, number(1, 8, whole=True))}
SHARE = {"share": Arg(0.1, number(above=0, high=1, shapes=[()]))}


def calls():
    c = mj.compression
    return {
        "compression.Quantized": Call(c.Quantized, BITS),
        "compression.Stochastic": Call(c.Stochastic, BITS),
        "compression.TopK": Call(c.TopK, SHARE),
        "compression.RandomK": Call(c.RandomK, SHARE),
        "compression.Rotated": Call(c.Rotated, {"form": Arg(c.Quantized(1), instance(c.Difference))}),
        "compression.compressed": Call(c.compressed, {
            "algorithm": Arg(world.fedavg(), instance((mj.FedAvg, mj.personalized.Composed))),
            "form": Arg(c.TopK(0.1), instance(c.Sending)),
        }),
    }  # fmt: skip
