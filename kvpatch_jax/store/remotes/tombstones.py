"""Tombstones: values `{"revision": n}` in `<chunk>.gone` that say which objects of a chunk are deleted."""

import json
from typing import NamedTuple

from ...errors import StoreCorruptError, StoreUnreachableError
from ...utils import strict_json
from ..format.header import LARGEST_REVISION
from .adapter import ABSENT, RemoteAdapter

SUFFIX = ".gone"
CHANGES = 16
"""How often a value may change while it is looked at."""


class Tombstone(NamedTuple):
    """Tombstone of a chunk: the revision up to which its objects are deleted, and the generation of its value."""

    revision: int
    generation: bytes


def parse_tombstone(data: bytes) -> int:
    """Parses a tombstone into its revision. Fields of later versions are allowed.

    Raises:
      StoreCorruptError: it is damaged.
    """
    try:
        value = strict_json.loads(data)
    except ValueError as error:
        raise StoreCorruptError(f"tombstone: got {str(error)[:100]}; expected JSON") from error
    revision = value.get("revision") if isinstance(value, dict) else None
    if type(revision) is not int or not 0 <= revision <= LARGEST_REVISION:
        raise StoreCorruptError(f"tombstone: got {str(value)[:60]}; expected a revision")
    return revision


def read_tombstone(remote: RemoteAdapter, chunk: str) -> Tombstone | None:
    """Reads a chunk's tombstone, a second time if it is damaged; None if there is none.

    Raises:
      StoreCorruptError: it is damaged.
      StoreIOError: the service failed.
    """
    for last in (False, True):
        found = remote.read(f"{chunk}{SUFFIX}")
        if found is None:
            return None
        try:
            return Tombstone(parse_tombstone(found.data), found.generation)
        except StoreCorruptError:
            if last:
                raise
    raise AssertionError("unreachable: the last read returns or raises")


def raise_tombstone(remote: RemoteAdapter, chunk: str, revision: int) -> int:
    """Writes a chunk's tombstone unless it has this revision or a later one. Returns the one that it has then.

    Raises:
      StoreCorruptError: it is damaged.
      StoreIOError: the service failed.
    """
    text = json.dumps({"revision": revision}).encode()
    for _ in range(CHANGES):
        found = read_tombstone(remote, chunk)
        if found is not None and found.revision >= revision:
            return found.revision
        if remote.write(f"{chunk}{SUFFIX}", text, ABSENT if found is None else found.generation) is not None:
            return revision
    raise StoreUnreachableError("remote store: delete: got a tombstone that keeps changing; expected one")
