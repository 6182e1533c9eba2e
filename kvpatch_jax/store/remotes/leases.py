"""Leases: a name that one process of a fleet holds for a while, such as the one that forms a chunk."""

import contextlib
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ...errors import InputError, StoreError
from ..format.expiry import seconds as to_seconds
from .adapter import ABSENT, RemoteAdapter

FOLDER = "leases/"
SKEW = 5.0
"""Seconds by which the clocks of two machines may differ."""


class LeaseRecord(NamedTuple):
    """Content of a lease: a token of its owner, and when it ends, in seconds since the epoch by the owner's clock."""

    owner: str
    deadline: float

    @classmethod
    def parse(cls, data: bytes) -> "LeaseRecord | None":
        """Parses a lease; None if it is none."""
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            value = json.loads(data)
            return cls(str(value["owner"]), float(value["deadline"]))
        return None

    def text(self) -> bytes:
        """Returns the lease as JSON."""
        return json.dumps(self._asdict()).encode()


class Lease:
    """A lease that was taken; as a context manager it is released at the end.

    At any time at most one lease of a name is held, on these assumptions: the machines' clocks differ by less than
    `SKEW` seconds, which a later taker waits in addition; and the holder asks `held` before each step that counts. A
    holder that is stopped between the question and the step is not prevented from the step: where that matters, write
    conditionally, as `RemoteStore.put` does.
    """

    def __init__(
        self, remote: RemoteAdapter, clock: Callable[[], float], path: str, owner: str, generation: bytes, until: float
    ):
        self._remote, self._clock, self._path, self._owner = remote, clock, path, owner
        self._generation, self._until, self._lock = generation, until, threading.Lock()

    @property
    def held(self) -> bool:
        """Whether the lease is neither over by this machine's monotonic clock, nor released, nor known to be lost."""
        return time.monotonic() < self._until

    def renew(self, seconds: float | int) -> bool:
        """Extends the lease to some seconds from now. Returns whether it is held; False also if it was over before.

        Raises:
          StoreError: the service failed. The lease goes on as it was.
        """
        with self._lock:
            if not self.held:
                return False
            until, record = time.monotonic() + seconds, LeaseRecord(self._owner, self._clock() + seconds)
            generation = self._remote.write(self._path, record.text(), self._generation)
            if generation is None:
                self._until = 0.0
                return False
            self._generation, self._until = generation, until
            return True

    def release(self) -> bool:
        """Gives the lease up, for another to take at once. Returns whether it was its own. Raises StoreError."""
        with self._lock:
            self._until = 0.0
            return self._remote.delete(self._path, self._generation)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(StoreError):  # it ends by itself
            self.release()


def is_over(data: bytes, now: float) -> bool:
    """Returns whether the lease in a value is over, or is none."""
    record = LeaseRecord.parse(data)
    return record is None or now > record.deadline + SKEW


def take_lease(remote: RemoteAdapter, clock: Callable[[], float], name: str, seconds: float | int) -> Lease | None:
    """Takes a lease, also one whose holder let it end without releasing it; None: another holds it.

    Raises:
      InputError: the seconds are not a finite number above 0.
      StoreError: the service failed.
    """
    expected = "finite seconds above 0"
    if to_seconds(seconds, "lease: seconds", expected) <= 0:
        raise InputError(f"lease: seconds: got {seconds}; expected {expected}")
    path = f"{FOLDER}{hashlib.blake2b(name.encode(), digest_size=20).hexdigest()}"
    until, record = time.monotonic() + seconds, LeaseRecord(secrets.token_hex(16), clock() + seconds)
    generation = remote.write(path, record.text(), ABSENT)
    if generation is None:
        found = remote.read(path)
        if found is None:
            generation = remote.write(path, record.text(), ABSENT)  # released in between
        elif is_over(found.data, clock()):
            generation = remote.write(path, record.text(), found.generation)
    return None if generation is None else Lease(remote, clock, path, record.owner, generation, until)
