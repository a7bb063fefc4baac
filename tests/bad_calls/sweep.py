"""Every call with every wrong value for every argument, or a sample of them."""

import functools
import random
import time

from tests.bad_calls.outcomes import outcome
from tests.bad_calls.table import calls
from tests.bad_calls.values import everywhere, made_of


@functools.cache
def values(name, argument):
    """What to hand in for an argument, by label."""
    return everywhere() | made_of(calls()[name].args[argument].valid)


def cases(names=(), sample=None, seed=0):
    """Callable, argument and the label of a value: all of them, or so many at random, those of a callable together."""
    found = [
        (name, argument, label)
        for name, call in calls().items()
        if not names or any(part in name for part in names)
        for argument in call.args
        for label in values(name, argument)
    ]
    if sample is None or sample >= len(found):
        return found
    return [found[i] for i in sorted(random.Random(seed).sample(range(len(found)), sample))]


def swept(some):
    """The cases with what came of them and how long that took."""
    name, clean = None, None
    for case in some:
        if case[0] != name:
            name, clean = case[0], calls()[case[0]]()
        begin = time.perf_counter()
        result = outcome(calls()[name], case[1], values(name, case[1])[case[2]], clean)
        yield *case, result, time.perf_counter() - begin
