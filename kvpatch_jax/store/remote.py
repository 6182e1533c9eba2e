"""Remote stores: the object files of many machines under `<tenant>/<name>`, and leases that all of them see.

`ObstoreClient` and `ValkeyClient` are a service's five calls; `Remote` adds typed errors and a pause after failures.
"""

import asyncio
import contextlib
import datetime
import functools
import itertools
import json
import math
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InputError, StoreError, StoreUnreachableError
from ..utils.background import JobQueue
from ..utils.optional_packages import require
from . import forks
from .files import aligned, file_bytes, locked

SCHEMES = ("s3", "gs", "az", "http", "https", "file", "memory", "valkey", "valkeys")
FIRST_PAUSE, LAST_PAUSE = 0.5, 30.0
"""Seconds without reads after a failure, doubled with each further one."""
SKEW_SECONDS = 5.0
"""By how much the clocks of two machines may differ, for leases."""
CLOSE_SECONDS = 2.0
"""How long to wait at `close` for a request that is under way."""


def open_remote(url: Any, *, timeout: float | int = 10.0) -> "Remote":
    """Opens a remote store. No request is sent yet.

    Args:
      url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://account/container/prefix`, `https://host/path`,
        `file:///directory`, `memory://`, `valkey://host:port/database` or `valkeys://` (TLS), with the credentials of
        the environment; or a store of `obstore.store` or a `valkey.Valkey`, with options of its own.
      timeout: seconds for a request with its body. Uploads of more than 5 MB are several requests.

    Raises:
      InputError: another URL. MissingExtraError: `obstore` or `valkey` is not installed.
    """
    if not isinstance(timeout, int | float) or not 0 < timeout < 1e6:
        raise InputError(f"remote store: got timeout {timeout!r:.80}; expected seconds above 0 and below 1e6")
    libraries = {kind.__module__.partition(".")[0] for kind in type(url).__mro__}
    if "obstore" in libraries or "valkey" in libraries:
        return Remote(ObstoreClient(url) if "obstore" in libraries else ValkeyClient(url))
    scheme, _, path = url.partition("://") if isinstance(url, str) else ("", "", "")
    if scheme not in SCHEMES:
        raise InputError(f"remote store: got {url!r:.80}; expected a URL with one of {', '.join(SCHEMES)}")
    module, package = ("valkey", "valkey") if scheme.startswith("valkey") else ("obstore.store", "obstore")
    library: Any = require(module, package, "remote")
    seconds = datetime.timedelta(seconds=timeout)
    allow_http = scheme == "http" or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    options = {"timeout": seconds, "connect_timeout": seconds, "allow_http": allow_http}
    retries = {"max_retries": 2, "retry_timeout": seconds}
    try:
        if package == "valkey":
            return Remote(ValkeyClient(library.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)))
        if scheme == "memory":
            return Remote(ObstoreClient(library.MemoryStore()))
        if scheme == "file":
            if not path.startswith("/"):
                raise ValueError("a relative path")
            return Remote(ObstoreClient(library.LocalStore(path, mkdir=True)))
        return Remote(ObstoreClient(library.from_url(url, client_options=options, retry_config=retries)))
    except Exception as error:  # obstore's have no common base with ValueError
        raise InputError(f"remote store: got {url[:80]!r} ({str(error)[:200]}); expected a valid URL") from error


class ObstoreClient:
    """Calls of an object store. An etag is what `obstore.put(mode=)` takes.

    Directories have no compare-and-set in obstore: there, writers lock the file `.lock`, and `swap` compares etags.
    """

    def __init__(self, store: Any):
        self._obstore: Any = require("obstore", "obstore", "remote")
        exceptions: Any = require("obstore.exceptions", "obstore", "remote")
        self.errors = (exceptions.BaseError, OSError, ValueError, NotImplementedError)
        self.temporary = (exceptions.GenericError, exceptions.JoinError, TimeoutError)
        self._conflicts = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
        self._store, kind = store, type(store).__name__
        self._options = {"use_multipart": False} if kind == "HTTPStore" else {}
        self._is_folder, self._writing = kind == "LocalStore", contextlib.nullcontext
        if self._is_folder:
            self._writing = functools.partial(locked, f"{store.prefix or ''}/.lock")

    def get(self, name: str) -> tuple[Any, Any]:
        """Reads an object's bytes and its etag; (None, None) if there is none."""
        try:
            answer = self._obstore.get(self._store, name)
        except FileNotFoundError:
            return None, None
        etag = {key: answer.meta[key] for key in ("e_tag", "version") if answer.meta[key] is not None}
        return answer.bytes(), etag

    def put(self, writes: Sequence[tuple[str, Any]]) -> None:
        """Writes objects at the same time, whatever is there. Raises the first error after all of them."""

        async def put_all() -> list[Any]:
            puts = [self._obstore.put_async(self._store, name, data, **self._options) for name, data in writes]
            return await asyncio.gather(*puts, return_exceptions=True)

        with self._writing():
            for result in asyncio.run(put_all()):
                if isinstance(result, Exception):
                    raise result

    def swap(self, name: str, data: bytes, etag: Any) -> bool:
        """Writes an object if the stored one has this etag, or with None if there is none. Returns whether it did."""
        mode = "create" if etag is None else etag
        with self._writing(), contextlib.suppress(*self._conflicts):
            if self._is_folder and etag is not None:
                if self.get(name)[1] != etag:
                    return False
                mode = "overwrite"
            self._obstore.put(self._store, name, data, mode=mode)
            return True
        return False

    def names(self, prefix: str) -> list[str]:
        """Lists the names with a prefix; obstore lists folders."""
        entries = self._obstore.list(self._store, prefix.rpartition("/")[0]).collect()
        return [entry["path"] for entry in entries if entry["path"].startswith(prefix)]

    def delete(self, prefix: str) -> None:
        """Deletes the objects whose names have this prefix."""
        with self._writing():
            names = self.names(prefix)
            try:
                self._obstore.delete(self._store, names)
            except FileNotFoundError:  # another machine deletes too; some services then leave the rest
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        self._obstore.delete(self._store, name)


class ValkeyClient:
    """The same calls of a Valkey server. A value is its etag, 16 random bytes, then the object; a set lists names."""

    def __init__(self, client: Any):
        if client.get_encoder().decode_responses:
            raise InputError("remote store: got a client that decodes; expected decode_responses=False")
        exceptions: Any = require("valkey.exceptions", "valkey", "remote")
        self.errors = (exceptions.ValkeyError,)
        self.temporary = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError)
        self._client, self._conflict, self._index = client, exceptions.WatchError, "kvpatch:names"

    def get(self, name: str) -> tuple[Any, Any]:
        value = self._client.get(f"kvpatch:{name}")
        return (None, None) if value is None else (memoryview(value)[16:], value[:16])

    def put(self, writes: Sequence[tuple[str, Any]]) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for name, data in writes:
                self._write(pipe, name, data)
            pipe.execute()

    def swap(self, name: str, data: bytes, etag: Any) -> bool:
        with self._client.pipeline() as pipe, contextlib.suppress(self._conflict):
            pipe.watch(f"kvpatch:{name}")
            if (pipe.getrange(f"kvpatch:{name}", 0, 15) or None) == etag:
                pipe.multi()
                self._write(pipe, name, data)
                pipe.execute()
                return True
        return False

    def _write(self, pipe: Any, name: str, data: Any) -> None:
        """Adds the two commands of a write, the name first: a name without a value is a miss."""
        pipe.zadd(self._index, {name: 0})
        pipe.set(f"kvpatch:{name}", b"".join((secrets.token_bytes(16), memoryview(data))))

    def names(self, prefix: str) -> list[str]:
        return [name.decode() for name in self._client.zrangebylex(self._index, f"[{prefix}", f"[{prefix}\xff")]

    def delete(self, prefix: str) -> None:
        if names := self.names(prefix):
            with self._client.pipeline() as pipe:
                pipe.delete(*[f"kvpatch:{name}" for name in names])
                pipe.zrem(self._index, *names)
                pipe.execute()


class Remote:
    """A remote store as `ChunkStore` uses it; several stores of a process may share it.

    After a failure, reads fail at once for a while, so that an outage does not cost each of them the timeout. Methods
    raise StoreUnreachableError for what may pass and StoreError for what may not.
    """

    def __init__(self, client: Any):
        self._client, self._failures, self.paused_until = client, 0, 0.0

    def _call(self, call: str, *args: Any) -> Any:
        if call in ("get", "names") and time.monotonic() < self.paused_until:
            raise StoreUnreachableError("remote store: got a failure just now; expected it to answer", asked=False)
        try:
            result = getattr(self._client, call)(*args)
        except self._client.errors as error:
            line = str(error).partition("\n")[0][:200]
            message = f"remote store: {call}: got {type(error).__name__}: {line}; expected the service to do it"
            if not isinstance(error, self._client.temporary):
                raise StoreError(message) from error
            self.paused_until = time.monotonic() + min(FIRST_PAUSE * 2.0**self._failures, LAST_PAUSE)
            self._failures = min(self._failures + 1, 10)
            raise StoreUnreachableError(message) from error
        self._failures, self.paused_until = 0, 0.0
        return result

    def get(self, name: str) -> tuple[np.ndarray | None, Any]:
        """Reads an object's bytes, uint8 at an address that is a multiple of 64, and its etag; (None, None): none."""
        data, etag = self._call("get", name)
        if data is None:
            return None, None
        copy = aligned(len(data))
        copy[:] = np.frombuffer(data, np.uint8)
        return copy, etag

    def put(self, writes: Sequence[tuple[str, Any]]) -> None:
        """Writes objects (name, bytes) in any order, whatever is there. After an error others may be written."""
        self._call("put", writes)

    def swap(self, name: str, data: bytes, etag: Any) -> bool:
        """Writes an object if the stored one has this etag, or with None if there is none. Returns whether it did."""
        return self._call("swap", name, data, etag)

    def with_prefix(self, prefix: str) -> list[str]:
        """Lists the names with a prefix."""
        return self._call("names", prefix)

    def delete(self, prefix: str) -> None:
        """Deletes the objects whose names have this prefix."""
        self._call("delete", prefix)


class Lease:
    """The right to do something alone for a while; as a context manager it is released at the end.

    With a remote store a lease is an object that holds its holder and end and is replaced by compare-and-set; without
    one, a row of the index. At most one holder has it at a time if it asks `held` before each step that counts, and
    machines' clocks differ by less than `SKEW_SECONDS`. A holder that stalls after it asked is not kept from the step.
    """

    def __init__(self, objects: Any, name: str):
        self._index, self._key = objects.index, (objects.tenant, name)
        self._remote, self._path = objects.remote, f"leases/{objects.tenant}/{name}"
        self._holder, self._until = secrets.token_hex(16), 0.0

    @property
    def held(self) -> bool:
        """Whether the lease is neither over by this machine's monotonic clock, nor released, nor known to be lost."""
        return time.monotonic() < self._until

    def renew(self, seconds: float | int) -> bool:
        """Extends the lease to some seconds from now. Returns whether it is held; False if it was over.

        Raises:
          InputError: the seconds are not above 0. StoreError: the remote store or the disk failed; nothing changed.
        """
        return self.held and self._take(seconds)

    def _take(self, seconds: float | int) -> bool:
        if not 0 < seconds < math.inf:
            raise InputError(f"lease: got {seconds!r:.80} seconds; expected a finite number above 0")
        until, now = time.monotonic() + seconds, time.time()
        if self._remote is None:
            statement = """INSERT INTO leases VALUES(?, ?, ?, ?) ON CONFLICT(tenant, name) DO UPDATE
              SET holder = excluded.holder, until = excluded.until WHERE until <= ? OR holder = excluded.holder"""
            with self._index.write() as transaction:
                rows = transaction.db.execute(statement, (*self._key, self._holder, now + seconds, now))
            is_taken = rows.rowcount == 1
        else:
            holder, end, etag = self._record()
            record = json.dumps([self._holder, now + seconds]).encode()
            is_free = holder == self._holder or end + SKEW_SECONDS <= now
            # If the answer to a try was lost, the next one conflicts with it.
            is_taken = is_free and (self._remote.swap(self._path, record, etag) or self._record()[0] == self._holder)
        self._until = until if is_taken else 0.0
        return self.held

    def release(self) -> None:
        """Gives the lease up. Raises StoreError: it ends by itself then."""
        self._until = 0.0
        if self._remote is None:
            with self._index.write() as transaction:
                values = (*self._key, self._holder)
                transaction.db.execute("DELETE FROM leases WHERE tenant = ? AND name = ? AND holder = ?", values)
        else:
            holder, _, etag = self._record()
            if holder == self._holder:  # the object stays: services cannot delete on a condition
                self._remote.swap(self._path, b"", etag)

    def _record(self) -> tuple[str, float, Any]:
        """Returns holder, end and etag of the object; a released or malformed one has ended."""
        data, etag = self._remote.get(self._path)
        try:
            holder, until = json.loads(b"" if data is None else data.tobytes())
            return str(holder), float(until), etag
        except (ValueError, TypeError):
            return "", 0.0, etag

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(StoreError):
            self.release()


def take_lease(objects: Any, name: str, seconds: float | int) -> Lease | None:
    """Takes a tenant's lease, or returns None: another holder has it. Raises as `Lease.renew`."""
    lease = Lease(objects, name)
    return lease if lease._take(seconds) else None


class Sender:
    """Sends a tenant's outbox to the remote store in a thread, in order, up to 16 puts that follow each other at once.

    A row leaves the outbox once it is sent, so a process that dies leaves it to the next one. The threads and processes
    of a root take turns by a file lock: nothing is sent within `alone()`.
    """

    def __init__(self, objects: Any, remote: Remote):
        self._objects, self._remote = objects, remote
        path = f"{objects.root}/{objects.tenant}.outbox"
        os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))  # not while a root is removed
        self.alone = functools.partial(locked, path, 0)
        self.forked()
        forks.register(self)
        if self._next_rows(0):  # an earlier process has left them
            self.wake()

    def forked(self) -> None:
        """Begins without a thread in a forked process: the parent has its own."""
        self._queue = JobQueue[None](self._send_patiently, 1, "kvpatch-send", patience=CLOSE_SECONDS)

    def wake(self) -> None:
        """Has the thread send what was added, in an outage with its next attempt. Returns at once."""
        with contextlib.suppress(RuntimeError):  # at the interpreter's exit: a later process sends it
            self._queue.add(None)

    def flush(self) -> None:
        """Sends the outbox; what is not sent stays in it.

        Raises:
          StoreUnreachableError: the remote store does not answer. StoreError: it refuses some; others were sent.
        """
        last, refusal = 0, None
        while not self._objects.closed:
            with self.alone():
                rows = self._next_rows(last)
                if not rows:
                    break
                last = rows[-1][0]
                try:
                    self._send_rows(rows)
                except StoreUnreachableError:
                    raise
                except StoreError as error:
                    refusal = error
                    continue
                with self._objects.index.write() as transaction:
                    transaction.db.executemany("DELETE FROM outbox WHERE id = ?", [(id,) for id, *_ in rows])
            self._objects.counters["remote_sent"] += len(rows)
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        """Ends the thread; waits a little for a request that is under way. Idempotent."""
        self._queue.close(CLOSE_SECONDS)

    def _send_patiently(self, _: None) -> None:
        """Sends the outbox, after an outage again. What is refused is tried again with the next put."""
        while not self._queue.closed:
            try:
                return self.flush()
            except StoreUnreachableError:
                self._objects.counters["remote_errors"] += 1
                while time.monotonic() < self._remote.paused_until and not self._queue.closed:
                    time.sleep(0.1)
            except Exception:  # such as that of a store that is closed meanwhile
                return

    def _next_rows(self, last: int) -> list[tuple]:
        """Returns rows (id, operation, name, file) behind a row, of one operation. No file: replaced or expired."""
        query = """SELECT o.id, operation, o.name, file FROM outbox o LEFT JOIN objects ON
          objects.tenant = o.tenant AND objects.name = o.name AND objects.seq = o.seq AND COALESCE(expires, 1e99) > ?
          WHERE o.tenant = ? AND o.id > ? ORDER BY o.id LIMIT 16"""
        rows = self._objects.index.rows(query, time.time(), self._objects.tenant, last)
        return list(itertools.takewhile(lambda row: row[1] == rows[0][1], rows))

    def _send_rows(self, rows: Sequence[tuple]) -> None:
        writes = list[tuple[str, np.ndarray]]()
        for _, operation, name, file in rows:
            path = f"{self._objects.tenant}/{name}"
            if operation == "delete":
                self._remote.delete(path)
            elif file is not None:
                with contextlib.suppress(OSError):  # replaced or deleted meanwhile, or unreadable
                    writes.append((path, file_bytes(f"{self._objects.root}/data/{file}")))
        if writes:
            self._remote.put(writes)
