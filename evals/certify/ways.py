"""Every way in which a batch of windows is served, beside what is promised.

All windows are [lead][piece] … [piece]. A way serves the last piece alone ("behind 0"), what stands in front being as
promised, or every piece ("behind n", n others). KV of pieces is phase-free; what is read is in the engine frame.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax import ops
from kvpatch_jax.patching import Accumulated, orders_of
from kvpatch_jax.plan import Promise
from kvpatch_jax.repair import SplicedCache, cacheblend, fraction_to_count

from ..arms import leading
from ..probes.window.image_sequence import KV, AgentLoop, Image, ImageSequence, bucket, cut, filled, on_host
from .windows import Windows

RANKS = (4, 8, 16, 32, 64)
PERCENT = 15
"""Of a chunk's tokens that CacheBlend computes again above its check layer."""
ORDERS = 6
"""Orders at most that an orbit patch is formed of."""


class Way(NamedTuple):
    """A way of serving: what a certified row is called by, and the cache that it gives."""

    point: str
    rank: int
    behind: int
    promise: Promise
    cache: KV


class Stage:
    """A batch of windows under one promise.

    Attributes:
      line: the lead and the pieces, in order.
      target: phase-free KV of each as promised. whole: the same in the engine frame.
      kept: the window that an agent's loop holds when these pieces have come, one by one, and older ones have left.
    """

    def __init__(self, windows: Windows, promise: Promise, kept: AgentLoop):
        """Prefills the window, or takes what the loop keeps."""
        self.windows, self.kept = windows, kept
        self.promise: Promise = promise
        self.line = ImageSequence(windows.backbone, [windows.lead, *windows.pieces])
        self.target = self.line.prefill() if promise == "forget" else self.kept.parts
        self.whole = self.line.engine(self.target)
        self.last = len(self.line) - 1

    def alone(self, piece: KV) -> KV:
        """The cache in which the last piece alone is served otherwise."""
        return self.line.with_served(self.whole, {self.last: piece})

    def every(self, pieces: Mapping[int, KV]) -> KV:
        """The cache in which all pieces are; the lead stays."""
        return self.line.with_served(self.whole, dict(pieces))

    @property
    def places(self) -> range:
        """Where the pieces stand."""
        return range(1, len(self.line))

    def held(self, parts: Mapping[int, KV], images: Mapping[int, Image] | None = None) -> AgentLoop:
        """What stands in front, with some of it served or shown otherwise: something to prefill behind."""
        loop = AgentLoop(self.windows.backbone, self.kept.room)
        shown = {**dict(enumerate(self.line.images)), **(images or {})}
        loop.held = [(shown[place], parts[place]) for place in sorted(parts)]
        return loop


def stages(windows: Windows) -> Iterator[Stage]:
    """The windows under either promise."""
    every = [*windows.older, *windows.pieces]
    largest = sorted((image.size for image in every), reverse=True)[: len(windows.pieces) + 1]
    loop = AgentLoop(windows.backbone, windows.lead.size + sum(largest), windows.lead)
    kept = loop.slid(every, len(windows.pieces), 1)
    for promise in get_args(Promise):
        yield Stage(windows, promise, kept)


def ways(stage: Stage, ranks: tuple[int, ...]) -> Iterator[Way]:
    """Every way of serving the windows, under the stage's promise."""
    line, last, promise, others = stage.line, stage.last, stage.promise, len(stage.windows.pieces) - 1
    if promise == "forget":
        loop = AgentLoop(stage.windows.backbone, stage.kept.room, stage.windows.lead)
        for piece in stage.windows.pieces:
            loop.append(piece)
        yield Way("prefill", 0, others, promise, line.engine(loop.parts))
        yield Way("survivor", 0, others, promise, line.engine(stage.kept.parts))

    bare = {place: line.serve(place) for place in stage.places}
    yield Way("bare", 0, 0, promise, stage.alone(bare[last]))
    yield Way("bare", 0, others, promise, stage.every(bare))
    yield Way("repair", PERCENT, 0, promise, _repaired(stage, stage.alone(bare[last]), [last]))
    yield Way("repair", PERCENT, others, promise, _repaired(stage, stage.every(bare), list(stage.places)))

    most = max(ranks)
    whole = {place: _patch(stage, place, stage.target[place], most) for place in stage.places}
    old = {place: _patch_of_another(stage, place, most) for place in stage.places[1:]}
    orders = _accumulated(stage) if promise == "forget" else None
    for rank in ranks:
        served = {place: line.serve(place, leading(patch, rank)) for place, patch in whole.items()}
        yield Way("stored", rank, 0, promise, stage.alone(served[last]))
        yield Way("stored", rank, others, promise, stage.every(served))

        updated = {place: _updated(stage, place, old[place], rank) for place in stage.places[1:]}
        now = {**served, **{place: line.serve(place, patch) for place, patch in updated.items()}}
        yield Way("update", rank, 0, promise, stage.alone(now[last]))
        yield Way("update", rank, others, promise, stage.every(now))
        if rank in fresh_ranks(ranks):
            yield Way("fresh", rank, others, promise, stage.every(_fresh(stage, rank)))
        if orders is not None:
            own = line.serve(last, kvp.orbit_patch(orders, rank, method="exact"))
            yield Way("orbit", rank, 0, promise, stage.alone(own))
            yield Way("orbit", rank, others, promise, stage.every({**served, last: own}))


def ways_of(ranks: tuple[int, ...]) -> int:
    """How many ways there are, both promises taken together."""
    return 10 + 10 * len(ranks) + 2 * len(fresh_ranks(ranks))


def fresh_ranks(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those at which a chain of patches is formed one behind the other, which takes longest: every other one."""
    return ranks[1::2] or ranks


def _patch(stage: Stage, place: int, conditioned: KV, most: int) -> kvp.Patch:
    """The best directions of a deficit, of which smaller ranks are the leading ones."""
    chunk = stage.line.images[place].chunk
    behind = stage.line.antecedent(place)
    return kvp.form_patch(chunk, of_chunk(chunk, conditioned), most, behind, method="exact", dense=False)


def _patch_of_another(stage: Stage, place: int, most: int) -> kvp.Patch:
    """A patch that was formed behind a window whose first piece was another one; all in between as it is."""
    front = {own: stage.target[own] for own in range(place)}
    other = stage.windows.other
    front[1] = stage.held({0: stage.target[0]}).prefill(other)
    chunk, behind = stage.line.images[place].chunk, stage.line.antecedent(place)
    kv = stage.held(front, {1: other}).prefill(stage.line.images[place])
    before = [behind[0], other.chunk.id, *behind[2:]]
    return kvp.form_patch(chunk, of_chunk(chunk, kv), most, before, method="exact", dense=False)


def of_chunk(chunk: kvp.Chunk, kv: KV) -> KV:
    """KV of a chunk's tokens, padded as the chunk is."""
    return {name: filled(value, chunk.tokens, 2) for name, value in kv.items()}


def _updated(stage: Stage, place: int, old: kvp.Patch, rank: int) -> kvp.Patch:
    """The patch of another window at a rank, brought up to date by a correction of that rank."""
    chunk, patch = stage.line.images[place].chunk, leading(old, rank)
    target = of_chunk(chunk, stage.target[place])
    correction = kvp.correction_patch(chunk, patch, target, rank, stage.line.antecedent(place))
    return kvp.update_patch(patch, correction)


def _fresh(stage: Stage, rank: int) -> dict[int, KV]:
    """Every piece by a patch that is formed of a prefill behind those in front, as they are served."""
    front, served = {0: stage.target[0]}, {}
    for place in stage.places:
        chunk = stage.line.images[place].chunk
        kv = stage.held(front).prefill(stage.line.images[place])
        patch = kvp.form_patch(chunk, of_chunk(chunk, kv), rank, stage.line.antecedent(place))
        metadata = patch.metadata
        added = ops.correction(chunk.layout, dict(patch.factors), layers=metadata.layers, heads=metadata.heads)
        kv = {name: jnp.asarray(value) + added.get(name, 0.0) for name, value in chunk.kv.items()}
        whole = on_host({name: value.astype(chunk.kv[name].dtype) for name, value in kv.items()})
        front[place] = cut(whole, slice(chunk.length))
        served[place] = stage.line.serve(place, patch)
    return served


def _accumulated(stage: Stage) -> Accumulated:
    """The last piece's deficits behind the pieces in front of it in other orders than they stand in."""
    line, last = stage.line, stage.last
    own = tuple(range(last - 1))
    total: Accumulated | None = None
    for order in orders_of(last - 1, ORDERS, hold_out=[own]):
        images = [line.images[0], *(line.images[1 + place] for place in order), line.images[last]]
        turned = ImageSequence(line.backbone, images)
        chunk = line.images[last].chunk
        total = kvp.accumulate(total, of_chunk(chunk, turned.prefill()[-1]), chunk, line.antecedent(last))
    assert total is not None
    return total


def _repaired(stage: Stage, cache: KV, places: list[int]) -> KV:
    """Pieces of a cache mended by CacheBlend, from the front."""
    line = stage.line
    room = bucket(line.backbone, line.size)
    cache = {name: filled(value, room, 2) for name, value in cache.items()}
    for place in places:
        where = line.slices[place]
        slots = np.broadcast_to(
            np.arange(where.start, where.stop), (len(line.tokens.embeddings), line.images[place].size)
        )
        own = on_host(line.tokens).take(where.start, where.stop)  # cut on the host, which compiles nothing
        tokens = jax.tree.map(jnp.asarray, own)._replace(positions=own.positions)
        held = {name: jnp.asarray(value) for name, value in cache.items()}
        count = fraction_to_count(PERCENT / 100, line.images[place].size)
        cache = dict(cacheblend(line.backbone, SplicedCache(tokens, held, jnp.asarray(slots)), count).cache)
    return cut(on_host(cache), slice(line.size))
