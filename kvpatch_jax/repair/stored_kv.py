"""Stored forms: arrays that a method keeps of KV, their bytes, and how they are read back into a cache.

Every form is made within a budget in bytes and served by one driver, `serve_form`. Arrays are of a batch,
{channel: [L,B,T,K,H]}, and every row is encoded by itself: its groups hold none of its padding.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from ..backbone import KV, Backbone
from ..core import KVEncoding, KVLayout, PackedArray, encode_kv, to_engine, unpack
from ..errors import InputError
from .repair_budget import RepairBudget, kv_bytes
from .repaired import RepairBytes, Repaired, engine_written, with_flops
from .spliced_cache import AnyArray, OtherAntecedent, SplicedCache, check_splice, required

StoredKV = dict[str, PackedArray | Array]


class StoredForm(NamedTuple):
    """What a method keeps of a chunk.

    Attributes:
      decode: returns phase-free KV {channel: [L,B,T,K,H]} of what is kept.
      bytes: of a row.
      setting: what FLOPs depend on besides shapes.
      decoding: FLOPs of one row, beside matrix products, of bringing it back.
      forming: FLOPs of one row, of factorising it before its first reuse.
    """

    decode: Callable[[], KV]
    bytes: RepairBytes
    setting: tuple[Any, ...]
    decoding: int = 0
    forming: int = 0


def serve_form(backbone: Backbone, splice: SplicedCache, form: StoredForm) -> Repaired:
    """Decodes a form and places it at the splice's slots and positions; no token is run."""
    layout = backbone.layout

    def serve(splice: SplicedCache) -> Repaired:
        kv = to_engine(layout, dict(form.decode()), splice.tokens.positions, 0)
        return engine_written(layout, splice, kv, form.bytes)

    repaired = with_flops(serve(splice), serve, splice, backbone, form.setting, form.decoding)
    return dataclasses.replace(repaired, forming_flops=form.forming)


# ---------------------------------------------------------------------------------------------------------- budgets


def allowed_bytes(
    layout: KVLayout, splice: SplicedCache, budget: RepairBudget | float, method: str, *, hybrid: bool = False
) -> int:
    """Returns the bytes per row of a budget that is given in bytes, or as a share of the chunk's KV.

    Raises:
      InputError: a budget in tokens or by layer, or a splice of a whole prompt. As `check_splice`.
    """
    check_splice(layout, splice, hybrid=hybrid)
    budget = RepairBudget.of(budget)
    if splice.chunks is not None:
        raise InputError(f"{method}.chunks: got {splice.chunks}; expected a splice of one chunk")
    if budget.kv_bytes is not None:
        return budget.kv_bytes
    if budget.share is None:
        raise InputError(f"{method}.budget: got {budget}; expected bytes, or a share of the chunk's KV")
    return int(budget.share * kv_bytes(layout, splice.slots.shape[1]))


def largest_fitting[T](options: Sequence[T], nbytes: Callable[[T], int], allowed: int, method: str) -> T:
    """Returns the last option that takes at most the allowed bytes, of options that take ever more.

    Raises:
      InputError: not even the first one fits.
    """
    place = bisect.bisect_right(options, allowed, key=nbytes)
    if not place:
        raise InputError(f"{method}.budget: got {allowed} bytes; expected at least {nbytes(options[0])}")
    return options[place - 1]


def most_bits(
    layout: KVLayout, tokens: int, encoding: KVEncoding, choices: Sequence[int], allowed: int, method: str
) -> KVEncoding:
    """Returns the encoding with the most bits, keys and values alike, that takes at most these bytes."""
    encodings = [dataclasses.replace(encoding, keys=bits, values=bits) for bits in choices]
    return largest_fitting(encodings, lambda encoding: encoding.nbytes(layout, tokens), allowed, method)


# ----------------------------------------------------------------------------------------------------- KV that is kept


def recorded_kv(splice: SplicedCache, method: str) -> KV:
    """Returns the KV that methods keep a form of.

    Raises:
      InputError: there is none.
    """
    return required(splice, "recorded", method, "KV that an earlier prefill behind the same antecedent left")


def other_antecedents(splice: SplicedCache, method: str) -> tuple[OtherAntecedent, ...]:
    """Returns the chunk's KV behind other antecedents.

    Raises:
      InputError: there is none.
    """
    if not splice.others:
        raise InputError(f"{method}.others: got none; expected KV of the chunk behind at least one other antecedent")
    return tuple(splice.others)


def expect_values(arrays: Any, method: str) -> None:
    """Refuses KV inside a trace.

    Raises:
      InputError: an array is traced.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        raise InputError(f"{method}: got KV inside a trace; expected arrays, on whose values the form depends")


def encoding_of(bits: KVEncoding | str | int) -> KVEncoding:
    """Returns an encoding, that of its word, or of a number of bits: 1 to 8, each feature with one range, or 16.

    Raises:
      InputError: other bits, or not a word.
    """
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

    return jax.vmap(encode, in_axes=(1, 0), out_axes=1)(dict(kv), jnp.asarray(length))


@jax.jit
def decode_rows(stored: StoredKV) -> dict[str, Array]:
    """Decodes what `encode_rows` returns, to float32."""
    return {
        name: unpack(value, jnp.float32) if isinstance(value, PackedArray) else jnp.asarray(value).astype(jnp.float32)
        for name, value in stored.items()
    }
