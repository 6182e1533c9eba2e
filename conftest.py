"""Settings every test shares: one BLAS thread, a cache of compiled programs, and what runs in one process."""

import os
from pathlib import Path

import pytest

# Small batched factorisations lose to their own threads; read when the library is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist writes the groups into the tests' names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps a file's tests in one process: they share fixtures and compiled programs that are dear to make.

    A file whose tests share nothing dear says so with groups of its own, `pytest.mark.xdist_group`.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
