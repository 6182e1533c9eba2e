"""`plan`: which way of reuse each piece of a window gets, within a goal; `Plan`: what that is, takes and loses."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..cache import brief
from ..errors import CertificateError, PlanError
from ..window import Edits, Entry, Executor, Fidelity, Rotate, Window, arrange
from .certificate import Certificate
from .device_costs import DeviceCosts
from .goal import Goal
from .inventory import PatchInventory
from .operating_points import MEANING, Point
from .option_solver import CertifiedBounds, OptionSelection, OptionSolver, Unknown
from .serving_options import UNKNOWN, EditPricing, OptionTable, ServingOption, Way, kept_point


class PlannedChunk(NamedTuple):
    """One piece of a plan.

    Attributes:
      entry: what it is. point: how it comes to stand there.
      patch: digest of its patch, None without one. rank: that patch's, 0 without one.
      bytes, flops, seconds: of its edits.
      fidelity: the window's own word for how truly it is served.
      kl: bound, in nats, of an answer behind the window as far as this piece is concerned; 0 of one whose KV is what
        the window promises; None where nothing bounds it.
    """

    entry: Entry
    point: Point
    patch: str | None
    rank: int
    bytes: int
    flops: int
    seconds: float
    fidelity: Fidelity
    kl: float | None

    @property
    def id(self) -> str:
        """The entry's."""
        return self.entry.id


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """How a window is brought to hold what is wanted.

        planned = plan(window, entries, Goal(kl=0.05), stored=stock, certificate=certificate)
        print(planned.explain())
        planned.provide(executor)
        executor.run(planned.window, planned.edits)

    Attributes:
      before: the window that was planned for. window: it afterwards. edits: what leads there, for an executor.
      goal: what was asked for.
      kl, flips: bounds of an answer behind the whole window against what it promises; None where nothing bounds them.
      seconds: that the edits are predicted to take on `devices`. bytes, flops: of the edits, exact.
      devices: what seconds were predicted with. certificate: digest of the one that bounds are from, or None.
    """

    before: Window
    window: Window
    edits: Edits
    goal: Goal
    kl: float | None
    flips: float | None
    seconds: float
    devices: DeviceCosts
    certificate: str | None
    _menu: OptionTable
    _chosen: OptionSelection
    _stock: PatchInventory
    _bounds: CertifiedBounds
    _known: Mapping[str, Way]

    @functools.cached_property
    def chunks(self) -> tuple[PlannedChunk, ...]:
        """All pieces, in order."""
        return _planned(self.window, self._chosen, self.edits, self.devices, self._bounds)

    @property
    def beyond(self) -> str | None:
        """In what the window is beyond all that the certificate was measured on, so that it bounds nothing; or None."""
        return self._bounds.beyond

    @property
    def _taken(self) -> list[ServingOption]:
        return self._chosen.options

    @functools.cached_property
    def bytes(self) -> int:
        """Of all edits."""
        return sum(edit.bytes for edit in self.edits)

    @functools.cached_property
    def flops(self) -> int:
        """Of all edits."""
        return sum(edit.flops for edit in self.edits)

    @property
    def as_promised(self) -> bool:
        """Whether every piece's KV is what the window promises."""
        return self.kl == 0.0 and all(option.way is None for option in self._taken)

    @functools.cached_property
    def known(self) -> dict[str, Way]:
        """The ways of pieces that are approximate, by the digest of their state: the next plan takes it."""
        found, worst = {}, None
        for piece, option in zip(self.window.pieces, self._taken, strict=True):
            if option.way is not None:
                worst = option.way if worst is None else self._worse(worst, option.way)
                found[piece.state.digest] = option.way
            elif worst is not None and option.open:
                found[piece.state.digest] = worst
        asides = (piece.aside.digest for piece in self.window.pieces if piece.aside is not None)
        held = {digest: self._known[digest] for digest in asides if digest in self._known}
        return {**held, **found}

    @functools.cached_property
    def _options(self) -> list[list[ServingOption]]:
        """All ways of serving each piece, as they are to be had now."""
        return self._menu.options()

    def _worse(self, first: Way, second: Way) -> Way:
        """The way that less is known of, or that loses more."""
        one, other = (self._bounds.kl(way, 0) for way in (first, second))
        if one is None or other is None:
            return UNKNOWN
        return first if one >= other else second

    def provide(self, executor: Executor) -> None:
        """Gives an executor what the edits need of what the stock has in memory: canonicals and patches."""
        for option, piece in zip(self._taken, self.window.pieces, strict=True):
            chunk = self._stock.chunk(piece.id)
            if chunk is not None and (option.stocked is not None or option.point == "bare"):
                executor.provide(piece.id, chunk=chunk)
            if option.stocked is not None and option.stocked.patch is not None:
                executor.provide(piece.id, patch=option.stocked.patch)

    def menu(self, id: str) -> list[str]:
        """Says what a piece could have been served by, a line for each way, and what would bound it.

        A token repair is among them where there is a canonical: predicted alone, for no edit does it.

        Raises:
          WindowError: a piece that is not in the window.
        """
        index = self.window.index(id)
        lines = [
            f"{'→' if option == self._taken[index] else ' '} {self._named(option)}: {_took(option)}, "
            f"{_lost(None if option.way is None else self._bounds.kl(option.way, 0), option)}"
            for option in self._options[index]
        ]
        repaired = self._menu.repair(index)
        return (
            lines if repaired is None else [*lines, f"  {_took(repaired)} by a repair of 15 % of the tokens; no edit"]
        )

    def explain(self) -> str:
        """Says how each piece is served and why, a line for each, below a line for all."""
        whole = (
            f"{len(self.chunks)} pieces, goal {self.goal}: {self.flops:.3g} FLOPs, {self.bytes:.3g} bytes, "
            f"{self.seconds:.3g} s ({'measured' if self.devices.measured else 'assumed'} on {self.devices.device}), "
            f"KL {_bound(self.kl)}, flips {_bound(self.flips)}"
        )
        if self._bounds.beyond:
            whole += f"; uncertified: {self._bounds.beyond}"
        return "\n".join([whole, *(f"  {self._line(index)}" for index in range(len(self.chunks)))])

    def _line(self, index: int) -> str:
        chunk, option = self.chunks[index], self._taken[index]
        said = f"{brief(chunk.id)!r}: {self._named(option)}, {chunk.fidelity}, {_took(option)}, KL {_bound(chunk.kl)}"
        refused = self._refused(index)
        return f"{said} ({refused})" if refused else said

    def _refused(self, index: int) -> str:
        """Why a quicker way was not taken; empty where none was."""
        taken = self._taken[index]
        quicker = [option for option in self._options[index] if option.seconds < taken.seconds]
        if not quicker:
            return ""
        best = min(quicker, key=lambda option: option.seconds)
        if best.way is None:
            return ""
        if best.way == UNKNOWN:
            why = "stale" if best.service.allow_stale else "nothing says how far it is off"
        elif self._bounds.kl(best.way, 0) is None:
            why = f"uncertified ({self._bounds.beyond})" if self._bounds.beyond else "uncertified"
        else:
            why = "beyond the goal" if not self.goal.as_promised else "the goal is what the window promises"
        return f"not {self._named(best)}: {why}"

    def _named(self, option: ServingOption) -> str:
        return f"{option.point} rank {option.rank}" if option.stocked is not None else option.point

    def __repr__(self) -> str:
        points = [chunk.point for chunk in self.chunks]
        counts = ", ".join(f"{points.count(point)} {point}" for point in MEANING if point in points)
        return f"Plan({counts}; {self.seconds:.3g} s, {self.bytes} bytes, {self.flops} FLOPs, KL {_bound(self.kl)})"


def _took(option: ServingOption) -> str:
    return f"{option.flops:.3g} FLOPs, {option.bytes:.3g} bytes, {option.seconds:.3g} s"


def _lost(bound: float | None, option: ServingOption) -> str:
    return "as promised" if option.way is None else f"KL {_bound(bound)}"


def _bound(number: float | None) -> str:
    if number is None:
        return "not bounded"
    return f"≤ {number:.3g}" if number else "0"


def plan(
    window: Window,
    wanted: Sequence[Entry],
    goal: Goal | None = None,
    *,
    stored: PatchInventory,
    certificate: Certificate | None = None,
    costs: DeviceCosts | None = None,
    uncertified: bool = False,
    allow_stale: bool = False,
    encoded: Collection[str] = frozenset(),
    forming: bool = False,
    executor: Executor | None = None,
    known: Mapping[str, Way] | None = None,
) -> Plan:
    """Chooses how every piece of a window is served, within a goal.

    Args:
      window: as it is. wanted: all that it is to hold, in order; what is pinned in front may be left out. What stands
        there and is not wanted leaves; what was evicted comes back; chunks move where they are order-free.
      goal: see `Goal`. None: as promised, at the least seconds.
      stored: canonicals and patches that lie ready.
      certificate: of this backbone. Approximate ways that it does not bound are not taken; where the window is beyond
        those that it was measured on (`Certificate.beyond`), it bounds none.
      costs: of this device; None: assumed ones.
      uncertified: takes stored patches that nothing bounds too, where no bound on KL or flips is asked for; and where
        a budget asks for it, canonicals alone and stale patches.
      allow_stale: lists patches formed behind something else too; nothing bounds them.
      encoded: ids whose tower output is stored, so that a forward of theirs needs no tower.
      forming: a `Former` watches, and forms a patch of what is prefilled: "fresh".
      executor: what will run the edits; what it was given is not fetched.
      known: `Plan.known` of the plan before: how what is approximate in the window came to be so.

    Raises:
      WindowError: what the window cannot hold so. CertificateError: a certificate of another backbone; a goal that
      uncertified ways alone would meet. PlanError: a goal that nothing meets, a stock of another backbone.
    """
    goal = Goal() if goal is None else goal
    _check(window, stored, certificate)
    _check_kinds(
        {"goal": goal, "costs": costs, "known": known, "executor": executor, "encoded": encoded},
        {"uncertified": uncertified, "allow_stale": allow_stale, "forming": forming},
    )
    arranged = arrange(window, _entries(window, wanted))
    devices = costs or DeviceCosts.assumed()
    at_hand = None if executor is None and not stored.in_memory else _at_hand(arranged.window, stored, executor)
    menu = OptionTable(
        arranged,
        stored,
        EditPricing(arranged, devices, at_hand),
        known=known or {},
        encoded=frozenset(encoded),
        forming=forming,
        allow_stale=allow_stale,
    )
    promised = goal.as_promised and not uncertified
    beyond = _beyond(certificate, arranged.window)
    while True:
        options = menu.options(promised)
        bounds = CertifiedBounds(certificate, _promise(arranged.window), len(options), beyond)
        if promised:
            chosen = OptionSelection([own[0] for own in options], 0.0, 0.0)
        else:
            chosen = _choose(OptionSolver(options, bounds), goal, uncertified, arranged.window)
        there, edits = arranged.serve([option.service for option in chosen.options], at_hand)
        if not menu.refuse_unseen(chosen.options, there):
            break
    return Plan(
        window,
        there,
        edits,
        goal,
        chosen.kl,
        chosen.flips,
        devices.seconds(edits),
        devices,
        None if certificate is None or beyond else certificate.digest,
        menu,
        chosen,
        stored,
        bounds,
        known or {},
    )


_KINDS: dict[str, tuple[Any, str]] = {
    "goal": (Goal, "a Goal, or None"),
    "costs": (DeviceCosts | None, "DeviceCosts, or None"),
    "known": (Mapping | None, "`Plan.known`, or None"),
    "executor": (Executor | None, "a HostExecutor or PagedExecutor, or None"),
    "encoded": (Collection, "a collection of ids"),
}


def _check_kinds(given: Mapping[str, Any], switches: Mapping[str, Any]) -> None:
    """Refuses arguments of `plan` that are none."""
    for what, value in given.items():
        kind, expected = _KINDS[what]
        if not isinstance(value, kind) or isinstance(value, str):
            raise PlanError(f"plan: {what} {value!r:.80}; expected {expected}")
    for what, value in switches.items():
        if not isinstance(value, bool):
            raise PlanError(f"plan: {what} {value!r:.80}; expected True or False")


def _entries(window: Window, wanted: Any) -> list[Entry]:
    """All that the window is to hold, what is pinned in front included."""
    if isinstance(wanted, str | bytes | Mapping) or not isinstance(wanted, Iterable):
        raise PlanError(f"plan: wanted {wanted!r:.80}; expected a sequence of Entry")
    entries = list(wanted)
    for each in entries:
        if not isinstance(each, Entry):
            raise PlanError(f"plan: wanted {each!r:.80}; expected an Entry, such as Entry.of(chunk)")
    pinned = [piece.entry for piece in window.pieces[: window.lead]]
    return entries if entries[:1] == pinned[:1] else [*pinned, *entries]


def _check(window: Any, stored: Any, certificate: Any) -> None:
    if not isinstance(window, Window):
        raise PlanError(f"plan: window {window!r:.80}; expected a Window")
    if not isinstance(stored, PatchInventory):
        raise PlanError(f"plan: stored {stored!r:.80}; expected a Stock, such as Stock.of(store, backbone)")
    if certificate is not None and not isinstance(certificate, Certificate):
        raise CertificateError(f"plan: certificate {certificate!r:.80}; expected Certificate.read(…), or None")
    if stored.backbone != window.backbone:
        raise PlanError(f"plan: a stock of backbone {stored.backbone[:16]!r}; expected {window.backbone[:16]!r}")
    if certificate is not None and certificate.backbone != window.backbone:
        raise CertificateError(
            f"plan: a certificate of {certificate.model!r:.80}, backbone {certificate.backbone[:16]!r}; expected "
            f"{window.backbone[:16]!r}"
        )


def _beyond(certificate: Certificate | None, window: Window) -> str | None:
    """In what a window is beyond those that a certificate was measured on; None where it is not."""
    if certificate is None:
        return None
    if window.sink_left:
        return "window whose first tokens have left; certified with them pinned"
    chunks = [(piece.entry.span, piece.entry.modality) for piece in window.pieces[window.lead :]]
    return certificate.beyond(window.tokens, chunks)


def _promise(window: Window) -> str:
    """What a certificate is asked for: without survivors both promises are the same."""
    return window.promise if any(piece.fidelity == "survivor" for piece in window.pieces) else "forget"


def _at_hand(window: Window, stored: PatchInventory, executor: Executor | None):
    """Whether a canonical or a patch needs no `Fetch`: the stock has it in memory, or the executor was given it."""
    places = window.places

    def at_hand(id: str, digest: str | None) -> bool:
        if digest is None:
            if stored.chunk(id) is not None:
                return True
        elif (stocked := stored.note(id, digest)) is not None and stocked.patch is not None:
            return True
        if executor is None:
            return False
        unit = executor.sources[id]
        if digest is not None:
            return digest in unit.patches
        content = window.pieces[places[id]].entry.content
        return unit.chunk is not None and content in (None, unit.chunk.content)

    return at_hand


def _choose(chooser: OptionSolver, goal: Goal, uncertified: bool, window: Window) -> OptionSelection:
    """The choice that meets a goal.

    Raises:
      CertificateError, PlanError: none does.
    """
    infinite = float("inf")
    flips = 1.0 if goal.flips is None else float(goal.flips)
    bounded = goal.kl is not None or goal.flips is not None
    kl = infinite if bounded or goal.budgeted else 0.0
    kl = kl if goal.kl is None else float(goal.kl)
    unknown: Unknown = "patches" if uncertified and not bounded else "none"
    if not goal.budgeted:
        return chooser.within(kl, flips, unknown)
    seconds, nbytes = (infinite if each is None else float(each) for each in (goal.seconds, goal.bytes))
    limits = seconds, nbytes
    found = chooser.truest(limits, kl, flips)
    if found is None and unknown != "none":
        found = chooser.affordable(limits, infinite, 1.0, unknown) or chooser.affordable(limits, infinite, 1.0, "all")
    if found is not None:
        return found
    most: Unknown = "none" if unknown == "none" else "all"
    least = [chooser.within(kl, flips, most, per_byte) for per_byte in (0.0, infinite)]
    said = f"plan: goal {goal}; expected at least {least[0].seconds:.3g} s and {least[1].bytes} bytes"
    if most == "all":
        raise PlanError(said)
    certified = chooser.affordable(limits, infinite, 1.0)
    if certified is not None:
        raise PlanError(f"{said}, or KL ≤ {certified.kl:.3g} and flips ≤ {certified.flips:.3g}")
    without = chooser.affordable(limits, infinite, 1.0, "patches") or chooser.affordable(limits, infinite, 1.0, "all")
    if without is None:
        raise PlanError(said)
    approximate = [index for index, option in enumerate(without.options) if option.way is not None]
    alone = lambda index: chooser.bounds.kl(without.options[index].way or UNKNOWN, 0)
    place = next((index for index in approximate if alone(index) is None), approximate[0])
    option, id = without.options[place], brief(window.pieces[place].id)
    raise CertificateError(
        f"{said}, or a certificate (`python -m evals.certify` measures one) of {option.point} of rank {option.rank}, "
        f"for {id!r} and {len(approximate) - 1} others, or uncertified=True"
        + (f" ({chooser.bounds.beyond})" if chooser.bounds.beyond else "")
    )


def _planned(
    window: Window, chosen: OptionSelection, edits: Edits, devices: DeviceCosts, bounds: CertifiedBounds
) -> tuple[PlannedChunk, ...]:
    turning = next((edit.id for edit in edits if isinstance(edit, Rotate)), None)
    launch, tainted, made = devices.rates("Rotate").launch, False, []
    others = sum(option.open or option.way is not None for option in chosen.options) - 1
    for piece, option in zip(window.pieces, chosen.options, strict=True):
        entry, way, stocked = piece[0], option.way, option.stocked
        kl: float | None = 0.0
        if way is not None:
            tainted, kl = True, bounds.kl(way, others) if others >= 0 else None
        elif tainted and option.open:
            kl = chosen.kl
        seconds = option.seconds + launch if entry.id == turning else option.seconds
        point = kept_point(piece) if option.service.how == "keep" else option.point
        digest, rank = (None, 0) if stocked is None else (stocked.note.digest, stocked.note.rank)
        made.append(PlannedChunk(entry, point, digest, rank, option.bytes, option.flops, seconds, piece.fidelity, kl))
    return tuple(made)
