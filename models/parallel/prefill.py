"""Prefill of a long context over several devices, some of its chunks on each.

InfoFlow KV (sections 4 and 7): every device prefills its own chunks alone; the question's attention selects a few
tokens; these are recomputed under the global causal mask, and the question reads the result. A sequence lies over the
devices in order, [B, P·S], padding behind each device's own tokens. Parameters are on every device.

Axis letters: B batch, T tokens, P devices, S tokens of a device with padding, n question tokens, L layers, K KV heads,
H head width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kvpatch_jax.backbone import Tokens, check_cached, check_tokens
from kvpatch_jax.core import EngineKV, check_positions, check_uniform, to_engine
from kvpatch_jax.errors import ConfigError, InputError, ShapeError
from kvpatch_jax.repair import attention_scores

from ..attention import Mask
from ..attention.mask import NOWHERE
from ..backbone import ModelBackbone
from ..decoder.cached import row_slots, written_into
from ..decoding import by_layer
from .readouts import AXIS, exchange, over_all_devices

LEAST_GRANULE = 8
"""Selected tokens of a device are padded to multiples of this, or of a 64th of all selected where that is more."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["backbone", "mesh"])
@dataclasses.dataclass(frozen=True)
class MeshBackbone:
    """A backbone with its parameters on several devices, for sequences that lie over them.

    Attributes:
      backbone: the model on one device.
      mesh: the devices.
      state: the parameters on each of them.
    """

    backbone: ModelBackbone
    mesh: Mesh
    state: Any

    def place(self, tree: Any, *spec: str | None) -> Any:
        """Returns arrays on the mesh, all with this partition spec."""
        return jax.device_put(tree, NamedSharding(self.mesh, P(*spec)))

    def run(self, function: Callable[..., Any], specs: Any, results: Any, *arrays: Any) -> Any:
        """Runs a function of the decoder and of a device's part of the arrays on every device."""

        def on_device(state: Any, *parts: Any) -> Any:
            return function(nnx.merge(self.backbone.programs.graph, state).decoder, *parts)

        # Carries of scans begin with constants, alike on all devices, and end otherwise: not checked.
        everywhere = jax.shard_map(
            on_device, mesh=self.mesh, in_specs=(P(), *specs), out_specs=results, check_vma=False
        )
        return everywhere(self.state, *arrays)


class ChunkCache(NamedTuple):
    """KV of a sequence of chunks over devices, and the tokens that it was computed from.

    Attributes:
      kv: engine-frame {channel: [L,B,P·S,K,H]}; of chunks prefilled alone, or with some tokens recomputed.
      tokens: with their positions in the sequence, over the devices.
      numbers: int32 [P,S], which chunk the token at each place is of; -1 for padding.
    """

    kv: EngineKV
    tokens: Tokens
    numbers: np.ndarray

    def gather(self) -> EngineKV:
        """Copies the KV to the host, in the order of the sequence and without padding: {channel: [L,B,T,K,H]}."""
        live = np.flatnonzero(self.numbers >= 0)
        return EngineKV({name: np.asarray(leaf)[:, :, live] for name, leaf in self.kv.items()})


class ParallelPrefill(NamedTuple):
    """Result of reading a question over a context that lies over devices.

    Attributes:
      logits: [B,n,V] float32, of the question's tokens.
      cache: the context's KV with the chosen tokens recomputed.
      question: phase-free KV of the question's tokens, {channel: [L,B,n,K,H]}.
      chosen: int32 [B,count], indices of the chosen tokens in the context, ascending.
    """

    logits: Float[Array, "B n V"]
    cache: ChunkCache
    question: Mapping[str, Array]
    chosen: Int[np.ndarray, "B count"]


def spread_backbone(backbone: ModelBackbone, devices: Sequence[Any] | None = None) -> MeshBackbone:
    """Copies a backbone's parameters to devices; None: all of them.

    Raises:
      ConfigError: the backbone lies over a mesh of its own, or a layer of it has a sliding window, whose edge this
      module does not carry from device to device.
    """
    if backbone.mesh is not None:
        raise ConfigError(f"backbone: got one over a mesh {backbone.mesh.shape}; expected one on a single device")
    window = backbone.config.text.window
    if window is not None:
        raise ConfigError(f"backbone: got a sliding window of {window} tokens; expected full attention")
    check_uniform(backbone.layout, "backbone")
    mesh = Mesh(np.array(jax.devices() if devices is None else devices), (AXIS,))
    return MeshBackbone(backbone, mesh, jax.device_put(backbone.programs.state, NamedSharding(mesh, P())))


def lay_out(tokens: int, devices: int, chunks: Sequence[int] | None = None) -> Int[np.ndarray, "P S"]:
    """Divides a sequence over devices: which chunk lies at each place, in order; -1 for padding.

    Raises:
      InputError: fewer tokens than devices, or chunks that do not fit.
    """
    if tokens < devices:
        raise InputError(f"tokens: got {tokens}; expected at least one for each of {devices} devices")
    if chunks is None:
        chunks = [tokens // devices + (device < tokens % devices) for device in range(devices)]
    if not chunks or min(chunks) < 1 or sum(chunks) != tokens or len(chunks) % devices:
        expected = f"a multiple of {devices} of them, each at least 1, that add up to {tokens}"
        raise InputError(f"chunks: got lengths {chunks!s:.80}; expected {expected}")

    lengths = np.array(chunks).reshape(devices, -1).sum(axis=1)
    numbers = np.full((devices, lengths.max()), -1, np.int32)
    numbers[np.arange(lengths.max()) < lengths[:, None]] = np.repeat(np.arange(len(chunks)), chunks)
    return numbers


def _index(numbers: Int[np.ndarray, "P S"]) -> Int[np.ndarray, " PS"]:
    """Returns which token of the sequence lies at each place; for padding, that of a place in front."""
    return (np.cumsum(numbers >= 0) - 1).astype(np.int32)


def prefill_chunks_apart(
    over: MeshBackbone, tokens: Tokens, chunks: Sequence[int] | None = None, kv: Mapping[str, Array] | None = None
) -> ChunkCache:
    """Prefills every chunk alone, each device its own; devices exchange nothing.

    Positions inside a chunk are counted from the chunk's smallest, on every axis of M-RoPE; keys are then rotated to
    their positions in the sequence.

    Args:
      tokens: the context, with its positions in the sequence.
      chunks: lengths of its chunks, as many for each device; None: one for each device, as equal as they can be.
      kv: engine-frame {channel: [L,B,T,K,H]} of the context where it is available (stored canonicals at their
        positions). It is placed over the devices, and nothing is prefilled.

    Raises:
      InputError, ShapeError: no tokens, fewer than devices, or chunks that do not fit; positions outside of the regime
      that the rope is pinned to. LayoutError, ShapeError: KV of another frame, layout or length.
    """
    check_tokens(tokens, "parallel prefill")
    positions = np.asarray(tokens.positions)
    check_positions(over.backbone.layout.rope, positions, np.array(0, np.int32))
    numbers = lay_out(tokens.embeddings.shape[1], over.mesh.size, chunks)
    index, lengths = _index(numbers), np.bincount(numbers[numbers >= 0])
    placed = over.place(jax.tree.map(lambda leaf: leaf[:, index], tokens), None, AXIS)
    if kv is None:
        starts = np.cumsum([0, *lengths[:-1]])
        local = positions - np.repeat(np.minimum.reduceat(positions, starts, axis=1), lengths, axis=1)
        arrays = over.place((local[:, index], numbers.reshape(1, -1)), None, AXIS)
        return ChunkCache(EngineKV(_prefill_chunks(over, placed, *arrays)), placed, numbers)

    check_cached(over.backbone.layout, tokens, kv, "parallel prefill: kv")
    if any(leaf.shape[2] != lengths.sum() for leaf in kv.values()):
        shapes = {name: leaf.shape for name, leaf in kv.items()}
        raise ShapeError(f"parallel prefill: got kv of shapes {shapes}; expected {lengths.sum()} tokens")
    leaves = {name: over.place(leaf[:, :, index], None, None, AXIS) for name, leaf in kv.items()}
    return ChunkCache(EngineKV(leaves), placed, numbers)


def read_question(over: MeshBackbone, context: ChunkCache, question: Tokens, *, ratio: float) -> ParallelPrefill:
    """Selects tokens by the question's attention, recomputes them in the whole context, and reads the question.

    Tokens are scored at layers 22 … 25 of a decoder that has them (appendix B), else at the last two, as the released
    code takes them by default. Selected tokens are recomputed at all layers (appendix B), each by the device that holds
    it, and its new KV stays there. They attend to all KV in front of them: a device sends its selected tokens' queries
    to the devices in front, which send readouts back. (The released code gathers all queries and outputs on every
    device.) The first chunk and layer 0, which the released code recomputes, have no context and stay as they are.

    Args:
      context: of `prefill_chunks_apart`, or an earlier question's, whose recomputed tokens stay.
      question: [B,n,…], with its positions in the sequence.
      ratio: share of the context that is selected, 0 … 1, rounded half up to tokens.

    Raises:
      InputError: an invalid ratio. ShapeError: another batch than the context's.
    """
    numbers, deepstack, B = context.numbers, context.tokens.deepstack, context.tokens.embeddings.shape[0]
    check_tokens(question, "parallel prefill: question")
    if question.embeddings.shape[0] != B:
        raise ShapeError(f"question: got {question.embeddings.shape[0]} rows; expected the context's {B}")
    if not 0 <= ratio <= 1:
        raise InputError(f"ratio: got {ratio}; expected 0 to 1")
    positions = np.asarray(question.positions).astype(context.tokens.positions.dtype)
    check_positions(over.backbone.layout.rope, positions, np.array(0, np.int32))

    # Text has nothing to add where images have deepstack features.
    if deepstack is not None and question.deepstack is None:
        zeros = jnp.zeros((*question.embeddings.shape[:2], *deepstack.shape[2:]), deepstack.dtype)
        question = question._replace(deepstack=zeros)
    lengths = (numbers >= 0).sum(axis=1, dtype=np.int32)
    question, lengths = over.place((question._replace(positions=positions), lengths))

    # Score and select. The host reads the selection, on which the shape of the next program depends.
    total, count = over.backbone.layout.layers, int(ratio * (numbers >= 0).sum() + 0.5)
    layers = tuple(range(22, 26) if total >= 26 else range(max(0, total - 2), total))
    places = np.asarray(_select(over, dict(context.kv), lengths, question, layers, count))

    # Recompute and read. Nothing is in front of the first chunk, so its KV is already that of the whole context.
    (devices, size), first = numbers.shape, (numbers == 0).sum()
    parts = [row[(row // size == d) & (row >= first)] % size for row in places for d in range(devices)]
    granule = max(LEAST_GRANULE, count // 64)
    rows = min(size, max(1, -(-max(map(len, parts)) // granule)) * granule)
    slots = np.array([np.pad(part, (0, rows - len(part)), constant_values=NOWHERE) for part in parts], np.int32)
    slots = over.place(slots.reshape(B, -1), None, AXIS)
    logits, kv, read = _recompute_and_read(over, dict(context.kv), context.tokens, slots, lengths, question)
    return ParallelPrefill(logits, context._replace(kv=EngineKV(kv)), read, _index(numbers)[places])


# ------------------------------------------------------------------------------------------------------------ programs


@jax.jit
def _prefill_chunks(over: MeshBackbone, tokens: Tokens, local: Array, numbers: Int[Array, "1 S"]) -> dict[str, Array]:
    """Prefills every chunk alone, at `local` positions. Returns engine-frame KV at the tokens' positions."""

    def on_device(decoder: Any, tokens: Tokens, local: Array, numbers: Array) -> dict[str, Array]:
        mask = Mask(causal=True, query_segments=numbers, key_segments=numbers)
        run = decoder.run(tokens.embeddings, local, mask, deepstack=by_layer(tokens))
        return dict(to_engine(decoder.config.layout, run.kv, tokens.positions, 0))

    return over.run(on_device, [P(None, AXIS)] * 3, P(None, None, AXIS), tokens, local, numbers)


@functools.partial(jax.jit, static_argnames=("layers", "count"))
def _select(
    over: MeshBackbone,
    cache: dict[str, Array],
    lengths: Int[Array, " P"],
    question: Tokens,
    layers: tuple[int, ...],
    count: int,
) -> Int[Array, "B count"]:
    """Selects the `count` places of each row that the question attends to most, on the mean over `layers`: ascending.

    The question runs on every device, over the keys that lie there; partial outputs and, at the scored layers, softmax
    masses are summed over devices. One score per token is gathered. Ties go to the earlier token.
    """

    def on_device(decoder: Any, cache: dict[str, Array], lengths: Array, question: Tokens) -> Array:
        size, asked = next(iter(cache.values())).shape[2], question.embeddings.shape[1]
        places, behind = _places(lengths, size, asked)
        run = decoder.run(
            question.embeddings,
            question.positions,
            Mask(causal=True, query_places=behind, key_places=places),
            context=cache,
            stop_layer=layers[-1] + 1,
            deepstack=by_layer(question),
            observed=layers,
            observe=functools.partial(attention_scores, reading="mass", context=size, axis=AXIS),
            attend=over_all_devices,
        )
        scores = jnp.where(places[:, :size] == NOWHERE, -jnp.inf, run.observed.mean(0))
        scores = jax.lax.all_gather(scores, AXIS, axis=1, tiled=True)
        return jnp.sort(jax.lax.top_k(scores, count)[1], axis=-1)

    return over.run(on_device, (P(None, None, AXIS), P(), P()), P(), cache, lengths, question)


@jax.jit
def _recompute_and_read(
    over: MeshBackbone,
    cache: dict[str, Array],
    tokens: Tokens,
    slots: Int[Array, "B m"],
    lengths: Int[Array, " P"],
    question: Tokens,
) -> tuple[Float[Array, "B n V"], dict[str, Array], dict[str, Array]]:
    """Recomputes selected tokens through all layers under the global causal mask, and reads the question over them.

    One pass: in each layer the selected tokens' new KV is written where it belongs, on the token's own device, before
    anything attends to that layer.

    Args:
      slots: [B,P·rows], over the devices: places of selected tokens on their device, ascending; `NOWHERE` for padding.

    Returns:
      Logits of the question's tokens, the engine-frame KV of the sequence, and the phase-free KV of the question.
    """

    def on_device(
        decoder: Any, cache: dict[str, Array], tokens: Tokens, slots: Array, lengths: Array, question: Tokens
    ) -> tuple[Array, dict[str, Array], dict[str, Array]]:
        size, asked, rows = next(iter(cache.values())).shape[2], question.embeddings.shape[1], slots.shape[1]
        places, behind = _places(lengths, size, asked)
        behind = jnp.broadcast_to(behind, (len(slots), asked))
        # Padding is at no place, and sees nothing.
        queries = jnp.concatenate([jnp.where(slots == NOWHERE, -1, slots), behind], axis=1)
        mask = Mask(causal=True, query_places=queries, key_places=places)

        # Selected tokens first, then the question, which every device runs and writes behind its own keys.
        index = jnp.arange(len(slots))[:, None], jnp.minimum(slots, size - 1)
        read = jax.tree.map(lambda leaf, last: jnp.concatenate([leaf[index], last], axis=1), tokens, question)
        keys, written = row_slots(size + asked, jnp.concatenate([slots, behind], axis=1))
        room = {name: jnp.pad(leaf, ((0, 0), (0, 0), (0, asked), (0, 0), (0, 0))) for name, leaf in cache.items()}
        attend, deepstack = exchange(rows, size), by_layer(read)
        run = decoder.run(
            read.embeddings, read.positions, mask, context=room, slots=keys, deepstack=deepstack, attend=attend
        )
        cache = written_into(room, decoder.config.layout, run.written, written, None, range(decoder.config.layers))
        cache = {name: leaf[:, :, :size] for name, leaf in cache.items()}
        return decoder.logits(run.hidden[:, rows:]), cache, {name: leaf[:, :, rows:] for name, leaf in run.kv.items()}

    kv, spec = P(None, None, AXIS), P(None, AXIS)
    specs = kv, spec, spec, P(), P()
    return over.run(on_device, specs, (P(), kv, P()), cache, tokens, slots, lengths, question)


def _places(lengths: Int[Array, " P"], size: int, asked: int) -> tuple[Int[Array, "1 S"], Int[Array, "1 n"]]:
    """Returns places of this device's keys and of the question behind them; hidden keys are `NOWHERE`.

    Every key counts on one device: the question's own, which all have, on the last.
    """
    device, place = jax.lax.axis_index(AXIS), jnp.arange(size + asked, dtype=jnp.int32)
    counts = jnp.where(place < size, place < lengths[device], device == len(lengths) - 1)
    return jnp.where(counts, place, NOWHERE)[None], place[None, size:]
