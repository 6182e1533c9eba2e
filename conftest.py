"""Settings that every test shares: threads, compiled programs kept in `out/`, how many examples a property draws."""

import gc
import os
import time
from pathlib import Path
from typing import Any

import hypothesis
import jaxtyping
import pytest

# Small batched factorisations lose to their own threads; read when the library is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / "out" / "jax"))
# Compiling takes longer than running here: LLVM optimises nothing (XLA's own passes all run), which halves it. Programs
# for users are compiled with everything; JAX_DISABLE_MOST_OPTIMIZATIONS=0 runs the tests so.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Operations keep no stack of callers, which costs a tenth of a compilation; errors show Python's own.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Many small programs are compiled by several files, and by both of two processes.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

# The same examples in every run; the other profiles (`--hypothesis-profile=`) draw others each time.
hypothesis.settings.register_profile("default", max_examples=25, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("others", max_examples=25, deadline=None, print_blob=True)
hypothesis.settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("default")

# Imports and tracing allocate much that lives on.
gc.set_threshold(50_000, 20, 20)

MAPS = Path("/proc/self/maps")
MOST_MAPS = 40_000
"""Every compiled program maps memory of its own. Linux gives a process 65 530 maps; XLA crashes at the next."""
_looked = time.monotonic()


def pytest_collection_finish() -> None:
    """Keeps the garbage collector off what was imported, which stays anyway."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown() -> None:
    """Lets go of compiled programs before there are too many for one process."""
    global _looked
    if time.monotonic() - _looked < 20 or not MAPS.exists():
        return
    _looked = time.monotonic()
    if MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        import jax  # reads its environment when it is imported, which is set above

        jax.clear_caches()
        gc.collect()


@pytest.fixture
def unchecked() -> Any:
    """Switches jaxtyping's hook off, where it is on, so that a test sees our own typed error."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def highest_precision() -> Any:
    """Computes products of float32 in float32, whatever the platform's default is."""
    import jax

    with jax.default_matmul_precision("highest"):
        yield
