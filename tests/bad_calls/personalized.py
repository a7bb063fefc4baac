"""Right calls of methods of personalized federated learning, and of the networks that they make."""

import numpy as np
import optax

import mocha_jax as mj
from tests.bad_calls import world
from tests.bad_calls.kinds import as_real, count, flag, instance, number, optional
from tests.bad_calls.outcomes import Arg, Call

NUMBER, POSITIVE = number(0, shapes=[()]), number(above=0, shapes=[()])


def optimizer(value):
    return isinstance(value, optax.GradientTransformation)


def paths(*allowed):
    """Some of the parameters' paths, not all of them."""
    return lambda value: isinstance(value, tuple) and set(value) < set(allowed)


def graph(value):
    array = as_real(value)
    return (
        array is not None and array.ndim == 2 and array.shape[0] == array.shape[1] and bool(np.isfinite(array).all())
        and bool((array >= 0).all()) and np.allclose(array, array.T)
    )  # fmt: skip


def methods():
    p = mj.personalized
    options = {
        "model": Arg(world.network(), instance(mj.networks.Network), ("private",)), "client_optimizer": Arg(optax.sgd(0.5), optimizer),
        "server_optimizer": Arg(optax.sgd(1.0), optimizer), "fraction": Arg(0.5, number(0, 1, shapes=[()])),
        "local_epochs": Arg(1, count(1)), "batch_size": Arg(2, optional(count(1))), "rate": Arg(0.5, NUMBER),
        "seed": Arg(3, number(0, below=2**31, whole=True)), "at_once": Arg(2, optional(count(1))),
    }  # fmt: skip
    another, strength = Arg(optax.sgd(0.5), optional(optimizer)), {"strength": Arg(0.5, NUMBER)}
    private = {"private": Arg(("1",), optional(paths("0", "1", "0/w", "0/b", "1/w", "1/b")))}
    own = {
        "ditto": strength | {"personal_optimizer": another, "personal_epochs": Arg(2, optional(count(1)))},
        "mr_mtl": strength,
        "pfedme": strength | {"inner_steps": Arg(2, count(1)), "inner_rate": Arg(0.1, NUMBER)},
        "fedper": private, "lg_fedavg": private, "fedbn": {"private": Arg(("1",), lambda v: v is not None and private["private"].kind(v))},
        "fedrep": private | {"body_optimizer": another, "body_epochs": Arg(2, count(1))},
        "scaffold": {}, "feddyn": {"strength": Arg(0.5, POSITIVE)},
        "fine_tuned": {"tuning_epochs": Arg(2, count(1)), "tuning_optimizer": another},
        "per_fedavg": {"inner_rate": Arg(0.1, NUMBER), "second_order": Arg(True, flag), "tuning_steps": Arg(2, count(1))},
        "apfl": {"mixing": Arg(0.5, number(0, 1, shapes=[()])), "mixing_rate": Arg(0.1, NUMBER)},
        "ifca": {"clusters": Arg(2, count(1)), "classes": Arg(True, flag)},
        "fedem": {"components": Arg(2, count(1)), "classes": Arg(True, flag)},
        "fedu": strength | {"graph": Arg(np.ones((3, 3)), graph), "server_rate": Arg(0.1, NUMBER)},
        "fedamp": strength | {"attention": Arg(0.5, POSITIVE), "sharpness": Arg(0.5, POSITIVE)},
        "q_ffl": {"fairness": Arg(0.5, NUMBER), "lipschitz": Arg(2.0, POSITIVE)},
        "afl": {"mixture_rate": Arg(0.5, NUMBER)},
    }  # fmt: skip
    network = {"network": Arg(world.network(), instance(mj.networks.Network), ("private",))}
    of_server = {"server_optimizer": options.pop("server_optimizer")}
    without = {"feddyn", "fedu", "fedamp", "q_ffl", "afl"}
    own = {name: args | ({} if name in without else of_server) for name, args in own.items()}
    return {
        **{f"personalized.{name}": Call(getattr(p, name), options | args) for name, args in own.items()},
        "networks.Parted": Call(mj.networks.Parted, network | private),
        "networks.Mixture": Call(mj.networks.Mixture, network | {"count": Arg(2, count(1)), "classes": Arg(True, flag)}),
    }  # fmt: skip
