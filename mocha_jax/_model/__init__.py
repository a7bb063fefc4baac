"""Models that were trained: what predicts, with names and without anybody's samples.

It may import `_core` and `_data`.
"""
