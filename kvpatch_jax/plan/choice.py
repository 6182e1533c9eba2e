"""The one choice: how every chunk of a window or prompt is served, within a goal, at the least cost.

`Certificate.together` states how bounds compose: an answer behind a window loses no more than if every chunk, from the
first approximate one on, were served in the worst of the ways used there. Chunks prefilled there count too, because
they read approximate KV. A selection is therefore the number of chunks that may be approximate, counted from the end,
and the ways whose bounds allow that many; given both, every chunk takes its cheapest option.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from ..cache import BARE_WAYS, UNKNOWN, Antecedent, Identities, Likeness, Ways, identity
from ..errors import InputError
from ..window import Entry, PatchNote, Promise
from .certificate import Certificate, Point

Reuse = Literal["exact", "certified", "patched", "blind"]
DEFAULT_KL = 0.05
"""Nats that an answer may lose where there is a certificate and no goal."""


@dataclasses.dataclass(frozen=True)
class Goal:
    """What may serve a chunk that has no KV of the very place where it is to stand.

    Attributes:
      reuse: "exact": a forward. "certified": what a certificate bounds, at the least cost. "patched": a patch for the
        pieces in front, or a stored prefill behind the same nearest piece; its loss is unknown. "blind": the canonical.
      kl: with "certified", nats that an answer behind the whole window may lose.

    Raises:
      InputError: an unknown word, or no finite number >= 0.
    """

    reuse: Reuse = "exact"
    kl: float = DEFAULT_KL

    def __post_init__(self) -> None:
        if self.reuse not in get_args(Reuse):
            raise InputError(f"goal.reuse: got {self.reuse!r:.80}; expected one of {get_args(Reuse)}")
        # `math.isfinite` overflows for large integers; the comparison does not, and refuses NaN.
        is_number = isinstance(self.kl, int | float) and not isinstance(self.kl, bool)
        if not (is_number and 0 <= self.kl < 2**63):
            raise InputError(f"goal.kl: got {self.kl!r:.80}; expected a number of nats >= 0")

    def __str__(self) -> str:
        return f"KL ≤ {self.kl:g} nats" if self.reuse == "certified" else self.reuse


class Option(NamedTuple):
    """One way of serving a chunk.

    Attributes:
      point: its operating point.
      made: identity of the KV that it gives; "" of a forward, which depends on what is served in front.
      ways: by which a certificate bounds it; none: its KV is what is promised; the unknown one: nothing bounds it.
      rank: of its patch; 0 without one.
      stored: digest of its patch, or the identity under which its stored prefill is kept.
      cost: what it takes, in any unit that all options share.
      inherits: whether it was computed, or will be, from the chunks in front as they are served, with their error.
      detail: what its server needs to carry it out.
    """

    point: Point
    made: str = ""
    ways: Ways = ()
    rank: int = 0
    stored: str | None = None
    cost: float = 0.0
    inherits: bool = False
    detail: Any = None

    @property
    def is_forward(self) -> bool:
        """Whether it computes the chunk anew."""
        return self.point == "prefill"


FORWARD = Option("prefill", inherits=True)


# ------------------------------------------------------------------------------------------------ what there is


@runtime_checkable
class Stock(Protocol):
    """What is stored of chunks."""

    def canonical(self, entry: Entry, leading: bool = False) -> bool:
        """Returns whether there is a chunk's canonical; with `leading`, one as it was prefilled."""
        ...

    def patches(self, entry: Entry, target: Antecedent) -> Sequence[PatchNote]:
        """Returns the patches of a chunk's canonical that are valid behind an antecedent."""
        ...

    def prefill(self, entry: Entry, made: str) -> bool:
        """Returns whether there is a chunk's prefill of this identity."""
        ...

    def alike(self, entry: Entry, keys: Mapping[Likeness, str]) -> Mapping[Likeness, str]:
        """Returns the identities of stored prefills that share these keys with a place, the most alike first."""
        ...


class Place(NamedTuple):
    """Where a chunk is to stand.

    Attributes:
      entry: the chunk.
      promised: identity of a prefill of it behind what is promised in front.
      target: identities of the KV that is promised in front of it.
      antecedent: returns the same as an antecedent.
      likeness: keys of stored prefills that were computed behind like chunks.
      kept: the option of leaving it as it is, or as an earlier request of the same agent left it.
    """

    entry: Entry
    promised: str
    target: Identities
    antecedent: Callable[[], Antecedent]
    likeness: Mapping[Likeness, str]
    kept: Option | None = None


def options_at(place: Place, stock: Stock, allowed: Collection[str]) -> Iterator[Option]:
    """Yields the ways of serving a chunk from what is stored, and a forward last: the most faithful ones first.

    Whoever takes the first that will do has nothing else looked up.

    Args:
      allowed: points that are looked up besides exact ones and what is kept.
    """
    entry, promised, target, kept = place.entry, place.promised, place.target, place.kept
    if kept is not None and not kept.ways:
        yield kept
    if entry.kind == "chunk":
        if not target and stock.canonical(entry, leading=True):
            yield Option("leading", promised)
        if target and stock.prefill(entry, promised):
            yield Option("restored", promised, stored=promised)
    if kept is not None and kept.ways:
        yield kept
    if entry.kind == "chunk":
        yield from _approximate(place, stock, allowed)
    yield FORWARD


def _approximate(place: Place, stock: Stock, allowed: Collection[str]) -> Iterator[Option]:
    entry, target = place.entry, place.target
    patchable = bool({"stored", "orbit"} & set(allowed)) and target and stock.canonical(entry)
    notes = stock.patches(entry, place.antecedent()) if patchable else ()
    for note in sorted(notes, key=lambda note: (note.orbit, -note.rank, note.digest)):
        made = identity(entry.key, f"patch {note.digest}")
        yield Option(note.point, made, ((note.point, note.rank),), note.rank, note.digest, detail=note)
    if "near" in allowed and target:
        for likeness, stored in stock.alike(entry, place.likeness).items():
            if stored != place.promised:
                made = identity(entry.key, f"restored {stored}")
                yield Option(likeness, made, ((likeness, 0),), stored=stored, detail=likeness)
    if "bare" in allowed and stock.canonical(entry):
        yield Option("bare", identity(entry.key, "bare"), BARE_WAYS)


ALLOWED: Mapping[Reuse, Collection[Point]] = {
    "exact": (),
    "certified": ("survivor", "kept", "stored", "orbit", "mean", "near", "bare"),
    "patched": ("survivor", "kept", "stored", "orbit", "mean", "near"),
    "blind": ("survivor", "kept", "bare"),
}
"""Points beside the exact ones that a goal allows."""


# ------------------------------------------------------------------------------------------------ what it may lose


class Losses:
    """Bounds of a certificate for one window, each looked up once. None: nothing is certified.

    Attributes:
      beyond: how the window exceeds everything that the certificate was measured on; then nothing is certified.
    """

    def __init__(self, certificate: Certificate | None, promise: Promise, count: int, beyond: str | None = None):
        """Prepares lookups for a window of so many chunks with this promise."""
        self.certificate = None if beyond else certificate
        self.beyond = beyond
        self._promise: Promise = promise
        self._count = count
        self._bounds = functools.cache(self._growing)

    def kl(self, ways: Ways, others: int) -> float | None:
        """Returns the bound in nats of an answer with so many other approximate chunks; None without a bound.

        Of a chunk that is approximate in several ways, the worst one's.
        """
        if not ways:
            return 0.0
        bounds = self._bounds(ways)
        return bounds[others] if others < len(bounds) else None

    def together(self, options: Sequence[Option]) -> float | None:
        """Returns the bound in nats of an answer behind chunks that are served so; None without a bound."""
        approximate = [index for index, option in enumerate(options) if option.ways]
        if not approximate:
            return 0.0
        others = sum(option.inherits or bool(option.ways) for option in options[approximate[0] :]) - 1
        bounds = [self.kl(ways, others) for ways in {options[index].ways for index in approximate}]
        return None if None in bounds else max(bound for bound in bounds if bound is not None)

    @property
    def counts(self) -> Iterable[int]:
        """Numbers of approximate chunks at which bounds change."""
        return () if self.certificate is None else self.certificate.counts

    def _growing(self, ways: Ways) -> list[float]:
        if self.certificate is None or UNKNOWN in ways:
            return []
        growing = [self.certificate.growing(*way, self._promise, self._count) for way in ways]
        return [max(bounds) for bounds in zip(*growing, strict=False)]


# ---------------------------------------------------------------------------------------------------- the choice


class Choice(NamedTuple):
    """One option for every chunk, and the bound in nats of an answer behind them; None: nothing bounds it."""

    options: list[Option]
    kl: float | None


Options = Callable[[int, Sequence[Option]], Iterable[Option]]
"""Returns the options of a chunk by its index and the options that are chosen in front, the most faithful first."""


def choose(
    count: int,
    options: Options,
    losses: Losses,
    goal: Goal,
    *,
    counted: Collection[int] | None = None,
    forwards: Sequence[Option] | None = None,
) -> Choice:
    """Chooses how each of `count` chunks is served, within a goal.

    With "certified" the cost of all chunks is least among the selections that the bounds allow; of equal costs the
    least bound counts, then the most faithful option. Any other goal takes the most faithful option that it allows.

    Args:
      options: of a chunk; a forward is the last of them.
      counted: indices of the chunks that may be approximate or inherit an error; None: all.
      forwards: of every chunk, where chunks can be served from the front only: behind the first forward all are taken.
    """
    if goal.reuse != "certified":
        points = ALLOWED[goal.reuse]

        def first(_: int, found: Iterable[Option]) -> Option:
            return next(option for option in found if not option.ways or option.point in points)

        chosen = _chosen(count, options, first, forwards)
        return Choice(chosen, losses.together(chosen))

    places = list(range(count)) if counted is None else sorted(counted)
    best, least = Choice([], None), None
    for size in sorted({0, *(min(number, len(places)) for number in losses.counts)}):
        # What stands in front of the first chunk that may be approximate is as promised.
        begin = places[len(places) - size] if size else count
        chosen = _chosen(count, options, functools.partial(_cheapest, losses, goal.kl, begin, size - 1), forwards)
        kl = losses.together(chosen)
        rating = sum(option.cost for option in chosen), math.inf if kl is None else kl
        if least is None or rating < least:
            best, least = Choice(chosen, kl), rating
        if least == (0.0, 0.0):
            break
    return best


def _chosen(
    count: int,
    options: Options,
    pick: Callable[[int, Iterable[Option]], Option],
    forwards: Sequence[Option] | None,
) -> list[Option]:
    """Returns what is picked for each chunk, from the front."""
    chosen = list[Option]()
    for index in range(count):
        chosen.append(pick(index, options(index, chosen)))
        if forwards is not None and chosen[-1].is_forward:
            return [*chosen, *forwards[index + 1 :]]
    return chosen


def _cheapest(losses: Losses, kl: float, begin: int, others: int, index: int, options: Iterable[Option]) -> Option:
    """Returns the cheapest option whose bound is within `kl`; of equal ones that of the least bound, then the first.

    Args:
      begin: index of the first chunk that may be approximate, among so many others.
    """
    best, least = FORWARD, (math.inf, math.inf)
    for option in options:
        bound = 0.0 if not option.ways else losses.kl(option.ways, others) if index >= begin else None
        if bound is not None and bound <= kl and (option.cost, bound) < least:
            best, least = option, (option.cost, bound)
            if least == (0.0, 0.0):
                break
    return best
