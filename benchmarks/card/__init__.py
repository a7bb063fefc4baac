"""What a card is measured by, step by step: `python -m benchmarks.card`."""
