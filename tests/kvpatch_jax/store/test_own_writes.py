"""What a store was given to write is what it reads, before it is durable too."""

import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, patch_of, same, same_chunk

from kvpatch_jax.store import Budget, ChunkStore, Request, fetch

REQUESTS = [Request(f"c{number}", BACKBONE) for number in range(3)]


class Held:
    """A store whose writer waits until it is let go."""

    def __init__(self, root: Path, monkeypatch, **more):
        self.store, self.go = ChunkStore(root, **more), threading.Event()
        put = self.store.disk.put_group

        def late(items, *more):
            assert self.go.wait(300)
            return put(items, *more)

        monkeypatch.setattr(self.store.disk, "put_group", late)


@pytest.fixture(params=[0, 1 << 20], ids=["no memory", "memory"])
def held(tmp_path: Path, monkeypatch, request):
    held = Held(tmp_path / "store", monkeypatch, budget=Budget(host=request.param))
    yield held
    held.go.set()
    held.store.close()


def compute(made: list):
    def computing(misses):
        made.extend(miss.request.id for miss in misses)
        return [chunk_of(miss.request.id, int(miss.request.id[1:])) for miss in misses]

    return computing


def test_a_second_fetch_does_not_compute_again(held):
    made: list[str] = []
    first = fetch(held.store, REQUESTS, compute(made))
    assert not any(fetched.ack.done() for fetched in first if fetched.ack is not None)
    second = fetch(held.store, REQUESTS, compute(made))
    assert made == [request.id for request in REQUESTS]
    assert all(same_chunk(b.chunk, a.chunk) for a, b in zip(first, second, strict=True))
    held.go.set()
    held.store.flush()
    third = fetch(held.store, REQUESTS, compute(made))
    assert len(made) == 3
    assert all(same_chunk(b.chunk, a.chunk) for a, b in zip(first, third, strict=True))


def test_get_hits_before_the_acknowledgement(held):
    chunk = chunk_of("c1", 1, encoder=np.arange(6, dtype=np.float32).reshape(2, 3))
    ack = held.store.put_async(chunk)
    found = held.store.get("c1", BACKBONE, encoder=True)
    assert not ack.done()
    assert same_chunk(found, chunk)
    assert same(found.encoder, chunk.encoder)
    assert held.store.contains("c1", BACKBONE)
    placed = held.store.get("c1", BACKBONE, placement=jax.devices()[0])
    assert same_chunk(placed, chunk)
    assert held.store.get("c1", "another") is held.store.get("c2", BACKBONE) is None
    patch = patch_of(chunk)
    held.store.put_patch_async(patch)
    (again,) = held.store.get_patches(patch.metadata)
    assert all(same(x, y) for x, y in zip(*(jax.tree.leaves(dict(p.factors)) for p in (again, patch)), strict=True))
    held.go.set()
    ack.result(60)
    assert same_chunk(held.store.get("c1", BACKBONE), chunk)


@pytest.mark.parametrize("encoding", ["bfloat16", "int8", "float8_e4m3fn"])
def test_a_reduced_chunk_reads_the_same_before_and_after(held, encoding):
    chunk = chunk_of("c1", 1)
    ack = held.store.put_async(chunk, encoding=encoding)
    before = held.store.get("c1", BACKBONE, encoding=encoding)
    assert not ack.done()
    assert not same_chunk(before, chunk)
    held.go.set()
    ack.result(60)
    assert same_chunk(held.store.get("c1", BACKBONE, encoding=encoding), before)
    assert held.store.get("c1", BACKBONE) is None
