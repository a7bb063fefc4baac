"""Values to hand in where something else is wanted: some for every argument, and some made of the right one."""

import collections
import decimal
import fractions
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj


class NoArray:
    """Claims to be an array and is none."""

    def __array__(self, *_, **__):
        raise RuntimeError("no array after all")


class NoWords:
    """Cannot even be shown."""

    def __repr__(self):
        raise RuntimeError("no words")


class NoIndex:
    """Claims to be an integer and is none."""

    def __index__(self):
        raise RuntimeError("no integer after all")


@functools.cache
def everywhere():
    """The values by name that any argument is given."""
    x = np.arange(6.0).reshape(3, 2) / 8
    data = mj.pack_tasks([x, x], [np.ones(3), -np.ones(3)], dtype="float32")
    independent = mj.regularizers.Independent(0.5)
    return {
        "None": None, "True": True, "False": False, "np.True_": np.True_, "Ellipsis": ..., "NotImplemented": NotImplemented,
        "''": "", "'abc'": "abc", "'nan'": "nan", "'1'": "1", "np.str_": np.str_("abc"), "b'abc'": b"abc",
        "bytearray": bytearray(b"abc"), "path": pathlib.Path("x"),
        "nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "-1": -1, "0": 0, "1": 1, "2": 2, "-0.0": -0.0,
        "0.5": 0.5, "2.5": 2.5, "-0.5": -0.5, "1e-320": 1e-320, "1e300": 1e300, "1e-30": 1e-30, "1e30": 1e30,
        "2**31": 2**31, "2**40": 2**40, "2**63": 2**63, "2**64": 2**64, "10**400": 10**400, "-2**63": -(2**63),
        "complex": 1 + 2j, "fraction": fractions.Fraction(1, 2), "decimal": decimal.Decimal("0.5"),
        "np.float16": np.float16(0.5), "np.float32 nan": np.float32("nan"), "np.int8": np.int8(-3),
        "np.int16": np.int16(3), "np.uint64": np.uint64(2**64 - 1), "np.complex64": np.complex64(1),
        "datetime": np.datetime64("2020-01-01"), "timedelta": np.timedelta64(3, "s"),
        "0-d": np.array(0.5), "0-d int": np.array(2), "0-d nan": np.array(np.nan), "0-d object": np.array(None),
        "0-d bool": np.array(True), "0-d str": np.array("abc"), "0-d jax": jnp.float32(0.5), "0-d jax int": jnp.int32(2),
        "0-d bfloat16": jnp.bfloat16(0.5), "0-d jax bool": jnp.array(True),
        "empty": np.zeros(0), "empty 2-d": np.zeros((0, 3)), "empty int": np.zeros(0, int), "ones 1": np.ones(1),
        "ones 2": np.ones(2), "ones 3": np.ones(3), "ones 7": np.ones(7), "ints": np.arange(3), "negative ints": -np.arange(3),
        "column": np.ones((3, 1)), "square": np.eye(2), "skew": np.array([[1.0, 2.0], [0.0, 1.0]]), "3-d": np.ones((2, 3, 4)),
        "4-d": np.ones((1, 2, 1, 2)), "nans": np.full(3, np.nan), "infs": np.full(3, np.inf), "negative": -np.ones(3),
        "bools": np.array([True, False, True]), "strings": np.array(["a", "b", "c"]), "objects": np.array([1.0, "a", None], object),
        "object numbers": np.array([1.0, 2.0, 3.0], object), "complexes": np.ones(3, complex), "halves": np.ones(3, np.float16),
        "structured": np.zeros(3, [("a", float), ("b", int)]), "dates": np.array(["2020-01-01"] * 3, "datetime64[D]"),
        "masked": np.ma.masked_array([999.0, 1.0, 2.0], mask=[True, False, False]), "jax ones": jnp.ones(3, jnp.float32),
        "jax ints": jnp.arange(3), "bfloat16": jnp.ones(3, jnp.bfloat16), "matrix": x,
        "[]": [], "[1]": [1], "[1.0, 2.0]": [1.0, 2.0], "[None]": [None], "['a']": ["a"], "ragged": [[1], [1, 2]],
        "nested": [[1.0, 2.0], [3.0, 4.0]], "ragged arrays": [np.ones(2), np.ones((2, 2))], "()": (), "(1, 2)": (1, 2),
        "(0.5,)": (0.5,), "ragged tuple": (1, (2, 3)), "{}": {}, "{'a': 1}": {"a": 1}, "set": {1, 2}, "frozenset": frozenset(),
        "range": range(3), "deque": collections.deque([1, 2]), "generator": (i for i in range(3)), "slice": slice(2),
        "lambda": lambda *_: 1.0, "len": len, "int": int, "class": mj.losses.Hinge, "object class": object, "module": np,
        "object": object(), "no array": NoArray(), "no words": NoWords(), "no index": NoIndex(), "exception": ValueError("x"),
        "key": jax.random.key(0), "old key": jax.random.PRNGKey(0), "keys": jax.random.split(jax.random.key(0), 3),
        "float key": np.zeros(2), "generator of NumPy": np.random.default_rng(0),
        "abstract": jax.ShapeDtypeStruct((), jnp.float32), "abstract 2-d": jax.ShapeDtypeStruct((3, 2), jnp.float32),
        "a loss": mj.losses.Hinge(), "a regularizer": independent, "an algorithm": mj.Mocha(), "a system": mj.systems.Dropout(0.5),
        "a cost": mj.costs.Cost(), "a network": mj.networks.MLP(2, 2), "a likelihood": mj.likelihoods.Gaussian(), "data": data,
        "a watch": mj.Watch(), "an adjoint": mj.Implicit(), "a coupling": mj.coupling.Diagonal(jnp.ones(2, jnp.float32)),
        "a problem": mj.Problem(data, mj.losses.Hinge(), independent),
    }  # fmt: skip


def made_of(valid):
    """Values by name made of a right one: in another dress, of another shape, spoilt."""
    if isinstance(valid, bool) or not isinstance(valid, int | float | np.ndarray | jax.Array):
        return {}
    if isinstance(valid, jax.Array) and jnp.issubdtype(valid.dtype, jax.dtypes.prng_key):
        return {
            "of it: list": [valid],
            "of it: data": jax.random.key_data(valid),
            "of it: pair": jnp.stack([valid] * 2),
        }
    a = np.asarray(valid)
    if a.dtype.kind not in "fiub":
        return {}
    whole = a.dtype.kind in "iu"
    dressed = {
        "list": a.tolist() if a.ndim else [a.item()], "array": a, "jax": jnp.asarray(a), "big-endian": a.astype(a.dtype.newbyteorder(">")),
        "float16": a.astype(np.float16), "int16": a.astype(np.int16) if whole else None, "float": a.astype(float),
        "Fortran": np.asfortranarray(a), "masked nowhere": np.ma.masked_array(a),
        "objects": a.astype(object), "strings": a.astype(str), "complex": a.astype(complex), "bools": a.astype(bool),
        "negative": -a.astype(float) - 1, "huge": a.astype(float) * 1e200, "one more axis": a[None], "axis behind": a[..., None], "twice": np.stack([a, a]),
        "tuple": tuple(a.tolist()) if a.ndim else (a.item(),),
    }  # fmt: skip
    if a.ndim:
        spoilt = a.astype(float)
        spoilt.flat[-1:] = np.nan
        endless = a.astype(float)
        endless.flat[-1:] = np.inf
        dressed |= {
            "one nan": spoilt, "one inf": endless, "longer": np.concatenate([a, a[:1]]), "shorter": a[:-1], "none": a[:0],
            "flat": a.ravel(), "transposed": a.T, "summed": a.sum(-1), "one masked": np.ma.masked_array(a, np.arange(a.size).reshape(a.shape) == 0),
        }  # fmt: skip
    return {f"of it: {name}": value for name, value in dressed.items() if value is not None}
