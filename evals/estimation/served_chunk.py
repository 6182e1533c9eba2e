"""A chunk behind its antecedents as a server has it: the canonical and the antecedents' KV, and no conditioned KV.

Estimators take a `ServedChunk`, which does not hold the true deficit; what is measured beside it is a `MeasuredChunk`.
Axis letters: B contexts, T tokens of the chunk, S keys in front, L layers, K KV heads, H head width, F = K·H, D model
width, N heads.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens

from ..arms.reused_page import KV, ReusedPage, chunk_of, cut, difference, joined
from ..results.costs import ChunkCosts
from ..small_task.scenes import Answers

Deficit = Mapping[str, Float[np.ndarray, "L B T _ _"]]
"""A deficit {channel: [L,B,T,K,H]} on the host, float32, phase-free."""


@dataclasses.dataclass(frozen=True, eq=False)
class ServedChunk:
    """A batch of chunks, each behind its own antecedents.

    Attributes:
      backbone: the `ModelBackbone` that reads them.
      tokens: the chunk at its place. alone: the same with positions from its own start.
      canonical: KV(B|∅), phase-free.
      front: the antecedents in the engine frame. front_positions: of their tokens, [B,S] or [B,S,A].
      pieces: each antecedent alone, in the engine frame at its place.
      costs: the chunk that shares of cost refer to.
    """

    backbone: Any
    tokens: Tokens
    alone: Tokens
    canonical: Mapping[str, Any]
    front: Mapping[str, Any]
    front_positions: Int[np.ndarray, "B S ..."]
    pieces: tuple[Mapping[str, Any], ...]
    costs: ChunkCosts

    @property
    def rows(self) -> int:
        """Contexts of the batch."""
        return self.tokens.embeddings.shape[0]

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return self.tokens.embeddings.shape[1]

    @property
    def behind(self) -> int:
        """Keys in front of the chunk."""
        return next(iter(self.front.values())).shape[2]

    @functools.cached_property
    def residuals(self) -> dict[int, Array]:
        """The residual of the chunk alone as it enters each layer, [B,T,D]."""
        layers = tuple(range(self.backbone.layout.layers))
        return self.backbone.prefill(self.alone, hidden_at=layers).hidden

    @functools.cached_property
    def features(self) -> Float[np.ndarray, "L B T F"]:
        """The canonical with all channels and heads of a layer joined."""
        return flat(self.canonical)

    @functools.cached_property
    def blind(self) -> KV:
        """The antecedents and the canonical at its place, in the engine frame."""
        placed = kvp.to_engine(self.backbone.layout, dict(self.canonical), np.asarray(self.tokens.positions), 0)
        return joined([dict(self.front), dict(placed)])

    def behind_others(self, front: Mapping[str, Any], by: int = 0) -> KV:
        """Computes phase-free KV of the chunk, or of the one `by` contexts further on, behind these keys."""
        tokens = self.tokens._replace(embeddings=jnp.roll(self.tokens.embeddings, -by, axis=0))
        if tokens.deepstack is not None:
            tokens = tokens._replace(deepstack=jnp.roll(tokens.deepstack, -by, axis=0))
        return dict(self.backbone.prefill(tokens, dict(front)).kv)

    def lower_layers(self, stop: int) -> Deficit:
        """Computes the deficit of the layers below `stop` by a forward of these layers in context; 0 above them."""
        slots = self._slots(np.broadcast_to(np.arange(self.length), (self.rows, self.length)))
        written = self.backbone.recompute(self.tokens, self.blind, slots, stop_layer=stop).cache
        return self._deficit_of(written)

    def upper_layers(self, start: int) -> Deficit:
        """Computes the deficit of the layers from `start` on by a forward of these layers in context.

        It begins with the residual of the chunk alone, so it lacks what lower layers absorbed; 0 below `start`.
        """
        tokens = self.tokens._replace(embeddings=self.residuals[start])
        upper = self.backbone.prefill(tokens, self.front, start_layer=start).kv
        delta = {}
        for name, value in upper.items():
            own = np.asarray(value, np.float32) - np.asarray(self.canonical[name][start:], np.float32)
            delta[name] = np.concatenate([np.zeros((start, *own.shape[1:]), np.float32), own])
        return delta

    def recomputed(self, index: Int[np.ndarray, "B n"]) -> Deficit:
        """Computes the deficit of some tokens by recomputing them in context at every layer; 0 elsewhere.

        The tokens see the antecedents, each other afresh, and the canonical of the tokens that are not recomputed.
        """
        take = np.asarray(index)
        rows = np.arange(len(take))[:, None]
        deepstack = None if self.tokens.deepstack is None else jnp.asarray(self.tokens.deepstack)[rows, take]
        positions = np.asarray(self.tokens.positions)[rows, take]
        tokens = Tokens(jnp.asarray(self.tokens.embeddings)[rows, take], positions, deepstack)
        delta = self._deficit_of(self.backbone.recompute(tokens, self.blind, self._slots(take)).cache)

        # Rotating back and forth leaves roundings where nothing was written.
        written = np.zeros((len(take), self.length), bool)
        written[rows, take] = True
        return {name: np.where(written[None, :, :, None, None], value, 0) for name, value in delta.items()}

    def rerun_flops(self, index: Int[np.ndarray, "B n"]) -> float:
        """Counts the FLOPs of recomputing these tokens in context at every layer, the mean over contexts."""
        chosen = np.zeros((len(index), self.length), bool)
        chosen[np.arange(len(index))[:, None], index] = True
        slots = np.broadcast_to(self.behind + np.arange(self.length), chosen.shape)
        return self.costs.rerun(np.broadcast_to(chosen, (self.backbone.layout.layers, *chosen.shape)), slots)

    def _slots(self, index: np.ndarray) -> np.ndarray:
        return (self.behind + np.asarray(index)).astype(np.int32)

    def _deficit_of(self, cache: Mapping[str, Any]) -> Deficit:
        """Takes the canonical from the chunk's part of an engine-frame cache."""
        own = cut(cache, slice(self.behind, self.behind + self.length))
        free = kvp.to_phase_free(self.backbone.layout, own, np.asarray(self.tokens.positions))
        return host(difference(dict(free), self.canonical))


@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredChunk:
    """A served chunk with what estimates are held against.

    Attributes:
      served: what estimators get.
      conditioned: KV(B|A), phase-free.
      answers: asks the questions over phase-free KV of the chunk.
      attended: the attention that the chunk's tokens receive from the questions over blind reuse, [B,T].
      asked: which questions count, by kind, bool [B,Q] each.
      clusters: each context's number, [B].
    """

    served: ServedChunk
    conditioned: Mapping[str, Any]
    answers: Callable[[Mapping[str, Any]], Answers]
    attended: Callable[[], Float[np.ndarray, "B T"]]
    asked: Mapping[str, Bool[np.ndarray, "B Q"]]
    clusters: Int[np.ndarray, " B"]

    @functools.cached_property
    def delta(self) -> Deficit:
        """The true deficit KV(B|A) − KV(B|∅)."""
        return host(difference(self.conditioned, self.served.canonical))

    @functools.cached_property
    def chunk(self) -> kvp.Chunk:
        """The canonicals, a batch."""
        local = np.asarray(self.served.alone.positions)[0]
        return chunk_of(self.served.backbone, self.served.canonical, local, "measured")

    def loss(self, answers: Answers, reference: Answers) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Computes KL(re-prefill ‖ answers) in nats and the cluster of each counted question, by kind."""
        divergence = answers.divergence_from(reference)
        clusters = np.broadcast_to(self.clusters[:, None], divergence.shape)
        return {kind: (divergence[counted], clusters[counted]) for kind, counted in self.asked.items()}


def served_of(page: ReusedPage, pieces: Sequence[Mapping[str, Any]] | None = None) -> ServedChunk:
    """Makes what a server has of a reused page: its conditioned KV is left behind.

    Args:
      pieces: each antecedent alone, in the engine frame at its place; None: the canonicals that the page holds.
    """
    start, stop = page.slots.start, page.slots.stop
    if pieces is None:
        pieces = [page.placed(place=place) for place in range(len(page.chunks) - 1)]
    return ServedChunk(
        backbone=page.backbone,
        tokens=page.tokens.take(start, stop),
        alone=page.alone,
        canonical={name: jnp.asarray(value) for name, value in page.page.kv.items()},
        front=cut(page.front, slice(start)),
        front_positions=np.asarray(page.tokens.positions)[:, :start],
        pieces=tuple(pieces),
        costs=page.costs,
    )


def flat(kv: Mapping[str, Any]) -> Float[np.ndarray, "L B T F"]:
    """Joins channels and heads of {channel: [L,B,T,K,H]} along the last axis, float32."""
    parts = [np.asarray(value, np.float32).reshape(*value.shape[:3], -1) for value in kv.values()]
    return np.concatenate(parts, axis=-1)


def host(kv: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies KV to the host as float32."""
    return {name: np.asarray(value, np.float32) for name, value in kv.items()}


def added(kv: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, Array]:
    """Adds a deficit to KV, channel by channel."""
    return {name: jnp.asarray(value) + jnp.asarray(delta[name]) for name, value in kv.items()}


def energy(delta: Mapping[str, Any]) -> Float[np.ndarray, "B T"]:
    """Sums ‖Δ‖² over layers, channels and heads, by context and token."""
    return sum(np.square(np.asarray(value, np.float64)).sum(axis=(0, 3, 4)) for value in delta.values())  # pyright: ignore
