"""Whether the window pays: the loop beside re-prefill and prefix caches, break-even of a patch, cost against length.

Parts are measured one by one and kept in `--out` as they are finished (`window_parts.jsonl`): the same command resumes
there. Parts of another seed, number of repeats or size are refused.
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kvpatch_jax as kvp
from kvpatch_jax.window import Costs, Edits, Entry, PatchNote, Window

from ..harness.environment import environment
from ..harness.parts import add_part, finished_parts
from .benchmark import Benchmark, Row, measured_row
from .checkpoints import LARGE, shape_costs, tiny_config
from .loop_workload import LoopWorkload, largest_shipped, length_of, random_workload, shipped_workload
from .timing import cpu_seconds, ratios, timed
from .window_loop import RANK, AgentWindow, Part, canonical_of, measure_loop

IMAGES, WINDOWS = 40, (4, 16)
RECALLS = 6
"""Steps that recall an image, including the one that warms up."""
LENGTHS, TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256), 256
"""Chunks of the windows whose edits are computed, and tokens of each."""
PARTS = "window_parts.jsonl"
FLOPS_BAR, HIT_BAR, FASTER_BAR, REMEMBER_BAR = 1.05, 1.3, 3.0, 1e-4
"""FLOPs over prefilling the image and the question; seconds over a prefix hit's; re-prefill's seconds over ours, at 16
images on Qwen2-0.5B's shape; nats to what the window promises."""
REUSES_BARS = {"canonical stored": 2.0, "no canonical yet": 3.0}
COMPUTE_BAR = 5e-3
"""CPU seconds (one thread of Python) in which the edits of any operation on 256 chunks are computed."""


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
        parts = {"lengths": lambda: measure_lengths((1, 4, 16))}
        return parts | _backbone_parts("tiny", tiny, (3,), 2, 1, rank=4)

    shipped = functools.cache(lambda: shipped_workload(largest_shipped(), IMAGES, seed))
    parts = {"lengths": measure_lengths}
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
    rank: int = RANK,
    once: bool = False,
) -> dict[str, Callable[[], Part]]:
    """Lists the parts of one backbone: loops, compared at `steps` (None: all) steps that lie `apart`, and break-even.

    Steps of which a re-prefill takes a minute (`once`) are compared early on, where the history is short that the
    reference of remembering runs whole; recalls and break-even are measured at the shortest window alone.
    """
    parts: dict[str, Callable[[], Part]] = {}
    for size in windows:

        def loop(size: int = size) -> Part:
            workload = make()
            full = tuple(range(size, len(workload.images), apart))
            recalls = RECALLS if not once else 2 * (size == windows[0])
            return measure_loop(workload, size, full[:steps], recalls, once)

        parts[f"loop, {name}, window {size}"] = loop

    size = windows[0] if once else windows[-1]
    parts[f"break-even, {name}"] = lambda: measure_break_even(make(), size, repeats, rank)
    return parts


def rows_of(parts: Mapping[str, Part]) -> list[Row]:
    """Makes the rows of all parts."""
    kinds = {"loop": loop_rows, "break-even": break_even_rows, "lengths": length_rows}
    rows = []
    for name, part in parts.items():
        rows += [row | {"part": name} for row in kinds[name.partition(",")[0]](part)]
    return rows


# -------------------------------------------------------------------------------------------------------- the loop


def loop_rows(part: Part) -> list[Row]:
    """Makes the rows of one loop; of steps whose window is full, without the one that warms up."""
    config, first = part["config"], part["config"]["window"]
    flops = {arm: counts[first:] for arm, counts in part["flops"].items()}
    padded = []
    for step in part["warm"]["steps"][first:]:
        padded.append(sum(entry["padded_flops"] for entry in step["kinds"].values()))
    over_bar = ratios(flops["window"], flops["bar"])
    rows = [
        measured_row("FLOPs over prefilling image and question", over_bar, at_most=FLOPS_BAR, statistic=max),
        measured_row("the same with the padding of buckets", ratios(padded, flops["bar"])),
        measured_row("FLOPs of re-prefill over ours", ratios(flops["re-prefill"], flops["window"])),
        measured_row("FLOPs of a prefix cache over ours", ratios(flops["prefix cache"], flops["window"])),
    ]

    times: dict[str, dict[int, float]] = {}
    for entry in part["compared"]:
        if not entry["warm_up"]:
            times.setdefault(entry["arm"], {})[entry["step"]] = entry["seconds"]
    ours = times["window"]
    over_ours = {}
    for arm, seconds in times.items():
        over_ours[arm] = [seconds[step] / ours[step] for step in seconds]
    over_hit = [ours[step] / seconds for step, seconds in times["prefix hit"].items()]
    faster = FASTER_BAR if first == 16 and "0.5B" in config["backbone"] else None
    rows += [
        measured_row("time over a prefix hit's", over_hit, at_most=HIT_BAR),
        measured_row("time of re-prefill over ours", over_ours["re-prefill"], at_least=faster),
        measured_row("time of a prefix cache over ours", over_ours["prefix cache"]),
        measured_row("time of a step, seconds", list(ours.values())),
    ]

    # Every answer that was compared is judged, the one that warmed up too.
    entries = [entry for entry in part["compared"] if entry["arm"] == "window"]
    for reference, words, statistic, bars in (
        ("remember", "what the window promises (remember)", max, (REMEMBER_BAR, 0.0)),
        ("forget", "re-prefill (forget)", statistics.fmean, (None, None)),
    ):
        for metric, name, bar in (("kl", "KL to", bars[0]), ("flip", "flips against", bars[1])):
            values = [entry[reference][metric] for entry in entries]
            rows.append(measured_row(f"{name} {words}", values, at_most=bar, statistic=statistic))

    rows += recall_rows([step for step in part.get("recalls", ()) if not step["warm_up"]])
    for name in ("cold", "warm"):
        if name in part:
            loop = part[name]
            moved = sum(entry["bytes"] for entry in loop["ledger"].values())
            figures = {"seconds": loop["seconds"], "forwards": loop["forwards"]}
            figures |= {"programs compiled": loop["compilations"], "MB of KV moved": moved / 1e6}
            rows += [measured_row(f"{name} loop: {what}", [float(value)]) for what, value in figures.items()]

    return rows


def recall_rows(steps: Sequence[Part]) -> list[Row]:
    """Makes the rows of steps that bring an image back by a stored patch."""
    if not steps:
        return []

    def over(unit: str, above: str, below: str) -> list[float]:
        return [step[unit][above] / step[unit][below] for step in steps]

    rows = []
    for unit, word in (("seconds", "time"), ("flops", "FLOPs")):
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


# ------------------------------------------------------------------------------------------------------ break-even


def measure_break_even(workload: LoopWorkload, size: int, repeats: int, rank: int = RANK) -> Part:
    """Times forming and reusing the patch of the last image of a full window. Kamera §6: about 9 reuses.

    A reuse puts an evicted chunk back into the same window by its patch, instead of a prefill there. Forming takes a
    forward in the window and a factorisation; the canonical is stored already, or takes a forward more. Where the chunk
    was prefilled in the window anyway (formed from traffic), the factorisation alone is spent.

    Args:
      size: images in the window.
      repeats: turns that count, after one that warms up.

    Returns:
      {"config", "patch_bytes", "chunk_bytes", "measured": median seconds by what was done, "flops": the same as
      arithmetic, "reuses": what break-even takes, by case}.
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
        return executor.pool.vectors

    calls: dict[str, Callable[[], object]] = {
        "prefill in the window": lambda: recall(how="prefill"),
        "patch placed": lambda: recall(patch=note),
        "canonical": lambda: plain.prefill(tokens).kv,
        "factors formed": lambda: kvp.form_patch(chunk, conditioned, rank, antecedent).factors,
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            samples[name].append(timed(call)[1])
            if id in [piece.id for piece in executor.books.ordered("")]:
                executor.run(without, eviction)

    medians = {name: statistics.median(seconds[1:]) for name, seconds in samples.items()}
    count, behind = length_of(tokens), window.behind(id)
    flops = {
        "prefill in the window": costs.prefill(count, behind, logits=1)["flops"],
        "patch placed": costs.patch(count, note.nbytes, note.flops)["flops"],
        "canonical": costs.prefill(count, 0, logits=1)["flops"],
    }
    return {
        "config": {"backbone": workload.name, "window": size, "behind": behind, "tokens": count, "rank": rank},
        "patch_bytes": note.nbytes,
        "chunk_bytes": chunk.nbytes,
        "measured": {name: {"seconds": seconds} for name, seconds in medians.items()},
        "flops": flops,
        "reuses": {"seconds": break_even(medians)},
    }


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


def break_even_rows(part: Part) -> list[Row]:
    """Makes the rows of break-even: reuses by case, and what each part of it takes."""
    rows = []
    for case, value in part["reuses"]["seconds"].items():
        rows.append(measured_row(f"reuses until it pays, {case}, time", [value], at_most=REUSES_BARS.get(case)))
    for what, medians in part["measured"].items():
        rows.append(measured_row(f"{what}, seconds", [medians["seconds"]]))
    share = part["flops"]["patch placed"] / part["flops"]["prefill in the window"]
    return [*rows, measured_row("FLOPs of a reuse over a prefill's", [share])]


# -------------------------------------------------------------------------------------------------------- lengths


def measure_lengths(lengths: Sequence[int] = LENGTHS, tokens: int = TOKENS) -> Part:
    """Computes the edits of every operation on windows of so many chunks: CPU seconds of that, bytes, FLOPs."""
    costs, rows = shape_costs("Qwen2-0.5B's shape, never run", LARGE), []
    for count in lengths:
        for name, (seconds, edits) in operations(count, costs, tokens).items():
            sums = {"bytes": sum(edit.bytes for edit in edits), "flops": sum(edit.flops for edit in edits)}
            rows.append({"chunks": count, "operation": name, "compute_seconds": seconds, "edits": len(edits), **sums})
    return {"config": {"tokens": tokens, "shape": costs.backbone}, "rows": rows}


def operations(count: int, costs: Costs, tokens: int = TOKENS) -> dict[str, tuple[float, Edits]]:
    """Measures CPU seconds of computing each operation on `count` chunks after a lead, the least of five; its edits."""
    window, _ = Window.empty(costs, lead=1).append(Entry("lead", "lead", 16, 16, "text"))
    *old, new = [Entry(f"chunk {n}", f"shows {n}", tokens, tokens, order_free=True) for n in range(count + 2)]
    for entry in old:
        window, _ = window.append(entry)
    full, _ = window.slide(count)
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
        results[name] = (min(cpu_seconds(call) for _ in range(5)), call()[1])
    return results


def length_rows(part: Part) -> list[Row]:
    """Holds the measurements against the bars: linear, constant, and fast enough to compute."""
    slides = [row for row in part["rows"] if row["operation"] == "slide" and row["chunks"] > 1]
    survivors = [row["bytes"] / (row["chunks"] - 1) for row in slides]
    recalls = [row["bytes"] for row in part["rows"] if row["operation"] == "recall"]
    slowest = max(part["rows"], key=lambda row: row["compute_seconds"])
    computing = f"computing edits, the slowest ({slowest['operation']}, {slowest['chunks']} chunks), seconds"
    return [
        measured_row("slide: largest over least bytes per survivor", [max(survivors) / min(survivors)], at_most=1.0),
        measured_row("recall: most over fewest bytes", [max(recalls) / min(recalls)], at_most=1.0),
        measured_row(computing, [slowest["compute_seconds"]], at_most=COMPUTE_BAR),
    ]


BENCHMARK = Benchmark("window", run, ("part",))
