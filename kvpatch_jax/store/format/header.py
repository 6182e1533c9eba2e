"""Header of an object's file: its construction and strict parsing.

An object is a safetensors file: 8 bytes of header length, JSON, spaces up to a multiple of 4096 bytes, then the leaves
without gaps (tensors called `pad.<n>` fill a leaf up to 64 bytes). The first entry of the metadata is a checksum of the
whole header at a fixed offset, verified before any JSON is parsed. A header has to agree with the size of the file
before anything is allocated from it.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ...errors import DtypeError, InputError, StoreCorruptError, StoreVersionError
from ...utils import strict_json

try:
    from zlib_ng import zlib_ng as _zlib  # the same sums, several times as fast
except ImportError:
    import zlib as _zlib

crc32 = _zlib.crc32
"""zlib's checksum of any bytes."""

VERSION = "3"
"""Version of the format. Objects of another one are misses, and stay."""
PAGE = 4096
ALIGNMENT = 64
LARGEST_HEADER = 1 << 22
"""Limit in bytes; a longer header is refused before it is read."""

MALFORMED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""Exceptions that malformed metadata causes in Python: strings for numbers, sizes that no array can have, …"""

LARGEST_REVISION = (1 << 63) - 1
"""Limit of revisions, which databases hold as signed integers."""

LARGEST_ARRAY = 1 << 56
"""Limit in elements, whatever the file's size."""

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
_METADATA_OPENING = b'{"header_crc":"'
_OPENING = b'{"__metadata__":' + _METADATA_OPENING
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+){0,4}")
_CRC = re.compile("[0-9a-f]{8}")
_METADATA = ("header_crc", "version", "name", "kind", "revision", "expires", "crc", "body")
_NUMBER = re.compile("0|[1-9][0-9]{0,19}")
_KINDS = ("kv", "patch", "encoder", "entry")
_ENTRY = ("dtype", "shape", "data_offsets")
_DEPTH = 12
_LARGEST_KNOWN, _MOST_DESCRIBED = 64 << 10, 1 << 10  # characters of leaves' entries, leaves that are remembered


class Leaf(NamedTuple):
    """An array in a file: `offset` in bytes from the file's start, `crc` the crc32 of its bytes."""

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
      name: name of the file.
      kind: "kv", "patch", "encoder" or "entry".
      expires: seconds since the epoch, or None.
      body: the codec's description of the object.
      leaves: leaves in the order of the file, without padding.
      start: bytes before the first leaf.
      size: bytes of the file.
      crc: checksum of everything before the first leaf. It covers the leaves' checksums, so it identifies a version.
      revision: revision of the name, of which every write has a larger one (`revisions`); 0: none.
      memo: what readers of objects keep about all of this form: leaves of the same names, dtypes and shapes.
    """

    name: str
    kind: str
    expires: float | None
    body: Mapping[str, Any] = dataclasses.field(repr=False)  # ids are in it
    leaves: Mapping[str, Leaf]
    start: int
    size: int
    crc: bytes = b""
    revision: int = 0
    memo: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)


def dtype_word(dtype: np.dtype) -> str:
    """Returns safetensors' word for a dtype.

    Raises:
      DtypeError: objects cannot hold the dtype.
    """
    if dtype not in _WORDS:
        raise DtypeError(f"store: got dtype {dtype}; expected one of {', '.join(str(known) for known in _WORDS)}")
    return _WORDS[dtype]


def make_header(
    name: str,
    kind: str,
    expires: float | None,
    body: Mapping[str, Any],
    specs: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    crcs: Mapping[str, int] | None = None,
    revision: int = 0,
) -> tuple[bytes, Header]:
    """Returns the bytes of a header, and the header parsed. The number of bytes does not depend on `crcs`.

    Args:
      specs: dtype and shape of every leaf, in order.
      crcs: checksum of every leaf; None: zeros, to learn the length before the checksums are known.

    Raises:
      InputError: a leaf's name or shape is not allowed, or the header would be too large.
      DtypeError: objects cannot hold a leaf's dtype.
    """
    crcs = dict.fromkeys(specs, 0) if crcs is None else crcs
    describe = _described if len(specs) <= _MOST_DESCRIBED else _described.__wrapped__
    entries, placed, offset = describe(tuple(specs.items()))
    metadata = {
        "header_crc": "0" * 8,
        "version": VERSION,
        "name": name,
        "kind": kind,
        "revision": str(revision),
        "expires": "" if expires is None else repr(float(expires)),
        "crc": " ".join([f"{leaf}={crcs[leaf]:08x}" for leaf in specs]),
        "body": json.dumps(body, separators=(",", ":")),
    }

    text = f'{{"__metadata__":{json.dumps(metadata, separators=(",", ":"))}{entries}'.encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    raw = len(text).to_bytes(8, "little") + text
    if len(raw) > LARGEST_HEADER:
        raise InputError(f"store: got a header of {len(raw)} bytes; expected at most {LARGEST_HEADER} (fewer leaves)")

    # The checksum is computed with its own digits at zero, and then put in their place.
    at = 8 + len(_OPENING)
    raw = b"".join((raw[:at], b"%08x" % crc32(raw), raw[at + 8 :]))
    start = len(raw)
    leaves = {leaf: Leaf(leaf, dtype, shape, start + at, n, crcs[leaf]) for leaf, dtype, shape, at, n in placed}
    return raw, Header(name, kind, expires, body, leaves, start, start + offset, opening_crc(raw), revision)


type _Placed = tuple[str, np.dtype, tuple[int, ...], int, int]
"""A leaf: name, dtype, shape, offset from the first, bytes."""


@functools.lru_cache(64)
def _described(specs: tuple[tuple[str, tuple[np.dtype, tuple[int, ...]]], ...]) -> tuple[str, list[_Placed], int]:
    """Returns the text of a header behind its metadata, the leaves, and where the last ends. Raises as `make_header`.

    The objects of a model are alike, so the last answers are remembered.
    """
    entries: dict[str, Any] = {}
    placed: list[_Placed] = []
    offset = 0
    for leaf, (dtype, shape) in specs:
        if len(leaf) > 80 or not _NAME.fullmatch(leaf) or leaf.startswith("pad.") or len(shape) > 8:
            raise InputError(
                f"store: got leaf {leaf!r} of shape {shape}; expected small words with dots, 8 axes at most"
            )
        nbytes = math.prod(shape) * dtype.itemsize
        entries[leaf] = _entry(dtype, shape, offset, nbytes)
        placed.append((leaf, dtype, shape, offset, nbytes))
        offset += nbytes
        if gap := -offset % ALIGNMENT:
            # safetensors allows no gaps between tensors, so padding is a tensor too.
            entries[f"pad.{len(placed)}"] = _entry(np.dtype(np.uint8), (gap,), offset, gap)
            offset += gap
    text = json.dumps(entries, separators=(",", ":"))[1:]
    return f",{text}" if entries else text, placed, offset


def _entry(dtype: np.dtype, shape: tuple[int, ...], offset: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": dtype_word(dtype), "shape": list(shape), "data_offsets": [offset, offset + nbytes]}


def header_length(opening: bytes, size: int | None) -> int:
    """Returns the length of a header, from a file's first 8 bytes and its size (None: not known).

    Raises:
      StoreCorruptError: the length does not fit the file, or is not allowed.
    """
    length = 8 + int.from_bytes(opening[:8], "little")
    limit = LARGEST_HEADER if size is None else min(size, LARGEST_HEADER)
    if len(opening) < 8 or length > limit or length % PAGE:
        raise StoreCorruptError(
            f"object: got a header of {length} bytes in a file of {size}; expected a multiple of {PAGE} up to {limit}"
        )
    return length


def parse_header(raw: bytes, size: int | None) -> Header:
    """Parses a header strictly.

    Args:
      raw: exactly the bytes before the data.
      size: bytes of the file; None if unknown: then the header's own word counts until the leaves are read.

    Raises:
      StoreVersionError: it is of another version of the format.
      StoreCorruptError: `make_header` cannot have written it.
    """
    if header_length(raw, size) != len(raw):
        raise StoreCorruptError(f"object: got {len(raw)} bytes of header; expected the length that it states")

    # The checksum comes first: another version in a header with the right one is not damage.
    at = 8 + len(_OPENING)
    if raw[8:at] != _OPENING:
        raise StoreCorruptError(f"object: got an opening of checksum {crc32(raw[8:at]):08x}; expected {_OPENING!r}")
    crc = raw[at : at + 8]
    computed = b"%08x" % crc32(b"".join((raw[:at], b"0" * 8, raw[at + 8 :])))
    if crc != computed:
        raise StoreCorruptError(f"object: got header checksum {crc!r}; expected {computed!r}, computed from the bytes")

    # The entries of the leaves are the same text in all objects of one form, so they are parsed apart.
    try:
        text = raw[8:].decode("utf-8")
        value, end = strict_json.first_value(text, len(_OPENING) - len(_METADATA_OPENING))
    except ValueError as error:
        raise StoreCorruptError(f"object: got a header that is not JSON: {str(error)[:200]}; expected JSON") from error
    metadata = _checked_metadata(value)
    revision = int(metadata["revision"])

    entries = text[end:].rstrip(" ")
    parse = _parse_leaves if len(entries) <= _LARGEST_KNOWN else _parse_leaves.__wrapped__
    forms, end, memo = parse(entries)
    leaves, size = _placed_leaves(forms, end, metadata["crc"], len(raw), size)
    body = _parse_json(metadata["body"], "body")
    if metadata["body"].count("{") + metadata["body"].count("[") > _DEPTH:  # otherwise it cannot be nested deeper
        check_depth(body, _DEPTH)

    text, expires = metadata["expires"], None
    if text:
        try:
            expires = float(text)
        except ValueError:
            expires = math.nan
        if not math.isfinite(expires):
            raise StoreCorruptError(f"object: got expires {text[:40]!r}; expected seconds since the epoch")
    return Header(metadata["name"], metadata["kind"], expires, body, leaves, len(raw), size, crc, revision, memo)


def _checked_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a header, checked."""
    version = metadata.get("version")
    if version != VERSION and isinstance(version, str):
        raise StoreVersionError(f"object: got format version {version[:60]!r}; expected {VERSION!r}")
    if tuple(metadata) != _METADATA or not set(map(type, metadata.values())) == {str}:
        raise StoreCorruptError(f"object: got metadata {str(list(metadata))[:200]}; expected strings named {_METADATA}")
    if metadata["kind"] not in _KINDS:
        raise StoreCorruptError(f"object: got kind {metadata['kind'][:60]!r}; expected one of {_KINDS}")
    revision = metadata["revision"]
    if not _NUMBER.fullmatch(revision) or int(revision) > LARGEST_REVISION:
        raise StoreCorruptError(f"object: got revision {revision[:40]!r}; expected at most 2^63 - 1")
    return metadata


OPENING_BYTES = 8 + len(_OPENING) + 8
"""Bytes of a file up to the end of its header's checksum."""


def opening_crc(opening: bytes) -> bytes:
    """Returns a header's checksum from a file's first `OPENING_BYTES` bytes, unverified."""
    return opening[OPENING_BYTES - 8 : OPENING_BYTES]


def _parse_json(text: bytes | str, what: str) -> dict[str, Any]:
    """Parses a JSON object without repeated keys. The decoder itself refuses nesting that would exhaust its stack."""
    try:
        value = strict_json.loads(text)
    except ValueError as error:
        raise StoreCorruptError(f"object: got a {what} that is not JSON: {str(error)[:200]}; expected JSON") from error
    if not isinstance(value, dict):
        raise StoreCorruptError(f"object: got a {what} of type {type(value).__name__}; expected an object")
    return value


def check_depth(value: Any, left: int) -> None:
    """Raises StoreCorruptError for values nested deeper than `left`, before other code recurses into them."""
    if not left:
        raise StoreCorruptError(f"object: got a body nested deeper than {_DEPTH}; expected at most that")
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            check_depth(inner, left - 1)


type _Form = tuple[np.dtype, tuple[int, ...], int]
"""Dtype, shape, bytes."""


def _placed_leaves(
    forms: Sequence[Leaf], end: int, checksums: str, start: int, size: int | None
) -> tuple[dict[str, Leaf], int]:
    """Returns the leaves of `_parse_leaves` with checksums and offsets in a file. Also returns where the last ends."""
    crcs: dict[str, int] = {}
    for part in checksums.split(" ") if checksums else ():
        name, _, digits = part.partition("=")
        if not _CRC.fullmatch(digits):
            raise StoreCorruptError(f"object: got checksums {checksums[:60]!r}; expected name=8 hexadecimal digits")
        crcs[name] = int(digits, 16)

    end += start
    if size not in (None, end) or list(crcs) != [form.name for form in forms]:
        raise StoreCorruptError(f"object: got {len(crcs)} checksums, {end} bytes; expected {len(forms)} and {size}")
    leaves = {}
    for name, dtype, shape, offset, nbytes, _ in forms:
        leaves[name] = Leaf(name, dtype, shape, start + offset, nbytes, crcs[name])
    return leaves, end


@functools.lru_cache(64)
def _parse_leaves(entries: str) -> tuple[tuple[Leaf, ...], int, dict[str, Any]]:
    """Parses what follows the metadata: the leaves, by offsets from the first and without checksums, and their end.

    Also returns the `memo` of all objects with these leaves. Error messages contain no whole values: these may be
    nested deeply.
    """
    tree = _parse_json(f'{{"__metadata__":0{entries}', "header")
    del tree["__metadata__"]
    leaves: list[Leaf] = []
    forms: dict[Any, _Form] = {}  # the layers are alike: each form is parsed once
    offset = 0

    for name, entry in tree.items():
        if len(name) > 80 or not _NAME.fullmatch(name):
            raise StoreCorruptError(f"object: got leaf {name[:80]!r}; expected words with dots between")
        if not isinstance(entry, dict) or tuple(entry) != _ENTRY:
            raise StoreCorruptError(
                f"object: leaf {name}: got a {type(entry).__name__}; expected dtype, shape, data_offsets"
            )
        word, shape, offsets = entry.values()
        try:
            key = (word, tuple(shape), tuple(map(type, shape)))  # the types too, because 1, 1.0 and true are equal
            form = forms.get(key)
        except TypeError:
            form = key = None  # no valid dtype and shape: `_parse_form` refuses them
        if form is None:
            form = forms[key] = _parse_form(name, word, shape)

        dtype, shape, nbytes = form
        if offsets != [offset, offset + nbytes] or set(map(type, offsets)) != {int}:
            raise StoreCorruptError(f"object: leaf {name}: got other offsets; expected {[offset, offset + nbytes]}")
        if not name.startswith("pad."):
            leaves.append(Leaf(name, dtype, shape, offset, nbytes, 0))
        elif dtype != np.uint8 or nbytes >= ALIGNMENT:
            raise StoreCorruptError(f"object: {name}: got {nbytes} bytes of {dtype}; expected uint8 below {ALIGNMENT}")
        offset += nbytes
    return tuple(leaves), offset, {}


def _parse_form(name: str, word: Any, shape: Any) -> _Form:
    """Parses the dtype and the shape of a leaf."""
    if not isinstance(word, str) or word not in DTYPES:
        raise StoreCorruptError(f"object: leaf {name}: got dtype {_short(word)}; expected one of {tuple(DTYPES)}")
    is_shape = isinstance(shape, list) and set(map(type, shape)) <= {int} and len(shape) <= 8
    if not is_shape or (shape and not 0 <= min(shape) <= max(shape) < 1 << 48):
        raise StoreCorruptError(f"object: leaf {name}: got shape {_short(shape)}; expected at most 8 sizes")

    # NumPy's limit ignores sizes of zero.
    if math.prod(size or 1 for size in shape) > LARGEST_ARRAY:
        raise StoreCorruptError(f"object: leaf {name}: got shape {shape}; expected sizes that an array can have")
    return DTYPES[word], tuple(shape), math.prod(shape) * DTYPES[word].itemsize


def _short(value: Any) -> str:
    """Formats a value for an error message; only the type of what may be nested deeply."""
    scalars = (str, int, float)
    flat = isinstance(value, scalars) or (isinstance(value, list) and all(isinstance(item, scalars) for item in value))
    return repr(value)[:60] if flat else type(value).__name__
