"""A tenant with libraries for the tests of snapshots, and all the ways in which it travels to another store."""

from pathlib import Path

import numpy as np
from array_cases import export_arrays, import_arrays
from orbax.checkpoint import v1 as ocp
from store_cases import chunk_of

from kvpatch_jax.store import Budget, ChunkStore, DynamicLibrary, StaticLibrary, StoreItem, load_snapshot, save_snapshot

KEY = b"one key of the store, 32 bytes at least"
PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def opened(root: Path, tenant: str = "one", key: bytes | None = None, **budget: int) -> ChunkStore:
    return ChunkStore(root, tenant=tenant, key=key, budget=Budget(host=0, **budget))


def libraries(store: ChunkStore) -> tuple[StaticLibrary, DynamicLibrary]:
    return StaticLibrary(store, quota=1 << 24), DynamicLibrary(store)


def fill(store: ChunkStore) -> None:
    """Five static entries, one with its chunk, three dynamic ones in four versions (one is held), one withdrawn."""
    files, references = libraries(store)
    files.put("LOUVRE", PIXELS, chunk=chunk_of(), vector=np.array([1.0, 2.0]))
    files.put("my notes", "text ü")
    files.put("ids", [1, 2, 2**40])
    files.put("report", b"%PDF-")
    files.put("bare", chunk=chunk_of("bare", 3))
    references.publish("HOTEL", "old")
    held = references.open("TEXT", "HOTEL")
    references.publish("HOTEL", "new", metadata={"stars": 3}, vector=np.array([0.5]))
    references.publish("MUSEUM", PIXELS, chunk=chunk_of("museum", 5))
    references.publish("GONE", "withdrawn")
    references.withdraw("TEXT", "GONE")
    assert held is not None  # the first version was there when the second came, and goes with nobody's help


def shown(store: ChunkStore) -> dict[str, object]:
    """All that the libraries show. What is held is not closed, which would drop old versions, but let go of."""
    files, references = libraries(store)
    found: dict[str, object] = {}
    for entry in files.entries():
        resource = files.get(entry.reference.kind, entry.reference.name)
        assert resource is not None
        found[str(entry.reference)] = plain(resource)
    for entry in references.entries():
        for version in references.versions(entry.reference.kind, entry.reference.name):
            held = references.open(entry.reference.kind, entry.reference.name, version)
            assert held is not None
            found[str(held.resource.reference)] = plain(held.resource)
    return found


def plain(resource) -> object:
    content = resource.content.tobytes() if isinstance(resource.content, np.ndarray) else resource.content
    vector = None if resource.vector is None else resource.vector.tobytes()
    return content, vector, resource.digest, resource.metadata, resource.chunk, resource.expires


def travel(way: str, store: ChunkStore, into: ChunkStore, folder: Path) -> None:
    """Everything of one store's tenant into another store."""
    name, root = str(folder / f"by-{way}"), store.disk.root
    if way == "orbax":
        ocp.save_checkpointables(name, {"chunk_store": StoreItem(store)})
        ocp.load_checkpointables(name, {"chunk_store": StoreItem(into)})
    elif way == "arrays":
        export_arrays(store, name)
        import_arrays(name, into)
    else:
        tenant = None if way == "whole" else "one"
        save_snapshot(root, name, tenant=tenant, copy=way == "copy")
        key = None if into.disk.encryption.check is None else KEY
        load_snapshot(name, into.disk.root, tenant="one", budget=into.budget, key=key)
