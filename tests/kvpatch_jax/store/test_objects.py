"""The file format: round trips bit for bit, plain safetensors reads it, hostile headers are refused."""
# pyright: reportArgumentType=false

import json
import resource
import tracemalloc
import zlib
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from store_cases import AXES, LAYOUT, MLA, chunk_of, patch_of, same, same_chunk

from kvpatch_jax.core import Quantised, ops
from kvpatch_jax.errors import StoreCorruptError
from kvpatch_jax.store.format.buffers import Buffers
from kvpatch_jax.store.format.codec import chunk_blob, decode, encode
from kvpatch_jax.store.format.codec import chunk_of as decoded
from kvpatch_jax.store.format.header import PAGE, header_length, make_header, parse_header
from kvpatch_jax.store.format.objects import blob_bytes, file_size, take_leaves
from kvpatch_jax.store.format.patch_codec import patch_blob, patch_parts
from kvpatch_jax.store.format.patch_codec import patch_of as patch_back

NAME = "a.kv.safetensors"
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def read(data: bytes):
    header = parse_header(data[: 8 + int.from_bytes(data[:8], "little")], len(data))
    payload = np.frombuffer(bytearray(data[header.start :]), np.uint8)
    return header, take_leaves(payload, header.start, header.leaves.values())


@pytest.mark.parametrize("layout", [LAYOUT, MLA, AXES], ids=["gqa", "mla", "axes"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_come_back_bit_for_bit(layout, dtype):
    chunk = chunk_of(layout=layout, dtype=dtype, hidden={1: np.ones((9, 5), np.float32)})
    header, arrays = read(blob_bytes(chunk_blob(chunk), NAME))
    found = decoded(header.body, arrays)
    assert same_chunk(found, chunk)
    assert found.hidden is not None
    assert same(found.hidden[1], np.ones((9, 5), np.float32))
    assert not any(array.flags.writeable for array in arrays.values())


@pytest.mark.parametrize("encoding", ["int8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_smaller_encodings_keep_their_codes_bit_for_bit(encoding):
    kv = {name: np.array(value) for name, value in chunk_of(seed=3).kv.items()}
    kv["k"][:, :, :, 0] *= 1000
    chunk = chunk_of(seed=3, kv=kv)
    header, arrays = read(blob_bytes(chunk_blob(chunk, encoding), NAME))
    found = decoded(header.body, arrays)
    for name, value in chunk.kv.items():
        for layer in range(3):
            codes, scale = encode(np.asarray(value[layer]), encoding)
            assert same(arrays[f"layer.{layer}.{name}"], codes)
            assert same(found.kv[name][layer], decode(codes, scale, np.dtype(np.float32)))
    bar = {"int8": 1 / 250, "float8_e4m3fn": 1 / 15, "float8_e5m2": 1 / 7, "bfloat16": 1 / 250, "float16": 1 / 2000}
    error = np.abs(found.kv["k"] - chunk.kv["k"]).max((0, 1))
    assert (error <= bar[encoding] * np.abs(np.asarray(chunk.kv["k"])).max((0, 1))).all()


@pytest.mark.parametrize("form", ["thin", "int8", "dense"])
def test_patches_come_back_bit_for_bit(form):
    patch = patch_of(chunk_of())
    if form == "int8":
        quantised = {
            n: tuple(ops.stored(jnp.asarray(leaf), "int8", -1) for leaf in f) for n, f in patch.factors.items()
        }
        patch = type(patch)(quantised, patch.metadata)  # pyright: ignore[reportArgumentType]
    if form == "dense":
        patch = type(patch)({"k": jnp.ones((3, 9, 2, 16))}, patch.metadata)  # pyright: ignore
    blob = patch_blob(patch)
    header, arrays = read(blob_bytes(blob, NAME))
    found = patch_back(patch_parts(header.body, arrays))
    assert found.metadata == patch.metadata
    assert found.ranks == patch.ranks
    assert found.nbytes == patch.nbytes == blob.nbytes
    for name, factors in patch.factors.items():
        pairs = zip(factors, found.factors[name], strict=True) if form != "dense" else [(factors, found.factors[name])]
        for first, second in pairs:
            assert isinstance(first, Quantised) == isinstance(second, Quantised)
            parts = zip(first, second, strict=True) if isinstance(first, Quantised) else [(first, second)]
            assert all(same(one, other) for one, other in parts)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_plain_safetensors_reads_it(dtype, tmp_path: Path):
    chunk = chunk_of(dtype=dtype, tokens=7)
    blob = chunk_blob(chunk)
    (tmp_path / NAME).write_bytes(blob_bytes(blob, NAME))
    found = load_file(tmp_path / NAME)
    assert (tmp_path / NAME).stat().st_size == file_size(blob, NAME)
    for layer in range(3):
        assert same(found[f"layer.{layer}.k"], chunk.kv["k"][layer])


def test_layers_lie_together_and_aligned():
    header, _ = read(blob_bytes(chunk_blob(chunk_of(tokens=7, dtype=np.float16)), NAME))
    order = [name for name in header.leaves if name.startswith("layer.")]
    assert order == [f"layer.{layer}.{name}" for layer in range(3) for name in "kv"]
    assert header.start % PAGE == 0
    assert all(leaf.offset % 64 == 0 for leaf in header.leaves.values())


def test_a_whole_read_stacks_without_copying():
    blob = blob_bytes(chunk_blob(chunk_of()), NAME)
    header = parse_header(blob[: 8 + int.from_bytes(blob[:8], "little")], len(blob))
    buffers = Buffers()
    data = buffers.lease(header.size - header.start)
    data[:] = np.frombuffer(blob[header.start :], np.uint8)
    first, last = data.ctypes.data, data.ctypes.data + data.nbytes
    arrays = take_leaves(data, header.start, header.leaves.values())
    found = decoded(header.body, arrays)
    del data, arrays
    assert all(first <= np.asarray(value).ctypes.data < last for value in found.kv.values())
    assert buffers.idle_bytes == 0
    part = jnp.asarray(found.kv["k"])[0, 0, 0, 0]
    del found
    assert buffers.idle_bytes > 0
    assert np.isfinite(float(part))


# ------------------------------------------------------------------------------------------------- hostile headers


def forged(text: str, payload: int, length: int | None = None) -> bytes:
    """A file whose header checksum is right, whatever its text says."""
    raw = text.encode()
    raw += b" " * (-(8 + len(raw)) % PAGE)
    raw = (len(raw) if length is None else length).to_bytes(8, "little") + raw
    at = raw.find(b"00000000", 8)
    if 0 < at < 60:
        raw = raw[:at] + b"%08x" % zlib.crc32(raw) + raw[at + 8 :]
    return raw + bytes(payload)


def header_text(entries: str, crc: str = "a=00000000", body: str = "{}", **changes: str) -> str:
    metadata = {"header_crc": "0" * 8, "version": "3", "name": NAME, "kind": "kv", "revision": "7"}
    metadata |= {"expires": "", "crc": crc, "body": body} | changes
    return '{"__metadata__":' + json.dumps(metadata, separators=(",", ":")) + entries + "}"


def entry(dtype: str = "F32", shape: object = (16,), offsets: object = (0, 64)) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


HOSTILE = {
    "huge length": forged(header_text(""), 0, length=2**63),
    "empty": b"",
    "huge shape": forged(header_text(f',"a":{entry(shape=(2**40, 2**40))}'), 64),
    "negative offset": forged(header_text(f',"a":{entry(offsets=(-64, 0))}'), 64),
    "truth for a number": forged(header_text(f',"a":{entry(shape=(True,), offsets=(0, 4))}'), 4),
    "overlap": forged(header_text(f',"a":{entry()},"b":{entry()}', "a=00000000 b=00000000"), 64),
    "gap": forged(header_text(f',"a":{entry(offsets=(64, 128))}'), 128),
    "data missing": forged(header_text(f',"a":{entry()}'), 32),
    "deep": forged(header_text(f',"a":{"[" * 100_000}{"]" * 100_000}'), 64),
    "path": forged(header_text(f',"../../etc/passwd":{entry()}', "../../etc/passwd=00000000"), 64),
    "dtype": forged(header_text(f',"a":{entry("F128")}'), 64),
    "twice": forged(header_text(f',"a":{entry()},"a":{entry()}'), 64),
    "not JSON": forged(header_text(',"a":{'), 64),
    "checksum missing": forged(header_text(f',"a":{entry()}', ""), 64),
    "number as a version": forged(header_text(f',"a":{entry()}').replace('"version":"3"', '"version":3'), 64),
    "revision beyond 63 bits": forged(header_text(f',"a":{entry()}', revision=str(1 << 63)), 64),
    "expires": forged(header_text(f',"a":{entry()}', expires="nan"), 64),
    "extra metadata": forged(header_text(f',"a":{entry()}', more="x"), 64),
}


def test_the_forger_can_make_a_header_that_passes():
    for text in (
        header_text(f',"a":{entry()}'),
        header_text(f',"a":{entry()}', revision=str((1 << 63) - 1)),
    ):
        assert list(parse_header(forged(text, 0), PAGE + 64).leaves) == ["a"]
    assert parse_header(forged(header_text(f',"a":{entry()}'), 0), PAGE + 64).revision == 7


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers_are_refused_without_allocation(what: str):
    data = HOSTILE[what]
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with pytest.raises(StoreCorruptError, match=r"expected|not JSON"):
            parse_header(data[: header_length(data[:8], len(data))], len(data))
        assert tracemalloc.get_traced_memory()[1] < (4 << 20) + 40 * len(data)
    finally:
        tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 2**64 - 1))
def test_noise_is_no_header(noise: bytes, at: int, length: int):
    raw, _ = make_header(NAME, "kv", None, {}, {"a": (np.dtype(np.float32), (4,))})
    data = bytearray(raw)
    data[at : at + len(noise)] = noise
    changed = bytes(data) != raw
    assert not changed or _refused(bytes(data), len(data) + 64)
    assert length == len(raw) - 8 or _refused(length.to_bytes(8, "little") + raw[8:], len(raw) + 64)


def _refused(raw: bytes, size: int) -> bool:
    try:
        parse_header(raw, size)
    except StoreCorruptError:
        return True
    return False
