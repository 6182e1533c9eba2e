"""Orbit patches: one patch for every order of an antecedent set, of its mean deficit over orders. Kamera §5."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..backbone import Backbone, Tokens
from ..cache import Antecedent, AntecedentLike, Chunk, Patch, antecedent_of
from ..core import AnyArray, PhaseFreeKV, arrays_of, ops
from ..errors import InputError, PatchMismatchError, ShapeError
from ..utils.kinds import expect_kind
from .byte_budget import ByteBudget
from .canonical import conditioned as conditioned_kv
from .canonical import unit_tokens
from .compress import Rank
from .factors import KVArrays, check_conditioned, from_deficit, metadata_of

Order = tuple[int, ...]
"""An ordering of an antecedent set: indices of its members, the first one first."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Accumulated:
    """Running sum of a chunk's deficits over orderings of an antecedent set.

    Attributes:
      total: {channel: float32 [L, T, K, H]}, or [L, B, T, K, H] of a batch of chunks; of a transition's parts likewise.
      count: the number of orderings in the sum.
      chunk: the canonical.
      antecedent: the sorted set, or None.
    """

    total: Mapping[str, Float[AnyArray, "L *B T _ _"]]
    count: int
    chunk: Chunk
    antecedent: Antecedent | None = None

    def __repr__(self) -> str:
        return f"Accumulated({self.count} orderings of {_format_set(self.antecedent)} before {self.chunk!r})"


def _format_set(members: Antecedent | None) -> str:
    return "None" if members is None else str(members.ids if members.plain else members.members)


def accumulate(
    acc: Accumulated | None, conditioned: KVArrays, chunk: Chunk, antecedent: AntecedentLike | None = None
) -> Accumulated:
    """Adds one ordering's deficit to a running sum (None starts it). Kamera §5, the orbit patch.

    Args:
      acc: the sum so far, of the same chunk.
      conditioned: KV(B|A) after this ordering, phase-free.
      chunk: the canonical.
      antecedent: the chunks that precede it; every ordering must hold the same set, of the same contents, served in the
        same way. None, then for all orderings, leaves the set to `orbit_patch`.

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
        # What one of the two chunks does not know differs from nothing; no lead and no encoding are known.
        for word in ("id", "backbone", "layout", "length", "content", "lead", "encoding"):
            found, expected = getattr(chunk, word), getattr(acc.chunk, word)
            known = word in ("lead", "encoding") or None not in (found, expected)
            if known and found != expected:
                what = "chunk" if word == "id" else f"chunk {acc.chunk.id!r}: {word}"
                raise PatchMismatchError(f"accumulate: got {what} {found!r}; expected {expected!r}")
        if (chunk.tokens, chunk.batch) != (acc.chunk.tokens, acc.chunk.batch):
            raise ShapeError(
                f"accumulate: got {chunk.tokens} tokens, batch {chunk.batch}; expected {acc.chunk.tokens} and "
                f"{acc.chunk.batch} as of the chunk before"
            )

    # The sums are kept sorted, so that every order of one set is equal.
    if members != acc.antecedent:
        raise PatchMismatchError(
            f"accumulate: got antecedent {_format_set(members)}; expected an ordering of {_format_set(acc.antecedent)}"
        )

    total = ops.accumulate(dict(acc.total), arrays_of(conditioned), arrays_of(chunk.kv), jnp.int32(chunk.length))
    return Accumulated(total, acc.count + 1, acc.chunk, members)


def orbit_patch(
    acc: Accumulated, rank: Rank | ByteBudget, antecedent: AntecedentLike | None = None, **options: Any
) -> Patch:
    """Forms one patch for every ordering of an antecedent set: factors of the mean deficit. Kamera §5.

    Args:
      acc: from `accumulate`.
      rank: as in `form_patch`.
      antecedent: the set, where `accumulate` got none.
      options: keywords of `from_deficit`: method, key, dtype, weights.

    Raises:
      RankError: as in `form_patch`. PatchMismatchError: another set than was accumulated. InputError: no set known.
    """
    expect_kind(acc, Accumulated, "orbit_patch", "what accumulate returns")
    members = None if antecedent is None else antecedent_of(antecedent).sorted()
    if members is not None and acc.antecedent is not None and members != acc.antecedent:
        raise PatchMismatchError(
            f"orbit_patch: got antecedent {_format_set(members)}; expected {_format_set(acc.antecedent)}"
        )

    members = acc.antecedent if members is None else members
    if members is None:
        raise InputError("orbit_patch: got antecedent None; expected the ids of the set, here or in accumulate")

    # The mean minimises the summed squared error over the orders.
    mean = {name: jnp.asarray(value) / acc.count for name, value in acc.total.items()}
    metadata = metadata_of(acc.chunk, "canonical", members, orbit=True)
    return from_deficit(acc.chunk, mean, rank, metadata, **options)


def orders_of(count: int, most: int = 24, *, seed: int = 0, hold_out: Iterable[Sequence[int]] = ()) -> list[Order]:
    """Lists orders of `count` chunks that an orbit patch is formed of: all of them up to 4 chunks, else a sample.

    Args:
      most: orders at most; beyond it (24 are all orders of 4) they are drawn without repetition.
      seed: of the draw.
      hold_out: orders to be left out, so that the patch can be tested on them.

    Raises:
      InputError: no chunks, `most` below 1, held-out orders that are not orders of `count` chunks, or no order left.
    """
    held = {tuple(map(int, order)) for order in hold_out}
    wrong = next((order for order in held if sorted(order) != list(range(count))), None)
    if count < 1 or most < 1 or wrong is not None:
        raise InputError(
            f"orders: got {count} chunks, at most {most} orders, {wrong} held out; expected at least 1 each, and "
            f"orders of 0 to {count - 1}"
        )

    # Counted, not listed: 12 chunks have 479 001 600 orders.
    left = math.factorial(count) - len(held)
    if left < 1:
        raise InputError(f"orders: got all {len(held)} orders of {count} chunks held out; expected one that is not")
    if left <= most:
        return [order for order in itertools.permutations(range(count)) if order not in held]

    # A dictionary keeps the order of the draws, so that a seed gives the same list everywhere.
    draw, drawn = np.random.default_rng(seed), dict[Order, None]()
    while len(drawn) < most:
        order = tuple(int(place) for place in draw.permutation(count))
        if order not in held:
            drawn[order] = None

    return list(drawn)


def form_orbit(
    chunk: Chunk,
    antecedent: AntecedentLike,
    condition: Callable[[Order], KVArrays],
    rank: Rank | ByteBudget,
    orders: Iterable[Order] | None = None,
    **options: Any,
) -> Patch:
    """Prefills a chunk after orders of its antecedent set and forms one patch for every order. Kamera §5.

    Args:
      chunk: the canonical.
      antecedent: the set, in any order.
      condition: returns KV(B|A) after the members in an order of their indices, as `prefilled_orders` does; called once
        for each order.
      rank: as in `form_patch`.
      orders: as `orders_of` lists them; None for its default.
      options: keywords of `from_deficit`: method, key, dtype, weights.

    Raises:
      InputError: no order. Else as `accumulate` and `orbit_patch`.
    """
    members = antecedent_of(antecedent).members
    acc: Accumulated | None = None
    for order in orders_of(len(members)) if orders is None else orders:
        in_order = Antecedent(tuple(members[place] for place in order))
        acc = accumulate(acc, condition(order), chunk, in_order)
    if acc is None:
        raise InputError("form_orbit: got no orders; expected at least one, as orders_of lists them")
    return orbit_patch(acc, rank, **options)


def prefilled_orders(
    backbone: Backbone,
    units: Sequence[Sequence[Any] | Tokens],
    unit: Sequence[Any] | Tokens,
    *,
    lead: Sequence[Any] | Tokens | None = None,
) -> Callable[[Order], KVArrays]:
    """Returns a function that prefills `unit` after `units` in an order, for `form_orbit`.

    Every unit is embedded once, whatever the number of orders.

    Args:
      units: the antecedent set, as `conditioned` takes units.
      unit: the chunk.
      lead: what precedes all of it.
    """
    # The tower and the embedding do not depend on the order.
    embedded = [unit_tokens(backbone, own) for own in units]
    last = unit_tokens(backbone, unit)
    first = None if lead is None else unit_tokens(backbone, lead)

    def condition(order: Order) -> KVArrays:
        in_order = [embedded[place] for place in order]
        kv = conditioned_kv(backbone, [*in_order, last], lead=first)[-1]
        return kv if isinstance(unit, Tokens) else PhaseFreeKV({name: value[:, 0] for name, value in kv.items()})

    return condition
