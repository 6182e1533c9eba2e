"""`plan` chooses how each piece of a window is served, within a goal. `Plan` is the result: edits, cost and bounds."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..cache import brief
from ..errors import CertificateError, PlanError
from ..window import UNKNOWN_WAYS, AtHand, Edits, Entry, Fidelity, PagedExecutor, Rotate, Window, arrange
from .certificate import Certificate
from .device_costs import DeviceCosts
from .goal import Goal
from .inventory import PatchInventory
from .operating_points import MEANING, Point
from .option_solver import CertifiedBounds, OptionSelection, OptionSolver, Uncertified
from .serving_options import EditPricing, OptionTable, ServingOption, kept_point

INFINITE = float("inf")


class PlannedChunk(NamedTuple):
    """One piece of a plan.

    Attributes:
      entry: the piece.
      point: how it is served.
      patch: digest of its patch; None without one.
      rank: of that patch; 0 without one.
      bytes, flops, seconds: of its edits.
      fidelity: as `Window.fidelity`.
      kl: its bound, in nats, for an answer behind the window; 0 if its KV is what the window promises; None if nothing
        bounds it.
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
        """Id of the entry."""
        return self.entry.id


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A window with the entries that were asked for, and the edits that lead there.

        planned = plan(window, entries, Goal(kl=0.05), stored=inventory, certificate=certificate)
        print(planned.explain())
        planned.provide(executor)
        executor.run(planned.window, planned.edits)

    Attributes:
      before: the window that was planned for. window: the window afterwards. edits: for an executor.
      goal: the bounds that it meets.
      devices: the rates that seconds were predicted with.
      certificate: digest of the certificate that bounds come from, or None.
    """

    before: Window
    window: Window
    edits: Edits
    goal: Goal
    devices: DeviceCosts
    certificate: str | None
    _table: OptionTable
    _selection: OptionSelection
    _bounds: CertifiedBounds

    @property
    def kl(self) -> float | None:
        """Bound, in nats, of an answer behind the whole window; None if nothing bounds it."""
        return self._selection.kl

    @property
    def flips(self) -> float | None:
        """Bound on the share of answers whose most likely token changes; None if nothing bounds it."""
        return self._selection.flips

    @property
    def beyond(self) -> str | None:
        """How the window exceeds everything the certificate was measured on, so that it bounds nothing; or None."""
        return self._bounds.beyond

    @property
    def as_promised(self) -> bool:
        """Whether every piece's KV is what the window promises."""
        return self.kl == 0.0 and not any(option.ways for option in self._selection.options)

    @functools.cached_property
    def seconds(self) -> float:
        """Predicted duration of the edits on `devices`."""
        return self.devices.seconds(self.edits)

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of all edits, exactly."""
        return sum(edit.bytes for edit in self.edits)

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of all edits, exactly."""
        return sum(edit.flops for edit in self.edits)

    @functools.cached_property
    def chunks(self) -> tuple[PlannedChunk, ...]:
        """All pieces, in order."""
        # All rotations share one launch. It is counted with the first piece that is rotated.
        first_rotated = next((edit.id for edit in self.edits if isinstance(edit, Rotate)), None)
        launch = self.devices.rates("Rotate").launch
        options = self._selection.options
        others = sum(option.inherits or bool(option.ways) for option in options) - 1

        chunks, tainted = [], False

        for piece, option in zip(self.window.pieces, options, strict=True):
            # An approximate piece is bounded by its own way; exact ones behind it inherit the bound of the whole.
            kl: float | None = 0.0
            if option.ways:
                tainted, kl = True, self._bounds.kl(option.ways, others) if others >= 0 else None
            elif tainted and option.inherits:
                kl = self.kl

            seconds = option.seconds + launch if piece[0].id == first_rotated else option.seconds
            point = kept_point(piece) if option.choice.how == "keep" else option.point
            digest = None if option.patch is None else option.patch.note.digest
            costs = option.bytes, option.flops, seconds
            chunks.append(PlannedChunk(piece[0], point, digest, option.rank, *costs, piece.fidelity, kl))

        return tuple(chunks)

    def provide(self, executor: PagedExecutor) -> None:
        """Gives an executor the canonicals and patches that the edits need and the inventory has in memory."""
        # What the inventory knows of a store only, the executor fetches by itself.
        for option, piece in zip(self._selection.options, self.window.pieces, strict=True):
            chunk = self._table.inventory.chunks.get(piece.id)
            if chunk is not None and (option.patch is not None or option.point == "bare"):
                executor.provide(piece.id, chunk=chunk)
            if option.patch is not None and option.patch.patch is not None:
                executor.provide(piece.id, patch=option.patch.patch)

    # ------------------------------------------------------------------------------------------- explanations

    @functools.cached_property
    def _options(self) -> list[list[ServingOption]]:
        return self._table.options()

    def menu(self, id: str) -> list[str]:
        """Describes every option of a piece, one line each: its cost and its bound. An arrow marks the chosen one.

        Raises:
          WindowError: the piece is not in the window.
        """
        index = self.window.index(id)
        lines = []
        for option in self._options[index]:
            mark = "→" if option == self._selection.options[index] else " "
            loss = f"KL {_format_bound(self._bounds.kl(option.ways, 0))}" if option.ways else "as promised"
            lines.append(f"{mark} {_format_point(option)}: {_format_cost(option)}, {loss}")
        return lines

    def explain(self) -> str:
        """Describes the plan: a line for the whole window, then one for each piece with the reason for its point."""
        rates = f"{'measured' if self.devices.measured else 'assumed'} on {self.devices.device}"
        whole = (
            f"{len(self.chunks)} pieces, goal {self.goal}: {_format_cost(self)} ({rates}), "
            f"KL {_format_bound(self.kl)}, flips {_format_bound(self.flips)}"
        )
        lines = [f"{whole}; uncertified: {self.beyond}" if self.beyond else whole]

        for index, (chunk, option) in enumerate(zip(self.chunks, self._selection.options, strict=True)):
            served = f"{_format_point(option)}, {chunk.fidelity}"
            line = f"  {brief(chunk.id)!r}: {served}, {_format_cost(option)}, KL {_format_bound(chunk.kl)}"

            # Why the quickest option was not chosen, unless that one is as promised.
            best = min(self._options[index], key=lambda option: option.seconds)
            if best.seconds < option.seconds and best.ways:
                if best.ways == UNKNOWN_WAYS:
                    reason = "nothing says how far it is off"
                elif self._bounds.kl(best.ways, 0) is None:
                    reason = f"uncertified ({self.beyond})" if self.beyond else "uncertified"
                else:
                    reason = "the goal is what the window promises" if self.goal.as_promised else "beyond the goal"
                line += f" (not {_format_point(best)}: {reason})"
            lines.append(line)

        return "\n".join(lines)

    def __repr__(self) -> str:
        points = [chunk.point for chunk in self.chunks]
        counts = ", ".join(f"{points.count(point)} {point}" for point in MEANING if point in points)
        costs = f"{self.seconds:.3g} s, {self.bytes} bytes, {self.flops} FLOPs"
        return f"Plan({counts}; {costs}, KL {_format_bound(self.kl)})"


def _format_point(option: ServingOption) -> str:
    return option.point if option.patch is None else f"{option.point} rank {option.rank}"


def _format_cost(costs: Plan | ServingOption) -> str:
    return f"{costs.flops:.3g} FLOPs, {costs.bytes:.3g} bytes, {costs.seconds:.3g} s"


def _format_bound(bound: float | None) -> str:
    if bound is None:
        return "not bounded"
    return f"≤ {bound:.3g}" if bound else "0"


# ------------------------------------------------------------------------------------------------------- planning


def plan(
    window: Window,
    wanted: Iterable[Entry],
    goal: Goal | None = None,
    *,
    stored: PatchInventory,
    certificate: Certificate | None = None,
    costs: DeviceCosts | None = None,
    executor: PagedExecutor | None = None,
    uncertified: bool = False,
    forming: bool = False,
) -> Plan:
    """Chooses how every piece of a window is served, within a goal.

    Args:
      window: as it is.
      wanted: every entry that it is to hold, in order; pinned entries in front may be omitted. Pieces that are not
        listed leave, evicted ones return, and chunks move where they are order-free.
      goal: None: as promised, in the least time.
      stored: available canonicals and patches.
      certificate: of this backbone. Approximate options that it does not bound are not used; if the window exceeds
        everything it was measured on (`Certificate.beyond`), it bounds none.
      costs: of this device; None: assumed ones.
      executor: what will run the edits. What it was given needs no fetch.
      uncertified: also uses stored patches that nothing bounds, if the goal bounds neither KL nor flips; and if a
        budget requires it, canonicals alone.
      forming: a `PatchFormer` watches the executor and forms a patch of what is prefilled: "fresh".

    Raises:
      WindowError: the window cannot hold these entries so.
      CertificateError: a certificate of another backbone; a goal that only uncertified options would meet.
      PlanError: a goal that nothing meets, an inventory of another backbone, an argument of another type.
    """
    goal = Goal() if goal is None else goal
    _check_arguments(window, goal, stored, certificate, costs, executor)
    for name, value in (("uncertified", uncertified), ("forming", forming)):
        if not isinstance(value, bool):
            raise PlanError(f"plan.{name}: got {value!r:.80}; expected True or False")
    arranged = arrange(window, _entries(window, wanted))

    devices = costs or DeviceCosts.assumed()
    at_hand = None if executor is None and not stored.in_memory else _at_hand(arranged.window, stored, executor)
    table = OptionTable(arranged, stored, EditPricing(arranged, devices, at_hand), forming)
    promised_only = goal.as_promised and not uncertified

    # Nothing is certified of a window that exceeds those that were measured.
    beyond, pieces = None, arranged.window.pieces
    if certificate is not None and arranged.window.sink_left:
        beyond = "window whose first tokens have left; certified with them pinned"
    elif certificate is not None:
        chunks = [(piece.entry.span, piece.entry.modality) for piece in pieces[arranged.window.lead :]]
        beyond = certificate.beyond(arranged.window.tokens, chunks)

    # Without survivors both promises are the same, and certificates are asked for "forget".
    has_survivors = any(piece.fidelity == "survivor" for piece in pieces)
    promise = arranged.window.promise if has_survivors else "forget"

    # If a selection runs a piece again, kept ones behind it have not seen the result, and lose that option. Every round
    # withdraws at least one, so this ends.
    while True:
        piece_options = table.options(promised_only)
        bounds = CertifiedBounds(certificate, promise, len(piece_options), beyond)
        if promised_only:
            selection = OptionSelection([own[0] for own in piece_options], 0.0, 0.0)
        else:
            selection = _select(OptionSolver(piece_options, bounds), goal, uncertified, arranged.window)

        served, edits = arranged.serve([option.choice for option in selection.options], at_hand)
        if not table.mark_unseen(selection.options, served):
            break

    digest = None if certificate is None or beyond else certificate.digest
    return Plan(window, served, edits, goal, devices, digest, table, selection, bounds)


def _check_arguments(window: Any, goal: Any, stored: Any, certificate: Any, costs: Any, executor: Any) -> None:
    """Refuses arguments of other types, and of other backbones."""
    for name, value, kind, expected in (
        ("window", window, Window, "a Window"),
        ("goal", goal, Goal, "a Goal, or None"),
        ("stored", stored, PatchInventory, "a PatchInventory, such as PatchInventory.of(store, backbone)"),
        ("costs", costs, DeviceCosts | None, "DeviceCosts, or None"),
        ("executor", executor, PagedExecutor | None, "a PagedExecutor or None"),
    ):
        if not isinstance(value, kind):
            raise PlanError(f"plan.{name}: got {value!r:.80}; expected {expected}")

    if not isinstance(certificate, Certificate | None):
        raise CertificateError(f"plan.certificate: got {certificate!r:.80}; expected Certificate.read(…), or None")

    own = window.backbone[:16]
    if stored.backbone != window.backbone:
        raise PlanError(f"plan.stored: got an inventory of backbone {stored.backbone[:16]!r}; expected {own!r}")
    if certificate is not None and certificate.backbone != window.backbone:
        raise CertificateError(
            f"plan.certificate: got {certificate.model!r:.80} of backbone {certificate.backbone[:16]!r}; expected "
            f"backbone {own!r}"
        )


def _entries(window: Window, wanted: Any) -> list[Entry]:
    """Returns all entries that the window is to hold, pinned ones included."""
    if isinstance(wanted, str | bytes | Mapping) or not isinstance(wanted, Iterable):
        raise PlanError(f"plan.wanted: got {wanted!r:.80}; expected a sequence of Entry")
    entries = list(wanted)
    for entry in entries:
        if not isinstance(entry, Entry):
            raise PlanError(f"plan.wanted: got {entry!r:.80}; expected an Entry, such as Entry.of(chunk)")

    # A caller may leave out what cannot leave anyway.
    pinned = [piece.entry for piece in window.pieces[: window.lead]]
    return entries if entries[:1] == pinned[:1] else [*pinned, *entries]


def _at_hand(window: Window, inventory: PatchInventory, executor: PagedExecutor | None) -> AtHand:
    """Returns whether a canonical or patch needs no `Fetch`: the inventory or the executor has it in memory."""
    places = window.places

    def at_hand(id: str, digest: str | None) -> bool:
        if digest is None:
            if inventory.chunks.get(id) is not None:
                return True
        elif (patch := inventory.note(id, digest)) is not None and patch.patch is not None:
            return True

        if executor is None:
            return False

        # A canonical of another content under the same id does not serve the piece.
        source = executor.sources[id]
        if digest is not None:
            return digest in source.patches
        return source.has_canonical(window.pieces[places[id]].entry.content)

    return at_hand


def _select(solver: OptionSolver, goal: Goal, uncertified: bool, window: Window) -> OptionSelection:
    """Returns the selection that meets a goal.

    Raises:
      CertificateError, PlanError: none does.
    """
    # Without a bound on KL, any certified loss meets a budget, or a bound on flips. Without any bound, none does.
    bounded = goal.kl is not None or goal.flips is not None
    flips = 1.0 if goal.flips is None else float(goal.flips)
    kl = (INFINITE if bounded or goal.budgeted else 0.0) if goal.kl is None else float(goal.kl)
    extra: Uncertified = "patches" if uncertified and not bounded else "none"
    if not goal.budgeted:
        return solver.cheapest(kl, flips, extra)

    # A budget: as faithful as possible within it; uncertified options only where certified ones do not suffice.
    seconds = INFINITE if goal.seconds is None else float(goal.seconds)
    budget = seconds, INFINITE if goal.bytes is None else float(goal.bytes)
    selection = solver.most_faithful(budget, kl, flips)
    if selection is None and extra != "none":
        selection = _uncertified_in_budget(solver, budget)
    if selection is not None:
        return selection

    # Nothing meets the goal. The error names what would: a larger budget, a looser bound, or a certificate.
    most: Uncertified = "none" if extra == "none" else "all"
    quickest, smallest = (solver.cheapest(kl, flips, most, weight) for weight in (0.0, INFINITE))
    message = f"plan: got goal {goal}; expected at least {quickest.seconds:.3g} s and {smallest.bytes} bytes"
    if most == "all":
        raise PlanError(message)

    certified = solver.cheapest_in_budget(budget, INFINITE, 1.0)
    if certified is not None:
        raise PlanError(f"{message}, or KL ≤ {certified.kl:.3g} and flips ≤ {certified.flips:.3g}")

    without = _uncertified_in_budget(solver, budget)
    if without is None:
        raise PlanError(message)

    # Name the first piece that lacks a bound, or the first approximate one if only their number is too large.
    bounds = solver.bounds
    approximate = [index for index, option in enumerate(without.options) if option.ways]
    unbounded = [index for index in approximate if bounds.kl(without.options[index].ways, 0) is None]
    place = unbounded[0] if unbounded else approximate[0]
    option, id = without.options[place], brief(window.pieces[place].id)
    beyond = f" ({bounds.beyond})" if bounds.beyond else ""
    raise CertificateError(
        f"{message}, or a certificate (`python -m evals.certify` measures one) of {option.point} of rank "
        f"{option.rank}, for {id!r} and {len(approximate) - 1} others, or uncertified=True{beyond}"
    )


def _uncertified_in_budget(solver: OptionSolver, budget: tuple[float, float]) -> OptionSelection | None:
    patches = solver.cheapest_in_budget(budget, INFINITE, 1.0, "patches")
    return patches or solver.cheapest_in_budget(budget, INFINITE, 1.0, "all")
