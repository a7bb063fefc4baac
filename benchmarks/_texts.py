"""Made-up texts for language models: after a symbol mostly the same one follows."""

from __future__ import annotations

import numpy as np

SYMBOLS, ROWS, LENGTH, RATE = 75, 20, 80, 1.0  # of a client; the rate of its SGD


def texts(seed: int, clients: int, rows: int = ROWS, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Symbols ``[clients, rows, length]``, and the ones that follow each of them."""
    follows = np.random.default_rng(99).integers(0, SYMBOLS, SYMBOLS)
    draw = np.random.default_rng(seed)
    found = draw.integers(0, SYMBOLS, (clients, rows, length + 1))
    for t in range(length):
        usual = draw.random((clients, rows)) < 0.8
        found[..., t + 1] = np.where(usual, follows[found[..., t]], found[..., t + 1])
    return found[..., :-1], found[..., 1:]
