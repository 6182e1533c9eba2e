"""Outbox: what a remote store does not have yet, durable and in order, so that an outage delays it and loses nothing.

    root/outbox/<tenant>.<backbone>.<file>            a link to the object's file
    root/outbox/<tenant>.<backbone>.<chunk>.gone      a deletion, as of the tombstone of the chunk

A link keeps the content when the object is evicted. A write replaces the link of an earlier one of its name.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import StoreError
from ..format.naming import Name, is_object, name_at
from ..io.files import (
    Identity,
    copy_into,
    folder,
    link,
    make_directories,
    open_regular_in,
    rename,
    written,
)
from .revisions import GONE, Tombstones, revision_in
from .shard import Shard, locked_shards

FOLDER = "outbox"


class OutboxEntry(NamedTuple):
    """An entry of an outbox.

    Attributes:
      file: its file name in the outbox.
      path: the object's path, or the common beginning of the paths of a deleted chunk's objects, below the root.
      nbytes: bytes of the object; 0 for a deletion.
      since: when it was added, in seconds since the epoch.
      identity: identity of its file.
    """

    file: str
    path: str
    nbytes: int
    since: float
    identity: Identity

    @property
    def deletion(self) -> bool:
        """Whether it is a deletion."""
        return self.file.endswith(GONE)


class Outbox:
    """Outbox of a root, or of one tenant.

    Args:
      root: the store's directory.
      tenant: keyed name of the tenant; "": all.
      tombstones: of the tenant's chunks, without which no deletion is sent.
    """

    def __init__(self, root: str, tenant: str = "", tombstones: Tombstones | None = None):
        self._root, self._tenant, self._tombstones = root, tenant, tombstones

    def add(self, shard: Shard, file: str) -> None:
        """Links an object of a locked shard into the outbox. Durable after `sync`. Raises OSError."""
        _, tenant, backbone, _ = shard.path.split("/")
        aside = f"{tenant}.new-{secrets.token_hex(6)}"
        with self._folder() as fd:
            if not link(shard.fd, file, fd, aside):  # the file system has no links
                with open_regular_in(fd, aside, os.O_RDWR | os.O_CREAT | os.O_EXCL) as new:
                    copy_into(new, self._root, f"{shard.path}/{file}")
                    os.fsync(new)
            try:
                rename(fd, aside, fd, f"{tenant}.{backbone}.{file}")
            finally:  # renaming a link to another one of the same file leaves both
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside, dir_fd=fd)

    def add_deletion(self, chunk_key: str) -> None:
        """Adds the deletion of a chunk durably, and removes the chunk's objects from the outbox. Raises OSError.

        Its tombstone must be durable.
        """
        _, tenant, backbone, _, chunk = chunk_key.split("/")
        target, aside = f"{tenant}.{backbone}.{chunk}{GONE}", f"{tenant}.new-{secrets.token_hex(6)}"
        with self._folder() as fd:
            for file in os.listdir(fd):
                if file.startswith(f"{tenant}.{backbone}.{chunk}.") and file != target:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file, dir_fd=fd)
            with open_regular_in(fd, aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as new:
                os.fsync(new)
            rename(fd, aside, fd, target)
            os.fsync(fd)

    def sync(self) -> None:
        """Makes the added names durable. Raises OSError."""
        with self._folder() as fd:
            os.fsync(fd)

    def entries(self) -> list[OutboxEntry]:
        """Lists the entries, oldest first."""
        found: list[OutboxEntry] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(self._root, FOLDER) as fd:
            for file in os.listdir(fd):
                path = _path_of(file)
                if path is not None and file.startswith(self._tenant):
                    with contextlib.suppress(FileNotFoundError):
                        stat = os.stat(file, dir_fd=fd, follow_symlinks=False)
                        size = 0 if file.endswith(GONE) else stat.st_size
                        found.append(OutboxEntry(file, path, size, stat.st_ctime, written(stat)))
        return sorted(found, key=lambda entry: (entry.since, entry.file))

    def revision(self, entry: OutboxEntry) -> int:
        """Returns the revision of a deletion, as the chunk's tombstone says; 0: nobody with the key has deleted it."""
        return 0 if self._tombstones is None else self._tombstones.of(name_at(f"{entry.path}.kv.safetensors"))

    def done(self, entry: OutboxEntry) -> None:
        """Removes an entry that the remote store has, unless a later one has its place."""
        # Under the lock of the name's shard, in which writes add to the outbox.
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            locked_shards(self._root, [os.path.dirname(entry.path)], make=True),
            folder(self._root, FOLDER) as fd,
        ):
            if written(os.stat(entry.file, dir_fd=fd, follow_symlinks=False)) == entry.identity:
                os.unlink(entry.file, dir_fd=fd)

    def holds(self, name: Name) -> bool:
        """Returns whether an object waits to be sent."""
        return name.kind != "entry" and os.path.lexists(f"{self._root}/{FOLDER}/{file_of(name)}")

    def bring_back(self, name: Name) -> bool:
        """Links an object that waits to be sent back to its name, from which it was evicted. Returns whether it did.

        Not one whose chunk was deleted since: its deletion takes it out of the outbox a moment later.
        """
        if not self.holds(name):  # most often: every miss asks
            return False
        try:
            with locked_shards(self._root, [name.folder], make=True) as shards, folder(self._root, FOLDER) as fd:
                shard, file = shards[name.folder], file_of(name)
                gone = 0 if self._tombstones is None else self._tombstones.of(name, shard.fd)
                deleted = gone and revision_in(fd, file, name.file) <= gone
                return not deleted and link(fd, file, shard.fd, name.file)
        except (OSError, StoreError):
            return False

    def clear(self) -> None:
        """Removes all entries. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), folder(self._root, FOLDER) as fd:
            for file in os.listdir(fd):
                if file.startswith(self._tenant):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file, dir_fd=fd)
            os.fsync(fd)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[int]:
        if not os.path.isdir(f"{self._root}/{FOLDER}"):
            make_directories(self._root, FOLDER)
        with folder(self._root, FOLDER) as fd:
            yield fd


def file_of(name: Name) -> str:
    """Returns the file name of an object in the outbox."""
    _, tenant, backbone, _ = name.folder.split("/")
    return f"{tenant}.{backbone}.{name.file}"


def _path_of(file: str) -> str | None:
    """Returns the path that a file in the outbox stands for; None for other files."""
    tenant, _, rest = file.partition(".")
    backbone, _, own = rest.partition(".")
    path = f"obj/{tenant}/{backbone}/{own[:2]}/{own}"
    if is_object(path):
        return name_at(path).path
    chunk = path.removesuffix(GONE)
    return chunk if chunk != path and is_object(f"{chunk}.kv.safetensors") else None
