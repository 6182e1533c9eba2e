"""Adapter of TensorStore's key-value drivers: memory, files, Google Cloud Storage, S3, …

`tensorstore` comes with orbax and is imported when an adapter is made.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from ...errors import InputError, StoreIOError, StoreUnreachableError
from .adapter import ABSENT, ANY, Condition, Expected, RemoteValue, seconds_left
from .remote_store import RemoteStore
from .retry_policy import RetryPolicy
from .time_limit import call_within

_LASTING = re.compile(
    "(NOT_FOUND|INVALID_ARGUMENT|PERMISSION_DENIED|UNAUTHENTICATED|FAILED_PRECONDITION|UNIMPLEMENTED|DATA_LOSS)\\b"
)
"""Beginnings of TensorStore's errors after which a retry is useless."""
_NO_VALUE = b"\x02"
"""TensorStore's generation of a path without a value."""


class _TensorStoreThreads:
    """State of TensorStore's threads: started, or lost in a fork, after which any call would abort the process."""

    def __init__(self) -> None:
        self.started = self.lost = False
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.lost = self.started

    def start(self, what: str) -> None:
        """Registers a call. Raises StoreUnreachableError if calls are not possible."""
        if self.lost:
            raise StoreUnreachableError(
                f"remote store: {what}: got a process that was forked after TensorStore was used, whose threads it "
                "lacks; expected one that was spawned, or forked before",
                asked=False,
            )
        self.started = True


_threads = _TensorStoreThreads()


class _RangeError(Exception):
    """TensorStore refuses a range that ends behind the value."""


@contextlib.contextmanager
def _typed(what: str) -> Iterator[None]:
    """Converts TensorStore's errors into the store's."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        if str(error).startswith("OUT_OF_RANGE"):
            raise _RangeError from error
        message = f"remote store: {what}: got {str(error)[:300] or 'no answer in time'}; expected the service to do it"
        lasting = isinstance(error, NotImplementedError) or _LASTING.match(str(error))
        raise (StoreIOError if lasting else StoreUnreachableError)(message) from error


class TensorStoreAdapter:
    """A `RemoteAdapter` over a TensorStore key-value driver, as durable as the driver.

    What a driver cannot do, the adapter cannot promise: S3 has no conditional delete, so that TensorStore looks before
    it deletes, and a value that is written in between is lost; `file` identifies a value by its inode, time and size.
    S3's conditional writes are always asked for, unless the spec says otherwise. Every call fails in a process that
    was forked after the first one.

    Args:
      spec: TensorStore's, `{"driver": "gcs", "bucket": …, "path": "store/"}`, or its URL form, `"gs://bucket/store/"`.
      context: a `tensorstore.Context`; adapters over the memory driver share their content if they share it.
      timeout: seconds for opening the driver.

    Raises:
      InputError: the spec has another type.
      StoreIOError: the driver cannot be opened.
    """

    def __init__(self, spec: Any, *, context: Any = None, timeout: float | int = 10.0):
        import tensorstore

        if not isinstance(spec, str | Mapping | tensorstore.KvStore.Spec):
            raise InputError(f"remote store: got spec {spec!r:.80}; expected a mapping with a driver, or a URL")
        if isinstance(spec, str) and spec.startswith("s3://"):
            _threads.start("open")
            with _typed("open"):
                spec = tensorstore.KvStore.Spec(spec).to_json()
        if isinstance(spec, Mapping) and spec.get("driver") == "s3":
            spec = {"use_conditional_write": True, **spec}
        self._range = tensorstore.KvStore.KeyRange
        opening = lambda: self._ask("open", lambda: tensorstore.KvStore.open(spec, context=context))  # noqa: E731
        self._values = call_within(timeout, opening)

    def _ask(self, what: str, start: Callable[[], Any]) -> Any:
        """Waits for a TensorStore future. Raises StoreUnreachableError, StoreIOError or `_RangeError`."""
        _threads.start(what)
        with _typed(what):
            future = start()
            try:
                return future.result(timeout=seconds_left())
            except TimeoutError:
                future.cancel()
                raise

    def read(self, path: str, start: int = 0, stop: int | None = None) -> RemoteValue | None:
        """Reads a range of a value; None if there is none. Raises StoreIOError."""
        cut = slice(0, None)
        stop = stop if stop is None else max(start, stop)
        try:
            found = self._ask("get", lambda: self._values.read(path, byte_range=slice(start, stop)))
        except _RangeError:
            found, cut = self._ask("get", lambda: self._values.read(path)), slice(start, stop)
        return RemoteValue(found.value[cut], found.stamp.generation) if found.state == "value" else None

    def write(self, path: str, data: bytes, expected: Expected = ANY) -> bytes | None:
        """Writes a value if the path has what is expected. Raises StoreIOError."""
        condition = {} if expected is ANY else {"if_equal": _NO_VALUE if expected is ABSENT else expected}
        return self._ask("put", lambda: self._values.write(path, data, **condition)).generation or None

    def delete(self, path: str, expected: bytes | Literal[Condition.ANY] = ANY) -> bool:
        """Deletes a value if it has the expected generation. Returns whether it had. Raises StoreIOError."""
        condition = {} if expected is ANY else {"if_equal": expected}
        return bool(self._ask("delete", lambda: self._values.write(path, None, **condition)).generation)

    def paths(self, prefix: str) -> list[str]:
        """Lists the paths that begin with a prefix. Raises StoreIOError."""
        # The first string after all with the prefix ends them.
        below = self._range(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)) if prefix else self._range()
        try:
            return [key.decode() for key in self._ask("list", lambda: self._values.list(below))]
        except StoreIOError as error:
            if "Cannot list non-directory" in str(error):  # of files: the prefix continues the path of a value
                return []
            raise


class KeyValueStore(RemoteStore):
    """A `RemoteStore` over any TensorStore key-value driver: `RemoteStore(TensorStoreAdapter(spec))`.

    Args:
      spec, context: those of `TensorStoreAdapter`.
      clock, patience: those of `RemoteStore`.

    Raises:
      StoreIOError: the store cannot be opened.
      InputError: the spec or the patience has another type.
    """

    def __init__(
        self,
        spec: Any,
        *,
        context: Any = None,
        clock: Callable[[], float] = time.time,
        patience: RetryPolicy | None = None,
    ):
        super().__init__(TensorStoreAdapter(spec, context=context), clock=clock, patience=patience)
