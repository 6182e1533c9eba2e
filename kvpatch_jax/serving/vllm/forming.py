"""Chunks and patches formed of what an engine's prefills left, on a thread of their own."""

import collections
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ...cache import Chunk
from ...core import EngineKV, KVLayout, to_phase_free
from ...errors import InputError
from ...patching import form_patch
from ...utils.background import start_thread
from .layouts import CacheFormat
from .segments import PromptSegment
from .settings import ConnectorConfig
from .stores import Stores

logger = logging.getLogger(__name__)


class FormingTask(NamedTuple):
    """One chunk that is to be formed of what an exact prefill left.

    Attributes:
      segment: which. front: ids of the chunks in front of it; without any it becomes a canonical, else a patch.
      positions: of its tokens.
    """

    tenant: str
    segment: PromptSegment
    front: tuple[str, ...]
    positions: Int[np.ndarray, "*positions"]


ChunkKV = Mapping[str, Float[jax.Array, "L T _ _"]]
"""{channel: [L, T, K, H]} of one chunk in the engine frame, in arrays that nobody else gives away."""


MOST_APART = 0.1
"""Of the norm, in the lowest layer: rounding leaves below a hundredth; keys that are turned otherwise, about 1."""


def check_lowest_layer(canonical: Chunk, conditioned: Mapping[str, Float[jax.Array, "L T _ _"]]) -> None:
    """Refuses KV behind other chunks that in the lowest layer, which they do not reach, is not the canonical's.

    So a rope, an order of layers or an image that is not what it is taken for is found before it is in a patch.

    Raises:
      InputError: it is further from it than rounding.
    """
    for name, own in conditioned.items():
        found, expected = (np.asarray(value[0], np.float32) for value in (own, canonical.kv[name][:, : own.shape[1]]))
        apart = float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))
        if not apart <= MOST_APART:
            raise InputError(
                f"chunk {canonical.id[:12]}…: {name!r} in the lowest layer is {apart:.2g} of its norm from the "
                f"canonical; expected at most {MOST_APART}, for nothing in front reaches it"
            )


class ChunkFormer:
    """Forms and stores what is added: the first chunk of a prompt as a canonical, others as patches of canonicals.

    What waits is held on the device, next to the engine's pool: the rows of the chunks that are to be formed, and no
    more of them than `Settings.pending_bytes`.
    """

    def __init__(self, settings: ConnectorConfig, layout: KVLayout, stores: Stores):
        """Starts no thread before something is added."""
        self.settings, self.layout, self.stores = settings, layout, stores
        self.counts: collections.Counter[str] = collections.Counter()
        self.held_bytes = 0
        self._waiting: collections.deque[list[tuple[FormingTask, ChunkKV, int]]] = collections.deque()
        self._busy = self._closed = self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, tasks: Sequence[FormingTask], read: Callable[[PromptSegment], ChunkKV], token_bytes: int) -> None:
        """Queues what one prefill left. What there is no room for is not read; it is counted. Called by one thread.

        Args:
          read: reads a chunk's rows out of the engine's pool. token_bytes: that a token takes there.
        """
        with self._changed:
            if self._closed or len(self._waiting) >= self.settings.pending:
                self.counts["dropped"] += 1
                return
            if self._thread is None:
                self._thread = start_thread(self._work, self._exit, "chunk-former", self.settings.patience)

        chunks = []
        for task in tasks:
            nbytes = token_bytes * (task.segment.end - task.segment.begin)
            if self.held_bytes + nbytes > self.settings.pending_bytes:
                self.counts["over_budget"] += 1
                continue
            try:
                kv = read(task.segment)
            except Exception as error:  # whatever it is, the engine goes on
                self.counts["failed"] += 1
                logger.warning("kvpatch: a chunk was not formed: %s", error)
                continue
            with self._changed:
                self.held_bytes += nbytes
            chunks.append((task, kv, nbytes))
        if chunks:
            with self._changed:
                self._waiting.append(chunks)
                self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all that was added is stored, or was counted as failed."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._busy))

    def close(self, patience: float) -> bool:
        """Finishes what was added, and ends the thread.

        Args:
          patience: seconds to wait at most; what is not begun by then is dropped.

        Returns:
          Whether all was finished.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            finished = self._changed.wait_for(lambda: not (self._waiting or self._busy), patience)
            self._end()
        if self._thread is not None:
            self._thread.join(patience if finished else 0)
        return finished

    def _exit(self, _: float) -> None:
        """Ends the thread after the chunk that it is at: the process exits, and the engine closed no connector."""
        with self._changed:
            self._closed = True
            self._end()
            self._changed.notify_all()

    def _end(self) -> None:
        """Drops what waits. Called with the lock."""
        self._ended = True
        while self._waiting:
            chunks = self._waiting.popleft()
            self.counts["dropped"] += 1
            self.held_bytes -= sum(nbytes for _, _, nbytes in chunks)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                chunks, self._busy = self._waiting.popleft(), True
            while chunks and not self._ended:
                task, kv, nbytes = chunks.pop(0)
                try:
                    self._form(task, kv)
                except Exception as error:  # a chunk that is not formed is computed by the engine, as before
                    self.counts["failed"] += 1
                    logger.warning("kvpatch: a chunk was not formed: %s", error)
                del kv  # before the bytes are given to others
                with self._changed:
                    self.held_bytes -= nbytes
            with self._changed:
                self._busy = False
                self.held_bytes -= sum(nbytes for _, _, nbytes in chunks)  # of what was dropped
                self._changed.notify_all()

    def _form(self, task: FormingTask, kv: ChunkKV) -> None:
        segment, store = task.segment, self.stores.of(task.tenant)
        if self.stores.formed(task.tenant, segment.id, task.front):  # by another request, or engine, in between
            self.counts["known"] += 1
            return
        start, local = task.positions[0], (task.positions - task.positions[0]).astype(np.float32)
        free = to_phase_free(self.layout, self._widened(kv), local, start)
        if not task.front:
            span, count = int(local.max()) + 1, len(local)
            chunk = Chunk(
                jax.device_get(dict(free)), local, span, count, segment.id, self.layout, self.settings.backbone
            )
            store.put(chunk)
            self.counts["canonicals"] += 1
            return
        canonical = store.get(segment.id, self.settings.backbone)
        if canonical is None:
            return
        check_lowest_layer(canonical, free)
        dtype = kv[self.layout.names[0]].dtype
        CacheFormat(self.layout, np.dtype(dtype)).check(canonical, len(local))
        store.put_patches([form_patch(canonical, free, self.settings.rank, task.front, dtype=dtype)])
        self.counts["patches"] += 1

    def _widened(self, kv: ChunkKV) -> EngineKV:
        """Keys in float32: rounded when turned back and when placed again, they would no longer be the engine's."""
        rotating = {channel.name for channel in self.layout.channels if channel.rotates}
        return EngineKV({name: own.astype(jnp.float32) if name in rotating else own for name, own in kv.items()})
