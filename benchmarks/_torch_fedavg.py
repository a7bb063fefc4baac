"""The loop in PyTorch of `benchmarks.fedavg_round`, in a process of its own: prints the median seconds of a round."""

import copy
import statistics
import sys
import time

import numpy as np
import torch
from torch import nn

from benchmarks.fedavg_round import BATCH, CHOSEN, CLIENTS, FEATURES, RATE, SAMPLES, samples

x, y = samples(0, CLIENTS * SAMPLES)
x = torch.from_numpy(x).reshape(CLIENTS, SAMPLES, FEATURES)
y = torch.from_numpy(y).reshape(CLIENTS, SAMPLES)
model = nn.Sequential(nn.Linear(FEATURES, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
draw = np.random.default_rng(0)


def one_round() -> None:
    """Ten clients, one after the other, and their average."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in draw.permutation(CLIENTS)[:CHOSEN]:
        local = copy.deepcopy(model)
        optimizer = torch.optim.SGD(local.parameters(), lr=RATE)
        for rows in torch.from_numpy(draw.permutation(SAMPLES)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(local(x[i, rows]), y[i, rows]).backward()
            optimizer.step()
        for t, p in zip(total, local.parameters(), strict=True):
            t += p.detach() / CHOSEN
    with torch.no_grad():
        for p, t in zip(model.parameters(), total, strict=True):
            p.copy_(t)


turns, rounds = int(sys.argv[1]), int(sys.argv[2])
one_round()
times = []
for _ in range(turns):
    began = time.perf_counter()
    for _ in range(rounds):
        one_round()
    times.append((time.perf_counter() - began) / rounds)
print(statistics.median(times))
