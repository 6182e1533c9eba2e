"""Small chunks and patches for the tests of the store; NumPy on the host, so that child processes start fast."""

import functools
import json
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.cache import PatchMetadata, antecedent_of
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.store.format.codec import unchecked_chunk
from kvpatch_jax.store.format.header import PAGE
from kvpatch_jax.store.format.naming import Name

LAYOUT = kvp.KVLayout.gqa(3, 2, 16, kvp.Rope(1e4, 16))
MLA = kvp.KVLayout.mla(2, 32, 16, rope=kvp.Rope(1e4, 16, scaling=kvp.rope.Scaling("yarn", factor=4, original=64)))
AXES = kvp.KVLayout.gqa(2, 2, 16, kvp.Rope(1e4, 16, sections=(2, 3, 3)))
BACKBONE = "tiny"


class ManualClock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1e9):
        self.now = now

    def __call__(self) -> float:
        return self.now


def chunk_of(
    id: str = "B", seed: int = 0, layout=LAYOUT, tokens: int = 9, dtype: Any = np.float32, make: Any = kvp.Chunk, **more
) -> kvp.Chunk:
    rng = np.random.default_rng(seed)
    kv = {
        channel.name: rng.standard_normal((layout.layers, tokens, channel.heads, channel.width)).astype(dtype)
        for channel in layout.channels
    }
    local = np.arange(tokens, dtype=np.float32)
    local = local if layout.rope.axes is None else np.stack([local * 0, local, local / 2], -1)
    given: dict[str, Any] = {"kv": kv, "local": local, "span": tokens, "length": tokens - 1, "id": id, "layout": layout}
    return make(**(given | {"backbone": BACKBONE} | more))


def host_chunk(id: str, seed: int, **more: Any) -> kvp.Chunk:
    """The same chunk, made without jax, so that a child process needs no backend."""
    return chunk_of(id, seed, make=functools.partial(unchecked_chunk, encoder=None, hidden=None), **more)


def patch_of(
    chunk: kvp.Chunk, antecedent: Any = ("A",), rank: int = 2, seed: int = 1, array: Any = jnp.asarray, **more: Any
) -> kvp.Patch:
    rng = np.random.default_rng(seed)
    factors = {}
    for channel in chunk.layout.channels:
        u = array(rng.standard_normal((chunk.layout.layers, chunk.tokens, rank)), jnp.bfloat16)
        v = array(rng.standard_normal((chunk.layout.layers, rank, channel.features)), jnp.bfloat16)
        factors[channel.name] = (u, v)
    layers = tuple(range(chunk.layout.layers))
    behind = antecedent_of(antecedent)
    given: dict[str, Any] = {"base": "canonical", "antecedent": behind.ids, "members": behind.members} | more
    return kvp.Patch(
        factors,
        PatchMetadata(chunk=chunk.id, backbone=chunk.backbone, layout=chunk.layout, layers=layers, **given),
    )


def same(first: Any, second: Any) -> bool:
    """Bit for bit, dtype and shape too."""
    first, second = np.asarray(first), np.asarray(second)
    return (first.dtype, first.shape) == (second.dtype, second.shape) and first.tobytes() == second.tobytes()


def same_chunk(found: kvp.Chunk | None, chunk: kvp.Chunk) -> bool:
    if found is None or set(found.kv) != set(chunk.kv):
        return False
    words = ("span", "length", "id", "layout", "backbone")
    return (
        all(getattr(found, word) == getattr(chunk, word) for word in words)
        and same(found.local, chunk.local)
        and all(same(found.kv[name], chunk.kv[name]) for name in chunk.kv)
    )


def name_of(store: ChunkStore, chunk: kvp.Chunk, encoding: str | None = None) -> Name:
    return store.names.canonical(chunk.backbone, chunk.id, encoding)


def file_of(store: ChunkStore, chunk: kvp.Chunk, encoding: str | None = None) -> Path:
    return Path(store.disk.root) / name_of(store, chunk, encoding).path


def rewritten(raw: bytes, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> bytes:
    """An object whose header and body `change` has changed, in place; the header's checksum is right."""
    end = 8 + int.from_bytes(raw[:8], "little")
    tree = json.loads(raw[8:end])
    body = json.loads(tree["__metadata__"]["body"])
    change(tree, body)
    tree["__metadata__"]["body"] = json.dumps(body)
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    new, at = len(text).to_bytes(8, "little") + text, 8 + len(b'{"__metadata__":{"header_crc":"')
    blank = new[:at] + b"0" * 8 + new[at + 8 :]
    return new[:at] + b"%08x" % zlib.crc32(blank) + new[at + 8 :] + raw[end:]


def place_of(call: tuple, more: dict[str, Any]) -> str:
    """Where a system call's first argument is, for one that names it from an open directory too."""
    where: Any = call[0] if call else ""
    if isinstance(where, int):
        return os.readlink(f"/proc/self/fd/{where}")
    directory = next((more[word] for word in ("dir_fd", "src_dir_fd") if more.get(word) is not None), None)
    return os.fspath(where) if directory is None else f"{os.readlink(f'/proc/self/fd/{directory}')}/{where}"


def child_environment() -> dict[str, str]:
    """For programs of the tests' own that import this module."""
    here = Path(__file__).parent
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parents[2])]), "JAX_PLATFORMS": "cpu"}


PYTHON = sys.executable
