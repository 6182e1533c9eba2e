"""Hybrid models: an agent's loop by three ways, run and counted.

The loop runs Qwen3.5-0.8B's shape with fewer layers (--layers, a multiple of four) and drawn weights, in float32, and
is counted at the whole shape. Drawn weights say nothing of quality: KL is there to see that forwards are the same while
a window grows, where both ways compute the same.
"""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kvpatch_jax.window.costs import composing_flops
from models.decoder.costs import forward_costs

from ..harness.environment import environment
from .benchmark import Benchmark, Row, measured_row
from .checkpoints import GOLDENS
from .hybrid_loop import WAYS, HybridLoopSizes, counted_flops, hybrid_workload, measure_hybrid_loop, shape_of
from .hybrid_shapes import decoder_of

LOOP = HybridLoopSizes()
"""What is run, and counted at whole shapes."""
CHEAPER_BAR = 3.0
"""Least ratio of re-prefill to ours, over the loop."""
NEW_BAR = 1.1
"""Most of ours over prefilling what is new, at `COUNTED` sizes."""
EXACT_BAR = 1e-4
"""Most KL while the window grows, in nats."""
COUNTED = (256, 1280)
"""Tokens of an image of the loops that are counted at whole shapes."""


def run(*, layers: int = 4, image_tokens: int = 256, seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Measures the loop, and counts it at whole shapes.

    Args:
      layers: of the model that is run. image_tokens: of its images.
      quick: the loop on a tiny model.
    """
    sizes = dataclasses.replace(LOOP, image_tokens=image_tokens)
    raw, name = shape_of(layers), f"Qwen3.5-0.8B's shape, {layers} layers"
    if quick:
        sizes = HybridLoopSizes(images=4, window=3, image_tokens=16, question_tokens=4, lead_tokens=4)
        raw, name = json.loads((GOLDENS / "qwen3_5" / "config.json").read_text()), "tiny"

    workload = hybrid_workload(raw, name, sizes, seed)
    loop = measure_hybrid_loop(workload, sizes)
    result: dict[str, Any] = {
        "config": {"backbone": name, "dtype": "float32", "seed": seed, "quick": quick, **vars(sizes)},
        "environment": environment(),
        "loop": loop,
        "counted": counted_loops(),
    }
    return result | {"rows": rows_of(result)}


def counted_loops(sizes: HybridLoopSizes = LOOP) -> list[dict[str, Any]]:
    """Counts the loop at the shapes of Qwen3.5-0.8B and 9B, with images of `COUNTED` tokens."""
    loops = []
    for name in ("Qwen3.5-0.8B", "Qwen3.5-9B"):
        decoder = decoder_of(name)
        for tokens in COUNTED:
            own = dataclasses.replace(sizes, image_tokens=tokens)
            flops = counted_flops(forward_costs(decoder), decoder.layout, own)
            composing = composing_flops(decoder.layout)
            loops.append({"model": name, "image_tokens": tokens, "flops": flops, "composing": composing})
    return loops


# -------------------------------------------------------------------------------------------------------------- rows


def rows_of(result: Mapping[str, Any]) -> list[Row]:
    """Makes the rows of a result."""
    rows = loop_rows(result["loop"], result["config"])
    for loop in result["counted"]:
        rows += counted_rows(loop)
    return rows


def loop_rows(loop: Mapping[str, Any], config: Mapping[str, Any]) -> list[Row]:
    """Makes the rows of the loop that ran and of its variants."""
    steps, part = loop["steps"], config["backbone"]
    window = config["window"]
    phases = {"loop": steps, "growing": steps[:window], "sliding": steps[window:]}
    rows = []
    for way in WAYS[:2]:
        for phase, own in phases.items():
            for unit, word in (("flops", "FLOPs"), ("seconds", "time")):
                bar = CHEAPER_BAR if way == "re-prefill" and phase == "loop" else None
                total = _sum(own, way, unit) / _sum(own, "window", unit)
                ratios = [step[way][unit] / step["window"][unit] for step in own]
                rows.append(
                    measured_row(f"{phase}: {word} of {way} over ours", ratios, at_least=bar, value=total, part=part)
                )
                rows[-1] |= _judged(rows[-1])
    for name, step in loop["variants"].items():
        for way in WAYS[:2]:
            for unit, word in (("flops", "FLOPs"), ("seconds", "time")):
                ratio = step[way][unit] / step["window"][unit]
                rows.append(measured_row(f"{name}: {word} of {way} over ours", [ratio], part=part))
        over = step["window"]["flops"] / step["bar"]
        rows.append(measured_row(f"{name}: FLOPs over running what is new", [over], part=part))

    growing, sliding = ([step["kl"] for step in phases[phase]] for phase in ("growing", "sliding"))
    changed = [step["kl"] for step in loop["variants"].values()]
    rows += [
        measured_row("KL to re-prefill, window growing", growing, at_most=EXACT_BAR, statistic=max, part=part),
        measured_row("KL to re-prefill, window sliding", sliding, statistic=statistics.fmean, part=part),
        measured_row("KL to re-prefill, variants", changed, statistic=statistics.fmean, part=part),
    ]
    return rows


def _judged(row: Row) -> Row:
    # The interval is of steps, the figure of all of them together.
    return {"passed": bool(row["value"] >= row["bar"])} if "bar" in row else {}


def _sum(steps: Sequence[Mapping[str, Any]], way: str, unit: str) -> float:
    return float(sum(step[way][unit] for step in steps))


def counted_rows(loop: Mapping[str, Any], window: int = LOOP.window) -> list[Row]:
    """Makes the rows of a loop that was counted, not run."""
    flops, part = loop["flops"], f"{loop['model']}, images of {loop['image_tokens']} tokens, counted"

    def ratio(above: str, below: str, first: int = 0) -> float:
        return sum(flops[above][first:]) / sum(flops[below][first:])

    rows = []
    for way in WAYS[:2]:
        bar = CHEAPER_BAR if way == "re-prefill" else None
        whole = [ratio(way, "window")]
        rows.append(measured_row(f"loop: FLOPs of {way} over ours", whole, at_least=bar, part=part))
        rows.append(measured_row(f"sliding: FLOPs of {way} over ours", [ratio(way, "window", window)], part=part))
    new = [ratio("window", "bar", window)]
    bar = NEW_BAR if loop["image_tokens"] >= COUNTED[-1] else None
    rows.append(measured_row("sliding: FLOPs over running what is new", new, at_most=bar, part=part))
    return rows


BENCHMARK = Benchmark("hybrid", run, ("part",))
