"""Check value of the key with which a tenant's objects are encrypted, by which a wrong key is recognised.

    root/obj/<tenant>/KEY        the value, 32 hexadecimal digits
    root/obj/<tenant>/KEY.copy   the value with a digest; older versions neither write nor read it

Each encrypted object states the value too. If one file is damaged or missing, the value is taken from the other or from
the objects, and the files are written again, but only by a process that has the key.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator

from ...errors import StoreCorruptError, StoreError, StoreKeyError, StoreVersionError
from ...utils import strict_json
from ..format.encryption import is_sealed
from ..format.naming import is_object
from ..io.files import NotRegularError, read_small, typed_errors
from .directory import reading
from .root_config import publish_setting, replace_setting

NAME, COPY = "KEY", "KEY.copy"
_LARGEST = 1 << 12
_FEW = 16
"""Number of objects in which an encrypted one is searched if there is no key: most tenants have none."""


def check_key(root: str, space: str, check: str | None, note: bool = False) -> None:
    """Compares a tenant's key with the key of its objects.

    Args:
      space: the tenant's folder.
      check: check value of the key (`Encryption.check`); None without encryption.
      note: writes the files before the tenant's first encrypted object.

    Raises:
      StoreKeyError: the objects are encrypted with another key, or `check` is None; nothing was changed.
      StoreVersionError: a later version wrote the files.
    """
    plain, copy = _read(root, f"{space}/{NAME}"), _read_copy(root, space)
    if check is not None and plain == check == copy:
        return

    known = plain if copy is None else copy
    if (copy is None and plain != check) or (plain is None and check is None and not note):
        # KEY has no digest, so it alone is no evidence against the given key: the objects decide.
        stated = None if copy is not None else _stated_by_objects(root, space, None if check is not None else _FEW)
        known = known if stated is None else stated

    if known is None:  # no object of this tenant is encrypted
        if note and check is not None:
            _publish(root, space, check)
        return
    if known != check:
        given = "no key" if check is None else "another key"
        intact = plain == known and len(known) == 32 and set(known) <= set("0123456789abcdef")
        damaged = "" if intact else f" ({space}/{NAME} is damaged or gone)"
        raise StoreKeyError(f"store {root}: got {given}; expected the one of this tenant's objects{damaged}")

    with contextlib.suppress(StoreError):  # a read-only root is used as it is
        if plain != known:
            replace_setting(root, f"{space}/{NAME}", known.encode())
        if copy != known:
            replace_setting(root, f"{space}/{COPY}", _copy_text(known))


def _publish(root: str, space: str, check: str) -> None:
    """Writes the files for the first time. Of several writers one wins, and those with other keys fail."""
    publish_setting(root, f"{space}/{NAME}", check.encode())
    # Read again, because `publish_setting` leaves a file that another process has written first.
    if _read(root, f"{space}/{NAME}") != check:
        raise StoreKeyError(f"store {root}: got another key; expected the one of this tenant's objects")
    publish_setting(root, f"{space}/{COPY}", _copy_text(check))


def _read(root: str, path: str) -> str | None:
    """Reads a file; None if there is none, "" if it is invalid."""
    with typed_errors(f"store {root}: open"):
        try:
            return read_small(root, path, _LARGEST).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (NotRegularError, StoreCorruptError):
            return ""


def _read_copy(root: str, space: str) -> str | None:
    """Reads the value in the copy; None if it is missing or damaged."""
    text = _read(root, f"{space}/{COPY}")
    if text is None:
        return None
    try:
        tree = strict_json.loads(text)
    except ValueError:
        return None
    if not isinstance(tree, dict):
        return None
    check, version = tree.get("check"), tree.get("version")
    if type(version) is int and version > 1 and set(tree) != {"version", "check", "digest"}:
        raise StoreVersionError(f"store {root}: got {space}/{COPY} of version {version}; expected 1")
    return check if isinstance(check, str) and text.encode() == _copy_text(check) else None


def _copy_text(check: str) -> bytes:
    digest = hashlib.blake2b(check.encode(), digest_size=16, person=b"kvpatch key").hexdigest()
    return json.dumps({"version": 1, "check": check, "digest": digest}).encode()


def _stated_by_objects(root: str, space: str, most: int | None) -> str | None:
    """Returns the check value in the first encrypted object of a tenant; None if no object is encrypted.

    Args:
      most: number of objects to read; None for all.
    """
    for number, path in enumerate(_objects(root, space)):
        if most is not None and number >= most:
            break
        with contextlib.suppress(OSError, StoreError), reading(root, path) as (_, header):
            if is_sealed(header) and isinstance(check := header.body.get("check"), str):
                return check
    return None


def _objects(root: str, space: str) -> Iterator[str]:
    """Yields the paths of a tenant's objects and entries, unordered."""
    for below in (space, f"lib/{os.path.basename(space)}"):
        for folder, _, files in os.walk(f"{root}/{below}"):
            paths = (os.path.relpath(f"{folder}/{file}", root) for file in files)
            yield from filter(is_object, paths)
