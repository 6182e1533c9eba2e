"""Verified reads of a root's objects. What is damaged is read twice, and then moved to quarantine."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...errors import StoreCorruptError, StoreError, StoreVersionError
from ..format.buffers import Buffers
from ..format.encryption import Encryption, Plain, Read, open_object
from ..format.expiry import expiry_mtime, mtime_agrees
from ..format.header import OPENING_BYTES, Header, opening_crc, parse_header
from ..format.naming import Name
from ..format.objects import Arrays, VerifiedObject, Version, check_name, read_header, read_leaves
from ..io.file_system import expect_local
from ..io.files import (
    Identity,
    ReadInto,
    close,
    folder,
    forget_pages,
    identity,
    identity_of,
    make_directories,
    make_root,
    open_file,
    open_regular,
    open_regular_in,
    read_again,
    read_into,
    rename,
    typed_errors,
    write_all,
)
from ..io.per_root import shared
from .counters import Counters
from .index import Changes, Index
from .mapping import map_leaves
from .quarantine import BYTES as QUARANTINE_BYTES
from .quarantine import keep_within, reason_text
from .recent_use import RecentUse
from .shard import locked_shards

_KNOWN = 256


class VerifiedReads:
    """Reads of a root; see `Disk` for the arguments."""

    def __init__(
        self,
        root: str,
        counters: Counters | None = None,
        buffers: Buffers | None = None,
        clock: Callable[[], float] = time.time,
        encryption: Encryption | None = None,
        quarantine: int | None = QUARANTINE_BYTES,
        mapped: bool = False,
    ):
        self.mapped = mapped
        self.root = os.path.abspath(root)
        self.encryption: Encryption = Plain() if encryption is None else encryption
        self.clock, self._quarantine_bytes = clock, quarantine
        self.counters = Counters() if counters is None else counters
        self.buffers = Buffers() if buffers is None else buffers
        # Parsed headers by their bytes, which are read each time: a cached header cannot be stale.
        self._known = functools.lru_cache(_KNOWN)(parse_header)

        with typed_errors(f"store {self.root}: open"):
            make_root(self.root)
            for top in ("obj", "tmp", "quarantine"):
                if not os.path.isdir(f"{self.root}/{top}"):
                    make_directories(self.root, top)
            expect_local(f"{self.root}/obj")

        self.index = shared(functools.partial(Index, self.root), self.root, Index)
        self.recent_use = shared(RecentUse, self.root)

    # ----------------------------------------------------------------------------------------------- reading

    def get(self, name: Name) -> VerifiedObject | None:
        """Reads an object whole and verifies every byte. None if it is absent, expired, unreadable or damaged.

        One that is damaged in the same way twice is moved to quarantine. After a failed read (EIO), which may pass, and
        if it is of another version of the format, the object stays.

        Raises:
          StoreKeyError: it is encrypted with another key; it stays too.
        """
        try:
            fd, stat = open_file(self.root, name.path)
        except (FileNotFoundError, NotADirectoryError):
            return None  # an ordinary miss
        except OSError:
            self.counters.add("read_errors")
            return None
        try:
            whole = functools.partial(self._whole, name, fd, stat)
            found = self.read_twice(fd, whole, lambda why: self.quarantine(name, identity_of(fd), why))
            if found is None:
                return None
            header, arrays = found
            self._touch(fd, stat)
            self.counters.add("get_bytes", header.size)
            # The identity is taken last, because the access time has just changed it.
            return VerifiedObject(header, arrays, identity_of(fd))
        except StoreCorruptError:
            return None  # it is in quarantine by now
        except StoreVersionError:
            self.counters.add("other_format")
            return None
        except OSError:
            self.counters.add("read_errors")
            return None
        finally:
            close(fd)

    def _whole(
        self, name: Name, fd: int, stat: os.stat_result, read_bytes: ReadInto
    ) -> tuple[Header, dict[str, np.ndarray]] | None:
        """Reads header and leaves of an open object, decrypted; None as `_open`."""
        opening = self._open(name, fd, read_bytes, stat.st_size)
        if opening is None:
            return None
        header, read = opening
        # Mapped pages are the file itself, so what is encrypted, or wiped after its use, is copied.
        if self.mapped and read_bytes is read_into and self.encryption.check is None and not self.buffers.wipes:
            arrays = map_leaves(self.root, name, fd, stat, header)
            if arrays is not None:
                self.counters.add("mapped")
                return header, arrays
        return header, read(list(header.leaves))

    @contextlib.contextmanager
    def reading(self, name: Name, *, noatime: bool = False) -> Iterator[tuple[Header, Read] | None]:
        """Opens an object: yields its header and a function that reads and verifies adjacent leaves; None as `get`.

        The function raises StoreCorruptError for a damaged object, which is then handled as by `get`, and StoreIOError.

        Args:
          noatime: keeps the access time, so that this does not count as a use of the object.

        Raises:
          StoreKeyError: as `get`.
        """
        try:
            fd, stat = open_file(self.root, name.path, noatime=noatime)
        except OSError as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):  # an ordinary miss
                self.counters.add("read_errors")
            yield None
            return
        try:
            # The file stays open as long as the caller reads its leaves. What does not verify is read twice.
            opening = None
            try:
                opening = self._read_twice(name, fd, functools.partial(self._open, name, fd, size=stat.st_size))
            except OSError:
                self.counters.add("read_errors")
            except StoreVersionError:
                self.counters.add("other_format")
            except StoreCorruptError:
                pass  # it is in quarantine by now
            if opening is None:
                yield None
                return
            header, read_first = opening

            def read(names: Sequence[str]) -> dict[str, np.ndarray]:
                def attempt(read_bytes: ReadInto) -> dict[str, np.ndarray]:
                    if read_bytes is read_into:
                        return read_first(names)
                    # The second attempt reads the header again too, by the same function.
                    again = self._open(name, fd, read_bytes)
                    if again is None:
                        raise StoreCorruptError("object: got nothing in a second read; expected the opened object")
                    return again[1](names)

                with typed_errors(f"store: read {names[0]}"):
                    return self._read_twice(name, fd, attempt)

            if not noatime:
                self._touch(fd, stat)
            yield header, read
        finally:
            close(fd)

    def _open(self, name: Name, fd: int, read_bytes: ReadInto, size: int | None = None) -> tuple[Header, Read] | None:
        """Reads and decrypts the header of an open object; None if it has expired or is not encrypted but should be."""
        header = read_header(fd, self._known if read_bytes is read_into else parse_header, read_bytes, size)
        if header.name != name.file:
            check_name(header, name.file)  # raises
        if header.expires is not None and self.clock() >= header.expires:
            self.counters.add("expired")
            return None
        opening = open_object(fd, header, self.encryption, self.buffers, read_bytes)
        if opening is None:
            self.counters.add("unsealed")
        return opening

    def forget(self) -> None:
        """Drops cached headers."""
        self._known.cache_clear()

    def _read_twice[T](self, name: Name, fd: int, read: Callable[[ReadInto], T]) -> T:
        return self.read_twice(fd, read, lambda why: self.quarantine(name, identity_of(fd), why))

    def read_twice[T](self, fd: int, read: Callable[[ReadInto], T], condemn: Callable[[str], object]) -> T:
        """Reads from an open object, and a second time if it does not verify.

        A faulty reader (memory, cable) sees damage in good files, but hardly the same damage twice. So an object is
        condemned only if it fails twice in the same way, with the same wrong checksums.

        Args:
          read: reads with the function that it gets.
          condemn: called with the reason if the object is damaged.

        Raises:
          StoreCorruptError: neither attempt verified. Any exception of `read`.
        """
        try:
            return read(read_into)
        except StoreCorruptError as first:  # its traceback keeps the first buffers, so the second attempt gets others
            forget_pages(fd)
            try:
                result = read(read_again)
            except StoreCorruptError as second:
                if str(second) == str(first):
                    condemn(str(first))
                else:
                    self._note_unsteady()
                raise
            self._note_unsteady()
            return result

    def _note_unsteady(self) -> None:
        self.counters.add("unsteady_reads")
        self.forget()  # the fault may be in parsed headers too

    def build_again[T](
        self, name: Name, file: Identity, error: Exception, build: Callable[[Header, Arrays], T]
    ) -> T | None:
        """Reads an object again that was verified and yet could not be decoded.

        Args:
          file: identity of the file that was read.
          error: the exception that `build` raised for it.

        Returns:
          The result of `build` for the second read; None if that fails too. If it fails in the same way, the object is
          moved to quarantine.
        """
        try:
            with open_regular(self.root, name.path, noatime=True) as fd:
                opening = self._open(name, fd, read_again)
                if opening is None:
                    return None
                header, read = opening
                found = build(header, read(list(header.leaves)))
        except (OSError, StoreVersionError):
            return None
        except (StoreCorruptError, KeyError) as again:
            if str(again) == str(error):
                self.quarantine(name, file, str(error))
            return None

        self._note_unsteady()
        return found

    def _touch(self, fd: int, stat: os.stat_result) -> None:
        """Sets an object's access time, by which it is evicted. Does nothing on a read-only root."""
        try:
            # The modification time stays, because it encodes when the object expires.
            os.utime(fd, ns=(time.time_ns(), stat.st_mtime_ns))
        except OSError:
            return

    # --------------------------------------------------------------------------------------------- ----- quarantine

    def quarantine(self, name: Name, file: Identity, reason: str) -> bool:
        """Moves a damaged object to quarantine, unless its name has another file by now, which may be good.

        Args:
          file: identity of the damaged file.
          reason: recorded next to it.

        Returns:
          Whether it was moved; on a read-only medium it is not.
        """
        aside, moved = f"{name.tenant}.{time.time_ns()}-{file[0]}-{name.file}", False
        # Under the lock, because a writer may replace the damaged file by a good one at any other time.
        with contextlib.suppress(OSError, StoreError), locked_shards(self.root, [name.folder]) as shards:
            shard = shards[name.folder]
            if identity(os.stat(name.file, dir_fd=shard.fd, follow_symlinks=False)) == file:
                # Moved before its reason is written: on a full disk, only the reason is missing.
                with folder(self.root, "quarantine", make=True) as target:
                    rename(shard.fd, name.file, target, aside)
                    moved = True
                    self.index.record([shard], Changes(removed=[name.path]))
                    self.counters.add("quarantined")
                    with open_regular_in(target, f"{aside}.reason", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                        write_all(fd, [reason_text(reason, name.path)], 0)

        with contextlib.suppress(StoreError):
            keep_within(self.root, name.tenant, self._quarantine_bytes)
        return moved

    def collect_quarantine(self, tenant: str = "") -> int:
        """Deletes quarantined objects that are too old, expired or over the budget. Returns their number.

        Raises:
          StoreReadOnlyError, StoreIOError: not all were deleted.
        """
        return len(keep_within(self.root, tenant, self._quarantine_bytes, self.expires, self.clock()))

    def examine(self, name: Name, *, leaves: bool = True) -> Header | None:
        """Verifies every byte of an object's file, encrypted or not.

        Args:
          leaves: False verifies the header alone.

        Returns:
          The header; None if the object does not exist, or is damaged and so was moved to quarantine if possible.

        Raises:
          StoreVersionError: it is of another version of the format.
          OSError: it could not be read.
        """

        def verified(read_bytes: ReadInto) -> Header:
            header = read_header(fd, read_bytes=read_bytes)
            check_name(header, name.file)
            if leaves:
                read_leaves(fd, header, list(header.leaves), self.buffers, read_bytes)
            return header

        try:
            with open_regular(self.root, name.path, noatime=True) as fd:
                return self._read_twice(name, fd, verified)
        except (FileNotFoundError, NotADirectoryError, StoreCorruptError):
            return None

    def is_current(self, name: Name, known: Version) -> Version | None:
        """Checks that an object is still the version that was read, and counts this as a use of it.

        A file whose times alone have changed is opened, and its header's checksum compared.

        Returns:
          The version as the directory shows it now; None if it is another one.
        """
        path = f"{self.root}/{name.path}"
        try:
            stat = os.lstat(path)  # a link is another file, whatever it leads to
            due = self.recent_use.note(name.path, time.time(), stat.st_atime)
            if (stat.st_ino, stat.st_ctime_ns, stat.st_size) == known.file and not due:
                return known  # the common case: one system call
            with open_regular(self.root, name.path, noatime=True) as fd:
                if opening_crc(os.pread(fd, OPENING_BYTES, 0)) != known.crc:
                    return None
                if due:
                    self._touch(fd, stat)
                return Version(identity(os.fstat(fd)), known.crc)
        except OSError:
            return None

    def expires(self, path: str) -> float | None:
        """Returns when an object expires; None if it does not, or cannot be read."""
        above, _, file = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(self.root, above) as fd:
            return header_expiry(fd, file)
        return None


def header_expiry(parent: int, file: str) -> float | None:
    """Returns when an object expires; None if it cannot be read. Corrects a wrong modification time."""
    try:
        with open_regular_in(parent, file, noatime=True) as fd:
            expires = read_header(fd).expires
            stat = os.fstat(fd)
            if not mtime_agrees(stat.st_mtime_ns, expires):  # copied without its times
                with contextlib.suppress(OSError):
                    os.utime(fd, ns=(stat.st_atime_ns, expiry_mtime(expires, stat.st_mtime_ns)))
            return expires
    except (OSError, StoreCorruptError, StoreVersionError):
        return None
