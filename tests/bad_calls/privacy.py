"""Right calls of differential privacy."""

import functools

import jax
import numpy as np

import mocha_jax as mj
from tests.bad_calls import records, world
from tests.bad_calls.kinds import count, either, instance, key, number, optional, word
from tests.bad_calls.outcomes import Arg, Call

POSITIVE, WORDS = number(above=0, shapes=[()]), word("rdp", "pld")
M = 3
OF_EACH = number(above=0, shapes=[(), (M,)])
DELTA = number(above=0, below=1, shapes=[(), (M,)])


@functools.cache
def private():
    return world.fedavg().replace(privacy=mj.privacy.ExampleLevel(1.0, 8))


@functools.cache
def state():
    return mj.run(world.prediction(), private(), jax.random.key(0), num_rounds=1)[0]


def is_clip(value):
    return isinstance(value, mj.privacy.QuantileClip) or POSITIVE(value)


@functools.cache
def of_clients():
    return mj.privacy.private_clients(world.fedavg(), mj.privacy.ClientLevel(1.0, 8))


@functools.cache
def state_of_clients():
    return mj.run(world.prediction(), of_clients(), jax.random.key(0), num_rounds=1)[0]


def longest():
    """The length of the longest sample: the least bound, to the tolerance of numbers in 32 bits."""
    return float(np.linalg.norm(np.asarray(world.solution().problem.data.x), axis=2).max()) * (1 - 1e-6)


def calls():
    p = mj.privacy
    problem = Arg(world.prediction(), instance(mj.Prediction))
    accountant, delta = Arg("rdp", WORDS), Arg(1e-3, DELTA)
    trainer = instance((mj.FedAvg, mj.Local, mj.personalized.Composed), lambda a: a.privacy is not None)
    return {
        "privacy.ExampleLevel": Call(p.ExampleLevel, {
            "noise": Arg(1.0, number(0)), "steps": Arg(5, number(0, below=2**31, whole=True)), "clip": Arg(0.5, POSITIVE),
        }),
        "privacy.ExampleLevel.client": Call(p.ExampleLevel(np.ones(3, np.float32), 5).client, {
            "number": Arg(1, lambda value: count(0)(value) and value < 3),
        }),
        "privacy.PrivateSdca": Call(p.PrivateSdca, {
            "privacy": Arg(p.ExampleLevel(1.0, 8), optional(instance(p.ExampleLevel))),
            "share": Arg(0.3, number(high=1, above=0)), "caution": Arg(0.2, number(above=0)),
            "omega_every": Arg(5, either(count(1), lambda v: records.sequence(1)(v) and len(v) > 0)), "smoothing": Arg(0.1, optional(number(0))),
        }),
        "privacy.with_budget": Call(p.with_budget, {
            "algorithm": Arg(world.fedavg(), instance((mj.FedAvg, mj.Local, mj.personalized.Composed))), "problem": problem,
            "epsilon": Arg(2.0, OF_EACH), "delta": delta, "rounds": Arg(2, count(1)), "clip": Arg(1.0, POSITIVE),
            "accountant": accountant,
        }),
        "privacy.spent": Call(p.spent, {
            "algorithm": Arg(private(), trainer), "problem": problem,
            "state": Arg(state(), instance(mj.personalized.TrainingState)), "delta": delta, "accountant": accountant,
        }),
        "privacy.epsilon": Call(p.epsilon, {
            "noise": Arg(1.0, number(0, shapes=[()])), "samples": Arg(20, count(1)), "batch_size": Arg(5, optional(count(1))),
            "steps": Arg(3, count(0)), "delta": Arg(1e-3, number(above=0, below=1, shapes=[()])), "accountant": accountant,
        }),
        "privacy.noise": Call(p.noise, {
            "epsilon": Arg(2.0, POSITIVE), "samples": Arg(20, count(1)), "batch_size": Arg(5, optional(count(1))),
            "steps": Arg(3, count(0)), "delta": Arg(1e-3, number(above=0, below=1, shapes=[()])), "accountant": accountant,
        }),
        "privacy.QuantileClip": Call(p.QuantileClip, {
            "share": Arg(0.5, number(0, below=np.nextafter(1.0, 2.0), shapes=[()])), "first": Arg(0.1, POSITIVE),
            "rate": Arg(0.2, number(0, shapes=[()])), "noise": Arg(0.05, POSITIVE),
        }),
        "privacy.ClientLevel": Call(p.ClientLevel, {
            "noise": Arg(1.0, number(0, shapes=[()])), "rounds": Arg(5, count(0)), "clip": Arg(0.5, is_clip),
        }),
        "privacy.private_clients": Call(p.private_clients, {
            "algorithm": Arg(world.fedavg(), instance((mj.FedAvg, mj.personalized.Composed))),
            "level": Arg(p.ClientLevel(1.0, 5), instance(p.ClientLevel)),
        }),
        "privacy.with_client_budget": Call(p.with_client_budget, {
            "algorithm": Arg(world.fedavg(), instance((mj.FedAvg, mj.personalized.Composed))),
            "epsilon": Arg(2.0, POSITIVE), "delta": Arg(1e-3, number(above=0, below=1, shapes=[()])),
            "rounds": Arg(2, count(1)), "clip": Arg(1.0, is_clip), "accountant": accountant,
        }),
        "privacy.client_epsilon": Call(p.client_epsilon, {
            "algorithm": Arg(of_clients(), instance(type(of_clients()))),
            "state": Arg(state_of_clients(), instance(mj.personalized.TrainingState)),
            "delta": Arg(1e-3, number(above=0, below=1, shapes=[()])), "accountant": accountant,
        }),
        "privacy.objective_perturbation": Call(p.objective_perturbation, {
            "problem": Arg(world.problem(), instance(mj.Problem)), "epsilon": Arg(8.0, number(5.5, shapes=[()])),
            "delta": Arg(1e-3, number(above=0, below=1, shapes=[()])), "bound": Arg(10.0, number(longest(), 30.0, shapes=[()])),
            "gap": Arg(1.0, number(1e-2, shapes=[()])), "algorithm": Arg(None, optional(instance(mj.Algorithm))),
            "max_rounds": Arg(1000, count(1)), "key": Arg(jax.random.key(0), optional(key)),
        }),
        "privacy.release": Call(p.release, {
            "solution": Arg(world.solution(), instance(mj.Solution)), "epsilon": Arg(1.0, POSITIVE),
            "delta": Arg(1e-3, number(above=0, below=1, shapes=[()])), "bound": Arg(100.0, number(longest(), shapes=[()])),
            "gap": Arg(10.0, number(5.0, shapes=[()])), "key": Arg(jax.random.key(0), optional(key)),
        }),
        "privacy.release_to_nodes": Call(p.release_to_nodes, {
            "solution": Arg(world.solution(), instance(mj.Solution)), "epsilon": Arg(1.0, POSITIVE),
            "delta": Arg(1e-3, number(above=0, below=1, shapes=[()])), "bound": Arg(100.0, number(longest(), shapes=[()])),
            "gap": Arg(10.0, number(5.0, shapes=[()])), "key": Arg(jax.random.key(0), optional(key)),
        }),
    }  # fmt: skip
