"""The worker's side of the connector: splices chunks into the engine's live pool, and reads prefilled KV from it.

The runner is the engine's object. The connector uses its `kv_caches`, one array per layer, which may be sharded over
devices by heads, and the positions of its `requests`.
"""

import collections
import functools
import logging
import time
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ...core import DEFAULT, EngineKV, KVLayout
from ...errors import ConfigError, InputError
from ...patching import Placed
from .config import PATIENCE, ConnectorConfig
from .engine import page_format
from .forming import ChunkFormer, FormingTask, PrefillNote
from .messages import LoadCommand, StepCommands, blocks_from, slots_of
from .metrics import EngineMetrics
from .plan import PromptHistory
from .segments import PromptSegment
from .stores import Stores

logger = logging.getLogger(__name__)


class WorkerSide:
    """Executes commands on one runner's pool. Failures are reported by their blocks, which the engine recomputes.

    Args:
      config: the operator's settings.
      layout: layout of the model's cache.
      page_size: tokens per block of the scheduler.
      weights: digest of the engine's weights, as for `Stores`.
      patience: seconds for which closing waits for what is to be formed and written.
      options: of `ChunkFormer`.

    Attributes:
      former: forms chunks from prefills.
      counts: numbers of "tokens" written, and of loads that "failed" and requests "unsaved".
      metrics: what of that was not reported to the engine yet.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        layout: KVLayout,
        page_size: int,
        weights: str | None = None,
        patience: float = PATIENCE,
        **options: Any,
    ):
        self.layout, self.page_size, self.patience = layout, page_size, patience
        self.stores = Stores(config, weights)
        self.former = ChunkFormer(self.stores, layout, config.rank, patience=patience, **options)
        self.counts: collections.Counter[str] = collections.Counter()
        self.metrics = EngineMetrics()
        self._format = page_format(layout)
        self._runner: Any = None
        self._failed: set[int] = set()

    def register(self, runner: Any) -> None:
        """Sets the runner whose pool commands are executed on.

        Raises:
          ConfigError: the pages have another number of layers or tokens, or elements of 8 bits.
          ShapeError, LayoutError: they have another format, or are sharded otherwise than by heads.
        """
        pages = runner.kv_caches
        if len(pages) != self.layout.layers:
            raise ConfigError(f"connector: got pages of {len(pages)} layers; expected {self.layout.layers}")
        if pages[0].shape[1] != self.page_size:
            raise ConfigError(f"connector: got pages of {pages[0].shape[1]} tokens; expected {self.page_size}, a block")
        if pages[0].dtype.itemsize < 2:
            raise ConfigError(f"connector: got {pages[0].dtype} pages; expected 16 or 32 bits (kv_cache_dtype 'auto')")
        self._format.read(self.layout, list(pages), np.arange(1, dtype=np.int32))  # raises for another format
        self._runner = runner

    # ------------------------------------------------------------------------------------------------- loading

    def load(self, commands: StepCommands) -> None:
        """Writes chunks into the pool, in place, before a forward reads it."""
        self._failed |= commands.lost
        for load in commands.loads:
            for index, payload in enumerate(load.payloads):
                segment = payload.step.segment
                if segment.end <= load.first:
                    continue

                try:
                    self._write(load, index)
                except Exception as error:  # the engine recomputes the blocks, whatever failed
                    # Later chunks are lost too: their patches were to be conditioned on this one.
                    begin = max(segment.begin, load.first)
                    self._failed |= blocks_from(load.blocks, self.page_size, begin, load.end)
                    self.counts["failed"] += 1
                    logger.warning("kvpatch: request %s lacks its tokens from %d on: %s", load.request, begin, error)
                    break

    def fail(self, commands: StepCommands) -> None:
        """Reports every block of the commands as failed, because it is not known which were filled."""
        self._failed |= commands.lost
        for load in commands.loads:
            self._failed |= blocks_from(load.blocks, self.page_size, load.first, load.end)

    def _write(self, load: LoadCommand, index: int) -> None:
        """Splices one chunk into the pool."""
        step, chunk, patch = load.payloads[index]
        segment, count = step.segment, step.segment.end - step.segment.begin
        if chunk.length != count or chunk.tokens != count:
            raise InputError(f"chunk {segment.id[:12]}…: got {chunk.length} tokens; expected {count}")

        front = tuple(payload.step.segment.id for payload in load.payloads[:index])
        start = self._start(load.request, segment.begin, np.asarray(chunk.local))

        # Padded to a few lengths, so that few programs are compiled. Slots of -1 are not written.
        size = DEFAULT.round_up(count)
        slots = np.full(size, -1, np.int32)
        slots[:count] = slots_of(load.blocks, self.page_size, segment.begin, segment.end)
        chunk, patch = chunk.pad(size), None if patch is None else patch.pad(size)
        first = max(0, load.first - segment.begin)
        pages = self._format.splice(list(self._runner.kv_caches), slots, Placed(chunk, patch, start, front), first)
        self._runner.kv_caches = pages
        self.counts["tokens"] += count - first

    def take_failed(self) -> set[int]:
        """Returns the blocks that could not be filled since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    # --------------------------------------------------------------------------------------------------- saving

    def save(self, commands: StepCommands) -> None:
        """Reads prefilled KV from the pool, and queues it to be formed in the background."""
        for save in commands.saves:
            if set(save.blocks) & self._failed:  # computed behind blocks that hold nothing
                continue
            try:
                tasks, history = [], PromptHistory(save.segments)
                left = {own.index: own for own in save.survivors}
                for index in sorted({*save.wanted, *save.prefills, *left}):
                    segment = save.segments[index]
                    antecedent = history.ids[:index]
                    positions = self._positions(save.request, segment.begin, segment.end)
                    note = PrefillNote(history.exact[index], history.alike(index)) if index in save.prefills else None
                    formed = index in save.wanted
                    task = FormingTask(save.tenant, segment, antecedent, positions, formed, note, left.get(index))
                    tasks.append(task)
                token_bytes = self.layout.bytes_per_token(self._runner.kv_caches[0].dtype)
                if tasks:
                    self.former.add(tasks, functools.partial(self._rows, save.blocks), token_bytes)
            except Exception as error:
                self.counts["unsaved"] += 1
                logger.warning("kvpatch: request %s is not saved: %s", save.request, error)

    def _rows(self, blocks: tuple[int, ...], segment: PromptSegment) -> EngineKV:
        """Reads a chunk's rows from the pool."""
        slots = slots_of(blocks, self.page_size, segment.begin, segment.end)
        rows = self._format.read(self.layout, list(self._runner.kv_caches), slots)
        # Every device has all of it. Forming uses one device only: programs over several devices that two threads
        # launch may deadlock.
        return EngineKV({name: value.addressable_data(0) for name, value in rows.items()})

    # ------------------------------------------------------------------------------------------------ positions

    def _positions(self, request: str, begin: int, end: int) -> Int[np.ndarray, "*positions"]:
        """Returns the positions of a prompt's tokens as the engine counted them, [T] or, under M-RoPE, [T, 3]."""
        if self.layout.rope.axes is None:
            return np.arange(begin, end, dtype=np.int32)
        counted = getattr(self._runner.requests[request], "mrope_positions", None)
        if counted is None:
            raise InputError("engine: got no M-RoPE positions; expected them for a rope with sections")
        return np.asarray(counted)[:, begin:end].T.astype(np.int32)

    def _start(self, request: str, begin: int, local: Float[np.ndarray, "*positions"]) -> Any:
        """Returns the start at which a chunk's tokens get the positions that the engine counted.

        Raises:
          InputError: there is no such start.
        """
        positions = self._positions(request, begin, begin + len(local))
        start = positions[0] - local[0].astype(np.int32)
        if not np.array_equal(positions, start + local):
            raise InputError("chunk: got positions other than the engine's; expected the same up to a shift")
        return int(start) if start.ndim == 0 else start

    def close(self) -> None:
        """Finishes forming and gives up the stores; one that hangs is waited for within the patience. Idempotent."""
        deadline = time.monotonic() + self.patience
        finished = self.former.close(max(0.0, deadline - time.monotonic()))
        if not self.stores.close(max(0.0, deadline - time.monotonic())) or not finished:
            logger.warning("kvpatch: closed after %g s; chunks may not have been saved", self.patience)
