"""Object files: safetensors with a checksum of the header and of each leaf with its gap, written once, never changed.

Any safetensors reader opens them. Leaves begin at multiples of 64 bytes, so that JAX takes them without a copy; gaps
are leaves named `pad.N`. The metadata holds the format number, kind, tenant, name, sequence number, expiry and body.
An encrypted object is such a file with one leaf, `sealed`, whose plain bytes are the object's own file.
"""

import contextlib
import fcntl
import hashlib
import hmac
import json
import mmap
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import xxhash

from ..errors import ShapeError, StoreCorruptError, StoreError
from ..utils.optional_packages import require

FORMAT = 3
"""Number of the format of files and index. Another number is a miss."""
ALIGN = 64
MAPPED_BYTES = 1 << 18
"""Size from which files are mapped: below it, a copy into memory is faster."""
MAX_HEADER = 16 << 20
SEALED_PIECE = 1 << 30
"""Bytes per call of the cipher, whose limit is 2 GiB."""

DTYPES: Mapping[str, np.dtype] = {
    **{"F64": np.dtype("f8"), "F32": np.dtype("f4"), "F16": np.dtype("f2"), "BOOL": np.dtype("?")},
    **{"I64": np.dtype("i8"), "I32": np.dtype("i4"), "I16": np.dtype("i2"), "I8": np.dtype("i1")},
    **{"U64": np.dtype("u8"), "U32": np.dtype("u4"), "U16": np.dtype("u2"), "U8": np.dtype("u1")},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Dtypes of leaves, by their words in safetensors files."""
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_BLANK = "0" * 16
_PREFIX = '{"__metadata__":{"header_sum":"'
_SUM = slice(len(_PREFIX), len(_PREFIX) + 16)


class Encoded(NamedTuple):
    """An object before it is written: its kind, its body of JSON's types, and its leaves."""

    kind: str
    body: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


class Header(NamedTuple):
    """A file's own description, from which an index is rebuilt: keyed names, sequence number, and expiry (Unix)."""

    tenant: str
    name: str
    seq: int
    expires: float | int | None = None


class Stored(NamedTuple):
    """A verified object. Arrays are read-only views; `nbytes` counts its file."""

    kind: str
    body: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    seq: int = 0
    expires: float | int | None = None
    nbytes: int = 0


class DamagedError(StoreCorruptError):
    """Bytes that do not have their checksum, or are no object."""


# --------------------------------------------------------------------------------------------------------- writing


def object_parts(encoded: Encoded, header: Header, key: bytes | None = None) -> list[memoryview]:
    """Encodes an object as the parts of its file, in order, encrypted under a tenant's key if there is one.

    Raises:
      ShapeError: a leaf of a dtype that files cannot hold.
    """
    parts = _plain_parts(encoded, header)
    if key is None:
        return parts
    salt = secrets.token_bytes(32)
    sealed = _sealed(b"".join(parts), key, salt, header)
    body = {"salt": salt.hex(), "key": _key_mark(key, salt)}
    return _plain_parts(Encoded("sealed", body, {"sealed": np.frombuffer(sealed, np.uint8)}), header)


def _plain_parts(encoded: Encoded, header: Header) -> list[memoryview]:
    tensors: dict[str, Any] = {}
    sums, leaves, offset = dict[str, str](), list[np.ndarray](), 0
    for name, array in encoded.arrays.items():
        if array.dtype not in _WORDS:
            raise ShapeError(f"store: got {name} of dtype {array.dtype}; expected one of {sorted(map(str, _WORDS))}")
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        end = offset + flat.nbytes
        tensors[name] = {"dtype": _WORDS[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        leaves.append(flat)
        checksum, offset = xxhash.xxh3_64(flat), end
        if gap := -offset % ALIGN:
            checksum.update(bytes(gap))
            tensors[f"pad.{len(leaves)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [offset, offset + gap]}
            leaves.append(np.zeros(gap, np.uint8))
            offset += gap
        sums[name] = checksum.hexdigest()

    expires = "" if header.expires is None else repr(header.expires)
    about = {"format": str(FORMAT), "kind": encoded.kind, "tenant": header.tenant, "name": header.name}
    about |= {"seq": str(header.seq), "expires": expires, "body": json.dumps(encoded.body, separators=(",", ":"))}
    metadata = {"header_sum": _BLANK, **about, "sums": " ".join(f"{name}:{value}" for name, value in sums.items())}
    text = json.dumps({"__metadata__": metadata} | tensors, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    text = text[: _SUM.start] + xxhash.xxh3_64_hexdigest(text).encode() + text[_SUM.stop :]
    return [memoryview(len(text).to_bytes(8, "little") + text), *(leaf.data for leaf in leaves)]


def write_file(path: str, parts: list[memoryview]) -> int:
    """Creates a file of these parts, and fails if it exists. Returns its descriptor; the file is not synced yet."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        pending = [part for part in parts if part.nbytes]
        while pending:
            written = os.writev(fd, pending[:1000])
            while pending and written >= pending[0].nbytes:
                written -= pending.pop(0).nbytes
            if written:
                pending[0] = pending[0][written:]
    except BaseException:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def write_synced(path: str, content: bytes) -> None:
    """Creates or replaces a small file and syncs it, but not its name."""
    flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: str) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(path: str, flags: int = os.O_CREAT) -> Iterator[None]:
    """Locks a file against other threads, processes and, where the file system passes locks on, machines."""
    with open(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600), "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing does not unlock if a process was forked meanwhile


# --------------------------------------------------------------------------------------------------------- reading


def read_object(path: str, key: bytes | None = None) -> tuple[Header, Stored]:
    """Reads and verifies a file, large ones by mapping it.

    Raises:
      DamagedError: a checksum does not match. StoreCorruptError: another format. StoreError: encrypted otherwise.
      OSError: the file system failed.
    """
    return parse_object(file_bytes(path), key)


def file_bytes(path: str) -> np.ndarray:
    """Reads a regular file, [bytes], uint8, at an address that is a multiple of 64; maps it if it is large."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = os.fstat(fd).st_size
        if size >= MAPPED_BYTES:
            mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            mapping.madvise(mmap.MADV_WILLNEED)
            return np.frombuffer(mapping, np.uint8)
        data = aligned(size)
        done = 0
        while done < size and (count := os.preadv(fd, [data[done:]], done)):
            done += count
        return data[:done]
    finally:
        os.close(fd)


def aligned(size: int) -> np.ndarray:
    """Allocates bytes at an address that is a multiple of 64."""
    data = np.empty(size + ALIGN, np.uint8)
    return data[-data.ctypes.data % ALIGN :][:size]


def read_header(path: str) -> tuple[Header, Stored]:
    """Reads and verifies a file's header alone. Returns the object without arrays. Raises as `read_object`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = os.fstat(fd).st_size
        length = _header_length(os.pread(fd, 8, 0), size)
        with _parsing():
            header, stored, tensors, _ = _parse_header(os.pread(fd, length, 8), size)
            end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if 8 + length + end != size:
            raise DamagedError(f"object: got {size} bytes; expected {8 + length + end}")
        return header, stored
    finally:
        os.close(fd)


def expect_replaceable(path: str, key: bytes | None) -> None:
    """Raises StoreError for a file encrypted with another key, by its header; one that is lost or damaged passes."""
    try:
        _, stored = read_header(path)
        with _parsing():
            same = stored.kind != "sealed" or (
                key is not None and stored.body["key"] == _key_mark(key, bytes.fromhex(stored.body["salt"]))
            )
    except (StoreCorruptError, OSError):
        return
    if not same:
        raise StoreError(
            "object: got one that is there, encrypted with another key; expected the store's key (to replace it, "
            "delete it first)"
        )


def parse_object(data: np.ndarray, key: bytes | None = None) -> tuple[Header, Stored]:
    """Verifies the bytes of a file, [bytes], and returns views of them. Raises as `read_object`."""
    header, stored = _parse(data)
    if stored.kind != "sealed":
        if key is not None:
            raise StoreError("object: got one that is not encrypted; expected it encrypted with the store's key")
        return header, stored
    if key is None:
        raise StoreError("object: got an encrypted one; expected the key it was encrypted with, ChunkStore(key=...)")
    plain = _unsealed(stored.arrays["sealed"], key, bytes.fromhex(stored.body["salt"]), header)
    inner, opened = _parse(plain)
    if inner != header:
        raise DamagedError("object: got an encrypted object of another name; expected that of its file")
    return header, opened._replace(nbytes=len(data))


def _parse(data: np.ndarray) -> tuple[Header, Stored]:
    length = _header_length(data[:8].tobytes(), len(data))
    with _parsing():
        header, stored, tensors, sums = _parse_header(data[8 : 8 + length].tobytes(), len(data))
        payload, arrays, end = data[8 + length :], dict[str, np.ndarray](), 0
        for name, tensor in tensors.items():
            begin, stop = tensor["data_offsets"]
            if begin != end or stop > len(payload):
                raise DamagedError("object: got leaves with gaps; expected them to cover the file")
            end, leaf = stop, payload[begin:stop]
            if name in sums:
                if xxhash.xxh3_64_hexdigest(payload[begin : stop + -stop % ALIGN]) != sums[name]:
                    raise DamagedError(f"object: got leaf {name} of another checksum; expected its own")
                arrays[name] = leaf.view(DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
                arrays[name].flags.writeable = False
        if end != len(payload) or arrays.keys() != sums.keys():
            raise DamagedError("object: got leaves that end elsewhere; expected them to cover the file")
    return header, stored._replace(arrays=arrays)


@contextlib.contextmanager
def _parsing() -> Iterator[None]:
    """Raises DamagedError in place of whatever malformed bytes cause."""
    try:
        yield
    except StoreError:  # one of the ValueErrors
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise DamagedError(f"object: got malformed bytes ({type(error).__name__}); expected an object") from None


def _header_length(first: bytes, size: int) -> int:
    """Returns the length of a file's header, from the file's first 8 bytes and its size."""
    length = int.from_bytes(first, "little")
    if length > min(size - 8, MAX_HEADER):
        raise DamagedError(f"object: got a header of {length} bytes in {size}; expected it within the file")
    return length


def _parse_header(text: bytes, size: int) -> tuple[Header, Stored, dict[str, Any], dict[str, str]]:
    """Verifies a header's text, of a file of `size` bytes.

    Returns:
      The header, the object without arrays, the table of its leaves and gaps, and the checksum of each leaf.
    """
    blank = text[: _SUM.start] + _BLANK.encode() + text[_SUM.stop :]
    if xxhash.xxh3_64_hexdigest(blank).encode() != text[_SUM]:
        raise DamagedError("object: got a header of another checksum; expected its own")
    tensors = json.loads(text)
    metadata = tensors.pop("__metadata__")
    if metadata["format"] != str(FORMAT):
        shown = metadata["format"][:20]
        raise StoreCorruptError(f"object: got format {shown!r}; expected {FORMAT}", other_format=True)
    expires = float(metadata["expires"]) if metadata["expires"] else None
    header = Header(metadata["tenant"], metadata["name"], int(metadata["seq"]), expires)
    stored = Stored(metadata["kind"], json.loads(metadata["body"]), {}, header.seq, expires, size)
    return header, stored, tensors, dict(pair.rsplit(":", 1) for pair in metadata["sums"].split())


# ------------------------------------------------------------------------------------------------------ encryption


def tenant_key(master: bytes, tenant: str) -> bytes:
    """Derives a tenant's key of 32 bytes from the master key (HKDF with SHA-256; one block)."""
    return _derived(master, b"kvpatch store", b"tenant " + tenant.encode())


def _derived(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    extracted = hmac.digest(salt, secret, hashlib.sha256)
    return hmac.digest(extracted, purpose + b"\x01", hashlib.sha256)


def _cipher(key: bytes, salt: bytes) -> Any:
    # Every object has a key of its own, which a salt of 256 bits makes: no nonce is used twice with a key.
    aead = require("cryptography.hazmat.primitives.ciphers.aead", "cryptography", "encryption")
    return aead.AESGCM(_derived(key, salt, b"object"))


def _key_mark(key: bytes, salt: bytes) -> str:
    """Returns what tells an object's key from others, and nothing else about it."""
    return _derived(key, salt, b"mark")[:8].hex()


def _nonce_and_context(number: int, pieces: int, header: Header) -> tuple[bytes, bytes]:
    return number.to_bytes(12, "little"), json.dumps([number, pieces, *header]).encode()


def _sealed(plain: bytes, key: bytes, salt: bytes, header: Header) -> bytes:
    cipher, pieces = _cipher(key, salt), max(1, -(-len(plain) // SEALED_PIECE))
    sealed = []
    for number in range(pieces):
        nonce, context = _nonce_and_context(number, pieces, header)
        sealed.append(cipher.encrypt(nonce, plain[number * SEALED_PIECE : (number + 1) * SEALED_PIECE], context))
    return b"".join(sealed)


def _unsealed(sealed: np.ndarray, key: bytes, salt: bytes, header: Header) -> np.ndarray:
    exceptions = require("cryptography.exceptions", "cryptography", "encryption")
    cipher, step = _cipher(key, salt), SEALED_PIECE + 16
    pieces = max(1, -(-len(sealed) // step))
    plain = aligned(max(0, len(sealed) - 16 * pieces))
    for number in range(pieces):
        nonce, context = _nonce_and_context(number, pieces, header)
        try:
            opened = cipher.decrypt(nonce, sealed[number * step : (number + 1) * step].data, context)
        except exceptions.InvalidTag:
            # The checksum of the sealed bytes was right, so they are intact.
            raise StoreError("object: got one encrypted with another key; expected the store's key") from None
        plain[number * SEALED_PIECE :][: len(opened)] = np.frombuffer(opened, np.uint8)
    return plain
