"""What planning takes: windows of many chunks, by what has to be planned of them. No model runs, no store is read."""

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.plan import Certificate, CertifiedLoss, DeviceCosts, Goal, PatchInventory, Plan, RankChoice, plan
from kvpatch_jax.window import Entry, PatchNote, Window

from .checkpoints import SEVEN_BILLION, shape_costs
from .timing import cpu_seconds

BACKBONE = "f" * 64


def run(repeats: int, count: int = 256) -> list[dict[str, Any]]:
    """Times plans of `count` chunks.

    Returns:
      A row each, with the longest garbage collection that fell into it: a step of a loop (one leaves, one comes), all
      of them new and served as promised, all of them by stored patches under a bound on KL or on flips, within a
      budget of seconds or bytes, and in another order.
    """
    numbers = range(count + 1)
    entries = [Entry(f"page {number}", f"{number:032x}", 256, 256, "chunk", True, "text") for number in numbers]
    whole, new = entries[:count], entries[count]
    stored = PatchInventory(BACKBONE)
    stored.add(*entries, *(_note(entry, whole[:place]) for place, entry in enumerate(whole)))
    devices, certificate = DeviceCosts.assumed("cpu"), _certificate(count)
    empty = Window.empty(shape_costs(BACKBONE, SEVEN_BILLION))

    def plan_new(**goal: Any) -> Plan:
        return plan(empty, whole, Goal(**goal), stored=stored, costs=devices, certificate=certificate)

    def plan_free(window: Window, wanted: list[Entry]) -> Plan:
        return plan(window, wanted, stored=stored, costs=devices)

    served = plan_free(empty, whole).window
    shuffled = [whole[0], *random.Random(0).sample(whole[1:], count - 1)]
    bounded = plan_new(kl=1.0)
    cases: dict[str, Callable[[], Plan]] = {
        "one leaves, one comes": lambda: plan_free(served, [whole[0], *whole[2:], new]),
        "all new, as promised": lambda: plan_free(empty, whole),
        "all new, by patches within a bound": lambda: plan_new(kl=1.0),
        "all new, by patches within flips": lambda: plan_new(flips=0.05),
        "all new, within a budget": lambda: plan_new(seconds=2 * bounded.seconds),
        "all new, within bytes": lambda: plan_new(bytes=bounded.bytes + bounded.bytes // 2),
        "all in another order": lambda: plan_free(served, shuffled),
    }
    return [_measure(name, make, repeats, count) for name, make in cases.items()]


def _measure(name: str, make: Callable[[], Plan], repeats: int, count: int) -> dict[str, Any]:
    """Times a plan: CPU seconds, and the longest garbage collection, which traverses all that the process holds."""
    collections, begun = [0.0], 0.0

    def observe(phase: str, _: dict[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.perf_counter()
        else:
            collections.append(time.perf_counter() - begun)

    make()
    gc.callbacks.append(observe)
    try:
        cpu = [cpu_seconds(make) for _ in range(repeats)]
    finally:
        gc.callbacks.remove(observe)

    high = statistics.quantiles(cpu, n=20)[-1] if len(cpu) > 1 else cpu[0]
    row = {"name": name, "pieces": count, "cpu": statistics.median(cpu), "cpu_high": high}
    return row | {"collected": max(collections)}


def _note(entry: Entry, front: list[Entry]) -> PatchNote:
    antecedent = Antecedent(tuple(Member(piece.id, piece.content) for piece in front))
    fields = (f"{entry.id} 16", entry.id, entry.content, "canonical", antecedent, None, False, 16, 10**6, 10**5)
    return PatchNote(*fields)


def _certificate(count: int) -> Certificate:
    """Makes an invented certificate: nothing is served here."""
    rows = []
    for point, rank, kl in (("stored", 16, 0.5), ("bare", 0, 2.0)):
        for behind in (0, count):
            for promise in ("remember", "forget"):
                losses = (0.1, 0.1, 0.1, kl, 0.95, 0.9, 1.0, 0.5, 0.01, 0.02, 40)
                rows.append(CertifiedLoss(point, rank, behind, promise, *losses))
    about = ("invented", "2026-01-01", 0.95, 10, 10, count, 256 * (count + 1), "text", "nothing", True)
    return Certificate(BACKBONE, *about, (1, 256), ("text",), tuple(rows), RankChoice(16, "invented"))
