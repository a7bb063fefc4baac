"""All right calls by name, and what of the public surface has none, with the reason."""

import functools
import importlib
import inspect
import types

MODULES = (
    "", "coupling", "costs", "datasets", "likelihoods", "losses", "metrics", "networks", "partition", "plotting", "regularizers",
    "spectral", "systems", "theory",
)  # fmt: skip


@functools.cache
def calls():
    from tests.bad_calls import functions, records

    return records.constructors() | records.in_use() | functions.functions()


def public():
    """Every public function, constructor and method of the package, by name."""
    found = {}
    for module_name in MODULES:
        module = importlib.import_module(f"mocha_jax.{module_name}".rstrip("."))
        for name, thing in vars(module).items():
            home = str(getattr(thing, "__module__", ""))
            ours = home.startswith("mocha_jax") and (
                not module_name or home.startswith((module.__name__, "mocha_jax._work"))
            )
            if name.startswith("_") or isinstance(thing, types.ModuleType) or not callable(thing) or not ours:
                continue
            label = f"{module_name}.{name}".lstrip(".")
            if label.rpartition(".")[2] in found.values():
                continue
            found[label] = thing
            if inspect.isclass(thing):
                found |= {
                    f"{label}.{k}": v
                    for k, v in vars(thing).items()
                    if inspect.isfunction(v) and (not k.startswith("_") or k == "__getitem__")
                }
    return found
