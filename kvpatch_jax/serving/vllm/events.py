"""Events of blocks that the engine can load from the store, for routers that send prompts to where their KV is.

An engine knows only what its plans have seen of the store: other engines write and evict there too. So a prompt's
blocks are announced as far as a plan serves it exactly, and withdrawn when a plan finds them missing. What is
approximate is never announced: its blocks are cached under a salt that no router knows.
"""

import collections
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_ANNOUNCED = 65_536
"""Number of blocks that are announced at a time; those that were planned least recently are withdrawn."""
MAX_EVENTS = 65_536
"""Number of events that wait to be taken; more are lost, the oldest first."""


class BlocksStored(NamedTuple):
    """Consecutive blocks of a prompt that the engine can load, with what vLLM hashes of them.

    Attributes:
      hashes: of the blocks.
      parent: hash of the block in front of them; None at the start of a prompt.
      tokens: of the blocks; those of an image are its placeholders.
      block_size: tokens per block.
      extra_keys: per block, what else is hashed, as vLLM publishes it: `(identifier, offset from the block's start)` of
        each image in it, and in the first block the request's `cache_salt`; None if there is nothing else.
    """

    hashes: tuple[Any, ...]
    parent: Any
    tokens: tuple[int, ...]
    block_size: int
    extra_keys: tuple[tuple[Any, ...] | None, ...]


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
        self._announced: collections.OrderedDict[Any, None] = collections.OrderedDict()

    def note_plan(self, request: Any, salt: str | None, steps: Sequence[Any]) -> None:
        """Announces the blocks of a prompt's exact leading chunks, and withdraws those behind them.

        Args:
          request: the engine's object, with the hashes of its blocks.
          salt: the `cache_salt` that the request came with; while it has another one, its hashes are not announced.
          steps: the plan's steps, of which `exact`, `segment.end` and, where not exact, `point` are read.
        """
        # An engine that hashes other units than its blocks has another number of hashes.
        tokens, hashes = request.prompt_token_ids, list(request.block_hashes)
        expected = getattr(request, "num_tokens", len(tokens)) // self.page_size
        if not self.enabled or request.cache_salt != salt or len(hashes) != expected:
            return

        exact = list(itertools.takewhile(lambda step: step.exact, steps))
        count = exact[-1].segment.end // self.page_size if exact else 0
        # A window that remembers takes what its agent left, and looks for no exact chunk there.
        if len(exact) == len(steps) or steps[len(exact)].point != "survivor":
            self._withdraw([block for block in hashes[count:] if block in self._announced])
        first = next((index for index in range(count) if hashes[index] not in self._announced), count)
        if first < count:
            keys = self._extra_keys(request, first, count)
            stored = tuple(tokens[first * self.page_size : count * self.page_size])
            parent = hashes[first - 1] if first else None
            self._events.append(BlocksStored(tuple(hashes[first:count]), parent, stored, self.page_size, keys))

        # A block is of no use without those in front of it, so the last ones are the first to be withdrawn.
        for block in reversed(hashes[:count]):
            self._announced[block] = None
            self._announced.move_to_end(block)
        excess = max(0, len(self._announced) - MAX_ANNOUNCED)
        self._withdraw([block for block, _ in zip(self._announced, range(excess), strict=False)])

    def clear(self) -> None:
        """Withdraws everything."""
        self._withdraw(list(self._announced))

    def take(self) -> list[BlocksStored | BlocksRemoved]:
        """Returns the events since the last call, in order."""
        events = list(self._events)
        self._events.clear()
        return events

    def _extra_keys(self, request: Any, first: int, count: int) -> tuple[tuple[Any, ...] | None, ...]:
        """Returns what vLLM hashes of the blocks in [first, count) beside their tokens, as its own events have it."""
        page, keys = self.page_size, [list[Any]() for _ in range(first, count)]
        for feature in sorted(request.mm_features, key=lambda feature: feature.mm_position.offset):
            offset, length = feature.mm_position.offset, feature.mm_position.length
            for index in range(max(first, offset // page), min(count, -(-(offset + length) // page))):
                keys[index - first].append((feature.identifier, offset - index * page))
        if first == 0 and request.cache_salt:
            keys[0].append(request.cache_salt)
        return tuple(tuple(block) or None for block in keys)

    def _withdraw(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            del self._announced[block]
        if blocks:
            self._events.append(BlocksRemoved(tuple(blocks)))
