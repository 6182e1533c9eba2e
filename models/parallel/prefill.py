"""Prefill of a long context over a mesh axis, one part of it per device.

InfoFlow KV (sections 4 and 7): every device prefills its own chunks alone; the question's attention selects a few
tokens; these are recomputed under the global causal mask, and the question reads the result. Beside it ring attention
over the same mesh, which computes what one device computes.

Axis letters: B batch, T tokens, P devices, S tokens of a device with padding, L layers, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kvpatch_jax.backbone import Tokens, check_tokens
from kvpatch_jax.core import EngineKV, check_positions, check_uniform, expect_frame
from kvpatch_jax.errors import ConfigError, InputError, ShapeError
from kvpatch_jax.repair import READINGS, Reading

from ..attention.mask import NOWHERE
from ..backbone import ModelBackbone
from .programs import TokenBlocks, prefill_chunks, recompute_and_read, ring_forward, score_context
from .readouts import ExchangePlan, Move

LEAST_GRANULE = 8
"""Capacities of devices are multiples of this, or of a 64th of the selected tokens where that is more."""


@dataclasses.dataclass(frozen=True)
class MeshBackbone:
    """A backbone with its parameters whole on every device of a mesh, for sequences that lie over one axis of it.

    Attributes:
      backbone: the model on one device.
      mesh: with every axis `AxisType.Auto`; axes but `axis` hold copies.
      axis: name of the axis that sequences lie over.
      state: the parameters on the mesh.
    """

    backbone: ModelBackbone
    mesh: Mesh
    axis: str
    state: Any

    @property
    def devices(self) -> int:
        """Devices that a sequence lies over."""
        return self.mesh.shape[self.axis]

    def place(self, tree: Any, *spec: str | None) -> Any:
        """Returns arrays on the mesh, all with this partition spec."""
        return jax.device_put(tree, NamedSharding(self.mesh, P(*spec)))


class ChunkLayout(NamedTuple):
    """How a sequence of chunks lies over P devices.

    Attributes:
      chunks: length of each chunk, in order; device d holds the d-th share of them, as many chunks as every other.
      index: int32 [P·S], which token of the sequence lies at each place; 0 for padding.
      numbers: int32 [P·S], which chunk that token is of; -1 for padding.
      lengths: int32 [P], tokens of each device that are not padding, copies included.
      copied: places at the front of every device but the first that hold a copy of the first chunk.
    """

    chunks: tuple[int, ...]
    index: np.ndarray
    numbers: np.ndarray
    lengths: np.ndarray
    copied: int = 0

    @property
    def size(self) -> int:
        """S, tokens of a device with padding."""
        return len(self.index) // len(self.lengths)

    @property
    def live(self) -> np.ndarray:
        """Places that are neither padding nor copies, in the order of the sequence."""
        place = np.arange(len(self.index))
        copies = (place >= self.size) & (place % self.size < self.copied)
        return np.flatnonzero((self.numbers >= 0) & ~copies)


class ChunkCache(NamedTuple):
    """KV of a sequence of chunks over the devices of a mesh axis, and the tokens that it was computed from.

    Attributes:
      kv: engine-frame {channel: [L,B,P·S,K,H]}; of chunks prefilled alone, or with some tokens recomputed.
      blocks: the tokens over the axis.
      layout: which token lies where.
    """

    kv: EngineKV
    blocks: TokenBlocks
    layout: ChunkLayout

    def gather(self) -> EngineKV:
        """Copies the KV to the host, in the order of the sequence and without padding: {channel: [L,B,T,K,H]}."""
        return EngineKV({name: np.asarray(leaf)[:, :, self.layout.live] for name, leaf in self.kv.items()})


class ParallelPrefill(NamedTuple):
    """Result of reading a question over a context that lies over a mesh axis.

    Attributes:
      logits: [B,n,V] float32, of the question's tokens.
      cache: the context's KV with the chosen tokens recomputed.
      question: phase-free KV of the question's tokens, {channel: [L,B,n,K,H]}.
      chosen: int32 [B,count], indices of the chosen tokens in the context, ascending.
      scores: float32 [B,T], of the context's tokens.
      plan: what devices exchanged.
    """

    logits: Float[Array, "B n V"]
    cache: ChunkCache
    question: Mapping[str, Array]
    chosen: Int[np.ndarray, "B count"]
    scores: Float[np.ndarray, "B T"]
    plan: ExchangePlan


def spread_backbone(backbone: ModelBackbone, mesh: Mesh, axis: str = "chunks") -> MeshBackbone:
    """Copies a backbone's parameters to every device of a mesh.

    Args:
      mesh: of any axis types; inside, all are `AxisType.Auto`, which `jax.shard_map` asks for.
      axis: name of the axis that sequences will lie over.

    Raises:
      ConfigError: the mesh lacks the axis, the backbone lies over a mesh of its own, or a layer of it has a sliding
      window, whose edge this module does not carry from device to device.
    """
    if axis not in mesh.axis_names:
        raise ConfigError(f"mesh: got axes {tuple(mesh.axis_names)}; expected one called {axis!r}")
    if backbone.mesh is not None:
        raise ConfigError(f"backbone: got one over a mesh {backbone.mesh.shape}; expected one on a single device")
    if backbone.config.text.window is not None:
        raise ConfigError(
            f"backbone: got a sliding window of {backbone.config.text.window} tokens; expected full attention"
        )

    check_uniform(backbone.layout, "backbone")
    free = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    state = jax.device_put(backbone.programs.state, NamedSharding(free, P()))
    return MeshBackbone(backbone, free, axis, state)


def lay_out(tokens: int, devices: int, chunks: Sequence[int] | None = None, share_first: bool = False) -> ChunkLayout:
    """Divides a sequence over devices.

    Args:
      chunks: lengths of its chunks, as many for each device; None: one for each device, as equal as they can be.
      share_first: every device holds the first chunk too, and prefills it. Nothing is in front of that chunk, so it
        never changes: for one chunk's prefill more, tokens of other devices need nothing from the first.

    Raises:
      InputError: fewer tokens than devices; chunks that are empty, do not add up to the tokens, or are no multiple of
      the devices; or a first chunk that is shared among devices of several chunks.
    """
    if tokens < devices:
        raise InputError(f"tokens: got {tokens}; expected at least one for each of {devices} devices")
    if chunks is None:
        chunks = [tokens // devices + (device < tokens % devices) for device in range(devices)]
    chunks = tuple(int(length) for length in chunks)
    if not chunks or min(chunks) < 1 or sum(chunks) != tokens or len(chunks) % devices:
        raise InputError(
            f"chunks: got lengths {chunks!s:.80}; expected a multiple of {devices} of them, each at least 1, that "
            f"add up to {tokens}"
        )
    if share_first and len(chunks) != devices:
        raise InputError(f"share_first: got {len(chunks)} chunks on {devices} devices; expected one on each")

    share = len(chunks) // devices
    owned = np.array(chunks).reshape(devices, share).sum(axis=1)
    copied = chunks[0] if share_first else 0
    copies = np.where(np.arange(devices) > 0, copied, 0)
    lengths, starts = owned + copies, np.cumsum([0, *owned[:-1]])

    # A copy is of the sequence's first tokens; a device's own tokens follow it.
    place = np.arange(lengths.max())
    index = np.where(place < copies[:, None], place, starts[:, None] + place - copies[:, None])
    live = place < lengths[:, None]
    index = np.where(live, index, 0).reshape(-1).astype(np.int32)
    of_token = np.repeat(np.arange(len(chunks)), chunks)
    numbers = np.where(live.reshape(-1), of_token[index], -1).astype(np.int32)
    return ChunkLayout(chunks, index, numbers, lengths.astype(np.int32), copied)


def place_blocks(over: MeshBackbone, tokens: Tokens, layout: ChunkLayout) -> TokenBlocks:
    """Places the tokens of a sequence over the axis.

    Positions inside a chunk are counted from the chunk's smallest, on every axis of M-RoPE.

    Raises:
      InputError, ShapeError: no tokens, or another number of them than the layout's. InputError: positions outside
      of the regime that the rope is pinned to.
    """
    check_tokens(tokens, "parallel prefill")
    if tokens.embeddings.shape[1] != sum(layout.chunks):
        raise ShapeError(f"tokens: got {tokens.embeddings.shape[1]}; expected the layout's {sum(layout.chunks)}")
    _check_regime(over, tokens)

    positions = np.asarray(tokens.positions)
    local = np.empty_like(positions)
    start = 0
    for length in layout.chunks:
        some = positions[:, start : start + length]
        local[:, start : start + length] = some - some.min(axis=1, keepdims=True)
        start += length

    def laid(array: Any) -> Any:
        return over.place(array[:, layout.index], None, over.axis)

    deepstack = None if tokens.deepstack is None else laid(tokens.deepstack)
    placed = Tokens(laid(tokens.embeddings), laid(positions), deepstack)
    return TokenBlocks(placed, laid(local), over.place(layout.numbers[None], None, over.axis))


def prefill_chunks_apart(
    over: MeshBackbone, tokens: Tokens, chunks: Sequence[int] | None = None, share_first: bool = False
) -> ChunkCache:
    """Prefills every chunk alone, each device its own; devices exchange nothing.

    Args:
      tokens: the context, with its positions in the sequence.
      chunks, share_first: as of `lay_out`.

    Raises:
      As `lay_out` and `place_blocks`.
    """
    check_tokens(tokens, "parallel prefill")
    layout = lay_out(tokens.embeddings.shape[1], over.devices, chunks, share_first)
    blocks = place_blocks(over, tokens, layout)
    kv = prefill_chunks(over.backbone.programs.graph, over.mesh, over.axis, over.state, blocks)
    return ChunkCache(kv, blocks, layout)


def place_chunk_cache(
    over: MeshBackbone,
    tokens: Tokens,
    kv: Mapping[str, Array],
    chunks: Sequence[int] | None = None,
    share_first: bool = False,
) -> ChunkCache:
    """Places available KV of chunks (stored canonicals at their positions) over the axis, in place of a prefill.

    Args:
      tokens, chunks, share_first: as of `prefill_chunks_apart`.
      kv: engine-frame {channel: [L,B,T,K,H]} of the whole context.

    Raises:
      As `prefill_chunks_apart`; FrameError, LayoutError, ShapeError: the KV is in another frame, of another layout, or
      of another number of tokens.
    """
    check_tokens(tokens, "parallel prefill")
    layout = lay_out(tokens.embeddings.shape[1], over.devices, chunks, share_first)
    expect_frame(kv, "parallel prefill: kv", "engine")
    over.backbone.layout.check(kv, "parallel prefill: kv")
    B, T = tokens.embeddings.shape[:2]
    for name, leaf in kv.items():
        if leaf.shape[:3] != (over.backbone.layout.layers, B, T):
            raise ShapeError(f"kv {name!r}: got shape {leaf.shape}; expected {over.backbone.layout.layers, B, T} first")

    blocks = place_blocks(over, tokens, layout)
    laid = {name: over.place(leaf[:, :, layout.index], None, None, over.axis) for name, leaf in kv.items()}
    return ChunkCache(EngineKV(laid), blocks, layout)


def read_question(
    over: MeshBackbone,
    context: ChunkCache,
    question: Tokens,
    *,
    ratio: float | None = None,
    count: int | None = None,
    layers: Sequence[int] | None = None,
    reading: Reading = "mass",
    move: Move | Literal["least"] = "least",
) -> ParallelPrefill:
    """Selects tokens by the question's attention, recomputes them in the whole context, and reads the question.

    Selected tokens are recomputed at all layers (appendix B), each by the device that holds it, and its new KV stays
    there. They attend to all KV in front of them: a device sends its selected tokens' queries to the devices in front
    and gets outputs and softmax masses back, which it merges. (Section 7 says that only "the small subset of tokens
    selected" is communicated; the released code gathers all queries and outputs on every device. Here they travel to
    the devices that the causal mask asks for, half as many for an even selection.) Where a device has so many that
    their queries take more bytes than the KV in front, that KV travels to it instead (`move`).

    Selected tokens of the first chunk are not recomputed: nothing is in front of it, so its KV is already that of the
    whole context. Layer 0, which the released code recomputes whole, needs no recompute either: the KV of a first layer
    has no context, and is rotated to its position.

    Args:
      context: of `prefill_chunks_apart` or `place_chunk_cache`; or an earlier question's, whose recomputed tokens stay.
      question: [B,n,…], with its positions in the sequence.
      ratio, count: how much of the context is selected, one of them: a share 0 … 1 (rounded half up), or tokens. 0
        reads the question over the context as it is.
      layers: scored ones; None: layers 22 … 25 of a decoder that has them (appendix B), else the last two, as the
        released code takes them by default.
      reading: how attention becomes a score; see `kvpatch_jax.repair.Reading`.
      move: what travels; "least": what takes fewer bytes, device by device.

    Raises:
      InputError: a share, count, layer, reading or move that is invalid. ShapeError: another batch than the context's.
    """
    backbone = over.backbone
    B, total = context.blocks.tokens.embeddings.shape[0], sum(context.layout.chunks)
    check_tokens(question, "parallel prefill: question")
    if question.embeddings.shape[0] != B:
        raise ShapeError(f"question: got {question.embeddings.shape[0]} rows; expected the context's {B}")
    if reading not in READINGS:
        raise InputError(f"reading: got {reading!r:.80}; expected one of {READINGS}")
    if move not in ("queries", "keys", "least"):
        raise InputError(f"move: got {move!r:.80}; expected 'queries', 'keys' or 'least'")
    selected = _selected_count(total, ratio, count)
    scored = _scored_layers(backbone.layout.layers, layers)
    _check_regime(over, question)

    # The question with as many arrays as the context has: text has nothing to add where images have deepstack features.
    deep = context.blocks.tokens.deepstack
    if deep is not None and question.deepstack is None:
        zeros = jnp.zeros((*question.embeddings.shape[:2], *deep.shape[2:]), deep.dtype)
        question = question._replace(deepstack=zeros)
    positions = np.asarray(question.positions).astype(context.blocks.tokens.positions.dtype)
    question = over.place(question._replace(positions=positions))
    lengths, kv = over.place(context.layout.lengths), dict(context.kv)

    # How many tokens of which device are chosen decides what is compiled next, so the host reads them.
    graph = backbone.programs.graph
    scores, places = score_context(
        graph, over.mesh, over.axis, scored, reading, selected, context.layout.copied, over.state, kv, lengths, question
    )
    slots, plan = plan_exchange(backbone, context.layout, np.asarray(places), move, over.axis)
    placed = over.place(slots, None, over.axis)
    read = recompute_and_read(graph, over.mesh, plan, over.state, kv, context.blocks, placed, lengths, question)

    cache = context._replace(kv=EngineKV(read.cache))
    chosen = context.layout.index[np.asarray(places)]
    found = np.asarray(scores)[:, context.layout.live]
    return ParallelPrefill(read.logits, cache, read.question, chosen, found, plan)


def chunk_parallel_prefill(
    over: MeshBackbone,
    tokens: Tokens,
    question: Tokens,
    chunks: Sequence[int] | None = None,
    share_first: bool = False,
    **options: Any,
) -> ParallelPrefill:
    """Prefills chunks apart, each device its own, and reads a question with selected tokens recomputed.

    Args:
      tokens, chunks, share_first: as of `prefill_chunks_apart`. question, options: as of `read_question`.

    Raises:
      As these two.
    """
    return read_question(over, prefill_chunks_apart(over, tokens, chunks, share_first), question, **options)


def ring_prefill(over: MeshBackbone, tokens: Tokens, question: Tokens) -> tuple[Float[Array, "B n V"], ChunkCache]:
    """Prefills context and question over the axis with ring attention: what one device computes, to rounding.

    Each device holds an equal part of the sequence, whatever its chunks; blocks of KV go round the ring once per layer.

    Returns:
      Logits of the question's tokens, and the cache of context and question.

    Raises:
      InputError, ShapeError: no tokens, or batches that differ. InputError: as `place_blocks`.
    """
    check_tokens(tokens, "ring prefill")
    check_tokens(question, "ring prefill: question")
    if question.embeddings.shape[0] != tokens.embeddings.shape[0]:
        raise ShapeError(f"question: got {question.embeddings.shape[0]} rows; expected {tokens.embeddings.shape[0]}")
    if tokens.deepstack is not None and question.deepstack is None:
        shape = (*question.embeddings.shape[:2], *tokens.deepstack.shape[2:])
        question = question._replace(deepstack=jnp.zeros(shape, tokens.deepstack.dtype))

    # Padding at the very end, where causal order hides it.
    whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), tokens, question)
    length, asked = whole.embeddings.shape[1], question.embeddings.shape[1]
    size = -(-length // over.devices)
    chunks = [max(0, min(size, length - device * size)) for device in range(over.devices)]
    index = np.arange(size * over.devices, dtype=np.int32)
    numbers = np.where(index < length, index // size, -1).astype(np.int32)
    layout = ChunkLayout(tuple(chunks), np.where(index < length, index, 0), numbers, np.array(chunks, np.int32))
    blocks = place_blocks(over, whole, layout._replace(chunks=tuple(part for part in chunks if part)))

    rows = np.broadcast_to(np.arange(length - asked, length, dtype=np.int32), (len(whole.embeddings), asked))
    graph = over.backbone.programs.graph
    logits, kv = ring_forward(graph, over.mesh, over.axis, over.state, blocks.tokens, over.place(rows))
    return logits, ChunkCache(kv, blocks, layout)


def plan_exchange(
    backbone: ModelBackbone,
    layout: ChunkLayout,
    places: Int[np.ndarray, "B count"],
    move: Move | Literal["least"] = "least",
    axis: str = "chunks",
) -> tuple[Int[np.ndarray, "B m"], ExchangePlan]:
    """Assigns selected places to the devices that hold them, and plans what these exchange.

    Capacities are rounded up, so that similar selections run the same compiled program.

    Args:
      places: of the layout, ascending in each row.

    Returns:
      Slots of `recompute_and_read` [B,P·rows], and the plan.
    """
    devices, size, first = len(layout.lengths), layout.size, layout.chunks[0]
    granule = max(LEAST_GRANULE, places.shape[1] // 64)
    # The first chunk has nothing in front of it.
    kept = []
    for device in range(devices):
        inside = (places // size == device) & (places >= first)
        kept.append([row[keep] % size for row, keep in zip(places, inside, strict=True)])
    needed = [max(len(row) for row in rows) for rows in kept]
    capacities = tuple(min(size, -(-count // granule) * granule) for count in needed)

    # Bytes between two devices in one layer: queries and outputs with their masses, or keys and values.
    config = backbone.config.text
    numbers = jnp.dtype(config.dtype).itemsize
    latent = config.latent
    head = 2 * config.head_dim if latent is None else 2 * latent.latent + latent.rope_dim
    per_token = config.heads * (head * numbers + 4)
    of_keys = (size - layout.copied) * numbers * sum(channel.features for channel in backbone.layout.channels)
    moves = list[Move]()
    for capacity in capacities:
        fewer: Move = "queries" if capacity * per_token <= of_keys else "keys"
        moves.append(fewer if move == "least" else move)
    plan = ExchangePlan(axis, capacities, tuple(moves), layout.copied, latent is not None)

    slots = np.full((len(places), devices, plan.rows), NOWHERE, np.int32)
    for device, rows in enumerate(kept):
        for number, row in enumerate(rows):
            slots[number, device, : len(row)] = row
    return slots.reshape(len(places), -1), plan


def _selected_count(total: int, ratio: float | None, count: int | None) -> int:
    """Returns how many of `total` tokens a share or a count selects."""
    if (ratio is None) == (count is None):
        raise InputError(f"selection: got ratio {ratio} and count {count}; expected one of them")
    if ratio is not None:
        if not 0 <= ratio <= 1:
            raise InputError(f"ratio: got {ratio}; expected 0 to 1")
        return int(ratio * total + 0.5)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= total:
        raise InputError(f"count: got {count!r:.80}; expected 0 to the context's {total} tokens")
    return count


def _scored_layers(total: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the layers whose attention is scored."""
    if layers is None:
        return tuple(range(22, 26)) if total >= 26 else tuple(range(max(0, total - 2), total))
    scored = tuple(int(layer) for layer in layers)
    if not scored or list(scored) != sorted(set(scored)) or not 0 <= scored[0] <= scored[-1] < total:
        raise InputError(f"layers: got {scored}; expected ascending layers of 0 … {total - 1}, at least one")
    return scored


def _check_regime(over: MeshBackbone, tokens: Tokens) -> None:
    """Refuses positions that a rope pinned to one regime does not serve."""
    rope = over.backbone.layout.rope
    if rope.scaling is not None and rope.scaling.kind in ("longrope", "dynamic"):
        check_positions(rope, tokens.positions, np.array(0, np.int32))
