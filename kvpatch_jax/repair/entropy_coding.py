"""Entropy-coded KV: differences to anchor tokens in symbols, and the bytes that an ideal coder takes for them."""

import bisect
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Int16

from ..backbone import Backbone
from ..core import PackedArray, unpack
from ..core.few_bits import GROUP
from ..errors import InputError
from .repair_budget import RepairBudget
from .spliced_cache import AnyArray, RepairBytes, Repaired, SplicedCache, recorded_of, with_flops
from .stored_kv import allowed_bytes, array_bytes, encode_rows, phase_free_written

ANCHOR_GROUP = 10
"""Tokens of a group in CacheGen, its anchor the first."""
ANCHOR_BITS = 8
"""Bits of an anchor token's numbers."""
STEP_RATIOS = (0.5, 1.0, 1.5)
"""Relative steps of the first, middle and last third of the layers: CacheGen rounds deeper layers more."""
STEPS = tuple(2.0 ** (power / 4) for power in range(-16, 13))
"""Steps that a budget chooses from, in standard deviations of a feature's differences: 1/16 to 8."""
MOST = 1023
"""The largest symbol; numbers beyond it are clipped."""


class CodedChannel(NamedTuple):
    """One channel in symbols.

    Attributes:
      anchors: the first token of each group, [L,B,groups,K,H] in 8 bits.
      deviation: bfloat16 [L,B,1,K,H], the standard deviation of each feature's differences.
      symbols: int16 [L,B,T,K,H]; 0 at anchors, which have none.
    """

    anchors: PackedArray
    deviation: Array
    symbols: Int16[Array, "L B T K H"]


def cachegen(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    step: float | int | None = None,
    group: int = ANCHOR_GROUP,
    ratios: tuple[float | int, ...] = STEP_RATIOS,
    tables: bool = True,
) -> Repaired:
    """Serves the recorded KV from entropy-coded differences to anchor tokens.

    Source: CacheGen (Liu et al. 2024, arXiv 2310.07240): of each group of tokens the first is the anchor,
    in 8 bits; the others are differences to it, rounded to steps that are finer in the first third of the layers than
    in the last, and coded arithmetically by layer and feature. Here differences are to the decoded anchor, a step is in
    standard deviations of a feature's differences, and keys are taken before rotation, where tokens differ less.
    Bytes are those of an ideal coder, the symbols' empirical entropy, which no coder beats with a static table; its
    tables are counted, by feature or one for all features of a layer's channel, whichever takes fewer bytes in all. The
    source's tables are of a model, learnt once and shared by all contexts; without `tables` bytes are the fewest that
    any such tables could reach.

    Args:
      budget: bytes of all that; the smallest step is taken with which every row fits. Bytes are the rows' mean.
      step: in place of the budget's.
      group: tokens of a group.
      ratios: relative steps of equal parts of the layers, from the first on.
      tables: whether the coder's tables count.

    Raises:
      InputError: no recorded KV, a budget in tokens or by layer, or too small; a step or a ratio that is not positive,
        no tokens in a group; or it is called inside a trace. ShapeError, LayoutError, DtypeError: the splice does not
        match the backbone.
    """
    layout = backbone.layout
    allowed = allowed_bytes(layout, splice, budget, "cachegen")
    recorded = recorded_of(splice, "cachegen")
    numbers = ratios if step is None else (*ratios, step)
    if not ratios or min(numbers) <= 0 or group < 1:
        found = f"step {step}, ratios {ratios}, group {group}"
        raise InputError(f"cachegen: got {found}; expected positive numbers, and at least 1 token")
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((recorded, splice.length))):
        raise InputError("cachegen: got KV inside a trace; expected arrays, because its bytes depend on their values")

    def coded(size: float | int) -> tuple[dict[str, CodedChannel], np.ndarray]:
        channels = {}
        for channel in layout.channels:
            steps = _layer_steps(layout.layers, size, tuple(ratios))
            value = jnp.asarray(recorded[channel.name])
            channels[channel.name] = encode_differences(value, splice.length, steps, group)
        return channels, coded_bytes(channels, splice.length, group, tables=tables)

    if step is None:
        step = _smallest_step(lambda size: int(coded(size)[1].max()) <= allowed)
    channels, sizes = coded(STEPS[-1] if step is None else step)
    if step is None:
        raise InputError(f"cachegen.budget: got {allowed} bytes; expected at least {sizes.max()}")

    stored = round(float(sizes.mean()))
    bytes = RepairBytes(stored=stored, moved=stored)
    steps = _layer_steps(layout.layers, step, tuple(ratios))

    def serve(own: SplicedCache) -> Repaired:
        kv = {name: decode_differences(channel, steps, group) for name, channel in channels.items()}
        return phase_free_written(layout, own, kv, bytes)

    decoding = 2 * layout.numbers * splice.slots.shape[1]
    return with_flops(serve(splice), serve, splice, backbone, ("cachegen", step, group, ratios, tables), decoding)


def _smallest_step(fits: Callable[[float], bool]) -> float | None:
    """The smallest of `STEPS` that fits, found by halving; None if none does."""
    place = bisect.bisect_left(STEPS, True, key=fits)
    return STEPS[place] if place < len(STEPS) else None


def _layer_steps(layers: int, step: float | int, ratios: tuple[float | int, ...]) -> np.ndarray:
    """Steps of all layers, as many layers with each ratio as go."""
    return np.asarray([step * ratios[layer * len(ratios) // layers] for layer in range(layers)], np.float32)


@functools.partial(jax.jit, static_argnames=("group",))
def encode_differences(
    value: Float[AnyArray, "L B T K H"],
    length: Int[AnyArray, " B"] | None,
    steps: Float[AnyArray, " L"],
    group: int = ANCHOR_GROUP,
) -> CodedChannel:
    """Encodes one channel as anchors and symbols.

    Args:
      length: tokens of a row that are not padding, which has symbols 0 and counts in no deviation; None: all.
      steps: of each layer, in standard deviations of a feature's differences.
    """
    wide = jnp.asarray(value).astype(jnp.float32)
    anchors = encode_rows(wide[:, :, ::group], None, ANCHOR_BITS, GROUP, -1)
    assert isinstance(anchors, PackedArray)
    delta = wide - _spread_anchors(anchors, group, wide.shape[2])
    counted = _counted_tokens(wide.shape[1:3], length, group)[..., None, None]
    number = jnp.maximum(counted.sum(1, keepdims=True), 1)
    square = jnp.where(counted, jnp.square(delta), 0.0).sum(2, keepdims=True) / number
    deviation = jnp.sqrt(square).astype(jnp.bfloat16)
    size = steps[:, None, None, None, None] * deviation.astype(jnp.float32)
    levels = jnp.round(delta / jnp.where(size > 0, size, 1.0))
    symbols = jnp.where(counted, jnp.clip(levels, -MOST, MOST), 0.0).astype(jnp.int16)
    return CodedChannel(anchors, deviation, symbols)


@functools.partial(jax.jit, static_argnames=("group",))
def decode_differences(
    coded: CodedChannel, steps: Float[AnyArray, " L"], group: int = ANCHOR_GROUP
) -> Float[Array, "L B T K H"]:
    """Decodes one channel to float32."""
    size = steps[:, None, None, None, None] * coded.deviation.astype(jnp.float32)
    return _spread_anchors(coded.anchors, group, coded.symbols.shape[2]) + coded.symbols.astype(jnp.float32) * size


def _spread_anchors(anchors: PackedArray, group: int, tokens: int) -> Array:
    return jnp.repeat(unpack(anchors, jnp.float32), group, axis=2)[:, :, :tokens]


def _counted_tokens(shape: tuple[int, ...], length: AnyArray | None, group: int) -> Array:
    """Marks the tokens [B,T] that are coded as differences."""
    place = jnp.arange(shape[1])
    counted = jnp.broadcast_to(place % group != 0, shape)
    return counted if length is None else counted & (place < jnp.asarray(length)[:, None])


def coded_bytes(
    channels: Mapping[str, CodedChannel], length: AnyArray | None, group: int = ANCHOR_GROUP, *, tables: bool = True
) -> np.ndarray:
    """Counts the bytes of each row, int64 [B]: anchors, deviations, symbols by an ideal coder, and its tables.

    An ideal coder takes −log2 of a symbol's frequency, among those of its layer and feature, or of its layer alone,
    whichever takes fewer bytes with their tables: of each symbol that occurs, itself in 8 bits (16 where one is beyond
    ±127) and its frequency in 16.

    Args:
      tables: whether tables count; without them the coder is by feature.
    """
    total = 0.0
    for coded in channels.values():
        L, B, T, K, H = coded.symbols.shape
        anchors = array_bytes(coded.anchors.shape[2], K * H, ANCHOR_BITS, GROUP, -1)
        symbols = np.asarray(coded.symbols).reshape(L, B, T, K * H).astype(np.int64)
        counted = np.asarray(_counted_tokens((B, T), length, group))
        own = []
        for row in range(B):
            found = symbols[:, row, counted[row]]
            most = int(np.abs(found).max(initial=0))
            entry, width = 3 if most <= 127 else 4, 2 * most + 1
            # One histogram of all features at once: each feature's symbols have numbers of their own.
            places = np.arange(L * K * H).reshape(L, 1, K * H) * width + most + found
            counts = np.bincount(places.ravel(), minlength=L * K * H * width).reshape(L, K * H, width)
            sizes = [_ideal_bytes(part, entry if tables else 0) for part in (counts, counts.sum(1))]
            own.append((min(sizes) if tables else sizes[0]) + L * (anchors + 2 * K * H))
        total = total + np.asarray(own)
    return np.ceil(total).astype(np.int64)


def _ideal_bytes(counts: np.ndarray, entry: int) -> float:
    """Bytes of symbols, each coded in its own bits among those that share a histogram of the last axis."""
    number = counts.sum(-1)
    bits = (number * np.log2(np.maximum(number, 1))).sum() - (counts * np.log2(np.maximum(counts, 1))).sum()
    return float(bits) / 8 + entry * np.count_nonzero(counts)
