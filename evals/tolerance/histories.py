"""Histories: what stood in front of a chunk when its KV was formed, against what stands there when it is served.

In truth a chunk follows a pinned lead and `count` pieces of its own context, the last of which is the *nearest*, the
others the *far* ones. A history replaces, drops or moves some of them, or serves them approximately. Pure names: no
arrays, no model.
"""

from typing import NamedTuple

OWN, OTHER = "own", "another context's"
EXACT, CANONICAL, PATCHED = "exact", "canonical", "patched"

TRUTH = "the same"
ALONE = "nothing"
"""The canonical: blind reuse, against which η is."""
LEAD = "the lead alone"

KINDS = {
    TRUTH: "everything as it is",
    "far differ": "the same nearest, all others another context's",
    "farthest differs": "the same but for the first, which is another context's",
    "far missing": "the nearest alone",
    "farthest missing": "the same without the first",
    "far moved": "the same nearest, the others in another order",
    "ends exchanged": "the nearest and the farthest exchanged",
    "nearest differs": "the same but for the nearest, which is another context's",
    "nearest missing": "the same without the nearest",
    "all differ": "another context's pieces alone",
    LEAD: "the lead alone",
    ALONE: "nothing at all: the canonical",
    "nearest canonical": "the same, the nearest served as its canonical",
    "nearest patched": "the same, the nearest served with a patch of rank 16",
    "all canonical": "the same, all served as their canonicals",
    "all patched": "the same, all served with patches of rank 16",
}
"""Every kind of history, and what stood in front, in words."""

MEANS = {
    "mean, same nearest": ("far differ", "far missing", "far moved"),
    "mean, other nearest": ("nearest differs", "all differ", "ends exchanged"),
}
"""Means of the KV of several histories, by what they have in common; of those that a number of pieces has."""

SUM = "sum of each alone"
"""The canonical behind the lead, and the deficits of the single pieces, as if they added up."""

APPROXIMATE = ("nearest canonical", "nearest patched", "all canonical", "all patched")


class HistoryPiece(NamedTuple):
    """A piece that stood in front.

    Attributes:
      source: whose context it is of, OWN or OTHER.
      place: where it stands in that context.
      served: how: EXACT, as its CANONICAL or PATCHED.
    """

    source: str
    place: int
    served: str = EXACT


History = tuple[HistoryPiece, ...]


def histories(count: int) -> dict[str, History | None]:
    """Lists the histories of a chunk behind `count` pieces, by kind; None: not even the lead.

    Kinds that come to the same history as an earlier one (with two pieces the farthest is all that is far) are left
    out.

    Raises:
      ValueError: fewer than two pieces, so that nothing is far.
    """
    if count < 2:
        raise ValueError(f"histories: got {count} pieces in front; expected 2 or more")

    own = tuple(HistoryPiece(OWN, place) for place in range(count))
    other = tuple(HistoryPiece(OTHER, place) for place in range(count))
    made: dict[str, History | None] = {
        TRUTH: own,
        "far differ": (*other[:-1], own[-1]),
        "farthest differs": (other[0], *own[1:]),
        "far missing": own[-1:],
        "farthest missing": own[1:],
        "far moved": (*own[1:-1], own[0], own[-1]),
        "ends exchanged": (own[-1], *own[1:-1], own[0]),
        "nearest differs": (*own[:-1], other[-1]),
        "nearest missing": own[:-1],
        "all differ": other,
        LEAD: (),
        ALONE: None,
        "nearest canonical": (*own[:-1], own[-1]._replace(served=CANONICAL)),
        "nearest patched": (*own[:-1], own[-1]._replace(served=PATCHED)),
        "all canonical": tuple(piece._replace(served=CANONICAL) for piece in own),
        "all patched": tuple(piece._replace(served=PATCHED) for piece in own),
    }

    distinct: dict[str, History | None] = {}
    for kind, history in made.items():
        if history not in distinct.values():
            distinct[kind] = history
    return distinct
