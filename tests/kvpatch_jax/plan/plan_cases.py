"""Windows, inventories and certificates that tests of plans share."""
# pyright: reportArgumentType=false

from typing import Any

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.plan import Certificate, CertifiedLoss, DeviceCosts, PatchInventory, RankChoice, Rates
from kvpatch_jax.window import Costs, Entry, PatchNote, Window

BACKBONE = "f" * 64
COSTS = Costs(BACKBONE, 4, 512, 256, 32, ForwardCosts((7, 9, 7, 9), (3, 5, 3, 5), (0, 12, 0, 12), 11))
KINDS = ("Fetch", "Rotate", "Copy", "ApplyPatch", "Prefill", "Recompute")
DEVICES = DeviceCosts("a desk", "2026-11-22", {kind: Rates(1e-4, 2e-7, 3e-9) for kind in KINDS}, "invented")
RANKS = (2, 4, 8)


def entry(number: int, tokens: int = 5) -> Entry:
    return Entry(f"c{number}", f"content {number}", tokens + number % 3, tokens + number % 3, "chunk", True, "text")


def note(own: Entry, front: list[Entry], rank: int = 4, orbit: bool = False) -> PatchNote:
    behind = Antecedent(tuple(Member(each.id, each.content) for each in front))
    behind = behind.sorted() if orbit else behind
    digest = f"{own.id}.{rank}.{orbit}.{len(front)}"
    return PatchNote(digest, own.id, own.content, "canonical", behind, None, orbit, rank, 40 * rank, 6 * rank)


def certificate(
    bounds: dict[tuple[str, int], list[float]], flips: float = 0.01, backbone: str = BACKBONE
) -> Certificate:
    """Rows of these bounds, for 0, 1, … other approximate chunks."""
    rows = tuple(
        CertifiedLoss(
            point, rank, behind, promise, kl / 3, kl / 4, kl / 2, kl, 0.95, 0.9, 1.0, 0.5, flips / 2, flips, 40
        )
        for (point, rank), known in bounds.items()
        for behind, kl in enumerate(known)
        for promise in ("forget", "remember")
    )
    texts = ("invented", "2026-11-22", 0.95, 10, 10, 12, 999, "texts", "questions", True, (1, 999), ("text",))
    return Certificate(backbone, *texts, rows, RankChoice(4, "invented"))


def filled(count: int, **options: Any) -> Window:
    window = Window.empty(COSTS, **options)
    for number in range(count):
        window, _ = window.append(entry(number))
    return window


def stocked(entries: list[Entry], ranks: dict[str, list[int]], bare: set[str]) -> PatchInventory:
    stock = PatchInventory(BACKBONE)
    for place, each in enumerate(entries):
        stock.add(*(note(each, entries[:place], rank) for rank in ranks.get(each.id, [])))
        if each.id in bare or ranks.get(each.id):
            stock.add(each)
    return stock
