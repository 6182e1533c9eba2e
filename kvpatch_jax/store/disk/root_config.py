"""Configuration of a root: the secret of its names.

Without the secret nothing in a root is found. So it is there twice, each file with a digest, and one is mended from the
other; where neither can be read, or is there, and the root holds objects, it is not made up anew.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
from typing import Any

from ...errors import InputError, StoreCorruptError, StoreError, StoreIOError, StoreVersionError
from ..io.files import NotRegularError, publish_once, read_small, replace_file, typed_errors

SECRETS = ("STORE.json", "STORE.copy.json")
"""The files that hold the secret, alike."""

_VERSION = 2
_LARGEST = 1 << 12
"""Bytes. Longer settings are refused unread."""


def secret_of(root: str) -> bytes:
    """Reads the secret of a store's names, or makes it on first use; of several makers one wins.

    Raises:
      StoreError: it cannot be made. StoreCorruptError: it cannot be read, or is gone from a root that holds objects.
    """
    secret = find_secret(root)
    if secret is None and holds_objects(root):
        secret = find_secret(root)  # somebody may have made it just now, and then objects
        if secret is None:
            raise StoreCorruptError(
                f"store {root}: no {SECRETS[0]} beside objects that were named by its secret; expected it, from a "
                "snapshot of the whole store, or the secret itself"
            )
    if secret is None:
        note_secret(root, secrets.token_bytes(32))
    return read_secret(root) if secret is None else secret


def names_secret(root: str, given: bytes | None) -> bytes:
    """Returns the secret of a root's names: its own, or the one that is given where it keeps none.

    Raises:
      InputError: another one than the root's own, under which nothing in it would be found. As `secret_of`.
    """
    if given is None:
        return secret_of(root)
    kept = None
    with contextlib.suppress(StoreCorruptError):  # where it is damaged, the one that is given stands in
        kept = find_secret(root)
    if kept is not None and kept != given:
        raise InputError(f"store {root}: secret: got another secret than the root keeps; expected that one, or None")
    return given


def note_secret(root: str, secret: bytes) -> None:
    """Writes the secret of a root's names, unless it has one. Raises StoreError."""
    publish_setting(root, SECRETS[0], secret_text(secret))
    find_secret(root)  # which writes it a second time


def read_secret(root: str) -> bytes:
    """Reads the secret of a store's names.

    Raises:
      StoreIOError: there is none. StoreCorruptError: it cannot be read.
    """
    secret = find_secret(root)
    if secret is None:
        raise StoreIOError(f"store {root}: no {SECRETS[0]}; expected a store that keeps its secret")
    return secret


def find_secret(folder: str, *, mend: bool = True) -> bytes | None:
    """Reads the secret that a root or snapshot keeps; None where it keeps none.

    Args:
      mend: whether files that are damaged, gone or of an older version are written anew, where that can be.

    Raises:
      StoreCorruptError: it cannot be read, or there are two. StoreVersionError: a later version wrote it. StoreError.
    """
    found = [_read(folder, name) for name in SECRETS]
    good = [each for each in found if each is not None and each.secret is not None]
    if not good:
        if any(each is not None and each.newer for each in found):
            raise StoreVersionError(f"store {folder}: {SECRETS[0]} of a later version; expected version {_VERSION}")
        if any(each is not None for each in found):
            raise StoreCorruptError(f"store {folder}: {SECRETS[0]} is damaged, and so is its copy; expected one whole")
        return None
    vouched = {each.secret for each in good if each.summed} or {each.secret for each in good}
    if len(vouched) > 1:
        raise StoreCorruptError(f"store {folder}: {SECRETS[0]} and its copy hold two secrets; expected the same")
    (secret,) = vouched
    assert secret is not None
    for name, each in zip(SECRETS, found, strict=True) if mend else ():
        if each is None or not (each.summed or each.newer):
            with contextlib.suppress(StoreError):  # a root that may only be read serves as it is
                replace_setting(folder, name, secret_text(secret))
    return secret


def put_secret(root: str, secret: bytes) -> None:
    """Writes the secret of a root in place of files that cannot be read. Raises StoreError."""
    for name in SECRETS:
        replace_setting(root, name, secret_text(secret))


def holds_objects(root: str) -> bool:
    """Whether a root holds any object or library entry."""
    walks = (os.walk(f"{root}/{folder}") for folder in ("obj", "lib"))
    return any(name.endswith(".safetensors") for walk in walks for _, _, names in walk for name in names)


def secret_text(secret: bytes) -> bytes:
    """Formats a file that holds a secret."""
    return json.dumps({"version": _VERSION, "secret": secret.hex(), "digest": secret_digest(secret)}).encode()


def secret_digest(secret: bytes) -> str:
    """Digest of a secret. It tells nothing about it, which is drawn from 2²⁵⁶."""
    return hashlib.blake2b(secret, digest_size=16, person=b"kvpatch secret").hexdigest()


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Content of a secret's file; no secret where it is damaged. `summed`: whether a digest vouches for it. `newer`:
    whether a later version wrote it."""

    secret: bytes | None = dataclasses.field(repr=False)
    summed: bool
    newer: bool = False


def _read(folder: str, name: str) -> _Kept | None:
    """Reads a secret's file; None where it does not exist."""
    with typed_errors(f"{folder}/{name}: read"):
        try:
            text = read_small(folder, name, _LARGEST)
        except FileNotFoundError:
            return None
        except (NotRegularError, StoreCorruptError):
            return _Kept(None, False)
    try:
        tree = json.loads(text)
        if type(tree["version"]) is int and tree["version"] > _VERSION and not _is_ours(tree):
            return _Kept(None, False, newer=True)
        secret = bytes.fromhex(tree["secret"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return _Kept(None, False)
    if len(secret) >= 16 and text == secret_text(secret):
        return _Kept(secret, True)
    old = text == json.dumps({"version": 1, "secret": secret.hex()}).encode()  # before there were digests
    return _Kept(secret if old and len(secret) >= 16 else None, False)


def _is_ours(tree: dict[str, Any]) -> bool:
    """Whether all of a secret's file but the version is as this version writes it: a flip made that digit."""
    secret = tree.get("secret")
    digest = secret_digest(bytes.fromhex(secret)) if isinstance(secret, str) else None
    return set(tree) == {"version", "secret", "digest"} and tree["digest"] == digest


def replace_setting(root: str, path: str, text: bytes) -> None:
    """Writes a small file of a root, or replaces it, whole and durable. Raises StoreError."""
    with typed_errors(f"store {root}: write {path}"):
        replace_file(root, path, text, _temporary())


def _temporary() -> str:
    return f"tmp/settings-{secrets.token_hex(8)}"


def publish_setting(root: str, relative: str, text: bytes) -> None:
    """Writes a small file, whole and durable, unless it exists."""
    with typed_errors(f"store {root}: open"):
        publish_once(root, relative, text, _temporary())
