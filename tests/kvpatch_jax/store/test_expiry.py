"""When objects expire, however the time was said: an int, a float, a NumPy number. What is not finite is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, patch_of, same_chunk

from kvpatch_jax.errors import InputError
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary

pytestmark = pytest.mark.usefixtures("unchecked")

KEY = b"one key of the store, 32 bytes at least"
CLOCKS: dict[str, Callable[[], Any]] = {
    "int": lambda: 1_700_000_000,
    "float": lambda: 1_700_000_000.123456,
    "float64": lambda: np.float64(1_700_000_000.123456),
    "int64": lambda: np.int64(1_700_000_000),
}
TTLS = [100, 100.5, np.float32(100.5), np.array(9)]


@pytest.fixture(params=[None, KEY], ids=["plain", "encrypted"])
def key(request: pytest.FixtureRequest) -> bytes | None:
    return request.param


@pytest.mark.parametrize(
    ("ttl", "clock"),
    [(ttl, "int") for ttl in TTLS] + [(TTLS[0], clock) for clock in CLOCKS],
    ids=lambda each: each if isinstance(each, str) else f"{type(each).__name__}-{getattr(each, 'dtype', '')}",
)
def test_acknowledged_objects_with_a_ttl_are_read_back(tmp_path: Path, key: bytes | None, ttl: Any, clock: str):
    with ChunkStore(tmp_path, budget=Budget(host=0), key=key, clock=CLOCKS[clock]) as store:
        chunk = chunk_of(encoder=np.ones((2, 2), np.float32))
        store.put(chunk, ttl=ttl)
        store.put_async(chunk_of("C"), ttl=ttl).result()
        store.put_patches([patch_of(chunk)], ttl=ttl)
        store.put_encoder("E", BACKBONE, np.ones((2, 2), np.float32), ttl=ttl)
        library = StaticLibrary(store, quota=1 << 20)
        library.put("DOC", "text", ttl=ttl)
        assert same_chunk(store.get("B", BACKBONE), chunk)
        assert store.get("C", BACKBONE) is not None
        assert len(store.get_patches(patch_of(chunk).metadata)) == 1
        assert store.get_encoder("E", BACKBONE) is not None
        resource = library.get("TEXT", "DOC")
        assert resource is not None
        assert type(resource.expires) is float
        assert resource.expires == float(CLOCKS[clock]()) + float(ttl)
        assert store.counters["quarantined"] == 0


def test_a_default_ttl_accepts_the_same_types(tmp_path: Path, key: bytes | None):
    ttl: Any = np.int16(100)
    clock: Any = lambda: np.int64(50)
    with ChunkStore(tmp_path, budget=Budget(host=0), key=key, ttl=ttl, clock=clock) as store:
        store.put(chunk_of())
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
        brief: Any = np.int32(7)
        files = StaticLibrary(store, quota=1 << 20, ttl=brief)
        files.put("DOC", "text")
        assert files.get("TEXT", "DOC") is not None
        (listed,) = files.entries()
        assert listed.expires == 57.0


WRONG = [float("inf"), float("nan"), 0, -1, "100", True, 10**400, np.array([5, 6])]


@pytest.mark.parametrize("ttl", WRONG, ids=lambda ttl: f"{ttl!r:.20}")
def test_a_ttl_that_is_no_time_is_refused_and_loses_nothing(tmp_path: Path, key: bytes | None, ttl: Any):
    with ChunkStore(tmp_path, budget=Budget(host=0), key=key) as store:
        library = StaticLibrary(store, quota=1 << 20)
        store.put(chunk_of())
        library.put("DOC", "text")
        calls = [
            lambda: store.put(chunk_of(seed=2), ttl=ttl),
            lambda: store.put_async(chunk_of(seed=2), ttl=ttl),
            lambda: store.put_patches([patch_of(chunk_of())], ttl=ttl),
            lambda: store.put_patch_async(patch_of(chunk_of()), ttl=ttl),
            lambda: store.put_encoder("B", BACKBONE, np.ones((2, 2), np.float32), ttl=ttl),
            lambda: library.put("DOC", "other", ttl=ttl),
            lambda: StaticLibrary(store, quota=9, ttl=ttl),
            lambda: ChunkStore(tmp_path, ttl=ttl),
        ]
        for call in calls:
            with pytest.raises(InputError, match=r"ttl.*expected.*seconds above 0"):
                call()
        store.flush()
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
        found = library.get("TEXT", "DOC")
        assert found is not None
        assert found.content == "text"
