"""`Problem` (data, loss, regularizer), its objective, and the certificate of an answer.

It may import `_core`, `_numerics`, `_data`, `losses`, `coupling`, `networks`, `regularizers` and `_model`.
"""
