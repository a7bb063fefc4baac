"""One call with one wrong argument, and what came of it."""

import contextlib
import dataclasses
import io
import linecache
import re
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mocha_jax as mj

LIBRARY = str(Path(mj.__file__).parent)

CLEAR, UNNAMED, DEEP = "clear", "unnamed", "deep"
ACCEPTED, WRONG, OWN, SLOW = "accepted", "wrongly accepted", "its own error", "too long"
GOOD = (CLEAR, ACCEPTED, OWN)


@dataclasses.dataclass(frozen=True)
class Arg:
    """A right value, what else would be right, and other words by which a sentence may name the argument.

    What takes long to make is given as the cached function that makes it.
    """

    given: Any
    kind: Callable[[Any], bool]
    words: tuple[str, ...] = ()

    @property
    def valid(self):
        """The right value."""
        return self.given() if hasattr(self.given, "cache_info") else self.given

    def allows(self, value):
        """Whether a value is legitimate; what a kind cannot even look at is not."""
        try:
            return bool(self.kind(value))
        except Exception:
            return False


@dataclasses.dataclass(frozen=True)
class Call:
    """A function with a right value for every argument."""

    function: Callable[..., Any]
    args: dict[str, Arg]

    def __call__(self, **wrong):
        with quiet():
            return settled(self.function(**{name: arg.valid for name, arg in self.args.items()} | wrong))


@dataclasses.dataclass(frozen=True)
class Outcome:
    sort: str
    detail: str


class TooLong(BaseException):
    """Not an `Exception`: nobody catches it on the way."""


def settled(result):
    """The result once it is computed, errors that come late included."""
    return jax.block_until_ready(result)


@contextlib.contextmanager
def quiet():
    """As most people have it: JAX's usual promotion; no words on the way."""
    with (
        warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()),
        jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def at_most(seconds):
    def give_up(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(call, name, value, clean=None, seconds=60.0):
    """What comes of the call with that value for that argument; `clean` is what comes of it without."""
    arg = call.args[name]
    try:
        with at_most(seconds):
            result = call(**{name: value})
    except TooLong:
        return Outcome(SLOW, f"longer than {seconds:g} s")
    except Exception as error:
        return judged(error, name, arg, value)
    if not arg.allows(value):
        return Outcome(WRONG, short(result))
    if (
        clean is not None
        and equal(value, arg.valid)
        and not same(result, clean, rough="float16" in str(getattr(value, "dtype", "")))
    ):
        return Outcome(WRONG, f"another result than with {short(arg.valid)}")
    return Outcome(ACCEPTED, "")


def judged(error, name, arg, value):
    """Whether the library itself says, in one sentence, what is wrong with which argument."""
    detail = f"{type(error).__name__}: {short(error, str)}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = frames[-1].filename.startswith(LIBRARY)
    raised = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip().startswith("raise")
    if not (ours and raised and isinstance(error, ValueError | IndexError)):
        theirs = callable(value) or any(frame.filename.endswith("bad_calls/world.py") for frame in frames)
        sort = OWN if theirs and arg.allows(value) else DEEP
        return Outcome(sort, f"{detail} [{Path(frames[-1].filename).name}]")
    sentence = "\n" not in str(error)
    named = any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(error)) for word in (name, *arg.words))
    return Outcome(CLEAR if named and sentence else UNNAMED, detail)


def equal(value, valid):
    """Whether a value is the right one in another dress."""
    try:
        return isinstance(valid, int | float | np.ndarray | jax.Array) and np.array_equal(
            np.asarray(value, float), np.asarray(valid, float)
        )
    except Exception:
        return False


def same(result, clean, rough):
    """Whether two results hold the same numbers, up to rounding."""
    ours, theirs = numbers(result), numbers(clean)
    if len(ours) != len(theirs):
        return False
    return all(
        a.shape == b.shape
        and np.allclose(a, b, rtol=1e-2 if rough else 1e-4, atol=1e-4 if rough else 1e-6, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def numbers(result):
    arrays = (
        leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, int | float | np.ndarray | np.number | jax.Array)
    )
    arrays = (
        a for a in arrays if not (isinstance(a, jax.Array) and jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key))
    )
    return [np.asarray(a, float) for a in arrays if np.asarray(a).dtype.kind in "fiubV"]


def short(value, text=repr):
    try:
        return " ".join(text(value).split())[:160]
    except Exception:
        return f"a {type(value).__name__}"
