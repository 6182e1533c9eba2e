"""Chunks, small objects and damage that the tests of the store share."""

import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.cache import ChunkKey, PatchMetadata, antecedent_of
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.store.files import Encoded, Stored
from kvpatch_jax.store.objects import Objects
from tests.shared.arrays import placed

LAYOUT = kvp.KVLayout.gqa(3, 2, 16, kvp.Rope(1e4, 16))
MODEL = "tiny"
KEY, SECRET = b"k" * 32, b"the same on all machines, 32 byt"


def chunk_of(
    id: str = "B", seed: int = 0, tokens: int = 8, dtype: Any = np.float32, layout: Any = LAYOUT, **options: Any
) -> kvp.Chunk:
    """A chunk of random KV, which a seed determines."""
    rng, kv = np.random.default_rng(seed), {}
    for channel in layout.channels:
        shape = (layout.depth(channel.name), channel.rows_for(tokens), channel.heads, channel.width)
        kv[channel.name] = rng.standard_normal(shape).astype(dtype if channel.rows is None else np.float32)
    local = np.arange(tokens, dtype=np.float32)
    local = local if layout.rope.axes is None else np.stack([local * 0, local, local / 2], -1)
    return kvp.Chunk(kv, local, tokens, tokens - 1, id, layout, MODEL, **options)


def patch_for(
    antecedent: Any = ("A",), seed: int = 0, chunk: kvp.Chunk | None = None, rank: int = 2, **fields: Any
) -> kvp.Patch:
    """A patch of random numbers, the first of which is its seed; fields of its chunk's key or of its metadata."""
    chunk = chunk_of("page") if chunk is None else chunk
    rng, factors = np.random.default_rng(seed), {}
    for channel in chunk.layout.channels:
        depth, rows = chunk.layout.depth(channel.name), channel.rows_for(chunk.tokens)
        u, v = rng.standard_normal((depth, rows, rank)), rng.standard_normal((depth, rank, channel.features))
        u[0, 0, 0] = seed
        factors[channel.name] = placed(u, np.float32), placed(v, np.float32)
    names = ("content", "lead", "encoding", "places")
    key = {"encoding": chunk.encoding} | {name: fields.pop(name) for name in names if name in fields}
    if "base_antecedent" in fields:
        fields["base_antecedent"] = antecedent_of(fields["base_antecedent"])
    layers = tuple(range(chunk.layout.layers))
    metadata = PatchMetadata(
        ChunkKey(chunk.id, MODEL, chunk.layout, **key), antecedent_of(antecedent), layers, **fields
    )
    return kvp.Patch(factors, metadata)


def same(first: Any, second: Any) -> bool:
    """Bit for bit, with dtypes, shapes and all that says how packed arrays are read."""
    (leaves, form), (others, other_form) = jax.tree.flatten(first), jax.tree.flatten(second)
    is_alike = form == other_form and len(leaves) == len(others)
    for leaf, other in zip(leaves, others, strict=False):
        leaf, other = np.asarray(leaf), np.asarray(other)
        is_alike &= (leaf.dtype, leaf.shape, leaf.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return is_alike


def same_chunk(first: kvp.Chunk | None, second: kvp.Chunk) -> bool:
    """All fields but the encoder output, which is an object of its own."""
    assert first is not None
    fields = [field.name for field in dataclasses.fields(kvp.Chunk) if field.name not in ("kv", "local", "encoder")]
    is_alike = all(getattr(first, field) == getattr(second, field) for field in fields)
    return is_alike and same(dict(first.kv), dict(second.kv)) and same(first.local, second.local)


def name_of(number: int, part: str = "enc") -> str:
    return f"{number:032x}/{part}"


def object_of(value: int, kind: str = "encoder") -> Encoded:
    """An object whose body and leaf say its value."""
    return Encoded(kind, {"value": value}, {"leaf": np.arange(100) + value})


def value_of(stored: Stored) -> int:
    """The value of an object, whose leaf is intact."""
    assert stored.arrays["leaf"].tolist() == list(range(stored.body["value"], stored.body["value"] + 100))
    return stored.body["value"]


def opened(root: Path, **options: Any) -> Objects:
    return Objects(root, **{"secret": SECRET, "memory": 0} | options)


def file_of(objects: Objects, name: str) -> Path:
    return Path(objects.root, "data", objects.file_of(name))


def flip(path: Path, position: int = -100, bit: int = 0) -> None:
    """Flips a bit of a file, and leaves other links to it alone."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.unlink()
    path.write_bytes(content)


@contextlib.contextmanager
def locked_index(root: Any) -> Iterator[None]:
    """Locks a root's index as another process does: meanwhile queued puts wait."""
    with contextlib.closing(sqlite3.connect(f"{root}/index.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


def expires_of(store: ChunkStore) -> list[float | None]:
    return [expires for (expires,) in store.objects.index.rows("SELECT expires FROM objects ORDER BY name")]


def run(code: str, *arguments: str, timeout: float = 120) -> str:
    """Runs a program; returns what it prints, errors and warnings included."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    flags = ["-W", "default", "-W", "ignore:This process:DeprecationWarning"]
    command = [sys.executable, *flags, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(
        command, env=environment, check=False, stdout=-1, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    return done.stdout


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()
