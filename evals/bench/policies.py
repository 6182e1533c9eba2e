"""What ways of keeping a window cost a step, from configurations alone: sliding, batched eviction, placeholders.

Nothing runs: the prices are the exact bytes and FLOPs of the edits that sessions make, and seconds at assumed rates of
an H100. Ways are compared with sliding by one, which is this library's own.
"""

from typing import Any, NamedTuple

from kvpatch_jax.plan import DeviceCosts, LoopSizes, PolicyPrice, compare_policies

from ..results.environment import environment
from ..results.tables import markdown_table
from .benchmark import Benchmark
from .checkpoints import LARGE, SEVEN_BILLION, shape_costs

SHAPES = {"0.5B": LARGE, "7B": SEVEN_BILLION}
"""Qwen2-0.5B's shape, and that of Qwen2.5-VL-7B's text decoder."""
DEVICE = "h100"


class PricedLoop(NamedTuple):
    """A loop: its sizes, and the least and the largest number of chunks of its window."""

    name: str
    sizes: LoopSizes
    low: int
    high: int


LOOPS = (
    PricedLoop("16 to 32 images of 102 tokens", LoopSizes(102, lead=16, asked=16, answered=8), 16, 32),
    PricedLoop(
        "3 to 6 screenshots of 1 200 tokens, texts of 200",
        LoopSizes(1200, text=200, lead=1000, asked=16, answered=64, placeholder=6, steps=50),
        3,
        6,
    ),
    PricedLoop(
        "1 to 4 screenshots of 1 200 tokens, texts of 200",
        LoopSizes(1200, text=200, lead=1000, asked=16, answered=64, placeholder=6, steps=50),
        1,
        4,
    ),
)
ASKED = {
    "remember": {"promise": "remember", "never": False},
    "forget": {"promise": "forget", "never": False},
    "texts stay": {"promise": "forget", "keep_text": True},
}
"""What a loop may ask for, without a certificate."""


def run() -> dict[str, Any]:
    """Prices every way of every loop on both shapes. Returns a row for each, and what is the cheapest."""
    devices, rows = DeviceCosts.assumed(DEVICE), []
    for shape, raw in SHAPES.items():
        costs = shape_costs(f"Qwen2 {shape}", raw)
        for loop in LOOPS:
            options: dict[str, Any] = {"costs": costs, "devices": devices}
            prices = compare_policies(loop.sizes, loop.low, loop.high, promise="forget", **options).prices
            chosen: dict[str, PolicyPrice] = {}
            for name, asked in ASKED.items():
                # Without texts and a placeholder there is nothing to keep.
                if loop.sizes.text or "keep_text" not in asked:
                    chosen[name] = compare_policies(loop.sizes, loop.low, loop.high, **options, **asked).cheapest

            slide = next(price for price in prices if price.policy.cycle == 1 and price.policy.survivors == "rotated")
            for price in prices:
                row = {"shape": shape, "loop": loop.name, "policy": price.policy.name, "tokens": price.tokens}
                for name in ("flops", "bytes", "seconds"):
                    own, base = getattr(price, f"step_{name}"), getattr(slide, f"step_{name}")
                    row |= {name: own, f"{name} over sliding": own / base}
                row |= {"worst seconds": price.worst_seconds, "kl, forget": price.kl, "steps": price.steps}
                taken = [name for name, best in chosen.items() if best.policy == price.policy]
                rows.append(row | {"taken": taken})

    return {"config": {"device": DEVICE, "rates": devices.about}, "environment": environment(), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Formats the prices as Markdown, over those of sliding by one, a table for each loop."""
    parts, groups = [], dict.fromkeys((row["shape"], row["loop"]) for row in result["rows"])
    for shape, loop in groups:
        lines = []
        for row in result["rows"]:
            if (row["shape"], row["loop"]) == (shape, loop):
                ratios = [f"{row[f'{name} over sliding']:.2f}" for name in ("flops", "bytes", "seconds")]
                worst = f"{1e3 * row['worst seconds']:.3g}"
                kl = "not bounded" if row["kl, forget"] is None else f"{row['kl, forget']:g}"
                taken = ", ".join(row["taken"])
                lines.append([row["policy"], *ratios, worst, str(row["tokens"]), kl, taken])
        head = ["way", "FLOPs", "bytes", "seconds", "longest step, ms", "most tokens", "KL, forget", "taken for"]
        parts.append(f"{shape}, {loop}:\n\n{markdown_table(head, lines)}\n")
    return "\n".join(parts)


BENCHMARK = Benchmark("policies", run, table=table)
