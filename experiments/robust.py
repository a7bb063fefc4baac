"""Rules against attacks: ``python -m experiments.robust``.

Scikit-learn's digits, dealt to 20 clients at random or by Dirichlet(0.5), and a network with 32 hidden units trained by
federated averaging for 30 rounds. Of the clients 10, 20 or 40 % are hostile: each rule (see `mocha_jax.robust`) against
each attack, and against labels that hostile clients turn around (9 in place of 0, and so on). A rule is told how many
are hostile. Beside them Ditto's personal models, whose server averages; as in Ditto's paper every client chooses its
strength by itself, on a fifth of its samples for training. The tables show the error of the honest clients' held-out
samples, in percent.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from sklearn.datasets import load_digits

import mocha_jax as mj
from experiments.rows import append, parser_of, read, say

R = mj.robust
CLIENTS, SHARES = 20, (0.1, 0.2, 0.4)
DEALS = ("at random", "Dirichlet(0.5)")
ATTACKS: dict[str, R.Attack | None] = {
    "sign flip": R.SignFlip(1.0),
    "sign flip times 10": R.SignFlip(10.0),
    "noise times 3": R.RandomVectors(3.0),
    "a little is enough": R.ALittleIsEnough(1.0),
    "inner product": R.InnerProduct(0.5),
    "labels turned around": None,
}
STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0)  # of Ditto's pull
RULES = ("mean", "median", "trimmed mean", "geometric median", "Krum", "multi-Krum", "Bulyan", "Ditto, mean")


class Row(NamedTuple):
    """One run; the CSV's columns."""

    deal: str
    rounds: int
    rule: str
    attack: str  # or "none"
    share: float  # of hostile clients
    seed: int
    error: float


def main() -> None:
    """Parse the command line, train, print."""
    parser = parser_of("robust", __doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--deals", nargs="+", choices=DEALS, default=DEALS, metavar="DEAL")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES, metavar="RULE")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    say(report(study(options)), options.out)


def study(options: argparse.Namespace) -> list[Row]:
    """All that the CSV lacks; then its rows."""
    path = options.out / "runs.csv"
    rows = [
        row
        for row in read(path, Row)
        if row.rounds == options.rounds and row.rule in options.rules and row.deal in options.deals
    ]
    done = {row[:6] for row in rows}
    for deal in options.deals:
        for rule in options.rules:
            for attack, share in (("none", 0.0), *((a, s) for a in ATTACKS for s in SHARES)):
                run = deal, options.rounds, rule, attack, share
                for seed in (seed for seed in range(options.seeds) if (*run, seed) not in done):
                    rows.append(Row(*run, seed, error_of(deal, rule, attack, share, seed, options.rounds)))
                    append(path, rows[-1])
            jax.clear_caches()
            own = [row.error for row in rows if row[0] == deal and row.rule == rule]
            print(f"{deal:<15} {rule:<17} worst error {100 * max(own):.1f} %", flush=True)
    return rows


def error_of(deal: str, rule: str, attack: str, share: float, seed: int, rounds: int) -> float:
    """Train, and judge the honest clients."""
    count = round(share * CLIENTS)
    algorithm = algorithm_of(rule, count, ATTACKS.get(attack), CLIENTS)
    problem = federation(deal, seed, count if attack == "labels turned around" else 0)

    @jax.jit
    def scores(problem: mj.Prediction, strength: Array) -> Array:
        own = algorithm.replace(numbers={"strength": strength}) if rule.startswith("Ditto") else algorithm
        state, _ = mj.run(problem, own, jax.random.key(seed), num_rounds=rounds, record_every=rounds)
        return jnp.nan_to_num(own.scores(state, problem).error, nan=0.9)

    if not rule.startswith("Ditto"):
        return float(scores(problem, jnp.zeros(()))[count:].mean())
    of_all = jax.vmap(scores, in_axes=(None, 0))
    train, validation = problem.data.split(jax.random.key(seed), 0.8)
    chosen = np.argmin(of_all(mj.Prediction(train, test=validation), jnp.array(STRENGTHS)), axis=0)
    found = np.asarray(of_all(problem, jnp.array(STRENGTHS)))
    return float(found[chosen, np.arange(CLIENTS)][count:].mean())


def algorithm_of(rule: str, hostile: int, attack: R.Attack | None, clients: int) -> Any:
    """The algorithm; the first clients are hostile."""
    network, sgd = mj.networks.MLP(64, 10, (32,)), optax.sgd(0.5)
    how: dict[str, Any] = {"batch_size": 10}
    averaging = mj.personalized.ditto(network, sgd, strength=0.3, **how) if rule == "Ditto, mean" else mj.FedAvg(
        network, sgd, **how)  # fmt: skip
    rules: dict[str, R.Rule] = {
        "mean": R.Mean(), "Ditto, mean": R.Mean(), "median": R.Median(), "geometric median": R.GeometricMedian(),
        "trimmed mean": R.TrimmedMean(hostile / clients), "Krum": R.Krum(hostile),
        "multi-Krum": R.Krum(hostile, clients - hostile), "Bulyan": R.Bulyan(hostile),
    }  # fmt: skip
    chosen = rules[rule] if attack is None else R.Attacked(rules[rule], attack, tuple(range(hostile)))
    return R.combined(averaging, chosen)


def federation(deal: str, seed: int, turned: int) -> mj.Prediction:
    """Deal the digits; the first clients' labels are turned around, but for those they are judged on."""
    x, y = load_digits(return_X_y=True)
    x, key = (x / 16.0).astype(np.float32), jax.random.key(seed)
    parts = mj.partition.iid(key, len(y), CLIENTS) if deal == "at random" else mj.partition.dirichlet(
        key, y, CLIENTS, 0.5, least=20)  # fmt: skip
    rng = np.random.default_rng(seed)
    sets: tuple[tuple[list[Any], list[Any]], ...] = (([], []), ([], []))
    for k, rows in enumerate(parts):
        order = rng.permutation(rows)
        for (xs, ys), some in zip(sets, np.split(order, [round(0.6 * len(order))]), strict=True):
            turn = k < turned and xs is sets[0][0]
            xs.append(x[some])
            ys.append(9 - y[some] if turn else y[some])
    train, test = (mj.pack_tasks(xs, ys, loss_scaling="task_mean") for xs, ys in sets)
    return mj.Prediction(train, test=test)


def report(rows: list[Row]) -> str:
    """A table in Markdown for each way to deal: errors in percent at each share of hostile clients."""
    lines = []
    rules = [rule for rule in RULES if any(row.rule == rule for row in rows)]
    for deal in dict.fromkeys(row.deal for row in rows):
        own = [row for row in rows if row.deal == deal]
        lines += [f"\n**{deal}**\n", f"| attack | {' | '.join(rules)} |", "|---" + "|---:" * len(rules) + "|"]
        for attack, shares in (("none", (0.0,)), *((a, SHARES) for a in ATTACKS)):
            cells = []
            for rule in rules:
                means = [
                    np.mean([r.error for r in own if (r.rule, r.attack, r.share) == (rule, attack, s)]) for s in shares
                ]
                cells.append(" / ".join(f"{100 * mean:.1f}" for mean in means))
            lines.append(f"| {attack} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
