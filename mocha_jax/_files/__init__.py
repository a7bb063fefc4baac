"""Files: of one form, written whole or not at all, owned by one solve at a time; fingerprints; checkpoints.

It may import `_core`.
"""
