"""One patch for every ordering of an antecedent set: running sums of deficits, and factors of their mean. Kamera §5."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from ..backbone import Backbone, Tokens
from ..cache import Antecedent, AntecedentLike, Chunk, Patch, antecedent_of
from ..core import AnyArray, PhaseFreeKV, ops
from ..errors import InputError, PatchMismatchError, ShapeError
from ..utils.kinds import expect_kind
from .canonical import conditioned as conditioned_kv
from .canonical import unit_tokens
from .compress import Rank
from .factors import KVArrays, Method, arrays_of, check_conditioned, from_deficit, metadata_of


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Accumulated:
    """The running sum of a chunk's deficits over orderings of an antecedent set.

    `total` is {channel: float32 [L, T, K, H]}, or [L, B, T, K, H] of a batch of chunks; `count` orderings went into
    it; `antecedent` is the sorted set, or None.
    """

    total: Mapping[str, Float[AnyArray, "L *B T _ _"]]
    count: int
    chunk: Chunk
    antecedent: Antecedent | None = None

    def __repr__(self) -> str:
        return f"Accumulated({self.count} orderings of {_named(self.antecedent)} in front of {self.chunk!r})"


def _named(members: Antecedent | None) -> str:
    return "None" if members is None else str(members.ids if members.plain else members.members)


def accumulate(
    acc: Accumulated | None, conditioned: KVArrays, chunk: Chunk, antecedent: AntecedentLike | None = None
) -> Accumulated:
    """Adds one ordering's deficit to a running sum (None starts it). Kamera §5, the orbit patch.

    Args:
      acc: what came before, of the same chunk.
      conditioned: KV(B|A) behind this ordering, phase-free.
      chunk: the canonical.
      antecedent: what stood in front; every ordering must hold the same set, of the same contents, served in the same
        way. None, then for all orderings, leaves it to `orbit_patch` to be told.

    Raises:
      PatchMismatchError: another chunk or antecedent set than before. ShapeError, NotFiniteError: bad `conditioned`.
    """
    if acc is not None:
        expect_kind(acc, Accumulated, "accumulate", "what accumulate returned before, or None")
    check_conditioned(chunk, conditioned)
    members = None if antecedent is None else antecedent_of(antecedent).sorted()
    if acc is None:
        total = {name: jnp.zeros(value.shape, jnp.float32) for name, value in chunk.kv.items()}
        acc = Accumulated(total, 0, chunk, members)
    else:
        _check_same_chunk(acc.chunk, chunk)
    if members != acc.antecedent:
        raise PatchMismatchError(
            f"accumulate: antecedent {_named(members)}; expected an ordering of {_named(acc.antecedent)}"
        )
    total = ops.jitted_accumulate(dict(acc.total), arrays_of(conditioned), arrays_of(chunk.kv), jnp.int32(chunk.length))
    return Accumulated(total, acc.count + 1, acc.chunk, members)


def _check_same_chunk(first: Chunk, second: Chunk) -> None:
    for word in ("id", "backbone", "layout", "length", "content", "lead"):
        found, expected = getattr(second, word), getattr(first, word)
        known = word == "lead" or None not in (found, expected)
        if known and found != expected:
            what = "chunk" if word == "id" else f"chunk {first.id!r}: {word}"
            raise PatchMismatchError(f"accumulate: {what} {found!r}; expected {expected!r}")
    if first.tokens != second.tokens:
        raise ShapeError(f"accumulate: {second.tokens} tokens; expected the {first.tokens} of the chunk before")
    if first.batch != second.batch:
        raise ShapeError(f"accumulate: a batch of {second.batch}; expected {first.batch} as of the chunk before")


def orbit_patch(
    acc: Accumulated,
    rank: Rank,
    antecedent: AntecedentLike | None = None,
    *,
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """Forms one patch for every ordering of an antecedent set: factors of the mean deficit. Kamera §5.

    Args:
      acc: from `accumulate`.
      rank: as in `form_patch`.
      antecedent: the set, where `accumulate` was not told.

    Raises:
      RankError: as in `form_patch`. PatchMismatchError: another set than was accumulated. InputError: no set known.
    """
    expect_kind(acc, Accumulated, "orbit_patch", "what accumulate returns")
    members = None if antecedent is None else antecedent_of(antecedent).sorted()
    if members is not None and acc.antecedent is not None and members != acc.antecedent:
        raise PatchMismatchError(f"orbit_patch: antecedent {_named(members)}; expected {_named(acc.antecedent)}")
    members = acc.antecedent if members is None else members
    if members is None:
        raise InputError("orbit_patch: antecedent None; expected the ids of the set, here or in accumulate")
    chunk = acc.chunk
    mean = {name: jnp.asarray(value) / acc.count for name, value in acc.total.items()}
    metadata = metadata_of(chunk, "canonical", members, orbit=True)
    return from_deficit(chunk, mean, rank, metadata, method, key, dtype)


Order = tuple[int, ...]
"""An ordering of an antecedent set: the places of its members, from the front."""


def orders_of(count: int, most: int = 24, *, seed: int = 0, hold_out: Iterable[Sequence[int]] = ()) -> list[Order]:
    """Lists orders of `count` chunks that an orbit patch is formed of: all of them up to 4 chunks, else a sample.

    Args:
      most: orders at most; beyond it (24 are all orders of 4) they are drawn without repetition.
      seed: of the draw.
      hold_out: orders to be left out, so that the patch can be tested on them.

    Raises:
      InputError: no chunks, `most` below 1, held-out orders that are none of so many chunks, or no order left.
    """
    held = {tuple(int(place) for place in order) for order in hold_out}
    wrong = next((order for order in held if sorted(order) != list(range(count))), None)
    if count < 1 or most < 1 or wrong is not None:
        raise InputError(
            f"orders: {count} chunks, at most {most} orders, {wrong} held out; expected at least 1 each, and orders of "
            f"0 to {count - 1}"
        )
    left = math.factorial(count) - len(held)
    if left < 1:
        raise InputError(f"orders: all {len(held)} orders of {count} chunks are held out; expected one that is not")
    if left <= most:
        return [order for order in itertools.permutations(range(count)) if order not in held]

    draw, drawn = np.random.default_rng(seed), dict[Order, None]()
    while len(drawn) < most:
        order = tuple(int(place) for place in draw.permutation(count))
        if order not in held:
            drawn[order] = None
    return list(drawn)


def form_orbit(
    chunk: Chunk,
    antecedent: AntecedentLike,
    conditioned_behind: Callable[[Order], KVArrays],
    rank: Rank,
    *,
    most: int = 24,
    seed: int = 0,
    hold_out: Iterable[Sequence[int]] = (),
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """Prefills a chunk behind orders of its antecedent set and forms one patch for every order. Kamera §5.

    Args:
      chunk: the canonical.
      antecedent: the set, in any order.
      conditioned_behind: gives KV(B|A) behind the members in the order of the places that it is given, such as
        `prefilled_orders` makes; it is called once for each order.
      rank, method, key, dtype: as in `orbit_patch`.
      most, seed, hold_out: as in `orders_of`.

    Raises:
      InputError: as `orders_of`. Else as `accumulate` and `orbit_patch`.
    """
    members = antecedent_of(antecedent).members
    acc: Accumulated | None = None
    for order in orders_of(len(members), most, seed=seed, hold_out=hold_out):
        in_order = Antecedent(tuple(members[place] for place in order))
        acc = accumulate(acc, conditioned_behind(order), chunk, in_order)
    assert acc is not None
    return orbit_patch(acc, rank, method=method, key=key, dtype=dtype)


def prefilled_orders(
    backbone: Backbone,
    units: Sequence[Sequence[Any] | Tokens],
    unit: Sequence[Any] | Tokens,
    *,
    lead: Sequence[Any] | Tokens | None = None,
) -> Callable[[Order], KVArrays]:
    """Makes what `form_orbit` calls: a function that prefills `unit` behind `units` in an order.

    Every unit is embedded once, whatever the number of orders.

    Args:
      units: the antecedent set; unit: the chunk; lead: what all of it stands behind. Each as `conditioned` takes them.
    """
    embedded = [unit_tokens(backbone, each) for each in units]
    last = unit_tokens(backbone, unit)
    front = None if lead is None else unit_tokens(backbone, lead)

    def behind(order: Order) -> KVArrays:
        found = conditioned_kv(backbone, [*(embedded[place] for place in order), last], lead=front)[-1]
        return found if isinstance(unit, Tokens) else PhaseFreeKV({name: value[:, 0] for name, value in found.items()})

    return behind
