"""Durable writes: objects are written to temporary files, synced and then renamed, so each exists whole or not at all.

An acknowledged write has its data and its name on the disk: data, rename, directory, in this order. Of two writers of
one name the later wins.
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
from typing import NamedTuple

from ...errors import StoreError
from ..format.naming import Name
from ..format.objects import Blob, write_blob
from ..io.files import (
    Identity,
    NotRegularError,
    copy_into,
    folder,
    link,
    locked,
    make_directories,
    open_regular_in,
    rename,
    start_writing,
    sync_files,
    try_lock,
    typed_errors,
    written,
)
from ..io.thread_pool import ThreadPool
from .directory import NameState, name_state, removing, was_written
from .key_check import check_key

GROUP = 64
"""Limit of objects per commit: each has a file open until it is renamed."""

_numbers = itertools.count()
_group = ThreadPool(min(4, max(2, os.cpu_count() or 1)), "kvpatch-group")
"""Threads that write the objects of a group. They wait for those that compute checksums, which are others."""


class LinkSource(NamedTuple):
    """A file that is already an object: a root directory, and the path below it."""

    root: str
    path: str


class _Place(NamedTuple):
    """A file name in an open directory."""

    folder: int
    name: str


class ObjectWriter:
    """Writes objects below a root.

    Args:
      root: the store's directory.
      check: the value of the tenant's key-check file (`Encryption.check`); None without encryption.
    """

    def __init__(self, root: str, check: str | None):
        self.root, self._check = root, check
        self._durable: set[str] = set()  # folders that this process has created durably

    def put(self, items: Sequence[tuple[Name, Blob]]) -> int:
        """Writes several objects durably, in groups of `GROUP`, each with one sync of the data and one of the names.

        Returns:
          The bytes of their files.

        Raises:
          StoreFullError, StoreReadOnlyError, StoreIOError: no object is acknowledged or partly there. If there is more
            than one group, the first ones may be stored, and the error says how many objects.
          StoreKeyError: in the meantime the tenant's objects have been encrypted with another key.
        """
        total = 0
        for start in range(0, len(items), GROUP):
            try:
                total += self._put_group(items[start : start + GROUP])
            except StoreError as error:
                if start == 0:
                    raise
                stored = f"store: put: the first {start} of {len(items)} objects are stored, then"
                raise type(error)(f"{stored} {error}") from error
        return total

    def _put_group(self, items: Sequence[tuple[Name, Blob]]) -> int:
        with typed_errors(f"store: put {len(items)} objects"), contextlib.ExitStack() as stack:
            aside = stack.enter_context(self.temporaries())

            def write(name: Name, blob: Blob) -> tuple[Name, _Place, int, int]:
                temporary = self.written(name, aside, functools.partial(write_blob, blob=blob, name=name.file))
                place, fd, header = stack.enter_context(temporary)
                return name, place, fd, header.size

            if len(items) == 1:  # a thread of the pool would gain nothing
                files = [write(*items[0])]
            else:
                jobs = [_group.submit(write, name, blob) for name, blob in items]
                concurrent.futures.wait(jobs)  # all of them, before the stack removes their temporary files
                files = [job.result() for job in jobs]

            # Data before names: a name that survives a crash must refer to a whole object.
            sync_files([fd for _, _, fd, _ in files])
            with self._naming(items, noted=True):
                for name, place, _, _ in files:
                    self._publish(name, place, rename)
        return sum(size for *_, size in files)

    def copy(self, name: Name, blob: Blob, before: NameState) -> int:
        """Writes a copy of an object, unless its name was written or deleted since the state `before` the read.

        Returns:
          The bytes of its file; 0 if it was not written. Raises as `put`.
        """
        with typed_errors("store: put a copy"), contextlib.ExitStack() as stack:
            aside = stack.enter_context(self.temporaries())
            write = functools.partial(write_blob, blob=blob, name=name.file)
            place, fd, header = stack.enter_context(self.written(name, aside, write))
            sync_files([fd])  # before the lock, because it takes long
            with self._naming([(name, blob)], noted=True, before=before) as allowed:
                if allowed:
                    self._publish(name, place, rename)
        return header.size if allowed else 0

    def add_all(self, groups: Iterable[Sequence[tuple[Name, Blob | LinkSource]]], copy: bool) -> int:
        """Calls `add` for every group, and on any exception removes what was added. Returns the number of objects."""
        added: dict[str, Identity] = {}
        try:
            for group in groups:
                self.add(group, added, copy=copy)
        except BaseException:  # an interrupt too: all or none
            for path, file in added.items():
                with contextlib.suppress(StoreError), removing(self.root) as removal:
                    removal.remove(path, was_written(file))
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
            with self._naming(items, noted=self._check is not None):
                for (name, item), (place, fd) in zip(items, sources, strict=True):
                    with contextlib.suppress(FileExistsError):
                        if self._publish(name, place, link):
                            added[name.path] = written(os.fstat(fd))
                        else:
                            refused.append((name, item))

        # The file system cannot link these. Copies are written like blobs, in a commit of their own.
        if refused:
            self.add(refused, added, copy=True)

    @contextlib.contextmanager
    def _naming(
        self, items: Sequence[tuple[Name, object]], noted: bool, before: NameState | None = None
    ) -> Iterator[bool]:
        """Locks the names of the root while objects are renamed, then syncs their folders.

        Args:
          noted: whether key-check files are written and compared, because a deletion of a tenant may have removed them.
          before: the state of the one name before the object was read, for a copy. Yields whether it may be written.
        """
        with locked(f"{self.root}/names.lock", shared=before is None):
            if before is not None and not before.allows(name_state(self.root, items[0][0].path)):
                yield False
                return
            for space in sorted({f"obj/{name.tenant}" for name, _ in items} if noted else ()):
                check_key(self.root, space, self._check, note=True)
            yield True
        # Without the lock: it is not fair, so syncs under it could delay a deletion for long.
        for path in sorted({name.folder for name, _ in items}):
            with folder(self.root, path) as fd:
                os.fsync(fd)

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

    @contextlib.contextmanager
    def temporaries(self) -> Iterator[int]:
        """Opens the directory of temporary files, and creates it again if it was removed."""
        with contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(folder(self.root, "tmp"))
            except FileNotFoundError:
                fd = stack.enter_context(folder(self.root, "tmp", make=True))
            yield fd

    @contextlib.contextmanager
    def written[T](self, name: Name, aside: int, write: Callable[[int], T]) -> Iterator[tuple[_Place, int, T]]:
        """Writes a temporary file in `aside`. It is removed at the end unless it was renamed."""
        while True:
            own = f"{name.tenant}.{os.getpid()}-{threading.get_native_id()}-{next(_numbers)}-{time.monotonic_ns()}"
            with open_regular_in(aside, own, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX)  # shows sweeps that its writer is alive
                if os.fstat(fd).st_nlink == 0:
                    continue  # a sweep removed it between the two calls
                try:
                    result = write(fd)
                    start_writing(fd)
                    yield _Place(aside, own), fd, result
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(own, dir_fd=aside)
                return

    def _publish[T](self, name: Name, source: _Place, place: Callable[[int, str, int, str], T]) -> T:
        """Gives a file its name, by `link` or `rename`."""
        if name.folder not in self._durable:
            make_directories(self.root, name.folder)
            self._durable.add(name.folder)
        try:
            with folder(self.root, name.folder) as target:
                return place(*source, target, name.file)
        except FileNotFoundError:  # the folder was removed in the meantime
            with folder(self.root, name.folder, make=True) as target:
                return place(*source, target, name.file)

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
