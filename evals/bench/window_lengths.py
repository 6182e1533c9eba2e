"""Cost of edits against the number of chunks in the window: what edits say, what computing and running them takes."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.core import Channel, KVLayout, Rope
from kvpatch_jax.window import Costs, Edit, Entry, PagedExecutor, PatchNote, Window

from ..results.rows import verdict

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COMPUTE_BAR = 5e-3
"""CPU seconds (one thread of Python) in which the edits of any operation on 256 chunks are computed."""
TOKENS, PAGE = 256, 16


@dataclasses.dataclass(frozen=True)
class Unrun:
    """What `Costs` and an executor ask of a backbone that never runs: Qwen2-0.5B's layout and arithmetic."""

    layers: int = 24
    fingerprint: str = "qwen2-0.5b's shape, never run"

    @property
    def layout(self) -> KVLayout:
        """24 layers of two heads of 64."""
        channels = (Channel("k", heads=2, width=64, rotary=64), Channel("v", heads=2, width=64, rotary=0))
        return KVLayout(kind="gqa", layers=self.layers, channels=channels, rope=Rope(theta=1e6, dim=64))

    @property
    def forward_costs(self) -> ForwardCosts:
        """FLOPs of its matrix products: width 896, 14 heads, inner width 4864."""
        token = 2 * (896 * (2 * 896 + 2 * 128) + 3 * 896 * 4864)
        return ForwardCosts((token,) * self.layers, (4 * 896,) * self.layers, (0,) * self.layers, 2 * 896 * 151936)

    def _never(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.fingerprint}: a forward")

    prepare = encode = embed = prefill = recompute = decode = generate = _never


def chunk_of(number: int, tokens: int) -> Entry:
    """A chunk by its number."""
    return Entry(f"chunk {number}", f"shows {number}", tokens, tokens, order_free=True)


def noted(window: Window, id: str, rank: int = 32) -> PatchNote:
    """A patch of rank 32 that would serve a chunk at the end of a window."""
    costs, entry = window.costs, next(piece.entry for piece in window.evicted if piece.entry.id == id)
    features = costs.kv_bytes // costs.layers // 2
    nbytes = 2 * rank * costs.layers * (2 * entry.tokens + features)
    flops = 2 * rank * features * costs.layers
    return PatchNote("0" * 32, id, entry.content, "canonical", window.target(), None, False, rank, nbytes, flops)


def operations(count: int, costs: Costs, tokens: int = TOKENS) -> dict[str, tuple[float, tuple[Edit, ...]]]:
    """CPU seconds that each operation takes on `count` chunks behind a lead, the least of five; and its edits."""
    window, _ = Window.empty(costs, lead=1).append(Entry("lead", "lead", 16, 16, "text"))
    for number in range(count + 1):
        window, _ = window.append(chunk_of(number, tokens))
    full, _ = window.slide(count)
    new = chunk_of(count + 1, tokens)
    note = noted(full, "chunk 0")
    middle = full.pieces[1 + count // 2].entry.id
    ids = [piece.entry.id for piece in full.pieces[1:]]
    calls = {
        "slide": lambda: full.slide(count - 1),
        "append": lambda: full.append(new),
        "recall": lambda: full.recall("chunk 0", patch=note),
        "evict in the middle": lambda: full.evict(middle),
        "reorder": lambda: full.reorder(ids[::-1]),
        "fork": lambda: full.fork("branch"),
    }
    found = {}
    for name, call in calls.items():
        seconds, edits = [], ()
        for _ in range(5):
            begin = time.process_time()
            _, edits = call()
            seconds.append(time.process_time() - begin)
        found[name] = (min(seconds), edits)
    return found


def run_edits(count: int, tokens: int, repeats: int) -> dict[str, float]:
    """CPU seconds in which a pool runs a slide by one and a recall by a patch, of `count` chunks in place; medians.

    Chunks are drawn and placed bare: where KV came from does not change what it takes to turn it.
    """
    backbone: Any = Unrun()
    layout = backbone.layout
    generator = np.random.default_rng(0)
    drawn = {
        channel.name: jnp.asarray(
            generator.standard_normal((layout.layers, tokens, channel.heads, channel.width)), "bfloat16"
        )
        for channel in layout.channels
    }
    local = np.arange(tokens, dtype=np.float32)
    executor = PagedExecutor(backbone, (count + 2) * tokens // PAGE, PAGE)
    window = Window.empty(Costs.of(backbone), lead=0)

    def place(window: Window, number: int) -> Window:
        entry = chunk_of(number, tokens)
        more = {"layout": layout, "backbone": backbone.fingerprint, "content": entry.content}
        executor.provide(entry.id, chunk=kvp.Chunk(drawn, local, tokens, tokens, entry.id, **more))
        window, edits = window.append(entry, "bare", fetched=True)
        executor.run(window, edits)
        return window

    for number in range(count):
        window = place(window, number)
    seconds: dict[str, list[float]] = {"slide": [], "recall": []}
    for _ in range(repeats + 1):
        begin = time.process_time()
        window, edits = window.slide(count - 1)
        executor.run(window, edits)
        jax.block_until_ready(executor.pools)
        seconds["slide"].append(time.process_time() - begin)

        gone = window.evicted[-1].entry.id
        begin = time.process_time()
        window, edits = window.recall(gone, "bare", fetched=True)
        executor.run(window, edits)
        jax.block_until_ready(executor.pools)
        seconds["recall"].append(time.process_time() - begin)
    return {name: statistics.median(own[1:]) for name, own in seconds.items()}


def measure(
    lengths: Sequence[int] = LENGTHS, *, tokens: int = TOKENS, repeats: int = 3, run_tokens: int = 64
) -> dict[str, Any]:
    """Costs of every operation by the number of chunks.

    Args:
      tokens: of a chunk, in what is computed. repeats, run_tokens: of what is executed; 0 repeats executes nothing.
    """
    unrun: Any = Unrun()
    costs = Costs.of(unrun)
    rows = []
    for count in lengths:
        for name, (seconds, edits) in operations(count, costs, tokens).items():
            sums = {"bytes": sum(edit.bytes for edit in edits), "flops": sum(edit.flops for edit in edits)}
            rows.append({"chunks": count, "operation": name, "compute_seconds": seconds, "edits": len(edits), **sums})
        if repeats:
            for name, seconds in run_edits(count, run_tokens, repeats).items():
                rows.append({"chunks": count, "operation": f"{name}, executed", "cpu": seconds})
    config = {"tokens": tokens, "run_tokens": run_tokens, "repeats": repeats, "shape": Unrun.fingerprint}
    return {"config": config, "rows": rows, "bars": judged(rows)}


def judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Holds the rows against the bars: linear, constant, and fast enough to compute."""
    of = lambda name, word: {row["chunks"]: row[word] for row in rows if row["operation"] == name and word in row}
    slide, recall = of("slide", "bytes"), of("recall", "bytes")
    survivors = {count: nbytes / (count - 1) for count, nbytes in slide.items() if count > 1}
    slowest = max((row for row in rows if "compute_seconds" in row), key=lambda row: row["compute_seconds"])
    return [
        verdict("slide: largest over least bytes per survivor", max(survivors.values()) / min(survivors.values()), 1.0),
        verdict("recall: most over fewest bytes", max(recall.values()) / min(recall.values()), 1.0),
        verdict(
            f"computing edits, the slowest ({slowest['operation']}, {slowest['chunks']} chunks), seconds",
            slowest["compute_seconds"],
            COMPUTE_BAR,
        ),
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws bytes, time to compute and time to run against the number of chunks."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    words = ("bytes", "compute_seconds", "cpu")
    titles = ("KV bytes that the edits move", "CPU seconds to compute the edits", "CPU seconds to run them")
    for axis, word, title in zip(axes, words, titles, strict=True):
        for name in dict.fromkeys(row["operation"] for row in result["rows"] if word in row):
            points = [
                (row["chunks"], row[word]) for row in result["rows"] if row["operation"] == name and row.get(word)
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set(xscale="log", yscale="log", xlabel="chunks in the window", title=title)
        axis.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[1].axhline(COMPUTE_BAR, color="grey", linestyle="--", linewidth=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
