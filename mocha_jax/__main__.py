"""``python -m mocha_jax`` is ``mocha-jax``."""

import sys

from mocha_jax.cli import main

sys.exit(main())
