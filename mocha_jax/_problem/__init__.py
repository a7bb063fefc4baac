"""`Problem` (data, loss, regularizer), its objective, and the certificate of an answer.

It may import `_core`, `_numerics`, `_data`, `losses`, `coupling`, `regularizers` and `_model`.
"""
