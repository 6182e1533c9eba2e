"""Stored forms of the KV itself, in the canonical's place: in few bits, in a lower rank, or with its antecedent.

They read `splice.recorded` when they form what is kept, and nothing of it when they serve. A budget is bytes kept for
one antecedent: `kv_bytes`, or a share of the chunk's KV. FLOPs are those of serving alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import factorise

from ..backbone import KV, Backbone
from ..core import BITS, GROUP, WHOLE, Axes, KVEncoding, flatten_heads, to_engine, to_phase_free
from ..errors import InputError
from .repair_budget import NUMBER_BYTES, RepairBudget
from .repaired import RepairBytes, Repaired, factorising_flops, untouched
from .spliced_cache import SplicedCache, live_tokens, required, with_front
from .stored_kv import (
    StoredForm,
    allowed_bytes,
    decode_rows,
    encode_rows,
    encoding_of,
    largest_fitting,
    most_bits,
    recorded_kv,
    serve_form,
)

SHADOW_CHUNK = 8
"""Tokens of one landmark in ShadowKV (Sun et al. 2025, section 4.2)."""


def quantised(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float = 1.0,
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

    Raises:
      InputError: unknown bits. LayoutError: a hybrid model in fewer bits than 16.
    """
    encoding = None if bits is None else encoding_of(bits)
    if encoding is not None and axes is not None:
        encoding = dataclasses.replace(encoding, axes=axes, group=GROUP)
    hybrid = encoding is not None and encoding.decoding == 0
    allowed = allowed_bytes(backbone.layout, splice, budget, "quantised", hybrid=hybrid)
    recorded = recorded_kv(splice, "quantised")
    if encoding is None:
        encoding = most_bits(backbone.layout, splice.slots.shape[1], encoding_of(1), BITS, allowed, "quantised")
    return _serve_encoded(backbone, splice, recorded, encoding, "quantised")


def joint_pair(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    precision: KVEncoding | str | int | None = None,
) -> Repaired:
    """Serves the antecedent and the chunk as one relocatable chunk [A B]: exact for that pair, up to its precision.

    Prompt Cache calls it a scaffold (Gim et al. 2024): modules that attend to one another are encoded
    together. `stored` is of the pair: A's KV is kept again for every chunk that it is paired with, where other
    forms leave A to its own chunk, which no repair of B counts. At N antecedents of B there are N pairs.

    Args:
      budget: bytes of the pair; bfloat16 if it fits, else the most bits that do.
      precision: in place of the budget's; such as 16 or "k4v4".

    Raises:
      InputError: unknown bits, or a `front` as long as the cache.
    """
    layout = backbone.layout
    allowed = allowed_bytes(layout, splice, budget, "joint_pair")
    recorded = recorded_kv(splice, "joint_pair")
    front = required(splice, "front", "joint_pair", "the antecedent's tokens, in the first slots")
    before, tokens = front.embeddings.shape[1], splice.slots.shape[1]
    if before >= splice.cache[layout.names[0]].shape[2]:
        raise InputError(f"joint_pair.front: got {before} tokens; expected fewer than the cache has slots")
    if precision is None:
        encoding = most_bits(layout, before + tokens, KVEncoding(), (*BITS, WHOLE), allowed, "joint_pair")
    else:
        encoding = encoding_of(precision)

    # The pair is a chunk from the first slot on.
    ahead = {name: jnp.asarray(value)[:, :, :before].astype(jnp.float32) for name, value in splice.cache.items()}
    ahead = to_phase_free(layout, ahead, front.positions)
    joined = {}
    for name in layout.names:
        joined[name] = jnp.concatenate([ahead[name], jnp.asarray(recorded[name]).astype(jnp.float32)], axis=2)
    repaired = _serve_encoded(backbone, with_front(splice, front), joined, encoding, "joint_pair")
    return dataclasses.replace(repaired, chosen=untouched(layout, splice).chosen)


def _serve_encoded(backbone: Backbone, splice: SplicedCache, kv: KV, encoding: KVEncoding, method: str) -> Repaired:
    layout, tokens = backbone.layout, splice.slots.shape[1]
    stored = encode_rows(layout, dict(kv), encoding, splice.length)
    size = encoding.nbytes(layout, tokens)
    bytes = RepairBytes(stored=size, moved=size)
    decoding = encoding.decoding * layout.numbers * tokens
    form = StoredForm(functools.partial(decode_rows, stored), bytes, (method, encoding), decoding)
    return serve_form(backbone, splice, form)


# -------------------------------------------------------------------------------------------------------- low rank


def low_rank(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float = 1.0, *, rank: int | None = None
) -> Repaired:
    """Serves the recorded KV itself in a lower rank, in the canonical's place: truncated SVD in the phase-free frame.

    Args:
      budget: bytes of the factors; the largest rank that fits is taken.
      rank: in place of the budget's.

    Raises:
      InputError: the rank is out of range.
    """
    return _reduced(backbone, splice, budget, rank, backbone.layout.names, "low_rank")


def shadowkv(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, *, rank: int | None = None
) -> Repaired:
    """Serves the recorded KV with keys of low rank, landmarks' outliers in full, and values in full.

    Source: ShadowKV (Sun et al. 2025, arXiv 2410.21465), sections 3 and 4: keys before rotation are low in rank;
    values stay as they are (there on the host); of chunks of 8 tokens, whose landmark is the mean of their rotated
    keys, those whose keys are least like it are outliers and keep their keys (48 of some 15 000 there; here one of
    each 64, at least one). Reading only the chunks that a query's landmarks choose saves bandwidth and no quality, and
    is left out, which favours this method. Kamera's Table 6 has it as "low-rank-K reconstruction (ShadowKV-style)".

    Args:
      budget: bytes of factors, outliers, landmarks and values; the largest rank that fits is taken.
      rank: of the keys, in place of the budget's.

    Raises:
      InputError: the rank is out of range.
    """
    names = tuple(channel.name for channel in backbone.layout.channels if channel.rotates)
    return _reduced(backbone, splice, budget, rank, names, "shadowkv", shadow=True)


def _reduced(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    rank: int | None,
    names: tuple[str, ...],
    method: str,
    shadow: bool = False,
) -> Repaired:
    """Serves some channels in a low rank and the others as they are; `shadow`: outlier tokens as they are too."""
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget, method)
    recorded = {name: jnp.asarray(value) for name, value in recorded_kv(splice, method).items()}
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
        rank = largest_fitting(range(1, highest + 1), nbytes, allowed, method)
    if not 1 <= rank <= highest:
        raise InputError(f"{method}.rank: got {rank}; expected 1 to {highest}")

    live = live_tokens(splice)
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

    bytes = RepairBytes(stored=nbytes(rank), moved=nbytes(rank))
    forming = factorising_flops(layout, tokens, names)
    return serve_form(backbone, splice, StoredForm(decode, bytes, (method, rank), forming=forming))


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
