"""What the scheduler's side tells the worker's. Both are in one process (`parallel`)."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from ...cache import Chunk, Patch
from ...errors import PoolError
from .request_plan import ChunkStep
from .segments import PromptSegment


class ChunkPayload(NamedTuple):
    """A step, and what it places: read and verified when the request was planned."""

    step: ChunkStep
    chunk: Chunk
    patch: Patch | None = None


class LoadCommand(NamedTuple):
    """Chunks to be written into an engine's blocks before its next forward.

    Attributes:
      request: its id. pieces: all chunks from the front. first: the first token that the engine does not have already.
        blocks: of the request, in order.
    """

    request: str
    pieces: tuple[ChunkPayload, ...]
    first: int
    blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """Behind the last token that it fills."""
        return self.pieces[-1].step.segment.end


class SaveCommand(NamedTuple):
    """Chunks whose KV stands in an engine's blocks as its own exact prefill left it.

    Attributes:
      segments: all chunks from the front. wanted: places of those to be formed: the first as a canonical, others as
        patches.
    """

    request: str
    tenant: str
    segments: tuple[PromptSegment, ...]
    wanted: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StepCommands:
    """What one step of the engine is to load and save.

    Attributes:
      lost: blocks that the engine counts on and nobody will fill; it is told so behind the step, and computes them.
    """

    loads: tuple[LoadCommand, ...] = ()
    saves: tuple[SaveCommand, ...] = ()
    lost: frozenset[int] = frozenset()


def slots_of(blocks: tuple[int, ...], page_size: int, begin: int, end: int) -> Int[np.ndarray, " T"]:
    """Slots of a request's tokens from `begin` up to `end`: block · page size + offset.

    Raises:
      PoolError: tokens beyond the blocks.
    """
    if not 0 <= begin <= end <= len(blocks) * page_size:
        raise PoolError(f"tokens {begin} to {end}; expected some of {len(blocks)} blocks of {page_size}")
    places = np.arange(begin, end)
    return (np.asarray(blocks, np.int64)[places // page_size] * page_size + places % page_size).astype(np.int32)


def blocks_from(blocks: tuple[int, ...], page_size: int, begin: int, end: int) -> set[int]:
    """Blocks that hold tokens from `begin` up to `end`."""
    return set(blocks[begin // page_size : -(-end // page_size)])
