"""The open stores of one configuration, which the connector's two sides in a process share, and what they hold.

Both sides read and write the same chunks, so they have one `ChunkStore` per tenant, one host tier for all tenants and
one connection to the remote store. The last side that closes ends them.
"""

import collections
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Mapping
from typing import Literal

from ...errors import ConfigError, InputError, KVPatchError, MissingExtraError, StoreClosedError, StoreIOError
from ...store import ChunkStore, open_remote
from ...store.memory import memory_of
from ...store.remote import Remote
from ...utils.background import JobQueue, start_thread
from ...utils.optional_packages import require
from .settings import ConnectorConfig
from .survivors import Survivors

logger = logging.getLogger(__name__)

MAX_TENANTS = 64
"""Number of stores that are kept open; beyond it, the least recently used one is left to its last user."""
MIN_KEY_BYTES = 32
REMOTE_SECONDS = 1.0
"""A remote store is asked while a request waits, and a prefill is the alternative: less patience than a store's own."""
SAMPLE_SECONDS = 10.0
"""Least time between two looks at what is on the disk."""
MAX_KEY_FILE = 1 << 16


class SharedStores:
    """Stores of one configuration in one process, opened when they are first needed. Safe for any number of threads.

    Args:
      config: names the root, budgets, key and remote store.

    Attributes:
      memory: decoded objects of all tenants.
      survivors: what requests of all tenants leave for the next ones of their agents.
      backbone: the name under which chunks are stored and looked up; another one after each `reset`.
      users: number of sides that use the stores.

    Raises:
      ConfigError: the key cannot be read, or the remote store cannot be opened; the error names the setting.
    """

    def __init__(self, config: ConnectorConfig):
        self.config, self.backbone, self.users = config, config.backbone, 0
        self.survivors = Survivors(config.survivor_bytes)
        self.memory = memory_of(os.path.realpath(os.path.expanduser(config.store)), config.host)
        self._key, self._secret = read_key(config, "key"), read_key(config, "secret")
        self._remote = remote_of(config)
        self._open: collections.OrderedDict[str, ChunkStore] = collections.OrderedDict()
        self._lock, self._closed = threading.Lock(), False
        self._sampler: JobQueue[None] = JobQueue(self._sample, 1, "kvpatch-sampler", patience=1.0)
        self._next_sample, self._sampled = 0.0, dict[str, int]()

    def of(self, tenant: str) -> ChunkStore:
        """Returns a tenant's store.

        Raises:
          StoreClosedError: after `close`.
          StoreError, InputError: as `ChunkStore`.
        """
        with self._lock:
            self._expect_open()
            store = self._open.get(tenant)

        # Opened without the lock, so a store that hangs blocks no other tenant. Of two opened at once, one is kept.
        opened = self._opened(tenant) if store is None else store
        with self._lock:
            self._expect_open()
            store = self._open.setdefault(tenant, opened)
            self._open.move_to_end(tenant)
            if len(self._open) > MAX_TENANTS:
                self._open.popitem(last=False)  # not closed: another thread may be reading it, and nothing is queued
        return store

    def _opened(self, tenant: str) -> ChunkStore:
        config = self.config
        return ChunkStore(
            config.store,
            tenant=tenant,
            budget=config.disk,
            memory=config.host,
            ttl=config.ttl,
            key=self._key,
            secret=self._secret,
            remote=self._remote,
        )

    def _expect_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"stores of {self.config.store}: got a call after close; expected open stores")

    def reset(self) -> None:
        """Forgets everything that was stored so far: from now on it counts as not stored for this process.

        Nothing is deleted, because other engines use the same store. Names of chunks contain the backbone's, so another
        one for the rest of the process's life separates what is stored from now on.
        """
        self.backbone = f"{self.config.backbone} after reset {secrets.token_hex(8)}"
        self.memory.clear()
        self.survivors.clear()

    # ------------------------------------------------------------------------------------------------- closing

    def close(self, patience: float) -> bool:
        """Closes every store, and opens no more.

        Args:
          patience: seconds to wait at most for pending writes.

        Returns:
          Whether every store was closed in time. The others are left to end by themselves.
        """
        with self._lock:
            self._closed = True
            stores = list(self._open.values())
            self._open.clear()

        # One thread each: a store that hangs must neither keep the others open nor the process from ending.
        deadline = time.monotonic() + patience
        threads = [threading.Thread(target=_close, args=(store,), daemon=True) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._sampler.close(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # ------------------------------------------------------------------------------------------------ what is held

    def held_bytes(self) -> Mapping[str, int]:
        """Returns bytes by tier, without waiting: "host"; and of the last look "disk" and "outbox", if there was one.

        The disk's are the whole root's; "outbox" is what the remote store does not have yet, of the open stores. A look
        begins at most every `SAMPLE_SECONDS`, on a thread of its own, because a file system may hang.
        """
        now = time.monotonic()
        if now >= self._next_sample and not self._closed:
            self._next_sample = now + SAMPLE_SECONDS
            self._sampler.add(None)  # refused while the last look has not ended
        return {"host": self.memory.nbytes, **self._sampled}

    @property
    def tenants(self) -> int:
        """Number of open stores."""
        return len(self._open)

    def _sample(self, job: None) -> None:
        with self._lock:
            stores = list(self._open.values())
        if not stores:
            return
        try:
            gauges = [store.statistics().gauges for store in stores]
            sampled = {"disk": int(gauges[-1]["root_bytes"])}
            if self._remote is not None:
                sampled["outbox"] = int(sum(gauge["outbox_bytes"] for gauge in gauges))
            self._sampled = sampled
        except Exception as error:  # the next look tries again, whatever failed
            logger.debug("kvpatch: the store's size is unknown: %s", error)


def _close(store: ChunkStore) -> None:
    try:
        store.close()
    except (KVPatchError, OSError) as error:
        logger.warning("kvpatch: a store was not closed: %s", error)


# ---------------------------------------------------------------------------------------------------- one per process

_shared: dict[ConnectorConfig, SharedStores] = {}
_lock = threading.Lock()


def acquire_stores(config: ConnectorConfig) -> SharedStores:
    """Returns the stores of a configuration in this process, opened for their first user. Raises as `SharedStores`."""
    with _lock:
        stores = _shared.get(config)
        if stores is None:
            stores = _shared[config] = SharedStores(config)
        stores.users += 1
        return stores


def release_stores(stores: SharedStores, patience: float) -> bool:
    """Unregisters a user. Closes the stores when none is left.

    Args:
      patience: seconds to wait at most for pending writes.

    Returns:
      Whether nothing was left open that should be closed.
    """
    with _lock:
        stores.users -= 1
        last = stores.users == 0
        if last and _shared.get(stores.config) is stores:
            del _shared[stores.config]
    # Closing may wait, so the lock is released first.
    return stores.close(patience) if last else True


# ---------------------------------------------------------------------------------------------------- key and remote


def read_key(config: ConnectorConfig, setting: Literal["key", "secret"] = "key") -> bytes | None:
    """Reads the key, or the secret of names, that the settings name; None if they name none.

    Raises:
      ConfigError: it cannot be read, is too short, or others than the file's owner may read it. No message holds any
        part of it.
    """
    where = config.key if setting == "key" else config.secret
    if where is None:
        return None
    kind, _, name = where.partition(":")
    try:
        key = _variable(name).encode() if kind == "env" else _private_file(name)
        if setting == "key":
            require("cryptography", "cryptography", "encryption")
    except (InputError, MissingExtraError) as error:
        raise ConfigError(f"connector.{setting}: {error}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"connector.{setting}: got {len(key)} bytes in {where!r}; expected {MIN_KEY_BYTES} or more")
    return key


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise InputError(f"got no environment variable {name}; expected one that is set")
    return value


def _private_file(path: str) -> bytes:
    try:
        # Not to be stopped by a pipe that nobody writes to.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise InputError(f"got {path!r:.200}, no regular file; expected a file with the key")
            if mode & 0o077:
                raise InputError(f"got mode {mode & 0o777:03o} of {path!r:.200}; expected 600 or 400")
            key = file.read(MAX_KEY_FILE + 1)
    except OSError as error:
        raise InputError(f"got {error.strerror} for {path!r:.200}; expected a file that can be read") from error
    if len(key) > MAX_KEY_FILE:
        raise InputError(f"got more than {MAX_KEY_FILE} bytes in {path!r:.200}; expected a file with the key")
    return key


def remote_of(config: ConnectorConfig) -> Remote | None:
    """Opens the remote store that the settings name; None if they name none.

    A service that does not answer later is a slow miss; one that cannot be opened at the start is refused, because it
    would never be used.

    Raises:
      ConfigError: the URL is invalid, its client is not installed, or the service cannot be opened within the config's
        patience. If the URL is in an environment variable, no message holds it.
    """
    if config.remote is None:
        return None
    url, is_named = config.remote, config.remote.startswith("env:")
    if is_named:
        try:
            url = _variable(config.remote.removeprefix("env:"))
        except InputError as error:
            raise ConfigError(f"connector.remote: {error}") from None

    opened: list[Remote | Exception] = []
    done = threading.Event()

    def work() -> None:
        try:
            opened.append(open_remote(url, timeout=REMOTE_SECONDS))
        except Exception as error:
            opened.append(error)
        done.set()

    start_thread(work, lambda _: None, "kvpatch-open-remote", 0.0)
    if not done.wait(config.patience):
        raise ConfigError(
            f"connector.remote: got no answer from {config.remote!r:.200} within {config.patience:g} s; expected a "
            "service that can be opened"
        )
    (result,) = opened
    if isinstance(result, InputError | MissingExtraError | StoreIOError | ImportError | OSError):
        why = type(result).__name__ if is_named else str(result)
        raise ConfigError(f"connector.remote: got {config.remote!r:.200}, {why}; expected a URL that can be opened")
    if isinstance(result, Exception):
        raise result
    return result
