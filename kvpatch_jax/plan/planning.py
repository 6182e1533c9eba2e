"""`plan` chooses how each piece of a window is served, within a goal. `Plan` is the result: window, cost, bounds."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..cache import UNKNOWN_WAYS, brief
from ..errors import CertificateError, PlanError
from ..window import KEEP, Costs, Entry, Executor, Fidelity, Service, Step, Window, total
from .certificate import Certificate
from .device_costs import DeviceCosts
from .goal import Goal
from .inventory import PatchInventory
from .operating_points import MEANING, Point
from .option_solver import CertifiedBounds, OptionSelection, select
from .serving_options import ActionCounter, OptionTable, ServingOption, kept_point


class PlannedChunk(NamedTuple):
    """One piece of a plan.

    Attributes:
      entry: the piece.
      point: how it is served.
      patch: digest of its patch; None without one.
      rank: of that patch; 0 without one.
      bytes, flops, seconds: of its actions.
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
    """A window with the entries that were asked for, and what it takes to bring it into a pool.

        planned = plan(window, entries, Goal(kl=0.05), stored=inventory, certificate=certificate)
        print(planned.explain())
        planned.provide(executor)
        executor.run(planned.window)

    Attributes:
      before: the window that was planned for. window: the window to be run. services: by id, how pieces are served that
        do not stay as they are.
      goal: the bounds that it meets.
      devices: the rates that seconds were predicted with.
      certificate: digest of the certificate that bounds come from, or None.
      steps: for each piece, the actions that `Executor.run(window)` will take and count.
    """

    before: Window
    window: Window
    services: Mapping[str, Service]
    goal: Goal
    devices: DeviceCosts
    certificate: str | None
    steps: tuple[Step, ...]
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
        return self.window.as_promised

    @functools.cached_property
    def step(self) -> Step:
        """All actions, in the order of the executor: rotations, then what is made anew."""
        actions = [action for step in self.steps for action in step]
        return tuple(sorted(actions, key=lambda action: action.kind != "rotate"))

    @property
    def bytes(self) -> int:
        """Bytes of all actions, exactly."""
        return total(self.step)[1]

    @property
    def flops(self) -> int:
        """FLOPs of all actions, exactly."""
        return total(self.step)[2]

    @functools.cached_property
    def seconds(self) -> float:
        """Predicted duration of all actions on `devices`."""
        return self.devices.seconds(self.step)

    @functools.cached_property
    def chunks(self) -> tuple[PlannedChunk, ...]:
        """All pieces, in order."""
        options, standings = self._selection.options, self.window.standings
        others = sum(option.inherits or bool(option.ways) for option in options) - 1
        chunks, tainted, launch = [], False, 0.0
        for piece, standing, option, step in zip(self.window.pieces, standings, options, self.steps, strict=True):
            # An approximate piece is bounded by its own way; exact ones behind it inherit the bound of the window.
            kl: float | None = 0.0
            if option.ways:
                tainted, kl = True, self._bounds.kl(option.ways, others)
            elif tainted and option.inherits:
                kl = self.kl

            # All rotations share one launch. It is counted with the first piece that is rotated.
            _, nbytes, flops = total(step)
            seconds = self.devices.seconds(step)
            if step and step[0].kind == "rotate":
                seconds, launch = seconds - launch, self.devices.rates("rotate").launch

            point = kept_point(piece, standing) if option.service is KEEP else option.point
            digest = None if option.patch is None else option.patch.note.digest
            costs = nbytes, flops, seconds
            chunks.append(PlannedChunk(piece.entry, point, digest, option.rank, *costs, standing.fidelity, kl))
        return tuple(chunks)

    def provide(self, executor: Executor) -> None:
        """Provides an executor with canonicals and patches that the window needs and the inventory has in memory."""
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
            line = f"  {brief(chunk.id)!r}: {served}, {_format_cost(chunk)}, KL {_format_bound(chunk.kl)}"

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


def _format_cost(costs: Plan | PlannedChunk | ServingOption) -> str:
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
    executor: Executor | None = None,
    prices: Costs | None = None,
    uncertified: bool = False,
    forming: bool = False,
) -> Plan:
    """Chooses how every piece of a window is served, within a goal.

    Args:
      window: as it is.
      wanted: every entry that it is to hold, in order; pinned entries in front may be omitted. Pieces that are not
        listed leave, evicted ones return, and chunks move where they are order-free.
      goal: None: as promised, in the least time.
      stored: available canonicals, patches and stored prefills.
      certificate: of this backbone. Approximate options that it does not bound are not used; if the window exceeds
        everything it was measured on (`Certificate.beyond`), it bounds none.
      costs: of this device; None: assumed ones.
      executor: what will run the window. What it was given needs no fetch.
      prices: bytes and FLOPs of the backbone's actions; None: those of the executor.
      uncertified: also uses stored patches that nothing bounds, if there is no goal.
      forming: a `PatchFormer` watches the executor and forms a patch of what is prefilled: "fresh".

    Raises:
      WindowError: the window cannot hold these entries so.
      CertificateError: a certificate of another backbone.
      PlanError: an inventory of another backbone, an argument of another type.
    """
    goal = Goal() if goal is None else goal
    _check_arguments(
        certificate,
        window=window,
        goal=goal,
        stored=stored,
        costs=costs,
        executor=executor,
        uncertified=uncertified,
        forming=forming,
    )
    prices = executor.costs if prices is None and executor is not None else prices
    if not isinstance(prices, Costs):
        raise PlanError(f"plan.prices: got {prices!r:.80}; expected Costs.of(backbone), or an executor")
    entries = _entries(window, wanted)
    arranged = window.arranged(entries)
    devices, counter = costs or DeviceCosts.assumed(), ActionCounter(prices, stored, executor)
    table = OptionTable(window, arranged, stored, counter, devices, forming)
    promised_only = goal.as_promised and not uncertified

    # Nothing is certified of a window that exceeds those that were measured.
    beyond = None
    if certificate is not None and arranged.sink_left:
        beyond = "window whose first tokens have left; certified with them pinned"
    elif certificate is not None:
        chunks = [(entry.span, entry.modality) for entry in entries[arranged.lead :]]
        beyond = certificate.beyond(arranged.tokens, chunks)

    # Without survivors both promises are the same, and certificates are asked for "forget".
    has_survivors = any(standing.fidelity == "survivor" for standing in arranged.standings)
    promise = arranged.promise if has_survivors else "forget"

    # If a selection runs a piece again, kept ones behind it have not seen the result, and lose that option. Every round
    # withdraws at least one, so this ends.
    while True:
        piece_options = table.options(promised_only)
        bounds = CertifiedBounds(certificate, promise, len(piece_options), beyond)
        selection = select(piece_options, bounds, goal, uncertified)
        pairs = zip(entries, selection.options, strict=True)
        services = {entry.id: option.service for entry, option in pairs if option.service is not KEEP}
        served = window.arranged(entries, services)
        if not table.mark_unseen(selection.options, served):
            break

    digest = None if certificate is None or beyond else certificate.digest
    steps = table.steps(selection.options, served)
    return Plan(window, served, services, goal, devices, digest, steps, table, selection, bounds)


_ARGUMENTS: Mapping[str, tuple[Any, str]] = {
    "window": (Window, "a Window"),
    "goal": (Goal, "a Goal, or None"),
    "stored": (PatchInventory, "a PatchInventory, such as PatchInventory.of(store, backbone)"),
    "costs": (DeviceCosts | None, "DeviceCosts, or None"),
    "executor": (Executor | None, "an Executor or None"),
    "uncertified": (bool, "True or False"),
    "forming": (bool, "True or False"),
}


def _check_arguments(certificate: Any, **arguments: Any) -> None:
    """Refuses arguments of other types, and of other backbones."""
    for name, value in arguments.items():
        kind, expected = _ARGUMENTS[name]
        if not isinstance(value, kind):
            raise PlanError(f"plan.{name}: got {value!r:.80}; expected {expected}")
    if not isinstance(certificate, Certificate | None):
        raise CertificateError(f"plan.certificate: got {certificate!r:.80}; expected Certificate.read(…), or None")

    backbone, stored = arguments["window"].backbone, arguments["stored"].backbone
    if stored != backbone:
        raise PlanError(f"plan.stored: got an inventory of backbone {stored[:16]!r}; expected {backbone[:16]!r}")
    if certificate is not None and certificate.backbone != backbone:
        raise CertificateError(
            f"plan.certificate: got {certificate.model!r:.80} of backbone {certificate.backbone[:16]!r}; expected "
            f"backbone {backbone[:16]!r}"
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
