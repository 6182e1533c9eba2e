"""Encryption at rest: AES-256-GCM, a key per tenant, each leaf by itself, so that one layer can be read alone.

    master key ── HKDF(tenant) ──► tenant's key ── HKDF(salt of the object) ──► object's key

Every object that is written draws a salt of 256 bits, so its key encrypts one object once, and the numbers of its
leaves serve as nonces: none comes twice under one key. What is stored is again an object: its leaves are uint8, its
body holds the salt and a check value of the tenant's key, and its first leaf is what the plain header would have said.
The file's name, kind, expiry and salt, and the leaf's number and name, are authenticated with each leaf.

`cryptography` (the extra `encryption`) is imported when a key is given.
"""

import dataclasses
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import InputError, StoreCorruptError, StoreKeyError
from .buffers import Buffers
from .files import as_bytes
from .header import DTYPES, Header, Leaf, dtype_word
from .objects import Blob, arranged

Read = Callable[[Sequence[str]], dict[str, np.ndarray]]
"""Reads neighbouring leaves, their checksums verified."""

KEY_BYTES = 32
_TAG = 16
_INSIDE = "sealed.header"
_STEP = 1024
"""Bytes. What the plain header says is padded to a multiple of this, so that its length says little."""


@runtime_checkable
class Seal(Protocol):
    """How a tenant's objects are kept."""

    @property
    def check(self) -> str | None:
        """A value that tells the tenant's key from another, and nothing about it; None without encryption."""
        ...

    def sealed(self, blob: Blob, file: str) -> Blob:
        """The object that is stored for `blob` under the name `file`."""
        ...

    def opened(self, header: Header, read: Read) -> tuple[Header, Read] | None:
        """The header that `blob` would have had, and a reader of its leaves; None for an object that is not kept so.

        Raises:
          StoreKeyError: the object may be good, and cannot be read with this key. StoreCorruptError: it is not good.
        """
        ...


def is_sealed(header: Header) -> bool:
    """Whether an object is encrypted."""
    return "sealed" in header.body


class Plain:
    """Objects as they are."""

    check = None

    def sealed(self, blob: Blob, file: str) -> Blob:
        """The object itself."""
        return blob

    def opened(self, header: Header, read: Read) -> tuple[Header, Read] | None:
        """The object itself. Raises StoreKeyError for an encrypted one."""
        if is_sealed(header):
            raise StoreKeyError("object: it is encrypted; expected the key that it was put with")
        return header, read


class AesGcm:
    """Objects encrypted under a tenant's key, which is derived from a master key.

    Args:
      key: the master key, at least 32 bytes that nobody can guess. It is not kept, nor written anywhere.
      buffers: where decrypted leaves go.

    Raises:
      InputError: a shorter key. ImportError: `cryptography` is not installed.
    """

    def __init__(self, key: bytes, tenant: str, buffers: Buffers):
        if len(key) < KEY_BYTES:
            raise InputError(f"store: a key of {len(key)} bytes; expected {KEY_BYTES} or more")
        try:
            import cryptography  # noqa: F401
        except ImportError as error:
            raise ImportError("store: a key without `cryptography`; expected the extra `encryption`") from error
        self._key = _derived(key, b"", b"tenant\0" + tenant.encode(), KEY_BYTES)
        self.check = _derived(self._key, b"", b"check", 16).hex()
        self._buffers = buffers

    def sealed(self, blob: Blob, file: str) -> Blob:
        """An object whose leaves are encrypted, under a key of its own."""
        salt = secrets.token_bytes(32)
        inside = {"body": blob.body, "leaves": [[n, dtype_word(d), list(s)] for n, (d, s) in blob.specs.items()]}
        text = json.dumps(inside, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _STEP)
        parts = {_INSIDE: np.frombuffer(text, np.uint8)} | {n: as_bytes(array) for n, array in blob.arrays.items()}
        cipher = _Cipher(self._key, salt, [file, blob.kind, repr(blob.expires)])
        arrays = {_outside(i): cipher.encrypted(i, name, part) for i, (name, part) in enumerate(parts.items())}
        return Blob(blob.kind, {"sealed": 1, "check": self.check, "salt": salt.hex()}, arrays, blob.expires)

    def opened(self, header: Header, read: Read) -> tuple[Header, Read] | None:
        """What was sealed; None for an object that is not encrypted, which anyone could have put there."""
        if not is_sealed(header):
            return None
        if header.body.get("check") != self.check:
            raise StoreKeyError("object: it is encrypted under another key; expected the key that it was put with")
        cipher = _Cipher(self._key, _salt(header.body), [header.name, header.kind, repr(header.expires)])
        outer = header.leaves.get(_INSIDE)
        if outer is None or outer.nbytes < _TAG or outer.dtype != np.uint8:
            raise StoreCorruptError(f"object: no leaf {_INSIDE}; expected one, of uint8")
        room = self._buffers.lease(outer.nbytes - _TAG)
        cipher.decrypt(0, _INSIDE, read([_INSIDE])[_INSIDE], room)
        inside = json.loads(room.tobytes())  # authenticated: it is what `sealed` wrote
        leaves = _leaves(inside["leaves"], header)
        numbers = {name: number for number, name in enumerate(leaves, 1)}

        def read_leaves(names: Sequence[str]) -> dict[str, np.ndarray]:
            found = read([_outside(numbers[name]) for name in names])
            wanted = {name: (numbers[name], found[_outside(numbers[name])]) for name in names}
            return self._decrypted(cipher, wanted, leaves)

        return dataclasses.replace(header, body=inside["body"], leaves=leaves), read_leaves

    def _decrypted(
        self, cipher: "_Cipher", wanted: Mapping[str, tuple[int, np.ndarray]], leaves: Mapping[str, Leaf]
    ) -> dict[str, np.ndarray]:
        """Read-only views of one buffer, in it as `arranged` says, as those of a plain file are."""
        places, room = arranged({name: leaves[name].nbytes for name in wanted})
        data = self._buffers.lease(room)
        spans = {name: slice(at, at + leaves[name].nbytes) for name, at in places.items()}
        for name, (number, value) in wanted.items():
            cipher.decrypt(number, name, value, data[spans[name]])
        data.flags.writeable = False
        return {n: data[spans[n]].view(leaves[n].dtype).reshape(leaves[n].shape) for n in wanted}


class _Cipher:
    """The cipher of one object. `fields`: what every leaf is bound to, with its number and name."""

    def __init__(self, key: bytes, salt: bytes, fields: Sequence[str]):
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._invalid = AESGCM(_derived(key, salt, b"object", KEY_BYTES)), InvalidTag
        self._fields = ["kvpatch sealed 1", salt.hex(), *fields]

    def _bound(self, number: int, name: str) -> tuple[bytes, bytes]:
        return number.to_bytes(12, "big"), json.dumps([*self._fields, number, name]).encode()

    def encrypted(self, number: int, name: str, part: np.ndarray) -> np.ndarray:
        nonce, bound = self._bound(number, name)
        target = np.empty(len(part) + _TAG, np.uint8)
        self._cipher.encrypt_into(nonce, memoryview(part), bound, memoryview(target))
        return target

    def decrypt(self, number: int, name: str, value: np.ndarray, target: np.ndarray) -> None:
        nonce, bound = self._bound(number, name)
        try:
            self._cipher.decrypt_into(nonce, memoryview(value), bound, memoryview(target))
        except self._invalid:
            raise StoreCorruptError(f"object: leaf {name} is not what was put there; expected it unchanged") from None


def _derived(key: bytes, salt: bytes, info: bytes, size: int) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), size, salt, b"kvpatch_jax store 1\0" + info).derive(key)


def _outside(number: int) -> str:
    return f"sealed.{number}" if number else _INSIDE


def _salt(body: Mapping[str, Any]) -> bytes:
    try:
        return bytes.fromhex(body["salt"])
    except (KeyError, TypeError, ValueError):
        raise StoreCorruptError("object: encrypted without a salt; expected 64 hexadecimal digits") from None


def _leaves(inside: Sequence[Any], header: Header) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for number, (name, word, shape) in enumerate(inside, 1):
        dtype, outer = DTYPES[word], header.leaves.get(_outside(number))
        nbytes = math.prod(shape) * dtype.itemsize
        if outer is None or outer.nbytes != nbytes + _TAG or outer.dtype != np.uint8:
            raise StoreCorruptError(f"object: leaf {number} is missing; expected {nbytes + _TAG} bytes of uint8")
        leaves[name] = Leaf(name, dtype, tuple(shape), outer.offset, nbytes, outer.crc)
    if len(header.leaves) != len(leaves) + 1:
        raise StoreCorruptError(f"object: {len(header.leaves)} leaves; expected {len(leaves) + 1}")
    return leaves
