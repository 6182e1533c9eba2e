"""The jitted programs of a prefill over a mesh axis: chunks apart, scores, recompute with the question, and the ring.

A sequence lies over the devices of the axis in order: [B, P·S], S tokens of each of P devices, padding behind each
device's own. Parameters are whole on every device. Positions, lengths and slots are traced; what is static is how much
devices exchange.

Axis letters: B batch, P devices, S tokens of a device, T question tokens, L layers, K KV heads, H head width, D width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import EngineKV, to_engine
from kvpatch_jax.repair import Reading, attention_scores

from ..attention import Mask
from ..attention.mask import NOWHERE
from ..decoder.cached import row_slots, written_into
from ..decoding import by_layer, take_tokens
from .readouts import ExchangePlan, exchange, over_all_devices, ring


class TokenBlocks(NamedTuple):
    """Tokens of a sequence over a mesh axis.

    Attributes:
      tokens: embeddings [B,P·S,D], positions in the sequence [B,P·S] or [B,P·S,A], deepstack [B,P·S,n,D] or None.
      local: positions counted from each chunk's own start, of the positions' shape.
      chunks: int32 [1,P·S], number of the chunk that a token is of, copies of the first chunk too; -1: padding.
    """

    tokens: Tokens
    local: Array
    chunks: Int[Array, "1 S"]


class QuestionRead(NamedTuple):
    """Result of reading a question.

    Attributes:
      logits: [B,T,V] float32, of the question's tokens.
      cache: engine-frame KV of the sequence, {channel: [L,B,P·S,K,H]}.
      question: phase-free KV of the question's tokens, {channel: [L,B,T,K,H]}.
    """

    logits: Array
    cache: dict[str, Array]
    question: dict[str, Array]


def _over(mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns the function over all devices of a mesh, each with its own part of the arguments."""
    # Carries of scans begin with constants, alike on all devices, and end otherwise: not checked.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@functools.partial(jax.jit, static_argnames=("graph", "mesh", "axis"))
def prefill_chunks(graph: Any, mesh: Mesh, axis: str, state: Any, blocks: TokenBlocks) -> EngineKV:
    """Prefills every chunk alone, and rotates its keys to their positions in the sequence. Devices exchange nothing.

    Returns:
      Engine-frame KV {channel: [L,B,P·S,K,H]}, over the axis as the tokens are.
    """

    def own(state: Any, blocks: TokenBlocks) -> dict[str, Array]:
        decoder = nnx.merge(graph, state).decoder
        mask = Mask(causal=True, query_segments=blocks.chunks, key_segments=blocks.chunks)
        deepstack = by_layer(blocks.tokens)
        run = decoder.run(blocks.tokens.embeddings, blocks.local, mask, deepstack=deepstack)
        return dict(to_engine(decoder.config.layout, run.kv, blocks.tokens.positions, 0))

    tokens = P(None, axis)
    return EngineKV(_over(mesh, own, (P(), tokens), P(None, None, axis))(state, blocks))


@functools.partial(jax.jit, static_argnames=("graph", "mesh", "axis", "layers", "reading", "count", "copied"))
def score_context(
    graph: Any,
    mesh: Mesh,
    axis: str,
    layers: tuple[int, ...],
    reading: Reading,
    count: int,
    copied: int,
    state: Any,
    cache: dict[str, Array],
    lengths: Int[Array, " P"],
    question: Tokens,
) -> tuple[Float[Array, "B S"], Int[Array, "B count"]]:
    """Scores all tokens of the sequence by the question's attention, and selects the `count` best of each row.

    The question runs on every device, over the keys that lie there; partial outputs and, at the scored layers, softmax
    masses are summed over devices. One score per token is gathered.

    Args:
      copied: as of `ExchangePlan`.

    Returns:
      Mean score over `layers` [B,P·S], −∞ for padding and copies; and the selected places [B,count], ascending. Ties go
      to the earlier token.
    """

    def own(state: Any, cache: dict[str, Array], lengths: Array, question: Tokens) -> tuple[Array, Array]:
        decoder = nnx.merge(graph, state).decoder
        size = next(iter(cache.values())).shape[2]
        mask, counted = _question_mask(axis, lengths, size, question.embeddings.shape[1], copied)
        run = decoder.run(
            question.embeddings,
            question.positions,
            mask,
            context=cache,
            stop_layer=layers[-1] + 1,
            deepstack=by_layer(question),
            observed=layers,
            observe=functools.partial(attention_scores, reading=reading, context=size, axis=axis),
            attend=over_all_devices(axis),
        )
        scores = jnp.where(counted, run.observed.mean(0), -jnp.inf)
        scores = jax.lax.all_gather(scores, axis, axis=1, tiled=True)
        return scores, jnp.sort(jax.lax.top_k(scores, count)[1], axis=-1)

    kv = P(None, None, axis)
    return _over(mesh, own, (P(), kv, P(), P()), (P(), P()))(state, cache, lengths, question)


@functools.partial(jax.jit, static_argnames=("graph", "mesh", "plan"))
def recompute_and_read(
    graph: Any,
    mesh: Mesh,
    plan: ExchangePlan,
    state: Any,
    cache: dict[str, Array],
    blocks: TokenBlocks,
    slots: Int[Array, "B m"],
    lengths: Int[Array, " P"],
    question: Tokens,
) -> QuestionRead:
    """Recomputes selected tokens through all layers under the global causal mask, and reads the question over them.

    One pass: in each layer the selected tokens' new KV is written where it belongs, on the token's own device, before
    anything attends to that layer. A device with fewer selected tokens than `plan.rows` runs padding.

    Args:
      slots: [B,P·rows], over the axis: places of selected tokens on their device, ascending; `NOWHERE` for padding.
        Without selected tokens, [B,0].
    """
    axis = plan.axis

    def own(
        state: Any, cache: dict[str, Array], blocks: TokenBlocks, slots: Array, lengths: Array, question: Tokens
    ) -> QuestionRead:
        decoder = nnx.merge(graph, state).decoder
        size, asked = next(iter(cache.values())).shape[2], question.embeddings.shape[1]
        mask, _ = _question_mask(axis, lengths, size, asked, plan.copied)
        live = jnp.arange(size) < lengths[jax.lax.axis_index(axis)]
        stand = jnp.where(live, jnp.arange(size, dtype=jnp.int32), NOWHERE)
        stand = jnp.concatenate([stand, jnp.full(asked, NOWHERE, jnp.int32)])[None]
        # Padding is at no place, and sees nothing.
        own_mask = Mask(causal=True, query_places=jnp.where(slots == NOWHERE, -1, slots), key_places=stand)

        # Selected tokens first, then the question, which every device runs and writes behind its own keys.
        index = jnp.minimum(slots, size - 1)
        selected = jax.tree.map(lambda leaf: _taken(leaf, index), blocks.tokens)
        tokens = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), selected, question)
        behind = jnp.broadcast_to(size + jnp.arange(asked, dtype=jnp.int32), (len(slots), asked))
        keys, places = row_slots(size + asked, jnp.concatenate([slots, behind], axis=1))

        room = {name: jnp.pad(leaf, ((0, 0), (0, 0), (0, asked), (0, 0), (0, 0))) for name, leaf in cache.items()}
        run = decoder.run(
            tokens.embeddings,
            tokens.positions,
            Mask(),
            context=room,
            slots=keys,
            deepstack=by_layer(tokens),
            attend=exchange(plan, lengths, size, own_mask, mask),
        )
        assert run.written is not None
        cache = written_into(room, decoder.config.layout, run.written, places, None, range(decoder.config.layers))
        logits = decoder.logits(run.hidden[:, plan.rows :])
        kept = {name: leaf[:, :, :size] for name, leaf in cache.items()}
        return QuestionRead(logits, kept, {name: leaf[:, :, plan.rows :] for name, leaf in run.kv.items()})

    kv, tokens = P(None, None, axis), P(None, axis)
    places: Any = (P(), kv, tokens, tokens, P(), P())
    results: Any = (P(), kv, P())
    return _over(mesh, own, places, QuestionRead(*results))(state, cache, blocks, slots, lengths, question)


@functools.partial(jax.jit, static_argnames=("graph", "mesh", "axis"))
def ring_forward(
    graph: Any, mesh: Mesh, axis: str, state: Any, tokens: Tokens, rows: Int[Array, "B n"]
) -> tuple[Float[Array, "B n V"], EngineKV]:
    """Runs a whole sequence over the axis with ring attention: exact, as one device computes it.

    Args:
      tokens: [B,P·S,…], over the axis, padding at the very end.
      rows: places in the sequence whose logits are returned.

    Returns:
      Logits, and engine-frame KV {channel: [L,B,P·S,K,H]} over the axis.
    """
    devices = mesh.shape[axis]

    def own(state: Any, tokens: Tokens, rows: Array) -> tuple[Array, dict[str, Array]]:
        decoder = nnx.merge(graph, state).decoder
        size = tokens.embeddings.shape[1]
        attend = ring(axis, devices, decoder.config.latent is not None)
        deepstack = by_layer(tokens)
        run = decoder.run(tokens.embeddings, tokens.positions, Mask(causal=True), deepstack=deepstack, attend=attend)

        # Each row of hidden states lies on one device; the others add zero.
        local = rows - jax.lax.axis_index(axis) * size
        picked = take_tokens(run.hidden, jnp.clip(local, 0, size - 1))
        inside = ((local >= 0) & (local < size))[..., None]
        hidden = jax.lax.psum(jnp.where(inside, picked, 0), axis)
        return decoder.logits(hidden), dict(to_engine(decoder.config.layout, run.kv, tokens.positions, 0))

    logits, kv = _over(mesh, own, (P(), P(None, axis), P()), (P(), P(None, None, axis)))(state, tokens, rows)
    return logits, EngineKV(kv)


def _question_mask(axis: str, lengths: Array, size: int, asked: int, copied: int) -> tuple[Mask, Array]:
    """Returns the mask of a question over this device's keys and its own, and which of the `size` keys it counts.

    Every key counts on one device: the first chunk's on the first, the question's own, which all have, on the last.
    """
    device, place = jax.lax.axis_index(axis), jnp.arange(size, dtype=jnp.int32)
    counted = (place < lengths[device]) & ((device == 0) | (place >= copied))
    own = size + jnp.arange(asked, dtype=jnp.int32)[None]
    context = jnp.where(counted, place, NOWHERE)[None]
    keys = jnp.concatenate([context, jnp.where(device == len(lengths) - 1, own, NOWHERE)], axis=1)
    return Mask(causal=True, query_places=own, key_places=keys), counted[None]


def _taken(leaf: Array, index: Int[Array, "B m"]) -> Array:
    """Returns tokens of [B,S,…] at these places of each row."""
    return jnp.take_along_axis(leaf, index.reshape(*index.shape, *[1] * (leaf.ndim - 2)), axis=1)
