"""Which way of keeping a window is the cheapest at each step of imported traces, by window size and model shape.

Two sessions of 200 requests are drawn by the public loaders' field lists, read as any file is, bounded to windows of
so many chunks, and priced in every way (`step_prices`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from kvpatch_jax.plan import DeviceCosts
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import Costs
from models.decoder.costs import forward_costs
from models.random_weights import config_of

from ..bench import shapes
from ..harness.environment import environment
from ..harness.tables import markdown_table
from .computer_use import draw_computer_use, trace_of_episodes
from .mooncake import draw_mooncake, read_mooncake
from .readers.cua_trace import read_episodes
from .step_prices import PROMPTS, WAYS, Unit, bounded, means, questions_of, shares, shown_pieces, step_prices
from .window_tracker import TraceSizes

matplotlib.use("Agg")

SHAPES = {"0.5B": "Qwen2-0.5B", "7B": "Qwen2.5-7B", "16B-A3B, MoE and MLA": "Kimi-VL-A3B"}
"""Qwen2-0.5B, Qwen2.5-VL-7B's text decoder, and Kimi-VL-A3B's."""
WINDOWS = (1, 2, 4, 8, 16)
STEPS = 200
DEVICE = "h100"
SCREENSHOT, CHARACTERS = 1200, 4
"""Tokens of a screenshot; characters of a token of text."""
UNITS: tuple[Unit, ...] = ("flops", "seconds", "tokens")
COLOURS = ("black", "grey", "tab:olive", "tab:pink", "tab:orange", "tab:purple", "tab:brown", "tab:blue", "tab:cyan")
Record = dict[str, Any]


class ImportedTrace(NamedTuple):
    """A trace, and the numbers of tokens of all that it shows and asks."""

    name: str
    trace: Trace
    sizes: TraceSizes


def shape_costs(name: str, raw: Mapping[str, Any]) -> Costs:
    """Computes the costs of a text decoder of this `config.json`, in bfloat16; no model is made."""
    text = config_of(raw).text
    layout = text.layout
    rotating = [channel for channel in layout.channels if channel.rotates]
    depths = {channel.name: layout.depth(channel.name) for channel in rotating}
    # Two bytes a number.
    turning = 2 * sum(depths[channel.name] * channel.features for channel in rotating)
    rotary = sum(depths[channel.name] * channel.heads * channel.rotary for channel in rotating)
    return Costs(name, text.layers, layout.bytes_per_token("bfloat16"), turning, rotary, forward_costs(text))


def tokens_of(event: Event) -> int:
    """Estimates the tokens of a piece or question whose number a trace does not state."""
    if event.kind == "chunk" and event.op != "ask":
        return SCREENSHOT
    return max(len(event.text or "") // CHARACTERS, 1)


def imported(folder: Path, steps: int = STEPS, seed: int = 0) -> list[ImportedTrace]:
    """Draws a session of each format into a folder, and reads it."""
    requests = draw_computer_use(folder / "computer_use" / "h_cua.jsonl", steps, seed, words=200)
    episodes = read_episodes(requests).episodes
    screens = trace_of_episodes(episodes, folder / "computer_use", "computer use")
    blocks = read_mooncake(draw_mooncake(folder / "mooncake.jsonl", steps, seed))
    return [ImportedTrace(trace.kind, trace, TraceSizes.of(trace, tokens_of)) for trace in (screens, blocks)]


def cheapest(traces: Sequence[ImportedTrace], windows: Sequence[int] = WINDOWS) -> list[Record]:
    """Prices all traces: a record for each trace, shape and window.

    Returns:
      {"trace", "shape", "window", "means": {unit: {way: …}}, "shares": {unit: {way: …}} of all ways, and "exact" of
      those without this library's slides}.
    """
    devices, records = DeviceCosts.assumed(DEVICE), list[Record]()
    for name, trace, sizes in traces:
        for window in windows:
            asked = questions_of(bounded(trace, window), sizes)
            shown = shown_pieces(asked, window)
            for shape, name_of_shape in SHAPES.items():
                prices = step_prices(
                    asked, shown, sizes, costs=shape_costs(shape, shapes.SHAPES[name_of_shape]), devices=devices
                )
                record: Record = {"trace": name, "shape": shape, "window": window, "steps": len(asked)}
                record["means"] = {unit: means(prices, unit) for unit in UNITS}
                record["shares"] = {unit: shares(prices, WAYS, unit) for unit in UNITS}
                record["exact"] = {unit: shares(prices, PROMPTS, unit) for unit in UNITS}
                records.append(record)
    return records


def run(out: Path) -> str:
    """Draws, prices, and writes cheapest.json, cheapest.md and traces_cheapest.png. Returns the tables."""
    records = cheapest(imported(out / "drawn"))
    content = {"device": DeviceCosts.assumed(DEVICE).about, "environment": environment(), "records": records}
    (out / "cheapest.json").write_text(json.dumps(content) + "\n")
    text = f"{markdown_table(*share_table(records))}\n\n{markdown_table(*cost_table(records))}\n"
    (out / "cheapest.md").write_text(text, encoding="utf-8")
    figure(records, out / "traces_cheapest.png")
    return text


def share_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Returns at which share of the steps each way takes the fewest seconds: the head and the lines of a table."""
    head = ["trace", "shape", "window", "of exact ways", "of all ways", "by FLOPs, of all ways"]
    lines = []
    for record in records:
        own = record["exact"]["seconds"], record["shares"]["seconds"], record["shares"]["flops"]
        lines.append([record["trace"], record["shape"], str(record["window"]), *map(_shares, own)])
    return head, lines


def cost_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Returns each way's mean FLOPs and seconds over those of our slide: the head and the lines of a table."""
    slide = WAYS[-2]
    head = ["trace", "shape", "window", *(way for way in WAYS if way != slide)]
    lines = []
    for record in records:
        flops, seconds = record["means"]["flops"], record["means"]["seconds"]
        ratios = [
            f"{flops[way] / flops[slide]:.2f} / {seconds[way] / seconds[slide]:.2f}" for way in WAYS if way != slide
        ]
        lines.append([record["trace"], record["shape"], str(record["window"]), *ratios])
    return head, lines


def _shares(found: Mapping[str, float]) -> str:
    taken = sorted(found.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{way} {100 * share:.0f} %" for way, share in taken if share >= 0.005)


def figure(records: Sequence[Record], path: Path) -> None:
    """Draws the share of steps at which each way takes the fewest seconds, against the window: a panel for each trace
    and shape; exact ways above, all ways below."""
    panels = list(dict.fromkeys((record["trace"], record["shape"]) for record in records))
    drawn = Figure(figsize=(2.7 * len(panels), 6), layout="constrained")
    axes = drawn.subplots(2, len(panels), squeeze=False, sharey=True)
    for column, (trace, shape) in enumerate(panels):
        own = [record for record in records if (record["trace"], record["shape"]) == (trace, shape)]
        for row, field in enumerate(("exact", "shares")):
            axis, bottom = axes[row][column], [0.0] * len(own)
            for way, colour in zip(WAYS, COLOURS, strict=True):
                heights = [100 * record[field]["seconds"].get(way, 0.0) for record in own]
                axis.bar(range(len(own)), heights, bottom=bottom, color=colour, label=way)
                bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
            axis.set_xticks(range(len(own)), [str(record["window"]) for record in own])
            axis.set_title(f"{trace}\n{shape}", fontsize=8)
            axis.set_xlabel("chunks in the window", fontsize=8)
    axes[0][0].set_ylabel("% of steps, exact ways")
    axes[1][0].set_ylabel("% of steps, all ways")
    handles, labels = axes[1][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=7)
    drawn.savefig(path, dpi=90)
