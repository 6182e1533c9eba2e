"""Chunks and patches formed of what an engine's prefills left, on a thread of their own."""

import collections
import logging
import queue
import threading
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ...chunk import Chunk
from ...errors import InputError
from ...frames import EngineKV
from ...layout import KVLayout, to_phase_free
from ...patch import form_patch
from .segments import Segment
from .settings import Settings
from .stores import Stores

logger = logging.getLogger(__name__)


class Prefilled(NamedTuple):
    """What one exact prefill left.

    Attributes:
      segments: all chunks from the front. wanted: places of those to be formed. positions: of all tokens.
      kv: {channel: [L, T, K, H]} in the engine frame, in arrays that nobody else gives away.
    """

    tenant: str
    segments: tuple[Segment, ...]
    wanted: tuple[int, ...]
    positions: Int[np.ndarray, "*positions"]
    kv: Mapping[str, Float[jax.Array, "L T _ _"]]


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
    """Forms and stores what is added: the first chunk of a prompt as a canonical, others as patches of canonicals."""

    def __init__(self, settings: Settings, layout: KVLayout, stores: Stores):
        """Starts no thread before something is added."""
        self.settings, self.layout, self.stores = settings, layout, stores
        self.counts: collections.Counter[str] = collections.Counter()
        self._waiting: queue.Queue[Prefilled | None] = queue.Queue(settings.pending)
        self._thread: threading.Thread | None = None

    def add(self, prefilled: Prefilled) -> None:
        """Queues what a prefill left; where the queue is full it is dropped and counted."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="chunk-former", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(prefilled)
        except queue.Full:
            self.counts["dropped"] += 1

    def flush(self) -> None:
        """Waits until all that was added is stored, or was counted as failed."""
        self._waiting.join()

    def close(self) -> None:
        """Finishes what was added, and ends the thread."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (prefilled := self._waiting.get()) is not None:
            for place in prefilled.wanted:
                try:
                    self._form(prefilled, place)
                except Exception as error:  # a chunk that is not formed is computed by the engine, as before
                    self.counts["failed"] += 1
                    logger.warning("kvpatch: a chunk was not formed: %s", error)
            self._waiting.task_done()
        self._waiting.task_done()

    def _form(self, prefilled: Prefilled, place: int) -> None:
        segment, store = prefilled.segments[place], self.stores.of(prefilled.tenant)
        front = tuple(own.id for own in prefilled.segments[:place])
        if self.stores.formed(prefilled.tenant, segment.id, front):  # by another request, or engine, in between
            self.counts["known"] += 1
            return
        positions = prefilled.positions[segment.begin : segment.end]
        start, local = positions[0], (positions - positions[0]).astype(np.float32)
        kv = {name: value[:, segment.begin : segment.end] for name, value in prefilled.kv.items()}
        free = to_phase_free(self.layout, self._widened(kv), local, start)
        if place == 0:
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
        dtype = prefilled.kv[self.layout.names[0]].dtype
        store.put_patches([form_patch(canonical, free, self.settings.rank, front, dtype=dtype)])
        self.counts["patches"] += 1

    def _widened(self, kv: Mapping[str, Float[jax.Array, "L T _ _"]]) -> EngineKV:
        """Keys in float32: rounded when turned back and when placed again, they would no longer be the engine's."""
        rotating = {channel.name for channel in self.layout.channels if channel.rotates}
        return EngineKV({name: own.astype(jnp.float32) if name in rotating else own for name, own in kv.items()})
