"""KV as repairs keep it: in few bits or in 16, with its bytes; and what a correction is added to.

Arrays are of a batch, {channel: [L,B,T,K,H]}, and every row is encoded by itself: its groups hold none of its padding.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..backbone import KV
from ..core import (
    Channel,
    KVEncoding,
    KVLayout,
    PackedArray,
    compose,
    pack,
    packed_bytes,
    split_transition,
    to_engine,
    unpack,
)
from ..core.few_bits import BITS, GROUP
from ..errors import InputError
from .repair_budget import RepairBudget, kv_bytes
from .spliced_cache import (
    AnyArray,
    RepairBytes,
    Repaired,
    SplicedCache,
    blind_bytes,
    canonical_of,
    check_splice,
    live_tokens,
    recorded_of,
    required,
    untouched,
    write_slots,
)

WHOLE = 16
"""Bits of bfloat16, in which numbers are kept whole."""
Axes = Literal["kivi", "token", "feature"]
"""What shares a scale: keys by feature and all else by token, all by token, or all by feature."""
Base = Literal["canonical", "mean", "others", "first"]
"""What a correction is added to: the canonical; the mean of KV behind all antecedents, or all but the splice's own; the
KV behind the first of the others."""
StoredKV = dict[str, PackedArray | Array]


@dataclasses.dataclass(frozen=True)
class KVPrecision:
    """In how many bits KV is kept, and which numbers share a scale. Hashable.

    Attributes:
      keys: bits of keys: the channels that rotate, and one named k. 1 to 8, or 16: bfloat16.
      values: bits of the other channels, likewise.
      group: numbers of one scale; None: all tokens of a feature, or all features of a token.
      axes: "kivi": keys by feature in groups of tokens, the others by token in groups of features (arXiv 2402.02750);
        "token" or "feature": all channels so.
      symmetric: about zero, without a least value. At least 2 bits.

    Raises:
      InputError: other bits, a group below 1, or other axes.
    """

    keys: int = 4
    values: int = 4
    group: int | None = GROUP
    axes: Axes = "kivi"
    symmetric: bool = False

    def __post_init__(self) -> None:
        for word, bits in (("keys", self.keys), ("values", self.values)):
            expected = (*BITS[1 if self.symmetric else 0 :], WHOLE)
            if isinstance(bits, bool) or bits not in expected:
                raise InputError(f"precision.{word}: got {bits!r:.80} bits; expected bits of {expected}")
        # The encoding checks the group, and in one place.
        KVEncoding(group=self.group)
        if self.axes not in get_args(Axes):
            raise InputError(f"precision.axes: got {self.axes!r:.80}; expected one of {', '.join(get_args(Axes))}")

    @classmethod
    def of(cls, precision: "KVPrecision | KVEncoding | str | int") -> "KVPrecision":
        """Returns a precision from one, an encoding, the word of an encoding ("k4v4"), or bits of all channels.

        Bits alone have the fewest scales that keys allow: every feature a range over all tokens.

        Raises:
          InputError: no such word, or other bits.
        """
        if isinstance(precision, cls):
            return precision
        if isinstance(precision, int):
            return cls(precision, precision, None, "feature")
        encoding = KVEncoding.of(precision)  # pyright: ignore[reportArgumentType]
        return cls(encoding.keys, encoding.values, encoding.group)

    def of_channel(self, channel: Channel) -> tuple[int, int]:
        """Returns the bits of a channel, and the axis of its groups: −2 over tokens, −1 over features."""
        bits, axis = KVEncoding().of_channel(channel)
        bits = self.keys if axis == -2 else self.values
        return bits, {"kivi": axis, "token": -1, "feature": -2}[self.axes]

    def nbytes(self, layout: KVLayout, tokens: int) -> int:
        """Counts the bytes of one row's KV over `tokens` tokens, scales and least values included."""
        total = 0
        for channel in layout.token_channels:
            bits, axis = self.of_channel(channel)
            size = array_bytes(tokens, channel.features, bits, self.group, axis, self.symmetric)
            total += size * layout.depth(channel.name)
        return total + kv_bytes(layout, 0)

    @property
    def decoding(self) -> int:
        """FLOPs of bringing one number back: its product with the scale, and the least value added; none in 16 bits."""
        return 0 if self.keys == self.values == WHOLE else 2


Precision = KVPrecision | KVEncoding | str | int
"""Bits of every channel, or the word of an encoding such as "k4v4g32"; see `KVPrecision.of`."""


def array_bytes(rows: int, columns: int, bits: int, group: int | None, axis: int, symmetric: bool = False) -> int:
    """Counts the bytes of a matrix in few bits with its scales, or in bfloat16."""
    if bits == WHOLE:
        return 2 * rows * columns
    return packed_bytes(rows, columns, bits, group, axis, symmetric=symmetric)


# ----------------------------------------------------------------------------------------------- encode and decode


@functools.partial(jax.jit, static_argnames=("bits", "group", "axis", "symmetric"))
def encode_rows(
    value: Float[AnyArray, "L B T K H"],
    length: Int[AnyArray, " B"] | None,
    bits: int,
    group: int | None,
    axis: int,
    symmetric: bool = False,
) -> PackedArray | Array:
    """Encodes one channel in few bits, or in bfloat16 (16 bits); padding of a row takes no part in its ranges."""
    value = jnp.asarray(value)
    if bits == WHOLE:
        return value.astype(jnp.bfloat16)
    value = value.astype(jnp.float32)
    if length is None:
        return pack(value, bits, group, axis, symmetric=symmetric, heads=True)

    def one(row: Array, length: Array) -> PackedArray:
        return pack(row, bits, group, axis, symmetric=symmetric, heads=True, length=length)

    return jax.vmap(one, in_axes=(1, 0), out_axes=1)(value, jnp.asarray(length))


def encode_kv_rows(
    layout: KVLayout, kv: Mapping[str, AnyArray], precision: KVPrecision, length: AnyArray | None = None
) -> StoredKV:
    """Encodes phase-free KV {channel: [L,B,T,K,H]}, each row by itself.

    Args:
      length: int [B], tokens of a row that are not padding; None: all.
    """
    stored: StoredKV = {}
    for channel in layout.channels:
        bits, axis = precision.of_channel(channel)
        value = jnp.asarray(kv[channel.name])
        stored[channel.name] = encode_rows(value, length, bits, precision.group, axis, precision.symmetric)
    return stored


@jax.jit
def decode_kv_rows(stored: StoredKV) -> dict[str, Array]:
    """Decodes what `encode_kv_rows` returns, to float32."""
    return {
        name: unpack(value, jnp.float32) if isinstance(value, PackedArray) else jnp.asarray(value).astype(jnp.float32)
        for name, value in stored.items()
    }


# --------------------------------------------------------------------------------------------- budgets and results


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


def most_bits(
    layout: KVLayout,
    allowed: int,
    tokens: int,
    method: str,
    like: KVPrecision,
    choices: tuple[int, ...] = BITS,
    beside: int = 0,
) -> KVPrecision:
    """Returns the precision with the most bits, keys and values alike, that takes at most these bytes.

    Args:
      like: has the group and the axes.
      choices: bits to choose from, ascending.
      beside: bytes that are kept besides.

    Raises:
      InputError: not even the fewest bits fit.
    """
    sizes = {}
    for bits in choices:
        if bits > 1 or not like.symmetric:
            precision = dataclasses.replace(like, keys=bits, values=bits)
            sizes[precision] = beside + precision.nbytes(layout, tokens)
    fitting = [precision for precision, size in sizes.items() if size <= allowed]
    if not fitting:
        bits, least = next(iter(sizes)).keys, min(sizes.values())
        raise InputError(f"{method}.budget: got {allowed} bytes; expected bits of {choices}, {bits} from {least} bytes")
    return fitting[-1]


def phase_free_written(
    layout: KVLayout, splice: SplicedCache, kv: Mapping[str, AnyArray], bytes: RepairBytes
) -> Repaired:
    """Returns the cache with phase-free KV placed at the splice's slots and positions; no token was run."""
    return engine_written(layout, splice, to_engine(layout, dict(kv), splice.tokens.positions, 0), bytes)


def engine_written(layout: KVLayout, splice: SplicedCache, kv: Mapping[str, AnyArray], bytes: RepairBytes) -> Repaired:
    """Returns the cache with engine-frame KV at the splice's slots; no token was run.

    A hybrid's transition is composed with that of what precedes the chunk, which is the last of the sequence.
    """
    rows, transition = split_transition(kv)
    cache = write_slots(
        {name: splice.cache[name] for name in rows}, jnp.asarray(splice.slots), rows, live_tokens(splice)
    )
    if transition is not None:
        before = required(splice, "before", "repair", "the transition of what precedes the chunk")
        cache |= _jitted_compose(dict(before), transition)
    return dataclasses.replace(untouched(layout, splice), cache=cache, bytes=bytes)


_jitted_compose = jax.jit(compose)


# ----------------------------------------------------------------------------------------------------------- bases


class StoredBase(NamedTuple):
    """What a correction is added to, as it is kept.

    Attributes:
      kv: decoded, phase-free {channel: float32 [L,B,T,K,H]}: what deficits are taken against.
      read: returns it for a splice of the same chunk when it is served.
      bytes: of a row; kept once for all antecedents, as `canonical`, or else as `shared`.
    """

    kv: dict[str, Array]
    read: Callable[[SplicedCache], dict[str, Array]]
    bytes: RepairBytes


def stored_base(
    layout: KVLayout,
    splice: SplicedCache,
    base: Base,
    encoding: Precision | None,
    method: str,
) -> StoredBase:
    """Returns a base, encoded and decoded again.

    Args:
      base: see `Base`.
      encoding: in which it is kept; None: the cache's dtype.

    Raises:
      InputError: another base, no encoding, or no KV of others where the base is made of it.
    """
    check_base(base, method)
    precision = None if encoding is None else KVPrecision.of(encoding)
    plain, tokens = blind_bytes(layout, splice), splice.slots.shape[1]
    size = plain.canonical if precision is None else precision.nbytes(layout, tokens)
    bytes = RepairBytes(canonical=size, moved=size)
    if base == "canonical":
        kv: dict[str, Any] = canonical_of(layout, splice)
        if precision is None:
            return StoredBase(kv, functools.partial(canonical_of, layout), bytes)
    else:
        others = others_of(splice, method)
        versions = [other.kv for other in others[: 1 if base == "first" else None]]
        versions = [recorded_of(splice, method), *versions] if base == "mean" else versions
        kv = mean_kv(versions)
        bytes = RepairBytes(shared=size, moved=size)

    if precision is None:
        dtype = jnp.result_type(splice.cache[layout.names[0]])
        stored: StoredKV = {name: jnp.asarray(value).astype(dtype) for name, value in kv.items()}
    else:
        stored = encode_kv_rows(layout, kv, precision, splice.length)

    def read(own: SplicedCache) -> dict[str, Array]:
        return decode_kv_rows(stored)

    return StoredBase(decode_kv_rows(stored), read, bytes)


def check_base(base: Base, method: str) -> None:
    """Checks the word of a base.

    Raises:
      InputError: there is no such base.
    """
    if base not in get_args(Base):
        raise InputError(f"{method}.base: got {base!r:.80}; expected one of {', '.join(get_args(Base))}")


def others_of(splice: SplicedCache, method: str) -> tuple[Any, ...]:
    """Returns the chunk's KV behind other antecedents.

    Raises:
      InputError: there is none.
    """
    if not splice.others:
        raise InputError(f"{method}.others: got none; expected KV of the chunk behind at least one other antecedent")
    return tuple(splice.others)


@jax.jit
def mean_kv(versions: list[KV]) -> dict[str, Array]:
    """Returns the mean of KV {channel: [L,B,T,K,H]} over its versions, in float32."""
    total = {name: jnp.zeros(value.shape, jnp.float32) for name, value in versions[0].items()}
    for version in versions:
        total = {name: value + version[name].astype(jnp.float32) for name, value in total.items()}
    return {name: value / len(versions) for name, value in total.items()}
