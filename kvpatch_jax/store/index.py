"""The index of a root: one SQLite database, whose transactions say what exists, in one order of all operations.

A file exists for readers from the transaction that names it until the one that forgets it. A crash leaves nothing, or a
file that no row names, which `collect` deletes. Files describe themselves, so a lost or damaged index is made again.
"""

import contextlib
import dataclasses
import errno
import fcntl
import heapq
import itertools
import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import xxhash

from ..errors import (
    KVPatchError,
    StoreCorruptError,
    StoreError,
)
from . import forks
from .files import FORMAT, read_header, sync_folder, write_synced

GRACE_SECONDS = 3600.0
"""Age at which a file that no row names counts as a dead writer's."""
DELETION_SECONDS = 86400.0
"""How long a deletion is remembered against queued writes that began before it."""
BUSY_SECONDS = 10.0
LOW, MAX_VICTIMS = 0.97, 64
"""A write that evicts goes on down to this share of the budget, but not beyond this number of objects."""
RANKS = {"patch": 0, "chunk": 1, "encoder": 1, "entry": 2}
"""How many minutes longer objects of a kind stay; entries of libraries (2) are never evicted.

So a patch leaves before the canonical and the basis that it needs, which were used with it.
"""
EVICTION_ORDER = "CAST(used / 60 AS INTEGER) + rank, rank, used"
NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "ocfs2"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.goofys", "fuse.juicefs"),
)
"""File systems that several machines may have mounted at once, where SQLite's write-ahead log does not work."""

COLUMNS = "tenant, name, kind, rank, file, size, seq, expires, used"
INSERT = f"INSERT INTO objects({COLUMNS}) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)"
_PRAGMAS = "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA mmap_size=268435456;"
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS objects(
  id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL, rank INTEGER NOT NULL,
  file TEXT NOT NULL, size INTEGER NOT NULL, seq INTEGER NOT NULL, expires REAL, used REAL NOT NULL,
  UNIQUE(tenant, name));
CREATE INDEX IF NOT EXISTS by_tenant_use
  ON objects(tenant, {EVICTION_ORDER}) WHERE rank < 2;
CREATE INDEX IF NOT EXISTS entries ON objects(tenant, name) WHERE rank = 2;
CREATE INDEX IF NOT EXISTS by_file ON objects(file);
CREATE INDEX IF NOT EXISTS by_expiry ON objects(expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS deleted(
  tenant TEXT NOT NULL, chunk TEXT NOT NULL, seq INTEGER NOT NULL, at REAL NOT NULL, PRIMARY KEY(tenant, chunk));
CREATE TABLE IF NOT EXISTS usage(
  tenant TEXT NOT NULL, kind TEXT NOT NULL, bytes INTEGER NOT NULL, count INTEGER NOT NULL, PRIMARY KEY(tenant, kind));
CREATE TABLE IF NOT EXISTS budgets(tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS outbox(
  id INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, name TEXT NOT NULL, seq INTEGER NOT NULL,
  operation TEXT NOT NULL, at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS outbox_names ON outbox(tenant, name);
CREATE TABLE IF NOT EXISTS leases(
  tenant TEXT NOT NULL, name TEXT NOT NULL, holder TEXT NOT NULL, until REAL NOT NULL, PRIMARY KEY(tenant, name));
CREATE TABLE IF NOT EXISTS holds(
  tenant TEXT NOT NULL, name TEXT NOT NULL, pid INTEGER NOT NULL, started TEXT NOT NULL);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON objects BEGIN
  INSERT INTO usage VALUES(NEW.tenant, NEW.kind, NEW.size, 1)
  ON CONFLICT(tenant, kind) DO UPDATE SET bytes = bytes + NEW.size, count = count + 1; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON objects BEGIN
  UPDATE usage SET bytes = bytes - OLD.size, count = count - 1 WHERE tenant = OLD.tenant AND kind = OLD.kind; END;
INSERT OR IGNORE INTO meta VALUES('seq', 0);
PRAGMA user_version = {FORMAT};
"""


@dataclasses.dataclass(eq=False)
class _Connection:
    """A thread's connection, and a lock that is held while it reads."""

    db: sqlite3.Connection
    thread: threading.Thread
    reading: threading.Lock


class NewFile(NamedTuple):
    """A written and synced file that a transaction is to name."""

    name: str
    kind: str
    file: str
    size: int
    expires: float | int | None
    ticket: int | None = None
    """Number of the moment that a queued write takes place at; None: now."""


class Transaction:
    """One write transaction; `forget` gives files up, which are unlinked once it has ended."""

    def __init__(self, db: sqlite3.Connection):
        self.db, self.forgotten = db, list[str]()

    def next_seq(self) -> int:
        """Returns the number of this transaction, greater than that of every earlier one."""
        query = "UPDATE meta SET value = value + 1 WHERE key = 'seq' RETURNING value"
        return self.db.execute(query).fetchone()[0]

    def forget(self, rows: Iterable[tuple[int, str]]) -> None:
        """Deletes rows (id, file) of objects, and their files afterwards."""
        rows = list(rows)
        self.db.executemany("DELETE FROM objects WHERE id = ?", [(id,) for id, _ in rows])
        self.forgotten += [file for _, file in rows]

    def forget_file(self, file: str) -> None:
        """Deletes the object of a file, if there is one."""
        self.forget(self.db.execute("SELECT id, file FROM objects WHERE file = ?", (file,)).fetchall())

    def send(self, tenant: str, name: str, seq: int, operation: str) -> None:
        """Adds a "put" or "delete" of a name to the outbox, in place of those that wait there."""
        self.db.execute("DELETE FROM outbox WHERE tenant = ? AND name = ?", (tenant, name))
        row = tenant, name, seq, operation, time.time()
        self.db.execute("INSERT INTO outbox(tenant, name, seq, operation, at) VALUES(?, ?, ?, ?, ?)", row)

    def end_dead_holds(self) -> None:
        """Ends the holds of processes that do not exist any more."""
        for pid, started in self.db.execute("SELECT DISTINCT pid, started FROM holds").fetchall():
            if process_started(pid) != started:
                self.db.execute("DELETE FROM holds WHERE pid = ? AND started = ?", (pid, started))


class Index:
    """The index of one root, shared by any number of threads and processes.

    Args:
      root: directory; created with its index if it is empty or missing.
      create: False refuses a directory that is no store.

    Attributes:
      secret: key of names, from the root's file `secret`.

    Raises:
      StoreError: the directory is no store, of another format, or on a network file system; StoreError,
        StoreError: the file system does not allow it.
    """

    def __init__(self, root: str, create: bool = True):
        self.root = os.path.realpath(root)
        self.path = f"{self.root}/index.sqlite"
        self._local, self._closed = threading.local(), False
        self._write_lock, self._connections_lock = threading.Lock(), threading.Lock()
        self._touched, self._connections = dict[int, float](), list[_Connection]()
        self.rebuilt = 0
        forks.register(self)
        with file_errors(f"store {root}"):
            self._open_root(create)

    def _open_root(self, create: bool) -> None:
        folder = self.root
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        if not os.path.isdir(folder):
            raise StoreError(
                f"store.root: got {self.root!r:.300}, where {folder!r:.300} is a file; expected a directory"
            )
        if create:
            os.makedirs(self.root, mode=0o700, exist_ok=True)
        contents = set(os.listdir(self.root)) if os.path.isdir(self.root) else set[str]()
        if "secret" not in contents and (not create or contents - {"lock", "secret.new"}):
            raise StoreError(
                f"store {self.root}: got a directory without a store of format {FORMAT}; expected one, or an empty "
                "directory (stores of other formats are not read)"
            )
        if file_system(self.root) in NETWORK:
            raise StoreError(
                f"store {self.root}: got a root on {file_system(self.root)}; expected a local file system: machines "
                "share objects by a remote store, ChunkStore(remote=...)"
            )

        # Whoever has the store open holds the lock with others; creating or rebuilding it needs the lock alone.
        self._lock = os.open(f"{self.root}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._unlock = weakref.finalize(self, os.close, self._lock)  # also of a store that is dropped without close
        self._unlock.atexit = False  # a thread may still write
        try:
            # A root of another format is left as it is.
            if "secret" in contents:
                self._read_secret()
            if not self._is_complete() and self._lock_alone():
                self._create()
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            self.secret = self._read_secret()
            self._inode = os.stat(self.path).st_ino
        except BaseException:
            self._unlock()
            raise

    def _lock_alone(self) -> bool:
        """Locks the root for this process alone; returns False if another one has made the index meanwhile."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return not self._is_complete()
            except BlockingIOError:
                if self._is_complete():
                    return False
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"store {self.root}: got an index that is lost or damaged while other processes have the store "
                        "open; expected them to close it, then it is made again"
                    ) from None
                time.sleep(0.02)

    def _is_complete(self) -> bool:
        """Returns whether there is a secret and an index that SQLite can read and nobody marked as damaged."""
        if os.path.exists(f"{self.root}/damaged"):
            return False
        if not os.path.exists(f"{self.root}/secret") or not os.path.exists(self.path):
            return False
        try:
            with contextlib.closing(sqlite3.connect(f"file:{_quoted(self.path)}?mode=rw", uri=True)) as db:
                db.execute("PRAGMA busy_timeout=10000")
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version > FORMAT:
                    raise StoreError(
                        f"store {self.root}: got an index of format {version}; expected {FORMAT} (if a later version "
                        "of the library did not write it, it is damaged: without index.sqlite it is made again)"
                    )
                if version != FORMAT:
                    return False  # damaged: the format is that of the secret's file
                for table in ("meta", "objects", "usage", "deleted", "outbox", "budgets"):
                    db.execute(f"SELECT * FROM {table} LIMIT 1").fetchall()
            return True
        except (sqlite3.Error, UnicodeError) as error:
            if _code(error) in _DAMAGE:
                return False
            raise

    def _create(self) -> None:
        """Makes the secret, folders and the index, the rows from the files that are there."""
        self._write_secret()
        os.makedirs(f"{self.root}/data", mode=0o700, exist_ok=True)
        for shard in range(256):
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{self.root}/data/{shard:02x}", 0o700)
        sync_folder(f"{self.root}/data")
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}{suffix}")

        os.close(os.open(f"{self.root}/index.new", os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
        with contextlib.closing(sqlite3.connect(f"{self.root}/index.new", isolation_level=None)) as db:
            db.executescript(f"PRAGMA synchronous=FULL;{_SCHEMA}")
            db.execute("BEGIN")
            self.rebuilt = _insert_files(db, self.root)
            db.execute("COMMIT")
        os.rename(f"{self.root}/index.new", self.path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.root}/damaged")
        sync_folder(self.root)
        with contextlib.suppress(PermissionError):
            sync_folder(os.path.dirname(self.root))

    def _write_secret(self) -> None:
        """Makes a new root's secret, from which on the directory is a root."""
        if os.path.exists(f"{self.root}/secret"):
            return
        line = f"{FORMAT:04d} {secrets.token_hex(32)} ".encode()
        line += xxhash.xxh3_64_hexdigest(line).encode() + b"\n"
        write_synced(f"{self.root}/secret.new", line + line)
        os.rename(f"{self.root}/secret.new", f"{self.root}/secret")
        sync_folder(self.root)

    def _read_secret(self) -> bytes:
        with open(os.open(f"{self.root}/secret", os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            data = file.read(1024)
        for line in data[:86], data[87:173]:  # no search for line ends: they may be damaged
            if xxhash.xxh3_64_hexdigest(line[:70]).encode() == line[70:]:
                if int(line[:4]) != FORMAT:
                    raise StoreError(f"store {self.root}: got format {int(line[:4])}; expected {FORMAT}")
                return bytes.fromhex(line[5:69].decode())
        raise StoreCorruptError(
            f"store {self.root}: got a file `secret` that is damaged twice; expected it from a backup"
        )

    # ------------------------------------------------------------------------------------------------- connections

    def _connect(self) -> _Connection:
        """Returns this thread's connection. Closes those of threads that have ended."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            return connection
        with self._connections_lock, file_errors(f"store {self.root}"):
            db = sqlite3.connect(
                f"file:{_quoted(self.path)}?mode=rw",  # never creates: the root may be being removed
                uri=True,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                cached_statements=256,
                check_same_thread=False,
            )
            db.executescript(_PRAGMAS)
            for other in [other for other in self._connections if not other.thread.is_alive()]:
                self._connections.remove(other)
                other.db.close()
            connection = self._local.connection = _Connection(db, threading.current_thread(), threading.Lock())
            self._connections.append(connection)
        return connection

    def before_fork(self) -> None:
        """Keeps other threads from connecting, reading and writing at a fork."""
        self._write_lock.acquire()
        self._connections_lock.acquire()
        for connection in self._connections:
            connection.reading.acquire()

    def after_fork(self) -> None:
        """Goes on in the process that forked."""
        for connection in self._connections:
            connection.reading.release()
        self._connections_lock.release()
        self._write_lock.release()

    def forked(self) -> None:
        """Closes the parent's connections in a forked process.

        SQLite notes per process which locks it has. With them open, it would take none for new connections, and others
        would end a log that this process still writes.
        """
        for connection in self._connections:
            connection.db.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, True)
            connection.db.close()
        self._connections, self._local, self._touched = [], threading.local(), {}
        self._write_lock, self._connections_lock = threading.Lock(), threading.Lock()

    def row(self, query: str, *values: Any) -> tuple | None:
        """Returns the first row of a query, or None."""
        return self._fetch(query, values, sqlite3.Cursor.fetchone)

    def rows(self, query: str, *values: Any) -> list[tuple]:
        """Returns all rows of a query."""
        return self._fetch(query, values, sqlite3.Cursor.fetchall)

    def _fetch(self, query: str, values: tuple, fetch: Callable[[sqlite3.Cursor], Any]) -> Any:
        connection = self._connect()
        try:
            with connection.reading:
                return fetch(connection.db.execute(query, values))
        except (sqlite3.Error, UnicodeError) as error:
            raise self._failed(error) from error

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """Begins one write transaction, durable when the block ends; files that it forgets are unlinked after it.

        Raises:
          StoreError: nothing has changed.
        """
        with self._write_lock:
            self._expect_same_index()
            db = self._connect().db
            transaction = Transaction(db)
            try:
                db.execute("BEGIN IMMEDIATE")
                if self._touched:
                    self._write_uses(db)
                yield transaction
                db.execute("COMMIT")
            except BaseException as error:
                if db.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error | UnicodeError | TypeError):  # columns that nobody wrote so
                    raise self._failed(error) from error
                raise
        self.unlink(transaction.forgotten)

    def _expect_same_index(self) -> None:
        """Raises StoreError if the root was removed, or its index replaced, while the store is open."""
        try:
            same = os.stat(self.path).st_ino == self._inode
        except OSError:
            same = False
        if not same:
            raise StoreError(
                f"store {self.root}: got an index that was removed; expected it to stay while the store is open"
            )

    def _failed(self, error: Exception) -> KVPatchError:
        """Returns the typed error of a failure of SQLite. Marks a damaged index, which the next open makes again."""
        if self._closed:
            return StoreError(f"store {self.root}: got a call after close; expected an open store")
        # A header of the index that is damaged in one place says that nobody may write.
        is_denied = _code(error) == sqlite3.SQLITE_READONLY and os.access(self.path, os.W_OK)
        if _code(error) in _DAMAGE or is_denied:
            self._mark_damaged()
        if _code(error) == sqlite3.SQLITE_FULL:
            with contextlib.suppress(sqlite3.Error):  # the next transaction, such as a deletion, has the log's room
                self._connect().db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        return _index_error(error, f"store {self.root}")

    def _mark_damaged(self) -> None:
        with contextlib.suppress(OSError):
            os.close(os.open(f"{self.root}/damaged", os.O_CREAT | os.O_WRONLY, 0o600))

    def check(self) -> None:
        """Reads the whole index. Raises StoreCorruptError if it is damaged; the next open makes it again."""
        if self.row("PRAGMA integrity_check(1)") != ("ok",):
            self._mark_damaged()
            raise StoreCorruptError(f"store {self.root}: got a damaged index; expected the store to be opened again")

    def unlink(self, files: Sequence[str]) -> None:
        """Unlinks files of the root; what fails is left to `collect`."""
        for file in files:
            with contextlib.suppress(OSError):
                os.unlink(f"{self.root}/data/{file}")

    def close(self) -> None:
        """Writes the last uses and closes all connections."""
        if self._closed:
            return
        with contextlib.suppress(KVPatchError), self.write():
            pass
        self._closed = True
        with self._connections_lock:
            for connection in self._connections:
                connection.db.close()
        self._unlock()

    # ------------------------------------------------------------------------------------------------- operations

    def touch(self, id: int) -> None:
        """Notes that an object was used now; written with the next transaction."""
        self._touched[id] = time.time()
        if len(self._touched) >= 1024:
            with contextlib.suppress(KVPatchError), self.write():
                pass
            self._touched = {}  # where they cannot be written, the next read does not try again

    def _write_uses(self, db: sqlite3.Connection) -> None:
        touched, self._touched = self._touched, {}
        db.executemany("UPDATE objects SET used = ? WHERE id = ?", [(at, id) for id, at in touched.items()])

    def set_budget(self, tenant: str, nbytes: int) -> None:
        """Sets a tenant's share, or with tenant "" the root's budget, for all processes."""
        if self.row("SELECT bytes FROM budgets WHERE tenant = ?", tenant) != (nbytes,):
            with self.write() as transaction:
                transaction.db.execute("INSERT OR REPLACE INTO budgets VALUES(?, ?)", (tenant, nbytes))

    def ticket(self) -> int:
        """Returns the number of a write that begins now; later writes and deletions supersede it."""
        (seq,) = self.row("SELECT value FROM meta WHERE key = 'seq'") or (0,)
        return seq

    def put(
        self,
        tenant: str,
        files: Sequence[NewFile],
        *,
        expected: int | None = None,
        outbox: bool = False,
    ) -> tuple[list[int], int]:
        """Names written files in one transaction, which replaces what had their names and evicts what has no room.

        Args:
          expected: number of the object that may be replaced, 0 for none; None: any.
          outbox: whether the objects are to be sent to the remote store.

        Returns:
          The number of each object, 0 where something later has its name (the file is unlinked); how many were evicted.

        Raises:
          StoreError: a budget has no room. As `write`.
        """
        stored, now = list[int](), time.time()
        with self.write() as transaction:
            db = transaction.db
            if not all(os.path.exists(f"{self.root}/data/{file.file}") for file in files):
                raise StoreError("store: got a write that stalled for an hour; expected it to end sooner")
            seq = transaction.next_seq()
            need = sum(file.size for file in files if RANKS[file.kind] < 2)
            evicted = self._evict(transaction, tenant, need, now) if need else 0
            for file in files:
                # The chunk's deletion, or the tenant's.
                query = "SELECT COALESCE(MAX(seq), 0) FROM deleted WHERE tenant = ? AND chunk IN (?, '')"
                (deletion,) = db.execute(query, (tenant, file.name.partition("/")[0])).fetchone()
                values = (tenant, file.name)
                old = db.execute("SELECT id, file, seq FROM objects WHERE tenant = ? AND name = ?", values).fetchone()
                begun = seq if file.ticket is None else file.ticket
                is_late = deletion > begun or (old and old[2] > begun)
                if is_late or (expected is not None and expected != (old[2] if old else 0)):
                    transaction.forgotten.append(file.file)
                    stored.append(0)
                    continue
                if old:
                    transaction.forget([old[:2]])
                row = (tenant, file.name, file.kind, RANKS[file.kind], file.file, file.size, seq, file.expires, now)
                db.execute(INSERT, row)
                if outbox:
                    transaction.send(tenant, file.name, seq, "put")
                stored.append(seq)
        return stored, evicted

    def _evict(self, transaction: Transaction, tenant: str, need: int, now: float) -> int:
        """Makes room for `need` bytes within the tenant's share and the root's budget.

        Expired objects leave first, then the least recently used. For the budget, those of tenants that hold more than
        what is theirs (`_protected`) leave, and the tenant's own.
        """
        db, evicted = transaction.db, 0
        bounds = dict(db.execute("SELECT tenant, bytes FROM budgets").fetchall())
        for owner, word in ((tenant, "share"), ("", "root budget")):
            bound = bounds.get(owner)
            held = _held(db, tenant)
            taken = held[tenant] if owner else sum(held.values())
            if bound is None or taken + need <= bound:
                continue
            if need > bound:
                raise StoreError(f"store: got {need} bytes to write; expected at most the {word} of {bound}")
            where, values = ("tenant = ?", (owner,)) if owner else ("1", ())
            query = f"SELECT id, file FROM objects WHERE expires <= ? AND rank < 2 AND {where}"
            transaction.forget(db.execute(query, (now, *values)).fetchall())

            held = _held(db, tenant)
            held[tenant] += need
            excess = (held[tenant] if owner else sum(held.values())) - bound
            # Down to these bytes objects leave: the tenant's own for some more puts, as this one.
            floors = {tenant: 0} if owner else _protected(bounds, held)
            floors[tenant] = int(LOW * floors[tenant])
            victims = dict[int, str]()
            above = [_oldest(db, other, held, floor) for other, floor in floors.items()]
            # The others hold no more than what is theirs, so the tenant's own leave, whatever it holds.
            for *_, id, other, file, size in itertools.chain(heapq.merge(*above), _oldest(db, tenant, held, 0)):
                enough = excess <= (LOW - 1) * bound or len(victims) >= MAX_VICTIMS or held[other] <= floors[other]
                if excess <= 0 and enough:
                    break
                if id not in victims:
                    victims[id] = file
                    held[other] -= size
                    excess -= size
            if excess > 0:
                raise StoreError(
                    f"store: got {need} bytes to write, {excess} more than there is room for: other tenants' shares "
                    f"stay, and what the remote store does not have yet; expected at most the {word} of {bound}"
                )
            transaction.forget(victims.items())
            evicted += len(victims)
        return evicted

    def delete(self, tenant: str, chunk: str | None, outbox: bool = False) -> bool:
        """Deletes a chunk's objects, or with None all of a tenant; writes that began before are then without effect."""
        with self.write() as transaction:
            db, seq = transaction.db, transaction.next_seq()
            where, values = "tenant = ?", (tenant,)
            if chunk is not None:
                where, values = f"{where} AND name >= ? AND name < ?", (tenant, f"{chunk}/", f"{chunk}0")
            rows = db.execute(f"SELECT id, file FROM objects WHERE {where}", values).fetchall()
            transaction.forget(rows)
            db.execute(f"DELETE FROM outbox WHERE {where}", values)
            db.execute("INSERT OR REPLACE INTO deleted VALUES(?, ?, ?, ?)", (tenant, chunk or "", seq, time.time()))
            if outbox:
                transaction.send(tenant, f"{chunk}/" if chunk else "", seq, "delete")
        return bool(rows)

    def collect(self) -> int:
        """Deletes what has expired, old notes, and files that no row names. Returns the number of objects and files."""
        now = time.time()
        with self.write() as transaction:
            db = transaction.db
            expired = db.execute("SELECT id, file FROM objects WHERE expires <= ?", (now,)).fetchall()
            transaction.forget(expired)
            db.execute("DELETE FROM deleted WHERE at < ?", (now - DELETION_SECONDS,))
            db.execute("DELETE FROM leases WHERE until < ?", (now,))
            db.execute("DELETE FROM usage WHERE count = 0")
            transaction.end_dead_holds()
        named = {file for (file,) in self.rows("SELECT file FROM objects")}
        orphans = [file for file, at in _data_files(self.root) if file not in named and at < now - GRACE_SECONDS]
        if orphans:
            with self.write() as transaction:  # a writer that stalled may have named one since
                query = "SELECT 1 FROM objects WHERE file = ?"
                orphans = [file for file in orphans if not transaction.db.execute(query, (file,)).fetchone()]
                self.unlink(orphans)  # within the transaction: a writer then sees that its file is gone
        return len(expired) + len(orphans)


def _held(db: sqlite3.Connection, tenant: str) -> dict[str, int]:
    """Returns the bytes that each tenant has in the root, entries excluded; 0 for this one if it has none."""
    query = "SELECT tenant, SUM(bytes) FROM usage WHERE kind != 'entry' GROUP BY tenant HAVING SUM(bytes) > 0"
    return {tenant: 0, **dict(db.execute(query).fetchall())}


def _protected(bounds: dict[str, int], held: dict[str, int]) -> dict[str, int]:
    """Returns the bytes that are each tenant's: its share, or an equal part of what shares leave of the budget."""
    shares = {tenant: bounds[tenant] for tenant in held if tenant in bounds}
    equal = max(0, bounds.get("", 0) - sum(shares.values())) // max(1, len(held) - len(shares))
    return {tenant: shares.get(tenant, equal) for tenant in held}


def _oldest(db: sqlite3.Connection, tenant: str, held: dict[str, int], floor: int) -> Iterator[tuple]:
    """Reads a tenant's objects in their order of eviction while it holds more than `floor` bytes.

    What the remote store does not have yet stays.
    """
    if held[tenant] <= floor:
        return
    waiting = "EXISTS (SELECT 1 FROM outbox o WHERE o.tenant = objects.tenant AND o.name = objects.name)"
    query = f"""SELECT {EVICTION_ORDER}, id, tenant, file, size FROM objects
      WHERE tenant = ? AND rank < 2 AND NOT {waiting} ORDER BY {EVICTION_ORDER}"""
    for row in db.execute(query, (tenant,)):
        if held[tenant] <= floor:
            return
        yield row


def _insert_files(db: sqlite3.Connection, root: str) -> int:
    """Makes rows from files. Of two files of a name the later counts; the others are left to `collect`."""
    latest: dict[tuple[str, str], tuple[int, float]] = {}
    for file, modified in _data_files(root):
        try:
            header, stored = read_header(f"{root}/data/{file}")
        except (StoreError, OSError):
            continue
        key, age = (header.tenant, header.name), (header.seq, modified)
        if key in latest and latest[key] >= age:
            continue
        latest[key] = age
        kind = kind_of(header.name) if stored.kind == "sealed" else stored.kind
        row = (*key, kind, RANKS.get(kind, 1), file, stored.nbytes, header.seq, header.expires, modified)
        db.execute("DELETE FROM objects WHERE tenant = ? AND name = ?", key)
        db.execute(INSERT, row)
    last = max((seq for seq, _ in latest.values()), default=0)
    db.execute("UPDATE meta SET value = ? WHERE key = 'seq'", (last + 1,))
    return len(latest)


def kind_of(name: str) -> str:
    """Returns the kind of an object from the part of its name behind the slash."""
    part = name.partition("/")[2].partition(".")[0]
    return {"p": "patch", "enc": "encoder", "e": "entry"}.get(part, "chunk")


def _data_files(root: str) -> Iterator[tuple[str, float]]:
    """Lists all files of objects with the times of their last change."""
    for shard in range(256):
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{root}/data/{shard:02x}") as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield f"{shard:02x}/{entry.name}", entry.stat(follow_symlinks=False).st_mtime


def process_started(pid: int) -> str:
    """Returns when a process began, so that a later process of the same number is another; "" if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "unknown"


def file_system(folder: str) -> str:
    """Returns the type of a folder's file system, such as "ext4"; "" if the system does not tell."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/mountinfo", encoding="utf-8") as lines:
        device = os.stat(folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in lines:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == number:
                return rest.split()[0]
    return ""


_DAMAGE = (
    *(sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH),
    *(sqlite3.SQLITE_ERROR, 0),  # a table or column that is not there; text that is no UTF-8, or a column's other type
)


def _code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _index_error(error: Exception, what: str) -> KVPatchError:
    return StoreError(f"{what}: index: got {error}; expected it to read and write")


@contextlib.contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Raises the store's typed errors in place of the file system's and SQLite's."""
    try:
        yield
    except sqlite3.Error as error:
        raise _index_error(error, what) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(f"{what}: got {error.strerror}; expected space to write") from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StoreError(f"{what}: got {error.strerror}; expected a directory that may be written") from error
        raise StoreError(f"{what}: got {error.strerror or error}; expected the file system to work") from error


def _quoted(path: str) -> str:
    """Returns a path as SQLite's URIs take it."""
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
