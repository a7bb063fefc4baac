"""The simulated federation: how much each node does in a round.

Examples:
  A system turns a key and what a round asks of the nodes into `Work`. Systems are pure: the draw of a node depends on
  the key, the round and the node, never on padding, on the number of devices or on how a run was cut into chunks. ``a &
  b`` does what both allow:

  >>> Dropout(0.3) & PartialEpochs(0.1, 1.0)
  Both(first=Dropout(p=0.3), second=PartialEpochs(low=0.1, high=1.0))

  How much the nodes that answer do: `Full`, `PartialEpochs`, `UniformBudget`, `Deadline`, `Controller`. Which nodes
  answer: `Dropout`, `Outages`, `NeverAnswers`, `Sampled`, `Trace`, `DayNight`.

  It may import `_core`, `_numerics`, `_data` and `costs`.
"""

from mocha_jax.systems._availability import DayNight as DayNight
from mocha_jax.systems._availability import Dropout as Dropout
from mocha_jax.systems._availability import NeverAnswers as NeverAnswers
from mocha_jax.systems._availability import Outages as Outages
from mocha_jax.systems._availability import Sampled as Sampled
from mocha_jax.systems._availability import Trace as Trace
from mocha_jax.systems._base import Both as Both
from mocha_jax.systems._base import Full as Full
from mocha_jax.systems._base import Info as Info
from mocha_jax.systems._base import Request as Request
from mocha_jax.systems._base import System as System
from mocha_jax.systems._base import Work as Work
from mocha_jax.systems._base import per_node as per_node
from mocha_jax.systems._budgets import Controller as Controller
from mocha_jax.systems._budgets import Deadline as Deadline
from mocha_jax.systems._budgets import PartialEpochs as PartialEpochs
from mocha_jax.systems._budgets import UniformBudget as UniformBudget
from mocha_jax.systems._channel import Channel as Channel
from mocha_jax.systems._channel import Clock as Clock
from mocha_jax.systems._channel import Fate as Fate
from mocha_jax.systems._channel import Unreliable as Unreliable

__all__ = [
    "Both",
    "Clock",
    "Controller",
    "DayNight",
    "Deadline",
    "Dropout",
    "Fate",
    "Full",
    "Info",
    "Channel",
    "NeverAnswers",
    "Outages",
    "PartialEpochs",
    "per_node",
    "Request",
    "Sampled",
    "System",
    "Trace",
    "UniformBudget",
    "Unreliable",
    "Work",
]


def __dir__() -> list[str]:
    return __all__
