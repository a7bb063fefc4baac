"""Trained models: they predict by name and contain no samples.

It may import `_core`, `_data`, `likelihoods` and `networks`.
"""
