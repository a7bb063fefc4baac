"""Files: written whole or not at all, owned by one solve at a time, told apart by fingerprints; checkpoints.

It may import `_core`.
"""
