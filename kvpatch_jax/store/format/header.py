"""The header of an object: what is written before the data, and the strict reading of it.

A file is a safetensors file: 8 bytes of header length, JSON, spaces up to a multiple of 4096 bytes, then the leaves
without gaps (tensors called `pad.<n>` fill a leaf up to 64 bytes). The first entry of the metadata is a checksum of the
whole header, at a fixed place, checked before any JSON is parsed. Nothing in a header is believed before it agrees with
the size of the file, and nothing is allocated from it before that.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ...errors import DtypeError, InputError, StoreCorruptError
from ...utils import strict_json
from .compatibility import expect_known

try:
    from zlib_ng import zlib_ng as _zlib  # the same sums, several times as fast
except ImportError:
    import zlib as _zlib

crc32 = _zlib.crc32
"""zlib's checksum of any bytes."""

VERSION = "1"
PAGE = 4096
ALIGNMENT = 64
LARGEST_HEADER = 1 << 22
"""Bytes. A longer header is refused unread."""

MALFORMED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What Python raises of a description that is not what ours are: texts for numbers, numbers that no array has, …"""

LARGEST_ARRAY = 1 << 56
"""Elements. More are refused, whatever the file's size."""

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_OPENING = b'{"__metadata__":{"header_crc":"'
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+){0,4}")
_CRC = re.compile("[0-9a-f]{8}")
_METADATA = ("header_crc", "version", "name", "kind", "expires", "crc", "body")
_KINDS = ("kv", "patch", "encoder", "entry")
_ENTRY = ("dtype", "shape", "data_offsets")
_DEPTH = 12


class Leaf(NamedTuple):
    """One array in a file. `offset` is in bytes from the file's start; `crc` is zlib's crc32 of its bytes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc: int


@dataclasses.dataclass(frozen=True)
class Header:
    """A parsed header.

    Attributes:
      name: its file's name.
      kind: "kv", "patch", "encoder" or "entry".
      expires: seconds since the epoch, or None.
      body: what the codec needs to build the object again.
      leaves: in the order of the file, padding left out.
      start: bytes before the first leaf. size: bytes of the file.
      crc: checksum of all before the first leaf, where the checksums of the leaves are: it tells versions apart.
    """

    name: str
    kind: str
    expires: float | None
    body: Mapping[str, Any] = dataclasses.field(repr=False)  # ids are in it
    leaves: Mapping[str, Leaf]
    start: int
    size: int
    crc: bytes = b""


def dtype_word(dtype: np.dtype) -> str:
    """Returns safetensors' word for a dtype.

    Raises:
      DtypeError: a dtype that objects do not hold.
    """
    if dtype not in _WORDS:
        raise DtypeError(f"store: dtype {dtype}; expected one of {', '.join(str(known) for known in _WORDS)}")
    return _WORDS[dtype]


def make_header(
    name: str,
    kind: str,
    expires: float | None,
    body: Mapping[str, Any],
    specs: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    crcs: Mapping[str, int] | None = None,
) -> tuple[bytes, Header]:
    """Makes a header: its bytes and what they say. Their length does not depend on `crcs`, which may come later.

    Args:
      specs: dtype and shape of every leaf, in order.
      crcs: checksum of every leaf; zeros where None.

    Raises:
      InputError: leaves or a body that a header does not hold. DtypeError: a dtype likewise.
    """
    crcs = dict.fromkeys(specs, 0) if crcs is None else crcs
    entries: dict[str, Any] = {}
    placed: list[tuple[str, np.dtype, tuple[int, ...], int, int]] = []
    offset = 0
    for leaf, (dtype, shape) in specs.items():
        if len(leaf) > 80 or not _NAME.fullmatch(leaf) or leaf.startswith("pad.") or len(shape) > 8:
            raise InputError(f"store: leaf {leaf!r} of shape {shape}; expected small words with dots, 8 axes at most")
        nbytes = math.prod(shape) * dtype.itemsize
        entries[leaf] = _entry(dtype, shape, offset, nbytes)
        placed.append((leaf, dtype, shape, offset, nbytes))
        offset += nbytes
        if gap := -offset % ALIGNMENT:
            # safetensors allows no gaps between tensors, so padding is a tensor too.
            entries[f"pad.{len(placed)}"] = _entry(np.dtype(np.uint8), (gap,), offset, gap)
            offset += gap

    metadata = {
        "header_crc": "0" * 8,
        "version": VERSION,
        "name": name,
        "kind": kind,
        "expires": "" if expires is None else repr(float(expires)),
        "crc": " ".join(f"{leaf}={crcs[leaf]:08x}" for leaf in specs),
        "body": json.dumps(body, separators=(",", ":")),
    }

    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    raw = len(text).to_bytes(8, "little") + text
    if len(raw) > LARGEST_HEADER:
        raise InputError(f"store: a header of {len(raw)} bytes; expected at most {LARGEST_HEADER} (fewer leaves)")
    raw = _stamped(raw)
    start = len(raw)
    leaves = {leaf: Leaf(leaf, dtype, shape, start + at, n, crcs[leaf]) for leaf, dtype, shape, at, n in placed}
    return raw, Header(name, kind, expires, body, leaves, start, start + offset, opening_crc(raw))


def _entry(dtype: np.dtype, shape: tuple[int, ...], offset: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": dtype_word(dtype), "shape": list(shape), "data_offsets": [offset, offset + nbytes]}


def _stamped(raw: bytes) -> bytes:
    at = 8 + len(_OPENING)
    return b"".join((raw[:at], b"%08x" % crc32(raw), raw[at + 8 :]))


def header_length(opening: bytes, size: int | None) -> int:
    """Reads the length of a header from a file's first 8 bytes and its size; None where that is not known.

    Raises:
      StoreCorruptError: a length that does not fit the file, or that no header of ours has.
    """
    length = 8 + int.from_bytes(opening[:8], "little")
    most = LARGEST_HEADER if size is None else min(size, LARGEST_HEADER)
    if len(opening) < 8 or length > most or length % PAGE:
        raise StoreCorruptError(
            f"object: header of {length} bytes in a file of {size}; expected a multiple of {PAGE} up to {most}"
        )
    return length


def parse_header(raw: bytes, size: int | None) -> Header:
    """Reads a header strictly. `raw`: exactly the bytes before the data. `size`: bytes of the file; None where that is
    not known, and the header's own word for it has to do, until the leaves are read.

    Raises:
      StoreVersionError: a later version wrote it. StoreCorruptError: anything else that `make_header` would not have
        written.
    """
    if header_length(raw[:8], size) != len(raw):
        raise StoreCorruptError(f"object: {len(raw)} bytes of header; expected what its length says")
    crc = _check_crc(raw)
    tree = _json(raw[8:], "header")
    metadata = tree.pop("__metadata__")
    # The checksum agreed, so what is unknown here is no damage.
    expect_known("version", [metadata.get("version")], (VERSION,))
    expect_known("metadata", metadata, _METADATA)
    if tuple(metadata) != _METADATA or not all(isinstance(value, str) for value in metadata.values()):
        raise StoreCorruptError(f"object: metadata {str(list(metadata))[:200]}; expected texts called {_METADATA}")
    expect_known("kind", [metadata["kind"]], _KINDS)
    leaves, size = _leaves(tree, _crcs(metadata["crc"]), len(raw), size)
    body = _json(metadata["body"], "body")
    check_depth(body, _DEPTH)
    return Header(metadata["name"], metadata["kind"], _time(metadata["expires"]), body, leaves, len(raw), size, crc)


OPENING_BYTES = 8 + len(_OPENING) + 8
"""Bytes of a file up to and with its header's checksum."""


def opening_crc(opening: bytes) -> bytes:
    """Reads a header's checksum from a file's first `OPENING_BYTES` bytes, unverified."""
    return opening[OPENING_BYTES - 8 : OPENING_BYTES]


def _check_crc(raw: bytes) -> bytes:
    at = 8 + len(_OPENING)
    if raw[8:at] != _OPENING:
        raise StoreCorruptError(f"object: opens with bytes of sum {crc32(raw[8:at]):08x}; expected {_OPENING!r}")
    found, blank = raw[at : at + 8], b"".join((raw[:at], b"0" * 8, raw[at + 8 :]))
    if found != (computed := b"%08x" % crc32(blank)):
        raise StoreCorruptError(f"object: header checksum {found!r}; expected {computed!r}, that of the bytes")
    return found


def _json(text: bytes | str, what: str) -> dict[str, Any]:
    """Parses a JSON object without repeated keys. The decoder itself refuses what would exhaust its stack."""
    try:
        value = strict_json.loads(text)
    except ValueError as error:
        raise StoreCorruptError(f"object: {what} is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise StoreCorruptError(f"object: {what} is {type(value).__name__}; expected an object")
    return value


def check_depth(value: Any, left: int) -> None:
    """Refuses values that are nested too deeply, before anything walks through them. Raises StoreCorruptError."""
    if not left:
        raise StoreCorruptError(f"object: body nested deeper than {_DEPTH}; expected at most that")
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            check_depth(inner, left - 1)


def _time(text: str) -> float | None:
    try:
        value = None if text == "" else float(text)
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise StoreCorruptError(f"object: expires {text[:40]!r}; expected seconds")
    return value


def _crcs(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(" ")] if text else []
    if not all(_CRC.fullmatch(crc) for _, _, crc in pairs):
        raise StoreCorruptError(f"object: checksums {text[:60]!r}; expected name=8 hexadecimal digits")
    return {name: int(crc, 16) for name, _, crc in pairs}


def _leaves(tree: dict[str, Any], crcs: dict[str, int], start: int, size: int | None) -> tuple[dict[str, Leaf], int]:
    """Parses the leaves. Also returns where the last of them ends."""
    leaves: dict[str, Leaf] = {}
    forms: dict[Any, _Form] = {}  # layers are alike: each form is worked out once
    offset = start
    for name, entry in tree.items():
        dtype, shape, nbytes = _checked(name, entry, offset - start, forms)
        if not name.startswith("pad."):
            leaves[name] = Leaf(name, dtype, shape, offset, nbytes, crcs.get(name, -1))
        elif dtype != np.uint8 or nbytes >= ALIGNMENT:
            raise StoreCorruptError(f"object: {name} of {nbytes} bytes {dtype}; expected uint8 below {ALIGNMENT}")
        offset += nbytes
        if size is not None and offset > size:
            raise StoreCorruptError(f"object: leaf {name} ends at {offset}; expected at most {size}")
    if size not in (None, offset) or list(crcs) != list(leaves):
        raise StoreCorruptError(f"object: {len(crcs)} checksums, {offset} bytes; expected {len(leaves)} and {size}")
    return leaves, offset


type _Form = tuple[np.dtype, tuple[int, ...], int]
"""Dtype, shape, bytes."""


def _checked(name: str, entry: Any, offset: int, forms: dict[Any, _Form]) -> _Form:
    """Parses one leaf, which begins at `offset` of the data. Errors print nothing whole: it may be nested deeply."""
    if len(name) > 80 or not _NAME.fullmatch(name):
        raise StoreCorruptError(f"object: leaf {name[:80]!r}; expected words with dots between")
    if not isinstance(entry, dict) or tuple(entry) != _ENTRY:
        raise StoreCorruptError(f"object: leaf {name}: {type(entry).__name__}; expected dtype, shape, data_offsets")
    word, shape, offsets = entry.values()
    try:
        key = (word, tuple(shape), tuple(map(type, shape)))  # the types too: 1, 1.0 and true are equal
        form = forms.get(key)
    except TypeError:
        form = key = None  # which no dtype and shape are: `_form` refuses it
    if form is None:
        form = forms[key] = _form(name, word, shape)
    if offsets != [offset, offset + form[2]] or set(map(type, offsets)) != {int}:
        raise StoreCorruptError(f"object: leaf {name}: other offsets; expected {[offset, offset + form[2]]}")
    return form


def _form(name: str, word: Any, shape: Any) -> _Form:
    expect_known(f"leaf {name} of dtype", [word], DTYPES)
    if not isinstance(word, str):
        raise StoreCorruptError(f"object: leaf {name}: dtype {_short(word)}; expected one of {tuple(DTYPES)}")
    if not _naturals(shape) or len(shape) > 8:
        raise StoreCorruptError(f"object: leaf {name}: shape {_short(shape)}; expected at most 8 sizes")
    if math.prod(size or 1 for size in shape) > LARGEST_ARRAY:  # NumPy counts so where one of the sizes is zero
        raise StoreCorruptError(f"object: leaf {name}: shape {shape}; expected sizes that an array can have")
    return DTYPES[word], tuple(shape), math.prod(shape) * DTYPES[word].itemsize


def _short(value: Any) -> str:
    """Prints a value for an error; of what may be nested deeply, only the type."""
    plain = (str, int, float)
    flat = isinstance(value, plain) or (isinstance(value, list) and all(isinstance(item, plain) for item in value))
    return repr(value)[:60] if flat else type(value).__name__


def _naturals(values: Any) -> bool:
    plain = isinstance(values, list) and set(map(type, values)) <= {int}
    return plain and (not values or (min(values) >= 0 and max(values) < 1 << 48))
