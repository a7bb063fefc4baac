"""`TaskData`, the samples of all nodes in padded arrays; how it is packed, split and checked.

It may import `_core` and `_numerics`.
"""
