"""Messages that nobody should believe, made of good ones."""

# mypy: ignore-errors

import dataclasses
from fractions import Fraction

import numpy as np

import mocha_jax as mj

HUGE = 10**9999  # no text: Python does not write that many digits


class Raises:
    """Raises whatever it is asked."""

    def __getattribute__(self, name):
        raise RuntimeError(f"looked at {name}")

    def __repr__(self):
        raise RuntimeError("written")

    __array__ = __eq__ = __hash__ = __len__ = __iter__ = __int__ = __index__ = __str__ = __bool__ = __repr__


class OddlyNamed(type):
    @property
    def __name__(cls):
        raise RuntimeError("named")


class Odd(metaclass=OddlyNamed):
    pass


class Number(int):
    def __index__(self):
        raise SystemExit("an integer that ends the program")

    __int__ = __abs__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __repr__ = __str__ = __index__
    __hash__ = int.__hash__


class Text(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


class View(np.ndarray):
    """An array that looks right and is not."""

    @property
    def shape(self):
        raise KeyboardInterrupt

    def __array_ufunc__(self, *args, **kwargs):
        return np.True_


class Names(dict):
    """A dict that raises where it is read."""

    def __iter__(self):
        raise RuntimeError("read")

    items = keys = values = __contains__ = __getitem__ = __len__ = __iter__


class Pretends:
    """Says of itself that it is an answer."""

    def __init__(self, message):
        self.__dict__.update(vars(message))

    @property
    def __class__(self):
        return mj.federated.Up


class SubUp(mj.federated.Up):
    pass


class SubDown(mj.federated.Down):
    pass


def odd_class(name):
    return type(name, (), {})()


RAISES = (Raises(),)
THINGS = (
    None, True, False, np.True_, 1.0, np.float16(1), "1", b"1", [], [1], (), (1,), {}, {1}, {"v": 1}, object(), 1j, ...,
    *RAISES, Odd(), Number(1), Fraction(1), np.array(1), np.ma.masked, np.ma.array(1), np.datetime64(1, "s"), print, int,
    odd_class("a\nb"), odd_class("c" * 500), float("nan"), "x" * 10**5, "two\nlines", "\u2028\x1b[31m", "\ud800",
    b"\x00" * 1000, range(3), iter(()), np.array([None]), np.array("1"),
)  # fmt: skip
LARGE = (2**31, -(2**31), 2**63, 2**64, -(2**200), HUGE, -HUGE, np.int64(2**40), np.uint64(2**63))


def changed(message, **fields):
    """Exchange fields, whatever they become."""
    return dataclasses.replace(message, **fields)


def with_array(message, name, array):
    return changed(message, arrays={**message.arrays, name: array})


def bad_header(rng, message):
    """Put something that is no integer, no text or too large where such is wanted."""
    name = str(rng.choice([*message.integers, *message.texts, "arrays"]))
    if name in message.integers and rng.random() < 0.3:
        return changed(message, **{name: LARGE[rng.integers(len(LARGE))]})
    others = (3, np.int32(2), HUGE, Text("mocha"), 1.5) if name in message.texts else ("mocha", 0.0, Text("1"))
    of_arrays = (Names(message.arrays), list(message.arrays.items()), tuple(message.arrays), 7)
    known = (*THINGS, *(others if name != "arrays" else of_arrays))
    pick = known[rng.integers(len(known))]
    return without(message, name) if rng.random() < 0.03 and name != "version" else changed(message, **{name: pick})


def without(message, name):
    """Leave out a field altogether."""
    twin = object.__new__(type(message))
    vars(twin).update({k: v for k, v in vars(message).items() if k != name})
    return twin


def bad_kind(rng, message):
    """Hand in something else than a message of that kind."""
    up = isinstance(message, mj.federated.Up)
    other = mj.federated.Down if up else mj.federated.Up
    sub = SubUp if up else SubDown
    choices = (
        other(**vars(message)), sub(**vars(message)), mj.federated.Message(**vars(message)), vars(message),
        tuple(vars(message).values()), message.arrays, Pretends(message), type(message), *THINGS,
    )  # fmt: skip
    return choices[rng.integers(len(choices))]


def other_text(rng, message):
    """Name another federation, another record, or the right one in other letters."""
    name = str(rng.choice(message.texts))
    value = getattr(message, name)
    options = (value.upper() + "!", value + "\n", "", value[:-1], value + "\0", "x" * 10**5, "DualDown\u2028", "\ud800")
    return changed(message, **{name: options[rng.integers(len(options))]})


def bad_array(rng, message):
    """Spoil one array, or the names of all."""
    name = str(rng.choice(sorted(message.arrays)))
    good = np.asarray(message.arrays[name])
    flat = np.array(good, copy=True)
    shapes = (
        good[None], np.zeros((*good.shape, 1), good.dtype), np.zeros((0,), good.dtype), np.zeros((7, 3), good.dtype),
        np.broadcast_to(np.zeros((), good.dtype), (2**40,)),
    )  # fmt: skip
    dtypes = [
        good.astype(d)
        for d in ["f2", "c8", "c16", "i1", "i8", "u4", "bool", "U8", "S8", "O"]
        if np.dtype(d) != good.dtype
    ]
    dtypes += [good.astype("f4" if good.dtype != "f4" else "f8"), good.astype(good.dtype.newbyteorder(">"))]
    dtypes += [np.zeros(good.shape, [("a" * 99, "f8"), ("b\nc", "i4")]), of_objects(good.shape)]
    classes = (
        flat.view(View), np.ma.array(flat), np.ma.array(flat, mask=True), good.tolist(), memoryview(flat), good.tobytes(),
        mj.losses.Hinge(), flat.view(np.recarray),
    )  # fmt: skip
    pick = rng.integers(6)
    if pick == 0:
        return with_array(message, name, shapes[rng.integers(len(shapes))])
    if pick == 1:
        return with_array(message, name, dtypes[rng.integers(len(dtypes))])
    if pick == 2:
        return with_array(message, name, (*classes, *THINGS)[rng.integers(len(classes) + len(THINGS))])
    if pick == 3:
        return changed(message, arrays={k: v for k, v in message.arrays.items() if k != name})
    if pick == 4:
        extra = (
            1,
            None,
            "w",
            Text("v"),
            name + " ",
            f"{name}.",
            "x" * 10**5,
            "two\nlines",
            (),
            b"v",
            Number(2),
            np.nan,
        )
        pick = extra[rng.integers(len(extra))]
        return changed(message, arrays={pick: flat, **message.arrays})
    return not_finite(rng, message)


def of_objects(shape):
    array = np.empty(shape, object)
    for at in np.ndindex(shape):
        array[at] = RAISES[0]
    return array


def not_finite(rng, message):
    """Put NaN or infinity into one place of an array of floats."""
    name = str(rng.choice([k for k, v in message.arrays.items() if np.asarray(v).dtype.kind == "f"]))
    array = np.array(message.arrays[name], copy=True)
    array[tuple(int(rng.integers(n)) for n in array.shape)] = rng.choice([np.nan, np.inf, -np.inf])
    return with_array(message, name, array if rng.random() < 0.5 else array[()])


MAKERS = (bad_header, bad_kind, other_text, bad_array, not_finite)
