"""Every mode of serving a batch of windows, with what each promise promises.

All windows are [lead][piece] … [piece]. A mode serves the last piece alone ("behind 0"), with the others as promised,
or the last n + 1 pieces ("behind n"), as many as the windows of each size up to theirs have.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.cache import Likeness
from kvpatch_jax.core import bucket
from kvpatch_jax.patching import Accumulated
from kvpatch_jax.repair import METHODS, SplicedCache
from kvpatch_jax.window import Promise

from ..harness.lines import KV, GrowingWindow, Line, cut, padded
from ..harness.orders import orders_of
from .windows import WindowBatch

PERCENT = 15
"""Share of a chunk's tokens that CacheBlend recomputes above its check layer."""
ORDERS = 6
"""Largest number of orders that an orbit patch is formed of."""
MOST_REPAIRED = 8
"""Chunks of a window that are repaired at most: each takes as long as a prefill behind the whole window."""
HISTORIES = 3
"""Stored prefills that a mean is taken over."""
PROMISES: tuple[Promise, ...] = get_args(Promise)
LIKENESSES: tuple[Likeness, ...] = get_args(Likeness)
OPTIONAL_POINTS = ("survivor", "orbit", "update", "fresh", *LIKENESSES, "repair")
"""Points that a run may leave out; nothing is certified of them then."""


class Mode(NamedTuple):
    """A mode of serving, as the key of a certified row."""

    point: str
    rank: int
    behind: int
    promise: Promise


class ModeSet(NamedTuple):
    """The modes of a run: ranks of patches, ascending; chunks of the windows, ascending; points that are left out."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    skip: frozenset[str] = frozenset()

    def counts(self, size: int) -> tuple[int, ...]:
        """Returns how many of the last pieces modes serve in a window of so many: one, and as smaller windows have."""
        return (1, *(count for count in self.sizes if count <= size))

    @property
    def slides(self) -> tuple[int, ...]:
        """Slides after which survivors are measured: 1, 2, 4 … below the chunks of the largest window, and as many."""
        most = self.sizes[-1]
        return (*(1 << power for power in range((most - 1).bit_length())), most)


class PromisedBatch:
    """A batch of windows under one promise.

    Attributes:
      kept: the agent's window after these pieces came in one by one, and as many older ones left.
      target: phase-free KV of each piece of the line as promised. whole: the same in the engine frame.
    """

    def __init__(self, windows: WindowBatch, promise: Promise, kept: GrowingWindow):
        self.windows, self.kept = windows, kept
        self.promise: Promise = promise
        self.line = Line(windows.backbone, [windows.lead, *windows.pieces])
        self.target = self.line.prefill() if promise == "forget" else kept.parts
        self.whole = self.line.engine(self.target)
        self.places, self.last = range(1, len(self.line)), len(self.line) - 1

    def modes(self, modes: ModeSet) -> Iterator[tuple[Mode, KV]]:
        """Yields every mode with the engine-frame cache that it serves."""
        line, forgets = self.line, self.promise == "forget"
        counts = modes.counts(len(self.places))
        if forgets:
            loop = slid_window(self.windows, 0)
            yield Mode("prefill", 0, self.last - 1, self.promise), line.engine(loop.parts)
        for slides in modes.slides if forgets and "survivor" not in modes.skip else ():
            slid = self.kept if slides == self.last else slid_window(self.windows, slides)
            yield Mode("survivor", slides, self.last - 1, self.promise), line.engine(slid.parts)

        def served(point: str, rank: int, pieces: Mapping[int, KV]) -> Iterator[tuple[Mode, KV]]:
            for count in counts:
                replaced = {place: pieces[place] for place in self.places[-count:]}
                yield Mode(point, rank, count - 1, self.promise), line.with_served(self.whole, replaced)

        bare = {place: line.serve(place) for place in self.places}
        yield from served("bare", 0, bare)
        for likeness in (likeness for likeness in LIKENESSES if likeness not in modes.skip):
            kv = stored_prefills(self.windows)[likeness]
            rotated = line.engine([self.target[0], *(kv[place] for place in self.places)])
            yield from served(likeness, 0, dict(enumerate(line.parts(rotated))))
        for mode, cache in served("repair", PERCENT, bare) if "repair" not in modes.skip else ():
            if mode.behind < MOST_REPAIRED:
                yield mode, self._repaired(cache, self.places[-mode.behind - 1 :])

        # Patches are formed at the largest rank; smaller ones take its leading directions.
        most = modes.ranks[-1]
        patches = {place: self._patch(place, self.target[place], most) for place in self.places}
        outdated = {place: self._outdated(place, most) for place in self.places[1:] if "update" not in modes.skip}
        orders = self._orders() if forgets and "orbit" not in modes.skip else None
        for rank in modes.ranks:
            stored = {place: line.serve(place, leading(patch, rank)) for place, patch in patches.items()}
            yield from served("stored", rank, stored)
            if outdated:
                updates = {place: self._updated(place, patch, rank) for place, patch in outdated.items()}
                yield from served("update", rank, stored | updates)
            # Every other rank: patches that are formed one after the other take longest.
            for count in counts if rank in (modes.ranks[1::2] or modes.ranks) and "fresh" not in modes.skip else ():
                cache = line.with_served(self.whole, self._fresh(rank, self.places[-count:]))
                yield Mode("fresh", rank, count - 1, self.promise), cache
            if orders is not None:
                orbit = line.serve(self.last, kvp.orbit_patch(orders, rank, method="exact"))
                yield from served("orbit", rank, {**stored, self.last: orbit})

    def _patch(self, place: int, target: KV, rank: int, antecedent: Sequence[str] | None = None) -> kvp.Patch:
        """Forms a patch, by default behind the pieces in front."""
        piece, antecedent = self.line.pieces[place], antecedent or self.line.antecedent(place)
        return kvp.form_patch(
            piece.chunk, piece.padded(target), rank, antecedent, method="exact", dense=False, force=True
        )

    def _outdated(self, place: int, rank: int) -> kvp.Patch:
        """Forms a patch behind a window whose first piece was another one, with all between as it is."""
        windows, other = self.windows, self.windows.older[0]
        front = GrowingWindow(windows.backbone, windows.room, [windows.lead], self.target[:1])
        front.append(other)
        for between in range(2, place):
            front.append(self.line.pieces[between], self.target[between])
        lead, _, *rest = self.line.antecedent(place)
        return self._patch(place, front.prefill(self.line.pieces[place]), rank, [lead, other.chunk.id, *rest])

    def _updated(self, place: int, outdated: kvp.Patch, rank: int) -> KV:
        """Serves a piece by another window's patch at a rank, with a correction of that rank folded in."""
        piece, patch = self.line.pieces[place], leading(outdated, rank)
        target = piece.padded(self.target[place])
        correction = kvp.correction_patch(piece.chunk, patch, target, rank, self.line.antecedent(place))
        return self.line.serve(place, kvp.update_patch(patch, correction))

    def _fresh(self, rank: int, places: Sequence[int]) -> dict[int, KV]:
        """Serves the last pieces by patches formed of prefills behind the pieces in front, as those are served."""
        windows, first, served = self.windows, places[0], {}
        front = GrowingWindow(windows.backbone, windows.room, self.line.pieces[:first], self.target[:first])
        for place in places:
            piece = self.line.pieces[place]
            kv = piece.padded(front.prefill(piece))
            patch = kvp.form_patch(piece.chunk, kv, rank, self.line.antecedent(place), force=True)
            served[place] = self.line.serve(place, patch)
            front.append(piece, piece.patched(patch))
        return served

    def _orders(self) -> Accumulated | None:
        """Accumulates the last piece's deficits behind the other pieces in orders other than their own."""
        line, last, total = self.line, self.last, None
        piece = line.pieces[last]
        for order in orders_of(last - 1, ORDERS, hold_out=[tuple(range(last - 1))]):
            front = [line.pieces[0], *(line.pieces[1 + place] for place in order)]
            kv = Line(line.backbone, [*front, piece]).prefill()[-1]
            total = kvp.accumulate(total, piece.padded(kv), piece.chunk, line.antecedent(last))
        return total

    def _repaired(self, cache: KV, places: Sequence[int]) -> KV:
        """Repairs pieces of a cache by CacheBlend, from the front."""
        line = self.line
        served = padded(cache, bucket(line.backbone.buckets, line.size))
        for place in places:
            where, piece = line.slices[place], line.pieces[place]
            slots = np.broadcast_to(np.arange(where.start, where.stop), (len(self.windows.clusters), piece.size))
            tokens = piece.tokens.shift(line.starts[place]).pad(piece.size)
            splice = SplicedCache(tokens, {name: jnp.asarray(kv) for name, kv in served.items()}, jnp.asarray(slots))
            served = cut(METHODS["cacheblend"](line.backbone, splice, PERCENT / 100).cache, slice(None))
        return cut(served, slice(line.size))


def slid_window(windows: WindowBatch, slides: int) -> GrowingWindow:
    """Returns the agent's window of a batch's pieces after so many older ones left, each when another piece came in."""
    loop = GrowingWindow(windows.backbone, windows.room)
    loop.append(windows.lead)
    older = windows.older[len(windows.older) - slides :]
    return loop.slide([*older, *windows.pieces], len(windows.pieces))


@functools.lru_cache(maxsize=1)
def stored_prefills(windows: WindowBatch) -> dict[str, dict[int, KV]]:
    """Prefills every piece behind other histories, as a store finds prefills again; phase-free KV by place.

    "near": behind the same lead, unrelated pieces and the piece that is nearest here, in all as many as here; of the
    first piece, whose nearest is the lead, an unrelated one. "mean": the mean of several of those.
    """
    pieces, older, fronts = windows.pieces, windows.older, list[GrowingWindow]()
    for first in (number * max(1, len(older) // HISTORIES) for number in range(HISTORIES)):
        unrelated = [older[(first + place) % len(older)] for place in range(max(1, len(pieces) - 1))]
        fronts.append(GrowingWindow(windows.backbone, windows.room).slide([windows.lead, *unrelated], len(pieces)))

    stored: dict[str, dict[int, KV]] = {"near": {}, "mean": {}}
    for place, piece in enumerate(pieces, 1):
        several = []
        for front in fronts[:1] if place == 1 else fronts:
            count = 1 + max(1, place - 2)
            history = GrowingWindow(windows.backbone, windows.room, front.pieces[:count], front.parts[:count])
            if place > 1:
                history.append(pieces[place - 2])
            several.append(history.prefill(piece))
        stored["near"][place], stored["mean"][place] = several[0], {}
        for name, value in several[0].items():
            total = sum(kv[name].astype(np.float32) for kv in several)
            stored["mean"][place][name] = np.asarray(total / np.float32(len(several))).astype(value.dtype)
    return stored


def leading(patch: kvp.Patch, rank: int) -> kvp.Patch:
    """Keeps the best `rank` of a patch's factors; narrower channels keep all they have."""
    return kvp.truncate(patch, {name: min(rank, have) for name, have in patch.ranks.items() if have})
