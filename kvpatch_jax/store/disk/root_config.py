"""Configuration of a root: the secret of its names.

Without the secret no object of a root can be found. So it is stored twice, each time with a digest, and one file is
repaired from the other. If neither can be read and the root holds objects, no new secret is generated.
"""

import contextlib
import hashlib
import json
import os
import secrets

from ...errors import InputError, StoreCorruptError, StoreError, StoreIOError
from ..io.files import NotRegularError, publish_once, read_small, replace_file, typed_errors

SECRETS = ("STORE.json", "STORE.copy.json")
"""The two files that hold the secret."""

_VERSION = 2
_LARGEST = 1 << 12
"""Limit in bytes; longer settings are refused before they are read."""


def secret_of(root: str) -> bytes:
    """Returns the secret of a store's names, generated on first use. Of several processes that generate it, one wins.

    Raises:
      StoreError: it cannot be written.
      StoreCorruptError: it cannot be read, or is missing in a root that holds objects.
    """
    secret = find_secret(root)
    if secret is None and holds_objects(root):
        secret = find_secret(root)  # another process may just have generated it, and then written objects
        if secret is None:
            raise StoreCorruptError(
                f"store {root}: got no {SECRETS[0]} beside objects that were named by its secret; expected it, from a "
                "snapshot of the whole store, or the secret itself"
            )

    if secret is not None:
        return secret
    publish_setting(root, SECRETS[0], secret_text(secrets.token_bytes(32)))
    find_secret(root)  # writes the second file
    return read_secret(root)  # perhaps of another process, which has won


def names_secret(root: str, given: bytes | None) -> bytes:
    """Returns the secret of a root's names: its own, or the given one if the root stores none.

    Raises:
      InputError: the given secret is not the root's, so no object would be found. As `secret_of`.
    """
    if given is None:
        return secret_of(root)
    kept = None
    with contextlib.suppress(StoreCorruptError):  # a damaged one is replaced by the given one
        kept = find_secret(root)
    if kept is not None and kept != given:
        raise InputError(f"store {root}: secret: got another secret than the root keeps; expected that one, or None")
    return given


def read_secret(root: str) -> bytes:
    """Returns the secret of a store's names.

    Raises:
      StoreIOError: there is none.
      StoreCorruptError: it cannot be read.
    """
    secret = find_secret(root)
    if secret is None:
        raise StoreIOError(f"store {root}: got no {SECRETS[0]}; expected a store that stores its secret")
    return secret


def find_secret(folder: str, *, mend: bool = True) -> bytes | None:
    """Returns the secret that a root or snapshot stores; None if it stores none.

    Args:
      mend: whether files that are damaged or missing are written again, if possible.

    Raises:
      StoreCorruptError: it cannot be read, or the files hold two secrets.
      StoreError: a file could not be read.
    """
    found = [_read(folder, name) for name in SECRETS]
    valid = {secret for secret in found if secret}
    if not valid:
        if any(secret is not None for secret in found):
            raise StoreCorruptError(f"store {folder}: got {SECRETS[0]} and its copy damaged; expected one intact")
        return None
    if len(valid) > 1:
        raise StoreCorruptError(f"store {folder}: got two secrets in {SECRETS[0]} and its copy; expected the same")
    (secret,) = valid

    for name, known in zip(SECRETS, found, strict=True) if mend else ():
        if not known:
            with contextlib.suppress(StoreError):  # a read-only root is used as it is
                replace_setting(folder, name, secret_text(secret))
    return secret


def put_secret(root: str, secret: bytes) -> None:
    """Writes the secret of a root, and replaces unreadable files. Raises StoreError."""
    for name in SECRETS:
        replace_setting(root, name, secret_text(secret))


def holds_objects(root: str) -> bool:
    """Returns whether a root holds any object or library entry."""
    for folder in ("obj", "lib"):
        for _, _, names in os.walk(f"{root}/{folder}"):
            if any(name.endswith(".safetensors") for name in names):
                return True
    return False


def secret_text(secret: bytes) -> bytes:
    """Returns the text of a file that holds a secret."""
    return json.dumps({"version": _VERSION, "secret": secret.hex(), "digest": secret_digest(secret)}).encode()


def secret_digest(secret: bytes) -> str:
    """Returns the digest of a secret. It reveals nothing about a secret of 256 random bits."""
    return hashlib.blake2b(secret, digest_size=16, person=b"kvpatch secret").hexdigest()


def _read(folder: str, name: str) -> bytes | None:
    """Reads a secret's file; None if it does not exist, b"" if it is damaged or of another version."""
    with typed_errors(f"{folder}/{name}: read"):
        try:
            text = read_small(folder, name, _LARGEST)
        except FileNotFoundError:
            return None
        except (NotRegularError, StoreCorruptError):
            return b""
    try:
        secret = bytes.fromhex(json.loads(text)["secret"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return b""
    return secret if len(secret) >= 16 and text == secret_text(secret) else b""


def replace_setting(root: str, path: str, text: bytes) -> None:
    """Writes or replaces a small file of a root atomically and durably. Raises StoreError."""
    with typed_errors(f"store {root}: write {path}"):
        replace_file(root, path, text, _temporary())


def _temporary() -> str:
    return f"tmp/settings-{secrets.token_hex(8)}"


def publish_setting(root: str, relative: str, text: bytes) -> None:
    """Writes a small file of a root atomically and durably, unless it exists. Raises StoreError."""
    with typed_errors(f"store {root}: open"):
        publish_once(root, relative, text, _temporary())
