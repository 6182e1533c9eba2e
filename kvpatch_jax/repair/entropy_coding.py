"""Entropy-coded KV: differences to anchor tokens in symbols, and the bytes that an ideal coder takes for them."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int16

from ..backbone import KV, Backbone
from ..core import GROUP, AnyArray, PackedArray, pack, packed_bytes, unpack
from ..errors import InputError
from .repair_budget import RepairBudget
from .repaired import RepairBytes, Repaired, method
from .spliced_cache import SplicedCache, required
from .stored_forms import allowed_bytes, expect_values, largest_fitting, serve_form

ANCHOR_GROUP = 10
"""Tokens of a group in CacheGen, its anchor the first."""
ANCHOR_BITS = 8
"""Bits of an anchor token's numbers."""
STEP_RATIOS = (0.5, 1.0, 1.5)
"""Relative steps of the first, middle and last third of the layers: CacheGen rounds deeper layers more."""
STEPS = tuple(2.0 ** (power / 4) for power in range(12, -17, -1))
"""Steps that a budget chooses from, in standard deviations of a feature's differences: 8 down to 1/16."""
MOST = 1023
"""The largest symbol; numbers beyond it are clipped."""


class CodedChannel(NamedTuple):
    """One channel as anchors, in 8 bits, and differences to them in steps of each feature; 0 at anchors."""

    anchors: PackedArray
    steps: Float[Array, "L B 1 K H"]
    symbols: Int16[Array, "L B T K H"]


@method()
def cachegen(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget, *, step: float | int | None = None
) -> Repaired:
    """Serves the recorded KV from entropy-coded differences to anchor tokens.

    Source: CacheGen (Liu et al. 2024, arXiv 2310.07240): of each group of tokens the first is the anchor,
    in 8 bits; the others are differences to it, rounded to steps that are finer in the first third of the layers than
    in the last, and coded arithmetically by layer and feature. Here differences are to the decoded anchor, a step is in
    standard deviations of a feature's differences, and keys are taken before rotation, where tokens differ less.
    Bytes are those of an ideal coder, the symbols' empirical entropy, which no coder beats with a static table; its
    tables are counted, by feature or one for all features of a layer's channel, whichever takes fewer bytes in all. The
    source's tables are of a model, learnt once and shared by all contexts.

    Args:
      budget: bytes of all that; the smallest step is taken with which every row fits. Bytes are the rows' mean.
      step: in place of the budget's.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed, recorded = allowed_bytes(layout, splice, budget), required(splice, "recorded")
    if step is not None and not step > 0:
        raise InputError(f"cachegen.step: got {step}; expected a positive number")
    expect_values((recorded, splice.length), "cachegen")

    # As many layers with each ratio as go.
    ratios = [STEP_RATIOS[layer * len(STEP_RATIOS) // layout.layers] for layer in range(layout.layers)]

    def coded(step: float | int) -> dict[str, CodedChannel]:
        steps = np.asarray([step * ratio for ratio in ratios], np.float32)
        return {name: encode_differences(jnp.asarray(recorded[name]), splice.length, steps) for name in layout.names}

    def most_bytes(step: float | int) -> int:
        return int(coded_bytes(coded(step), splice.length).max())

    size = largest_fitting(STEPS, most_bytes, allowed) if step is None else step
    channels = coded(size)
    stored = round(float(coded_bytes(channels, splice.length).mean()))

    def decode() -> KV:
        return {name: decode_differences(channel) for name, channel in channels.items()}

    return serve_form(backbone, splice, RepairBytes(stored=stored, moved=stored), decode, 2 * layout.numbers * tokens)


@jax.jit
def encode_differences(
    value: Float[AnyArray, "L B T K H"], length: Int[AnyArray, " B"] | None, steps: Float[AnyArray, " L"]
) -> CodedChannel:
    """Encodes one channel as anchors and symbols, with steps of each layer in standard deviations of a feature's
    differences; padding has symbols 0 and counts in no deviation."""
    wide = jnp.asarray(value).astype(jnp.float32)
    anchors = pack(wide[:, :, ::ANCHOR_GROUP], ANCHOR_BITS, heads=True)
    delta = wide - _spread_anchors(anchors, wide.shape[2])
    counted = _counted_tokens(wide.shape[1:3], length)[..., None, None]
    number = jnp.maximum(counted.sum(1, keepdims=True), 1)
    square = jnp.where(counted, jnp.square(delta), 0.0).sum(2, keepdims=True) / number
    # Deviations are kept in bfloat16.
    deviation = jnp.sqrt(square).astype(jnp.bfloat16)
    size = jnp.asarray(steps)[:, None, None, None, None] * deviation.astype(jnp.float32)
    levels = jnp.round(delta / jnp.where(size > 0, size, 1.0))
    symbols = jnp.where(counted, jnp.clip(levels, -MOST, MOST), 0.0).astype(jnp.int16)
    return CodedChannel(anchors, size, symbols)


@jax.jit
def decode_differences(coded: CodedChannel) -> Float[Array, "L B T K H"]:
    """Decodes one channel to float32."""
    return _spread_anchors(coded.anchors, coded.symbols.shape[2]) + coded.symbols.astype(jnp.float32) * coded.steps


def _spread_anchors(anchors: PackedArray, tokens: int) -> Array:
    return jnp.repeat(unpack(anchors, jnp.float32), ANCHOR_GROUP, axis=2)[:, :, :tokens]


def _counted_tokens(shape: tuple[int, ...], length: AnyArray | None) -> Array:
    """Marks the tokens [B,T] that are coded as differences."""
    place = jnp.arange(shape[1])
    counted = jnp.broadcast_to(place % ANCHOR_GROUP != 0, shape)
    return counted if length is None else counted & (place < jnp.asarray(length)[:, None])


def coded_bytes(channels: Mapping[str, CodedChannel], length: AnyArray | None) -> np.ndarray:
    """Counts the bytes of each row, int64 [B]: anchors, deviations, symbols by an ideal coder, and its tables.

    An ideal coder takes −log2 of a symbol's frequency, among those of its layer and feature, or of its layer alone,
    whichever takes fewer bytes with their tables: of each symbol that occurs, itself in 8 bits (16 where one is beyond
    ±127) and its frequency in 16.
    """
    total = 0.0
    for coded in channels.values():
        L, B, T, K, H = coded.symbols.shape
        anchors = packed_bytes(coded.anchors.shape[2], K * H, ANCHOR_BITS, GROUP, -1)
        symbols = np.asarray(coded.symbols).reshape(L, B, T, K * H).astype(np.int64)
        counted = np.asarray(_counted_tokens((B, T), length))
        rows = []
        for row in range(B):
            levels = symbols[:, row, counted[row]]
            most = int(np.abs(levels).max(initial=0))
            entry, width = 3 if most <= 127 else 4, 2 * most + 1
            # One histogram of all features at once: each feature's symbols have numbers of their own.
            places = np.arange(L * K * H).reshape(L, 1, K * H) * width + most + levels
            counts = np.bincount(places.ravel(), minlength=L * K * H * width).reshape(L, K * H, width)
            sizes = [_ideal_bytes(part, entry) for part in (counts, counts.sum(1))]
            rows.append(min(sizes) + L * (anchors + 2 * K * H))
        total = total + np.asarray(rows)
    return np.ceil(total).astype(np.int64)


def _ideal_bytes(counts: np.ndarray, entry: int) -> float:
    """Bytes of symbols, each coded in its own bits among those that share a histogram of the last axis."""
    number = counts.sum(-1)
    bits = (number * np.log2(np.maximum(number, 1))).sum() - (counts * np.log2(np.maximum(counts, 1))).sum()
    return float(bits) / 8 + entry * np.count_nonzero(counts)
