"""Windows, stocks and certificates that tests of plans share."""
# pyright: reportArgumentType=false

from collections.abc import Iterable
from typing import Any

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.plan import Certificate, CertifiedLoss, DeviceCosts, Goal, Inventory, Plan, RankChoice, Rates, plan
from kvpatch_jax.window import Costs, Entry, PatchNote, Window

BACKBONE = "f" * 64
PRICES = Costs(512, 256, 32, ForwardCosts((7, 9, 7, 9), (3, 5, 3, 5), (0, 12, 0, 12), 11))
KINDS = ("fetch", "rotate", "copy", "patch", "prefill")
DEVICES = DeviceCosts("a desk", "2026-11-22", {kind: Rates(1e-4, 2e-7, 3e-9) for kind in KINDS}, "invented")
RANKS = (2, 4, 8)


def entry(number: int, tokens: int = 5) -> Entry:
    return Entry(f"c{number}", f"content {number}", tokens + number % 3, tokens + number % 3, "chunk", True, "text")


def note(chunk: Entry, front: list[Entry], rank: int = 4, orbit: bool = False) -> PatchNote:
    behind = Antecedent(tuple(Member(other.id, other.content) for other in front))
    behind = behind.sorted() if orbit else behind
    digest = f"{chunk.id}.{rank}.{orbit}.{len(front)}"
    return PatchNote(digest, chunk.id, chunk.content, "canonical", behind, None, orbit, rank, 40 * rank, 6 * rank)


def certificate(losses: dict[Any, Any] | None = None, **fields: Any) -> Certificate:
    """Returns a certificate with losses, such as `{("stored", 8): {0: 0.5, 3: 2.0}}`.

    Args:
      losses: bounds in nats by (point, rank) or (point, rank, promise), by others or for 0, 1, … of them.
      fields: of the certificate, in place of wide ones.
    """
    rows = []
    for (point, rank, *promises), bounds in (losses or {("stored", 8): [0.5]}).items():
        by_others = bounds if isinstance(bounds, dict) else dict(enumerate(bounds))
        rows += [row(point, rank, *place, p) for place in by_others.items() for p in promises or ("forget", "remember")]
    words = {
        "model": "a model",
        "made": "2026-11-22",
        "content": "texts",
        "asked": "questions",
        "modalities": ("text",),
    }
    numbers = {"level": 0.95, "calibration": 10, "held_out": 10, "chunks": 12, "tokens": 999, "spans": (1, 999)}
    fields = {"backbone": BACKBONE, "disjoint": True, "rows": tuple(rows)} | words | numbers | fields
    return Certificate(recommended=RankChoice(4, "invented"), **fields)


def row(point: str, rank: int, others: int, kl: float, promise: str = "forget", **fields: Any) -> CertifiedLoss:
    shares = {"coverage": 0.95, "coverage_low": 0.9, "coverage_high": 1.0, "flips": 0.005, "flips_high": 0.01}
    fields = {"kl": kl / 3, "kl_low": kl / 4, "kl_high": kl / 2, "eta": 0.5, "answers": 40} | shares | fields
    return CertifiedLoss(point, rank, others, promise, kl_bound=kl, **fields)


def filled(count: int, **options: Any) -> Window:
    window = Window.empty(BACKBONE, **options)
    for number in range(count):
        window = window.append(entry(number))
    return window


def entries_of(window: Window) -> list[Entry]:
    return [piece.entry for piece in window.pieces]


class Shelf(Inventory):
    """A stock of canonicals and of patches without arrays."""

    def __init__(self, *items: Entry | PatchNote, backbone: str = BACKBONE):
        super().__init__(None, backbone, None)
        self.items = list(items)

    def add(self, *items: Entry | PatchNote) -> None:
        self.items += items

    def canonical(self, entry: Entry, leading: bool = False) -> bool:
        return not leading and entry in self.items

    def patches(self, entry: Entry, target: Antecedent) -> list[PatchNote]:
        notes = [item for item in self.items if isinstance(item, PatchNote) and item.chunk == entry.id]
        return [note for note in notes if note.antecedent.difference(target, note.orbit) is None]


def stocked(*items: Any) -> Shelf:
    return Shelf(*items)


def planned(window: Window, entries: Iterable[Entry], *goal: Any, **options: Any) -> Plan:
    options = {"stored": stocked(), "costs": DEVICES, "prices": PRICES} | options
    return plan(window, entries, *goal, **options)


def within(kl: float) -> Goal:
    return Goal("certified", kl)


def points(made: Plan) -> list[str]:
    return [chunk.point for chunk in made.chunks]


def check_totals(made: Plan) -> None:
    """What is stated of the pieces agrees with what is stated of the plan, and with its window."""
    assert made.seconds == sum(chunk.seconds for chunk in made.chunks)
    assert made.window == made.before.arranged([chunk.entry for chunk in made.chunks], made.services)
    for chunk, standing in zip(made.chunks, made.window.standings, strict=True):
        assert chunk.fidelity == standing.fidelity
        if chunk.fidelity == "exact":
            assert chunk.kl == 0.0
            assert chunk.point in ("leading", "prefill", "restored")
        if not standing.ways:
            assert chunk.kl == 0.0
