"""Differential privacy: mechanisms against oracles, budgets, audits."""
