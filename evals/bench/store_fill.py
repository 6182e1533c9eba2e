"""Filling a root of many small objects quickly: whole object files by the store's own writer, unsynced.

A root filled so is as any other, but for an index, which the store makes from the files when it first needs it.
"""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence

import jax.numpy as jnp
from jaxtyping import Array

import kvpatch_jax as kvp
from kvpatch_jax.cache import PatchMetadata
from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.format.codec import chunk_blob
from kvpatch_jax.store.format.naming import Name
from kvpatch_jax.store.format.objects import Blob, write_blob
from kvpatch_jax.store.format.patch_codec import patch_blob

from .store_workload import BACKBONE, StoreSizes, chunk_of

SMALL = StoreSizes(layers=1, tokens=4, heads=2, width=32)
"""Of a chunk of one KiB."""
MATCHING = 2
"""Patches of a group that serve the same antecedent."""
_ALONE = 20_000


def small_chunk(key: str, seed: int = 0) -> kvp.Chunk:
    """Draws the chunk of one KiB that all small objects have the content of."""
    return dataclasses.replace(chunk_of(SMALL, seed), id=key)


def group_patches(chunk: kvp.Chunk, count: int) -> Iterator[kvp.Patch]:
    """Yields patches of a chunk: the first two serve the antecedent "0", every other one its own."""
    layers = tuple(range(chunk.layout.layers))
    metadata = PatchMetadata(chunk.id, "canonical", ("0",), chunk.backbone, chunk.layout, layers)
    features = SMALL.heads * SMALL.width
    factors: dict[int, tuple[Array, Array]] = {}
    for rank in (1, 2):
        factors[rank] = jnp.ones((SMALL.layers, SMALL.tokens, rank)), jnp.ones((SMALL.layers, rank, features))
    for number in range(count):
        rank, antecedent = (2, "0") if number == 1 else (1, str(number))
        own = dataclasses.replace(metadata, antecedent=(antecedent,))
        yield kvp.Patch(dict.fromkeys(chunk.layout.names, factors[rank]), own)


def write_objects(root: str, objects: Iterable[tuple[Name, Blob]]) -> None:
    """Writes object files into their places, each with a new revision; nothing is synced."""
    made = set[str]()
    for name, blob in objects:
        if name.folder not in made:
            os.makedirs(f"{root}/{name.folder}", exist_ok=True)
            made.add(name.folder)
        fd = os.open(f"{root}/{name.path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            write_blob(fd, dataclasses.replace(blob, revision=time.time_ns()), name.file)
        finally:
            os.close(fd)


def write_chunks(root: str, keys: Sequence[str]) -> None:
    """Writes small chunks into a root; many of them by as many processes as there are cores."""
    parts = min(os.cpu_count() or 1, 1 + len(keys) // _ALONE)
    if parts == 1:
        _write_part(root, keys)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(parts, mp_context=context) as pool:
        for done in [pool.submit(_write_part, root, keys[part::parts]) for part in range(parts)]:
            done.result()


def _write_part(root: str, keys: Sequence[str]) -> None:
    with ChunkStore(root, budget=Budget(host=0)) as store:
        small = small_chunk("small")
        chunks = (dataclasses.replace(small, id=key) for key in keys)
        write_objects(root, ((store.names.canonical(BACKBONE, chunk.id), chunk_blob(chunk)) for chunk in chunks))


def write_group(root: str, key: str, count: int) -> None:
    """Writes a chunk and so many patches of it into a root."""
    with ChunkStore(root, budget=Budget(host=0)) as store:
        chunk = small_chunk(key)
        write_objects(root, [(store.names.canonical(BACKBONE, key), chunk_blob(chunk))])
        patches = group_patches(chunk, count)
        write_objects(root, ((store.names.patch(patch), patch_blob(patch)) for patch in patches))


def put_chunks(root: str, keys: Sequence[str]) -> None:
    """Puts small chunks durably, as a caller does."""
    with ChunkStore(root, budget=Budget(host=0)) as store:
        small = small_chunk("small")
        store.put_many([dataclasses.replace(small, id=key) for key in keys])


def stored_bytes(root: str) -> int:
    """Sums the bytes of a root's object files, by walking them."""
    total = 0
    for folder, _, files in os.walk(f"{root}/obj"):
        for file in files:
            if file.endswith(".safetensors"):
                with contextlib.suppress(FileNotFoundError):  # others evict and delete meanwhile
                    total += os.stat(f"{folder}/{file}").st_size
    return total
