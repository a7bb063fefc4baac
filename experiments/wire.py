"""Bytes of one answer over Flower, in every form of ``experiments.compression``: ``python -m experiments.wire``.

A node's dual vector of 561 numbers, as of HAR, and the change of the 2NN, 199,210 numbers. "Arrays" are the numbers of
the answer, "message" is what Flower makes of it before gRPC: their names and shapes besides.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
import optax

import mocha_jax as mj
from experiments.compression import FORMS

D, IMAGE, ROWS = 561, 784, 200


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser("python -m experiments.wire", description=__doc__).parse_args()
    print("| form | dual vector: arrays | message | network: arrays | message |\n|---|---:|---:|---:|---:|")
    for name, form in FORMS.items():
        found = [number for answer in (of_vector, of_network) for number in sizes(answer(form))]
        print(f"| {name} | {' | '.join(f'{number:,}' for number in found)} |", flush=True)


def sizes(up: mj.federated.Up) -> tuple[int, int]:
    """The bytes of an answer's arrays, and of Flower's message."""
    from flwr.common.serde import recorddict_to_proto

    from mocha_jax.flower._records import to_record

    return up.nbytes, recorddict_to_proto(to_record({"what": "up", **up.header}, up.arrays)).ByteSize()


def of_vector(form: mj.compression.Sending | None) -> mj.federated.Up:
    """The answer of a node to the second round of the proximal server: of the first one it has no difference."""
    algorithm, relation = mj.Mocha(server="proximal"), mj.regularizers.Probabilistic(0.01)
    x = samples(D)
    node = mj.federated.Node(
        x, np.sign(x[:, 0]), mj.losses.SmoothedHinge(0.5), algorithm, loss_scaling="task_mean", sending=form
    )
    server = mj.federated.Server(algorithm, relation, 2, D, loss_scaling="task_mean", receiving=form)
    return answer(server, node, rounds=2)


def of_network(form: mj.compression.Sending | None) -> mj.federated.Up:
    """The answer of a client of federated averaging."""
    network = mj.networks.MLP(IMAGE, 10, (200, 200))
    averaging = mj.FedAvg(network, optax.sgd(0.1))
    algorithm = averaging if form is None else mj.compression.compressed(averaging, form)
    labels = np.arange(ROWS) % 10
    node = mj.federated.Node(samples(IMAGE), labels, mj.likelihoods.Categorical(), algorithm)
    return answer(mj.federated.Server(algorithm, None, 2, IMAGE), node, rounds=1)


def samples(d: int) -> np.ndarray:
    """Samples of so many features."""
    return np.random.default_rng(0).normal(size=(ROWS, d)).astype(np.float32)


def answer(server: mj.federated.Server, node: mj.federated.Node, rounds: int) -> mj.federated.Up:
    """The answer of node 0 in the last of some rounds."""
    key, there, here = jax.random.key(0), server.init(), node.init()
    for _ in range(rounds):
        here, up = node.step(key, here, server.down(there, 0))
        there, report = server.step(there, {0: up})
        assert report.accepted == (0,)
    return up


if __name__ == "__main__":
    main()
