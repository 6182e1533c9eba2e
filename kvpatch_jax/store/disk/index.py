"""Index of a root: what its folders hold, in SQLite, so that nothing walks directories to list, count or evict.

    root/index.sqlite      and its -wal and -shm

The files are the truth, and the index a cache of what they say. The rows of a folder count only while its modification
time is the one that the index has for it: every writer records the time, under the shard's lock, with the names that
it has changed. Otherwise (a crash in between, an older release, copied files, a lost or damaged index) the folder is
listed again. What is removed or read is looked at first, so a wrong row costs a look and nothing else.

Nothing here is synced: a crash of the machine may lose the last records, which the folders' times then show.
"""

import contextlib
import dataclasses
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ...errors import StoreIOError
from ..format.naming import is_object
from ..io.files import typed, typed_errors
from ..io.thread_pool import register_fork_guard
from .index_rows import (
    FILES,
    SELECT,
    IndexedObject,
    connect,
    folder_id,
    forget_outdated,
    object_of,
    objects_of,
    reserve,
    reserved,
    set_turns,
    sums_of,
    upsert,
)
from .revisions import FUTURE
from .shard import Shard, folders_in, locked_shards

FILE = "index.sqlite"
GHOST_SECONDS = 3600.0
"""Seconds for which the index knows that a name was evicted."""
_WRITE = "BEGIN IMMEDIATE"
_IN_MEMORY_SECONDS = 60.0
"""Seconds after which a file that could not be written is tried again."""


@dataclasses.dataclass
class Changes:
    """Changes of names in locked shards, to be recorded together.

    Attributes:
      added: objects that were given their names.
      removed: paths of objects that were removed.
      evicted: those of `removed` whose content may be put again: an older put must not bring back an older one.
    """

    added: list[IndexedObject] = dataclasses.field(default_factory=list)
    removed: list[str] = dataclasses.field(default_factory=list)
    evicted: bool = True


class Index:
    """Index of a root, one per root and process. Thread-safe.

    Calls that only record never fail: what was not recorded is found by its folder's time. Where the file cannot be
    written (a read-only medium, a full disk), the index is in memory, made by listing every folder once.
    """

    def __init__(self, root: str):
        self.root = root
        self.rebuilds = 0
        self.note: Callable[[str], object] | None = None  # counts "index_rebuilds"
        self._connection: sqlite3.Connection | None = None
        self._in_memory_until = 0.0
        self._place: tuple[int, int] | None = None
        self._lock = threading.RLock()
        self._checked = 0.0
        register_fork_guard(self)

    def forked(self) -> None:
        """Opens the index again in a forked process, which must not use its parent's connection."""
        self._connection, self._lock = None, threading.RLock()

    def close(self) -> None:
        """Closes the connection; the next call opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    # ----------------------------------------------------------------------------------------------- connection

    def _open(self) -> sqlite3.Connection:
        """Returns the connection; opens it, and makes the index anew if it is damaged or of another form."""
        path, now = f"{self.root}/{FILE}", time.monotonic()
        if self._connection is not None and now - self._checked > 1.0:
            self._checked = now
            wanted = self._place
            with contextlib.suppress(OSError):
                wanted = None if now < self._in_memory_until else _place_of(path)
            if self._place != wanted or (self._in_memory_until and now >= self._in_memory_until):
                self._connection.close()  # another process has made it anew, or it may be on the disk again
                self._connection = None
        if self._connection is None and now < self._in_memory_until:
            self._connection, self._place = connect(":memory:"), None
        if self._connection is None:
            self._in_memory_until = 0.0
            try:
                self._connection = connect(path)
            except sqlite3.Error as error:
                if not _is_damage(error) or not self._discarded():
                    raise
                self._connection = connect(path)
            try:
                self._place = _place_of(path)
            except OSError as error:
                self.close()
                raise sqlite3.OperationalError(f"unable to open: {error.strerror}") from error
        return self._connection

    def _discarded(self) -> bool:
        """Removes a damaged index. Returns whether it did: not on a read-only root, nor a directory in its place.

        Other processes notice, and open the new one.
        """
        self.rebuilds += 1
        if self.note is not None:
            self.note("index_rebuilds")
        with contextlib.suppress(sqlite3.Error):
            self.close()
        self._connection = None
        try:
            for end in FILES:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self.root}/{FILE}{end}")
        except OSError:
            return False
        return True

    def _asked[T](self, ask: Callable[[sqlite3.Connection], T], *, begin: str | None = None) -> T:
        """Asks the index. If the file is damaged, again a new one, and else, if it fails, one in memory.

        Args:
          begin: the statement that begins a transaction; None: a single statement is one by itself.

        Raises:
          StoreIOError: another process keeps the index busy, or there is no memory.
        """
        for left in (2, 1, 0):
            try:
                with self._lock:
                    connection = self._open()
                    if begin is None:
                        return ask(connection)
                    connection.execute(begin)
                    try:
                        found = ask(connection)
                        connection.execute("COMMIT")
                        return found
                    except BaseException:
                        with contextlib.suppress(sqlite3.Error):
                            connection.execute("ROLLBACK")
                        raise
            except sqlite3.Error as error:
                if not left or _is_busy(error):
                    raise StoreIOError(f"store {self.root}: index: got {error}; expected SQLite to do it") from error
                with self._lock:
                    if not (_is_damage(error) and self._place is not None and self._discarded()):
                        self.close()
                        self._in_memory_until = time.monotonic() + _IN_MEMORY_SECONDS
        raise AssertionError

    def _found[T](self, ask: Callable[[sqlite3.Connection], T]) -> T:
        """Runs a query of all rows. If it shows that the file is damaged, again when all folders have been listed."""
        before = self.rebuilds
        found = self._asked(ask)
        if self.rebuilds == before:
            return found
        self.refresh()
        return self._asked(ask)

    # ------------------------------------------------------------------------------------------------ recording

    def record(self, shards: Iterable[Shard], changes: Changes) -> None:
        """Records changed names of locked shards. A folder that nobody else has changed stays current."""
        folders = {shard.path: (shard.before, shard.mtime_ns) for shard in shards if shard.path.startswith("obj/")}
        if not folders:
            return

        added = [one for one in changes.added if one.path.startswith("obj/")]
        removed = [path for path in changes.removed if path.startswith("obj/")]

        def ask(connection: sqlite3.Connection) -> None:
            ids = {path: folder_id(connection, path) for path in folders}
            since, ghosts = time.time_ns(), list[tuple[str, int, int]]()
            for path in removed:
                above, _, file = path.rpartition("/")
                gone = "DELETE FROM objects WHERE folder = ? AND file = ? RETURNING revision"
                row = connection.execute(gone, (ids[above], file)).fetchone()
                # One that was only listed may have any revision until now.
                ghosts.append((path, since, row[0] if row is not None and row[0] else since))
            if ghosts and changes.evicted:
                connection.executemany("INSERT OR REPLACE INTO ghosts VALUES(?, ?, ?)", ghosts)
            for one in added:
                above = one.path.rpartition("/")[0]
                upsert(connection, ids[above], one)
            set_turns(connection, ids, [one.path for one in added] + removed)
            for path, (before, after) in folders.items():
                connection.execute(
                    "UPDATE folders SET mtime = ? WHERE id = ? AND mtime = ?", (after, ids[path], before)
                )

        with contextlib.suppress(StoreIOError):
            self._asked(ask, begin=_WRITE)

    def see(self, path: str, stat: os.stat_result, expires: float | None = None) -> None:
        """Records the file that an object has: another program may have replaced it, or its times be wrong."""
        above = path.rpartition("/")[0]
        one = object_of(path, stat)._replace(expires=expires)

        def ask(connection: sqlite3.Connection) -> None:
            upsert(connection, folder_id(connection, above), one)

        with contextlib.suppress(StoreIOError):
            self._asked(ask, begin=_WRITE)

    def forget(self, path: str) -> None:
        """Removes the row of an object that is gone."""
        where = "folder = (SELECT id FROM folders WHERE path = ?) AND file = ?"
        values = path.rpartition("/")[::2]
        with contextlib.suppress(StoreIOError):
            self._asked(
                lambda connection: connection.execute(f"DELETE FROM objects WHERE {where}", values), begin=_WRITE
            )

    def evicted(self, path: str) -> tuple[int, int]:
        """Returns when an object was last evicted from a name (ns), and its revision; zeros as far as it is not known.

        A put that began before the revision was given must not take place any more, nor a copy whose read began before
        the eviction.
        """

        def ask(connection: sqlite3.Connection) -> Any:
            return connection.execute("SELECT since, revision FROM ghosts WHERE path = ?", (path,)).fetchone()

        try:
            row = self._asked(ask)
        except StoreIOError:
            return 0, 0
        if row is None or not all(type(value) is int for value in row):
            return 0, 0
        # An eviction of the future is a clock's error, or damage, and must not forbid puts until then.
        since, revision = row
        return (since, revision) if since <= time.time_ns() and revision < since + FUTURE else (0, 0)

    # -------------------------------------------------------------------------------------------------- listing

    def refresh(self, below: str = "obj") -> None:
        """Lists again the folders below one whose time shows that they have changed. Raises StoreIOError."""

        def known_folders(connection: sqlite3.Connection) -> dict[str, int | None]:
            rows = connection.execute("SELECT path, mtime FROM folders").fetchall()
            if any(type(path) is not str for path, _ in rows):
                raise sqlite3.DatabaseError("malformed row")
            return dict(rows)

        known = self._asked(known_folders)
        with typed_errors("store: list"):
            found = folders_in(self.root, below)
        for path, mtime in found.items():
            if known.get(path) != mtime:
                self._list_again(path)
        lost = [path for path in known if path not in found and _is_below(path, below)]
        if lost:

            def forget(connection: sqlite3.Connection) -> None:
                for path in lost:
                    if not os.path.isdir(f"{self.root}/{path}"):
                        own = folder_id(connection, path)
                        connection.execute("DELETE FROM objects WHERE folder = ?", (own,))
                        connection.execute("DELETE FROM folders WHERE id = ?", (own,))
                connection.execute("DELETE FROM usage WHERE objects = 0")

            self._asked(forget, begin=_WRITE)

    def folders(self, below: str = "obj") -> list[str]:
        """Lists the folders below one that may hold objects. Raises StoreIOError."""
        with typed_errors("store: list"):
            return sorted(folders_in(self.root, below))

    def _list_again(self, path: str) -> None:
        """Lists one folder, under its lock, and replaces its rows."""
        with (
            typed_errors("store: list"),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            locked_shards(self.root, [path]) as shards,
        ):
            shard = shards[path]
            found: dict[str, os.stat_result] = {}
            with os.scandir(shard.fd) as entries:
                for entry in entries:
                    if is_object(f"{path}/{entry.name}"):
                        with contextlib.suppress(FileNotFoundError):
                            found[entry.name] = entry.stat(follow_symlinks=False)

            def ask(connection: sqlite3.Connection) -> None:
                own = folder_id(connection, path)
                query = "SELECT file, inode, mtime, size FROM objects WHERE folder = ?"
                held = {row[0]: row[1:] for row in connection.execute(query, (own,))}
                gone = [(own, file) for file in held if file not in found]
                connection.executemany("DELETE FROM objects WHERE folder = ? AND file = ?", gone)
                for file, stat in found.items():
                    if held.get(file) != (stat.st_ino, stat.st_mtime_ns, stat.st_size):
                        upsert(connection, own, object_of(f"{path}/{file}", stat))
                set_turns(connection, {path: own}, [f"{path}/{file}" for file in found])
                connection.execute("UPDATE folders SET mtime = ? WHERE id = ?", (shard.mtime_ns, own))

            self._asked(ask, begin=_WRITE)

    def in_folder(self, path: str, prefix: str = "") -> list[IndexedObject]:
        """Lists the objects of one folder whose file names begin with a prefix, sorted. Raises StoreIOError."""
        for _ in range(8):
            try:
                mtime = os.stat(f"{self.root}/{path}", follow_symlinks=False).st_mtime_ns
            except (FileNotFoundError, NotADirectoryError):
                return []
            except OSError as error:
                raise typed(error, "store: list") from error

            def ask(connection: sqlite3.Connection, mtime: int = mtime) -> list[IndexedObject] | None:
                row = connection.execute("SELECT id, mtime FROM folders WHERE path = ?", (path,)).fetchone()
                if row is None or row[1] != mtime:
                    return None
                query = f"{SELECT} WHERE o.folder = ? AND o.file >= ? AND o.file < ? ORDER BY o.file"
                return objects_of(connection, query, (row[0], prefix, prefix + "\U0010ffff"), path)

            found = self._asked(ask, begin="BEGIN")
            if found is not None:
                return found
            self._list_again(path)
        # Others change it all the time; each change was recorded, so the rows are as current as a listing would be.
        return self.known_in_folder(path, prefix)

    def known_in_folder(self, path: str, prefix: str) -> list[IndexedObject]:
        """Lists objects as `in_folder`, by the rows that there are. Raises StoreIOError."""
        query = f"{SELECT} WHERE f.path = ? AND o.file >= ? AND o.file < ? ORDER BY o.file"
        values = (path, prefix, prefix + "\U0010ffff")
        return self._asked(lambda connection: objects_of(connection, query, values, path))

    def below(self, below: str = "obj", after: str = "", most: int = -1) -> list[IndexedObject]:
        """Lists objects below a folder, sorted by path, from behind a path on. Call `refresh` first."""
        query = (
            f"{SELECT} WHERE f.path >= ? AND f.path < ? AND (f.path > ? OR (f.path = ? AND o.file > ?)) "
            "ORDER BY f.path, o.file LIMIT ?"
        )
        above, _, file = after.rpartition("/")
        values = (below, below + "\U0010ffff", above, above, file, most)
        return self._found(lambda connection: objects_of(connection, query, values, below))

    def usage(self, below: str = "obj") -> tuple[int, int]:
        """Returns the number of objects and their bytes, of the root or of one tenant's folder. Raises StoreIOError."""
        tenant = below.partition("/")[2]
        where, values = ("WHERE tenant = ?", [tenant]) if tenant else ("", [])
        query = f"SELECT '', coalesce(sum(objects), 0), coalesce(sum(bytes), 0) FROM usage {where}"
        return self._found(lambda connection: sums_of(connection, query, values))[0][1:]

    def reserve(self, tenant: str, nbytes: int) -> int:
        """Notes that so many bytes are about to be written, so that writers together keep within a budget.

        Returns:
          The number of the reservation, which is larger than those of earlier ones; 0 if it could not be noted. It
          counts until `release`, or for a minute, if its process dies.
        """
        try:
            return self._asked(lambda connection: reserve(connection, tenant, nbytes), begin=_WRITE)
        except StoreIOError:
            return 0

    def release(self, reservation: int) -> None:
        """Ends a reservation."""
        with contextlib.suppress(StoreIOError):
            self._asked(lambda connection: connection.execute("DELETE FROM reserved WHERE id = ?", (reservation,)))

    def claimed(self, below: str, before: int | None = None) -> int:
        """Returns the bytes of objects and of what is being written, of the root or of one tenant's folder.

        Args:
          before: number of the caller's reservation: only earlier ones count, so that two do not wait for each other.
            None: all.

        Raises:
          StoreIOError: as `usage`.
        """
        tenant = below.partition("/")[2]
        return self.usage(below)[1] + self._asked(lambda connection: reserved(connection, tenant, before))

    def audit(self, below: str = "obj") -> None:
        """Lists all folders below one again, and compares the sums with the rows, which takes a while.

        Raises:
          StoreError: as `refresh`.
        """
        rows = "SELECT tenant, kind, count(*), sum(size) FROM objects GROUP BY tenant, kind"
        kept = "SELECT tenant, kind, objects, bytes FROM usage WHERE objects <> 0 OR bytes <> 0"
        folders = "UPDATE folders SET mtime = NULL WHERE path >= ? AND path < ?"

        def ask(connection: sqlite3.Connection) -> None:
            if sorted(connection.execute(rows), key=str) != sorted(connection.execute(kept), key=str):
                raise sqlite3.DatabaseError("malformed sums")
            connection.execute(folders, (below, below + "\U0010ffff"))

        self._asked(ask, begin=_WRITE)
        self.refresh(below)

    def oldest(self, below: str = "obj") -> float | None:
        """Returns the earliest time of last use, in seconds since the epoch; None: no objects. Raises StoreIOError."""
        tenant = below.partition("/")[2]
        where, values = ("WHERE tenant = ?", [tenant]) if tenant else ("", [])
        query = f"SELECT min(used) FROM objects {where}"
        return self._asked(lambda connection: connection.execute(query, values).fetchone())[0]

    def usage_by_tenant(self) -> dict[str, tuple[int, int]]:
        """Returns objects and bytes by the keyed names of tenants. Raises StoreIOError."""
        query = "SELECT tenant, sum(objects), sum(bytes) FROM usage WHERE objects > 0 GROUP BY tenant"
        rows = self._found(lambda connection: sums_of(connection, query))
        return {tenant: (objects, nbytes) for tenant, objects, nbytes in rows}

    def usage_by_kind(self, below: str = "obj") -> dict[str, tuple[int, int]]:
        """Returns objects and bytes by kind (`kind_of`), of the root or of one tenant's folder. Raises StoreIOError."""
        tenant = below.partition("/")[2]
        where, values = ("AND tenant = ?", [tenant]) if tenant else ("", [])
        query = f"SELECT kind, sum(objects), sum(bytes) FROM usage WHERE objects > 0 {where} GROUP BY kind"
        rows = self._found(lambda connection: sums_of(connection, query, values))
        return {kind: (objects, nbytes) for kind, objects, nbytes in rows}

    # ------------------------------------------------------------------------------------------------- eviction

    def victims(self, below: str, after: IndexedObject | None, most: int) -> list[IndexedObject]:
        """Lists objects in their order of eviction, by turn and last use, from behind one on. Raises StoreIOError."""
        tenant = below.partition("/")[2]
        own = "o.tenant = ? AND" if tenant else ""
        turn, used = (0, 0.0) if after is None else (after.turn, after.used)
        query = f"{SELECT} WHERE {own} (o.turn, o.used) >= (?, ?) ORDER BY o.turn, o.used LIMIT ?"
        values = (*([tenant] if tenant else []), turn, used, most)
        return self._found(lambda connection: objects_of(connection, query, values, below))

    def expired(self, below: str, now: float, most: int = -1) -> list[IndexedObject]:
        """Lists objects that have expired as far as the index knows, earliest first. Raises StoreIOError."""
        tenant = below.partition("/")[2]
        own = "AND o.tenant = ?" if tenant else ""
        query = f"{SELECT} WHERE o.expires <= ? {own} ORDER BY o.expires LIMIT ?"
        values = (now, *([tenant] if tenant else []), most)
        return self._found(lambda connection: objects_of(connection, query, values, below))

    def correct(self, one: IndexedObject, **fields: Any) -> None:
        """Changes fields of an object's row that turned out to be wrong: `used`, `expires`."""
        words = ", ".join(f"{name} = ?" for name in fields)
        where = " WHERE folder = (SELECT id FROM folders WHERE path = ?) AND file = ?"
        values = (*fields.values(), *one.path.rpartition("/")[::2])
        with contextlib.suppress(StoreIOError):
            self._asked(
                lambda connection: connection.execute(f"UPDATE objects SET {words}{where}", values), begin=_WRITE
            )

    def forget_ghosts(self) -> None:
        """Removes old notes of evictions, and reservations of processes that died."""
        least = time.time_ns() - int(2 * GHOST_SECONDS * 1e9)
        with contextlib.suppress(StoreIOError):
            self._asked(lambda connection: forget_outdated(connection, least), begin=_WRITE)


def _is_busy(error: sqlite3.Error) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _is_damage(error: sqlite3.Error) -> bool:
    """Returns whether an error means that the file is no index of ours, and not that it cannot be written now."""
    words = ("no such", "malformed", "corrupt", "not a database", "other tables", "a link", "has no column", "datatype")
    return any(word in str(error) for word in words) or isinstance(error, sqlite3.IntegrityError)


def _place_of(path: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


def _is_below(path: str, below: str) -> bool:
    return path == below or path.startswith(f"{below}/")
