"""Cost of edits against the number of chunks in the window: their bytes, the time to compute and to run them."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.core import Channel, KVLayout, Rope
from kvpatch_jax.window import Costs, Edit, Edits, Entry, PagedExecutor, PatchNote, Window

from .benchmark import Row, measured_row
from .window_loop import PAGE, Part

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COMPUTE_BAR = 5e-3
"""CPU seconds (one thread of Python) in which the edits of any operation on 256 chunks are computed."""
TOKENS = 256
RANK = 32


@dataclasses.dataclass(frozen=True)
class UnrunBackbone:
    """A backbone that never runs, for `Costs` and an executor: Qwen2-0.5B's layout and arithmetic."""

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


def measure(lengths: Sequence[int] = LENGTHS, *, tokens: int = TOKENS, repeats: int = 3, run_tokens: int = 64) -> Part:
    """Measures every operation by the number of chunks.

    Args:
      tokens: of a chunk, in what is computed.
      repeats, run_tokens: of what is executed; 0 repeats executes nothing.
    """
    unrun: Any = UnrunBackbone()
    costs = Costs.of(unrun)
    rows = []

    for count in lengths:
        for name, (seconds, edits) in operations(count, costs, tokens).items():
            sums = {"bytes": sum(edit.bytes for edit in edits), "flops": sum(edit.flops for edit in edits)}
            rows.append({"chunks": count, "operation": name, "compute_seconds": seconds, "edits": len(edits), **sums})
        if repeats:
            for name, seconds in run_edits(count, run_tokens, repeats).items():
                rows.append({"chunks": count, "operation": f"{name}, executed", "cpu": seconds})

    config = {"tokens": tokens, "run_tokens": run_tokens, "repeats": repeats, "shape": UnrunBackbone.fingerprint}
    return {"config": config, "rows": rows}


def _entry_of(number: int, tokens: int) -> Entry:
    return Entry(f"chunk {number}", f"shows {number}", tokens, tokens, order_free=True)


def operations(count: int, costs: Costs, tokens: int = TOKENS) -> dict[str, tuple[float, tuple[Edit, ...]]]:
    """Measures CPU seconds of computing each operation on `count` chunks after a lead, the least of five; its edits."""
    window, _ = Window.empty(costs, lead=1).append(Entry("lead", "lead", 16, 16, "text"))
    for number in range(count + 1):
        window, _ = window.append(_entry_of(number, tokens))
    full, _ = window.slide(count)
    new = _entry_of(count + 1, tokens)
    middle = full.pieces[1 + count // 2].entry.id
    ids = [piece.entry.id for piece in full.pieces[1:]]

    # A patch that would serve the evicted chunk at the end of this window.
    evicted = next(piece.entry for piece in full.evicted if piece.entry.id == "chunk 0")
    features = costs.kv_bytes // costs.layers // 2
    nbytes = 2 * RANK * costs.layers * (2 * evicted.tokens + features)
    flops = 2 * RANK * features * costs.layers
    note = PatchNote(
        "0" * 32, evicted.id, evicted.content, "canonical", full.target(), None, False, RANK, nbytes, flops
    )
    calls: dict[str, Callable[[], tuple[Window, Edits]]] = {
        "slide": lambda: full.slide(count - 1),
        "append": lambda: full.append(new),
        "recall": lambda: full.recall("chunk 0", patch=note),
        "evict in the middle": lambda: full.evict(middle),
        "reorder": lambda: full.reorder(ids[::-1]),
        "fork": lambda: full.fork("branch"),
    }

    results = {}

    for name, call in calls.items():
        seconds, edits = [], ()
        for _ in range(5):
            begin = time.process_time()
            _, edits = call()
            seconds.append(time.process_time() - begin)
        results[name] = (min(seconds), edits)

    return results


def run_edits(count: int, tokens: int, repeats: int) -> dict[str, float]:
    """Measures CPU seconds in which a pool runs a slide by one and a recall, of `count` chunks in place; medians.

    Chunks are drawn and placed bare: the origin of KV does not change what it takes to rotate it.
    """
    backbone: Any = UnrunBackbone()
    layout = backbone.layout
    generator = np.random.default_rng(0)
    drawn = {}
    for channel in layout.channels:
        values = generator.standard_normal((layout.layers, tokens, channel.heads, channel.width))
        drawn[channel.name] = jnp.asarray(values, "bfloat16")

    local = np.arange(tokens, dtype=np.float32)
    executor = PagedExecutor(backbone, (count + 2) * tokens // PAGE, PAGE)
    window = Window.empty(Costs.of(backbone), lead=0)

    for number in range(count):
        entry = _entry_of(number, tokens)
        labels = {"layout": layout, "backbone": backbone.fingerprint, "content": entry.content}
        executor.provide(entry.id, chunk=kvp.Chunk(drawn, local, tokens, tokens, entry.id, **labels))
        window, edits = window.append(entry, "bare", fetched=True)
        executor.run(window, edits)

    def timed_edits(plan: Callable[[], tuple[Window, Edits]]) -> tuple[Window, float]:
        begin = time.process_time()
        window, edits = plan()
        executor.run(window, edits)
        jax.block_until_ready(executor.pools)
        return window, time.process_time() - begin

    seconds: dict[str, list[float]] = {"slide": [], "recall": []}
    for _ in range(repeats + 1):
        window, taken = timed_edits(lambda window=window: window.slide(count - 1))
        seconds["slide"].append(taken)
        evicted = window.evicted[-1].entry.id
        window, taken = timed_edits(lambda window=window, id=evicted: window.recall(id, "bare", fetched=True))
        seconds["recall"].append(taken)

    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def judged_rows(part: Part) -> list[Row]:
    """Holds the measurements against the bars: linear, constant, and fast enough to compute."""

    def nbytes(operation: str) -> dict[int, int]:
        return {row["chunks"]: row["bytes"] for row in part["rows"] if row["operation"] == operation}

    slides, recalls = nbytes("slide"), nbytes("recall")
    survivors = [count_bytes / (count - 1) for count, count_bytes in slides.items() if count > 1]
    timed = [row for row in part["rows"] if "compute_seconds" in row]
    slowest = max(timed, key=lambda row: row["compute_seconds"])
    computing = f"computing edits, the slowest ({slowest['operation']}, {slowest['chunks']} chunks), seconds"
    spread = max(recalls.values()) / min(recalls.values())
    return [
        measured_row("slide: largest over least bytes per survivor", [max(survivors) / min(survivors)], at_most=1.0),
        measured_row("recall: most over fewest bytes", [spread], at_most=1.0),
        measured_row(computing, [slowest["compute_seconds"]], at_most=COMPUTE_BAR),
    ]


def draw(part: Mapping[str, Any], path: Path) -> None:
    """Draws bytes, time to compute and time to run against the number of chunks."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    panels = {
        "bytes": "KV bytes that the edits move",
        "compute_seconds": "CPU seconds to compute the edits",
        "cpu": "CPU seconds to run them",
    }

    for axis, (column, title) in zip(axes, panels.items(), strict=True):
        points: dict[str, list[tuple[int, float]]] = {}
        for row in part["rows"]:
            if row.get(column):
                points.setdefault(row["operation"], []).append((row["chunks"], row[column]))

        for name, pairs in points.items():
            axis.plot(*zip(*pairs, strict=True), marker="o", markersize=3, label=name)
        axis.set(xscale="log", yscale="log", xlabel="chunks in the window", title=title)
        axis.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)

    axes[1].axhline(COMPUTE_BAR, color="grey", linestyle="--", linewidth=1)
    figure.savefig(path, dpi=120)
    plt.close(figure)
