"""Objects in a directory: durable writes, verified reads, quarantine, deletion, listing.

    root/STORE.json      version and secret of the store
    root/obj/…           objects; an object is there whole or not at all
    root/tmp/            objects being written, locked by their writer
    root/quarantine/     objects that did not verify
    root/deleted/        tenants being deleted
    root/names.lock      held shared to add a name, alone to take one away
    root/evict.lock      held by whoever evicts

An acknowledged write has its data and its name on the disk: data, rename, directory, in this order. The directory is
the truth; there is no index. Of two writers of one name the later wins, and both wrote the same content.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...errors import StoreCorruptError, StoreError
from ..format.buffers import Buffers
from ..format.encryption import Encryption, Plain, Read
from ..format.expiry import expiry_look, shown_time, shows
from ..format.header import OPENING_BYTES, Header, opening_crc, parse_header
from ..format.naming import Name, is_object
from ..format.objects import Blob, check_name, read_header, read_leaves, write_blob
from ..io.counters import Counters
from ..io.files import (
    Identity,
    NotRegularError,
    copy_into,
    folder,
    identity,
    identity_of,
    link,
    locked,
    make_directories,
    make_root,
    open_regular,
    open_regular_in,
    rename,
    start_writing,
    sync_files,
    try_lock,
    typed,
    typed_errors,
    write_all,
    written,
)
from ..io.thread_pool import ThreadPool
from .directory import DirectoryEntry, Removal, Still, entry_of
from .quarantine import BYTES as QUARANTINE_BYTES
from .quarantine import keep_within
from .root_config import check_key

_DEPTH = 4
"""Folders above an object: obj/tenant/backbone/xx."""

_KNOWN = 256
_LARGEST_KNOWN = 64 << 10
_numbers = itertools.count()
_group = ThreadPool(min(4, max(2, os.cpu_count() or 1)), "kvpatch-group")
"""Write the objects of a group: apart from those that sum large ones, which these wait for."""


@dataclasses.dataclass(frozen=True)
class Version:
    """One version of an object: the file that it was read from, and the checksum of its header."""

    file: Identity | None
    crc: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """An object read from the disk, verified. `arrays` are read-only views of one buffer; `file` is where they were,
    None for one that comes from elsewhere."""

    header: Header
    arrays: dict[str, np.ndarray] = dataclasses.field(repr=False)
    file: Identity | None = None

    @property
    def version(self) -> Version:
        """Which version of the object it is."""
        return Version(self.file, self.header.crc)


class _Place(NamedTuple):
    """A name in an open directory."""

    folder: int
    name: str


type _Placing[T] = Callable[[int, str, int, str], T]
"""Gives a file in one open directory a name in another."""


class Elsewhere(NamedTuple):
    """A file that is an object already: the directory that holds what it belongs to, and the path below it."""

    root: str
    path: str


class Disk:
    """The disk tier's files. Any number of threads and processes may use one root at once.

    Args:
      root: the store's directory; made where it is not there.
      clock: seconds since the epoch; for expiry only.
      seal: how objects that are read were kept; what is written comes sealed.
      quarantine: bytes that what did not verify may take, of each tenant; None sets no bound.

    Raises:
      StoreReadOnlyError, StoreFullError, StoreIOError: the directory cannot be made.
    """

    def __init__(
        self,
        root: str,
        counters: Counters | None = None,
        buffers: Buffers | None = None,
        clock: Callable[[], float] = time.time,
        seal: Encryption | None = None,
        quarantine: int | None = QUARANTINE_BYTES,
    ):
        self.root = os.path.abspath(root)
        self.seal: Encryption = Plain() if seal is None else seal
        self.clock, self._quarantine_bytes = clock, quarantine
        self.counters = Counters() if counters is None else counters
        self.buffers = Buffers() if buffers is None else buffers
        self._durable: set[str] = set()
        # Of headers read before: the bytes are read and compared each time, so that nothing stale is believed.
        self._known = functools.lru_cache(_KNOWN)(parse_header)
        self._lock = threading.Lock()
        with typed_errors(f"store {self.root}: open"):
            make_root(self.root)
            for folder in ("obj", "tmp", "quarantine"):
                if not os.path.isdir(f"{self.root}/{folder}"):
                    make_directories(self.root, folder)

    # ----------------------------------------------------------------------------------------------- writing

    def put(self, name: Name, blob: Blob) -> int:
        """Writes one object; it would survive a crash from the moment this returns. Bytes of the file."""
        return self.put_group([(name, blob)])

    def put_group(self, items: Sequence[tuple[Name, Blob]]) -> int:
        """Writes several objects with one sync of the data and one of the names: for many small ones. Bytes in all.

        Raises:
          StoreFullError, StoreReadOnlyError, StoreIOError: none of them is acknowledged; none is there in part.
          StoreKeyError: the tenant's objects were encrypted under another key meanwhile.
        """
        with typed_errors(f"store: put {len(items)} objects"), contextlib.ExitStack() as stack:
            written = self._written_all(items, stack)
            sync_files([fd for _, _, fd, _ in written])
            with locked(f"{self.root}/names.lock", shared=True):
                for space in sorted({f"obj/{name.tenant}" for name, _ in items}):
                    check_key(self.root, space, self.seal.check, note=True)  # a deletion may have taken it away
                for name, temporary, _, _ in written:
                    self._publish(name, *temporary, rename)
            self._sync_names(items)
        total = sum(header.size for *_, header in written)
        self.counters.add("puts", len(items))
        self.counters.add("put_bytes", total)
        return total

    def _written_all(
        self, items: Sequence[tuple[Name, Blob]], stack: contextlib.ExitStack
    ) -> list[tuple[Name, "_Place", int, Header]]:
        """Temporary files that hold objects, several at a time, until the stack is left. Name, place, file, header."""
        aside = stack.enter_context(self._temporaries())

        def written(name: Name, blob: Blob) -> tuple[Name, _Place, int, Header]:
            write = functools.partial(write_blob, blob=blob, name=name.file)
            return (name, *stack.enter_context(self._written(name, aside, write)))

        if len(items) == 1:
            return [written(*items[0])]
        jobs = [_group.submit(written, name, blob) for name, blob in items]
        concurrent.futures.wait(jobs)  # all of them, before the stack takes away what they made
        return [job.result() for job in jobs]

    def _sync_names(self, items: Sequence[tuple[Name, object]]) -> None:
        """Without the lock: it is not fair, so that syncs under it could keep whoever deletes waiting for long."""
        for each in sorted({name.folder for name, _ in items}):
            with folder(self.root, each) as fd:
                os.fsync(fd)

    def add(
        self, items: Sequence[tuple[Name, Blob | Elsewhere]], added: dict[str, Identity], *, copy: bool = False
    ) -> None:
        """Puts objects in one commit under names that nothing has yet; what is there stays.

        Args:
          items: blobs, or files that are objects of that name already, which get a second name here.
          added: filled with path and file (`written`) of every object that was added, so that a caller can take it
            away again.
          copy: copies files instead. So does a file system that refuses to link.

        Raises:
          StoreFullError, StoreReadOnlyError, StoreIOError: nothing is acknowledged; `added` says what is there.
        """
        refused: list[tuple[Name, Blob | Elsewhere]] = []
        with typed_errors(f"store: add {len(items)} objects"), contextlib.ExitStack() as stack:
            aside = stack.enter_context(self._temporaries())
            sources = [stack.enter_context(self._source(name, item, aside, copy)) for name, item in items]
            sync_files([fd for _, fd in sources])
            with locked(f"{self.root}/names.lock", shared=True):
                for space in sorted({f"obj/{name.tenant}" for name, _ in items} if self.seal.check else ()):
                    check_key(self.root, space, self.seal.check, note=True)
                for (name, item), (source, fd) in zip(items, sources, strict=True):
                    with contextlib.suppress(FileExistsError):
                        if self._publish(name, *source, link):
                            added[name.path] = written(os.fstat(fd))
                        else:
                            refused.append((name, item))
            self._sync_names(items)
        if refused:
            self.add(refused, added, copy=True)

    def add_all(self, groups: Iterable[Sequence[tuple[Name, Blob | Elsewhere]]], copy: bool) -> int:
        """`add` of every group; what was added is taken away again if anything is raised. How many were added."""
        added: dict[str, Identity] = {}
        try:
            for group in groups:
                self.add(group, added, copy=copy)
        except BaseException:
            for path, file in added.items():
                with contextlib.suppress(StoreError):
                    self.delete(path, _was_written(file))
            raise
        return len(added)

    @contextlib.contextmanager
    def _source(self, name: Name, item: Blob | Elsewhere, aside: int, copy: bool) -> Iterator[tuple["_Place", int]]:
        """A file to link from: the caller's, or a temporary one."""
        if isinstance(item, Blob):
            write = functools.partial(write_blob, blob=item, name=name.file)
        elif copy:
            write = functools.partial(copy_into, root=item.root, path=item.path)
        else:
            above, _, file = item.path.rpartition("/")
            with folder(item.root, above) as parent, open_regular_in(parent, file) as fd:
                yield _Place(parent, file), fd
            return
        with self._written(name, aside, write) as (temporary, fd, _):
            yield temporary, fd

    @contextlib.contextmanager
    def _temporaries(self) -> Iterator[int]:
        """The directory of what is being written, made again where somebody removed it."""
        with contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(folder(self.root, "tmp"))
            except FileNotFoundError:
                fd = stack.enter_context(folder(self.root, "tmp", make=True))
            yield fd

    @contextlib.contextmanager
    def _written[T](self, name: Name, aside: int, write: Callable[[int], T]) -> Iterator[tuple["_Place", int, T]]:
        """A temporary file that holds an object, gone on the way out unless it was given its name."""
        while True:
            temporary = (
                f"{name.tenant}.{os.getpid()}-{threading.get_native_id()}-{next(_numbers)}-{time.monotonic_ns()}"
            )
            with open_regular_in(aside, temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink == 0:
                    continue  # a sweep came between the two calls
                try:
                    told = write(fd)
                    start_writing(fd)
                    yield _Place(aside, temporary), fd, told
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary, dir_fd=aside)
                return

    def _publish[T](self, name: Name, source: int, temporary: str, place: "_Placing[T]") -> T:
        if name.folder not in self._durable:
            make_directories(self.root, name.folder)
            self._durable.add(name.folder)
        try:
            with folder(self.root, name.folder) as target:
                return place(source, temporary, target, name.file)
        except FileNotFoundError:  # the folder was removed meanwhile
            with folder(self.root, name.folder, make=True) as target:
                return place(source, temporary, target, name.file)

    # ----------------------------------------------------------------------------------------------- reading

    def get(self, name: Name) -> Found | None:
        """Reads an object whole and verifies every byte. None where it is absent, expired, unreadable or damaged.

        A damaged one is moved to quarantine. A failing read (EIO) may pass and leaves the object where it is.

        Raises:
          StoreKeyError: it is encrypted, and not under our key; it stays where it is.
        """
        with self._reading(name) as (fd, header):
            opened = None if fd is None or header is None else self._unsealed(name, fd, header)
            if fd is None or opened is None:
                return None
            plain, read = opened
            try:
                with self._verifying(name, fd):
                    arrays = read(list(plain.leaves))
            except StoreCorruptError:
                return None
            except OSError:
                self.counters.add("read_errors")
                return None
            self._touch(fd)
            self.counters.add("get_bytes", plain.size)
            return Found(plain, arrays, identity_of(fd))

    @contextlib.contextmanager
    def _reading(self, name: Name, noticed: bool = True) -> Iterator[tuple[int | None, Header | None]]:
        """An open object with its verified header, or (None, None)."""
        with contextlib.ExitStack() as stack:
            yield self._opened(name, stack, noticed)

    def _opened(self, name: Name, stack: contextlib.ExitStack, noticed: bool) -> tuple[int | None, Header | None]:
        try:
            fd = stack.enter_context(open_regular(self.root, name.path, unnoticed=not noticed))
            header = read_header(fd, self._parse)
            check_name(header, name.file)
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except OSError:
            self.counters.add("read_errors")
            return None, None
        except StoreCorruptError as error:
            self.quarantine(name, identity_of(fd), str(error))  # pyright: ignore[reportPossiblyUnboundVariable]
            return None, None
        if header.expires is not None and self.clock() >= header.expires:
            self.counters.add("expired")
            return None, None
        return fd, header

    @contextlib.contextmanager
    def reading(self, name: Name, *, noticed: bool = True) -> Iterator[tuple[Header, Read] | None]:
        """An open object's header, and a function that reads some of its neighbouring leaves, verified.

        `noticed`: whether this counts as a use of the object.

        That function raises StoreCorruptError after moving a damaged object to quarantine, and StoreIOError. Raises
        StoreKeyError as `get`.
        """
        with self._reading(name, noticed) as (fd, header):
            opened = None if fd is None or header is None else self._unsealed(name, fd, header)
            if fd is None or opened is None:
                yield None
                return
            plain, read_plain = opened

            def read(names: Sequence[str]) -> dict[str, np.ndarray]:
                with self._verifying(name, fd), typed_errors(f"store: read {names[0]}"):
                    return read_plain(names)

            if noticed:
                self._touch(fd)
            yield plain, read

    def _parse(self, raw: bytes, size: int) -> Header:
        return (self._known if len(raw) <= _LARGEST_KNOWN else parse_header)(raw, size)

    def forget(self) -> None:
        """Lets go of what is remembered of headers."""
        self._known.cache_clear()

    def _unsealed(self, name: Name, fd: int, header: Header) -> tuple[Header, Read] | None:
        try:
            with self._verifying(name, fd):
                opened = self.seal.opened(header, lambda names: read_leaves(fd, header, names, self.buffers))
        except StoreCorruptError:
            return None
        except OSError:
            self.counters.add("read_errors")
            return None
        if opened is None:
            self.counters.add("unsealed")
        return opened

    @contextlib.contextmanager
    def _verifying(self, name: Name, fd: int) -> Iterator[None]:
        """Moves the object to quarantine where what is inside finds it damaged."""
        try:
            yield
        except StoreCorruptError as error:
            self.quarantine(name, identity_of(fd), str(error))
            raise

    def _touch(self, fd: int) -> None:
        """Notes the use of an object where every process sees it. A store that may only be read goes without."""
        with contextlib.suppress(OSError):
            os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))

    # ------------------------------------------------------------------------------------------ taking away

    def quarantine(self, name: Name, file: Identity, reason: str) -> bool:
        """Moves a damaged object out of the way, unless it is not that file any more: a good one may have its place.

        Returns:
          Whether it was moved: on a medium that may only be read it stays where it is.
        """
        aside, moved = f"{name.tenant}.{time.time_ns()}-{file[0]}-{name.file}", False
        with (
            contextlib.suppress(OSError),
            locked(f"{self.root}/names.lock", shared=False),
            folder(self.root, name.folder) as source,
        ):
            if identity(os.stat(name.file, dir_fd=source, follow_symlinks=False)) == file:
                with folder(self.root, "quarantine", make=True) as target:
                    rename(source, name.file, target, aside)
                    moved = True
                    self.counters.add("quarantined")
                    with open_regular_in(target, f"{aside}.reason", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                        write_all(fd, [reason.encode(errors="backslashreplace")], 0)
        with contextlib.suppress(StoreError):
            keep_within(self.root, name.tenant, self._quarantine_bytes)
        return moved

    def collect_quarantine(self, tenant: str = "") -> int:
        """Deletes what has been in quarantine too long, is past its time or beyond the budget. How many objects.

        Raises:
          StoreReadOnlyError, StoreIOError.
        """
        return len(keep_within(self.root, tenant, self._quarantine_bytes, self.expires, self.clock()))

    def delete(self, path: str, still: Still | None = None) -> bool:
        """Takes one object away, durably. `still`: only if this says so of its path. Whether it was there, and went.

        Raises:
          StoreReadOnlyError, StoreIOError: it could not be taken away.
        """
        with self.removing() as removal:
            return removal.remove(path, still)

    @contextlib.contextmanager
    def removing(self) -> Iterator["Removal"]:
        """Takes objects away while nobody adds a name; durably when this is left. Raises as `delete`."""
        removal = Removal(self.root)
        with typed_errors("store: delete"):
            with locked(f"{self.root}/names.lock", shared=False):
                yield removal
            for each in sorted(removal.folders):
                with contextlib.suppress(FileNotFoundError), folder(self.root, each) as fd:  # its tenant was deleted
                    os.fsync(fd)

    def examine(self, name: Name, *, leaves: bool = True) -> Header | None:
        """An object's header, when every byte of it as it lies was verified, or with `leaves` off those of the header.

        None where it is not there, or where it was damaged and is in quarantine now. Raises OSError.
        """
        try:
            with open_regular(self.root, name.path, unnoticed=True) as fd, self._verifying(name, fd):
                header = read_header(fd)
                check_name(header, name.file)
                if leaves:
                    read_leaves(fd, header, list(header.leaves), self.buffers)
                return header
        except (FileNotFoundError, NotADirectoryError, StoreCorruptError):
            return None

    def sweep(self, tenant: str = "") -> int:
        """Removes what dead writers left in tmp/ (a live one holds a lock on its file). How many.

        Args:
          tenant: only of the tenant with this keyed name, and settings, which are nobody's.
        """
        swept, mine = 0, (tenant, "settings-")
        with typed_errors("store: sweep"), self._temporaries() as aside:
            for name in [name for name in os.listdir(aside) if name.startswith(mine)]:
                with (
                    contextlib.suppress(FileNotFoundError, NotRegularError),
                    open_regular_in(aside, name, os.O_RDWR) as fd,
                ):
                    if (
                        try_lock(fd)
                        and os.stat(name, dir_fd=aside, follow_symlinks=False).st_ino == os.fstat(fd).st_ino
                    ):
                        os.unlink(name, dir_fd=aside)
                        swept += 1
        return swept

    # ---------------------------------------------------------------------------------------------- listing

    def scan(self, below: str = "obj") -> list[DirectoryEntry]:
        """Every object below a folder, in no order. What vanishes meanwhile is left out. Raises StoreError.

        So is what no object is called, and what lies deeper than objects do. What has an object's name and is a link, a
        FIFO or the like is in it, so that it can be seen and taken away; nothing reads it.
        """
        found: list[DirectoryEntry] = []
        waiting = [below]
        while waiting:
            each = waiting.pop()
            try:
                with folder(self.root, each) as fd, os.scandir(fd) as entries:
                    for entry in entries:
                        path = f"{each}/{entry.name}"
                        if entry.is_dir(follow_symlinks=False):
                            waiting += [path] if path.count("/") < _DEPTH else []
                        elif is_object(path):
                            with contextlib.suppress(FileNotFoundError):
                                found.append(entry_of(path, entry.stat(follow_symlinks=False)))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise typed(error, "store: list") from error
        return found

    def is_current(self, name: Name, known: Version) -> Version | None:
        """Whether an object is still the one that was read: its version then, as the directory shows it now, else None.

        A file that was only used or linked since is opened, and its header's checksum compared.
        """
        path = f"{self.root}/{name.path}"
        try:
            file = identity(os.lstat(path))
            if file == known.file:
                return known
            with open_regular(self.root, name.path, unnoticed=True) as fd:
                file = identity(os.fstat(fd))
                return Version(file, known.crc) if opening_crc(os.pread(fd, OPENING_BYTES, 0)) == known.crc else None
        except OSError:
            return None

    def of_chunk(self, name: Name) -> list[DirectoryEntry]:
        """Every object of a chunk: its canonical in any encoding, encoder output and patches."""
        return [entry for entry in self.scan(name.folder) if entry.chunk == f"{name.folder}/{name.chunk}"]

    def expires(self, path: str) -> float | None:
        """When an object expires, by its header; None where it does not, or cannot be read."""
        above, _, file = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(self.root, above) as fd:
            return _expires(fd, file)
        return None

    def has_expired(self, fd: int, file: str) -> bool:
        """Whether the object in a file of an open directory has expired, by its header, if that can be read."""
        expires = _expires(fd, file)
        return expires is not None and self.clock() >= expires

    def looked_at(self, entry: DirectoryEntry) -> tuple[DirectoryEntry, bool]:
        """An object of `scan` and whether it has expired. It is opened only if it looks so, and its look set right."""
        if not expiry_look(self.clock())(entry.shown):
            return entry, False
        above, _, file = entry.path.rpartition("/")
        expired = False
        with contextlib.suppress(OSError), folder(self.root, above) as fd:
            expired = self.has_expired(fd, file)
            entry = entry_of(entry.path, os.stat(file, dir_fd=fd, follow_symlinks=False))
        return entry, expired


def _was_written(file: Identity) -> Still:
    return lambda fd, name: written(os.stat(name, dir_fd=fd, follow_symlinks=False)) == file


def _expires(parent: int, file: str) -> float | None:
    """When an object expires, by its header; None where that cannot be read. Sets the look of its file right."""
    try:
        with open_regular_in(parent, file, unnoticed=True) as fd:
            expires = read_header(fd).expires
            stat = os.fstat(fd)
            if not shows(stat.st_mtime_ns, expires):  # written by an older version, or copied without its times
                with contextlib.suppress(OSError):
                    os.utime(fd, ns=(stat.st_atime_ns, shown_time(expires, stat.st_mtime_ns)))
            return expires
    except (OSError, StoreCorruptError):
        return None
