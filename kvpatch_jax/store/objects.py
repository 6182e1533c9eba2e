"""Objects of one tenant in one root: verified when read, durable when put, in the order of their transactions."""

import collections
import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from ..errors import (
    InputError,
    StoreCorruptError,
    StoreError,
    StoreUnreachableError,
)
from ..utils.sizes import Size, size_of
from .files import (
    DamagedError,
    Encoded,
    Header,
    Stored,
    expect_replaceable,
    file_bytes,
    object_parts,
    parse_object,
    sync_folder,
    tenant_key,
    write_file,
)
from .index import Index, NewFile, file_errors
from .memory import memory_of
from .names import Names
from .queue import GROUP, Ack, Job, PutQueue, encoded_of

ATTEMPTS = 16
"""How often a read-modify-write is begun again because others wrote in between."""
MIN_KEY_BYTES = 32
QUEUE_BYTES = 256 << 20
"""Bytes that queued puts may hold at a time."""


class Usage(NamedTuple):
    """Bytes and number of a tenant's objects on the disk, without entries of libraries."""

    bytes: int
    count: int


class _Write(NamedTuple):
    """The parts of a file that is to be written under a name; `ticket` as in `NewFile`."""

    name: str
    kind: str
    parts: list[memoryview]
    expires: float | int | None
    ticket: int | None


class Objects:
    """Objects of one tenant in a root that any number of threads and processes share.

    Args, Raises: as `ChunkStore`.

    Attributes:
      names: keyed names of the tenant's objects.
      tenant: keyed digest of the tenant.
      counters: numbers of events since the store was opened, by name.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        tenant: str = "default",
        *,
        root_budget: Size | None = None,
        share: Size | None = None,
        memory: Size = 2 << 30,
        ttl: float | int | None = None,
        key: bytes | None = None,
        secret: bytes | None = None,
        remote: Any = None,
    ):
        memory_bytes, bounds = size_of(memory, "store: memory"), dict[str, int]()
        for name, size in (("root_budget", root_budget), ("share", share)):
            if size is not None:
                bounds[name] = size_of(size, f"store: {name}")
        if key is not None and (not isinstance(key, bytes) or len(key) < MIN_KEY_BYTES):
            raise InputError(f"store: got a key of another form; expected {MIN_KEY_BYTES} bytes or more")
        self._ttl = _checked_ttl(ttl)
        Names(tenant, b"-" * MIN_KEY_BYTES if secret is None else secret)  # checked before anything is created
        self.index = Index(os.path.expanduser(os.fspath(root)))
        self.root = self.index.root
        self.names = Names(tenant, self.index.secret if secret is None else secret)
        self.tenant = self.names.tenant
        for name, owner in (("root_budget", ""), ("share", self.tenant)):
            if name in bounds:
                self.index.set_budget(owner, bounds[name])
        self.counters: collections.Counter[str] = collections.Counter()
        self.memory = memory_of(self.root, memory_bytes)
        self.closed, self.key = False, None if key is None else tenant_key(key, self.tenant)
        # What one key decrypted, a store with another must not return.
        self._space = self.tenant if self.key is None else f"{self.tenant} {xxhash.xxh3_64_hexdigest(self.key)}"
        self._unread = set[str]()  # unreadable files: `contains` denies them, so that callers put them again
        self.queue = PutQueue(self.commit, self.index.ticket, QUEUE_BYTES)
        self.remote, self.sender = remote, None
        if remote is not None:
            from .remote import Sender

            self.sender = Sender(self, remote)

    def expect_open(self) -> None:
        """Raises StoreError after `close`."""
        if self.closed:
            raise StoreError(f"store {self.root}: got a call after close; expected an open store")

    # ---------------------------------------------------------------------------------------------------- writing

    def put(
        self, writes: Sequence[tuple[str, Encoded]], *, expires: float | int | None = None, expected: int | None = None
    ) -> list[bool]:
        """Writes objects durably in one transaction: all of them, or on an error none.

        Args:
          writes: names and objects.
          expires: in seconds since the epoch; None: never.
          expected: number of the object that the write may replace, 0 for none; None: any.

        Returns:
          Which took place; False: something later has the name.

        Raises:
          StoreError: nothing was written. ShapeError: a leaf's dtype.
        """
        self.expect_open()
        ticket = self.index.ticket()
        prepared = [self._prepared(name, encoded, expires, ticket, now=True) for name, encoded in writes]
        return [seq > 0 for seq in self._write(prepared, expected, outbox=self.remote is not None)]

    def put_async(
        self, name: str, make: Callable[[], Encoded], nbytes: int, *, expires: float | int | None = None
    ) -> Ack:
        """Queues an object, which is encoded later and readable at once."""
        self.expect_open()
        return self.queue.add(Job(name, make, max(1, nbytes), expires))

    def commit(self, jobs: Sequence[Job]) -> list[int]:
        """Writes queued puts, each in the order in which it was queued."""
        writes = [self._prepared(job.name, encoded_of(job), job.expires, job.ticket) for job in jobs]
        return self._write(writes, None, outbox=self.remote is not None)

    def _prepared(
        self, name: str, encoded: Encoded, expires: float | int | None, ticket: int, *, now: bool = False
    ) -> _Write:
        """Encodes a file, which takes place as of its ticket, or `now`."""
        parts = object_parts(encoded, Header(self.tenant, name, ticket, expires), self.key)
        return _Write(name, encoded.kind, parts, expires, None if now else ticket)

    def _write(self, writes: Sequence[_Write], expected: int | None, outbox: bool) -> list[int]:
        """Writes and syncs files, and names them in one transaction. Returns their numbers, 0 for late ones."""
        files = list[NewFile]()
        for name in {write.name for write in writes}:
            if file := self.file_of(name):
                expect_replaceable(f"{self.root}/data/{file}", self.key)
        try:
            with file_errors(f"store {self.root}: put"):
                for group in itertools.batched(writes, GROUP):
                    self._write_group(group, files)
                for shard in {file.file[:2] for file in files}:
                    sync_folder(f"{self.root}/data/{shard}")
            stored, evicted = self.index.put(self.tenant, files, expected=expected, outbox=outbox)
        except Exception:  # after KeyboardInterrupt they may have names; if not, `collect` deletes them
            self.index.unlink([file.file for file in files])
            raise
        self.counters["puts"] += sum(seq > 0 for seq in stored)
        self.counters["put_bytes"] += sum(file.size for file in files)
        self.counters["evicted"] += evicted
        if outbox and self.sender is not None:
            self.sender.wake()
        return stored

    def _write_group(self, writes: Sequence[_Write], files: list[NewFile]) -> None:
        """Writes files, then syncs them, so that the disk works meanwhile. Adds each to `files` once it exists."""
        with contextlib.ExitStack() as stack:
            descriptors = list[int]()
            for name, kind, parts, expires, ticket in writes:
                token = secrets.token_hex(12)
                file, size = f"{token[:2]}/{token}", sum(part.nbytes for part in parts)
                descriptors.append(write_file(f"{self.root}/data/{file}", parts))
                stack.callback(os.close, descriptors[-1])
                files.append(NewFile(name, kind, file, size, expires, ticket))
            for descriptor in descriptors:
                os.fsync(descriptor)

    def amend(self, name: str, make: Callable[[list[Stored]], Encoded], *, expires: float | int | None = None) -> None:
        """Replaces an object by one that is made of what is stored here, and in the remote store if it answers.

        No write in between is lost: of two at once the later one amends what the earlier one wrote. While the remote
        store does not answer, the object is sent later and replaces what other machines have written there.

        Args:
          make: makes the new object of the old ones; may be called several times.
        """
        self.expect_open()
        # The sender must not send an older row of this name between the swap and the write.
        alone = contextlib.nullcontext if self.sender is None else self.sender.alone
        for _ in range(ATTEMPTS):
            with alone():
                if self._amend_once(name, make, expires):
                    return
        raise StoreError(f"store: amend: got a later write during each of {ATTEMPTS} attempts; expected time to write")

    def _amend_once(self, name: str, make: Callable[[list[Stored]], Encoded], expires: float | int | None) -> bool:
        """Amends an object unless somebody else wrote it meanwhile; returns whether it did."""
        query = "SELECT seq FROM objects WHERE tenant = ? AND name = ?"
        (seq,) = self.index.row(query, self.tenant, name) or (0,)
        here, there, etag, is_reached = self.read(name), None, None, False
        if self.remote is not None:
            try:
                there, etag = self._read_remote(name)
                is_reached = True
            except StoreUnreachableError:
                self.counters["remote_errors"] += 1
        encoded = make([stored for stored in (here, there) if stored is not None])
        write, path = self._prepared(name, encoded, expires, self.index.ticket(), now=True), self._remote_name(name)
        try:
            if self.remote is not None and is_reached and not self.remote.swap(path, b"".join(write.parts), etag):
                return False
        except StoreUnreachableError:
            self.counters["remote_errors"] += 1
            is_reached = False
        outbox = self.remote is not None and not is_reached
        return self._write([write], seq, outbox)[0] > 0

    # ---------------------------------------------------------------------------------------------------- reading

    def get[T](self, name: str, decode: Callable[[Stored], T], *, remote: bool = True) -> T | None:
        """Reads an object from memory, the queue, the disk or the remote store; None if there is no intact one.

        Args:
          decode: makes the value that memory keeps; StoreCorruptError counts as damage.

        Raises:
          StoreError: it is encrypted with another key, or not encrypted; the store is closed.
        """
        if self.closed:
            self.expect_open()  # raises
        if self.queue.nbytes and (queued := self._queued(name)) is not None:
            return decode(queued)
        row = self._row(name)
        for _ in range(3):
            if row is None:
                break
            id, file, _, size = row
            value = self.memory.get(self._space, name, file)
            if value is not None:
                self.index.touch(id)
                self.counters["memory_hits"] += 1
                return value
            stored = self._read(name, file)
            if stored is not None:
                try:
                    value = decode(stored)
                except StoreCorruptError as error:
                    self.counters["other_format" if error.other_format else "damaged"] += 1
                    break
                self._unread.discard(file)
                self.memory.put(self._space, name, file, value, size)
                self.index.touch(id)
                self.counters["disk_hits"] += 1
                self.counters["get_bytes"] += size
                return value
            failed, row = file, self._row(name)  # replaced meanwhile, or the fault was the reader's: looked at again
            if row is not None and row[1] == failed:
                self._unread.add(failed)
        if remote and self.remote is not None:
            return self._from_remote(name, decode)
        self.counters["misses"] += 1
        return None

    def read(self, name: str) -> Stored | None:
        """Reads an object that is queued or on the disk, past memory."""
        if (queued := self._queued(name)) is not None:
            return queued
        for _ in range(2):
            row = self._row(name)
            stored = None if row is None else self._read(name, row[1])
            if stored is not None:
                return stored
        return None

    def contains(self, name: str) -> bool:
        """Returns whether an object is queued or on the disk, not expired, and not one that `get` failed to read.

        It is not opened.
        """
        self.expect_open()
        if self._queued_job(name) is not None:
            return True
        row = self._row(name)
        return row is not None and row[1] not in self._unread

    def with_prefix(self, prefix: str, remote: bool = True) -> list[str]:
        """Lists the names of objects with a prefix: queued, on the disk, and in the remote store if it answers."""
        self.expect_open()
        query = (
            "SELECT name FROM objects WHERE tenant = ? AND name >= ? AND name < ? AND (expires IS NULL OR expires > ?)"
        )
        rows = self.index.rows(query, self.tenant, prefix, f"{prefix}\U0010ffff", time.time())
        queued = [name for name in self.queue.with_prefix(prefix) if self._queued_job(name) is not None]
        names = dict.fromkeys([name for (name,) in rows] + queued)
        if remote and self.remote is not None:
            try:
                there = self.remote.with_prefix(self._remote_name(prefix))
                names |= dict.fromkeys([name.removeprefix(f"{self.tenant}/") for name in there])
            except StoreUnreachableError:
                self.counters["remote_errors"] += 1
        return list(names)

    def _queued_job(self, name: str) -> Job | None:
        """Returns the queued put of a name, unless a later write or deletion, of any process, has taken its place."""
        job = self.queue.find(name)
        if job is None:
            return None
        query = """SELECT 1 FROM objects WHERE tenant = ? AND name = ? AND seq > ? UNION ALL
          SELECT 1 FROM deleted WHERE tenant = ? AND chunk IN ('', ?) AND seq > ?"""
        chunk, ticket = name.partition("/")[0], job.ticket
        return None if self.index.row(query, self.tenant, name, ticket, self.tenant, chunk, ticket) else job

    def _queued(self, name: str) -> Stored | None:
        job = self._queued_job(name)
        return None if job is None else Stored(*encoded_of(job))

    def file_of(self, name: str) -> str:
        """Returns the file of an object, below `data` of the root; "" if there is none."""
        (file,) = self.index.row("SELECT file FROM objects WHERE tenant = ? AND name = ?", self.tenant, name) or ("",)
        return file

    def _row(self, name: str) -> tuple | None:
        """Returns (id, file, expires, size) of an object that has not expired."""
        query = "SELECT id, file, expires, size FROM objects WHERE tenant = ? AND name = ?"
        row = self.index.row(query, self.tenant, name)
        if row is not None and row[2] is not None and row[2] <= time.time():
            self.counters["expired"] += 1
            return None
        return row

    def _read(self, name: str, file: str) -> Stored | None:
        """Reads and verifies a file; None, counted, if it is gone, damaged or of another format."""
        try:
            return _read_named(f"{self.root}/data/{file}", self.tenant, name, self.key)
        except FileNotFoundError:
            return None
        except StoreCorruptError as error:
            self.counters["other_format" if error.other_format else "damaged"] += 1
        except OSError:
            self.counters["read_errors"] += 1
        return None

    # ----------------------------------------------------------------------------------------------- remote store

    def _remote_name(self, name: str) -> str:
        return f"{self.tenant}/{name}"

    def _read_remote(self, name: str) -> tuple[Stored | None, Any]:
        """Reads and verifies an object of the remote store, with its etag; None if it is not there, or damaged."""
        # What this machine has deleted stays there until the deletion is sent.
        query = "SELECT 1 FROM outbox WHERE tenant = ? AND operation = 'delete' AND name IN ('', ?, ?)"
        is_deleted = self.index.row(query, self.tenant, f"{name.partition('/')[0]}/", name) is not None
        data, etag = self.remote.get(self._remote_name(name))
        if data is None or is_deleted:
            return None, etag
        try:
            stored = _parse_named(data, self.tenant, name, self.key)
        except StoreCorruptError:
            self.counters["remote_damaged"] += 1
            return None, etag
        if stored.expires is not None and stored.expires <= time.time():
            return None, etag
        return stored, etag

    def get_remote[T](self, name: str, decode: Callable[[Stored], T]) -> T | None:
        """Reads an object of the remote store alone, and keeps no copy; None if it is not there or does not answer."""
        self.expect_open()
        return None if self.remote is None else self._decode_remote(name, decode)[1]

    def _decode_remote[T](self, name: str, decode: Callable[[Stored], T]) -> tuple[Stored | None, T | None]:
        """Reads and decodes an object of the remote store. Failures are counted, and give (None, None)."""
        try:
            stored, _ = self._read_remote(name)
            return stored, None if stored is None else decode(stored)
        except StoreUnreachableError:
            self.counters["remote_errors"] += 1
        except StoreCorruptError:
            self.counters["remote_damaged"] += 1
        return None, None

    def _from_remote[T](self, name: str, decode: Callable[[Stored], T]) -> T | None:
        """Reads an object from the remote store; the disk keeps a copy unless the name was written or deleted since."""
        ticket = self.index.ticket()
        stored, value = self._decode_remote(name, decode)
        if stored is None:
            self.counters["misses"] += 1
            return None
        self.counters["remote_hits"] += 1
        encoded = Encoded(stored.kind, stored.body, stored.arrays)
        try:
            self._write([self._prepared(name, encoded, stored.expires, ticket)], None, outbox=False)
        except StoreError:
            self.counters["keep_errors"] += 1
        return value

    # --------------------------------------------------------------------------------------------------- deleting

    def delete(self, chunk: str) -> bool:
        """Deletes all objects "<chunk>/…" durably, also queued ones and those of the remote store (in the background).

        Writes that began before are then without effect, in every process of this machine.
        """
        return self._delete(chunk, f"{chunk}/")

    def delete_tenant(self) -> None:
        """Deletes everything of the tenant, here and in the remote store."""
        self._delete(None, "")

    def _delete(self, chunk: str | None, prefix: str) -> bool:
        self.expect_open()
        queued = self.queue.drop(prefix)
        deleted = self.index.delete(self.tenant, chunk, outbox=self.remote is not None)
        self.memory.drop(self._space, prefix)
        if self.sender is not None:
            self.sender.wake()
        return deleted or queued

    def damaged(self, delete: bool = False) -> list[str]:
        """Lists the names of objects whose files do not verify, twice; with `delete` they are deleted.

        Raises:
          StoreError: objects are encrypted with another key.
          StoreCorruptError: the index is damaged.
        """
        self.index.check()
        names = []
        for _, name, verdict in verify_objects(self.index, self.tenant, self.key, delete):
            if verdict == "encrypted":
                raise StoreError("object: got an encrypted one; expected a store with its key, ChunkStore(key=...)")
            if verdict == "damaged":
                names.append(name)
        return names

    # ----------------------------------------------------------------------------------------------------- the rest

    def expiry(self, ttl: float | int | None) -> float | None:
        """Returns when an object that is put now expires, in seconds since the epoch; None: never."""
        ttl = self._ttl if ttl is None else _checked_ttl(ttl)
        return None if ttl is None else time.time() + ttl

    def usage(self) -> Usage:
        """Returns the bytes and number of the tenant's objects on the disk."""
        query = (
            "SELECT COALESCE(SUM(bytes), 0), COALESCE(SUM(count), 0) FROM usage WHERE tenant = ? AND kind != 'entry'"
        )
        return Usage(*(self.index.row(query, self.tenant) or (0, 0)))

    def gauges(self) -> dict[str, int | float]:
        """Returns bytes and objects there are now: of the root, the tenant, in memory, and for the remote store."""
        usage, now = self.usage(), time.time()
        (root_bytes,) = self.index.row("SELECT COALESCE(SUM(bytes), 0) FROM usage") or (0,)
        query = """SELECT COUNT(*), COALESCE(SUM(size), 0), COALESCE(MIN(at), ?) FROM outbox
          LEFT JOIN objects USING (tenant, name) WHERE tenant = ?"""
        count, nbytes, oldest = self.index.row(query, now, self.tenant) or (0, 0, now)
        return {
            "root_bytes": root_bytes,
            "disk_bytes": usage.bytes,
            "disk_objects": usage.count,
            "memory_bytes": self.memory.nbytes,
            "outbox_objects": count,
            "outbox_bytes": nbytes,
            "outbox_age_seconds": max(0.0, now - oldest),
        }

    def flush(self) -> None:
        """Waits for queued puts, and until the remote store has everything. Raises the first error of either."""
        self.queue.flush()
        if self.sender is not None:
            self.sender.flush()

    def close(self) -> None:
        """Writes queued puts and closes the index. Idempotent. Raises as `flush`, but waits for no remote store."""
        if self.closed:
            return
        try:
            self.queue.close()
        finally:
            self.closed = True
            if self.sender is not None:
                self.sender.close()
            self.index.close()


def _checked_ttl(ttl: float | int | None) -> float | int | None:
    is_number = isinstance(ttl, int | float) and not isinstance(ttl, bool)
    if ttl is not None and not (is_number and 0 < ttl < 1e12):
        raise InputError(f"store: got ttl {ttl!r:.80}; expected seconds above 0 and below 1e12, or None")
    return ttl


def _parse_named(data: np.ndarray, tenant: str, name: str, key: bytes | None) -> Stored:
    """Verifies the bytes of a file, [bytes], and that it is the object of this name. Raises as `parse_object`."""
    header, stored = parse_object(data, key)
    if (header.tenant, header.name) != (tenant, name):
        raise DamagedError("object: got another object than its name says; expected its own")
    return stored


def _read_named(path: str, tenant: str, name: str, key: bytes | None) -> Stored:
    return _parse_named(file_bytes(path), tenant, name, key)


Verdict = Literal["good", "encrypted", "damaged", "unreadable"]
PAGE = 1000
"""Rows of the index that are listed at a time."""


def listed_rows(index: Index, tenant: str | None) -> Iterator[tuple]:
    """Yields (tenant, name, kind, size, used, expires, file) of a tenant's objects, or all, by tenant and name."""
    where, last = "(tenant, name) > (?, ?)" if tenant is None else "tenant = ? AND name > ?", (tenant or "", "")
    query = f"""SELECT tenant, name, kind, size, used, expires, file FROM objects
      WHERE {where} ORDER BY tenant, name LIMIT {PAGE}"""
    while page := index.rows(query, *last):
        yield from page
        last = page[-1][:2]


def verify_objects(
    index: Index, tenant: str | None, key: bytes | None, delete: bool
) -> Iterator[tuple[str, str, Verdict]]:
    """Reads the files of a tenant's objects, or of all, and yields (tenant, name, verdict).

    Without a key, an encrypted object of intact bytes is "encrypted". With `delete`, damaged objects are deleted;
    unreadable ones are not, because another version of the format or another attempt may read them.

    Raises:
      StoreError: an object is encrypted with another key than the tenant's `key`, or not encrypted.
    """
    for owner, name, *_, file in listed_rows(index, tenant):
        verdict = _verdict(index, owner, name, file, key)
        if verdict != "good":  # the fault may have been the reader's, or the object was replaced or evicted since
            verdict = _verdict(index, owner, name, file, key)
            if index.row("SELECT 1 FROM objects WHERE file = ?", file) is None:
                continue
        yield owner, name, verdict
        if verdict == "damaged" and delete:
            with index.write() as transaction:
                transaction.forget_file(file)


def _verdict(index: Index, tenant: str, name: str, file: str, key: bytes | None) -> Verdict:
    try:
        _read_named(f"{index.root}/data/{file}", tenant, name, key)
        return "good"
    except StoreCorruptError as error:
        return "unreadable" if error.other_format else "damaged"
    except StoreError:  # of its key: its checksums were verified before
        if key is not None:
            raise
        return "encrypted"
    except FileNotFoundError:
        return "damaged"
    except OSError:
        return "unreadable"
