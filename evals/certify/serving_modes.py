"""Every mode of serving a batch of windows, with the promised cache.

All windows are [lead][piece] … [piece]. A mode serves the last piece alone ("behind 0"), with the others as promised,
or every piece ("behind n", n others). KV of pieces is phase-free; caches that are read are in the engine frame.
"""

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
from .window_sources import WindowBatch

RANKS = (4, 8, 16, 32, 64)
PERCENT = 15
"""Share of a chunk's tokens that CacheBlend recomputes above its check layer."""
ORDERS = 6
"""Largest number of orders that an orbit patch is formed of."""


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
      kept: the agent's window after these pieces came in, one by one, and older ones left.
      places: of the pieces in the line. last: the last of them.
    """

    def __init__(self, windows: WindowBatch, promise: Promise, kept: AgentLoop):
        """Prefills the window ("forget"), or takes what the agent's window keeps ("remember")."""
        self.windows, self.kept = windows, kept
        self.promise: Promise = promise
        self.line = ImageSequence(windows.backbone, [windows.lead, *windows.pieces])
        self.target = self.line.prefill() if promise == "forget" else kept.parts
        self.whole = self.line.engine(self.target)
        self.places = range(1, len(self.line))
        self.last = len(self.line) - 1

    def with_last(self, piece: KV) -> KV:
        """Returns the cache with the last piece replaced."""
        return self.line.with_served(self.whole, {self.last: piece})

    def with_all(self, pieces: Mapping[int, KV]) -> KV:
        """Returns the cache with all pieces replaced; the lead stays."""
        return self.line.with_served(self.whole, dict(pieces))

    def holding(self, parts: Mapping[int, KV], images: Mapping[int, Image] | None = None) -> AgentLoop:
        """Returns a window of some pieces with the given KV, to prefill behind; `images` replace the batch's own."""
        loop = AgentLoop(self.windows.backbone, self.kept.room)
        shown = {**dict(enumerate(self.line.images)), **(images or {})}
        loop.held = [(shown[place], parts[place]) for place in sorted(parts)]
        return loop


def served_batches(windows: WindowBatch) -> Iterator[ServedBatch]:
    """Yields the windows under each promise."""
    images = [*windows.older, *windows.pieces]
    largest = sorted((image.size for image in images), reverse=True)[: len(windows.pieces) + 1]
    loop = AgentLoop(windows.backbone, windows.lead.size + sum(largest), windows.lead)
    kept = loop.slid(images, len(windows.pieces), 1)
    for promise in get_args(Promise):
        yield ServedBatch(windows, promise, kept)


def serving_modes(batch: ServedBatch, ranks: tuple[int, ...]) -> Iterator[ServingMode]:
    """Yields every mode of serving the windows under the batch's promise."""
    line, last, promise, others = batch.line, batch.last, batch.promise, len(batch.windows.pieces) - 1
    if promise == "forget":
        loop = AgentLoop(batch.windows.backbone, batch.kept.room, batch.windows.lead)
        for piece in batch.windows.pieces:
            loop.append(piece)
        yield ServingMode("prefill", 0, others, promise, line.engine(loop.parts))
        yield ServingMode("survivor", 0, others, promise, line.engine(batch.kept.parts))

    bare = {place: line.serve(place) for place in batch.places}
    one_bare, all_bare = batch.with_last(bare[last]), batch.with_all(bare)
    yield ServingMode("bare", 0, 0, promise, one_bare)
    yield ServingMode("bare", 0, others, promise, all_bare)
    yield ServingMode("repair", PERCENT, 0, promise, _repaired(batch, one_bare, [last]))
    yield ServingMode("repair", PERCENT, others, promise, _repaired(batch, all_bare, batch.places))

    # Patches are formed at the largest rank; smaller ones take its leading directions.
    most = max(ranks)
    whole = {place: _patch(batch, place, most) for place in batch.places}
    outdated = {place: _patch_behind_other(batch, place, most) for place in batch.places[1:]}
    orders = _accumulated(batch) if promise == "forget" else None

    for rank in ranks:
        stored = {place: line.serve(place, leading(patch, rank)) for place, patch in whole.items()}
        yield ServingMode("stored", rank, 0, promise, batch.with_last(stored[last]))
        yield ServingMode("stored", rank, others, promise, batch.with_all(stored))

        updates = {place: _updated(batch, place, patch, rank) for place, patch in outdated.items()}
        updated = {**stored, **{place: line.serve(place, patch) for place, patch in updates.items()}}
        yield ServingMode("update", rank, 0, promise, batch.with_last(updated[last]))
        yield ServingMode("update", rank, others, promise, batch.with_all(updated))

        if rank in fresh_ranks(ranks):
            yield ServingMode("fresh", rank, others, promise, batch.with_all(_fresh(batch, rank)))

        if orders is not None:
            orbit = line.serve(last, kvp.orbit_patch(orders, rank, method="exact"))
            yield ServingMode("orbit", rank, 0, promise, batch.with_last(orbit))
            yield ServingMode("orbit", rank, others, promise, batch.with_all({**stored, last: orbit}))


def mode_count(ranks: tuple[int, ...]) -> int:
    """Returns how many modes there are, of both promises together."""
    return 10 + 10 * len(ranks) + 2 * len(fresh_ranks(ranks))


def fresh_ranks(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Returns every other rank: those at which patches are formed one behind the other, which takes longest."""
    return ranks[1::2] or ranks


def padded_to_chunk(chunk: kvp.Chunk, kv: KV) -> KV:
    """Pads the KV of a chunk's tokens as the chunk is padded."""
    return {name: filled(value, chunk.tokens, 2) for name, value in kv.items()}


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


def _fresh(batch: ServedBatch, rank: int) -> dict[int, KV]:
    """Serves each piece by a patch formed of its prefill behind the pieces in front, as those are served."""
    front, served = {0: batch.target[0]}, {}
    for place in batch.places:
        image = batch.line.images[place]
        chunk = image.chunk
        kv = padded_to_chunk(chunk, batch.holding(front).prefill(image))
        patch = kvp.form_patch(chunk, kv, rank, batch.line.antecedent(place))
        served[place] = batch.line.serve(place, patch)

        # The next piece is prefilled behind the patched KV: canonical plus correction, rounded to the chunk's type.
        metadata = patch.metadata
        added = ops.correction(chunk.layout, dict(patch.factors), layers=metadata.layers, heads=metadata.heads)
        patched = {name: jnp.asarray(value) + added.get(name, 0.0) for name, value in chunk.kv.items()}
        whole = on_host({name: value.astype(chunk.kv[name].dtype) for name, value in patched.items()})
        front[place] = cut(whole, slice(chunk.length))

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
