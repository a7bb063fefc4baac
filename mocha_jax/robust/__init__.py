r"""Rules that combine clients' answers when some of them are wrong, and attacks to test them with.

`combined` takes an algorithm whose server averages changes, `FedAvg` or a method of `mocha_jax.personalized`, and a
rule; the clients' work stays as it is. A rule counts clients, whatever the number of their samples.

It may import `_core`, `_neural` and `_numerics`.
"""

from mocha_jax.robust._attacks import ALittleIsEnough as ALittleIsEnough
from mocha_jax.robust._attacks import Attack as Attack
from mocha_jax.robust._attacks import Attacked as Attacked
from mocha_jax.robust._attacks import InnerProduct as InnerProduct
from mocha_jax.robust._attacks import RandomVectors as RandomVectors
from mocha_jax.robust._attacks import SignFlip as SignFlip
from mocha_jax.robust._combined import combined as combined
from mocha_jax.robust._rules import Bulyan as Bulyan
from mocha_jax.robust._rules import GeometricMedian as GeometricMedian
from mocha_jax.robust._rules import Krum as Krum
from mocha_jax.robust._rules import Mean as Mean
from mocha_jax.robust._rules import Median as Median
from mocha_jax.robust._rules import Rule as Rule
from mocha_jax.robust._rules import TrimmedMean as TrimmedMean
