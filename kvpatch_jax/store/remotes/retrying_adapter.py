"""An adapter with time limits and retries, whose conditional writes survive a lost answer."""

from collections.abc import Callable
from typing import Literal

from ...errors import StoreIOError, StoreUnreachableError
from .adapter import ANY, Condition, Expected, RemoteAdapter, RemoteValue
from .retry_policy import RetryPolicy
from .time_limit import call_within


class RetryingAdapter:
    """Adapter that calls another one within the limits of a policy; itself a `RemoteAdapter`.

    Calls run in threads of their own, so that one that blocks ends for its caller (not for the service: it may still
    take place). Errors of the operating system that the adapter lets through become the store's.

    Args:
      adapter: the adapter to be called.
      patience: limits and tries.
    """

    def __init__(self, adapter: RemoteAdapter, patience: RetryPolicy):
        self._adapter, self._patience = adapter, patience

    def _ask[T](self, what: str, call: Callable[[], T], nbytes: int = 0) -> tuple[T, bool]:
        """Calls with retries. Also returns whether the answer of an earlier try was lost."""
        lost = False

        def limited(seconds: float) -> T:
            nonlocal lost
            try:
                return call_within(seconds, call)
            except StoreUnreachableError as error:
                lost |= error.asked
                raise
            except (ConnectionError, TimeoutError) as error:
                lost, found = True, str(error)[:200] or "no answer in time"
                raise StoreUnreachableError(f"remote store: {what}: got {found}; expected an answer") from error
            except OSError as error:
                raise StoreIOError(
                    f"remote store: {what}: got {error!r:.200}; expected the service to do it"
                ) from error

        return self._patience.attempt(limited, nbytes), lost

    def read(self, path: str, start: int = 0, stop: int | None = None) -> RemoteValue | None:
        """Reads a range of a value. Without `stop`, the time limit counts no bytes. Raises StoreIOError."""
        nbytes = 0 if stop is None else max(stop - start, 0)
        return self._ask("get", lambda: self._adapter.read(path, start, stop), nbytes)[0]

    def write(self, path: str, data: bytes, expected: Expected = ANY) -> bytes | None:
        """Writes a value if the path has what is expected. If an answer was lost, finds out what took place.

        Two writers of equal bytes may then both learn that they wrote: what has to be told apart contains a token.

        Raises:
          StoreIOError: it is not acknowledged. It may have been written nevertheless.
        """
        generation, lost = self._ask("put", lambda: self._adapter.write(path, data, expected), len(data))
        if generation is None and lost:
            current = self.read(path, 0, len(data) + 1)
            return None if current is None or current.data != data else current.generation
        return generation

    def delete(self, path: str, expected: bytes | Literal[Condition.ANY] = ANY) -> bool:
        """Deletes a value if it has the expected generation. Returns whether it had. Raises StoreIOError."""
        deleted, lost = self._ask("delete", lambda: self._adapter.delete(path, expected))
        return deleted or (lost and self.read(path, 0, 0) is None)

    def paths(self, prefix: str) -> list[str]:
        """Lists the paths that begin with a prefix, sorted. Raises StoreIOError."""
        return self._ask("list", lambda: sorted(self._adapter.paths(prefix)))[0]
