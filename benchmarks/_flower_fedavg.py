"""Federated averaging in Flower's simulation, for `benchmarks.personalized_round`, in a process of its own.

    python -m benchmarks._flower_fedavg FOLDER ROUNDS

A client trains in PyTorch on the samples of a file of FOLDER; Flower's own strategy averages. It prints the median
seconds of a round but the first.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.personalized_round import BATCH, CLIENTS, FEATURES, HIDDEN, RATE


def main() -> None:
    """Simulate."""
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    folder, rounds = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    client, server = ClientApp(), ServerApp()
    ends = []

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = network()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        x, y = samples(folder / "train" / f"{context.node_config['partition-id']}.npz")
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for batch in torch.randperm(len(y)).split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        answer = RecordDict()
        answer["arrays"] = ArrayRecord(model.state_dict())
        answer["metrics"] = MetricRecord({"num-examples": len(y)})
        return Message(content=answer, reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(self, *args: Any, **kwargs: Any) -> Any:
            found = super().aggregate_train(*args, **kwargs)
            ends.append(time.perf_counter())
            return found

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        strategy.start(grid=grid, initial_arrays=ArrayRecord(network().state_dict()), num_rounds=rounds)

    run_simulation(
        server_app=server, client_app=client, num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )  # fmt: skip
    print(statistics.median(np.diff(ends)))


def network() -> Any:
    """One hidden layer."""
    from torch import nn

    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


@cache
def samples(path: Path) -> tuple[Any, Any]:
    """Read a client's samples once a process."""
    import torch

    data = np.load(path, allow_pickle=True)["data"].item()
    return torch.from_numpy(data["x"].reshape(len(data["y"]), -1)), torch.from_numpy(data["y"])


if __name__ == "__main__":
    main()
