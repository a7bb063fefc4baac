"""Studies with mocha_jax. Run them as modules from the repository's root.

A device for every core, and one thread for each small singular value decomposition: set before JAX starts.
"""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count() or 1))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
