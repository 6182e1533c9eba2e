"""Commands that the scheduler's side of the connector sends to the worker's side.

Both sides run in one process (`engine.check_parallel`), so commands carry the chunks themselves.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from ...cache import Chunk, Identities, Patch, Ways
from ...errors import PoolError
from .plan import ChunkStep, SurvivorKey
from .segments import PromptSegment


class ChunkPayload(NamedTuple):
    """A step of a plan with the chunk and patch that it places, read and verified when the request was planned."""

    step: ChunkStep
    chunk: Chunk
    patch: Patch | None = None


class LoadCommand(NamedTuple):
    """Chunks to write into a request's blocks before the engine's next forward.

    Attributes:
      request: the request's id.
      payloads: every chunk of the plan, from the start of the prompt.
      first: the first token that the engine does not have yet.
      blocks: the request's blocks, in order.
    """

    request: str
    payloads: tuple[ChunkPayload, ...]
    first: int
    blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """Index after the last token that the command fills."""
        return self.payloads[-1].step.segment.end


class LeftBehind(NamedTuple):
    """A chunk that the engine has prefilled, to be kept for the next request of the same agent.

    Attributes:
      index: of its segment.
      key: its name among survivors.
      identity, seen, ways: as of a `Survivor`.
    """

    index: int
    key: SurvivorKey
    identity: str
    seen: Identities
    ways: Ways = ()


class SaveCommand(NamedTuple):
    """Chunks whose KV the engine's prefill has left in a request's blocks.

    Attributes:
      request: the request's id.
      tenant: owner of the chunks.
      segments: every chunk of the prompt, from its start.
      wanted: indices of the segments to form: the first becomes a canonical, later ones become patches.
      blocks: the request's blocks, in order.
      prefills: indices of the segments to store as they are, to be placed behind like chunks again.
      survivors: chunks to keep for the next request of the same agent.
    """

    request: str
    tenant: str
    segments: tuple[PromptSegment, ...]
    wanted: tuple[int, ...]
    blocks: tuple[int, ...]
    prefills: tuple[int, ...] = ()
    survivors: tuple[LeftBehind, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepCommands:
    """Loads and saves of one step of the engine.

    Attributes:
      lost: blocks that the engine relies on and that nobody will fill. The worker reports them after the step, and the
        engine recomputes them.
    """

    loads: tuple[LoadCommand, ...] = ()
    saves: tuple[SaveCommand, ...] = ()
    lost: frozenset[int] = frozenset()


def slots_of(blocks: tuple[int, ...], page_size: int, begin: int, end: int) -> Int[np.ndarray, " T"]:
    """Returns the slots of a request's tokens in [begin, end): block · page size + offset.

    Raises:
      PoolError: the range exceeds the blocks.
    """
    if not 0 <= begin <= end <= len(blocks) * page_size:
        raise PoolError(f"tokens: got {begin} to {end}; expected a range within {len(blocks)} blocks of {page_size}")
    tokens = np.arange(begin, end)
    slots = np.asarray(blocks, np.int64)[tokens // page_size] * page_size + tokens % page_size
    return slots.astype(np.int32)


def blocks_from(blocks: tuple[int, ...], page_size: int, begin: int, end: int) -> set[int]:
    """Returns the blocks that hold a request's tokens in [begin, end)."""
    return set(blocks[begin // page_size : -(-end // page_size)])
