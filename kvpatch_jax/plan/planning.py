"""`plan` chooses how each piece of a window is served, within a goal. `Plan` is the result: window, cost, bounds."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..cache import UNKNOWN_WAYS, Ways, brief, identity
from ..errors import InputError
from ..window import (
    BARE,
    KEEP,
    PREFILL,
    Action,
    Costs,
    Entry,
    Fidelity,
    PatchNote,
    Piece,
    Promise,
    Service,
    Standing,
    Window,
)
from .certificate import Certificate, Point
from .choice import ALLOWED, FORWARD, Choice, Goal, Losses, Option, Place, choose, options_at
from .device_costs import DeviceCosts
from .inventory import Inventory
from .kinds import ReuseKind, is_ruled_out


class PlannedChunk(NamedTuple):
    """One piece of a plan.

    Attributes:
      entry: the piece.
      point: how it is served.
      patch: digest of its patch; None without one.
      rank: of that patch; 0 without one.
      seconds: predicted for what serving it takes.
      fidelity: as `Window.fidelity`.
      kl: its bound, in nats, for an answer behind the window; 0 if its KV is what the window promises; None if nothing
        bounds it.
    """

    entry: Entry
    point: Point
    patch: str | None
    rank: int
    seconds: float
    fidelity: Fidelity
    kl: float | None

    @property
    def id(self) -> str:
        """Id of the entry."""
        return self.entry.id


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A window with the entries that were asked for, and what it takes to bring it into a pool.

        planned = plan(window, entries, Goal("certified", kl=0.05), stored=inventory, certificate=certificate)
        print(planned.explain())
        executor.run(planned.window)

    Attributes:
      before: the window that was planned for. window: the window to be run. services: by id, how pieces are served that
        do not stay as they are.
      goal: what it was to meet.
      certificate: digest of the certificate that bounds come from, or None.
      choice: the option of every piece.
    """

    before: Window
    window: Window
    services: Mapping[str, Service]
    goal: Goal
    certificate: str | None
    choice: Choice
    _table: "_Table"
    _losses: Losses

    @property
    def kl(self) -> float | None:
        """Bound, in nats, of an answer behind the whole window; None if nothing bounds it."""
        return self.choice.kl

    @property
    def beyond(self) -> str | None:
        """How the window exceeds everything the certificate was measured on, so that it bounds nothing; or None."""
        return self._losses.beyond

    @property
    def as_promised(self) -> bool:
        """Whether every piece's KV is what the window promises."""
        return self.window.as_promised

    @property
    def seconds(self) -> float:
        """Predicted duration, on the device whose costs were given, or assumed ones."""
        return sum(chunk.seconds for chunk in self.chunks)

    @functools.cached_property
    def chunks(self) -> tuple[PlannedChunk, ...]:
        """All pieces, in order."""
        options, chunks, tainted = self.choice.options, list[PlannedChunk](), False
        first = next((index for index, option in enumerate(options) if option.ways), len(options))
        others = sum(option.inherits or bool(option.ways) for option in options[first:]) - 1
        pairs = zip(self.window.pieces, self.window.standings, strict=True)
        for index, (option, (piece, standing)) in enumerate(zip(options, pairs, strict=True)):
            # An approximate piece is bounded by its own way; a forward behind it inherits the bound of the window.
            kl = self._losses.kl(option.ways, others)
            if tainted and option.is_forward:
                kl = self.kl
            tainted = tainted or bool(option.ways)
            patch = option.stored if option.point in ("stored", "orbit") else None
            seconds, fidelity = self._table.cost(option, index), standing.fidelity
            # What stays is named by what it is in the window as it will be.
            point = _kept_point(piece, standing, option.ways) if self._table.is_kept(option) else option.point
            chunks.append(PlannedChunk(piece.entry, point, patch, option.rank, seconds, fidelity, kl))
        return tuple(chunks)

    def explain(self) -> str:
        """Describes the plan: a line for the whole window, then one for each piece with what else would serve it."""
        devices = self._table.devices
        rates = f"{'measured' if devices.measured else 'assumed'} on {devices.device}"
        summary = f"{len(self.chunks)} pieces, {self.goal}: {self.seconds:.3g} s ({rates}), KL {_bound(self.kl)}"
        lines = [f"{summary}; uncertified: {self.beyond}" if self.beyond else summary]
        for index, chunk in enumerate(self.chunks):
            shown = f"{_point(chunk)}, {chunk.fidelity}, {chunk.seconds:.3g} s, KL {_bound(chunk.kl)}"
            line = f"  {brief(chunk.id)!r}: {shown}"
            others = [other for other in self._table.options(index, ALLOWED["certified"]) if other.ways]
            quicker = [self._refused(other) for other in others if other.cost < chunk.seconds]
            lines.append(f"{line} (not {'; not '.join(quicker)})" if quicker else line)
        return "\n".join(lines)

    def _refused(self, option: Option) -> str:
        """Says why a quicker option was not chosen."""
        bound = self._losses.kl(option.ways, 0)
        if option.ways == UNKNOWN_WAYS:
            reason = "nothing says how far it is off"
        elif bound is None:
            reason = f"uncertified ({self.beyond})" if self.beyond else "uncertified"
        else:
            reason = f"KL {_bound(bound)}"
        return f"{_point(option)}: {reason}"

    def __repr__(self) -> str:
        points = [chunk.point for chunk in self.chunks]
        counts = ", ".join(f"{points.count(point)} {point}" for point in dict.fromkeys(points))
        return f"Plan({counts}; {self.seconds:.3g} s, KL {_bound(self.kl)})"


def _point(option: Option | PlannedChunk) -> str:
    return f"{option.point} rank {option.rank}" if option.rank else option.point


def _bound(bound: float | None) -> str:
    if bound is None:
        return "not bounded"
    return f"≤ {bound:.3g}" if bound else "0"


# ------------------------------------------------------------------------------------------------------- planning


def plan(
    window: Window,
    wanted: Iterable[Entry],
    goal: Goal | None = None,
    *,
    stored: Inventory | None = None,
    certificate: Certificate | None = None,
    costs: DeviceCosts | None = None,
    prices: Costs | None = None,
    ruled_out: Collection[ReuseKind] = (),
) -> Plan:
    """Chooses how every piece of a window is served, within a goal.

    Args:
      window: as it is.
      wanted: every entry that it is to hold, in order; pinned entries in front may be omitted. Pieces that are not
        listed leave, evicted ones return, and chunks move where they are order-free.
      goal: None: as promised.
      stored: what a store has of chunks; None: nothing.
      certificate: of this backbone. With the goal "certified" nothing is used that it does not bound; if the window
        exceeds everything it was measured on (`Certificate.beyond`), it bounds none.
      costs: of this device; None: assumed ones.
      prices: bytes and FLOPs of the backbone's actions, such as `Executor.costs`; "certified" needs them.
      ruled_out: kinds of reuse that serve nothing approximately, whatever the goal allows.

    Raises:
      SessionError: the window cannot hold these entries so.
      InputError: a certificate of another backbone, or none;
      an inventory of another backbone, an argument of another type.
    """
    goal = Goal() if goal is None else goal
    _check_arguments(window, goal, stored, certificate, costs, prices)
    entries = _entries(window, wanted)
    arranged = window.arranged(entries)
    table = _Table(window, arranged, stored, costs, prices, ruled_out)

    # Nothing is certified of a window that exceeds those that were measured.
    beyond = None
    if certificate is not None and arranged.sink_left:
        beyond = "window whose first tokens have left; certified with them pinned"
    elif certificate is not None:
        chunks = [(entry.span, entry.modality) for entry in entries[arranged.lead :]]
        beyond = certificate.beyond(arranged.tokens, chunks)
    # If a selection runs a piece again, kept ones behind it have not seen the result, and lose that option. What is
    # restored may survive behind a piece that is approximate, so survivors may appear too. Every round withdraws an
    # option, or is the one after which they count, so this ends.
    promise: Promise = _certified_promise(arranged)
    while True:
        losses = Losses(certificate, promise, len(entries), beyond)
        choice = table.choose(losses, goal)
        pairs = zip(entries, choice.options, strict=True)
        services = {entry.id: _service(option) for entry, option in pairs if not table.is_kept(option)}
        is_default = all(service is PREFILL and id not in window for id, service in services.items())
        served = arranged if is_default else window.arranged(entries, services)
        is_settled = not table.mark_unseen(choice.options, served)
        if promise == "forget" != _certified_promise(served):
            promise = served.promise
        elif is_settled:
            break

    digest = None if certificate is None or beyond else certificate.digest
    return Plan(window, served, services, goal, digest, choice, table, losses)


def _certified_promise(window: Window) -> Promise:
    """Returns the promise that certificates are asked for: without survivors both are the same, and it is "forget"."""
    has_survivors = any(standing.fidelity == "survivor" for standing in window.standings)
    return window.promise if has_survivors else "forget"


def _service(option: Option) -> Service:
    """Returns what `Window.arranged` takes for an option."""
    if option.is_forward:
        return PREFILL
    if option.point == "bare":
        return BARE
    if option.point in ("stored", "orbit"):
        return Service("patch", option.detail)
    if option.point == "leading":
        return Service("leading")
    return Service("restored", stored=option.stored, likeness=option.detail)


class _Table:
    """Options of every piece of an arranged window, and the seconds that each of them takes.

    Attributes:
      devices: the rates that seconds are predicted with.
    """

    def __init__(
        self,
        before: Window,
        arranged: Window,
        inventory: Inventory | None,
        devices: DeviceCosts | None,
        prices: Costs | None,
        ruled_out: Collection[ReuseKind] = (),
    ):
        """Stores the collaborators; nothing is looked up yet.

        Args:
          before: the window that is planned for.
          arranged: the window with all entries in their places: pieces stay as they are, and others are prefilled.
        """
        self.arranged, self.inventory = arranged, inventory
        self._prices, self._devices, self._ruled_out = prices, devices, ruled_out
        pieces = {piece.id: piece for piece in before.pieces}
        self._before = [pieces.get(piece.id) for piece in arranged.pieces]
        for index, (old, piece) in enumerate(zip(self._before, arranged.pieces, strict=True)):
            # Another entry of the same id comes in.
            if old is not None and old.entry is not piece.entry and old.entry != piece.entry:
                self._before[index] = None
        # Survivors that lose what they have seen, because something in front is run again.
        self._unseen = set[int]()

    @functools.cached_property
    def devices(self) -> DeviceCosts:
        """The rates that seconds are predicted with."""
        return self._devices or DeviceCosts.assumed()

    def choose(self, losses: Losses, goal: Goal) -> Choice:
        """Chooses an option for every piece."""
        count, points = len(self.arranged.pieces), ALLOWED[goal.reuse]
        if goal.reuse != "certified":
            return choose(count, lambda index, _: self.lazy_options(index, points), losses, goal)
        lists = [self.options(index, points) for index in range(count)]
        # A piece that stays as is promised does not count, whatever is served in front of it.
        counted = [index for index, options in enumerate(lists) if options[-1].is_forward]
        return choose(count, lambda index, _: lists[index], losses, goal, counted=counted)

    def options(self, index: int, points: Collection[Point]) -> list[Option]:
        """Returns the options of a piece with their seconds; of one that may stay as is promised, this one alone."""
        options = list[Option]()
        for option in self.lazy_options(index, points):
            options.append(option._replace(cost=self.cost(option, index)))
            if self.is_kept(option) and not option.ways:
                break
        return options

    def lazy_options(self, index: int, points: Collection[Point]) -> Iterator[Option]:
        """Yields the options of a piece as `options_at`, without seconds."""
        piece, standing, old = self.arranged.pieces[index], self.arranged.standings[index], self._before[index]
        option = None
        ways = UNKNOWN_WAYS if index in self._unseen else standing.ways
        if old is not None and not is_ruled_out(old, ways, self._ruled_out):
            option = Option(_kept_point(piece, standing, ways), old.made, ways, detail=KEEP)
            if not ways:
                yield option
        if self.inventory is None:
            yield from filter(None, (option, FORWARD))
            return
        likeness = self.arranged.likeness(piece.id)
        antecedent = functools.partial(self.arranged.target, piece.id)
        promised = identity(piece.entry.key, "prefill", standing.target)
        place = Place(piece.entry, promised, standing.target, antecedent, likeness, option)
        for offered in options_at(place, self.inventory, points):
            # A canonical stands for the prefill of a piece that comes in, not of one that is in the window already.
            if old is not None and not self.is_kept(offered) and offered.point == "leading":
                continue
            kind = ReuseKind(piece.entry.modality, _service(offered).method)
            if self.is_kept(offered) or not offered.ways or kind not in self._ruled_out:
                yield offered

    def is_kept(self, option: Option) -> bool:
        """Returns whether an option leaves a piece as it is."""
        return option.detail is KEEP

    def mark_unseen(self, selected: Sequence[Option], served: Window) -> bool:
        """Withdraws options to keep a piece because of what it has seen, where the selection runs that again.

        Args:
          served: the window as the selection serves it.

        Returns:
          Whether any option was withdrawn: then `options` returns others, and the selection must be repeated.
        """
        count = len(self._unseen)
        for index, (option, standing) in enumerate(zip(selected, served.standings, strict=True)):
            if self.is_kept(option) and standing.ways == UNKNOWN_WAYS != option.ways:
                self._unseen.add(index)
        return len(self._unseen) > count

    def cost(self, option: Option, index: int) -> float:
        """Predicts the seconds of an option, as if what it reads were not in memory; 0 without prices."""
        costs, piece, old = self._prices, self.arranged.pieces[index], self._before[index]
        id, tokens = piece.id, piece.entry.tokens
        if costs is None or (old is not None and old.made == option.made and old.start == piece.start):
            return 0.0
        if old is not None and old.made == option.made:
            return self.devices.seconds([costs.rotate(id, tokens)])
        if option.is_forward:
            # A hybrid's transitions in front are composed, at most all of them.
            composed = [costs.compose(id, index)] if index and costs.state_bytes else []
            return self.devices.seconds([*composed, costs.prefill(id, tokens, self._behind[index])])
        step = [costs.fetch(id, tokens), costs.copy(id, tokens)]
        if isinstance(option.detail, PatchNote):
            # Base and patch are two objects of a store.
            note = option.detail
            step = [step[0], Action("fetch", id, 0, note.nbytes, 0), costs.patch(id, tokens, note)]
        return self.devices.seconds(step)

    @functools.cached_property
    def _behind(self) -> list[int]:
        """How many tokens stand in front of each piece."""
        return [0, *itertools.accumulate(piece.entry.tokens for piece in self.arranged.pieces)]


_KEPT: Mapping[Fidelity, Point] = {"exact": "leading", "survivor": "survivor", "approximate": "kept"}


def _kept_point(piece: Piece, standing: Standing, ways: Ways) -> Point:
    """Returns the operating point of a piece that stays as it is."""
    if piece.method == "bare":
        return "bare"
    if piece.method == "patch":
        return "stored"
    return "kept" if ways == UNKNOWN_WAYS else _KEPT[standing.fidelity]


def _check_arguments(window: Any, goal: Any, stored: Any, certificate: Any, costs: Any, prices: Any) -> None:
    """Refuses arguments of other types, and of other backbones."""
    for name, value, kind, expected in (
        ("window", window, Window, "a Window"),
        ("goal", goal, Goal, "a Goal, or None"),
        ("stored", stored, Inventory | None, "an Inventory, such as Inventory.of(store, backbone), or None"),
        ("costs", costs, DeviceCosts | None, "DeviceCosts, or None"),
        ("prices", prices, Costs | None, "Costs.of(backbone), or None"),
    ):
        if not isinstance(value, kind):
            raise InputError(f"plan.{name}: got {value!r:.80}; expected {expected}")
    is_certified = goal.reuse == "certified"
    if is_certified and prices is None:
        raise InputError("plan.prices: got None; expected Costs.of(backbone), because the least cost is chosen")
    is_lacking = is_certified and certificate is None
    if is_lacking or not isinstance(certificate, Certificate | None):
        raise InputError(f"plan.certificate: got {certificate!r:.80}; expected Certificate.read(…)")
    backbone = window.backbone
    if stored is not None and stored.backbone != backbone:
        raise InputError(
            f"plan.stored: got an inventory of backbone {stored.backbone[:16]!r}; expected {backbone[:16]!r}"
        )
    if certificate is not None and certificate.backbone != backbone:
        raise InputError(
            f"plan.certificate: got {certificate.model!r:.80} of backbone {certificate.backbone[:16]!r}; expected "
            f"backbone {backbone[:16]!r}"
        )


def _entries(window: Window, wanted: Any) -> list[Entry]:
    """Returns all entries that the window is to hold, pinned ones included."""
    if isinstance(wanted, str | bytes | Mapping) or not isinstance(wanted, Iterable):
        raise InputError(f"plan.wanted: got {wanted!r:.80}; expected a sequence of Entry")
    entries = list(wanted)
    for entry in entries:
        if not isinstance(entry, Entry):
            raise InputError(f"plan.wanted: got {entry!r:.80}; expected an Entry, such as Entry.of(chunk)")
    # A caller may leave out what cannot leave anyway.
    pinned = [piece.entry for piece in window.pieces[: window.lead]]
    return [*pinned, *entries] if pinned and pinned[0] not in entries else entries
