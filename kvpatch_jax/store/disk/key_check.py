"""The check value of the key that a tenant's objects are encrypted under, by which a wrong key is found.

    root/obj/<tenant>/KEY        the value, 32 hexadecimal digits
    root/obj/<tenant>/KEY.copy   the value with a digest; older versions neither write nor read it

Each encrypted object states the value too. So where one file is damaged or gone, the other or the objects tell the
key, and the files are written anew, by whoever has that key and by nobody else.
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
"""Objects that are looked at for an encrypted one where there is no key: of most tenants none is."""


def check_key(root: str, space: str, check: str | None, note: bool = False) -> None:
    """Compares a tenant's key with the one that its objects are under.

    Args:
      space: the tenant's folder.
      check: value of the key (`Encryption.check`); None without encryption.
      note: writes the files before the tenant's first encrypted object.

    Raises:
      StoreKeyError: encrypted under another key, or encrypted and `check` is None; nothing was changed.
      StoreVersionError: a later version wrote the files.
    """
    plain, copy = _read(root, f"{space}/{NAME}"), _read_copy(root, space)
    if check is not None and plain == check == copy:
        return

    known = plain if copy is None else copy
    if (copy is None and plain != check) or (plain is None and check is None and not note):
        # KEY alone is no evidence against the key, for it has no digest, and without it there is none: objects tell.
        stated = None if copy is not None else _stated_by_objects(root, space, None if check is not None else _FEW)
        known = known if stated is None else stated

    if known is None:  # nothing of this tenant is encrypted
        if note and check is not None:
            _publish(root, space, check)
        return
    if known != check:
        what = "no key" if check is None else "another key"
        damaged = "" if plain == known and _is_check(known) else f" ({space}/{NAME} is damaged or gone)"
        raise StoreKeyError(f"store {root}: opened with {what}; expected the one of this tenant's objects{damaged}")
    with contextlib.suppress(StoreError):  # a root that may only be read serves as it is
        if plain != known:
            replace_setting(root, f"{space}/{NAME}", known.encode())
        if copy != known:
            replace_setting(root, f"{space}/{COPY}", _copy_text(known))


def _publish(root: str, space: str, check: str) -> None:
    """Writes the files for the first time; of several writers one wins, and those of other keys fail."""
    publish_setting(root, f"{space}/{NAME}", check.encode())
    if _read(root, f"{space}/{NAME}") != check:
        raise StoreKeyError(f"store {root}: opened with another key; expected the one of this tenant's objects")
    publish_setting(root, f"{space}/{COPY}", _copy_text(check))


def _read(root: str, path: str) -> str | None:
    """Reads a file; None where there is none, empty where it is no file of ours."""
    with typed_errors(f"store {root}: open"):
        try:
            return read_small(root, path, _LARGEST).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (NotRegularError, StoreCorruptError):
            return ""


def _read_copy(root: str, space: str) -> str | None:
    """Reads the value in the copy; None where it is gone or damaged."""
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
        raise StoreVersionError(f"store {root}: {space}/{COPY} of version {version}; expected 1")
    return check if isinstance(check, str) and text.encode() == _copy_text(check) else None


def _copy_text(check: str) -> bytes:
    digest = hashlib.blake2b(check.encode(), digest_size=16, person=b"kvpatch key").hexdigest()
    return json.dumps({"version": 1, "check": check, "digest": digest}).encode()


def _is_check(text: str) -> bool:
    return len(text) == 32 and set(text) <= set("0123456789abcdef")


def _stated_by_objects(root: str, space: str, most: int | None) -> str | None:
    """Finds the check value that the first encrypted object of a tenant states; None where none is encrypted.

    Args:
      most: objects that are looked at; None for all.
    """
    for number, path in enumerate(_objects(root, space)):
        if most is not None and number >= most:
            break
        with contextlib.suppress(OSError, StoreError), reading(root, path) as (_, header):
            if is_sealed(header) and isinstance(check := header.body.get("check"), str):
                return check
    return None


def _objects(root: str, space: str) -> Iterator[str]:
    """Lists a tenant's objects and entries while they are found, in no order."""
    for below in (space, f"lib/{os.path.basename(space)}"):
        for folder, _, files in os.walk(f"{root}/{below}"):
            paths = (os.path.relpath(f"{folder}/{file}", root) for file in files)
            yield from filter(is_object, paths)
