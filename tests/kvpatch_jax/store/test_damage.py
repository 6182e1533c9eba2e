"""Headers made to mislead: a miss, or a whole chunk."""

import dataclasses
import functools
import json
import random
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_cases import few_bit_patch, ragged_patch
from store_cases import BACKBONE, chunk_of, file_of, patch_of

import kvpatch_jax as kvp
from kvpatch_jax.errors import StoreCorruptError
from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.format.header import DTYPES, PAGE

CHUNK = chunk_of(tokens=5)
PATCH = patch_of(CHUNK)
PACKED = kvp.encode_chunk(CHUNK, "k4v3")
FEW_BITS, RAGGED = few_bit_patch(PACKED, "int3"), ragged_patch(CHUNK, "int4", antecedent=("C",))


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "store", budget=Budget(host=0)) as store:
        yield store


@dataclasses.dataclass(frozen=True)
class Kept:
    """An object on the disk, its bytes as they should be, and how it is read."""

    path: Path
    raw: bytes
    read: Callable[[], object]


def shelf(store: ChunkStore) -> list[Kept]:
    """One object of each kind, with what reads it."""
    store.put(CHUNK)
    store.put(CHUNK, encoding="int8")
    store.put_encoder("B", BACKBONE, np.ones((3, 7), np.float32))
    store.put(PACKED)
    store.put_patches([PATCH, FEW_BITS, RAGGED])
    root = Path(store.disk.root)
    patch = root / store.names.patch(PATCH).path
    encoder = Path(store.disk.root) / store.names.encoder(BACKBONE, "B").path
    reads: list[tuple[Path, Callable[[], object]]] = [
        (file_of(store, CHUNK), lambda: store.get("B", BACKBONE)),
        (file_of(store, CHUNK), lambda: streamed(store, None)),
        (file_of(store, CHUNK, "int8"), lambda: store.get("B", BACKBONE, encoding="int8")),
        (file_of(store, CHUNK, "int8"), lambda: streamed(store, "int8")),
        (file_of(store, CHUNK, "k4v3"), lambda: store.get("B", BACKBONE, encoding="k4v3")),
        (file_of(store, CHUNK, "k4v3"), lambda: streamed(store, "k4v3")),
        *(
            (root / store.names.patch(one).path, functools.partial(found_patches, store, one))
            for one in (FEW_BITS, RAGGED)
        ),
        (patch, lambda: store.get_patches(PATCH.metadata) or None),
        (encoder, lambda: store.get_encoder("B", BACKBONE)),
    ]
    return [Kept(path, path.read_bytes(), read) for path, read in reads]


def found_patches(store: ChunkStore, patch: Any) -> object:
    return store.get_patches(patch.metadata) or None


def streamed(store: ChunkStore, encoding: Any) -> object:
    """All layers; None where there is no object, or one that turned out damaged on the way."""
    stream = store.stream("B", BACKBONE, encoding=encoding)
    if stream is None:
        return None
    try:
        return list(stream)
    except StoreCorruptError:
        return None


def damaged(raw: bytes, at: int, rng: random.Random) -> tuple[str, bytes]:
    """The bytes with something wrong at `at`, and what."""
    what = rng.choice(["flip", "byte", "zeros", "cut", "longer", "moved"])
    if what == "flip":
        return what, raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
    if what == "byte":
        return what, raw[:at] + bytes([raw[at] ^ rng.randrange(1, 256)]) + raw[at + 1 :]
    if what == "zeros":
        length = rng.choice([1, 64, 512, PAGE])
        return what, raw[:at] + bytes(len(raw[at : at + length])) + raw[at + length :]
    if what == "cut":
        return what, raw[:at]
    if what == "longer":
        return what, raw + rng.randbytes(1 + at % 5000)
    return what, raw[:at] + rng.randbytes(1) + raw[at:]


# ----------------------------------------------------------------------------------------------- hostile headers

SIZES = [-1, 0, 1, 5, 63, 2**31, 2**47, 2**48, 2**63, 2**64, 10**400, -(2**63), True, 1.5, 1e308]
VALUES: list[Any] = [
    *SIZES,
    None,
    "",
    "../../etc/passwd",
    "/",
    "a\0b",
    "\ud800",
    "F128",
    "F64",
    "BF16",
    "O",
    "x" * 10_000,
    [],
    {},
    [[]],
    [0, 0],
    [-64, 0],
    [0, 2**47, 2**47],
    [2**24, 2**24],
    [1] * 9,
    ["64"],
    [None],
    {"a": 1},
    list(range(1000)),
]


def places_of(tree: Any, way: tuple = ()) -> list[tuple]:
    """Every place in a tree of objects and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [way, *(place for key, value in items for place in places_of(value, (*way, key)))]


def replaced(tree: Any, way: tuple, value: Any) -> Any:
    """The tree with another value at one place."""
    if not way:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[way[0]] = replaced(tree[way[0]], way[1:], value)
    return copy


def sealed(tree: dict, payload: bytes) -> bytes:
    """A file with this header, its length and checksum right."""
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    raw = len(text).to_bytes(8, "little") + text
    if (at := raw.find(b'{"__metadata__":{"header_crc":"', 8)) == 8:
        at += 31
        blank = raw[:at] + b"0" * 8 + raw[at + 8 :]
        raw = raw[:at] + b"%08x" % zlib.crc32(blank) + raw[at + 8 :]
    return raw + payload


def forged(raw: bytes, rng: random.Random) -> bytes:
    """The object with one to three values of its header or its body exchanged, and all checksums made right."""
    end = 8 + int.from_bytes(raw[:8], "little")
    tree = json.loads(raw[8:end])
    body = json.loads(tree["__metadata__"]["body"])
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if rng.random() < 0.5:
            body = replaced(body, rng.choice(places_of(body)), rng.choice(VALUES))
            tree["__metadata__"]["body"] = json.dumps(body)
        else:
            way = rng.choice([place for place in places_of(tree) if place and place[-1] != "body"])
            tree = replaced(tree, way, rng.choice(VALUES))
        if not isinstance(tree.get("__metadata__"), dict) or "body" not in tree["__metadata__"]:
            break
    return sealed(tree, raw[end:])


def fits(found: Any) -> bool:
    """Whether what a forged object was read as is at least whole: nothing in it is larger than its file could hold."""
    arrays = found.kv.values() if hasattr(found, "kv") else [found]
    return all(np.asarray(array).nbytes < 1 << 20 and np.asarray(array).dtype in DTYPES.values() for array in arrays)


@pytest.mark.slow
def test_forged_headers_are_misses_or_whole_chunks(store: ChunkStore):
    """Whoever can write the directory can forge an object; it may not bring the reader down, nor make it allocate."""
    rng, kept = random.Random(1), shelf(store)[:6]
    refused, trials = 0, 100
    for _ in range(trials):
        each = rng.choice(kept)
        raw = forged(each.raw, rng)
        each.path.write_bytes(raw)
        tracemalloc.start()
        try:
            found = each.read()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        header = raw[: 8 + int.from_bytes(raw[:8], "little")].rstrip(b" ")[-3000:]
        assert peak < (8 << 20) + 40 * len(raw), header  # the type checker of the tests makes messages of its own
        assert found is None or isinstance(found, list) or fits(found), header
        refused += found is None
        each.path.write_bytes(each.raw)
    assert refused > trials // 2
