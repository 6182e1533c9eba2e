"""Whether the window pays: the loop beside re-prefill and prefix caches, break-even of a patch, cost against length.

Parts are measured one by one and kept in `--out` as they are finished (`window_parts.jsonl`): the same command resumes
there. Parts of another seed, number of repeats or size are refused.
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..results.environment import environment
from ..results.parts import add_part, finished_parts
from . import break_even, window_lengths, window_loop
from .benchmark import Benchmark, Row, measured_row
from .checkpoints import tiny_config
from .loop_workload import LoopWorkload, largest_shipped, random_workload, shipped_workload
from .timing import ratios
from .window_loop import Part

IMAGES, WINDOWS = 40, (4, 16)
RECALLS = 6
"""Steps that recall an image, including the one that warms up."""
PARTS = "window_parts.jsonl"
FLOPS_BAR, HIT_BAR, FASTER_BAR, REMEMBER_BAR = 1.05, 1.3, 3.0, 1e-4
"""FLOPs over prefilling the image and the question; seconds over a prefix hit's; re-prefill's seconds over ours, at 16
images on Qwen2-0.5B's shape; nats to what the window promises."""


def run(
    *, repeats: int = 5, seed: int = 0, out: str | None = None, large: bool = False, quick: bool = False
) -> dict[str, Any]:
    """Measures all parts that `out` does not have yet.

    Args:
      repeats: turns of what is timed by itself.
      seed: of images, weights and questions.
      out: folder of the finished parts; None keeps nothing.
      large: also a random model of Qwen2-0.5B's shape with images of 256 tokens.
      quick: a tiny random model and short windows: a preview, not a measurement.

    Raises:
      InputError: `out` is a file, or holds parts of another configuration.
    """
    config = {"model": "window", "seed": seed, "repeats": repeats, "quick": quick}
    file = None if out is None else Path(out) / PARTS
    parts = {} if file is None else {line["part"]: line["result"] for line in finished_parts(file, config)}

    for name, measure in _parts(repeats, seed, large, quick).items():
        if name in parts:
            continue
        parts[name] = measure() | {"environment": environment()}
        print(f"{name}: measured", flush=True)
        if file is not None:
            add_part(file, {"part": name, "result": parts[name]})

    return {"config": config, "environment": environment(), "parts": parts, "rows": rows_of(parts)}


def _parts(repeats: int, seed: int, large: bool, quick: bool) -> dict[str, Callable[[], Part]]:
    """Lists what is measured, by name; models are made when they are needed, and once."""
    if quick:
        tiny = functools.cache(lambda: random_workload(8, seed, tiny_config("Qwen2ForCausalLM"), tokens=32))
        parts = {"lengths": lambda: window_lengths.measure((1, 4, 16), repeats=1, run_tokens=32)}
        return parts | _backbone_parts("tiny", tiny, (3,), 2, 1, rank=4)

    shipped = functools.cache(lambda: shipped_workload(largest_shipped(), IMAGES, seed))
    parts = {"lengths": lambda: window_lengths.measure(repeats=repeats)}
    parts |= _backbone_parts("shipped", shipped, WINDOWS, 3, repeats)
    if large:
        random = functools.cache(lambda: random_workload(IMAGES, seed))
        parts |= _backbone_parts("0.5B", random, WINDOWS, 1, min(repeats, 3), steps=3, once=True)
    return parts


def _backbone_parts(
    name: str,
    make: Callable[[], LoopWorkload],
    windows: Sequence[int],
    apart: int,
    repeats: int,
    steps: int | None = None,
    rank: int = window_loop.RANK,
    once: bool = False,
) -> dict[str, Callable[[], Part]]:
    """Lists the parts of one backbone: loops, compared at `steps` (None: all) steps that lie `apart`, and break-even.

    Steps of which a re-prefill takes a minute (`once`) are compared early on, where the history is short that the
    reference of remembering runs whole; recalls and break-even are measured at the shortest window alone.
    """
    parts: dict[str, Callable[[], Part]] = {}
    for size in windows:

        def measure_loop(size: int = size) -> Part:
            workload = make()
            full = tuple(range(size, len(workload.images), apart))
            recalls = RECALLS if not once else 2 * (size == windows[0])
            return window_loop.measure_loop(workload, size, full[:steps], recalls, once)

        parts[f"loop, {name}, window {size}"] = measure_loop

    size = windows[0] if once else windows[-1]
    parts[f"break-even, {name}"] = lambda: break_even.measure(make(), size, repeats, rank)
    return parts


# -------------------------------------------------------------------------------------------------------- rows


def rows_of(parts: Mapping[str, Part]) -> list[Row]:
    """Makes the rows of all parts."""
    kinds = {"loop": loop_rows, "break-even": break_even_rows, "lengths": window_lengths.judged_rows}
    rows = []
    for name, part in parts.items():
        rows += [row | {"part": name} for row in kinds[name.partition(",")[0]](part)]
    return rows


def loop_rows(part: Part) -> list[Row]:
    """Makes the rows of one loop; of steps whose window is full, without the one that warms up."""
    config, first = part["config"], part["config"]["window"]
    flops = {arm: counts[first:] for arm, counts in part["flops"].items()}
    padded = [sum(entry["padded_flops"] for entry in step["kinds"].values()) for step in part["warm"]["steps"][first:]]
    over_bar = ratios(flops["window"], flops["bar"])
    rows = [
        measured_row("FLOPs over prefilling image and question", over_bar, at_most=FLOPS_BAR, statistic=max),
        measured_row("the same with the padding of buckets", ratios(padded, flops["bar"])),
        measured_row("FLOPs of re-prefill over ours", ratios(flops["re-prefill"], flops["window"])),
        measured_row("FLOPs of a prefix cache over ours", ratios(flops["prefix cache"], flops["window"])),
    ]

    for unit, word in (("seconds", "time"), ("cpu", "CPU time")):
        times: dict[str, dict[int, float]] = {}
        for entry in part["compared"]:
            if not entry["warm_up"]:
                times.setdefault(entry["arm"], {})[entry["step"]] = entry[unit]

        ours = times["window"]

        def over_ours(arm: str, times: Mapping[str, Any] = times, ours: Mapping[int, float] = ours) -> list[float]:
            return [times[arm][step] / ours[step] for step in times[arm]]

        over_hit = [ours[step] / seconds for step, seconds in times["prefix hit"].items()]
        # CPU time is shown beside the clock's, and not judged.
        judged = unit == "seconds"
        faster = FASTER_BAR if judged and first == 16 and "0.5B" in config["backbone"] else None
        storing = f"{word} of storing a canonical, off the answer's path, seconds"
        rows += [
            measured_row(f"{word} over a prefix hit's", over_hit, at_most=HIT_BAR if judged else None),
            measured_row(f"{word} of re-prefill over ours", over_ours("re-prefill"), at_least=faster),
            measured_row(f"{word} of a prefix cache over ours", over_ours("prefix cache")),
            measured_row(f"{word} of a step, seconds", list(ours.values())),
            measured_row(storing, list(times["canonical"].values())),
        ]

    entries = [entry for entry in part["compared"] if entry["arm"] == "window"]
    for reference, words, statistic, bars in (
        ("remember", "what the window promises (remember)", max, (REMEMBER_BAR, 0.0)),
        ("forget", "re-prefill (forget)", statistics.fmean, (None, None)),
    ):
        for metric, name, bar in (("kl", "KL to", bars[0]), ("flip", "flips against", bars[1])):
            values = [entry[reference][metric] for entry in entries]
            rows.append(measured_row(f"{name} {words}", values, at_most=bar, statistic=statistic))

    rows += recall_rows(part.get("recalls", ()))

    for name in ("cold", "warm"):
        if name in part:
            loop = part[name]
            moved = sum(entry["bytes"] for entry in loop["ledger"].values())
            figures = {"seconds": loop["seconds"], "forwards": loop["forwards"]}
            figures |= {"programs compiled": loop["compilations"], "MB of KV moved": moved / 1e6}
            rows += [measured_row(f"{name} loop: {what}", [float(value)]) for what, value in figures.items()]

    return rows


def recall_rows(recalls: Sequence[Part]) -> list[Row]:
    """Makes the rows of steps that bring an image back by a stored patch; the first warms up."""
    steps = [step for step in recalls if not step["warm_up"]]
    if not steps:
        return []

    def over(unit: str, above: str, below: str) -> list[float]:
        return [step[unit][above] / step[unit][below] for step in steps]

    rows = []

    for unit, word in (("seconds", "time"), ("cpu", "CPU time"), ("flops", "FLOPs")):
        rows += [
            measured_row(f"recall by a patch: {word} over a prefix hit's", over(unit, "window", "prefix hit")),
            measured_row(f"recall by a patch: {word} of re-prefill over ours", over(unit, "re-prefill", "window")),
        ]

    cached = over("flops", "prefix cache", "window")
    rows.append(measured_row("recall by a patch: FLOPs of a prefix cache over ours", cached))
    for key, words in (
        ("to a prefill in the window", "to a prefill in the window"),
        ("forget", "to re-prefill (forget)"),
    ):
        values = [step[key]["kl"] for step in steps]
        rows.append(measured_row(f"recall by a patch: KL {words}", values, statistic=statistics.fmean))

    return rows


def break_even_rows(part: Part) -> list[Row]:
    """Makes the rows of break-even: reuses by case, and what each part of it takes."""
    rows = []
    for unit, word in (("seconds", "time"), ("cpu", "CPU time")):
        for case, value in part["reuses"][unit].items():
            bar = break_even.BARS.get(case) if unit == "seconds" else None
            rows.append(measured_row(f"reuses until it pays, {case}, {word}", [value], at_most=bar))

    for what, medians in part["measured"].items():
        rows.append(measured_row(f"{what}, seconds", [medians["seconds"]]))
    share = part["flops"]["patch placed"] / part["flops"]["prefill in the window"]
    return [*rows, measured_row("FLOPs of a reuse over a prefill's", [share])]


def _draw(result: Mapping[str, Any], path: Path) -> None:
    window_lengths.draw(result["parts"]["lengths"], path)


BENCHMARK = Benchmark("window", run, ("part",), draw=_draw)
