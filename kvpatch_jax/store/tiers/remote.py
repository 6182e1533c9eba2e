"""Remote stores: the same bytes under the same paths as on the disk, in a TensorStore key-value store.

An object is one value, written in one call, so that it exists whole or not at all, and read by ranges: the header, then
leaves. `tensorstore` comes with orbax and is imported when a remote store is opened.
"""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ...errors import InputError, StoreCorruptError, StoreIOError, StoreUnreachableError
from ..format.encryption import Read
from ..format.header import PAGE, Header, Leaf, header_length, parse_header
from ..format.naming import Name
from ..format.objects import Blob, blob_bytes, check_name, padded, take_leaves
from .retry_policy import CircuitBreaker, RetryPolicy

_LASTING = re.compile(
    "(NOT_FOUND|INVALID_ARGUMENT|PERMISSION_DENIED|UNAUTHENTICATED|FAILED_PRECONDITION|UNIMPLEMENTED|DATA_LOSS)\\b"
)
"""Beginnings of TensorStore's errors after which a retry is useless."""


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


class RemoteObject(NamedTuple):
    """An opened object of a remote store.

    Attributes:
      header: its verified header.
      read: reads and verifies adjacent leaves, from the service each time; raises StoreCorruptError and StoreError.
    """

    header: Header
    read: Read


@runtime_checkable
class RemoteStore(Protocol):
    """Interface of a store on other machines. Called from several threads."""

    def put(self, name: Name, blob: Blob) -> None:
        """Writes an object durably. Raises StoreError."""
        ...

    def open(self, name: Name) -> RemoteObject | None:
        """Opens an object; None if it is absent, or has expired and so was deleted.

        Raises:
          StoreCorruptError: it is damaged; it is left unchanged.
          StoreVersionError: a later version wrote it; it is left unchanged.
          StoreError: the service failed.
        """
        ...

    def delete(self, path: str) -> None:
        """Deletes an object if it exists. Raises StoreError."""
        ...

    def paths(self, prefix: str) -> list[str]:
        """Lists objects whose path begins with a prefix. Raises StoreError."""
        ...


@contextlib.contextmanager
def _typed(what: str) -> Iterator[None]:
    """Converts TensorStore's errors into the store's."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        message = f"remote store: {what}: got {str(error)[:300] or 'no answer in time'}; expected the service to do it"
        if str(error).startswith("OUT_OF_RANGE"):
            raise StoreCorruptError(f"object: got an early end ({str(error)[:100]}); expected all of it") from error
        lasting = isinstance(error, NotImplementedError) or _LASTING.match(str(error))
        raise (StoreIOError if lasting else StoreUnreachableError)(message) from error


class KeyValueStore:
    """A `RemoteStore` over any TensorStore key-value driver: `file`, `memory`, `gcs`, `s3`, …

    Acknowledged writes are as durable as the driver's. Reads are verified as those of the disk. An expired object is
    deleted when it is read, unless it was replaced in the meantime. A damaged object is not deleted, because this
    machine may be at fault: use `damaged` and `drop`. Every call ends within the limits of `patience`, and fails
    immediately while the circuit breaker is open, or in a process that was forked after the first call.

    Args:
      spec: TensorStore's, `{"driver": "gcs", "bucket": …, "path": "store/"}`, or its URL form, `"gs://bucket/store/"`.
      context: a `tensorstore.Context`; stores over the memory driver share their content if they share it.
      clock: returns seconds since the epoch.
      patience: time limits, number of tries, and settings of the circuit breaker, for all users of this object.

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
        import tensorstore

        if not isinstance(spec, str | Mapping | tensorstore.KvStore.Spec):
            raise InputError(f"remote store: got spec {spec!r:.80}; expected a mapping with a driver, or a URL")
        if patience is not None and not isinstance(patience, RetryPolicy):
            raise InputError(f"remote store: got patience {patience!r:.80}; expected a RetryPolicy, or None")
        self._clock = clock
        self._range = tensorstore.KvStore.KeyRange
        self._circuit = CircuitBreaker(RetryPolicy() if patience is None else patience)
        self._values = self._ask("open", lambda: tensorstore.KvStore.open(spec, context=context))

    def _ask(self, what: str, start: Callable[[], Any], nbytes: int = 0) -> Any:
        """Waits for the result of a TensorStore future, with retries.

        Raises:
          StoreUnreachableError, StoreIOError: the service failed.
          StoreCorruptError: a value is too short.
        """
        _threads.start(what)

        def call(seconds: float) -> Any:
            with _typed(what):
                future = start()
                try:
                    return future.result(timeout=seconds)
                except TimeoutError:
                    future.cancel()
                    raise

        return self._circuit.attempt(what, call, nbytes)

    def put(self, name: Name, blob: Blob) -> None:
        """Writes an object in one call.

        Raises:
          StoreIOError: it is not acknowledged. It may have been written nevertheless.
        """
        data = blob_bytes(blob, name.file)
        self._ask("put", lambda: self._values.write(name.path, data), len(data))

    def open(self, name: Name) -> RemoteObject | None:
        """Opens an object; None if it is absent or expired. Raises as `RemoteStore.open`."""
        opening = self._ask("get", lambda: self._values.read(name.path, byte_range=slice(0, PAGE)))
        if opening.state != "value":
            return None

        # The rest is read of the same version, because another writer may replace the object in between.
        version, raw = opening.stamp.generation, opening.value
        raw += self._range_of(name.path, version, PAGE, header_length(raw, None))
        header = parse_header(raw, None)
        check_name(header, name.file)
        if header.expires is None or self._clock() < header.expires:
            return RemoteObject(header, functools.partial(self._leaves, name.path, version, header))
        with contextlib.suppress(StoreIOError):  # the next reader tries again
            self.drop(name.path, version)
        return None

    def damaged(self, name: Name) -> bytes | None:
        """Reads an object whole, and a second time if it does not verify.

        Returns:
          The version that is damaged, for `drop`; None if the object is correct, absent, or changed in the meantime.

        Raises:
          StoreVersionError: a later version wrote it.
          StoreIOError: the service failed.
        """
        found: list[bytes] = []
        for _ in range(2):
            whole = self._ask("get", lambda: self._values.read(name.path))
            if whole.state != "value":
                return None
            try:
                raw = np.frombuffer(whole.value, np.uint8)
                length = header_length(whole.value, len(raw))
                header = parse_header(whole.value[:length], len(raw))
                check_name(header, name.file)
                take_leaves(raw.copy(), 0, header.leaves.values())
                return None
            except StoreCorruptError:
                found.append(whole.stamp.generation)
        return found[0] if found[0] == found[1] else None

    def _range_of(self, path: str, version: bytes, begin: int, end: int) -> bytes:
        """Reads some bytes of a value. Raises StoreIOError if it is not the opened version."""
        if begin == end:
            return b""
        read = self._ask("get", lambda: self._values.read(path, byte_range=slice(begin, end)), end - begin)
        if read.state != "value" or read.stamp.generation != version:
            raise StoreIOError("remote store: get: got another version of the object; expected the opened one")
        return read.value

    def _leaves(self, path: str, version: bytes, header: Header, names: Sequence[str]) -> dict[str, np.ndarray]:
        leaves: list[Leaf] = [header.leaves[name] for name in names]
        if not leaves:
            return {}
        begin, end = leaves[0].offset, leaves[-1].offset + padded(leaves[-1].nbytes)
        data = np.frombuffer(self._range_of(path, version, begin, end), np.uint8)
        payload = np.empty(len(data), np.uint8)  # an aligned copy, so that the service's buffer is freed
        payload[:] = data
        return take_leaves(payload, begin, leaves)

    def drop(self, path: str, version: bytes) -> None:
        """Deletes one version of an object, unless it was replaced. Raises StoreIOError."""
        self._ask("delete", lambda: self._values.write(path, None, if_equal=version))

    def delete(self, path: str) -> None:
        """Deletes an object if it exists. Raises StoreIOError."""
        self._ask("delete", lambda: self._values.write(path, None))

    def paths(self, prefix: str) -> list[str]:
        """Lists objects whose path begins with a prefix. Raises StoreIOError."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)  # the first string after all with the prefix
        listed = self._ask("list", lambda: self._values.list(self._range(prefix, end)))
        return sorted(key.decode() for key in listed)
