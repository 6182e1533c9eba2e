"""Settings every test shares: threads, compiled programs kept in the project's own cache directory, and the order."""

import gc
import os
import time
from pathlib import Path

import pytest

from tests import checking

# Small batched factorisations lose to their own threads; read when the library is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".cache" / "jax"))
# Compiling takes longer than running here: LLVM optimises nothing (XLA's own passes all run), which halves it. Programs
# for users are compiled with everything; JAX_DISABLE_MOST_OPTIMIZATIONS=0 runs the tests so.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Operations keep no stack of callers, which costs a tenth of a compilation; errors show Python's own.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Many small programs are compiled by several files, and by both of two processes.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

checking.install()
# Imports and tracing allocate much that lives on.
gc.set_threshold(50_000, 20, 20)

# A file's tests stay in one process, so a long file that begins last keeps the others waiting. Longest first, by
# the CPU seconds of a run with nothing compiled beforehand (those of 10 or more).
LONG = (
    "test_window_truth.py",
    "test_hybrid.py",
    "test_run.py",
    "test_power_cut.py",
    "test_protocol.py",
    "test_packed_objects.py",
    "test_answer_batch.py",
    "test_trained.py",
    "test_parity.py",
    "test_remote_adapters.py",
    "test_reused_chat.py",
    "test_patch.py",
    "test_families.py",
    "test_rotate_patch.py",
    "test_tenants.py",
    "test_sessions.py",
)

MAPS = Path("/proc/self/maps")
MOST_MAPS = 40_000
"""Every compiled program maps memory of its own. Linux gives a process 65 530 maps; XLA crashes at the next."""
_looked = time.monotonic()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the order below: pytest-xdist would put the files of most tests first."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first."""
    rank = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONG)))


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
