"""A prefix cache: a tree of what was computed behind what, least recently used leaves first to go."""

from collections import Counter
from collections.abc import Sequence

from .trace_replay import Terms, WindowRequest

Path = tuple[str, ...]


def serve_by_prefix(
    requests: Sequence[WindowRequest], terms: Terms, *, budget: int | None, ordered: bool = False
) -> list[float]:
    """Serves a trace from a tree of exact KV, shared by all sessions; returns what each request's forwards take.

    Args:
      budget: bytes of the tree, what is being read included; None for no bound.
      ordered: pieces that may move are put in the order that goes furthest into the tree, then as often wanted:
        a prefix cache that was told what may move.
    """
    tree: dict[Path, int] = {}  # when it was last used
    size: dict[Path, int] = {}
    seen: Counter[str] = Counter()
    took = []

    for at, request in enumerate(requests):
        order = _furthest(request, tree, seen) if ordered else request.arrival
        path: Path = ()
        behind, cost, hit = 0, 0.0, True

        for piece in order:
            entry = request.pieces[piece]
            path = (*path, entry.id)
            hit = hit and path in tree
            if not hit:
                cost += terms.forward(entry.tokens, behind)
                size[path] = entry.tokens * terms.costs.kv_bytes

            tree[path] = at
            behind += entry.tokens
            seen[entry.id] += 1

        # Leaves go, the least recently used first, until the tree fits; what was just read stays.
        while budget is not None and sum(size[path] for path in tree) > budget:
            inner = {path[:-1] for path in tree}
            leaves = [path for path in tree if path not in inner and tree[path] < at]
            if not leaves:
                break
            del tree[min(leaves, key=lambda path: tree[path])]
        took.append(cost)

    return took


def _furthest(request: WindowRequest, tree: dict[Path, int], seen: Counter[str]) -> tuple[int, ...]:
    """Returns the order that finds most tokens in the tree."""
    count = len(request.pieces)
    often = sorted(request.arrival, key=lambda piece: (-seen[request.pieces[piece].id], piece))

    def choices(order: tuple[int, ...]) -> list[int]:
        place = len(order)
        if not request.pieces[place].order_free:
            return [place]
        return [piece for piece in request.movable(often) if piece not in order]

    best, found = (-1, ()), [()]
    while found:
        order = found.pop()
        tokens = sum(request.pieces[piece].tokens for piece in order)
        best = max(best, (tokens, order), key=lambda known: known[0])
        if len(order) < count:
            path = request.ids_of(order)
            found += [(*order, piece) for piece in choices(order) if (*path, request.pieces[piece].id) in tree]

    order = best[1]
    while len(order) < count:
        order = (*order, choices(order)[0])
    return order
