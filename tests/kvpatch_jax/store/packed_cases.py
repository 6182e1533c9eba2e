"""Chunks and patches in few bits, and a reader of their files that shares no code with the library."""

import json
from typing import Any

import jax
import numpy as np
from store_cases import chunk_of, patch_of, same

import kvpatch_jax as kvp
from kvpatch_jax.core import RaggedFactors
from kvpatch_jax.store.format.header import parse_header
from kvpatch_jax.store.format.objects import Leaves, arranged, take_leaves

WIDTHS = {"bytes": 8, "nibbles": 4, "pairs": 2, "bits": 1}


def encoded(word: str = "k4v4", seed: int = 0, **more: Any) -> kvp.Chunk:
    given: dict[str, Any] = {"tokens": 70} | more
    return kvp.encode_chunk(chunk_of(seed=seed, **given), word)


def same_leaves(first: Any, second: Any) -> bool:
    """Codes, scales and all that says how they are read, bit for bit."""
    one, other = jax.tree.flatten(first), jax.tree.flatten(second)
    return one[1] == other[1] and all(same(*pair) for pair in zip(one[0], other[0], strict=True))


def same_packed(found: kvp.Chunk | None, chunk: kvp.Chunk) -> bool:
    words = ("span", "length", "id", "layout", "backbone", "encoding", "content", "lead")
    return (
        found is not None
        and all(getattr(found, word) == getattr(chunk, word) for word in words)
        and same(found.local, np.asarray(chunk.local))
        and same_leaves(dict(found.kv), dict(chunk.kv))
        and same_leaves(dict(found.hidden or {}), dict(chunk.hidden or {}))
    )


def few_bit_patch(chunk: kvp.Chunk, dtype: str = "int4", **more: Any) -> kvp.Patch:
    given: dict[str, Any] = {"encoding": chunk.encoding, "lead": chunk.lead} | more
    return kvp.quantise(patch_of(chunk, **given), dtype)


def ragged_patch(chunk: kvp.Chunk, dtype: str | None = None, seed: int = 0, **more: Any) -> kvp.Patch:
    """Ranks 3, 0 and 1 of the three layers, in an order of their own."""
    rng = np.random.default_rng(seed)
    factors: dict[str, Any] = {}
    for channel in chunk.layout.channels:
        u = rng.standard_normal((4, chunk.tokens)).astype(np.float32)
        v = rng.standard_normal((4, channel.features)).astype(np.float32)
        rows = np.array([[2, 0, 3], [4, 4, 4], [1, 4, 4]], np.int32)
        factors[channel.name] = RaggedFactors(*map(jax.numpy.asarray, (u, v, rows)))
    given: dict[str, Any] = {"encoding": chunk.encoding, "lead": chunk.lead} | more
    patch = kvp.Patch(factors, patch_of(chunk, **given).metadata)
    return patch if dtype is None else kvp.quantise(patch, dtype)


def arranged_leaves(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Body and verified leaves of a file, arranged in one buffer as the store reads them."""
    header = parse_header(data[: 8 + int.from_bytes(data[:8], "little")], len(data))
    payload = np.frombuffer(data[header.start :], np.uint8)
    found = take_leaves(np.array(payload), header.start, header.leaves.values())
    places, room = arranged({name: leaf.nbytes for name, leaf in header.leaves.items()})
    buffer = np.zeros(room, np.uint8)
    for name, array in found.items():
        buffer[places[name] : places[name] + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    buffer.flags.writeable = False
    return dict(header.body), Leaves(buffer, places, header.leaves.values())


# ------------------------------------------------------------------------------------------------ another reader


def raw_leaves(data: bytes) -> tuple[dict[str, Any], dict[str, tuple[str, list[int], bytes]]]:
    """Body and leaves (dtype, shape, bytes) of a file, by the safetensors format alone."""
    end = 8 + int.from_bytes(data[:8], "little")
    tree = json.loads(data[8:end])
    body = json.loads(tree.pop("__metadata__")["body"])
    leaves = {}
    for name, entry in tree.items():
        first, last = entry["data_offsets"]
        leaves[name] = (entry["dtype"], entry["shape"], data[end + first : end + last])
    return body, leaves


def numbers_in(leaves: dict[str, tuple[str, list[int], bytes]], leaf: str, bits: int, group: int, axis: int, columns):
    """Decodes a packed matrix, float64 [rows, columns], byte by byte."""
    present = {name: width for name, width in WIDTHS.items() if f"{leaf}.{name}" in leaves}
    assert sum(present.values()) == bits
    rows = leaves[f"{leaf}.{next(iter(present))}"][1][0]
    codes = np.zeros((rows, columns), np.int64)
    above = bits
    for name, width in sorted(present.items(), key=lambda item: -item[1]):
        dtype, shape, raw = leaves[f"{leaf}.{name}"]
        assert (dtype, len(raw)) == ("U8", shape[0] * shape[1])
        above -= width
        for row in range(rows):
            for column in range(columns):
                # Byte j has the codes of columns j, j + n, j + 2n, …
                place, byte = divmod(column, shape[1])
                code = raw[row * shape[1] + byte] >> (width * place) & (1 << width) - 1
                codes[row, column] |= code << above

    def spread(name: str) -> np.ndarray:
        dtype, shape, raw = leaves[f"{leaf}.{name}"]
        assert (dtype, len(raw)) == ("BF16", 2 * shape[0] * shape[1])
        # A bfloat16 is the upper half of a float32; the file's are little-endian.
        words = np.array([raw[at] | raw[at + 1] << 8 for at in range(0, len(raw), 2)], np.uint32)
        values = (words << np.uint32(16)).view(np.float32).reshape(shape).astype(np.float64)
        return np.repeat(values, group, axis=axis)[:rows, :columns]

    if f"{leaf}.least" in leaves:
        return spread("least") + spread("scale") * codes
    return spread("scale") * (codes - 2 ** (bits - 1))
