"""Arrays through the Orbax item: a store's or chunks' into a checkpoint, and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

import kvpatch_jax as kvp
from kvpatch_jax.store import ArrayContents, ChunkStore, StoreItem, Summary


def saved(path: Path | str, item: StoreItem, compress: bool = False) -> None:
    """Saves an item alone, by default so that the arrays' bytes are found in the files."""
    context = ocp.Context()
    context.array_options.saving.use_compression = compress
    with context:
        ocp.save_checkpointables(str(path), {"chunk_store": item})


def save_arrays(path: Path, chunks: Sequence[kvp.Chunk] = (), patches: Sequence[kvp.Patch] = ()) -> None:
    """Saves these as the one item of a checkpoint."""
    saved(path, StoreItem(contents=ArrayContents(chunks, patches)))


def load_arrays(path: Path, placement: Any = None) -> ArrayContents:
    """What the item of a checkpoint holds."""
    item = StoreItem(placement=placement)
    ocp.load_checkpointables(str(path), {"chunk_store": item})
    assert item.contents is not None
    return item.contents


def export_arrays(store: ChunkStore, path: Path | str, compress: bool = False) -> Summary:
    """Saves a store's objects as arrays."""
    item = StoreItem(store, arrays=True)
    saved(path, item, compress)
    assert item.summary is not None
    return item.summary


def import_arrays(path: Path | str, store: ChunkStore) -> Summary:
    """Loads the item of a checkpoint into a store."""
    item = StoreItem(store)
    ocp.load_checkpointables(str(path), {"chunk_store": item})
    assert item.summary is not None
    return item.summary
