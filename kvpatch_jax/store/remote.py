"""Objects in a TensorStore key-value store: the same bytes under the same paths, on another machine or service.

One object is one value, written in one piece, so that it is there whole or not at all. `tensorstore` comes with orbax
and is imported when a remote store is opened.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import StoreCorruptError, StoreIOError
from .disk import Found
from .header import PAGE, header_length, parse_header
from .ids import Name
from .objects import Blob, blob_bytes, check_name, take_leaves


@runtime_checkable
class Remote(Protocol):
    """Where objects also live, beyond this machine."""

    def put(self, name: Name, blob: Blob) -> None:
        """Durable when it returns; raises StoreError."""
        ...

    def get(self, name: Name) -> Found | None:
        """Verified, or None."""
        ...

    def delete(self, path: str) -> None:
        """Takes an object away, if it is there; raises StoreError."""
        ...

    def paths(self, prefix: str) -> list[str]:
        """Objects whose path begins so."""
        ...


@contextlib.contextmanager
def _typed(what: str) -> Iterator[None]:
    """Turns what TensorStore raises into the store's error."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, NotImplementedError, TimeoutError) as error:
        message = f"remote store: {what}: {str(error)[:300]}; expected the service to do it"
        raise StoreIOError(message) from error


class KeyValueStore:
    """A `Remote` over any TensorStore key-value driver: `file`, `memory`, `gcs`, `s3`, …

    What it acknowledges is as durable as the driver makes it. Reads are verified as those of the disk; a damaged object
    is deleted, since there is no renaming, and is a miss, as is one that cannot be read just now.

    Args:
      spec: TensorStore's, `{"driver": "gcs", "bucket": …, "path": "store/"}`, or its URL form, `"gs://bucket/store/"`.
      context: a `tensorstore.Context`; stores over the memory driver share what they share it with.

    Raises:
      StoreIOError: it cannot be opened.
    """

    def __init__(self, spec: Any, *, context: Any = None, clock: Callable[[], float] = time.time):
        import tensorstore

        self._clock = clock
        self._range = tensorstore.KvStore.KeyRange
        with _typed("open"):
            self._values = tensorstore.KvStore.open(spec, context=context).result()

    def put(self, name: Name, blob: Blob) -> None:
        """Writes an object in one piece.

        Raises:
          StoreIOError: it is not acknowledged.
        """
        with _typed("put"):
            self._values.write(name.path, blob_bytes(blob, name.file)).result()

    def get(self, name: Name) -> Found | None:
        """An object, verified; None where it is absent, expired, damaged, or cannot be read now."""
        try:
            with _typed("get"):
                read = self._values.read(name.path).result()
        except StoreIOError:
            return None
        if read.state != "value":
            return None
        try:
            found = _parsed(np.frombuffer(read.value, np.uint8), name)
        except StoreCorruptError:
            with contextlib.suppress(StoreIOError), _typed("delete"):  # only if it is still the damaged one
                self._values.write(name.path, None, if_equal=read.stamp.generation).result()
            return None
        expires = found.header.expires
        return None if expires is not None and self._clock() >= expires else found

    def delete(self, path: str) -> None:
        """Deletes an object, if it is there. Raises StoreIOError."""
        with _typed("delete"):
            self._values.write(path, None).result()

    def paths(self, prefix: str) -> list[str]:
        """Objects whose path begins so. Raises StoreIOError."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        with _typed("list"):
            return sorted(key.decode() for key in self._values.list(self._range(prefix, end)).result())


def _parsed(data: np.ndarray, name: Name) -> Found:
    length = header_length(data[:PAGE].tobytes(), len(data))
    header = parse_header(data[:length].tobytes(), len(data))
    check_name(header, name.file)
    payload = np.empty(len(data) - length, np.uint8)  # aligned, and its own: the service's buffer is let go
    payload[:] = data[length:]
    return Found(header, take_leaves(payload, length, header.leaves.values()))
