"""Models that were trained: what predicts, with names and without anybody's samples.

It may import `_core`, `_data` and `networks`.
"""
