"""Durable writes: objects are written to temporary files, synced and then renamed, so each exists whole or not at all.

An acknowledged write has its data and its name on the disk: data, rename, directory, in this order. Of two writers of
one name the one with the later revision wins (`revisions`).
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from ...errors import StoreError
from ..format.header import Header
from ..format.naming import Name
from ..format.objects import Blob, write_blob
from ..io.files import (
    Identity,
    NotRegularError,
    copy_into,
    folder,
    link,
    open_file_in,
    open_regular_in,
    rename,
    start_writing,
    sync_files,
    typed,
    typed_errors,
    written,
)
from ..io.folders import close, made_folder, open_folder
from ..io.locks import try_lock, unlock
from ..io.thread_pool import ThreadPool
from .directory import remove_objects, was_written
from .index import Changes, Index, IndexedObject, object_of
from .key_check import check_key
from .outbox import Outbox
from .revisions import Tombstones, revision_in
from .shard import Shard, lock_shards, locked_shards, release

GROUP = 64
"""Limit of objects per commit: each has a file open until it is renamed."""

_numbers = itertools.count()
_group = ThreadPool(min(4, max(2, os.cpu_count() or 1)), "kvpatch-group")
"""Threads that write the objects of a group. They wait for those that compute checksums, which are others."""


class LinkSource(NamedTuple):
    """A file that is already an object: a root directory, the path below it, and the revision in its header."""

    root: str
    path: str
    revision: int = 0


class PutResult(NamedTuple):
    """Result of a write.

    Attributes:
      nbytes: bytes of the files that were written.
      outdated: names of objects that were not, because a later write, deletion or eviction has replaced them.
    """

    nbytes: int
    outdated: list[Name]


Only = Literal["later", "copy", "absent"] | int
"""What a write may replace; see `ObjectWriter.put`."""


class _Place(NamedTuple):
    """A file name in an open directory."""

    folder: int
    name: str


class _Written(NamedTuple):
    """An object in a temporary file."""

    name: Name
    place: _Place
    fd: int
    header: Header


class ObjectWriter:
    """Writes objects below a root.

    Args:
      root: the store's directory.
      check: the value of the tenant's key-check file (`Encryption.check`); None without encryption.
      index: the root's index.

    Attributes:
      tombstones: of the tenant whose objects are written; None: deletions are not looked at.
      outbox: receives what is put, for the remote store; None: there is none.
      note: counts locks that are waited for.
    """

    def __init__(self, root: str, check: str | None, index: Index):
        self.root, self._check, self._index = root, check, index
        self.tombstones: Tombstones | None = None
        self.outbox: Outbox | None = None
        self.note: Callable[[str], object] | None = None

    def put(self, items: Sequence[tuple[Name, Blob]], only: Only = "later", since: int | None = None) -> PutResult:
        """Writes several objects durably, in groups of `GROUP`, each with one sync of the data and one of the names.

        An object is not written if its name has a later revision: then it counts as replaced. Blobs without a revision
        replace anything.

        Args:
          only: "later" as above; "copy": neither over an object of a later format; "absent": over no object; a number:
            over the object of this revision alone, -1: over none (`revision_in`).
          since: of a copy, when its read began, in nanoseconds since the epoch: it does not take the place of what was
            evicted since then, which may be later.

        Raises:
          StoreFullError, StoreReadOnlyError, StoreIOError: no object is acknowledged or partly there. If there is more
            than one group, the first ones may be stored, and the error says how many objects.
          StoreKeyError: in the meantime the tenant's objects have been encrypted with another key.
        """
        result = PutResult(0, [])
        for start in range(0, len(items), GROUP):
            try:
                part = self._put_group(items[start : start + GROUP], only, since)
                result = PutResult(result.nbytes + part.nbytes, result.outdated + part.outdated)
            except StoreError as error:
                if start == 0:
                    raise
                stored = f"store: put: the first {start} of {len(items)} objects are stored, then"
                raise type(error)(f"{stored} {error}") from error
        return result

    def _put_group(self, items: Sequence[tuple[Name, Blob]], only: Only, since: int | None) -> PutResult:
        files: list[_Written] = []
        named, outdated = list[_Written](), list[Name]()
        aside, synced = -1, list[Shard]()
        try:
            aside = self._open_temporaries()
            if len(items) == 1:  # a thread of the pool would gain nothing
                files.append(self._write(*items[0], aside))
            else:
                write = functools.partial(self._write, aside=aside, ahead=True)
                jobs = [_group.submit(write, name, blob) for name, blob in items]
                concurrent.futures.wait(jobs)  # all of them, before their temporary files are removed
                files += [job.result() for job in jobs if job.exception() is None]
                for job in jobs:
                    job.result()  # raises

            # Data before names: a name that survives a crash must refer to a whole object.
            sync_files([file.fd for file in files])
            waiting: Sequence[_Written] = files
            while waiting:
                waiting = self._name(waiting, named, outdated, only, since, synced)
            if self.outbox is not None and named and only != "copy":
                self.outbox.sync()
            for shard in synced:  # without the locks, which others wait for
                os.fsync(shard.fd)
        except OSError as error:
            raise typed(error, f"store: put {len(items)} objects") from error
        finally:
            for shard in synced:
                close(shard.fd)
            for file in files:
                if file not in named:
                    _remove(file.place)
                close(file.fd)
            if aside >= 0:
                close(aside)
        return PutResult(sum([file.header.size for file in named]), outdated)

    def _name(
        self,
        files: Sequence[_Written],
        named: list[_Written],
        outdated: list[Name],
        only: Only,
        since: int | None,
        synced: list[Shard],
    ) -> list[_Written]:
        """Gives files their names, under the locks of their shards, unless later ones have them.

        Args:
          named: receives the files that have their names.
          outdated: receives the names of files that were not given theirs.
          synced: receives the folders in which names were given, unlocked and open.

        Returns:
          The files whose tenant was deleted in the meantime, so that their folder has to be made again.
        """
        placed, added = list[_Written](), list[IndexedObject]()
        folders = sorted({file.name.folder for file in files})
        shards = lock_shards(self.root, folders, make=True, note=self.note)
        try:
            # In the locks: a rotation waits for them, so that nothing is written with the old key afterwards. A
            # deletion of the tenant may have removed the files.
            for space in {f"obj/{file.name.tenant}" for file in files}:
                check_key(self.root, space, self._check, note=True)
            for file in files:
                name, header = file.name, file.header
                shard = shards[name.folder]
                if self._is_outdated(shard, name, header.revision, only, since):
                    outdated.append(name)
                    continue
                os.rename(file.place.name, name.file, src_dir_fd=file.place.folder, dst_dir_fd=shard.fd)
                placed.append(file)
                if self.outbox is not None and only != "copy" and name.kind != "entry":
                    self.outbox.add(shard, name.file)
                added.append(object_of(name.path, os.fstat(file.fd), header.revision, header.expires))

            moved = [file for file in placed if not shards[file.name.folder].in_place]
            for file in moved:
                rename(shards[file.name.folder].fd, file.name.file, file.place.folder, file.place.name)
            if not moved:
                self._index.record(shards.values(), Changes(added))
            stay = [file for file in placed if file not in moved] if moved else placed
            named += stay
            for file in stay:
                shard = shards.pop(file.name.folder, None)
                if shard is not None:
                    unlock(shard.fd)
                    synced.append(shard)
        finally:
            release(shards.values())
        return moved

    def _is_outdated(self, shard: Shard, name: Name, revision: int, only: Only, since: int | None) -> bool:
        """Returns whether a later write, deletion or eviction has replaced a write of a revision."""
        known = revision_in(shard.fd, name.file) if revision or only != "later" else -1
        if (known >= 0 and only == "absent") or (isinstance(only, int) and known != only):
            return True
        if known < 0 and (revision or since is not None):
            evicted, last = self._index.evicted(name.path)
            if evicted >= since if since is not None else last >= revision:
                return True
        if not revision:
            return False
        return revision <= known or (self.tombstones is not None and revision <= self.tombstones.of(name, shard.fd))

    def replace(self, name: Name, blob: Blob, file: Identity, used: float) -> int:
        """Replaces an object by another form of it durably, with its revision and its time of last use.

        Args:
          file: identity (`written`) of the file that the form was made of.
          used: time of the last use, in seconds since the epoch.

        Returns:
          The bytes of the file; 0 if the object was written or deleted in the meantime. Raises as `put`.
        """
        with typed_errors("store: replace"), contextlib.ExitStack() as stack:
            aside = stack.enter_context(self.temporaries())
            write = functools.partial(write_blob, blob=blob, name=name.file)
            place, fd, header = stack.enter_context(self.written(name, aside, write))
            os.utime(fd, ns=(int(used * 1e9), os.fstat(fd).st_mtime_ns))
            sync_files([fd])
            with contextlib.suppress(FileNotFoundError), locked_shards(self.root, [name.folder]) as shards:
                shard = shards[name.folder]
                if written(os.stat(name.file, dir_fd=shard.fd, follow_symlinks=False)) != file:
                    return 0
                rename(place.folder, place.name, shard.fd, name.file)
                entry = object_of(name.path, os.fstat(fd), header.revision, header.expires)
                self._index.record([shard], Changes(added=[entry] if name.kind != "entry" else []))
                outbox = Outbox(self.root)
                if outbox.holds(name):  # what waits for the remote store has this form too
                    outbox.add(shard, name.file)
                    outbox.sync()
                os.fsync(shard.fd)
                return header.size
        return 0

    def add_all(self, groups: Iterable[Sequence[tuple[Name, Blob | LinkSource]]], copy: bool) -> int:
        """Calls `add` for every group, and on any exception removes what was added. Returns the number of objects."""
        added: dict[str, Identity] = {}
        try:
            for group in groups:
                self.add(group, added, copy=copy)
        except BaseException:  # an interrupt too: all or none
            for path, file in added.items():
                with contextlib.suppress(StoreError):
                    remove_objects(self.root, self._index, {path: was_written(file)})
            raise
        return len(added)

    def add(
        self, items: Sequence[tuple[Name, Blob | LinkSource]], added: dict[str, Identity], *, copy: bool = False
    ) -> None:
        """Writes objects in one commit under names that are free; existing objects stay.

        Args:
          items: blobs to write, or object files to hard-link.
          added: receives path and file identity (`written`) of every added object, so that it can be removed again.
          copy: copies files instead of linking. This is also done if the file system cannot link.

        Raises:
          StoreFullError, StoreReadOnlyError, StoreIOError: nothing is acknowledged; `added` has what was stored.
        """
        refused: list[tuple[Name, Blob | LinkSource]] = []
        with typed_errors(f"store: add {len(items)} objects"), contextlib.ExitStack() as stack:
            aside = stack.enter_context(self.temporaries())
            sources = [stack.enter_context(self._source(name, item, aside, copy)) for name, item in items]
            sync_files([fd for _, fd in sources])
            changes = Changes()
            folders = {name.folder for name, _ in items}
            with locked_shards(self.root, folders, make=True) as shards:
                for space in {f"obj/{name.tenant}" for name, _ in items} if self._check is not None else ():
                    check_key(self.root, space, self._check, note=True)  # as for a put
                for (name, item), (place, fd) in zip(items, sources, strict=True):
                    shard = shards[name.folder]
                    is_new = self.tombstones is None or name.kind == "entry"
                    gone = 0 if is_new else self.tombstones.of(name, shard.fd)  # pyright: ignore[reportOptionalMemberAccess]
                    if gone and item.revision <= gone:  # deleted since the import began
                        continue
                    with contextlib.suppress(FileExistsError):
                        if link(place.folder, place.name, shard.fd, name.file):
                            added[name.path] = written(os.fstat(fd))
                            changes.added.append(object_of(name.path, os.fstat(fd), item.revision))
                        else:
                            refused.append((name, item))
                self._index.record(shards.values(), changes)
            for path in sorted(folders):
                with contextlib.suppress(FileNotFoundError), folder(self.root, path) as fd:
                    os.fsync(fd)

        # The file system cannot link these. Copies are written like blobs, in a commit of their own.
        if refused:
            self.add(refused, added, copy=True)

    @contextlib.contextmanager
    def _source(self, name: Name, item: Blob | LinkSource, aside: int, copy: bool) -> Iterator[tuple[_Place, int]]:
        """Opens a file to be linked: the caller's, or a temporary one."""
        if isinstance(item, Blob):
            write = functools.partial(write_blob, blob=item, name=name.file)
        elif copy:
            write = functools.partial(copy_into, root=item.root, path=item.path)
        else:
            above, _, file = item.path.rpartition("/")
            with folder(item.root, above) as parent, open_regular_in(parent, file) as fd:
                yield _Place(parent, file), fd
            return
        with self.written(name, aside, write) as (temporary, fd, _):
            yield temporary, fd

    def _open_temporaries(self) -> int:
        """Opens the directory of temporary files, and creates it again if it was removed. Returns its descriptor."""
        try:
            return open_folder(self.root, "tmp")
        except FileNotFoundError:
            return made_folder(self.root, "tmp")

    @contextlib.contextmanager
    def temporaries(self) -> Iterator[int]:
        """Opens the directory of temporary files."""
        fd = self._open_temporaries()
        try:
            yield fd
        finally:
            close(fd)

    def _write(self, name: Name, blob: Blob, aside: int, *, ahead: bool = False) -> _Written:
        """Writes an object to a temporary file, which stays open. `ahead` begins to write it back."""
        place, fd = _new_file(name, aside)
        try:
            header = write_blob(fd, blob, name.file)
            if ahead:
                start_writing(fd)
        except BaseException:
            _remove(place)
            close(fd)
            raise
        return _Written(name, place, fd, header)

    @contextlib.contextmanager
    def written[T](self, name: Name, aside: int, write: Callable[[int], T]) -> Iterator[tuple[_Place, int, T]]:
        """Writes a temporary file in `aside`. It is removed at the end unless it was renamed."""
        place, fd = _new_file(name, aside)
        try:
            result = write(fd)
            start_writing(fd)
            yield place, fd, result
        finally:
            _remove(place)
            close(fd)

    def sweep(self, tenant: str = "") -> int:
        """Removes files of dead writers from tmp/; a live writer holds a lock on its file. Returns their number.

        Args:
          tenant: keyed name of a tenant: only its files and the root's settings are removed.
        """
        swept = 0
        with typed_errors("store: sweep"), self.temporaries() as aside:
            for name in [name for name in os.listdir(aside) if name.startswith((tenant, "settings-"))]:
                with (
                    contextlib.suppress(FileNotFoundError, NotRegularError),
                    open_regular_in(aside, name, os.O_RDWR) as fd,
                ):
                    dead = try_lock(fd)
                    # The name may have another file by now, which a live writer has not locked yet.
                    if dead and os.stat(name, dir_fd=aside, follow_symlinks=False).st_ino == os.fstat(fd).st_ino:
                        os.unlink(name, dir_fd=aside)
                        swept += 1
        return swept


def _new_file(name: Name, aside: int) -> tuple[_Place, int]:
    """Creates a temporary file for an object of a tenant, locked as a sign to sweeps that its writer is alive."""
    while True:
        own = f"{name.tenant}.{os.getpid()}-{threading.get_native_id()}-{next(_numbers)}-{time.monotonic_ns()}"
        fd, _ = open_file_in(aside, own, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        place = _Place(aside, own)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return place, fd
        except BaseException:
            _remove(place)
            close(fd)
            raise
        close(fd)  # a sweep removed it between the two calls


def _remove(place: _Place) -> None:
    """Removes a temporary file, unless it was renamed."""
    with contextlib.suppress(OSError):
        os.unlink(place.name, dir_fd=place.folder)
