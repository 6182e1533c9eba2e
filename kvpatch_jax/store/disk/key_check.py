"""Check values of the keys with which a tenant's objects are encrypted, by which a wrong key is recognised.

    root/obj/<tenant>/KEY, KEY.copy   the values, each time with a digest

Each encrypted object states its key's value too. A damaged or missing file is repaired from the other; if neither is
intact, the objects decide, and only a process that has their key writes the files again. The first key is noted before
the tenant's first object: never over objects, which would all be misses from then on.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Literal

from ...errors import StoreCorruptError, StoreError, StoreKeyError
from ...utils import strict_json
from ..format.encryption import is_sealed
from ..format.naming import is_object
from ..io.files import NotRegularError, folder, read_small, typed_errors
from ..io.locks import lock
from .directory import reading
from .root_config import publish_setting, replace_setting

NAME, COPY = "KEY", "KEY.copy"
PLAIN = ""
"""Stands for the check value of a key where objects are not encrypted yet."""

_LARGEST = 1 << 12
_FEW = 16
"""Number of objects in which an encrypted one is searched if there is no key: most tenants have none."""


@dataclasses.dataclass(frozen=True)
class KeyState:
    """Keys that are valid for a tenant's objects, by their check values (`Encryption.check`).

    Attributes:
      current: of the key with which objects are written.
      retiring: of the key that a rotation is replacing, which may still read; `PLAIN` if objects were not encrypted
        before; None: no rotation is going on.
    """

    current: str
    retiring: str | None = None

    @property
    def text(self) -> bytes:
        """Content of the files."""
        fields = {"version": 1, "check": self.current}
        if self.retiring is not None:
            fields |= {"retiring": self.retiring}
        covered = self.current if self.retiring is None else f"{self.current} {self.retiring}"
        digest = hashlib.blake2b(covered.encode(), digest_size=16, person=b"kvpatch key").hexdigest()
        return json.dumps(fields | {"digest": digest}).encode()


def check_key(root: str, space: str, check: str | None, note: bool = False) -> None:
    """Compares a tenant's key with the keys of its objects.

    Args:
      space: the tenant's folder.
      check: check value of the key (`Encryption.check`); None without encryption.
      note: before objects are written: the key has to be the current one, and the first one is noted.

    Raises:
      StoreKeyError: the objects are encrypted with another key, or not at all, or `check` is None; or, if `note`, the
        key is being replaced. Nothing was changed.
    """
    if check is None and note and _absent(root, space):
        return  # the usual case without keys, at each put, as the other one with them
    texts = _texts(root, space)
    if check is not None and texts[0] == texts[1] == KeyState(check).text:
        return
    state = _intact(texts)
    damaged = "" if state is not None and texts[0] == state.text else f" ({space}/{NAME} is damaged or gone)"
    if state is None and check is None:
        # A put without a key does not look for encrypted objects: opening did.
        if texts != (None, None) or (not note and survey_objects(root, space, None, _FEW) == "others"):
            raise StoreKeyError(f"store {root}: got no key; expected the one of this tenant's objects{damaged}")
        return

    if state is None:
        assert check is not None
        found = survey_objects(root, space, check)
        if found == "plain" and texts == (None, None):
            raise StoreKeyError(
                f"store {root}: got a first key for a tenant with objects that are not encrypted, which it would all "
                "miss; expected no key, or `rotate_key(root, tenant, old=None, new=key)`, which encrypts them"
            )
        if found == "none" and texts == (None, None):
            if note:
                _note_first(root, space, KeyState(check))
            return
        if found != "stated":
            raise StoreKeyError(f"store {root}: got another key; expected the one of this tenant's objects{damaged}")
        state = KeyState(check)

    if (PLAIN if check is None else check) not in (state.current, state.retiring):
        given = "no key" if check is None else "another key"
        raise StoreKeyError(f"store {root}: got {given}; expected the one of this tenant's objects{damaged}")
    if note and check != state.current:
        raise StoreKeyError(f"store {root}: got a key that is being replaced; expected the new one for writing")
    if texts != (state.text, state.text):
        with contextlib.suppress(StoreError), changing_keys(root, space):  # a read-only root is used as it is
            if _texts(root, space) == texts:
                write_keys(root, space, state)


def read_keys(root: str, space: str) -> KeyState | None:
    """Returns the keys that a tenant's files state; None if neither file is intact."""
    return _intact(_texts(root, space))


@contextlib.contextmanager
def changing_keys(root: str, space: str) -> Iterator[None]:
    """Context in which no other process changes a tenant's files. Raises StoreError."""
    with typed_errors(f"store {root}: change {space}/{NAME}"), folder(root, space, make=True) as fd:
        lock(fd, f"{root}/{space}")
        yield


def write_keys(root: str, space: str, state: KeyState) -> None:
    """Writes both files durably, in `changing_keys`. Raises StoreError.

    In this order: KEY counts if both are intact and differ, as after a crash in between.
    """
    for name in (NAME, COPY):
        replace_setting(root, f"{space}/{name}", state.text)


def _note_first(root: str, space: str, state: KeyState) -> None:
    """Writes the files for the first time. Of several writers one wins, and those with other keys fail."""
    with changing_keys(root, space):
        publish_setting(root, f"{space}/{NAME}", state.text)
        # Read again, because `publish_setting` leaves a file that another process has written first.
        if read_keys(root, space) != state:
            raise StoreKeyError(f"store {root}: got another key; expected the one of this tenant's objects")
        publish_setting(root, f"{space}/{COPY}", state.text)


def _absent(root: str, space: str) -> bool:
    """Returns whether neither file exists. Raises OSError."""
    for name in (NAME, COPY):
        try:
            os.lstat(f"{root}/{space}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        return False
    return True


def _texts(root: str, space: str) -> tuple[bytes | None, bytes | None]:
    """Reads both files: None for one that does not exist, b"" for one that is no small file."""

    def text(name: str) -> bytes | None:
        with typed_errors(f"store {root}: open"):
            try:
                return read_small(root, f"{space}/{name}", _LARGEST)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except (NotRegularError, StoreCorruptError):
                return b""

    return text(NAME), text(COPY)


def _intact(texts: tuple[bytes | None, bytes | None]) -> KeyState | None:
    """Returns the keys of the first intact file."""
    return next((state for state in map(_parsed, texts) if state is not None), None)


def _parsed(text: bytes | None) -> KeyState | None:
    """Parses a file; None if it is missing, damaged or of another version."""
    try:
        tree = None if text is None else strict_json.loads(text.decode(errors="replace"))
    except ValueError:
        return None
    if not isinstance(tree, dict):
        return None
    check, retiring = tree.get("check"), tree.get("retiring")
    if not isinstance(check, str) or not isinstance(retiring, str | None):
        return None
    state = KeyState(check, retiring)
    return state if state.text == text else None


def survey_objects(
    root: str, space: str, check: str | None, most: int | None = None
) -> Literal["stated", "others", "plain", "none"]:
    """Reads the headers of a tenant's objects until one states the check value.

    Args:
      most: number of objects to read; None for all.

    Returns:
      "stated": an object states it; "others": objects state other values only; "plain": there are objects, of which
      none states a value (damaged ones too); "none": there is no object.
    """
    found: Literal["others", "plain", "none"] = "none"
    for number, path in enumerate(_objects(root, space)):
        if number == most:
            break
        found = "plain" if found == "none" else found
        with contextlib.suppress(OSError, StoreError), reading(root, path) as (_, header):
            if is_sealed(header) and isinstance(stated := header.body.get("check"), str):
                found = "others"
                if stated == check:
                    return "stated"
    return found


def _objects(root: str, space: str) -> Iterator[str]:
    """Yields the paths of a tenant's objects and entries, unordered."""
    for below in (space, f"lib/{os.path.basename(space)}"):
        for above, _, files in os.walk(f"{root}/{below}"):
            paths = (os.path.relpath(f"{above}/{file}", root) for file in files)
            yield from filter(is_object, paths)
