"""Trained models: they predict by name and contain no samples.

It may import `_core`, `_files`, `_data`, `likelihoods` and `networks`.
"""
