"""Stores of an engine's tenants, which both sides of the connector in a process share.

Both sides read and write the same chunks, so they have one `ChunkStore` per tenant, one host tier for all tenants, one
connection to the remote store and one memory of survivors. The last side that closes ends them.
"""

import collections
import functools
import logging
import os
import secrets
import stat
import threading
import time
from typing import Any

import numpy as np

from ...cache import Chunk
from ...errors import (
    ConfigError,
    InputError,
    KVPatchError,
    MissingExtraError,
    StoreError,
    WeightsError,
)
from ...store import ChunkStore, PatchKey, open_remote
from ...store.memory import memory_of
from ...store.remote import Remote
from ...utils.background import start_thread
from ...utils.optional_packages import require
from ...window import StoredPrefills
from .config import PATIENCE, ConnectorConfig, StoreOptions
from .plan import Survivor, SurvivorKey

logger = logging.getLogger(__name__)

MAX_TENANTS = 64
"""Number of stores that are kept open; beyond it, the least recently used one is closed."""
MIN_KEY_BYTES = 32
MAX_KEY_FILE = 1 << 16
REMOTE_SECONDS = 1.0
"""A remote store is asked while a request waits, and a prefill is the alternative: less patience than a store's own."""
WEIGHTS_RECORD = "weights of the engines that this name is for"
"""Id of the encoder output that records a digest of weights next to the chunks."""


class Stores:
    """The stores of an engine's tenants as one side of the connector uses them. Safe for any number of threads.

    Args:
      config: names the root, the backbone, budgets, key and remote store.
      weights: digest of the engine's weights; a store with chunks of other weights is refused. None: not checked.

    Raises:
      ConfigError: the key cannot be read, or the remote store cannot be opened; the error names the setting.
    """

    def __init__(self, config: ConnectorConfig, weights: str | None = None):
        self.config, self.weights = config, weights
        self._shared, self._closed = _acquire(config), False
        self._prefills: collections.OrderedDict[tuple[str, str], StoredPrefills] = collections.OrderedDict()
        self._lock = threading.Lock()

    @property
    def backbone(self) -> str:
        """The name under which chunks are stored and looked up: the config's, until the engine's cache is reset."""
        return self._shared.backbone

    @property
    def survivors(self) -> "Survivors":
        """What requests of all tenants have left for the next ones of their agents."""
        return self._shared.survivors

    @property
    def host_bytes(self) -> int:
        """Bytes of stored chunks in host memory, of all tenants together."""
        return self._shared.memory.nbytes

    @property
    def tenants(self) -> int:
        """Number of tenants whose stores are open."""
        return len(self._shared.open)

    def of(self, tenant: str) -> ChunkStore:
        """Returns a tenant's store, whose chunks under the backbone's name are of the engine's weights.

        Raises:
          WeightsError: they are of other weights.
          StoreError: after `close`.
          StoreError, InputError: as `ChunkStore`.
        """
        if self._closed:
            raise _closed_error(self.config)
        store = self._shared.of(tenant)
        # Checked on each use: the record may be evicted, or deleted with its tenant, and then has to be written again.
        if self.weights is not None:
            expect_weights(store, self.backbone, self.weights)
        return store

    def has_canonical(self, tenant: str, id: str) -> bool:
        """Returns whether a canonical is stored or queued, without reading it."""
        return self.of(tenant).contains(id, self.backbone)

    def canonical(self, tenant: str, id: str) -> Chunk | None:
        """Reads a canonical; None if there is none."""
        return self.of(tenant).get(id, self.backbone)

    def has_patch(self, tenant: str, id: str, antecedent: tuple[str, ...]) -> bool:
        """Returns whether a canonical has a patch that was formed behind exactly this antecedent."""
        patches = self.of(tenant).get_patches(PatchKey(chunk=id, backbone=self.backbone, antecedent=antecedent))
        return any(patch.metadata.chunk.encoding is None for patch in patches)

    def prefills(self, tenant: str, dtype: Any) -> StoredPrefills:
        """Returns a tenant's stored prefills of a pool of this dtype.

        One object serves request after request, because it remembers for a while what a remote store lists.
        """
        store, backbone, key = self.of(tenant), self.backbone, (tenant, np.dtype(dtype).name)
        with self._lock:
            known = self._prefills.get(key)
            if known is None or known.store is not store or known.backbone != backbone:
                known = self._prefills[key] = StoredPrefills(store, backbone, dtype)
            self._prefills.move_to_end(key)
            if len(self._prefills) > MAX_TENANTS:
                self._prefills.popitem(last=False)
        return known

    def reset(self) -> None:
        """Forgets everything that was stored so far: from now on it counts as not stored for this process.

        Nothing is deleted, because other engines use the same store. Names of chunks contain the backbone's, so another
        one for the rest of the process's life separates what is stored from now on.
        """
        self._shared.backbone = f"{self.config.backbone} after reset {secrets.token_hex(8)}"
        self._shared.memory.clear()
        self._shared.survivors.clear()

    def close(self, patience: float = PATIENCE) -> bool:
        """Ends this side's use of the stores, and closes them if it was the last. Idempotent.

        Args:
          patience: seconds to wait at most for pending writes.

        Returns:
          Whether every store that had to be closed was closed in time. The others are left to end by themselves.
        """
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        return _release(self._shared, patience)


class Survivors:
    """KV that requests left behind, for the next request of the same agent: chunks that stay in its window only rotate.

    Kept in memory within a budget of bytes; the least recently used ones go first. Thread-safe.

    Attributes:
      nbytes: bytes that are in use.
    """

    def __init__(self, budget: int):
        self.budget, self.nbytes = budget, 0
        self._survivors: collections.OrderedDict[SurvivorKey, Survivor] = collections.OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: SurvivorKey, survivor: Survivor) -> None:
        """Keeps a survivor in place of an earlier version, if there is room for it at all."""
        with self._lock:
            self._drop(key)
            if survivor.chunk.nbytes > self.budget:
                return
            self._survivors[key] = survivor
            self.nbytes += survivor.chunk.nbytes
            while self.nbytes > self.budget:
                self._drop(next(iter(self._survivors)))

    def get(self, key: SurvivorKey) -> Survivor | None:
        """Returns a survivor, which counts as used; None if there is none."""
        with self._lock:
            survivor = self._survivors.get(key)
            if survivor is not None:
                self._survivors.move_to_end(key)
            return survivor

    def clear(self) -> None:
        """Drops all survivors."""
        with self._lock:
            self._survivors.clear()
            self.nbytes = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._survivors)

    def _drop(self, key: SurvivorKey) -> None:
        survivor = self._survivors.pop(key, None)
        if survivor is not None:
            self.nbytes -= survivor.chunk.nbytes


# ----------------------------------------------------------------------------------------------- shared in a process


class _SharedStores:
    """Open stores of one configuration, opened when they are first needed."""

    def __init__(self, config: ConnectorConfig):
        self.config, self.backbone, self.users = config, config.backbone, 0
        self.survivors = Survivors(config.survivors)
        self.memory = memory_of(os.path.realpath(os.path.expanduser(config.store.root)), config.store.memory)
        self.open: collections.OrderedDict[str, ChunkStore] = collections.OrderedDict()
        self._key, self._secret = read_key(config.store, "key"), read_key(config.store, "secret")
        self._remote = remote_of(config.store)
        self._lock, self._closed = threading.Lock(), False

    def of(self, tenant: str) -> ChunkStore:
        """Returns a tenant's store."""
        with self._lock:
            self._expect_open()
            store = self.open.get(tenant)

        # Opened without the lock, so a store that hangs blocks no other tenant. Of two opened at once, one is kept.
        opened = self._opened(tenant) if store is None else store
        with self._lock:
            self._expect_open()
            store = self.open.setdefault(tenant, opened)
            self.open.move_to_end(tenant)
            unused = [] if store is opened else [opened]
            if len(self.open) > MAX_TENANTS:
                unused.append(self.open.popitem(last=False)[1])
        # Any client may name a tenant, and a store has files open. Where another thread reads one nevertheless, its
        # request is served without stored chunks.
        for other in unused:
            start_thread(functools.partial(_close, other), lambda _: None, "kvpatch-close-store", 1.0)
        return store

    def _opened(self, tenant: str) -> ChunkStore:
        options = self.config.store
        limits: dict[str, Any] = {"root_budget": options.root_budget, "memory": options.memory, "ttl": options.ttl}
        return ChunkStore(
            options.root, tenant=tenant, key=self._key, secret=self._secret, remote=self._remote, **limits
        )

    def _expect_open(self) -> None:
        if self._closed:
            raise _closed_error(self.config)

    def close(self, patience: float) -> bool:
        """Closes every store, and opens no more. Returns whether every one was closed in time."""
        with self._lock:
            self._closed = True
            stores = list(self.open.values())
            self.open.clear()

        # One thread each: a store that hangs must neither keep the others open nor the process from ending.
        deadline = time.monotonic() + patience
        threads = [threading.Thread(target=_close, args=(store,), daemon=True) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


_shared: dict[ConnectorConfig, _SharedStores] = {}
_lock = threading.Lock()


def _acquire(config: ConnectorConfig) -> _SharedStores:
    with _lock:
        stores = _shared.get(config)
        if stores is None:
            stores = _shared[config] = _SharedStores(config)
        stores.users += 1
        return stores


def _release(stores: _SharedStores, patience: float) -> bool:
    with _lock:
        stores.users -= 1
        is_last = stores.users == 0
        if is_last and _shared.get(stores.config) is stores:
            del _shared[stores.config]
    # Closing may wait, so the lock is released first.
    return stores.close(patience) if is_last else True


def _close(store: ChunkStore) -> None:
    try:
        store.close()
    except (KVPatchError, OSError) as error:
        logger.warning("kvpatch: a store was not closed: %s", error)


def _closed_error(config: ConnectorConfig) -> StoreError:
    return StoreError(f"stores of {config.store.root}: got a call after close; expected open stores")


# ------------------------------------------------------------------------------------------------- weights of a name


def expect_weights(store: ChunkStore, backbone: str, digest: str) -> None:
    """Raises if a tenant's chunks under a backbone's name are of other weights. Records the digest if there is none.

    Of several engines that record a digest at once, one succeeds. A store that cannot be written is not checked.

    Raises:
      WeightsError: the store records other weights. As `ChunkStore.get_encoder` and `amend_encoder`.
    """
    record = store.get_encoder(WEIGHTS_RECORD, backbone)
    if record is None:
        engines = np.frombuffer(bytes.fromhex(digest), np.uint8)
        try:
            # Kept if there is one meanwhile: with `put_encoder` the last engine would win, unnoticed by the others.
            store.amend_encoder(WEIGHTS_RECORD, backbone, lambda records: records[0] if records else engines)
        except StoreError:
            return
        record = store.get_encoder(WEIGHTS_RECORD, backbone)

    if record is not None and record.tobytes().hex() != digest:
        raise WeightsError(
            f"store, backbone {backbone!r:.80}: got chunks of weights {record.tobytes().hex()[:12]}…; expected the "
            f"engine's, {digest[:12]}…: give each checkpoint a name of its own"
        )


# ---------------------------------------------------------------------------------------------------- key and remote


def read_key(options: StoreOptions, setting: str) -> bytes | None:
    """Reads the key, or the secret of names, that the setting "key" or "secret" names; None if it names none.

    Raises:
      ConfigError: it cannot be read, is too short, or others than the file's owner may read it. No message holds any
        part of it.
    """
    place = getattr(options, setting)
    if place is None:
        return None
    kind, _, name = place.partition(":")
    try:
        key = _variable(name).encode() if kind == "env" else _private_file(name)
        if setting == "key":
            require("cryptography", "cryptography", "encryption")
    except (InputError, MissingExtraError) as error:
        raise ConfigError(f"connector.store.{setting}: {error}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"connector.store.{setting}: got {len(key)} bytes in {place!r}; expected {MIN_KEY_BYTES} or more"
        )
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


def remote_of(options: StoreOptions) -> Remote | None:
    """Opens the remote store that the settings name; None if they name none.

    A service that does not answer later is a slow miss; one that cannot be opened at the start is refused, because it
    would never be used.

    Raises:
      ConfigError: the URL is invalid, its client is not installed, or the service cannot be opened. If the URL is in an
        environment variable, no message holds it.
    """
    if options.remote is None:
        return None
    url, is_named = options.remote, options.remote.startswith("env:")
    if is_named:
        try:
            url = _variable(url.removeprefix("env:"))
        except InputError as error:
            raise ConfigError(f"connector.store.remote: {error}") from None

    try:
        return open_remote(url, timeout=REMOTE_SECONDS)
    except (InputError, MissingExtraError, StoreError, ImportError, OSError) as error:
        why = type(error).__name__ if is_named else str(error)
        raise ConfigError(
            f"connector.store.remote: got {options.remote!r:.200}, {why}; expected a URL that can be opened"
        ) from (None if is_named else error)
