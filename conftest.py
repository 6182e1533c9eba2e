"""Settings every test shares: one BLAS thread, and compiled programs kept in the project's own cache directory."""

import os
from pathlib import Path

# Small batched factorisations lose to their own threads; read when the library is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
