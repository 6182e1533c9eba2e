"""Every mode of serving a batch of windows, with the promised cache.

All windows are [lead][piece] … [piece]. A mode serves the last piece alone ("behind 0"), with the others as promised,
or the last n + 1 pieces ("behind n", n others), as many as the windows of each size up to theirs have. KV of pieces is
phase-free; caches that are read are in the engine frame.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax import ops
from kvpatch_jax.patching import Accumulated, orders_of
from kvpatch_jax.repair import SplicedCache, cacheblend
from kvpatch_jax.window import Promise

from ..arms import leading
from ..probes.window.image_sequence import KV, AgentLoop, Image, ImageSequence, bucket, cut, filled, on_host
from .other_histories import LIKENESSES, StoredPieces, stored_pieces
from .window_sources import WindowBatch

RANKS = (4, 8, 16, 32, 64)
PERCENT = 15
"""Share of a chunk's tokens that CacheBlend recomputes above its check layer."""
ORDERS = 6
"""Largest number of orders that an orbit patch is formed of."""
MOST_REPAIRED = 8
"""Chunks of a window that are repaired at most: each of them takes as long as a prefill behind the whole window."""
OPTIONAL_POINTS = ("survivor", "orbit", "update", "fresh", "mean", "near", "repair")
"""Points that a run may leave out; nothing is certified of them then."""


@dataclasses.dataclass(frozen=True)
class ModeSet:
    """The modes of serving that a run measures.

    Attributes:
      ranks: of patches, ascending.
      sizes: chunks of the windows of the run, ascending.
      skip: points that are left out.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    skip: frozenset[str] = frozenset()

    @property
    def fresh_ranks(self) -> tuple[int, ...]:
        """Every other rank: those at which patches are formed one behind the other, which takes longest."""
        return self.ranks[1::2] or self.ranks

    @property
    def slides(self) -> tuple[int, ...]:
        """Slides after which survivors are measured: 1, 2, 4 … below the chunks of the largest window, and as many."""
        most = self.sizes[-1]
        return (*(1 << power for power in range((most - 1).bit_length())), most)

    def counts(self, size: int) -> tuple[int, ...]:
        """Returns how many of the last pieces modes serve in a window of so many: one, and as smaller windows have."""
        return (1, *(own for own in self.sizes if own <= size))

    def repaired(self, size: int) -> tuple[int, ...]:
        """Returns the `counts` of token repairs."""
        return tuple(count for count in self.counts(size) if count <= MOST_REPAIRED)

    def number(self, size: int) -> int:
        """Returns how many modes a window of so many chunks is served in, under both promises together."""
        counts, ranks = len(self.counts(size)), len(self.ranks)
        both = {
            "bare": counts,
            "stored": counts * ranks,
            "update": counts * ranks,
            "fresh": (counts - 1) * len(self.fresh_ranks),
            "repair": len(self.repaired(size)),
            **dict.fromkeys(LIKENESSES, counts),
        }
        forget = {"prefill": 1, "survivor": len(self.slides), "orbit": counts * ranks}
        return sum((2 if point in both else 1) * count for point, count in (both | forget).items() if self.has(point))

    def has(self, point: str) -> bool:
        """Returns whether a point is measured."""
        return point not in self.skip


class ServingMode(NamedTuple):
    """A mode of serving: the key of a certified row, and the cache that it gives."""

    point: str
    rank: int
    behind: int
    promise: Promise
    cache: KV


class ServedBatch:
    """A batch of windows under one promise.

    Attributes:
      windows: the batch. promise: of its windows.
      line: the lead and the pieces, in order.
      target: phase-free KV of each as promised. whole: the same in the engine frame.
      kept: the agent's window after these pieces came in, one by one, and as many older ones left.
      stored: the pieces' prefills behind other histories.
      places: of the pieces in the line. last: the last of them.
    """

    def __init__(self, windows: WindowBatch, promise: Promise, kept: AgentLoop, stored: Sequence[StoredPieces]):
        """Prefills the window ("forget"), or takes what the agent's window keeps ("remember")."""
        self.windows, self.kept, self.stored = windows, kept, stored
        self.promise: Promise = promise
        self.line = ImageSequence(windows.backbone, [windows.lead, *windows.pieces])
        self.target = self.line.prefill() if promise == "forget" else kept.parts
        self.whole = self.line.engine(self.target)
        self.places = range(1, len(self.line))
        self.last = len(self.line) - 1

    @property
    def size(self) -> int:
        """Chunks of a window, the lead not counted."""
        return len(self.windows.pieces)

    def with_pieces(self, pieces: Mapping[int, KV]) -> KV:
        """Returns the cache with some pieces replaced; the lead stays."""
        return self.line.with_served(self.whole, dict(pieces))

    def holding(self, parts: Mapping[int, KV], images: Mapping[int, Image] | None = None) -> AgentLoop:
        """Returns a window of some pieces with the given KV, to prefill behind; `images` replace the batch's own."""
        loop = AgentLoop(self.windows.backbone, self.kept.room)
        shown = {**dict(enumerate(self.line.images)), **(images or {})}
        loop.held = [(shown[place], parts[place]) for place in sorted(parts)]
        return loop


def served_batches(windows: WindowBatch, modes: ModeSet) -> Iterator[ServedBatch]:
    """Yields the windows under each promise."""
    room = room_of(windows)
    kept = slid_window(windows, len(windows.pieces), room)

    stored = []
    if any(modes.has(likeness) for likeness in LIKENESSES):
        stored = [own for own in stored_pieces(windows, room) if modes.has(own.likeness)]
    for promise in get_args(Promise):
        yield ServedBatch(windows, promise, kept, stored)


def room_of(windows: WindowBatch) -> int:
    """Returns the tokens that every window of a batch is padded to, with one piece more than it shows."""
    largest = sorted((image.size for image in (*windows.older, *windows.pieces)), reverse=True)
    return windows.lead.size + sum(largest[: len(windows.pieces) + 1])


def slid_window(windows: WindowBatch, slides: int, room: int) -> AgentLoop:
    """Returns the agent's window of a batch's pieces after as many older ones left, each when another piece came in."""
    loop = AgentLoop(windows.backbone, room, windows.lead)
    return loop.slid([*windows.older[-slides:], *windows.pieces], len(windows.pieces), 1)


def serving_modes(batch: ServedBatch, modes: ModeSet) -> Iterator[ServingMode]:
    """Yields every mode of serving the windows under the batch's promise."""
    line, last, promise, counts = batch.line, batch.last, batch.promise, modes.counts(batch.size)
    if promise == "forget":
        yield from _sliding(batch, modes)

    def served(point: str, rank: int, pieces: Mapping[int, KV]) -> Iterator[ServingMode]:
        for count in counts:
            replaced = {place: pieces[place] for place in batch.places[-count:]}
            yield ServingMode(point, rank, count - 1, promise, batch.with_pieces(replaced))

    bare = {place: line.serve(place) for place in batch.places}
    yield from served("bare", 0, bare)
    for likeness, kv in batch.stored:
        rotated = line.parts(line.engine([batch.target[0], *(kv[place] for place in batch.places)]))
        yield from served(likeness, 0, dict(enumerate(rotated)))
    for count in modes.repaired(batch.size) if modes.has("repair") else ():
        places = batch.places[-count:]
        cache = _repaired(batch, batch.with_pieces({place: bare[place] for place in places}), places)
        yield ServingMode("repair", PERCENT, count - 1, promise, cache)

    # Patches are formed at the largest rank; smaller ones take its leading directions.
    most = max(modes.ranks)
    whole = {place: _patch(batch, place, most) for place in batch.places}
    outdated: dict[int, kvp.Patch] = {}
    if modes.has("update"):
        outdated = {place: _patch_behind_other(batch, place, most) for place in batch.places[1:]}
    orders = _accumulated(batch) if promise == "forget" and modes.has("orbit") else None

    for rank in modes.ranks:
        stored = {place: line.serve(place, leading(patch, rank)) for place, patch in whole.items()}
        yield from served("stored", rank, stored)

        if outdated:
            updates = {place: _updated(batch, place, patch, rank) for place, patch in outdated.items()}
            updated = {**stored, **{place: line.serve(place, patch) for place, patch in updates.items()}}
            yield from served("update", rank, updated)

        if rank in modes.fresh_ranks and modes.has("fresh"):
            for count in counts[1:]:
                cache = batch.with_pieces(_fresh(batch, rank, batch.places[-count:]))
                yield ServingMode("fresh", rank, count - 1, promise, cache)

        if orders is not None:
            orbit = line.serve(last, kvp.orbit_patch(orders, rank, method="exact"))
            yield from served("orbit", rank, {**stored, last: orbit})


def _sliding(batch: ServedBatch, modes: ModeSet) -> Iterator[ServingMode]:
    """Yields windows that were prefilled piece by piece, and that slid so often."""
    windows, line, others = batch.windows, batch.line, batch.size - 1
    loop = AgentLoop(windows.backbone, batch.kept.room, windows.lead)
    for piece in windows.pieces:
        loop.append(piece)
    yield ServingMode("prefill", 0, others, batch.promise, line.engine(loop.parts))

    for slides in modes.slides if modes.has("survivor") else ():
        slid = batch.kept if slides == batch.size else slid_window(windows, slides, batch.kept.room)
        yield ServingMode("survivor", slides, others, batch.promise, line.engine(slid.parts))


def padded_to_chunk(chunk: kvp.Chunk, kv: KV) -> KV:
    """Pads the KV of a chunk's tokens as the chunk is padded."""
    return {name: filled(value, chunk.tokens, 2) for name, value in kv.items()}


def patched_kv(chunk: kvp.Chunk, patch: kvp.Patch) -> KV:
    """Returns the phase-free KV that a patch serves: canonical plus correction, rounded to the chunk's type."""
    metadata = patch.metadata
    added = ops.correction(chunk.layout, dict(patch.factors), layers=metadata.layers)
    patched = {name: jnp.asarray(value) + added.get(name, 0.0) for name, value in chunk.kv.items()}
    whole = on_host({name: value.astype(chunk.kv[name].dtype) for name, value in patched.items()})
    return cut(whole, slice(chunk.length))


def _patch(batch: ServedBatch, place: int, rank: int) -> kvp.Patch:
    chunk, antecedent = batch.line.images[place].chunk, batch.line.antecedent(place)
    kv = padded_to_chunk(chunk, batch.target[place])
    return kvp.form_patch(chunk, kv, rank, antecedent, method="exact", dense=False)


def _patch_behind_other(batch: ServedBatch, place: int, rank: int) -> kvp.Patch:
    """Returns a patch formed behind a window whose first piece was another one, with all between as it is."""
    other, image = batch.windows.other, batch.line.images[place]
    front = {own: batch.target[own] for own in range(place)}
    front[1] = batch.holding({0: batch.target[0]}).prefill(other)
    kv = batch.holding(front, {1: other}).prefill(image)

    ids = batch.line.antecedent(place)
    antecedent = [ids[0], other.chunk.id, *ids[2:]]
    kv = padded_to_chunk(image.chunk, kv)
    return kvp.form_patch(image.chunk, kv, rank, antecedent, method="exact", dense=False)


def _updated(batch: ServedBatch, place: int, outdated: kvp.Patch, rank: int) -> kvp.Patch:
    """Returns another window's patch at a rank, with a correction of that rank folded in."""
    chunk, patch = batch.line.images[place].chunk, leading(outdated, rank)
    target = padded_to_chunk(chunk, batch.target[place])
    correction = kvp.correction_patch(chunk, patch, target, rank, batch.line.antecedent(place))
    return kvp.update_patch(patch, correction)


def _fresh(batch: ServedBatch, rank: int, places: Sequence[int]) -> dict[int, KV]:
    """Serves the last pieces by patches formed of their prefills behind the pieces in front, as those are served."""
    front, served = {place: batch.target[place] for place in range(places[0])}, {}
    for place in places:
        image = batch.line.images[place]
        chunk = image.chunk
        kv = padded_to_chunk(chunk, batch.holding(front).prefill(image))
        patch = kvp.form_patch(chunk, kv, rank, batch.line.antecedent(place))
        served[place] = batch.line.serve(place, patch)

        # The next piece is prefilled behind the patched KV.
        front[place] = patched_kv(chunk, patch)

    return served


def _accumulated(batch: ServedBatch) -> Accumulated:
    """Accumulates the last piece's deficits behind the other pieces in orders other than their own."""
    line, last = batch.line, batch.last
    image, own = line.images[last], tuple(range(last - 1))
    total: Accumulated | None = None

    for order in orders_of(last - 1, ORDERS, hold_out=[own]):
        front = [line.images[0], *(line.images[1 + place] for place in order)]
        kv = ImageSequence(line.backbone, [*front, image]).prefill()[-1]
        total = kvp.accumulate(total, padded_to_chunk(image.chunk, kv), image.chunk, line.antecedent(last))

    assert total is not None
    return total


def _repaired(batch: ServedBatch, cache: KV, places: Sequence[int]) -> KV:
    """Repairs pieces of a cache by CacheBlend, from the front."""
    line = batch.line
    room = bucket(line.backbone, line.size)
    cache = {name: filled(value, room, 2) for name, value in cache.items()}

    for place in places:
        where, size = line.slices[place], line.images[place].size
        slots = np.broadcast_to(np.arange(where.start, where.stop), (len(line.tokens.embeddings), size))
        own = on_host(line.tokens).take(where.start, where.stop)  # cut on the host, which compiles nothing
        tokens = jax.tree.map(jnp.asarray, own)._replace(positions=own.positions)
        held = {name: jnp.asarray(value) for name, value in cache.items()}
        splice = SplicedCache(tokens, held, jnp.asarray(slots))
        cache = dict(cacheblend(line.backbone, splice, PERCENT / 100).cache)

    return cut(on_host(cache), slice(line.size))
