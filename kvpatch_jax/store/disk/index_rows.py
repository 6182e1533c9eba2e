"""Tables of a root's index, and their rows."""

import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..format.expiry import expiry_from_mtime
from ..format.header import LARGEST_REVISION
from ..format.naming import LEAD_NAME, is_object, part_of, unreduced_part

_BUSY = 2.0
"""Seconds to wait for another process's transaction, which takes microseconds."""
_LONGEST = 1 << 16
"""Bytes of a text or row; longer ones are damage."""
FILES = ("", "-wal", "-shm")
"""Ends of the names of SQLite's files."""
_PRAGMAS = ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "journal_mode=WAL", "synchronous=OFF",
            "cache_size=-16000")  # fmt: skip
RESERVED_SECONDS = 60.0
"""Seconds for which room is kept for what is being written."""
_SCHEMA = (
    "CREATE TABLE folders(id INTEGER PRIMARY KEY, path TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, mtime INTEGER)",
    "CREATE TABLE objects(folder INTEGER NOT NULL, file TEXT NOT NULL, tenant TEXT NOT NULL, kind TEXT NOT NULL, "
    "turn INTEGER NOT NULL, "
    "size INTEGER NOT NULL, revision INTEGER NOT NULL, expires REAL, used REAL NOT NULL, inode INTEGER NOT NULL, "
    "mtime INTEGER NOT NULL, PRIMARY KEY(folder, file)) WITHOUT ROWID",
    "CREATE INDEX by_turn ON objects(turn, used)",
    "CREATE INDEX by_tenant ON objects(tenant, turn, used)",
    "CREATE INDEX by_expiry ON objects(expires) WHERE expires IS NOT NULL",
    "CREATE TABLE usage(tenant TEXT, kind TEXT, objects INTEGER NOT NULL, bytes INTEGER NOT NULL, "
    "PRIMARY KEY(tenant, kind)) WITHOUT ROWID",
    "CREATE TABLE reserved(id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, bytes INTEGER NOT NULL, "
    "until INTEGER NOT NULL)",
    "CREATE TABLE ghosts(path TEXT PRIMARY KEY, since INTEGER NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TRIGGER added AFTER INSERT ON objects BEGIN INSERT INTO usage VALUES(new.tenant, new.kind, 1, "
    "new.size) ON CONFLICT(tenant, kind) DO UPDATE SET objects = objects + 1, bytes = bytes + new.size; END",
    "CREATE TRIGGER changed AFTER UPDATE OF size ON objects BEGIN UPDATE usage SET bytes = bytes + new.size - "
    "old.size WHERE tenant = new.tenant AND kind = new.kind; END",
    "CREATE TRIGGER gone AFTER DELETE ON objects BEGIN UPDATE usage SET objects = objects - 1, bytes = bytes - "
    "old.size WHERE tenant = old.tenant AND kind = old.kind; END",
)
SELECT = (
    "SELECT f.path, o.file, o.tenant, o.used, o.expires, o.size, o.revision, o.inode, o.mtime, o.turn "
    "FROM objects o JOIN folders f ON f.id = o.folder "
)
"""Beginning of queries for `IndexedObject`s, which `objects_of` runs."""


class IndexedObject(NamedTuple):
    """An object as the index knows it.

    Attributes:
      path: path below the root.
      size: bytes of its file.
      used: time of its last use, in seconds since the epoch.
      expires: when it expires, in seconds since the epoch; None: never. The header decides.
      revision: revision of its name; 0 if only its folder was listed.
      inode, mtime_ns: of its file, by which it is recognised.
      turn: when it is evicted, before those of a higher turn: 1 derived from a canonical, 2 can be formed again from
        the encoder output, 3 others.
    """

    path: str
    size: int
    used: float
    expires: float | None
    revision: int
    inode: int
    mtime_ns: int
    turn: int = 3

    @property
    def chunk(self) -> str:
        """Folder and keyed name of its chunk."""
        return self.path.partition(".")[0]

    @property
    def part(self) -> str:
        """Part of the chunk that it is (`naming.part_of`)."""
        return part_of(self.path)

    @property
    def written(self) -> tuple[int, int, int]:
        """Identity of its file (`io.files.written`)."""
        return self.inode, self.mtime_ns, self.size


def kind_of(path: str) -> str:
    """Returns what an object is: "kv", "kv.<encoding>", "kv.behind", "enc", "patch", or the library of an entry."""
    if path.startswith("lib/"):
        return path.split("/")[2]
    part = part_of(path)
    return "patch" if part.startswith("p.") else LEAD_NAME.sub("behind", part)


def object_of(path: str, stat: os.stat_result, revision: int = 0, expires: float | None = None) -> IndexedObject:
    """Returns the entry of an object from its file's `stat`."""
    known = expires if revision else expiry_from_mtime(stat.st_mtime_ns)
    used = max(stat.st_atime, 0.0)
    return IndexedObject(path, stat.st_size, used, known, revision, stat.st_ino, stat.st_mtime_ns)


def objects_of(connection: sqlite3.Connection, query: str, values: Sequence[Any], below: str) -> list[IndexedObject]:
    """Runs a query for objects below a folder.

    Raises:
      sqlite3.DatabaseError: a row is no object's of that folder. SQLite checks neither types nor sums of what it reads,
        and a row that names another file would have that one removed.
    """
    found: list[IndexedObject] = []
    for above, file, tenant, used, expires, *numbers in connection.execute(query, values):
        path = f"{above}/{file}"
        if (
            not (type(above) is type(file) is type(tenant) is str)
            or not path.startswith(f"{below}/")
            or not path.startswith(f"obj/{tenant}/")
            or not is_object(path)
            or not (type(used) is float and (expires is None or type(expires) is float))
            or not all(type(number) is int and number >= 0 for number in numbers)
        ):
            raise sqlite3.DatabaseError("malformed row")
        size, revision, inode, mtime, turn = numbers
        found.append(IndexedObject(path, size, used, expires, revision, inode, mtime, turn))
    return found


def sums_of(connection: sqlite3.Connection, query: str, values: Sequence[Any] = ()) -> list[tuple[str, int, int]]:
    """Runs a query for names, numbers of objects and bytes. Raises sqlite3.DatabaseError if they are no such."""
    found = connection.execute(query, values).fetchall()
    for name, *numbers in found:
        if type(name) is not str or not all(type(number) is int and number >= 0 for number in numbers):
            raise sqlite3.DatabaseError("malformed sums")
    return found


def connect(path: str) -> sqlite3.Connection:
    """Opens the index, and makes its tables. Raises sqlite3.DatabaseError if it is of another form."""
    for end in FILES:
        if os.path.lexists(path + end) and (os.path.islink(path + end) or not os.path.isfile(path + end)):
            raise sqlite3.DatabaseError("got a link or the like; expected a file")
    if path != ":memory:":  # its owner's alone from the first moment; SQLite gives its other files the same mode
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise sqlite3.OperationalError(f"unable to open: {error.strerror}") from error
    connection = sqlite3.connect(path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute("BEGIN IMMEDIATE")
        found = [row[0] for row in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        if not found:
            for statement in _SCHEMA:
                connection.execute(statement)
        connection.execute("COMMIT")
        if found and sorted(found) != sorted(_SCHEMA):
            raise sqlite3.DatabaseError("got other tables; expected those of this release")
    except BaseException:
        connection.close()
        raise
    return connection


def folder_id(connection: sqlite3.Connection, path: str) -> int:
    """Returns the number of a folder, which is added if it is new."""
    row = connection.execute("SELECT id FROM folders WHERE path = ?", (path,)).fetchone()
    if row is None:
        tenant = path.split("/")[1]
        row = connection.execute(
            "INSERT INTO folders(path, tenant, mtime) VALUES(?, ?, NULL) RETURNING id", (path, tenant)
        ).fetchone()
    return row[0]


def upsert(connection: sqlite3.Connection, own: int, one: IndexedObject) -> None:
    """Adds or replaces an object's row, in the folder of number `own`."""
    _, tenant, *_, file = one.path.split("/")
    values = (one.size, one.revision, one.expires, one.used, one.inode, one.mtime_ns)
    connection.execute(
        "INSERT INTO objects VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT(folder, file) DO UPDATE SET size = "
        "excluded.size, revision = excluded.revision, expires = excluded.expires, used = max(used, excluded.used), "
        "inode = excluded.inode, mtime = excluded.mtime",
        (own, file, tenant, kind_of(one.path), 1 if one.part.startswith("p.") else 3, *values),
    )


def set_turns(connection: sqlite3.Connection, ids: Mapping[str, int], paths: Sequence[str]) -> None:
    """Sets the turns of the canonicals of chunks of which a canonical or an encoder output has come or gone."""
    changed = {path.partition(".")[0] for path in paths if not part_of(path).startswith("p.")}
    for chunk in changed:
        above, _, key = chunk.rpartition("/")
        rows = connection.execute(
            "SELECT file, turn FROM objects WHERE folder = ? AND (file BETWEEN ? AND ? OR file BETWEEN ? AND ?)",
            (ids[above], f"{key}.kv", f"{key}.kw", f"{key}.enc", f"{key}.end"),
        ).fetchall()
        turns = {part_of(f"x/{file}"): (file, turn) for file, turn in rows}
        for part, (file, turn) in turns.items():
            whole = unreduced_part(part)
            if part.startswith("kv"):
                right = 1 if whole != part and whole in turns else 2 if "enc" in turns else 3
                if right != turn:
                    connection.execute(
                        "UPDATE objects SET turn = ? WHERE folder = ? AND file = ?", (right, ids[above], file)
                    )


# ------------------------------------------------------------------------------------------------------ reservations


def reserve(connection: sqlite3.Connection, tenant: str, nbytes: int) -> int:
    """Adds a reservation of bytes, in a transaction of the caller's. Returns its number, the largest so far."""
    last = connection.execute("SELECT coalesce(max(id), 0) FROM reserved").fetchone()[0]
    number = max(last + 1, time.time_ns())  # also after the largest one was released
    until = time.time_ns() + int(RESERVED_SECONDS * 1e9)
    connection.execute("INSERT INTO reserved VALUES(?, ?, ?, ?)", (number, tenant, nbytes, until))
    return number


def reserved(connection: sqlite3.Connection, tenant: str, before: int | None) -> int:
    """Returns the bytes of reservations that were made before one (None: of all), of a tenant or of all ("")."""
    own, values = ("AND tenant = ?", [tenant]) if tenant else ("", [])
    query = f"SELECT coalesce(sum(bytes), 0) FROM reserved WHERE until > ? AND id < ? {own}"
    found = connection.execute(query, (time.time_ns(), before or LARGEST_REVISION, *values)).fetchone()
    return max(int(found[0]), 0)


def forget_outdated(connection: sqlite3.Connection, least: int) -> None:
    """Removes notes of evictions before a time (ns), and reservations of processes that died."""
    connection.execute("DELETE FROM ghosts WHERE since < ?", (least,))
    connection.execute("DELETE FROM reserved WHERE until < ?", (time.time_ns(),))
