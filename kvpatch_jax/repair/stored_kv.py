"""Stored forms: arrays that a method keeps of KV, their bytes, and how they are read back into a cache.

Every form is made within a budget in bytes and served by one driver, `serve_form`. Arrays are of a batch,
{channel: [L,B,T,K,H]}, and every row is encoded by itself: its groups hold none of its padding.
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

from ..backbone import KV, Backbone
from ..core import AnyArray, KVEncoding, KVLayout, PackedArray, encode_kv, to_engine, unpack
from ..errors import InputError
from ..utils.traced_flops import traced_flops
from .repair_budget import RepairBudget, kv_bytes
from .repaired import RepairBytes, Repaired, engine_written
from .spliced_cache import SplicedCache

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
    """Returns the bytes per row of a budget that is given in bytes, or as a share of the chunk's KV.

    Raises:
      InputError: a budget in tokens, or a splice of a whole prompt.
    """
    if splice.chunks is not None:
        raise InputError(f"splice.chunks: got {splice.chunks}; expected a splice of one chunk")
    if budget.kv_bytes is not None:
        return budget.kv_bytes
    if budget.share is None:
        raise InputError(f"budget: got {budget}; expected bytes, or a share of the chunk's KV")
    return int(budget.share * kv_bytes(layout, splice.slots.shape[1]))


def largest_fitting[T](options: Sequence[T], nbytes: Callable[[T], int], allowed: int) -> T:
    """Returns the last option that takes at most the allowed bytes, of options that take ever more.

    Raises:
      InputError: not even the first one fits.
    """
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
    """Encodes phase-free KV, each row by itself.

    Args:
      length: tokens of a row that are not padding; None: all.
    """
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
