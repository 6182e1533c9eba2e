"""How rotate_patch and splice are cut up on Hopper GPUs: rows into items, a launch into blocks, by counting alone.

An item is two runs of columns of equal width, `first` and `second`, which rotate against each other: pieces of the
halves of a head, the even and the odd channels of a piece of pairs, or, where nothing rotates, two neighbours.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

ROWS = 64
"""Tokens of one warpgroup: what one tensor core instruction takes."""
SWIZZLE = 128
"""Bytes of a row of a run at most: one row of a swizzled tile, so that rows lie one behind the other."""
NARROWEST = 32
"""Bytes of a row of a run at least, in x and in v."""
NARROWEST_SCALES = 32
"""Scales that are fetched at least: the copy engine writes to multiples of 128 bytes."""
SHARED_MEMORY = 232_448 - 2048
"""Bytes of shared memory that the buffers of a block may take; the rest is for barriers."""
PROCESSORS = 132
"""Of an H100 (SXM) or H200, for launches that are cut up where there is no GPU."""
STARTING = 1.5
"""What starting a block costs, in items; chooses how many blocks share the items of a tile of tokens."""


class Items(NamedTuple):
    """How a row of F channels is cut into items.

    Attributes:
      heads: heads in a row. Where nothing rotates, a head is any block of columns.
      head: columns of a head.
      width: columns of a run.
      turning: kinds of item in a head that rotate; they come first.
      kinds: kinds of item in a head.
      apart: columns from `first` to `second` of an item that rotates.
      words: x is seen as words, each a pair of channels; v has a head's even columns before its odd ones.
      joined: `second` follows `first` in x, and both travel as one run.
      swaps: runs are neighbours, and each holds whole rotary pairs, which rotate inside it.
    """

    heads: int
    head: int
    width: int
    turning: int
    kinds: int
    apart: int
    words: bool
    joined: bool = False
    swaps: bool = False

    @property
    def runs(self) -> int:
        """Runs of x in an item as it travels: one where words hold both channels of a pair, or runs are joined."""
        return 1 if self.words or self.joined else 2

    @property
    def span(self) -> int:
        """Columns (or words) of a run as it travels."""
        return 2 * self.width if self.joined else self.width

    @property
    def neighbours(self) -> bool:
        """Whether `second` follows `first` in every item."""
        return not self.words and (not self.turning or self.apart == self.width)

    def columns(self, kind, head) -> tuple[Any, Any]:
        """Returns where `first` and `second` start in v; and, unless they are words, in x."""
        turned = head * self.head + kind * self.width
        plain = head * self.head + kind * 2 * self.width
        if self.turning == self.kinds or self.words:
            return turned, turned + self.apart
        if not self.turning:
            return plain, plain + self.width

        turns = kind < self.turning
        first = jnp.where(turns, turned, plain)
        return first, first + jnp.where(turns, self.apart, self.width)

    def sources(self, kind, head) -> tuple[Any, ...]:
        """Returns where the runs of x start."""
        if self.words:
            return (head * (self.head // 2) + kind * self.width,)
        # A multiple of the span that the compiler can see.
        return (head * self.head + kind * self.span,) if self.joined else self.columns(kind, head)


class RowShape(NamedTuple):
    """What is to be cut: heads of so many channels, how many of a head's rotate and how they lie.

    Attributes:
      itemsize: most bytes of a channel, in x, in the result or in between. narrow: bytes of a channel of x.
    """

    heads: int
    width: int
    rotary: int
    layout: str
    itemsize: int
    narrow: int

    @property
    def words(self) -> bool:
        """Whether a rotary pair is one word, of 32 bits at most."""
        return bool(self.rotary) and self.layout == "pairs" and self.itemsize <= 2

    @property
    def swaps(self) -> bool:
        """Whether rotary pairs are no words."""
        return bool(self.rotary) and self.layout == "pairs" and self.itemsize > 2

    @property
    def least(self) -> int:
        """Columns of a run at least."""
        return NARROWEST // min(self.narrow * (1 + self.words), 2)


def items_of(row: RowShape, widest: int = SWIZZLE) -> Items | None:
    """Returns how a row is cut; None where no run fits that is wide enough.

    Args:
      widest: bytes of a run at most, a power of two.
    """
    heads, width, rotary, _, itemsize, _ = row
    words = row.words
    widest //= 2 * itemsize if words else itemsize
    if row.swaps:
        run = math.gcd(width // 2, widest)
        fits = run >= row.least and width % 2 == 0
        return Items(heads, width, run, 0, width // (2 * run), run, False, swaps=True) if fits else None

    half, rest = rotary // 2, width - rotary
    run = math.gcd(half, width // 2 if words else rest // 2, widest) if rotary else math.gcd(heads * width // 2, widest)
    if run < row.least or rotary % 2 or width % 2:
        return None
    if not rotary:
        return Items(heads * width // (2 * run), 2 * run, run, 0, 1, run, False)
    return Items(heads, width, run, half // run, width // (2 * run), width // 2 if words else half, words)


def ways_of(row: RowShape, whole_lines: bool = False) -> list[Items]:
    """Returns ways to cut rows into items, widest runs first; none where `items_of` finds none.

    Args:
      whole_lines: only runs that travel as exactly 128 bytes; where there are none, runs of 64 bytes joined.
    """
    cuts = (items_of(row, widest) for widest in (SWIZZLE, 64, 32))
    ways = list(dict.fromkeys(way for way in cuts if way is not None))
    if not whole_lines:
        return ways

    def length(way):
        return way.span * row.itemsize * (1 + way.words)

    joined = [way._replace(joined=True) for way in ways if way.neighbours]
    return [way for way in ways + joined if length(way) == SWIZZLE]


class LaunchPlan(NamedTuple):
    """How a launch is cut up.

    Attributes:
      groups: warpgroups that compute, 1 or 2; a block has 64 tokens for each.
      stages: items in flight.
      blocks: blocks that share the items of one tile of tokens.
    """

    groups: int
    stages: int
    blocks: int


class LaunchDtypes(NamedTuple):
    """Names of the dtypes that a launch reads and writes; "" for a dense correction that is not there.

    Attributes:
      source: of x. result: of what is written. dense: of the dense correction.
      scaled: x has scales.
    """

    source: str
    result: str
    dense: str = ""
    scaled: bool = False

    @property
    def itemsizes(self) -> tuple[int, int, int]:
        """Bytes of a channel of x, of the result, of the dense correction."""
        source, result, dense = (jnp.dtype(name).itemsize if name else 0 for name in self[:3])
        return source, result, dense

    @property
    def separate(self) -> bool:
        """Whether an item leaves from other shared memory than x came in."""
        return self.source != self.result


class Launch(NamedTuple):
    """Everything static about a launch. `rank` is padded."""

    items: Items
    plan: LaunchPlan
    tokens: int
    layers: int
    rank: int
    dtypes: LaunchDtypes

    @property
    def rows(self) -> int:
        """Tokens of a block."""
        return ROWS * self.plan.groups

    @property
    def total(self) -> int:
        """Items of one kind of one tile of tokens."""
        return self.layers * self.items.heads

    @property
    def share(self) -> int:
        """Items of a block."""
        return -(-self.total // self.plan.blocks)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tiles of tokens, kinds of item, blocks."""
        return -(-self.tokens // self.rows), self.items.kinds, self.plan.blocks

    @property
    def scales(self) -> int:
        """Scales that are fetched with a run."""
        return max(self.items.width, NARROWEST_SCALES)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that the buffers take."""
        channels = self.rows * 2 * self.items.width
        source, result, dense = self.dtypes.itemsizes
        v = 2 * self.rank * self.items.width * 2
        u = 2 * self.rows * self.rank * 2
        scales = -(-self.plan.stages * 2 * self.scales * 4 // 1024) * 1024 * self.dtypes.scaled
        out = 2 * channels * result * self.dtypes.separate
        swap = 2 * self.items.width * (self.items.width + self.rows) * self.items.swaps
        return self.plan.stages * (channels * (source + dense) + v) + u + scales + out + swap


CUTS = (((2, 6), (2, 5), (2, 4), (2, 3), (1, 6), (1, 5), (1, 4), (1, 3)), ((2, 2), (1, 2)))
"""Warpgroups and stages, best first: many tokens share v; two stages only where no width leaves room for more."""


def launch_of(
    ways: Sequence[Items], tokens: int, layers: int, rank: int, dtypes: LaunchDtypes, processors: int = PROCESSORS
) -> Launch | None:
    """Returns the first of `CUTS` that fits shared memory by any of the ways to cut rows; None if none does."""
    for cuts, items in itertools.product(CUTS, ways):
        for groups, stages in cuts:
            if groups > 1 and tokens <= ROWS:
                continue
            launch = Launch(items, LaunchPlan(groups, stages, 1), tokens, layers, rank, dtypes)
            if launch.shared_memory <= SHARED_MEMORY:
                return launch._replace(plan=LaunchPlan(groups, stages, blocks_of(launch, processors)))
    return None


def blocks_of(launch: Launch, processors: int = PROCESSORS) -> int:
    """Returns how many blocks share a tile's items so that the last processor ends earliest, by count of items."""
    tiles, kinds, _ = launch.grid

    def end(blocks: int) -> float:
        waves = -(-tiles * kinds * blocks // processors)
        return waves * (-(-launch.total // blocks) + STARTING)

    return min(range(1, launch.total + 1), key=end)
