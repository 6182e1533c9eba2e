"""Durable puts: objects are written aside, synced, and then named, so that each is there whole or not at all.

An acknowledged write has its data and its name on the disk: data, rename, directory, in this order. Of two writers of
one name the later wins, and both wrote the same content.
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
"""Objects that one commit takes: each has a file open until it has its name."""

_numbers = itertools.count()
_group = ThreadPool(min(4, max(2, os.cpu_count() or 1)), "kvpatch-group")
"""Write the objects of a group. Not the threads that sum large objects, for which these wait."""


class LinkSource(NamedTuple):
    """A file that is an object already: the directory that holds it, and the path below that."""

    root: str
    path: str


class _Place(NamedTuple):
    """A name in an open directory."""

    folder: int
    name: str


class ObjectWriter:
    """Writes objects below a root.

    Args:
      root: the store's directory.
      check: value of the tenant's key that its key-check file holds (`Encryption.check`), None without encryption.
    """

    def __init__(self, root: str, check: str | None):
        self.root, self._check = root, check
        self._durable: set[str] = set()  # folders whose own names this process has synced

    def put(self, items: Sequence[tuple[Name, Blob]]) -> int:
        """Writes several objects, `GROUP` with one sync of the data and one of the names. Returns the bytes of their
        files.

        Raises:
          StoreFullError, StoreReadOnlyError, StoreIOError: none of them is acknowledged; none is there in part. Of more
            than a group the first may be there whole, and the error says how many.
          StoreKeyError: the tenant's objects were encrypted under another key meanwhile.
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

            if len(items) == 1:
                files = [write(*items[0])]
            else:
                jobs = [_group.submit(write, name, blob) for name, blob in items]
                concurrent.futures.wait(jobs)  # all of them, before the stack takes away what they made
                files = [job.result() for job in jobs]

            # Data before names: a name that survives a crash must lead to a whole object.
            sync_files([fd for _, _, fd, _ in files])
            with self._naming(items, noted=True):
                for name, place, _, _ in files:
                    self._publish(name, place, rename)
        return sum(size for *_, size in files)

    def copy(self, name: Name, blob: Blob, before: NameState) -> int:
        """Writes an object that was read elsewhere, if its name's state before that still allows it.

        Returns:
          The bytes of its file; 0 where it was not written. Raises as `put`.
        """
        with typed_errors("store: put a copy"), contextlib.ExitStack() as stack:
            aside = stack.enter_context(self.temporaries())
            write = functools.partial(write_blob, blob=blob, name=name.file)
            place, fd, header = stack.enter_context(self.written(name, aside, write))
            sync_files([fd])
            with self._naming([(name, blob)], noted=True, before=before) as allowed:
                if allowed:
                    self._publish(name, place, rename)
        return header.size if allowed else 0

    def add_all(self, groups: Iterable[Sequence[tuple[Name, Blob | LinkSource]]], copy: bool) -> int:
        """Calls `add` for every group, and removes what it added again if anything is raised. How many were added."""
        added: dict[str, Identity] = {}
        try:
            for group in groups:
                self.add(group, added, copy=copy)
        except BaseException:
            for path, file in added.items():
                with contextlib.suppress(StoreError), removing(self.root) as removal:
                    removal.remove(path, was_written(file))
            raise
        return len(added)

    def add(
        self, items: Sequence[tuple[Name, Blob | LinkSource]], added: dict[str, Identity], *, copy: bool = False
    ) -> None:
        """Writes objects in one commit under names that are free; what is there stays.

        Args:
          items: blobs, or files that are objects of that name already, which get a second name here.
          added: filled with path and file (`written`) of every object that was added, so that it can be removed again.
          copy: copies files instead. So does a file system that refuses to link.

        Raises:
          StoreFullError, StoreReadOnlyError, StoreIOError: nothing is acknowledged; `added` says what is there.
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
        if refused:
            self.add(refused, added, copy=True)

    @contextlib.contextmanager
    def _naming(
        self, items: Sequence[tuple[Name, object]], noted: bool, before: NameState | None = None
    ) -> Iterator[bool]:
        """Locks the names of the root while objects get theirs, then syncs their folders.

        Args:
          noted: whether the tenants' key-check files are written and compared, since a deletion may have removed them.
          before: the state of the one name before it was read elsewhere. Yields whether it may be written still.
        """
        with locked(f"{self.root}/names.lock", shared=before is None):
            if before is not None and not before.allows(name_state(self.root, items[0][0].path)):
                yield False
                return
            for space in sorted({f"obj/{name.tenant}" for name, _ in items} if noted else ()):
                check_key(self.root, space, self._check, note=True)
            yield True
        # Without the lock: it is not fair, so that syncs under it could keep whoever deletes waiting for long.
        for each in sorted({name.folder for name, _ in items}):
            with folder(self.root, each) as fd:
                os.fsync(fd)

    @contextlib.contextmanager
    def _source(self, name: Name, item: Blob | LinkSource, aside: int, copy: bool) -> Iterator[tuple[_Place, int]]:
        """Opens a file to link from: the caller's, or a temporary one."""
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
        """Opens the directory of temporary files, made again where somebody removed it."""
        with contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(folder(self.root, "tmp"))
            except FileNotFoundError:
                fd = stack.enter_context(folder(self.root, "tmp", make=True))
            yield fd

    @contextlib.contextmanager
    def written[T](self, name: Name, aside: int, write: Callable[[int], T]) -> Iterator[tuple[_Place, int, T]]:
        """Writes a temporary file in `aside`; it is removed at the end unless it was renamed."""
        while True:
            own = f"{name.tenant}.{os.getpid()}-{threading.get_native_id()}-{next(_numbers)}-{time.monotonic_ns()}"
            with open_regular_in(aside, own, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX)  # tells sweeps that its writer is alive
                if os.fstat(fd).st_nlink == 0:
                    continue  # a sweep came between the two calls
                try:
                    told = write(fd)
                    start_writing(fd)
                    yield _Place(aside, own), fd, told
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(own, dir_fd=aside)
                return

    def _publish[T](self, name: Name, source: _Place, place: Callable[[int, str, int, str], T]) -> T:
        """Gives a file its name by `link` or `rename`."""
        if name.folder not in self._durable:
            make_directories(self.root, name.folder)
            self._durable.add(name.folder)
        try:
            with folder(self.root, name.folder) as target:
                return place(*source, target, name.file)
        except FileNotFoundError:  # the folder was removed meanwhile
            with folder(self.root, name.folder, make=True) as target:
                return place(*source, target, name.file)

    def sweep(self, tenant: str = "") -> int:
        """Removes what dead writers left in tmp/ (a live one holds a lock on its file). How many.

        Args:
          tenant: only of the tenant with this keyed name, and settings, which are nobody's.
        """
        swept = 0
        with typed_errors("store: sweep"), self.temporaries() as aside:
            for name in [name for name in os.listdir(aside) if name.startswith((tenant, "settings-"))]:
                with (
                    contextlib.suppress(FileNotFoundError, NotRegularError),
                    open_regular_in(aside, name, os.O_RDWR) as fd,
                ):
                    dead = try_lock(fd)
                    if dead and os.stat(name, dir_fd=aside, follow_symlinks=False).st_ino == os.fstat(fd).st_ino:
                        os.unlink(name, dir_fd=aside)
                        swept += 1
        return swept
