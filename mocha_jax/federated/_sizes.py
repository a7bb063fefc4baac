"""Sizes of messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import jax
import numpy as np

from mocha_jax._core import check
from mocha_jax._core.pytree import Tree
from mocha_jax.federated._server import Server


def message_numbers(server: Server) -> dict[str, dict[str, int]]:
    """Count the numbers of one message of every kind, by their dtype; its header comes on top.

    Of dual methods with d features, against d numbers each way that `mocha_jax.costs` counts:

    | | floats | 32-bit integers | 8-bit integers | more than counted |
    |---|---|---|---|---|
    | `DualDown` | 2 d + 1 | 1 | | the model, a curvature, how many steps |
    | `DualUp` | d + 6 | 1 | | a share of a round's work, five terms of certificates, how many samples |
    | `Coded`, `Quantized` | 6, and 1 of float32 | 2 | d | those, a scale, to which answer it refers |

    Args:
      server: of the federation; what it sends and takes is in its dtype.

    Examples:
      >>> import mocha_jax as mj
      >>> server = mj.federated.Server(mj.Mocha(), mj.regularizers.Probabilistic(0.1), 20, 100, dtype="float32")
      >>> message_numbers(server)
      {'DualDown': {'float32': 201, 'int32': 1}, 'DualUp': {'float32': 106, 'int32': 1}}
    """
    check.instance("message_numbers", "server", server, Server, "federated.Server(...)")
    return {name: _of_one(record) for name, record in {**server.like_down(), **server.like_up()}.items()}


def _of_one(record: Tree) -> dict[str, int]:
    """Count the numbers of one node's part of a record."""
    found: Counter[str] = Counter()
    for leaf in jax.tree.leaves(record):
        found[np.dtype(leaf.dtype).name] += math.prod(leaf.shape[1:])
    return dict(sorted(found.items()))


def as_table(numbers: Mapping[str, Mapping[str, int]]) -> str:
    """Write `message_numbers` as a table in Markdown, with the bytes of each message.

    Examples:
      >>> print(as_table({"DualUp": {"float32": 106, "int32": 1}}))
      | message | float32 | int32 | bytes |
      |---|---|---|---|
      | `DualUp` | 106 | 1 | 428 |
    """
    if not isinstance(numbers, Mapping) or not all(isinstance(counts, Mapping) for counts in numbers.values()):
        raise ValueError(f"as_table: numbers must be those of message_numbers(server), got {check.shown(numbers)}.")
    dtypes = sorted({dtype for counts in numbers.values() for dtype in counts})
    rows = [["message", *dtypes, "bytes"], ["---"] * (len(dtypes) + 2)]
    for name, counts in numbers.items():
        size = sum(np.dtype(dtype).itemsize * count for dtype, count in counts.items())
        rows.append([f"`{name}`", *(str(counts.get(dtype, 0)) for dtype in dtypes), str(size)])
    lines = ["|".join(row) if row[0] == "---" else " | ".join(row) for row in rows]
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)
