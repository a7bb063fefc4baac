"""The core: records that JAX sees as pytrees, checks of arguments, placement on devices, warnings.

It may import nothing of the library.
"""
