"""The worker's side: chunks spliced into the engine's live pool, and what its prefills left read out of it.

The runner is the engine's object: `kv_caches`, an array per layer, which may lie over several devices by heads, and
`requests`, of which positions are read.
"""

import collections
import functools
import logging
import time
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ...core import DEFAULT, EngineKV, KVLayout
from ...errors import ConfigError, InputError, PositionError
from ...patching import Placed
from ...window import padded_chunk, padded_patch
from .forming import ChunkFormer, FormingTask
from .layouts import page_format
from .messages import LoadCommand, SaveCommand, StepCommands, blocks_from, slots_of
from .request_plan import ChunkStep
from .segments import PromptSegment
from .settings import ConnectorConfig
from .stores import Stores

logger = logging.getLogger(__name__)


class WorkerSide:
    """Carries out orders on one runner's pool. Whatever fails is told by its blocks, and left to the engine."""

    def __init__(self, settings: ConnectorConfig, layout: KVLayout, page_size: int, weights: str | None = None):
        """Waits for `register`.

        Args:
          layout: what the model caches. page_size: tokens of the scheduler's blocks. weights: as `Stores`.
        """
        self.settings, self.layout, self.page_size = settings, layout, page_size
        self.stores = Stores(settings, weights)
        self.former = ChunkFormer(settings, layout, self.stores)
        self.counts: collections.Counter[str] = collections.Counter()
        self._format = page_format(layout)
        self._runner: Any = None
        self._failed: set[int] = set()

    def register(self, runner: Any) -> None:
        """Takes hold of a runner.

        Raises:
          ConfigError: pages of other layers or blocks, or of 8 bits. ShapeError, LayoutError, DtypeError: of another
            form, or over several devices otherwise than by heads.
        """
        pages = runner.kv_caches
        if len(pages) != self.layout.layers:
            raise ConfigError(f"connector: pages of {len(pages)} layers; expected {self.layout.layers}")
        if pages[0].shape[1] != self.page_size:
            raise ConfigError(f"connector: pages of {pages[0].shape[1]} tokens; expected blocks of {self.page_size}")
        if pages[0].dtype.itemsize < 2:
            raise ConfigError(f"connector: pages of {pages[0].dtype}; expected 16 or 32 bits (kv_cache_dtype 'auto')")
        self._format.read(self.layout, list(pages), np.arange(1, dtype=np.int32))  # of this form, or refused here
        self._runner = runner

    # ------------------------------------------------------------------------------------------------- loading

    def load(self, orders: StepCommands) -> None:
        """Writes what was ordered into the pool, in place, before a forward reads it."""
        self._failed |= orders.lost
        for load in orders.loads:
            for place, piece in enumerate(load.pieces):
                if piece.step.segment.end <= load.first:
                    continue
                try:
                    self._write(load, place)
                except Exception as error:  # whatever it is, the engine is told by its blocks
                    self._lost(load, piece.step, error)
                    break

    def lose(self, orders: StepCommands) -> None:
        """Tells of every block that was ordered to be filled, for nobody knows which were."""
        self._failed |= orders.lost
        for load in orders.loads:
            self._failed |= blocks_from(load.blocks, self.page_size, load.first, load.end)

    def _write(self, load: LoadCommand, place: int) -> None:
        step, chunk, patch = load.pieces[place]
        segment, count = step.segment, step.segment.end - step.segment.begin
        if chunk.length != count or chunk.tokens != count:
            raise InputError(f"chunk {segment.id[:12]}… of {chunk.length} tokens; expected {count}")
        front = tuple(piece.step.segment.id for piece in load.pieces[:place])
        start = self._start(load.request, segment.begin, np.asarray(chunk.local))

        size = DEFAULT.round_up(count)
        slots = np.full(size, -1, np.int32)
        slots[:count] = slots_of(load.blocks, self.page_size, segment.begin, segment.end)
        chunk, patch = padded_chunk(chunk, size), None if patch is None else padded_patch(patch, size)
        first = max(0, load.first - segment.begin)
        pages = self._format.splice(list(self._runner.kv_caches), slots, Placed(chunk, patch, start, front), first)
        self._runner.kv_caches = pages
        self.counts["tokens"] += count - first

    def _lost(self, load: LoadCommand, step: ChunkStep, error: Exception) -> None:
        """Tells of every block from this chunk on: those behind it were to be approximate behind it."""
        begin = max(step.segment.begin, load.first)
        blocks = blocks_from(load.blocks, self.page_size, begin, load.end)
        self._failed |= blocks
        self.counts["failed"] += 1
        logger.warning("kvpatch: request %s lacks its tokens from %d on: %s", load.request, begin, error)

    def take_failed(self) -> set[int]:
        """Blocks that could not be filled since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    # --------------------------------------------------------------------------------------------------- saving

    def save(self, orders: StepCommands) -> None:
        """Reads what prefills left in the pool, and gives it to be formed behind the engine's back."""
        for save in orders.saves:
            if set(save.blocks) & self._failed:  # computed behind blocks that hold nothing
                continue
            try:
                tasks = [self._task(save, place) for place in save.wanted]
                token_bytes = self.layout.bytes_per_token(self._runner.kv_caches[0].dtype)
                self.former.add(tasks, functools.partial(self._rows, save.blocks), token_bytes)
            except Exception as error:
                self.counts["unsaved"] += 1
                logger.warning("kvpatch: request %s is not saved: %s", save.request, error)

    def _task(self, save: SaveCommand, place: int) -> FormingTask:
        segment, front = save.segments[place], tuple(own.id for own in save.segments[:place])
        return FormingTask(save.tenant, segment, front, self._positions(save.request, segment.begin, segment.end))

    def _rows(self, blocks: tuple[int, ...], segment: PromptSegment) -> EngineKV:
        """Reads a chunk's rows out of the pool."""
        slots = slots_of(blocks, self.page_size, segment.begin, segment.end)
        read = self._format.read(self.layout, list(self._runner.kv_caches), slots)
        # Every device has all of it. Chunks are formed on one alone: programs of several devices that two threads
        # launch may wait for one another for ever.
        return EngineKV({name: value.addressable_data(0) for name, value in read.items()})

    # ------------------------------------------------------------------------------------------------ positions

    def _positions(self, request: str, begin: int, end: int) -> Int[np.ndarray, "*positions"]:
        """Positions of a prompt's tokens as the engine itself counted them, under M-RoPE on three axes."""
        counted = getattr(self._runner.requests[request], "mrope_positions", None)
        if self.layout.rope.axes is None:
            return np.arange(begin, end, dtype=np.int32)
        if counted is None:
            raise PositionError("the engine counted no M-RoPE positions; expected them for a rope with sections")
        return np.asarray(counted)[:, begin:end].T.astype(np.int32)

    def _start(self, request: str, begin: int, local: Float[np.ndarray, "*positions"]) -> Any:
        """Where a chunk starts, so that its tokens stand where the engine counted them."""
        found = self._positions(request, begin, begin + len(local))
        start = found[0] - local[0].astype(np.int32)
        if not np.array_equal(found, start + local):
            raise PositionError("a chunk's positions are not the engine's; expected them alike up to its start")
        return int(start) if start.ndim == 0 else start

    def close(self) -> None:
        """Finishes what is to be formed, and closes the stores; of a store that hangs no longer than the patience."""
        until = time.monotonic() + self.settings.patience
        finished = self.former.close(self.settings.patience)
        if not self.stores.close(max(0.0, until - time.monotonic())) or not finished:
            logger.warning("kvpatch: closed after %g s; chunks may not have been saved", self.settings.patience)
