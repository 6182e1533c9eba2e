"""Floors of encrypted libraries: protection against the replay of entries that were replaced or deleted.

An attacker who can write the directory, without the key, can put back any earlier file: it verifies. So entries have
increasing numbers (in a dynamic library their versions), and each folder has an object, the floor, with the least
valid number of each entry. It is encrypted as they are and written after the entry, so a crash in between leaves an
entry above its floor, never below. A process remembers the highest floor it has seen.

Not detected: a folder that is put back whole, entries and floor, by a process that has not seen the later floor.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import StoreCorruptError, StoreError, StoreFullError, StoreVersionError
from ..format.encryption import open_object
from ..format.header import Header
from ..format.known_words import expect_known
from ..format.naming import Name, name_at
from ..format.objects import Blob, check_name, read_header
from ..io.files import Identity, ReadInto, identity, open_regular
from .directory import reading
from .disk import Disk
from .object_writer import LinkSource

_LEAF = np.zeros(1, np.uint8)  # an object has at least one byte


@dataclasses.dataclass(frozen=True)
class Floor:
    """Floor of the entries of one folder.

    Attributes:
      stamp: orders floors in time.
      base: entries that are not in `numbers` must have a number above this.
      numbers: least valid number of each entry, by its keyed name.
    """

    stamp: int = 0
    base: int = 0
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def takes(self, key: str, number: int) -> bool:
        """Returns whether an entry is not older than the latest one that was put."""
        return number >= self.numbers[key] if key in self.numbers else number > self.base

    @property
    def next(self) -> int:
        """Number of the next entry, above all others."""
        return max([self.base, *self.numbers.values()]) + 1


def number_of(body: Mapping[str, Any]) -> int:
    """Returns an entry's number: its version, or its ordinal among all entries ever put into its folder."""
    return body.get("number", 0) if body["version"] is None else body["version"]


class Floors:
    """Floors of one tenant's libraries. Without a key there are none."""

    def __init__(self, disk: Disk):
        self._disk = disk
        self._seen: dict[str, Floor] = {}
        self._read: dict[str, tuple[Identity, Floor]] = {}

    @property
    def kept(self) -> bool:
        """Whether there are floors: the tenant has a key."""
        return self._disk.encryption.check is not None

    def of(self, folder: str) -> Floor | None:
        """Returns the latest floor of a folder, on the disk or seen before; None if there is none.

        Raises:
          StoreVersionError: a later version wrote it, so this version cannot use its library.
        """
        if not self.kept:
            return None

        # The floor on the disk may have been put back too: the latest one that was seen counts.
        there, seen = self._on_disk(folder), self._seen.get(folder)
        latest = max((floor for floor in (there, seen) if floor is not None), key=lambda f: f.stamp, default=None)
        if latest is not None:
            self._seen[folder] = latest
        return latest

    def all(self, library: str) -> dict[str, Floor]:
        """Returns the floors of all folders of a library."""
        if not self.kept:
            return {}
        with contextlib.suppress(FileNotFoundError):
            floors = {}
            for name in os.listdir(f"{self._disk.root}/{library}"):
                floor = self.of(f"{library}/{name}") if len(name) == 2 else None
                if floor is not None:
                    floors[f"{library}/{name}"] = floor
            return floors
        return {}

    def _on_disk(self, folder: str) -> Floor | None:
        root, path = self._disk.root, _floor_name(folder).path
        try:
            before = self._read.get(folder)
            if before is not None and before[0] == identity(os.lstat(f"{root}/{path}")):
                return before[1]

            def body_of(read_bytes: ReadInto) -> Mapping[str, Any] | None:
                header = read_header(fd, read_bytes=read_bytes)
                check_name(header, os.path.basename(path))
                opened = open_object(fd, header, self._disk.encryption, self._disk.buffers, read_bytes)
                return None if opened is None else opened[0].body

            with open_regular(root, path, noatime=True) as fd:
                which = identity(os.fstat(fd))
                body = self._disk.read_twice(fd, body_of, lambda why: None)
            if body is None:
                return None
            expect_known("floor with a field", body, ("stamp", "base", "numbers"))
            floor = Floor(body["stamp"], body["base"], body["numbers"])
        except StoreVersionError:
            raise  # it is unknown what it forbids, and it must not be replaced
        except (OSError, StoreError, KeyError):
            return None  # damaged or missing: the floor seen before counts, and the next entry writes it again

        self._read[folder] = which, floor
        return floor

    # -------------------------------------------------------------------------------------------------- raising

    def put(self, name: Name, blob: Blob) -> None:
        """Writes an entry with its number, and the floor after it, durably in one commit. Raises as `Disk.put`."""
        if not self.kept:
            self._disk.put(name, self._disk.encryption.sealed(blob, name.file))
            return

        floor = self.of(name.folder) or self._initial(name.folder)
        body = dict(blob.body)
        if body["version"] is None:
            body["number"] = floor.next
        raised = self._raised(floor, {**floor.numbers, name.chunk: number_of(body)}, floor.base)

        # In this order: a crash between the two names leaves the entry above its floor.
        items = [(name, dataclasses.replace(blob, body=body)), (_floor_name(name.folder), _blob(raised))]
        self._disk.put_group([(own, self._disk.encryption.sealed(content, own.file)) for own, content in items])
        self._seen[name.folder] = raised

    def removed(self, paths: Iterable[str]) -> None:
        """Raises floors above deleted entries, so that they cannot be put back.

        If the disk is full, or a later version wrote them, floors stay unchanged.
        """
        by_folder: dict[str, list[str]] = {}
        for path in paths:
            name = name_at(path)
            by_folder.setdefault(name.folder, []).append(name.chunk)
        for folder, keys in by_folder.items():
            with contextlib.suppress(StoreFullError, StoreVersionError):
                floor = self.of(folder)
                if floor is not None:
                    gone = [floor.numbers[key] for key in keys if key in floor.numbers]
                    numbers = {key: number for key, number in floor.numbers.items() if key not in keys}
                    self._write(folder, self._raised(floor, numbers, max([floor.base, *gone])))

    def admit(self, coming: Sequence[tuple[Name, Blob | LinkSource]], noted: dict[str, int]) -> None:
        """Sets floors to imported entries, which may be older than the stored ones: the owner asks for them.

        Args:
          coming: blobs, or files of encrypted entries.
          noted: numbers of earlier groups of the same import, by keyed name; updated. Of several versions the highest
            counts.
        """
        if not self.kept:
            return
        by_folder: dict[str, dict[str, int]] = {}
        for name, item in coming:
            if name.kind == "entry":
                noted[name.chunk] = max(noted.get(name.chunk, 0), number_of(self._body(item)))
                by_folder.setdefault(name.folder, {})[name.chunk] = noted[name.chunk]
        for folder, numbers in by_folder.items():
            floor = self.of(folder) or self._initial(folder)
            self._write(folder, self._raised(floor, {**floor.numbers, **numbers}, floor.base))

    def _body(self, item: Blob | LinkSource) -> Mapping[str, Any]:
        if isinstance(item, Blob):
            return item.body
        with reading(item.root, item.path) as (fd, header):
            opened = open_object(fd, header, self._disk.encryption, self._disk.buffers)
        if opened is None:
            raise StoreCorruptError("object: got an entry that is not encrypted; expected an encrypted one")
        return opened[0].body

    def _raised(self, floor: Floor, numbers: Mapping[str, int], base: int) -> Floor:
        # Above the last one, even if the clock was set back.
        return Floor(max(floor.stamp + 1, time.time_ns()), base, numbers)

    def _initial(self, folder: str) -> Floor:
        """Returns the first floor of a folder, from the entries in it."""
        numbers: dict[str, int] = {}
        for entry in self._disk.scan(folder):
            name = name_at(entry.path)
            with self._disk.reading(name) as opening:
                if opening is not None:
                    header: Header = opening[0]
                    numbers[name.chunk] = max(numbers.get(name.chunk, 0), number_of(header.body))
        return Floor(numbers=numbers)

    def _write(self, folder: str, floor: Floor) -> None:
        name = _floor_name(folder)
        self._disk.put(name, self._disk.encryption.sealed(_blob(floor), name.file))
        self._seen[folder] = floor


def _floor_name(folder: str) -> Name:
    _, _, library, part = folder.split("/")
    return Name(folder, "floor", f"{library}.{part}.floor", "entry")


def _blob(floor: Floor) -> Blob:
    return Blob("entry", {"stamp": floor.stamp, "base": floor.base, "numbers": dict(floor.numbers)}, {"floor": _LEAF})
