"""Events of blocks that the engine can load from the store, for routers that send prompts to where their KV is.

An engine knows only what its plans have seen of the store: other engines write and evict there too. So a prompt's first
chunk is announced when a plan serves it exactly, and withdrawn when a plan finds it missing. What is approximate is
never announced, and neither are images and salted prompts, whose hashes a router could not compute from the tokens.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

from .segments import PromptSegment

MAX_ANNOUNCED = 4096
"""Number of chunks that are announced at a time; the one that was planned least recently is withdrawn."""
MAX_EVENTS = 65_536
"""Number of events that wait to be taken; more are lost, the oldest first."""


class BlocksStored(NamedTuple):
    """Blocks that the engine can load: their hashes, their tokens, and the tokens per block."""

    hashes: tuple[Any, ...]
    tokens: tuple[int, ...]
    block_size: int


class BlocksRemoved(NamedTuple):
    """Hashes of blocks that the engine can no longer load."""

    hashes: tuple[Any, ...]


class BlockEvents:
    """Collects the events of one engine. Called by its thread alone.

    Args:
      page_size: tokens per block.

    Attributes:
      enabled: whether anything is collected: the engine's setting, off unless somebody listens.
    """

    def __init__(self, page_size: int):
        self.page_size, self.enabled = page_size, False
        self._events: collections.deque[BlocksStored | BlocksRemoved] = collections.deque(maxlen=MAX_EVENTS)
        self._announced: collections.OrderedDict[tuple[str, str], tuple[Any, ...]] = collections.OrderedDict()
        self._users: collections.Counter[Any] = collections.Counter()  # announced chunks by block

    def note_plan(self, request: Any, tenant: str, segments: Sequence[PromptSegment], steps: Sequence[Any]) -> None:
        """Announces or withdraws the first chunk of a planned prompt.

        Args:
          request: the engine's object, with the hashes of its blocks.
          steps: the plan's steps; of the first one, whether it is exact.
        """
        if not self.enabled or not segments:
            return
        first, tokens = segments[0], request.prompt_token_ids
        key = (tenant, first.id)
        if not steps:
            self._withdraw(key)
            return

        # An engine that hashes other units than its blocks has another number of hashes.
        expected = getattr(request, "num_tokens", len(tokens)) // self.page_size
        is_plain = first.modality == "text" and request.cache_salt is None
        if not steps[0].exact or not is_plain or len(request.block_hashes) != expected:
            return
        count = first.end // self.page_size
        hashes = tuple(request.block_hashes[:count])
        if self._announced.get(key) != hashes:
            self._withdraw(key)
            if not hashes:
                return
            self._announced[key] = hashes
            self._users.update(hashes)
            self._events.append(BlocksStored(hashes, tuple(tokens[: count * self.page_size]), self.page_size))
        self._announced.move_to_end(key)
        if len(self._announced) > MAX_ANNOUNCED:
            self._withdraw(next(iter(self._announced)))

    def clear(self) -> None:
        """Withdraws everything."""
        for key in list(self._announced):
            self._withdraw(key)

    def take(self) -> list[BlocksStored | BlocksRemoved]:
        """Returns the events since the last call, in order."""
        events = list(self._events)
        self._events.clear()
        return events

    def _withdraw(self, key: tuple[str, str]) -> None:
        hashes = self._announced.pop(key, ())
        self._users.subtract(hashes)
        # Another tenant, or a longer chunk, may have the same blocks.
        gone = tuple(block for block in hashes if self._users[block] <= 0)
        for block in gone:
            del self._users[block]
        if gone:
            self._events.append(BlocksRemoved(gone))
