"""Puts of more objects than the process may have files open."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_cases import BACKBONE, chunk_of, host_chunk, patch_of, same_chunk

from kvpatch_jax.errors import StoreIOError
from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.disk import object_writer


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """At most 256 open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        yield 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_put_of_many_objects_needs_few_descriptors(tmp_path: Path, few_descriptors: int):
    with ChunkStore(tmp_path, budget=Budget(host=0)) as store:
        chunks = [host_chunk(f"B{number}", number, tokens=2) for number in range(300)]
        store.put_many(chunks)
        assert len(store.disk.scan()) == 300
        assert same_chunk(store.get("B299", BACKBONE), chunks[-1])
        store.put_patches([patch_of(chunks[0], (f"A{number}",)) for number in range(300)])
        assert len(store.disk.scan()) == 600
        assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_put_of_1100_objects_needs_few_descriptors(tmp_path: Path, few_descriptors: int):
    with ChunkStore(tmp_path, budget=Budget(host=0)) as store:
        store.put_many([host_chunk(f"B{number}", number, tokens=2) for number in range(1100)])
        assert len(store.disk.scan()) == 1100


def test_a_put_that_fails_halfway_reports_the_stored_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chunks = [chunk_of(f"B{number}", number, tokens=2) for number in range(10)]
    monkeypatch.setattr(object_writer, "GROUP", 4)
    with ChunkStore(tmp_path, budget=Budget(host=0, disk=1 << 20)) as store:
        store.put(chunk_of("before"))
        opening, names = os.open, set[str]()

        def full(path, flags, *more, **others):
            if flags & os.O_EXCL:
                names.add(path)
                if len(names) > 6:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return opening(path, flags, *more, **others)

        with monkeypatch.context() as patched:
            patched.setattr(os, "open", full)
            with pytest.raises(StoreIOError, match=r"the first 4 of 10 objects are stored.*Too many open files"):
                store.put_many(chunks)
        assert [store.get(chunk.id, BACKBONE) is not None for chunk in chunks] == [True] * 4 + [False] * 6
        assert same_chunk(store.get("before", BACKBONE), chunk_of("before"))
        assert list((tmp_path / "tmp").iterdir()) == []
        store.put_many(chunks)
        assert all(same_chunk(store.get(chunk.id, BACKBONE), chunk) for chunk in chunks)
