"""Stored forms: arrays that a method keeps of KV, their bytes, and how they are read back into a cache; those of the KV
itself, in the canonical's place: in few bits, in a lower rank, or with its antecedent.

Every form is made of `splice.recorded` within a budget in bytes, and served by one driver, `serve_form`, which reads
nothing of it. FLOPs are those of serving alone. Arrays are of a batch, {channel: [L,B,T,K,H]}, and every row is encoded
by itself: its groups hold none of its padding.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from pallas_kernels import factorise

from ..backbone import KV, Backbone
from ..core import (
    BITS,
    GROUP,
    WHOLE,
    AnyArray,
    Axes,
    KVEncoding,
    KVLayout,
    PackedArray,
    encode_kv,
    flatten_heads,
    to_engine,
    to_phase_free,
    unpack,
)
from ..errors import InputError
from ..utils.traced_flops import traced_flops
from .repair_budget import ALL, NUMBER_BYTES, RepairBudget, kv_bytes
from .repaired import RepairBytes, Repaired, engine_written, factorising_flops, method, rotation_flops, untouched
from .spliced_cache import SplicedCache, check_rows, live_tokens, required, with_front

SHADOW_CHUNK = 8
"""Tokens of one landmark in ShadowKV (Sun et al. 2025, section 4.2)."""
StoredKV = dict[str, PackedArray | Array]


def serve_form(
    backbone: Backbone, splice: SplicedCache, bytes: RepairBytes, decode: Callable[[], KV], decoding: int = 0
) -> Repaired:
    """Decodes a form and places it at the splice's slots and positions; no token is run.

    Args:
      decode: returns phase-free KV {channel: [L,B,T,K,H]} of what is kept.
      decoding: FLOPs of one row, beside matrix products, of bringing it back.
    """
    layout = backbone.layout

    def serve(splice: SplicedCache) -> Repaired:
        kv = to_engine(layout, dict(decode()), splice.tokens.positions, 0)
        return engine_written(layout, splice, kv, bytes)

    return dataclasses.replace(serve(splice), placing_flops=decoding, count_flops=lambda: traced_flops(serve, splice))


# ---------------------------------------------------------------------------------------------------------- budgets


def allowed_bytes(layout: KVLayout, splice: SplicedCache, budget: RepairBudget) -> int:
    """Returns the bytes per row of a budget in bytes, or a share of one chunk's KV; raises InputError for others."""
    if splice.chunks is not None:
        raise InputError(f"splice.chunks: got {splice.chunks}; expected a splice of one chunk")
    if budget.kv_bytes is not None:
        return budget.kv_bytes
    if budget.share is None:
        raise InputError(f"budget: got {budget}; expected bytes, or a share of the chunk's KV")
    return int(budget.share * kv_bytes(layout, splice.slots.shape[1]))


def largest_fitting[T](options: Sequence[T], nbytes: Callable[[T], int], allowed: int) -> T:
    """Returns the last option that takes at most the allowed bytes, of options that take ever more."""
    place = bisect.bisect_right(options, allowed, key=nbytes)
    if not place:
        raise InputError(f"budget: got {allowed} bytes; expected at least {nbytes(options[0])}")
    return options[place - 1]


def most_bits(layout: KVLayout, tokens: int, encoding: KVEncoding, choices: Sequence[int], allowed: int) -> KVEncoding:
    """Returns the encoding with the most bits, keys and values alike, that takes at most these bytes."""
    encodings = [dataclasses.replace(encoding, keys=bits, values=bits) for bits in choices]
    return largest_fitting(encodings, lambda encoding: encoding.nbytes(layout, tokens), allowed)


# ----------------------------------------------------------------------------------------------------- KV that is kept


def expect_values(arrays: Any, method: str) -> None:
    """Raises InputError for KV inside a trace."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        raise InputError(f"{method}: got KV inside a trace; expected arrays, on whose values the form depends")


def encoding_of(bits: KVEncoding | str | int) -> KVEncoding:
    """Returns an encoding, that of its word, or of a number of bits: 1 to 8, each feature with one range, or 16."""
    return KVEncoding.of_bits(bits) if isinstance(bits, int) else KVEncoding.of(bits)


@jax.jit
def differences(kv: KV, base: KV) -> dict[str, Float[Array, "L B T K H"]]:
    """Subtracts a base from KV in float32."""
    return {name: jnp.asarray(value).astype(jnp.float32) - base[name] for name, value in kv.items()}


@functools.partial(jax.jit, static_argnames=("layout", "encoding"))
def encode_rows(
    layout: KVLayout, kv: Mapping[str, AnyArray], encoding: KVEncoding, length: Int[AnyArray, " B"] | None = None
) -> StoredKV:
    """Encodes phase-free KV, each row by itself, of its first `length` tokens (None: of all)."""
    if length is None:
        return encode_kv(layout, kv, encoding)

    def encode(row: KV, length: Array) -> StoredKV:
        return encode_kv(layout, row, encoding, length)

    rows: Any = dict(kv)
    return jax.vmap(encode, in_axes=(1, 0), out_axes=1)(rows, jnp.asarray(length))


@jax.jit
def decode_rows(stored: StoredKV) -> dict[str, Array]:
    """Decodes what `encode_rows` returns, to float32."""
    return {
        name: unpack(value, jnp.float32) if isinstance(value, PackedArray) else jnp.asarray(value).astype(jnp.float32)
        for name, value in stored.items()
    }


# -------------------------------------------------------------------------------------------------------- few bits


@method(hybrid=True)
def quantised(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget = ALL,
    *,
    bits: KVEncoding | str | int | None = None,
    axes: Axes | None = None,
) -> Repaired:
    """Serves the recorded KV itself in few bits, in the canonical's place.

    Source: KIVI (Liu et al. 2024, arXiv 2402.02750), sections 3 and 4: keys by feature in groups of tokens, before
    rotation, and all else by token in groups of features; its residual of recent tokens in full precision has no
    counterpart, because a chunk does not grow. PolyKV (arXiv 2604.24971) keeps "k8v3", KV-AdaQuant (arXiv 2502.15075)
    "k4v2".

    Args:
      budget: bytes of the quantised KV with its scales, where there are no bits: the most that fit, keys and values
        alike.
      bits: of every channel, 1 to 8, each feature with a range over all tokens; 16: bfloat16; a word such as "k4v2g32":
        KIVI's groups. Hybrid models: 16.
      axes: in place of those that follow from bits, in groups of 32: "token" keeps keys by token too, which models with
        outlier features do not bear.
    """
    layout, encoding = backbone.layout, None if bits is None else encoding_of(bits)
    if encoding is None or encoding.decoding:
        check_rows(layout)
    allowed = allowed_bytes(layout, splice, budget)
    if encoding is None:
        encoding = most_bits(layout, splice.slots.shape[1], encoding_of(1), BITS, allowed)
    elif axes is not None:
        encoding = dataclasses.replace(encoding, axes=axes, group=GROUP)
    return _serve_encoded(backbone, splice, required(splice, "recorded"), encoding)


@method()
def joint_pair(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget, *, precision: KVEncoding | str | int | None = None
) -> Repaired:
    """Serves the antecedent and the chunk as one relocatable chunk [A B]: exact for that pair, up to its precision.

    Prompt Cache calls it a scaffold (Gim et al. 2024): modules that attend to one another are encoded
    together. `stored` is of the pair: A's KV is kept again for every chunk that it is paired with, where other
    forms leave A to its own chunk, which no repair of B counts. At N antecedents of B there are N pairs.

    Args:
      splice: with a `front` that is shorter than the cache.
      budget: bytes of the pair; bfloat16 if it fits, else the most bits that do.
      precision: in place of the budget's; such as 16 or "k4v4".
    """
    layout, allowed = backbone.layout, allowed_bytes(backbone.layout, splice, budget)
    recorded, front = required(splice, "recorded"), required(splice, "front")
    before, tokens = front.embeddings.shape[1], splice.slots.shape[1]
    if before >= splice.cache[layout.names[0]].shape[2]:
        raise InputError(f"splice.front: got {before} tokens; expected fewer than the cache has slots")
    if precision is None:
        encoding = most_bits(layout, before + tokens, KVEncoding(), (*BITS, WHOLE), allowed)
    else:
        encoding = encoding_of(precision)

    # The pair is a chunk from the first slot on.
    ahead = {name: jnp.asarray(value)[:, :, :before].astype(jnp.float32) for name, value in splice.cache.items()}
    ahead = to_phase_free(layout, ahead, front.positions)
    joined = {}
    for name in layout.names:
        joined[name] = jnp.concatenate([ahead[name], jnp.asarray(recorded[name]).astype(jnp.float32)], axis=2)
    repaired = _serve_encoded(backbone, with_front(splice, front), joined, encoding)
    placing = repaired.placing_flops + rotation_flops(layout, before)
    return dataclasses.replace(repaired, chosen=untouched(layout, splice).chosen, placing_flops=placing)


def _serve_encoded(backbone: Backbone, splice: SplicedCache, kv: KV, encoding: KVEncoding) -> Repaired:
    layout, tokens = backbone.layout, splice.slots.shape[1]
    stored, size = encode_rows(layout, dict(kv), encoding, splice.length), encoding.nbytes(layout, tokens)
    decoding = encoding.decoding * layout.numbers * tokens
    bytes = RepairBytes(stored=size, moved=size)
    return serve_form(backbone, splice, bytes, functools.partial(decode_rows, stored), decoding)


# -------------------------------------------------------------------------------------------------------- low rank


@method()
def low_rank(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget = ALL, *, rank: int | None = None
) -> Repaired:
    """Serves the recorded KV itself in a lower rank, in the canonical's place: truncated SVD in the phase-free frame.

    Args:
      budget: bytes of the factors; the largest rank that fits is taken.
      rank: in place of the budget's.
    """
    return _reduced(backbone, splice, budget, rank, backbone.layout.names)


@method()
def shadowkv(backbone: Backbone, splice: SplicedCache, budget: RepairBudget, *, rank: int | None = None) -> Repaired:
    """Serves the recorded KV with keys of low rank, landmarks' outliers in full, and values in full.

    Source: ShadowKV (Sun et al. 2025, arXiv 2410.21465), sections 3 and 4: keys before rotation are low in rank;
    values stay as they are (there on the host); of chunks of 8 tokens, whose landmark is the mean of their rotated
    keys, those whose keys are least like it are outliers and keep their keys (48 of some 15 000 there; here one of
    each 64, at least one). Reading only the chunks that a query's landmarks choose saves bandwidth and no quality, and
    is left out, which favours this method. Kamera's Table 6 has it as "low-rank-K reconstruction (ShadowKV-style)".

    Args:
      budget: bytes of factors, outliers, landmarks and values; the largest rank that fits is taken.
      rank: of the keys, in place of the budget's.
    """
    names = tuple(channel.name for channel in backbone.layout.channels if channel.rotates)
    return _reduced(backbone, splice, budget, rank, names, shadow=True)


def _reduced(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget,
    rank: int | None,
    names: tuple[str, ...],
    shadow: bool = False,
) -> Repaired:
    """Serves some channels in a low rank and the others as they are; `shadow`: outlier tokens as they are too."""
    layout, tokens, live = backbone.layout, splice.slots.shape[1], live_tokens(splice)
    allowed = allowed_bytes(layout, splice, budget)
    recorded = {name: jnp.asarray(value) for name, value in required(splice, "recorded").items()}
    widths = {name: layout.channel(name).features for name in names}
    blocks = -(-tokens // SHADOW_CHUNK)
    outliers = max(1, blocks // 64) if shadow else 0

    def nbytes(rank: int) -> int:
        numbers = sum(channel.features for channel in layout.channels if channel.name not in names) * tokens
        for width in widths.values():
            numbers += min(rank * (tokens + width), tokens * width)
            # Outliers keep their keys, and every chunk its landmark.
            numbers += (min(tokens, outliers * SHADOW_CHUNK) + blocks) * width if shadow else 0
        return numbers * layout.layers * NUMBER_BYTES

    highest = max(min(tokens, width) for width in widths.values())
    if rank is None:
        rank = largest_fitting(range(1, highest + 1), nbytes, allowed)
    if not 1 <= rank <= highest:
        raise InputError(f"rank: got {rank}; expected 1 to {highest}")

    factors = _kv_factors(recorded, live, tuple((name, min(rank, tokens, widths[name])) for name in names))
    marked = None
    if shadow:
        rotated = to_engine(layout, recorded, splice.tokens.positions, 0)
        marked = {name: _outlier_tokens(rotated[name], live, outliers)[..., None, None] for name in names}

    def decode() -> KV:
        kv = dict(recorded)
        for name, (u, v) in factors.items():
            value = jnp.matmul(u, v).reshape(recorded[name].shape)
            kv[name] = value if marked is None else jnp.where(marked[name], recorded[name], value)
        return kv

    repaired = serve_form(backbone, splice, RepairBytes(stored=nbytes(rank), moved=nbytes(rank)), decode)
    return dataclasses.replace(repaired, forming_flops=factorising_flops(layout, tokens, names))


@functools.partial(jax.jit, static_argnames=("ranks",))
def _kv_factors(recorded: KV, live: Array, ranks: tuple[tuple[str, int], ...]) -> dict[str, tuple[Array, Array]]:
    factors = {}
    for name, rank in ranks:
        flat = jnp.where(live[..., None], flatten_heads(recorded[name].astype(jnp.float32)), 0.0)
        factors[name] = factorise(flat, rank, method="exact")
    return factors


@functools.partial(jax.jit, static_argnames=("outliers",))
def _outlier_tokens(keys: Float[Array, "L B T K H"], live: Array, outliers: int) -> Array:
    """Marks the tokens [L,B,T] of the chunks whose keys are least like their landmark, by their least cosine."""
    L, B, T, K, H = keys.shape
    short = -T % SHADOW_CHUNK
    there = jnp.pad(live, ((0, 0), (0, short))).reshape(B, -1, SHADOW_CHUNK)
    padded = jnp.pad(keys, ((0, 0), (0, 0), (0, short), (0, 0), (0, 0))).reshape(L, B, -1, SHADOW_CHUNK, K, H)
    weight = there[None, ..., None, None]
    landmark = (padded * weight).sum(3, keepdims=True) / jnp.maximum(weight.sum(3, keepdims=True), 1)
    norms = jnp.linalg.norm(padded, axis=-1) * jnp.linalg.norm(landmark, axis=-1)
    cosine = (padded * landmark).sum(-1) / jnp.maximum(norms, 1e-9)
    least = jnp.where(there[None, ..., None], cosine, 1.0).min((3, 4))
    _, index = jax.lax.top_k(-least, min(outliers, least.shape[-1]))
    marked = jnp.zeros(least.shape, bool)
    marked = marked.at[jnp.arange(L)[:, None, None], jnp.arange(B)[:, None], index].set(True)
    return jnp.repeat(marked, SHADOW_CHUNK, axis=-1)[..., :T]
