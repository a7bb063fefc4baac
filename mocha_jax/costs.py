r"""Costs of a round in simulated time, equation (30), and the networks of the paper.

$$
\mathrm{Time}(h, t) = \frac{\mathrm{FLOPs}(h, t)}{\mathrm{Clock\ Rate}(t)} + \mathrm{Comm}(h, t)
$$

The operations are counted by the algorithms from the arithmetic that they do, so they grow with the number
of features. A round lasts as long as its slowest active node, and what the central node takes (`Cost.server`).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Pytree, fields_of

__all__ = [
    "cellular_3g",
    "Cost",
    "lte",
    "PHONE",
    "relative",
    "wifi",
]


def __dir__() -> list[str]:
    return __all__


class Cost(Pytree):
    r"""Seconds per node and round: FLOPs / clock rate + latency + bytes / bandwidth.

    Every price is a number, or one per node ``[m]``. A node that does not take part in a round costs nothing.

    Args:
      flops_per_second: of a node. The default is a phone with a clock of 1 GHz and one operation a cycle.
      latency: seconds per round trip.
      download: bytes per second from the central node. The default is 10 Mbit/s.
      upload: bytes per second to the central node.
      bytes_per_number: float width on the wire, whatever the simulation computes in.
      cycle: a round lasts at least so many seconds: the clock cycle of a central node that does not look
        whether all answers are in. A number.
      server: seconds of the central node's own work in a round, after the answers are in. A number.

    Examples:
      >>> cost = Cost(flops_per_second=600.0, latency=1.0, download=200.0, upload=100.0)
      >>> float(cost.seconds(flops=1200.0, down=100.0, up=50.0))  # 2 + 1 + 400/200 + 200/100
      7.0
    """

    flops_per_second: Hyperparameter = 1e9
    latency: Hyperparameter = 0.05
    download: Hyperparameter = 1.25e6
    upload: Hyperparameter = 1.25e6
    bytes_per_number: Hyperparameter = 4.0
    cycle: Hyperparameter = 0.0
    server: Hyperparameter = 0.0

    def __post_init__(self) -> None:
        check.positive(
            "Cost",
            flops_per_second=self.flops_per_second, download=self.download, upload=self.upload,
            bytes_per_number=self.bytes_per_number,
        )  # fmt: skip
        check.nonnegative("Cost", latency=self.latency, cycle=self.cycle, server=self.server)

    def check_nodes(self, num_nodes: int) -> None:
        """Raise if the prices do not fit that many nodes."""
        check.integer("Cost.check_nodes", 1, num_nodes=num_nodes)
        check.scalar("Cost", cycle=self.cycle, server=self.server)
        for name, price in fields_of(self).items():
            if np.shape(price) not in ((), (num_nodes,)):
                raise ValueError(
                    f"Cost: {name} must be a number or one per node [{num_nodes}], got shape {np.shape(price)}."
                )

    def message_seconds(self, down: Array | float, up: Array | float) -> Array:
        """Comm(h, t): the time to receive `down` numbers and send `up` numbers, a scalar or ``[m]``; none for none."""
        down, up = check.number("Cost", "down", down), check.number("Cost", "up", up)
        width = jnp.asarray(self.bytes_per_number)
        down, up = jnp.asarray(down), jnp.asarray(up)
        latency = jnp.where(down + up > 0, jnp.asarray(self.latency), 0.0)
        return latency + width * down / self.download + width * up / self.upload

    def seconds(self, flops: Array | float, down: Array | float, up: Array | float) -> Array:
        """Time(h, t) of a node that takes part: a scalar or ``[m]``."""
        flops = jnp.asarray(check.number("Cost", "flops", flops))
        return flops / jnp.asarray(self.flops_per_second) + self.message_seconds(down, up)

    def round_seconds(self, node_seconds: Array) -> Array:
        """A round lasts as long as its slowest node ``[m]``, at least one cycle, and then what the server takes."""
        check.array("Cost.round_seconds", "node_seconds", node_seconds, ("m",))
        longest = jnp.max(jnp.asarray(check.number("Cost.round_seconds", "node_seconds", node_seconds)))
        return jnp.maximum(longest, jnp.asarray(self.cycle)) + jnp.asarray(self.server)


# A phone of 2010 has a clock of up to 1 GHz: Carroll & Heiser, "An analysis of power consumption in a smartphone".
PHONE = 1e9
_MEGABIT = 1e6 / 8


def wifi(flops_per_second: Hyperparameter = PHONE) -> Cost:
    """WiFi: 20 Mbit/s down, 10 up, 20 ms.

    Round numbers: Sommers & Barford, "Cell vs. WiFi" (IMC 2012), find WiFi ahead of cellular networks in
    throughput both ways and in latency, over 3 million tests.
    """
    return Cost(flops_per_second, latency=0.02, download=20 * _MEGABIT, upload=10 * _MEGABIT)


def lte(flops_per_second: Hyperparameter = PHONE) -> Cost:
    """LTE: 13 Mbit/s down, 6 up, 70 ms.

    The medians of Huang et al., "A close examination of performance and power characteristics of 4G LTE
    networks" (MobiSys 2012).
    """
    return Cost(flops_per_second, latency=0.07, download=13 * _MEGABIT, upload=6 * _MEGABIT)


def cellular_3g(flops_per_second: Hyperparameter = PHONE) -> Cost:
    """3G: 1 Mbit/s down, 0.3 up, 200 ms.

    Round numbers of the order in Huang et al., "Anatomizing application performance differences on
    smartphones" (MobiSys 2010).
    """
    return Cost(flops_per_second, latency=0.2, download=1 * _MEGABIT, upload=0.3 * _MEGABIT)


def relative(ratio: Hyperparameter) -> Cost:
    """Communication costs relative to computation: 10, 100 and 1000 times for WiFi, LTE and 3G.

    The unit of time is one floating-point operation, and exchanging a vector (once down, once up) costs `ratio`
    operations per number. That is how the code of the paper's authors charges a round, per feature: 8 operations a
    coordinate step, plus 10, 100 or 1000. It adds up the operations of nodes that work at the same time; here they
    do not wait for each other.

    Examples:
      >>> d, steps = 561.0, 20.0
      >>> float(relative(100.0).seconds(6 * d * steps, down=d, up=d) / d)
      220.0
    """
    check.positive("relative", ratio=ratio)
    check.at_least("relative", 1e-300, ratio=ratio)  # one over less is no number
    rate = 2.0 / check.number("relative", "ratio", ratio)
    return Cost(1.0, latency=0.0, download=rate, upload=rate, bytes_per_number=1.0)
