"""Formation of chunks and patches from an engine's prefills, on a background thread."""

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ...cache import Chunk, Likeness
from ...core import EngineKV, KVLayout, end_position, to_phase_free
from ...errors import InputError, WorseThanBlindError
from ...patching import form_patch
from ...utils.background import JobQueue
from .config import PATIENCE
from .engine import CacheFormat
from .messages import LeftBehind
from .plan import Survivor
from .segments import PromptSegment
from .stores import Stores

logger = logging.getLogger(__name__)

PENDING = 8
"""Prefills that may wait to be formed; more are dropped."""
PENDING_BYTES = 512 << 20
"""Bytes of KV on the device that may wait to be formed or be in work; a chunk beyond it is not formed."""
MAX_LOWEST_LAYER_ERROR = 0.1
"""Share of the norm, in the lowest layer: rounding causes less than a hundredth, another rotation of keys about 1."""

ChunkKV = Mapping[str, Float[jax.Array, "L T _ _"]]
"""{channel: [L, T, K, H]} of one chunk in the engine frame, in arrays that nobody else donates."""


class PrefillNote(NamedTuple):
    """How a prefill is found again: its identity, and the keys under which it serves behind other chunks."""

    identity: str
    keys: dict[Likeness, str]


class FormingTask(NamedTuple):
    """A chunk to be formed from a prefill, which was exact unless the chunk is only to survive.

    Attributes:
      tenant: owner of the chunk.
      segment: the chunk.
      antecedent: ids of the chunks before it; without any it becomes a canonical, otherwise a patch.
      positions: positions of its tokens.
      formed: whether to form the canonical or the patch.
      prefill: its names, if the prefill is to be stored as it is.
      survivor: what it is kept as for the next request of the same agent, or None.
    """

    tenant: str
    segment: PromptSegment
    antecedent: tuple[str, ...]
    positions: Int[np.ndarray, "*positions"]
    formed: bool = True
    prefill: PrefillNote | None = None
    survivor: LeftBehind | None = None


class _ReadTask(NamedTuple):
    """A task with its KV, read from the engine's pool, and the bytes that count towards the budget."""

    task: FormingTask
    kv: ChunkKV
    nbytes: int


def check_lowest_layer(canonical: Chunk, conditioned: Mapping[str, Float[jax.Array, "L T _ _"]]) -> None:
    """Raises if a chunk's conditioned KV differs from its canonical in the lowest layer, which no antecedent reaches.

    This detects a rope, an order of layers or an image other than assumed, before it is stored in a patch.

    Raises:
      InputError: the difference exceeds rounding.
    """
    for name, value in conditioned.items():
        actual = np.asarray(value[0], np.float32)
        expected = np.asarray(canonical.kv[name][0, : value.shape[1]], np.float32)
        error = float(np.linalg.norm(actual - expected)) / max(float(np.linalg.norm(expected)), 1e-30)
        if not error <= MAX_LOWEST_LAYER_ERROR:  # also refuses NaN
            raise InputError(
                f"chunk {canonical.id[:12]}…: got {name!r} in the lowest layer at {error:.2g} of its norm from the "
                f"canonical; expected at most {MAX_LOWEST_LAYER_ERROR:g}, because no antecedent reaches it"
            )


class ChunkFormer:
    """Forms and stores chunks: the first one of a prompt as a canonical, later ones as they were prefilled behind what
    was in front of them, or as patches of their canonicals.

    Waiting KV is held on the device, next to the engine's pool: only the rows of chunks to be formed.

    Args:
      rank: of patches.
      pending, pending_bytes: prefills that may wait, and bytes.
      patience: seconds within which the queue ends when the process does.

    Attributes:
      counts: numbers of chunks by outcome: "canonicals", "patches", "prefills", "survivors", "known" (already stored),
        "failed", "over_budget", and of prefills that were "dropped".
      held_bytes: bytes of KV that wait or are in work.
    """

    def __init__(
        self,
        stores: Stores,
        layout: KVLayout,
        rank: int,
        pending: int = PENDING,
        pending_bytes: int = PENDING_BYTES,
        patience: float = PATIENCE,
    ):
        self.stores, self.layout, self.rank, self.pending_bytes = stores, layout, rank, pending_bytes
        self.counts: collections.Counter[str] = collections.Counter()
        self.held_bytes = 0
        self._lock = threading.Lock()
        # One job per prefill. The thread starts with the first one.
        self._queue: JobQueue[list[_ReadTask]] = JobQueue(
            self._form_all, pending, "chunk-former", drop=self._drop, patience=patience
        )

    def add(self, tasks: Sequence[FormingTask], read: Callable[[PromptSegment], ChunkKV], token_bytes: int) -> None:
        """Queues the chunks of one prefill. Chunks over the budget are counted and not read. Called by one thread.

        Args:
          read: reads a chunk's rows from the engine's pool.
          token_bytes: bytes per token there.
        """
        # Reading copies on the device, so room is checked first.
        if self._queue.full:
            self.counts["dropped"] += 1
            return

        job = []
        for task in tasks:
            nbytes = token_bytes * (task.segment.end - task.segment.begin)
            if self.held_bytes + nbytes > self.pending_bytes:
                self.counts["over_budget"] += 1
                continue

            try:
                kv = read(task.segment)
            except Exception as error:  # forming is optional: the engine must go on
                self._note_failure(error)
                continue

            job.append(_ReadTask(task, kv, nbytes))
            self._reserve(nbytes)

        if job and not self._queue.add(job):  # closed in the meantime
            self._drop(job)

    @property
    def jobs(self) -> int:
        """Number of prefills that wait to be formed or are in work."""
        return self._queue.backlog

    def flush(self) -> None:
        """Waits until every queued chunk is stored or counted as failed."""
        self._queue.flush()

    def close(self, patience: float) -> bool:
        """Finishes the queued chunks and ends the thread.

        Args:
          patience: seconds to wait at most; chunks that are not begun by then are dropped.

        Returns:
          Whether all were finished.
        """
        return self._queue.close(patience)

    def _reserve(self, nbytes: int) -> None:
        """Adds to the held bytes; a negative number releases them."""
        with self._lock:
            self.held_bytes += nbytes

    def _drop(self, job: list[_ReadTask]) -> None:
        self.counts["dropped"] += 1
        self._reserve(-sum(read.nbytes for read in job))

    def _note_failure(self, error: Exception) -> None:
        self.counts["failed"] += 1
        logger.warning("kvpatch: a chunk was not formed: %s", error)

    def _form_all(self, job: list[_ReadTask]) -> None:
        """Forms the chunks of one prefill, until the queue's time is over."""
        while job and not self._queue.expired:
            task, kv, nbytes = job.pop(0)
            try:
                self._form(task, kv)
            except Exception as error:  # the engine prefills a chunk that is not formed, as it did before
                self._note_failure(error)
            del kv  # freed before its bytes are available to others
            self._reserve(-nbytes)
        self._reserve(-sum(read.nbytes for read in job))

    def _form(self, task: FormingTask, kv: ChunkKV) -> None:
        """Forms what is wanted of one chunk, unless another request or engine has done so."""
        segment, store = task.segment, self.stores.of(task.tenant)
        is_formed = task.formed and self._is_formed(task)
        if is_formed:
            self.counts["known"] += 1
            if task.prefill is None and task.survivor is None:
                return

        dtype = np.dtype(kv[self.layout.names[0]].dtype)
        start, local = task.positions[0], (task.positions - task.positions[0]).astype(np.float32)
        # Keys are unrotated in float32. Rounded then and again when they are placed, they would not be the engine's.
        rotating = {channel.name for channel in self.layout.channels if channel.rotates}
        wide = EngineKV({name: rows.astype(jnp.float32) if name in rotating else rows for name, rows in kv.items()})
        free = to_phase_free(self.layout, wide, local, start)

        host: Chunk | None = None
        if not task.antecedent or task.prefill is not None or task.survivor is not None:
            span, host_kv = int(end_position(local[None])[0]) + 1, jax.device_get(dict(free))
            host = Chunk(host_kv, local, span, len(local), segment.id, self.layout, self.stores.backbone)

        # First what the agent's next request needs, which may come at once.
        if host is not None and task.survivor is not None:
            left = task.survivor
            self.stores.survivors.put(left.key, Survivor(host, left.identity, left.seen, left.ways))
            self.counts["survivors"] += 1
        if host is not None and task.prefill is not None:
            self._keep(host, task, task.prefill, dtype)
        if not task.formed or is_formed:
            return

        if host is not None and not task.antecedent:
            store.put(host)
            self.counts["canonicals"] += 1
            return

        canonical = self.stores.canonical(task.tenant, segment.id)
        if canonical is None:  # evicted since the request was planned
            return

        check_lowest_layer(canonical, free)
        CacheFormat(self.layout, dtype).check(canonical, len(local))
        try:
            store.put_patches([form_patch(canonical, free, self.rank, task.antecedent, dtype=dtype)])
            self.counts["patches"] += 1
        except WorseThanBlindError:
            self.counts["refused"] += 1

    def _is_formed(self, task: FormingTask) -> bool:
        """Returns whether there is the canonical of a prompt's first chunk, or the patch of a later one."""
        id, stores = task.segment.id, self.stores
        if not task.antecedent:
            return stores.has_canonical(task.tenant, id)
        return stores.has_patch(task.tenant, id, task.antecedent)

    def _keep(self, chunk: Chunk, task: FormingTask, note: PrefillNote, dtype: np.dtype) -> None:
        """Stores a prefill as it is, to be found by its identity."""
        prefills = self.stores.prefills(task.tenant, dtype)
        if prefills.contains(chunk.id, note.identity):
            self.counts["known"] += 1
            return
        behind = dataclasses.replace(chunk, lead=prefills.lead(note.identity))
        prefills.put(behind, note.identity, note.keys, mean=True)
        self.counts["prefills"] += 1
