"""Batch evaluation: absl programs, probes, report. Nothing imports this package."""

import os

# The factorisations here are many and small: OpenBLAS threads only get in each other's way. Read when it is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
