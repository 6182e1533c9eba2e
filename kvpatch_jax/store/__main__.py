"""Entry point of `python -m kvpatch_jax.store`; see `cli.main`."""

import sys

from .cli.main import main

sys.exit(main(sys.argv[1:]))
