"""Search for the order of a window's pieces that is cheapest to serve: exact if few may move, a beam otherwise.

Pieces are numbered in order of arrival. A piece is kept where its KV is still right, served by a stored patch where one
was formed behind exactly the pieces in front of it, and runs through the model anywhere else.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvpatch_jax.window import Promise

Front = Literal["exact", "served"]
"""What a piece that runs finds in front of it: exact KV, so that a valid patch can be formed of it (then pieces in
front that a patch serves run too); or the pieces as they are served (then its KV is of use for this answer alone)."""
Order = tuple[int, ...]
Cost = int | float
"""In the unit of the prices: FLOPs, which stay whole numbers, or seconds."""
Forward = Callable[[int, int], Cost]
"""Cost of a forward over so many tokens behind so many others."""

EXHAUSTIVE, BEAM = 10, 64
"""Largest number of movable pieces for an exact search; sets followed at each place otherwise."""


@dataclasses.dataclass(frozen=True)
class OrderProblem:
    """Pieces to be placed, by number.

    Attributes:
      tokens: of each piece.
      free: whether each may move; the others keep their place among the pieces.
      held: pieces whose KV is in the pool and pure, in their order there.
      exact: how many of these, from the front, are exact; the others are survivors.
      ordered: for each piece, the cost of placing it by a patch, by the pieces in front, in order.
      sets: the same for orbit patches, by the set in front: a number with a bit for each piece.
      lead: number of leading pieces.
      leading: for pieces whose canonical was formed behind the lead, the cost of placing it; right behind the lead it
        equals a forward there.
      promise: of the window; if it forgets, survivors are not kept.
      texts: pieces that no patch is formed of, so that nothing in front of them runs for their sake.
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
        """Place of each held piece among those held."""
        return {piece: place for place, piece in enumerate(self.held)}

    @functools.cached_property
    def fronts(self) -> frozenset[Order]:
        """All prefixes of orders that some patch was formed behind."""
        prefixes = set[Order]()
        for patches in self.ordered:
            for front in patches:
                prefixes.update(front[:length] for length in range(len(front) + 1))
        return frozenset(prefixes)

    @functools.cached_property
    def masks(self) -> frozenset[int]:
        """All sets that some orbit patch was formed behind."""
        return frozenset(itertools.chain.from_iterable(self.sets))


class PartialPlacement(NamedTuple):
    """Pieces placed from the front, and what serving them costs.

    Attributes:
      order: their numbers. mask: their set. behind: their tokens.
      cost: of serving them. run: what it becomes if a later piece has to run behind exact KV.
      holding: whether all of them are kept. exact: whether none of them is a survivor.
      ran: how many, from the front, have exact KV (or survivors'). kept: how many of these are kept.
      misses: pieces that neither were kept nor had a patch.
      inversions: pairs of pieces that stand otherwise than preferred.
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
    inversions: int = 0
    led: int = -1


def extended(
    problem: OrderProblem,
    placed: PartialPlacement,
    piece: int,
    forward: Forward,
    front: Front,
    inversions: int = 0,
    *,
    survivors: bool = True,
) -> PartialPlacement:
    """Places one more piece. It is kept if its KV is right there; as a survivor only if `survivors`."""
    _, mask, behind, cost, run, holding, exact, ran, kept, misses, _, led = placed
    order, count = (*placed.order, piece), len(placed.order) + 1
    tokens, inversions = problem.tokens[piece], placed.inversions + inversions
    kept_exact = _kept_exact(problem, placed, piece) if holding else None

    if kept_exact or (kept_exact is False and survivors):
        # Kept: nothing to pay.
        exact, ran, kept = kept_exact, count, count
    elif count - 1 == problem.lead == ran and exact and piece in problem.leading:
        # Its canonical, right behind the lead, equals a forward there.
        price = problem.leading[piece]
        cost, run, holding, ran, led = cost + price, run + price, False, count, piece
    else:
        holding = False
        price = forward(tokens, behind)
        run += price
        patch = _cheapest_patch(problem, placed, piece)
        if patch is not None:
            # A stored patch is cheap, but a later piece that runs behind exact KV makes this one run too.
            cost += patch
        elif front == "served" or piece in problem.texts:
            # A forward for this answer alone, behind the pieces as they are served.
            cost, ran, misses = cost + price, count if ran == count - 1 else ran, (*misses, piece)
        else:
            # A forward behind exact KV.
            cost, ran, misses = run, count, (*misses, piece)

    state = order, mask | 1 << piece, behind + tokens, cost, run, holding, exact, ran, kept, misses, inversions, led
    return PartialPlacement(*state)


def _kept_exact(problem: OrderProblem, placed: PartialPlacement, piece: int) -> bool | None:
    """Returns whether a held piece would be exact there, behind kept ones; None if its KV is not right there, or not
    held.
    """
    place, here = problem.place_held.get(piece), len(placed.order)
    if place is None:
        return None
    if placed.exact and place == here and here < problem.exact:
        return True
    if problem.promise == "forget" or (placed.order and place <= problem.place_held[placed.order[-1]]):
        return None
    return False


def _cheapest_patch(problem: OrderProblem, placed: PartialPlacement, piece: int) -> Cost | None:
    """Returns the cost of the cheapest stored patch that is valid there; None without one."""
    if not placed.exact:
        return None
    ordered = problem.ordered[piece].get(placed.order) if problem.ordered else None
    orbit = problem.sets[piece].get(placed.mask) if problem.sets else None
    return min((price for price in (ordered, orbit) if price is not None), default=None)


def walk(problem: OrderProblem, order: Sequence[int], forward: Forward, front: Front = "exact") -> PartialPlacement:
    """Serves the pieces in a given order."""
    placed = PartialPlacement()
    for piece in order:
        placed = extended(problem, placed, piece, forward, front)
    return placed


def cheapest(
    problem: OrderProblem,
    forward: Forward,
    front: Front = "exact",
    *,
    prefer: Sequence[int] | None = None,
    exhaustive: int = EXHAUSTIVE,
    beam: int = BEAM,
) -> tuple[PartialPlacement, bool]:
    """Returns the order that is cheapest to serve; of equal ones, the one nearest to a preferred order.

    The remaining cost depends only on the set that is placed, except for orders that a stored patch or the pool
    continues. So the search follows sets, not orders, and of each set only states that may still win.

    Args:
      prefer: numbers, the first to stand in front; None: the order of arrival.
      exhaustive: movable pieces up to which every set is followed; beyond, `beam` of them at each place.

    Returns:
      The placement, and whether nothing cheaper exists.
    """
    count = len(problem)
    rank = {piece: place for place, piece in enumerate(range(count) if prefer is None else prefer)}
    movable = sum(1 << piece for piece in range(count) if problem.free[piece])
    follow_all = movable.bit_count() <= exhaustive

    # The best guess bounds the search. Its inversions are set so high that every order of the same cost replaces it.
    guesses = [walk(problem, order, forward, front) for order in _guesses(problem, rank)]
    best = min(guesses, key=lambda placed: placed.cost)._replace(inversions=count * count)

    layer: dict[object, list[PartialPlacement]] = {None: [PartialPlacement()]}

    for place in range(count):
        following: dict[object, list[PartialPlacement]] = {}
        choices = movable if problem.free[place] else 1 << place
        for placed in itertools.chain.from_iterable(layer.values()):
            rest = choices & ~placed.mask
            left = [piece for piece in range(count) if rest >> piece & 1]
            for piece in left:
                inversions = sum(rank[other] < rank[piece] for other in left)
                grown = extended(problem, placed, piece, forward, front, inversions)
                candidates = [grown]
                if placed.exact and not grown.exact:
                    # No patch is valid behind a survivor: discarding it costs now and may save more behind it.
                    candidates.append(extended(problem, placed, piece, forward, front, inversions, survivors=False))

                for candidate in candidates:
                    if _lower_bound(problem, candidate, front) <= best.cost:
                        # What the cost of the remaining pieces depends on.
                        order = candidate.order if candidate.order in problem.fronts else None
                        key = candidate.mask, order, candidate.holding, candidate.exact
                        _keep(following.setdefault(key, []), candidate)

        layer = following if follow_all else _beam(problem, following, forward, front, beam)

    complete = [best, *itertools.chain.from_iterable(layer.values())]
    return min(complete, key=lambda placed: (placed.cost, placed.inversions)), follow_all


def _guesses(problem: OrderProblem, rank: Mapping[int, int]) -> list[Order]:
    """Returns orders worth a try: of arrival, as preferred, held pieces in front, and longest stored fronts first."""
    free = [piece for piece in range(len(problem)) if problem.free[piece]]
    held = [piece for piece in problem.held if piece < len(problem) and problem.free[piece]]
    preferred = sorted(free, key=rank.__getitem__)
    orders = [free, preferred, [*held, *(piece for piece in preferred if piece not in held)]]

    stored = []
    for piece, patches in enumerate(problem.ordered):
        stored += [(*front, piece) for front in patches]
    for front in sorted(stored, key=len)[-4:]:
        moved = [piece for piece in front if problem.free[piece]]
        orders.append([*moved, *(piece for piece in preferred if piece not in moved)])
    return [filled(problem.free, order) for order in orders]


def filled(free: Sequence[bool], order: Iterable[int]) -> Order:
    """Fills the places of movable pieces (`free`) in this order; the others keep theirs."""
    movable = iter(order)
    return tuple(next(movable) if moves else place for place, moves in enumerate(free))


def _keep(states: list[PartialPlacement], placed: PartialPlacement) -> None:
    """Adds a state unless another one with the same key is at least as good; removes those that it beats."""
    for other in states:
        same = (other.cost, other.run) == (placed.cost, placed.run)
        as_good = other.cost <= placed.cost and other.run <= placed.run
        if as_good and (not same or other.inversions <= placed.inversions):
            return
    states[:] = [other for other in states if other.cost < placed.cost or other.run < placed.run]
    states.append(placed)


def _lower_bound(problem: OrderProblem, placed: PartialPlacement, front: Front) -> Cost:
    """Returns the least that serving all pieces can cost."""
    if problem.texts - set(placed.order):  # they may be all that is left
        return placed.cost
    may_patch = placed.exact and (
        placed.order in problem.fronts or any(mask & placed.mask == placed.mask for mask in problem.masks)
    )
    if may_patch or placed.holding or front == "served" or len(placed.order) == len(problem):
        return placed.cost
    return placed.run


def _beam(
    problem: OrderProblem, layer: Mapping[object, list[PartialPlacement]], forward: Forward, front: Front, width: int
) -> dict[object, list[PartialPlacement]]:
    """Returns the most promising sets: by their lower bound, then by their cost if all other pieces run."""
    total = sum(problem.tokens)

    def promise(states: list[PartialPlacement]) -> tuple[Cost, Cost, int]:
        values = []
        for placed in states:
            rest = forward(total - placed.behind, placed.behind) if total > placed.behind else 0
            least = _lower_bound(problem, placed, front)
            worst = (placed.run if front == "exact" else placed.cost) + rest
            all_run = least == placed.run and not placed.holding
            values.append((worst if all_run else least, worst, placed.inversions))
        return min(values)

    chosen = sorted(layer, key=lambda key: promise(layer[key]))[:width]
    return {key: layer[key] for key in chosen}
