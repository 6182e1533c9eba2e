"""What a root says about itself: the secret of its names, and which key a tenant's objects are encrypted under."""

import contextlib
import json
import os
import secrets

from ..errors import StoreCorruptError, StoreKeyError
from .files import make_directories, publish_once, typed_errors


def secret_of(root: str) -> bytes:
    """The secret of a store's names, made on first use; of several who make it at once one wins.

    Raises:
      StoreError: it cannot be made. StoreCorruptError: STORE.json is not ours.
    """
    if not os.path.exists(f"{root}/STORE.json"):
        note_secret(root, secrets.token_bytes(32))
    return read_secret(root)


def note_secret(root: str, secret: bytes) -> None:
    """Gives a root the secret of its names, unless it has one. Raises StoreError."""
    _publish_once(root, "STORE.json", json.dumps({"version": 1, "secret": secret.hex()}).encode())


def read_secret(root: str) -> bytes:
    """The secret of a store's names.

    Raises:
      StoreIOError: there is none. StoreCorruptError: STORE.json is not ours.
    """
    with typed_errors(f"store {root}: open"), open(f"{root}/STORE.json", "rb") as file:
        text = file.read(1 << 16)
    try:
        settings = json.loads(text)
        secret = bytes.fromhex(settings["secret"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreCorruptError(f"store {root}: STORE.json cannot be read; expected JSON with a secret") from error
    if settings.get("version") != 1 or len(secret) < 16:
        raise StoreCorruptError(f"store {root}: STORE.json of version {settings.get('version')!r}; expected 1")
    return secret


def check_key(root: str, space: str, check: str | None, note: bool = False) -> None:
    """Refuses a tenant's directory to another key than the first that was noted there; `note`: whether to note it.

    So a wrong key is found before anything is written. Each encrypted object has the same value in it.

    Raises:
      StoreKeyError: encrypted under another key, or encrypted and `check` is None.
    """
    path = f"{root}/{space}/KEY"
    if note and check is not None and not os.path.exists(path):
        _publish_once(root, f"{space}/KEY", check.encode())
    with typed_errors(f"store {root}: open"), contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        found = file.read(1 << 10).decode(errors="replace")
        if found != check:
            what = "no key" if check is None else "another key"
            raise StoreKeyError(f"store {root}: opened with {what}; expected the one of this tenant's objects")


def _publish_once(root: str, relative: str, text: bytes) -> None:
    """A small file, whole and durable, unless there is one of that name already."""
    folder, _, _ = f"{root}/{relative}".rpartition("/")
    with typed_errors(f"store {root}: open"):
        if folder != root:
            make_directories(root, relative.rpartition("/")[0])
        publish_once(f"{root}/{relative}", text, f"{root}/tmp/settings-{secrets.token_hex(8)}")
