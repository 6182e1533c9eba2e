"""What planning takes: windows of many chunks, by what has to be planned of them. No model runs, no store is read."""

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.plan import Certificate, CertifiedLoss, DeviceCosts, Goal, PatchInventory, Plan, RankChoice, plan
from kvpatch_jax.window import Costs, Entry, PatchNote, Window

BACKBONE = "f" * 64
LAYERS = 28
COSTS = Costs(
    BACKBONE, LAYERS, 57344, 28672, 7168, ForwardCosts((4 * 10**8,) * LAYERS, (4096,) * LAYERS, (0,) * LAYERS, 10**9)
)
"""About Qwen2.5-VL-7B's."""


def run(repeats: int, count: int = 256) -> list[dict[str, Any]]:
    """Times plans of `count` chunks.

    Returns:
      A row each, with the longest garbage collection that fell into it: a step of a loop (one leaves, one comes), all
      of them new and served as promised, all of them by stored patches under a bound on KL or on flips, within a
      budget of seconds or bytes, and in another order.
    """
    entries = [
        Entry(f"page {number}", f"{number:032x}", 256, 256, "chunk", True, "text") for number in range(count + 1)
    ]
    whole, new = entries[:count], entries[count]
    stock = PatchInventory(BACKBONE)
    stock.add(*entries, *(_note(each, whole[:place]) for place, each in enumerate(whole)))
    devices, signed = DeviceCosts.assumed("cpu"), _certificate(count)
    empty = Window.empty(COSTS)
    standing = plan(empty, whole, stored=stock, costs=devices).window
    turned = [whole[0], *random.Random(0).sample(whole[1:], count - 1)]
    ask = lambda **goal: plan(empty, whole, Goal(**goal), stored=stock, costs=devices, certificate=signed)
    quick = ask(kl=1.0)
    cases: dict[str, Callable[[], Plan]] = {
        "one leaves, one comes": lambda: plan(standing, [whole[0], *whole[2:], new], stored=stock, costs=devices),
        "all new, as promised": lambda: plan(empty, whole, stored=stock, costs=devices),
        "all new, by patches within a bound": lambda: ask(kl=1.0),
        "all new, by patches within flips": lambda: ask(flips=0.05),
        "all new, within a budget": lambda: ask(seconds=2 * quick.seconds),
        "all new, within bytes": lambda: ask(bytes=quick.bytes + quick.bytes // 2),
        "all in another order": lambda: plan(standing, turned, stored=stock, costs=devices),
    }
    return [_timed(name, make, repeats, count) for name, make in cases.items()]


def _timed(name: str, make: Callable[[], Plan], repeats: int, count: int) -> dict[str, Any]:
    make()
    cpu, seconds = [], []
    with _collections() as collected:
        for _ in range(repeats):
            begin, spent = time.perf_counter(), time.process_time()
            make()
            cpu.append(time.process_time() - spent)
            seconds.append(time.perf_counter() - begin)
    return {
        "name": name,
        "pieces": count,
        "cpu": statistics.median(cpu),
        "cpu_low": min(cpu),
        "cpu_high": statistics.quantiles(cpu, n=20)[-1] if len(cpu) > 1 else cpu[0],
        "seconds": statistics.median(seconds),
        "seconds_low": min(seconds),
        "collected": max(collected, default=0.0),
    }


@contextlib.contextmanager
def _collections() -> Iterator[list[float]]:
    """Seconds of each collection of Python's garbage collector: it looks at all that the process holds now and then."""
    found, begun = list[float](), [0.0]

    def told(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            begun[0] = time.perf_counter()
        else:
            found.append(time.perf_counter() - begun[0])

    gc.callbacks.append(told)
    try:
        yield found
    finally:
        gc.callbacks.remove(told)


def _note(own: Entry, front: list[Entry]) -> PatchNote:
    behind = Antecedent(tuple(Member(each.id, each.content) for each in front))
    return PatchNote(f"{own.id} 16", own.id, own.content, "canonical", behind, None, False, 16, 10**6, 10**5)


def _certificate(count: int) -> Certificate:
    """Invented: nothing is served here."""
    rows = tuple(
        CertifiedLoss(point, rank, behind, promise, 0.1, 0.1, 0.1, kl, 0.95, 0.9, 1.0, 0.5, 0.01, 0.02, 40)
        for point, rank, kl in (("stored", 16, 0.5), ("bare", 0, 2.0))
        for behind in (0, count)
        for promise in ("remember", "forget")
    )
    about = ("invented", "2026-01-01", 0.95, 10, 10, count, 256 * (count + 1), "text", "nothing", True)
    return Certificate(BACKBONE, *about, rows, RankChoice(16, "invented"))
