"""Adapter of Valkey and Redis. The client is imported when an adapter is made from a URL."""

import contextlib
import importlib
import itertools
import re
import secrets
from collections.abc import Iterator
from typing import Any, Literal

from ...errors import InputError, StoreCorruptError, StoreIOError, StoreUnreachableError, StoreVersionError
from ...utils.optional_packages import require
from ..format.header import header_length, parse_header
from ..format.naming import is_object
from .adapter import ABSENT, ANY, Condition, Expected, RemoteValue
from .remote_store import GRACE

_GENERATION = 16
"""Bytes in front of a value, random for each write."""
_PAGE = 1000
"""Paths that are listed or examined in one request."""
_PASSING = ("ConnectionError", "TimeoutError", "ReadOnlyError", "TryAgainError", "ClusterDownError", "MasterDownError")
"""The client's errors after which a retry is of use. What it has no class for begins with one of `_PASSING_WORDS`."""
_PASSING_WORDS = re.compile("BUSY|NOREPLICAS|UNKILLABLE")


class ValkeyAdapter:
    """A `RemoteAdapter` over one Valkey or Redis server, as durable as the server is set to be.

    A value is the string `<prefix>v:<path>`, its generation in front; `<prefix>paths` is a sorted set of all paths,
    which lists them. Conditional writes are WATCH, MULTI, EXEC, so that any server runs them. A value that the server
    evicted (`maxmemory`) or that ended by `ttl` is absent. The index never ends, so set a `volatile-…` or no policy.
    In a cluster a prefix in braces, `{kv}:`, keeps the keys of a store together; of replicas, only the primary is read.

    Args:
      client: a `valkey.Valkey` or `redis.Redis`, without `decode_responses`.
      prefix: beginning of all keys: the namespace of a store.
      ttl: lets an object end on the server, an hour after it expires by its header.

    Raises:
      InputError: the client is another one, or decodes what it reads.
    """

    def __init__(self, client: Any, *, prefix: str = "kvpatch:", ttl: bool = False):
        roots = [kind.__module__.partition(".")[0] for kind in type(client).__mro__]
        library = next((root for root in roots if root in ("valkey", "redis")), None)
        if library is None:
            raise InputError(f"remote store: got client {client!r:.80}; expected a valkey.Valkey or redis.Redis")
        if client.get_encoder().decode_responses:
            raise InputError("remote store: got a client that decodes; expected decode_responses=False")
        self._client, self._prefix, self._ttl = client, prefix, ttl
        self._errors: Any = importlib.import_module(f"{library}.exceptions")
        self._every_error = self._errors.ValkeyError if library == "valkey" else self._errors.RedisError
        self._index = f"{prefix}paths"

    @classmethod
    def from_url(cls, url: str, *, prefix: str = "kvpatch:", ttl: bool = False, timeout: float | int = 5.0):
        """Returns an adapter of a server, `valkey://host:6379/0`, with sockets that wait for some seconds.

        Raises:
          MissingExtraError: `valkey` is not installed.
          InputError: the URL is invalid.
        """
        valkey: Any = require("valkey", "valkey", "valkey")
        try:
            client = valkey.Valkey.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
        except ValueError as error:
            raise InputError(f"remote store: got URL {url[:80]!r} ({error}); expected valkey://host:port/db") from error
        return cls(client, prefix=prefix, ttl=ttl)

    @contextlib.contextmanager
    def _typed(self, what: str) -> Iterator[None]:
        """Converts the client's errors into the store's."""
        errors = self._errors
        try:
            yield
        except self._every_error as error:
            refused = isinstance(error, errors.AuthenticationError | errors.AuthorizationError)
            kinds = tuple(getattr(errors, name) for name in _PASSING)
            passing = isinstance(error, kinds) or _PASSING_WORDS.match(str(error))
            kind = StoreUnreachableError if passing and not refused else StoreIOError
            raise kind(
                f"remote store: {what}: got {type(error).__name__}: {str(error)[:200]}; expected the service to do it"
            ) from error

    def _key(self, path: str) -> str:
        return f"{self._prefix}v:{path}"

    def read(self, path: str, start: int = 0, stop: int | None = None) -> RemoteValue | None:
        """Reads a range of a value; None if there is none. Raises StoreIOError."""
        key, last = self._key(path), -1 if stop is None else _GENERATION + stop - 1
        with self._typed("get"), self._client.pipeline(transaction=True) as pipe:
            pipe.getrange(key, 0, _GENERATION - 1)
            if stop is None or stop > start:
                pipe.getrange(key, _GENERATION + start, last)
            generation, *data = pipe.execute()
        return RemoteValue(b"".join(data), generation) if generation else None

    def write(self, path: str, data: bytes, expected: Expected = ANY) -> bytes | None:
        """Writes a value if the path has what is expected. Raises StoreIOError."""
        generation, ends = secrets.token_bytes(_GENERATION), self._end_of(path, data) if self._ttl else None

        def write(pipe: Any) -> None:
            pipe.set(self._key(path), generation + data, exat=ends)
            pipe.zadd(self._index, {path: 0})

        with self._typed("put"):
            return generation if self._conditional(path, expected, write, generation) else None

    def delete(self, path: str, expected: bytes | Literal[Condition.ANY] = ANY) -> bool:
        """Deletes a value if it has the expected generation. Returns whether it had. Raises StoreIOError."""

        def delete(pipe: Any) -> None:
            pipe.delete(self._key(path))
            pipe.zrem(self._index, path)

        with self._typed("delete"):
            return self._conditional(path, expected, delete)

    def _conditional(self, path: str, expected: Expected, change: Any, generation: bytes = b"") -> bool:
        """Queues a change and executes it if the path has what is expected. Returns whether it had.

        Args:
          generation: the one that the change writes: if it is there, the client lost the answer and asked again.
        """
        with self._client.pipeline(transaction=True) as pipe:
            while True:
                if expected is not ANY:
                    pipe.watch(self._key(path))
                    current = pipe.getrange(self._key(path), 0, _GENERATION - 1)
                    if current and current == generation:
                        return True
                    if current != (b"" if expected is ABSENT else expected):
                        return False
                    pipe.multi()
                change(pipe)
                try:
                    pipe.execute()
                    return True
                except self._errors.WatchError:
                    continue  # the path changed: so does what it has

    def _end_of(self, path: str, data: bytes) -> int | None:
        """Returns when an object ends on the server, in seconds since the epoch; None: never."""
        with contextlib.suppress(StoreCorruptError, StoreVersionError):
            if is_object(path) and (header := parse_header(data[: header_length(data, len(data))], len(data))).expires:
                return int(header.expires + GRACE) + 1
        return None

    def paths(self, prefix: str) -> Iterator[str]:
        """Lists the paths that begin with a prefix. Raises StoreIOError."""
        first, last = f"[{prefix}", f"({prefix[:-1]}{chr(ord(prefix[-1]) + 1)}" if prefix else "+"
        while True:
            with self._typed("list"):
                page = self._client.zrangebylex(self._index, first, last, start=0, num=_PAGE)
                if not page:
                    return
                with self._client.pipeline(transaction=False) as pipe:
                    for path in page:
                        pipe.exists(self._key(path.decode()))
                    there = pipe.execute()
                for path in itertools.compress(page, (not here for here in there)):
                    self._forget(path.decode())
            yield from (path.decode() for path in itertools.compress(page, there))
            first = f"({page[-1].decode()}"

    def _forget(self, path: str) -> None:
        """Removes a path whose value ended from the index."""
        self._conditional(path, ABSENT, lambda pipe: pipe.zrem(self._index, path))
