"""Encryption at rest: AES-256-GCM with a key per tenant, each leaf separately, so that single layers can be read.

    master key ── HKDF(tenant) ──► tenant's key ── HKDF(salt of the object) ──► object's key

Every write draws a salt of 256 bits, so an object's key encrypts that object once, and the numbers of its leaves are
the nonces: no nonce is used twice with a key. The encrypted object is an object again: its leaves are uint8, its body
holds the salt and a check value of the tenant's key, and its first leaf has the content of the plain header. The file's
name, kind, revision, expiry and salt, and the leaf's number and name, are authenticated with each leaf.

A leaf longer than `MOST` is stored in pieces, each a leaf of the file, encrypted with a nonce of the leaf's and the
piece's number; the piece's number and the number of pieces are authenticated. The file states which leaves are in
pieces.

`cryptography` (the extra `encryption`) is imported when a key is given.
"""

import dataclasses
import functools
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ...cache import encoded
from ...errors import InputError, StoreCorruptError, StoreKeyError
from ..io.files import ReadInto, read_into
from .buffers import Buffers
from .header import DTYPES, Header, Leaf, dtype_word
from .known_words import expect_known
from .objects import Arrays, Blob, Leaves, arranged, as_bytes, read_leaves

Read = Callable[[Sequence[str]], dict[str, np.ndarray]]
"""Reads adjacent leaves and verifies their checksums."""

KEY_BYTES = 32
MOST = 1 << 30
"""Bytes per call of the cipher, whose limit is 2 GiB."""

_TAG = 16
_INSIDE = "sealed.header"
_STEP = 1024
"""Bytes. The content of the plain header is padded to a multiple of this, so that its length reveals little."""


@runtime_checkable
class Encryption(Protocol):
    """Interface for encryption of a tenant's objects, or none (`Plain`)."""

    @property
    def check(self) -> str | None:
        """Check value of the tenant's key, which does not reveal it; None without encryption."""
        ...

    def sealed(self, blob: Blob, file: str) -> Blob:
        """Encrypts an object for the file name `file`."""
        ...

    def opened(self, header: Header, read: Read) -> tuple[Header, Read] | None:
        """Returns the plain header of a stored object and a reader of its plain leaves; None if it is not encrypted.

        Raises:
          StoreKeyError: the object may be intact, but cannot be read with this key.
          StoreCorruptError: it is damaged.
        """
        ...


def is_sealed(header: Header) -> bool:
    """Returns whether an object is encrypted."""
    return "sealed" in header.body


def open_object(
    fd: int, header: Header, encryption: Encryption, buffers: Buffers, read_bytes: ReadInto = read_into
) -> tuple[Header, Read] | None:
    """Returns the plain header of an object's file and a reader of its leaves, as `Encryption.opened`."""
    read = functools.partial(read_leaves, fd, header, buffers=buffers, read_bytes=read_bytes)
    if encryption.check is None and "sealed" not in header.body:
        return header, read
    return encryption.opened(header, read)


def decrypted(header: Header, arrays: Arrays, encryption: Encryption) -> tuple[Header, Arrays]:
    """Decrypts an object that was read whole. Returns the plain header and leaves; a plain object is unchanged.

    Raises:
      StoreKeyError, StoreCorruptError: as `Encryption.opened`.
    """
    if not is_sealed(header):
        return header, arrays
    opening = encryption.opened(header, lambda names: {name: arrays[name] for name in names})
    assert opening is not None  # None only stands for an object that is not encrypted
    plain, read = opening
    return plain, read(list(plain.leaves))


class Plain:
    """`Encryption` that leaves objects unencrypted."""

    check = None

    def sealed(self, blob: Blob, file: str) -> Blob:
        """Returns the object unchanged."""
        return blob

    def opened(self, header: Header, read: Read) -> tuple[Header, Read] | None:
        """Returns header and reader unchanged. Raises StoreKeyError for an encrypted object."""
        if is_sealed(header):
            raise StoreKeyError("object: got an encrypted one without a key; expected the key that it was put with")
        return header, read


class AesGcm:
    """`Encryption` by AES-256-GCM with a tenant's key, which is derived from a master key.

    Args:
      key: the master key, at least 32 random bytes. It is neither kept nor written anywhere.
      tenant: the tenant.
      buffers: host memory for decrypted leaves.

    Raises:
      InputError: the key is too short.
      ImportError: `cryptography` is not installed.
    """

    def __init__(self, key: bytes, tenant: str, buffers: Buffers):
        if not isinstance(key, bytes) or len(key) < KEY_BYTES:
            found = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise InputError(f"store: got a key of {found}; expected {KEY_BYTES} bytes or more")
        try:
            import cryptography  # noqa: F401
        except ImportError as error:
            raise ImportError("store: got a key without `cryptography`; expected the extra `encryption`") from error
        self._key = _derived(key, b"", b"tenant\0" + encoded(tenant), KEY_BYTES)
        self.check = _derived(self._key, b"", b"check", 16).hex()
        self._buffers = buffers

    def sealed(self, blob: Blob, file: str) -> Blob:
        """Encrypts every leaf with a new key."""
        salt = secrets.token_bytes(32)
        inside = {"body": blob.body, "leaves": [[n, dtype_word(d), list(s)] for n, (d, s) in blob.specs.items()]}
        text = json.dumps(inside, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _STEP)
        parts = {_INSIDE: np.frombuffer(text, np.uint8)} | {n: as_bytes(array) for n, array in blob.arrays.items()}
        cipher = _Cipher(self._key, salt, _authenticated(file, blob))

        arrays: dict[str, np.ndarray] = {}
        for number, (name, part) in enumerate(parts.items()):
            if number == 0 or len(part) <= MOST:
                arrays[_outside(number)] = cipher.encrypted(_Piece(number, name), part)
                continue
            count = -(-len(part) // MOST)
            for piece in range(count):
                bound, own = _Piece(number, name, piece, count), part[piece * MOST : (piece + 1) * MOST]
                arrays[f"{_outside(number)}.{piece}"] = cipher.encrypted(bound, own)
        return Blob(
            blob.kind, {"sealed": 1, "check": self.check, "salt": salt.hex()}, arrays, blob.expires, blob.revision
        )

    def opened(self, header: Header, read: Read) -> tuple[Header, Read] | None:
        """Decrypts the header of an object; None if it is not encrypted, as anyone could have written it."""
        if not is_sealed(header):
            return None

        expect_known("encryption with a field", header.body, ("sealed", "check", "salt"))
        if header.body["sealed"] != 1:
            raise StoreCorruptError(f"object: got encryption version {str(header.body['sealed'])[:20]}; expected 1")
        # Another key is no damage, so it is recognised before anything is decrypted.
        if header.body.get("check") != self.check:
            raise StoreKeyError("object: got one encrypted with another key; expected the key that it was put with")

        cipher = _Cipher(self._key, _salt(header.body), _authenticated(header.name, header))
        outer = header.leaves.get(_INSIDE)
        if outer is None or outer.nbytes < _TAG or outer.dtype != np.uint8:
            raise StoreCorruptError(f"object: got no leaf {_INSIDE}; expected one of uint8")
        room = self._buffers.lease(outer.nbytes - _TAG)
        cipher.decrypt(_Piece(0, _INSIDE), read([_INSIDE])[_INSIDE], room)
        inside = json.loads(room.tobytes())  # authenticated, so `sealed` wrote it

        expect_known("encrypted header with a field", inside, ("body", "leaves"))
        expect_known("encrypted leaf of dtype", [leaf[1] for leaf in inside["leaves"]], DTYPES)
        leaves, pieces = _leaves(inside["leaves"], header)

        def read_leaves(names: Sequence[str]) -> dict[str, np.ndarray]:
            stored: list[str] = []
            for name in names:
                stored += pieces[name]
            values = read(stored)
            wanted: dict[str, dict[_Piece, np.ndarray]] = {}
            for name in names:
                wanted[name] = {piece: values[outside] for outside, piece in pieces[name].items()}
            return self._decrypted(cipher, wanted, leaves)

        return dataclasses.replace(header, body=inside["body"], leaves=leaves, memo={}), read_leaves

    def _decrypted(
        self, cipher: "_Cipher", wanted: Mapping[str, Mapping["_Piece", np.ndarray]], leaves: Mapping[str, Leaf]
    ) -> Leaves:
        """Decrypts leaves into one buffer, placed by `arranged`, as those of a plain file. Returns read-only views."""
        places, room = arranged({name: leaves[name].nbytes for name in wanted})
        data = self._buffers.lease(room)
        for name, found in wanted.items():
            at = places[name]
            for piece, value in found.items():
                cipher.decrypt(piece, value, data[at : at + len(value) - _TAG])
                at += len(value) - _TAG
        data.flags.writeable = False
        return Leaves(data, places, [leaves[name] for name in wanted])


class _Piece(NamedTuple):
    """Identity of a ciphertext: the leaf's number and name, and of a leaf in pieces the piece and their count."""

    number: int
    name: str
    piece: int = 0
    count: int = 0

    @property
    def nonce(self) -> bytes:
        """Nonce of 96 bits, unique in the object; that of a whole leaf begins with zeros."""
        return (self.piece + 1 if self.count else 0).to_bytes(4, "big") + self.number.to_bytes(8, "big")


class _Cipher:
    """Cipher of one object. `fields` are authenticated with every leaf, in addition to its number and name."""

    def __init__(self, key: bytes, salt: bytes, fields: Sequence[str]):
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._invalid = AESGCM(_derived(key, salt, b"object", KEY_BYTES)), InvalidTag
        self._fields = ["kvpatch sealed 1", salt.hex(), *fields]

    def _bound(self, piece: _Piece) -> bytes:
        return json.dumps([*self._fields, *(piece if piece.count else piece[:2])]).encode()

    def encrypted(self, piece: _Piece, part: np.ndarray) -> np.ndarray:
        target = np.empty(len(part) + _TAG, np.uint8)
        self._cipher.encrypt_into(piece.nonce, memoryview(part), self._bound(piece), memoryview(target))
        return target

    def decrypt(self, piece: _Piece, value: np.ndarray, target: np.ndarray) -> None:
        try:
            self._cipher.decrypt_into(piece.nonce, memoryview(value), self._bound(piece), memoryview(target))
        except self._invalid:
            raise StoreCorruptError(
                f"object: leaf {piece.name}: got changed bytes; expected those that were put"
            ) from None


def _derived(key: bytes, salt: bytes, info: bytes, size: int) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), size, salt, b"kvpatch_jax store 1\0" + info).derive(key)


def _authenticated(file: str, object: Header | Blob) -> list[str]:
    """Returns the plain fields that are authenticated with every leaf. Format version 1 had no revision."""
    revision = [f"revision {object.revision}"] if object.revision else []
    return [file, object.kind, repr(object.expires), *revision]


def _outside(number: int) -> str:
    return f"sealed.{number}" if number else _INSIDE


def _salt(body: Mapping[str, Any]) -> bytes:
    try:
        return bytes.fromhex(body["salt"])
    except (KeyError, TypeError, ValueError):
        raise StoreCorruptError("object: got encryption without a salt; expected 64 hexadecimal digits") from None


type _Pieces = dict[str, dict[str, _Piece]]
"""For each leaf, the leaves of the file that hold it, in order, with their identities."""


def _leaves(inside: Sequence[Any], header: Header) -> tuple[dict[str, Leaf], _Pieces]:
    leaves: dict[str, Leaf] = {}
    pieces: _Pieces = {}
    for number, (name, word, shape) in enumerate(inside, 1):
        dtype, outside = DTYPES[word], _outside(number)
        nbytes = math.prod(shape) * dtype.itemsize
        pieces[name] = {outside: _Piece(number, name)}
        if outside not in header.leaves:
            count = sum(leaf.startswith(f"{outside}.") for leaf in header.leaves)
            pieces[name] = {f"{outside}.{piece}": _Piece(number, name, piece, count) for piece in range(count)}
        outer = [header.leaves.get(piece) for piece in pieces[name]]
        found = sum(-1 if leaf is None or leaf.dtype != np.uint8 else leaf.nbytes - _TAG for leaf in outer)
        if not outer or found != nbytes or min(leaf.nbytes if leaf else 0 for leaf in outer) < _TAG:
            raise StoreCorruptError(
                f"object: got no valid leaf {number}; expected {nbytes} bytes, and {_TAG} for each piece"
            )
        first = outer[0]
        assert first is not None
        leaves[name] = Leaf(name, dtype, tuple(shape), first.offset, nbytes, first.crc)

    if len(header.leaves) != 1 + (stored := sum(map(len, pieces.values()))):
        raise StoreCorruptError(f"object: got {len(header.leaves)} leaves; expected {stored + 1}")
    return leaves, pieces
