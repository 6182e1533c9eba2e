"""Imported traces through a model, in every mode of `python -m evals.replay`, beside the prices of their steps.

A session of each public format is read, bounded to a window of so many chunks, and replayed with tokens that are drawn:
a screenshot of 1 200 tokens or 200 blocks of 512 are more than a small model on a CPU computes in minutes, so that all
numbers of tokens are divided by a factor. Prices are `step_prices`' of the same numbers, at this model's costs. A
replay counts the FLOPs of what ran; that both agree says that prices, with which large models are compared, are those
of real launches.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.plan import DeviceCosts
from kvpatch_jax.window import Costs, Entry
from models import ModelBackbone

from ..harness.tables import markdown_table
from . import step_prices as prices
from .cheapest import DEVICE, ImportedTrace, imported
from .replay_run import BATCHED, PLACEHOLDER, PREFILL, PREFIX, WINDOW, DrawnTrace, replay, table

FACTOR, WINDOW_CHUNKS = 64, 4
"""Tokens of a trace that one token stands for; chunks in the window."""
LEFT = Entry("left", "[left]", 1, 1, "text")
"""The placeholder: one token, the least there is."""
PRICED = {
    PREFILL: prices.PREFILL,
    PREFIX: prices.PREFIX,
    BATCHED: prices.BATCHED,
    PLACEHOLDER: prices.PLACEHOLDERS,
    WINDOW: prices.SLIDE,
}
"""Modes of a replay, and the way of `step_prices` that each is. Patches have no price: they need no forward."""
NAME = "imported.json"
Record = dict[str, Any]


def replay_imported(
    source: ImportedTrace,
    backbone: ModelBackbone,
    *,
    window: int = WINDOW_CHUNKS,
    factor: int = FACTOR,
    report: Callable[[str], None] = lambda text: None,
) -> Record:
    """Replays a trace in every mode and prices its steps.

    Returns:
      As `replay_run.replay`, with {"factor", "keep", "priced": {mode: FLOPs of each step}}.

    Raises:
      TraceError: a trace that cannot be replayed.
    """
    trace, sizes = prices.bounded(source.trace, window), source.sizes.scaled(factor)
    asked = prices.questions_of(trace, sizes)
    shown = prices.shown_pieces(asked, window, LEFT)
    costs = Costs.of(backbone, np.float32)
    found = prices.step_prices(asked, shown, sizes, costs=costs, devices=DeviceCosts.assumed(DEVICE))

    # A chunk that is the lead is shown beyond those that a window keeps.
    lead = int(bool(asked and asked[0].pieces) and asked[0].pieces[0].kind == "chunk")
    drawn = DrawnTrace(sizes, 2 * window + lead, LEFT)
    record = replay(trace, backbone, ranks=(), drawn=drawn, report=report)
    priced = {mode: [price.flops for price in found[way]] for mode, way in PRICED.items()}
    return record | {"factor": factor, "keep": window, "priced": priced}


def agreement(record: Record) -> Record:
    """Returns how far a replay's FLOPs and those of its prices agree.

    Returns:
      {"steps": share of steps at which the same mode is the cheapest, "ratios": FLOPs that ran over those priced, by
      mode, "replayed" and "priced": share of steps at which each mode is the cheapest}. Of equal ones the first counts.
    """
    modes = list(record["priced"])
    ran = np.array([record["ways"][mode]["each"]["flops"] for mode in modes], float)
    priced = np.array([record["priced"][mode] for mode in modes], float)
    best, expected = ran.argmin(axis=0), priced.argmin(axis=0)
    return {
        "steps": float((best == expected).mean()),
        "ratios": {mode: float(own.sum() / of.sum()) for mode, own, of in zip(modes, ran, priced, strict=True)},
        "replayed": {mode: float((best == place).mean()) for place, mode in enumerate(modes)},
        "priced": {mode: float((expected == place).mean()) for place, mode in enumerate(modes)},
    }


def agreement_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Returns at which share of the steps each mode takes the fewest FLOPs: the head and the lines of a table."""
    head = ["trace", "mode", "cheapest in the replay, % of steps", "by prices", "FLOPs that ran over those priced"]
    lines = []
    for record in records:
        found = agreement(record)
        for mode in record["priced"]:
            shares = [f"{100 * found[name][mode]:.1f}" for name in ("replayed", "priced")]
            lines.append([record["kind"], mode, *shares, f"{found['ratios'][mode]:.4f}"])
        lines.append([record["kind"], "the same mode", f"{100 * found['steps']:.1f}", "", ""])
    return head, lines


def mode_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Returns what every mode took and loses: the head and the lines of a table."""
    head, lines = list[str](), list[list[str]]()
    for record in records:
        own, cells = table(record)
        head = ["trace", *own]
        lines += [[record["kind"], *line] for line in cells]
    return head, lines


def tables(content: Mapping[str, Any]) -> str:
    """Writes what a run leaves as Markdown."""
    records = content["records"]
    return f"{markdown_table(*agreement_table(records))}\n\n{markdown_table(*mode_table(records))}\n"


def _print(mode: str) -> None:
    print(f"  {mode}", flush=True)


def run(out: Path, backbone: ModelBackbone, model: str, steps: int, seed: int, window: int, factor: int) -> str:
    """Draws both formats, replays them, and writes imported.json and imported.md. Returns the tables."""
    records = []
    for source in imported(out / "drawn", steps, seed):
        print(f"{source.name}: {len(source.trace)} events", flush=True)
        records.append(replay_imported(source, backbone, window=window, factor=factor, report=_print))
    content = {"model": model, "records": records}
    (out / NAME).write_text(json.dumps(content) + "\n")
    text = tables(content)
    (out / "imported.md").write_text(text, encoding="utf-8")
    return text
