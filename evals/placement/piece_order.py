"""The order of a window's pieces that is cheapest to serve: exact over sets where few may move, a beam beyond.

Pieces are numbers here, in the order in which they arrived. A piece is kept where its KV is still right, served by a
stored patch where one was formed behind the very pieces in front of it, and runs through the model anywhere else.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvpatch_jax.window import Promise

Front = Literal["exact", "served"]
"""What a piece that runs is to find in front of it: exact KV, so that the patch formed of it is the one that `target`
asks for (then what a patch serves in front runs again too); or whatever serves the others (then it is this answer's
alone)."""
Order = tuple[int, ...]
Cost = int | float
"""In the unit of the prices: FLOPs, which stay whole numbers, or seconds."""
Forward = Callable[[int, int], Cost]
"""What a forward over so many tokens behind so many others costs."""

EXHAUSTIVE, BEAM = 10, 64
"""Pieces that may move up to which the search is exact; sets that are followed at each place beyond."""


@dataclasses.dataclass(frozen=True)
class OrderProblem:
    """What is to be placed, by number.

    Attributes:
      tokens: of each piece.
      free: whether it may move; the others keep their place among the pieces.
      held: pieces whose KV is in the pool and pure, in their order there.
      exact: how many of these, from the front, are exact; the others are survivors.
      ordered: for each piece, what placing it by a patch costs, by the pieces that must stand in front, in order.
      sets: the same of orbit patches, by the set in front: a number with a bit for each piece.
      lead: how many pieces lead; leading: for pieces whose canonical was formed behind these, what placing it costs:
        right behind the lead it is what a forward there gives.
      promise: as a window's: where it forgets, survivors are not kept.
      texts: pieces that no patch is ever formed of: what they find in front of them is never run again for them.
    """

    tokens: tuple[int, ...]
    free: tuple[bool, ...]
    held: Order = ()
    exact: int = 0
    ordered: tuple[Mapping[Order, Cost], ...] = ()
    sets: tuple[Mapping[int, Cost], ...] = ()
    lead: int = 0
    leading: Mapping[int, Cost] = dataclasses.field(default_factory=dict)
    promise: Promise = "forget"
    texts: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def place_held(self) -> dict[int, int]:
        """Where each held piece stands among the held."""
        return {piece: place for place, piece in enumerate(self.held)}

    @functools.cached_property
    def fronts(self) -> frozenset[Order]:
        """All beginnings of orders that some patch was formed behind."""
        found = set[Order]()
        for known in self.ordered:
            for front in known:
                found.update(front[:length] for length in range(len(front) + 1))
        return frozenset(found)

    @functools.cached_property
    def masks(self) -> frozenset[int]:
        """All sets that some orbit patch was formed behind."""
        return frozenset(mask for known in self.sets for mask in known)


class PartialPlacement(NamedTuple):
    """Some pieces, placed from the front.

    Attributes:
      order: their numbers. mask: their set. behind: their tokens.
      cost: of serving them. run: what it will be if one behind them has to run behind exact KV.
      holding: all of them are kept. exact: no survivor is among them.
      ran: how many, from the front, have exact KV (or survivors'); `kept` of these are kept.
      misses: pieces that neither were kept nor had a patch.
      turned: pairs of pieces that stand otherwise than preferred.
      led: the piece that its canonical alone serves, right behind the lead; -1 without.
    """

    order: Order = ()
    mask: int = 0
    behind: int = 0
    cost: Cost = 0
    run: Cost = 0
    holding: bool = True
    exact: bool = True
    ran: int = 0
    kept: int = 0
    misses: Order = ()
    turned: int = 0
    led: int = -1


def lay(
    pieces: OrderProblem,
    laid: PartialPlacement,
    piece: int,
    forward: Forward,
    front: Front,
    turned: int = 0,
    *,
    survivors: bool = True,
) -> PartialPlacement:
    """Places one more piece behind those that are laid: kept where its KV is right, as a survivor too unless told."""
    order, mask = (*laid.order, piece), laid.mask | 1 << piece
    tokens, turned = pieces.tokens[piece], laid.turned + turned
    behind = laid.behind + tokens
    exact = _kept(pieces, laid, piece) if laid.holding else None
    if exact or (exact is False and survivors):
        count = len(order)
        return PartialPlacement(order, mask, behind, laid.cost, laid.run, True, exact, count, count, (), turned)

    first = pieces.leading.get(piece) if len(laid.order) == pieces.lead == laid.ran and laid.exact else None
    if first is not None:
        cost, run, count = laid.cost + first, laid.run + first, len(order)
        return PartialPlacement(
            order, mask, behind, cost, run, False, True, count, laid.kept, laid.misses, turned, piece
        )

    price = forward(tokens, laid.behind)
    run, patch = laid.run + price, _patch(pieces, laid, piece)
    if patch is not None:
        return laid._replace(
            order=order, mask=mask, behind=behind, cost=laid.cost + patch, run=run, holding=False, turned=turned
        )
    cost, ran = run, len(order)
    if front == "served" or piece in pieces.texts:
        cost, ran = laid.cost + price, len(order) if laid.ran == len(laid.order) else laid.ran
    misses = (*laid.misses, piece)
    return PartialPlacement(order, mask, behind, cost, run, False, laid.exact, ran, laid.kept, misses, turned, laid.led)


def _kept(pieces: OrderProblem, laid: PartialPlacement, piece: int) -> bool | None:
    """Whether a held piece would be exact there; None where it is not right there, or not held."""
    place, here = pieces.place_held.get(piece), len(laid.order)
    if place is None:
        return None
    exact = laid.exact and place == here and here < pieces.exact
    if exact:
        return True
    if pieces.promise == "forget" or (laid.order and place <= pieces.place_held[laid.order[-1]]):
        return None
    return False


def _patch(pieces: OrderProblem, laid: PartialPlacement, piece: int) -> Cost | None:
    """What the cheapest stored patch costs that serves a piece there; None without one."""
    if not laid.exact:
        return None
    ordered = pieces.ordered[piece].get(laid.order) if pieces.ordered else None
    orbit = pieces.sets[piece].get(laid.mask) if pieces.sets else None
    return min((price for price in (ordered, orbit) if price is not None), default=None)


def walk(pieces: OrderProblem, order: Sequence[int], forward: Forward, front: Front = "exact") -> PartialPlacement:
    """Serves the pieces in a given order."""
    laid = PartialPlacement()
    for piece in order:
        laid = lay(pieces, laid, piece, forward, front)
    return laid


def cheapest(
    pieces: OrderProblem,
    forward: Forward,
    front: Front = "exact",
    *,
    prefer: Sequence[int] | None = None,
    exhaustive: int = EXHAUSTIVE,
    beam: int = BEAM,
) -> tuple[PartialPlacement, bool]:
    """Finds the order that costs least to serve; among such, the one nearest to a preferred one.

    What is still to come depends on what is placed by its set alone, but for an order that a stored patch or the pool
    goes on from: so sets are followed, not orders, and of each only what may still win.

    Args:
      prefer: numbers, the first to stand in front; the order of arrival when None.
      exhaustive: movable pieces up to which every set is followed; beyond, `beam` of them at each place.

    Returns:
      The pieces, laid; and whether nothing cheaper exists.
    """
    count = len(pieces)
    rank = {piece: place for place, piece in enumerate(range(count) if prefer is None else prefer)}
    movable = sum(1 << piece for piece in range(count) if pieces.free[piece])
    every = movable.bit_count() <= exhaustive
    best = min((walk(pieces, order, forward, front) for order in _guesses(pieces, rank)), key=lambda laid: laid.cost)
    best = best._replace(turned=count * count)

    layer: dict[object, list[PartialPlacement]] = {None: [PartialPlacement()]}
    for place in range(count):
        following: dict[object, list[PartialPlacement]] = {}
        choices = movable if pieces.free[place] else 1 << place
        for laid in (each for states in layer.values() for each in states):
            for piece in _bits(choices & ~laid.mask):
                turned = sum(rank[other] < rank[piece] for other in _bits(choices & ~laid.mask & ~(1 << piece)))
                grown = lay(pieces, laid, piece, forward, front, turned)
                ways = [grown]
                if laid.exact and not grown.exact:
                    # Behind a survivor no patch serves: letting it go costs now and may save more behind it.
                    ways.append(lay(pieces, laid, piece, forward, front, turned, survivors=False))
                for way in ways:
                    if _least(pieces, way, front) <= best.cost:
                        _keep(following.setdefault(_key(pieces, way), []), way)
        layer = following if every else _beam(pieces, following, forward, front, beam)
    found = [best, *(laid for states in layer.values() for laid in states)]
    return min(found, key=lambda laid: (laid.cost, laid.turned)), every


def _guesses(pieces: OrderProblem, rank: Mapping[int, int]) -> list[Order]:
    """Orders worth a try: of arrival; what is held in front; as preferred; and as the longest stored fronts go on."""
    held = [piece for piece in pieces.held if piece < len(pieces) and pieces.free[piece]]
    free = [piece for piece in range(len(pieces)) if pieces.free[piece]]
    preferred = sorted(free, key=rank.__getitem__)
    wanted: list[list[int]] = [free, preferred, [*held, *(each for each in preferred if each not in held)]]
    stored = [(*front, piece) for piece, known in enumerate(pieces.ordered) for front in known]
    for front in sorted(stored, key=len)[-4:]:
        moved = [piece for piece in front if pieces.free[piece]]
        wanted.append([*moved, *(piece for piece in preferred if piece not in moved)])
    return [filled(pieces.free, order) for order in wanted]


def filled(free: Sequence[bool], order: Iterable[int]) -> Order:
    """Fills the places of the pieces that may move (`free`) in this order; the others keep theirs."""
    left = iter(order)
    return tuple(next(left) if moves else place for place, moves in enumerate(free))


def _key(pieces: OrderProblem, laid: PartialPlacement) -> object:
    """What the rest depends on."""
    return laid.mask, laid.order if laid.order in pieces.fronts else None, laid.holding, laid.exact


def _keep(states: list[PartialPlacement], laid: PartialPlacement) -> None:
    """Keeps a state unless another of the same rest is at least as good; drops those that it is better than."""
    for other in states:
        same = (other.cost, other.run) == (laid.cost, laid.run)
        if other.cost <= laid.cost and other.run <= laid.run and (not same or other.turned <= laid.turned):
            return
    states[:] = [other for other in states if other.cost < laid.cost or other.run < laid.run]
    states.append(laid)


def _least(pieces: OrderProblem, laid: PartialPlacement, front: Front) -> Cost:
    """What serving all pieces costs at least."""
    if pieces.texts - set(laid.order):  # they may be all that is left
        return laid.cost
    hits = laid.exact and (laid.order in pieces.fronts or any(mask & laid.mask == laid.mask for mask in pieces.masks))
    if hits or laid.holding or front == "served" or len(laid.order) == len(pieces):
        return laid.cost
    return laid.run


def _beam(
    pieces: OrderProblem, layer: Mapping[object, list[PartialPlacement]], forward: Forward, front: Front, width: int
) -> dict[object, list[PartialPlacement]]:
    """The sets that promise most: by what they cost at least, then by what they cost if all others have to run."""
    total = sum(pieces.tokens)

    def promise(states: list[PartialPlacement]) -> tuple[Cost, Cost, int]:
        found = []
        for laid in states:
            rest = forward(total - laid.behind, laid.behind) if total > laid.behind else 0
            least = _least(pieces, laid, front)
            worst = (laid.run if front == "exact" else laid.cost) + rest
            found.append((worst if least == laid.run and not laid.holding else least, worst, laid.turned))
        return min(found)

    chosen = sorted(layer, key=lambda key: promise(layer[key]))[:width]
    return {key: layer[key] for key in chosen}


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
