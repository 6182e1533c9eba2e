"""After how many reuses a stored patch has paid: what forming it took over what each reuse saves. Kamera §6: about 9.

A reuse puts an evicted chunk back into the same window by its patch, instead of a prefill there. Forming takes a
forward in the window and a factorisation; the canonical is stored already, or takes a forward more. Where the chunk was
prefilled in the window anyway (formed from traffic), the factorisation alone is spent.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import kvpatch_jax as kvp
from kvpatch_jax.window import PatchNote

from .loop_workload import LoopWorkload, length_of
from .timing import timed
from .window_loop import RANK, AgentWindow, Part, canonical_of

BARS = {"canonical stored": 2.0, "no canonical yet": 3.0}


def measure(workload: LoopWorkload, size: int, repeats: int, rank: int = RANK) -> Part:
    """Times forming and reusing the patch of the last image of a full window.

    Args:
      size: images in the window.
      repeats: turns that count, after one that warms up.

    Returns:
      {"config", "patch_bytes", "chunk_bytes", "measured": medians by what was done, "flops": the same as arithmetic,
      "reuses": what break-even takes, by measure and case}.
    """
    plain, agent = workload.plain, AgentWindow(workload, size)
    for number, image in enumerate(workload.images[:size]):
        agent.append(f"image {number}", image, "chunk")
    window, executor, costs = agent.window, agent.executor, agent.window.costs

    id, tokens = f"image {size - 1}", workload.images[size - 1]
    chunk = canonical_of(plain, tokens, id)
    conditioned, antecedent = executor.read(window, id), window.antecedent(id)
    patch = kvp.form_patch(chunk, conditioned, rank, antecedent)
    note = PatchNote.of(patch)
    executor.provide(id, chunk=chunk, patch=patch)
    without, eviction = window.evict(id)
    executor.run(without, eviction)

    def recall(**options: Any) -> object:
        recalled, edits = without.recall(id, fetched=True, **options)
        executor.run(recalled, edits)
        return executor.pools

    def clear() -> None:
        if id in [piece.id for piece in executor.pieces("")]:
            executor.run(without, eviction)

    medians = _medians_in_turns(
        {
            "prefill in the window": lambda: recall(how="prefill"),
            "patch placed": lambda: recall(patch=note),
            "canonical": lambda: plain.prefill(tokens).kv,
            "factors formed": lambda: kvp.form_patch(chunk, conditioned, rank, antecedent).factors,
        },
        clear,
        repeats,
    )
    count, behind = length_of(tokens), window.behind(id)
    flops = {
        "prefill in the window": costs.prefill(count, behind, logits=1)["flops"],
        "patch placed": costs.patch(count, note.nbytes, note.flops)["flops"],
        "canonical": costs.prefill(count, 0, logits=1)["flops"],
    }
    reuses = {}
    for unit in ("seconds", "cpu"):
        reuses[unit] = break_even({name: median[unit] for name, median in medians.items()})
    return {
        "config": {"backbone": workload.name, "window": size, "behind": behind, "tokens": count, "rank": rank},
        "patch_bytes": note.nbytes,
        "chunk_bytes": chunk.nbytes,
        "measured": medians,
        "flops": flops,
        "reuses": reuses,
    }


def _medians_in_turns(
    calls: Mapping[str, Callable[[], object]], clear: Callable[[], None], repeats: int
) -> dict[str, dict[str, float]]:
    """Times calls in turns, after one that warms up, `clear` undoing each: {name: {"seconds", "cpu": medians}}."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            samples[name].append(timed(call)[1:])
            clear()

    medians = {}
    for name, pairs in samples.items():
        seconds, cpu = zip(*pairs[1:], strict=True)
        medians[name] = {"seconds": statistics.median(seconds), "cpu": statistics.median(cpu)}
    return medians


def break_even(cost: Mapping[str, float]) -> dict[str, float]:
    """Computes the reuses after which forming has paid, by case; infinite where a reuse saves nothing."""
    saved = cost["prefill in the window"] - cost["patch placed"]
    formed = cost["prefill in the window"] + cost["factors formed"]
    spent = {
        "formed from traffic, canonical stored": cost["factors formed"],
        "canonical stored": formed,
        "no canonical yet": formed + cost["canonical"],
    }
    return {case: total / saved if saved > 0 else float("inf") for case, total in spent.items()}
