"""Contracts hold: what is abstract cannot be made, what is missing is named, and what can be made is final."""

import importlib
import importlib.util
import inspect
import pkgutil

import pytest

import mocha_jax as mj

for module in pkgutil.walk_packages(mj.__path__, "mocha_jax."):
    flower = module.name.startswith("mocha_jax.flower") and not importlib.util.find_spec("flwr")
    if not module.name.endswith("__main__") and not flower:
        importlib.import_module(module.name)


def records():
    """Every record of the library."""
    found, queue = [], [mj.Pytree]
    while queue:
        for cls in queue.pop().__subclasses__():
            if cls not in found and cls.__module__.startswith("mocha_jax"):
                found.append(cls)
                queue.append(cls)
    return sorted(found, key=lambda cls: f"{cls.__module__}.{cls.__qualname__}")


RECORDS = records()
ABSTRACT = [cls for cls in RECORDS if inspect.isabstract(cls)]

# What extenders derive from.
CONTRACTS = {
    mj.Algorithm, mj.DualMethod, mj.SubproblemMethod, mj.Trainer, mj.servers.Aggregator, mj.Federated, mj.Quality, mj.Adjoint,
    mj.losses.Loss, mj.losses.MarginLoss, mj.losses.ResidualLoss, mj.regularizers.Regularizer,
    mj.regularizers.Learned, mj.regularizers.Spectral, mj.regularizers.TraceLimited, mj.regularizers.OptimalityConditions, mj.coupling.Coupling, mj.systems.System,
    mj.networks.Network, mj.likelihoods.Likelihood,
}  # fmt: skip


def test_every_contract_is_abstract():
    assert set(ABSTRACT) >= CONTRACTS


@pytest.mark.parametrize("cls", ABSTRACT, ids=lambda cls: cls.__name__)
def test_an_incomplete_subclass_is_refused_by_name_of_what_is_missing(cls):
    class Half(cls):  # type: ignore[misc, valid-type]
        pass

    for broken in (cls, Half):
        with pytest.raises(TypeError, match=f"Can't instantiate abstract class {broken.__name__}") as error:
            broken()
        for name in cls.__abstractmethods__:
            assert name in str(error.value)


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_a_class_is_abstract_or_final(cls):
    # `State` is a record of its own: what is common to all states.
    bases = [base for base in cls.__mro__[1:] if issubclass(base, mj.Pytree) and base not in (mj.Pytree, mj.State)]
    assert [base.__name__ for base in bases if not inspect.isabstract(base)] == []


@pytest.mark.parametrize("cls", [cls for cls in RECORDS if not inspect.isabstract(cls)], ids=lambda cls: cls.__name__)
def test_every_method_of_a_contract_is_there(cls):
    assert not getattr(cls, "__abstractmethods__", None)


def test_submodules_offer_nothing_but_their_own():
    flower = ("flower",) if importlib.util.find_spec("flwr") else ()
    for name in (*flower, "losses", "regularizers", "systems", "servers", "coupling", "costs", "metrics", "datasets", "partition",
                 "networks", "federated", "likelihoods", "spectral", "theory", "multiclass", "plotting", "sklearn", "callbacks"):  # fmt: skip
        offered = dir(getattr(mj, name))
        assert not {"jnp", "np", "jax", "Any", "Array", "check", "annotations"} & set(offered), name
        assert set(offered) >= set(getattr(mj, name).__all__) > set(), name  # which the site lists
    assert callable(mj.plotting.convergence)


def test_run_and_solve_take_their_arguments_in_one_order():
    order = [list(inspect.signature(f).parameters)[:2] for f in (mj.run, mj.solve)]
    assert order == [["problem", "algorithm"]] * 2
