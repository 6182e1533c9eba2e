"""A page reused behind other images: what was cached of it, its patches, and the caches that questions are read from.

Axis letters: B contexts, T tokens, L layers, K KV heads, H head width. Phase-free KV is KV without positions; the
engine frame is KV at its positions, as a decoder reads it.
"""

import dataclasses
import functools
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import PARTS, AnyArray, compose, fold, transition_of
from kvpatch_jax.repair import SplicedCache
from models import ModelBackbone

from ..results.costs import ChunkCosts, input_width
from ..rules import RULES
from ..small_task.prefix import Prefix

KV = dict[str, Float[Array, "_ B _ _ _"]]
"""{channel: [L, B, T, K, H]}; of a hybrid model also the parts of a transition, with their own rows in place of T."""


@dataclasses.dataclass(eq=False)
class ReusedPage:
    """A batch of contexts whose last chunk, the page, is reused behind the others.

    Attributes:
      backbone: reads the contexts.
      contexts: what the images mean.
      form: how the images are laid out as tokens.
      chunks: the canonicals by their place in the prefix, the page last; each is a batch.
      starts: the position at which each chunk is placed, int32, a scalar or one per axis.
      tokens: the prefix where it is served.
      alone: the page's tokens, with positions from its own start.
      conditioned: phase-free KV of the prefix, prefilled whole; its rows alone.
      reference: the prefix in the engine frame, as re-prefill leaves it.
      front: the cache, in the engine frame, in which arms replace the page.
      transitions: of a hybrid model, the transition of each chunk's own tokens behind those in front of it.
    """

    backbone: ModelBackbone
    contexts: Any
    form: Prefix
    chunks: tuple[kvp.Chunk, ...]
    starts: tuple[Any, ...]
    tokens: Tokens
    alone: Tokens
    conditioned: KV
    reference: KV
    front: KV
    transitions: tuple[KV, ...] = ()

    def __post_init__(self) -> None:
        # Two threads may ask for patches of one page.
        self._largest, self._factorising = dict[tuple[int, bool, str | None], kvp.Patch](), threading.Lock()
        self._encoded = dict[str, kvp.Chunk]()

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def page(self) -> kvp.Chunk:
        """The page's canonical."""
        return self.chunks[-1]

    @property
    def slots(self) -> slice:
        """Where the page stands in the prefix."""
        return self.form.page

    @property
    def antecedent(self) -> tuple[str, ...]:
        """Ids of the chunks in front of the page, in order."""
        return self.antecedent_of(len(self.chunks) - 1)

    def antecedent_of(self, place: int) -> tuple[str, ...]:
        """Lists the ids of the chunks in front of a place."""
        return tuple(chunk.id for chunk in self.chunks[:place])

    @functools.cached_property
    def page_conditioned(self) -> KV:
        """The page's part of the conditioned KV."""
        return self.conditioned_at(len(self.chunks) - 1)

    def conditioned_at(self, place: int) -> KV:
        """Returns a chunk's part of the conditioned KV, its own transition included."""
        own = cut(self.conditioned, self.form.slices[place])
        return {**own, **self.transitions[place]} if self.transitions else own

    @property
    def delta(self) -> KV:
        """The page's deficit, phase-free."""
        return difference(self.page_conditioned, self.page.kv)

    @property
    def rotated_delta(self) -> KV:
        """The page's deficit in the engine frame, where the paper's listing takes it."""
        return difference(cut(self.reference, self.slots), self.placed())

    @functools.cached_property
    def costs(self) -> ChunkCosts:
        """The chunk that shares of cost refer to: the page."""
        tokens, width = self.slots.stop - self.slots.start, input_width(self.tokens)
        return ChunkCosts(self.backbone.forward_costs, self.backbone.layout, tokens, self.slots.start, width)

    def patch(self, rank: int, place: int = -1, *, rotated: bool = False, encoding: str | None = None) -> kvp.Patch:
        """Forms the patch of a chunk behind those in front of it, by a full SVD.

        Args:
          place: of the chunk; the page by default.
          rotated: in the engine frame, after the rotation, as the paper does.
          encoding: of the page's canonical, whose decoded numbers the patch is a patch of.
        """
        place %= len(self.chunks)
        # Factors are kept even where they are no smaller than the deficit, so that every smaller rank is a slice of
        # the largest: the SVD is done once per chunk.
        with self._factorising:
            if (place, rotated, encoding) not in self._largest:
                where: dict[str, Any] = {"frame": "engine", "start": self.starts[place]} if rotated else {}
                chunk = self.chunks[place] if encoding is None else self.encoded(encoding)
                self._largest[place, rotated, encoding] = kvp.form_patch(
                    chunk,
                    self.conditioned_at(place),
                    max(RULES.arms.ranks),
                    self.antecedent_of(place),
                    method="exact",
                    dense=False,
                    **where,
                )

        return leading(self._largest[place, rotated, encoding], rank)

    def encoded(self, word: str) -> kvp.Chunk:
        """Returns the page's canonical in an encoding."""
        if word not in self._encoded:
            self._encoded[word] = kvp.encode_chunk(self.page, word)
        return self._encoded[word]

    def placed(self, patch: kvp.Patch | None = None, place: int = -1, *, allow_stale: bool = False) -> KV:
        """Places a cached chunk in the engine frame, rotated and patched, without a forward pass."""
        place %= len(self.chunks)
        antecedent = self.antecedent_of(place)
        chunk, start = self.chunks[place], self.starts[place]
        if patch is not None and patch.metadata.encoding is not None:
            chunk = self.encoded(patch.metadata.encoding)
        return dict(kvp.apply_patch(kvp.Placed(chunk, patch, start, antecedent, allow_stale=allow_stale)))

    def cache(self, patch: kvp.Patch | None = None, *, allow_stale: bool = False) -> KV:
        """Makes a cache of the prefix in the engine frame with the page reused."""
        return self._with_page(self.placed(patch, allow_stale=allow_stale))

    def cache_of_chunks(self, patches: Mapping[int, kvp.Patch]) -> KV:
        """Makes a cache in which several chunks, by their places, are reused with their patches."""
        pieces = []
        for place, where in enumerate(self.form.slices):
            # What is in front of the page is cut out of a cache; a transition of its own cannot be.
            if place in patches or self.transitions:
                pieces.append(self.placed(patches.get(place), place))
            else:
                pieces.append(cut(self.front, where))
        return joined(pieces)

    def served(self, kv: Mapping[str, Array]) -> KV:
        """Makes a cache of the prefix with this phase-free KV as the page's."""
        positions = np.asarray(self.tokens.positions)[:, self.slots]
        return self._with_page(dict(kvp.to_engine(self.page.layout, dict(kv), positions, 0)))

    @property
    def context_in_front(self) -> KV:
        """The cache of what is in front of the page, as it is served."""
        if not self.transitions:
            return cut(self.front, slice(self.slots.start))
        rows = {channel.name for channel in self.page.layout.token_channels}
        front = cut({name: value for name, value in self.front.items() if name in rows}, slice(self.slots.start))
        return {**front, **self._transition_in_front}

    def splice(self) -> SplicedCache:
        """Makes what token repairs start from: the blind cache and the page's tokens."""
        first, last = self.slots.start, self.slots.stop
        slots = np.broadcast_to(np.arange(first, last), (len(self), last - first))
        own = self.tokens.take(first, last)
        conditioned = self.page_conditioned
        return SplicedCache(own, self.cache(), jnp.asarray(slots), conditioned=conditioned, recorded=conditioned)

    @functools.cached_property
    def _transition_in_front(self) -> KV:
        """The composed transition of the chunks in front of the page, as they are served."""
        return fold([transition_of(self.placed(place=place)) for place in range(len(self.chunks) - 1)])

    def _with_page(self, page: KV) -> KV:
        if not self.transitions:
            return _join_page(self.front, page, self.slots.start)
        own = transition_of(page)
        rows = [{name: value for name, value in kv.items() if name not in own} for kv in (self.front, page)]
        return {**_join_page(*rows, self.slots.start), **_jitted_compose(self._transition_in_front, own)}


@functools.partial(jax.jit, static_argnames=("start",))
def _join_page(prefix: KV, page: KV, start: int) -> KV:
    return {name: jnp.concatenate([value[:, :, :start], page[name]], axis=2) for name, value in prefix.items()}


_jitted_compose = jax.jit(compose)


def chunk_of(
    backbone: Any, kv: Mapping[str, AnyArray], local: np.ndarray, id: str, content: str | None = None
) -> kvp.Chunk:
    """Makes a chunk, or a batch of chunks, of phase-free KV whose tokens stand at `local`, counted from its start."""
    return kvp.Chunk(
        kv=dict(kv),
        local=local,
        span=int(local.max()) + 1,
        length=len(local),
        id=id,
        layout=backbone.layout,
        backbone=backbone.fingerprint,
        content=content,
    )


def cut(kv: Mapping[str, Any], where: slice) -> dict[str, Any]:
    """Cuts some tokens out of KV {channel: [L, B, T, K, H]}, on the host or on a device."""
    return {name: value[:, :, where] for name, value in kv.items()}


def joined(pieces: list[KV]) -> KV:
    """Joins pieces of KV behind one another, along their tokens; transitions are composed."""
    whole = {}
    for name in pieces[0]:
        if name not in PARTS:
            whole[name] = jnp.concatenate([piece[name] for piece in pieces], axis=2)
    # Every image has as many tokens as a convolution reads.
    composed = fold([transition_of(piece) for piece in pieces]) if "map" in pieces[0] else {}
    return {**whole, **composed}


def difference(first: Mapping[str, AnyArray], second: Mapping[str, AnyArray]) -> KV:
    """Computes first − second in float32, channel by channel."""
    return {name: jnp.asarray(first[name], jnp.float32) - jnp.asarray(second[name], jnp.float32) for name in first}


def leading(patch: kvp.Patch, rank: int) -> kvp.Patch:
    """Keeps the best `rank` of a patch's factors; narrower channels keep all they have."""
    return kvp.truncate(patch, {name: min(rank, have) for name, have in patch.ranks.items() if have})
