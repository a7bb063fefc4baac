"""Federated averaging in PyTorch, for `benchmarks.fedavg_round` and `benchmarks.card`, in a process of its own.

    python -m benchmarks._torch_fedavg MODEL,... TURNS ROUNDS DEVICE

A loop over ten clients, one after the other, as one would write it. It prints a record of JSON for each model: the
median seconds of a round, and the accuracy after all of them. Products may be in TF32, as JAX's are by default.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import _texts
from benchmarks.fedavg_round import BATCH, CHOSEN, CLIENTS, FEATURES, RATE, SAMPLES, samples


def main() -> None:
    """All models asked for."""
    try:
        import torch
    except ImportError as error:
        print(error)
        raise SystemExit(1) from error
    device = torch.device("cuda" if sys.argv[4] == "cuda" and torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    for name in sys.argv[1].split(","):
        row = trained(name, int(sys.argv[2]), int(sys.argv[3]), device)
        print(json.dumps({"model": name, "torch": torch.__version__, "device": str(device)} | row), flush=True)


def trained(name: str, turns: int, rounds: int, device: Any) -> dict[str, Any]:
    """Train, time, judge."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = _models()[name]().to(device)
    (x, y), (test_x, test_y) = (
        [torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in part] for part in _data(name)
    )
    rate = _texts.RATE if name == "lstm" else RATE
    draw = np.random.default_rng(0)

    def loss(local: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(local(x).flatten(0, -2), y.flatten())

    def one_round() -> None:
        total = [torch.zeros_like(p) for p in model.parameters()]
        for i in draw.permutation(len(x))[:CHOSEN]:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=rate)
            for rows in torch.from_numpy(draw.permutation(x.shape[1])).to(device).split(BATCH):
                optimizer.zero_grad()
                loss(local, x[i, rows], y[i, rows]).backward()
                optimizer.step()
            for t, p in zip(total, local.parameters(), strict=True):
                t += p.detach() / CHOSEN
        with torch.no_grad():
            for p, t in zip(model.parameters(), total, strict=True):
                p.copy_(t)

    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    one_round()
    wait()
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        for _ in range(rounds):
            one_round()
        wait()
        times.append((time.perf_counter() - began) / rounds)
    with torch.no_grad():
        right = (model(test_x).argmax(-1) == test_y).float().mean().item()
    return {"seconds": statistics.median(times), "accuracy": right, "rounds": 1 + turns * rounds}


def _data(name: str) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Samples of clients ``[clients, n, ...]``, and others."""
    if name == "lstm":
        return _texts.texts(0, CLIENTS), tuple(a[0] for a in _texts.texts(1, 1, 100))
    x, y = samples(0, CLIENTS * SAMPLES)
    return (x.reshape(CLIENTS, SAMPLES, FEATURES), y.reshape(CLIENTS, SAMPLES)), samples(1, 2000)


def _models() -> dict[str, Callable[[], Any]]:
    """The networks, of as many parameters as those of `mocha_jax.networks`."""
    from torch import nn

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(_texts.SYMBOLS, 8), nn.Linear(256, _texts.SYMBOLS)
            self.lstm = nn.LSTM(8, 256, 2, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.out(self.lstm(self.embedding(x))[0])

    return {
        "2nn": lambda: nn.Sequential(
            nn.Linear(FEATURES, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
        ),
        "cnn": lambda: nn.Sequential(
            nn.Unflatten(-1, (1, 28, 28)), nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
            nn.Linear(512, 10),
        ),
        "lstm": Language,
    }  # fmt: skip


if __name__ == "__main__":
    main()
