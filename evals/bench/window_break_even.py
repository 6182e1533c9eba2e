"""After how many reuses a stored patch has paid: what forming it took over what each reuse saves. Kamera §6: about 9.

A reuse puts an evicted chunk back behind the same window by its patch, where a prefill behind the window would have to.
Forming takes a forward behind the window and a factorisation; the canonical is stored already, or takes a forward more.
Where the chunk was prefilled in the window anyway (formed from traffic), the factorisation alone is spent.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import kvpatch_jax as kvp
from kvpatch_jax.window import PatchNote

from .timing import timed
from .window_loop import RANK, AgentWindow, canonical_of
from .window_material import Material

BARS = {"canonical stored": 2.0, "no canonical yet": 3.0}


def measure(material: Material, size: int, repeats: int, rank: int = RANK) -> dict[str, Any]:
    """Times forming and reusing the patch of the last image of a full window.

    Args:
      size: images in the window. repeats: turns that count, after one that warms up.

    Returns:
      {"config", "patch_bytes", "chunk_bytes", "measured": medians by what was done, "flops": the same as arithmetic,
      "reuses": what break-even takes, by measure and case}.
    """
    plain, agent = material.plain, AgentWindow(material, size)
    for number, image in enumerate(material.images[:size]):
        agent.append(f"image {number}", image, "chunk")
    window, executor, costs = agent.window, agent.executor, agent.window.costs

    id, tokens = f"image {size - 1}", material.images[size - 1]
    chunk = canonical_of(plain, tokens, id)
    conditioned, antecedent = executor.read(window, id), window.antecedent(id)
    form = lambda: kvp.form_patch(chunk, conditioned, rank, antecedent)
    patch = form()
    note = PatchNote.of(patch)
    executor.provide(id, chunk=chunk, patch=patch)
    without, gone = window.evict(id)
    executor.run(without, gone)

    def back(**how: Any) -> Callable[[], object]:
        def recall() -> object:
            there, edits = without.recall(id, fetched=True, **how)
            executor.run(there, edits)
            return executor.pools

        return recall

    def clear() -> None:
        if id in [held.id for held in executor.pieces("")]:
            executor.run(without, gone)

    calls = {
        "prefill behind the window": back(how="prefill"),
        "patch placed": back(patch=note),
        "canonical": lambda: plain.prefill(tokens).kv,
        "factors formed": lambda: form().factors,
    }
    medians = medians_in_turns(calls, clear, repeats)
    count, behind = tokens.embeddings.shape[1], window.behind(id)
    flops = {
        "prefill behind the window": costs.prefill(count, behind, logits=1)["flops"],
        "patch placed": costs.patch(count, note.nbytes, note.flops)["flops"],
        "canonical": costs.prefill(count, 0, logits=1)["flops"],
    }
    reuses = {}
    for unit in ("seconds", "cpu"):
        reuses[unit] = break_even({name: own[unit] for name, own in medians.items()})
    return {
        "config": {"backbone": material.name, "window": size, "behind": behind, "tokens": count, "rank": rank},
        "patch_bytes": note.nbytes,
        "chunk_bytes": chunk.nbytes,
        "measured": medians,
        "flops": flops,
        "reuses": reuses,
    }


def medians_in_turns(
    calls: Mapping[str, Callable[[], object]], clear: Callable[[], None], repeats: int
) -> dict[str, dict[str, float]]:
    """Times calls in turns, after one that warms up, `clear` undoing each: {name: {"seconds", "cpu": medians}}."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            turns[name].append(timed(call)[1:])
            clear()
    found = {}
    for name, taken in turns.items():
        seconds, cpu = zip(*taken[1:], strict=True)
        found[name] = {"seconds": statistics.median(seconds), "cpu": statistics.median(cpu)}
    return found


def break_even(cost: Mapping[str, float]) -> dict[str, float]:
    """Reuses after which forming has paid, by case; infinite where a reuse saves nothing."""
    saved = cost["prefill behind the window"] - cost["patch placed"]
    formed = cost["prefill behind the window"] + cost["factors formed"]
    spent = {
        "formed from traffic, canonical stored": cost["factors formed"],
        "canonical stored": formed,
        "no canonical yet": formed + cost["canonical"],
    }
    return {case: each / saved if saved > 0 else float("inf") for case, each in spent.items()}
