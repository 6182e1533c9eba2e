"""After how many reuses a stored patch has paid: what forming it took over what each reuse saves. Kamera §6: about 9.

A reuse puts an evicted chunk back behind the same window by its patch, where a prefill behind the window would have to.
Forming takes a forward behind the window and a factorisation; the canonical is stored already, or takes a forward more.
Where the chunk was prefilled in the window anyway (formed from traffic), the factorisation alone is spent.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.window import Costs, Entry, PagedExecutor, PatchNote, Window

from .window_loop import PAGE
from .window_material import Material, span, wait

RANK = 32
BARS = {"canonical stored": 2.0, "no canonical yet": 3.0}
Pair = tuple[float, float]


def timed(call: Callable[[], object]) -> Pair:
    """Seconds on the clock and CPU seconds of a call, its arrays awaited."""
    begin, spent = time.perf_counter(), time.process_time()
    wait(jax.tree.leaves(call()))
    return time.perf_counter() - begin, time.process_time() - spent


def measure(material: Material, size: int, repeats: int, rank: int = RANK) -> dict[str, Any]:
    """Times forming and reusing the patch of the last image of a full window.

    Args:
      size: images in the window. repeats: turns that count, after one that warms up.

    Returns:
      {"seconds", "cpu": medians by what was done, "flops": the same as arithmetic, "reuses": what break-even takes, by
      measure and case}.
    """
    backbone, plain = material.backbone, material.plain
    costs = Costs.of(backbone, material.images[0].embeddings.dtype)
    longest = max(image.embeddings.shape[1] for image in material.images)
    executor = PagedExecutor(backbone, (size + 2) * -(-longest // PAGE), PAGE, material.images[0].embeddings.dtype)
    window = Window.empty(costs, lead=int(material.lead is not None))
    pieces: list[tuple[str, Any, Any]] = [] if material.lead is None else [("lead", material.lead, "text")]
    pieces += [(f"image {number}", image, "chunk") for number, image in enumerate(material.images[:size])]
    for id, tokens, kind in pieces:
        executor.provide(id, tokens=tokens, content=id)
        window, edits = window.append(Entry.of_tokens(id, tokens, id, kind=kind))
        executor.run(window, edits)

    id, tokens = f"image {size - 1}", material.images[size - 1]
    canonical: Any = plain.prefill(tokens)
    chunk = kvp.Chunk(
        kv={name: value[:, 0] for name, value in canonical.kv.items()},
        local=np.asarray(tokens.positions)[0],
        span=span(tokens),
        length=tokens.embeddings.shape[1],
        id=id,
        layout=plain.layout,
        backbone=plain.fingerprint,
        content=id,
    )
    conditioned, antecedent = executor.read(window, id), window.antecedent(id)
    form = lambda: kvp.form_patch(chunk, conditioned, rank, antecedent)
    patch = form()
    note = PatchNote.of(patch)
    executor.provide(id, chunk=chunk, patch=patch)
    behind = window.behind(id)
    without, edits = window.evict(id)
    executor.run(without, edits)

    def back(**how: Any) -> Callable[[], object]:
        def recall() -> object:
            there, edits = without.recall(id, fetched=True, **how)
            executor.run(there, edits)
            return executor.pools

        return recall

    calls = {
        "prefill behind the window": back(how="prefill"),
        "patch placed": back(patch=note),
        "canonical": lambda: plain.prefill(tokens).kv,
        "factors formed": lambda: form().factors,
    }
    turns: dict[str, list[Pair]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            taken = timed(call)
            if turn:
                turns[name].append(taken)
            if id in [held.id for held in executor.pieces("")]:
                executor.run(without, window.evict(id)[1])

    count = tokens.embeddings.shape[1]
    placing = costs.patch(count, note.nbytes, note.flops)["flops"]
    flops = {
        "prefill behind the window": costs.prefill(count, behind, logits=1)["flops"],
        "patch placed": placing,
        "canonical": costs.prefill(count, 0, logits=1)["flops"],
    }
    medians = {
        name: {"seconds": statistics.median(each[0] for each in own), "cpu": statistics.median(each[1] for each in own)}
        for name, own in turns.items()
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
