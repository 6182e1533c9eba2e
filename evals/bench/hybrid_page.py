"""Puts a run of the hybrid suite into its page: `python -m evals.bench.hybrid_page out/bench`.

Reads bench_hybrid.json, keeps it as docs/hybrid-costs.json, and writes the page's tables between their marks.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.documents import ROOT, block
from ..results.tables import markdown_table
from .hybrid import LOOP
from .hybrid_bytes import FORMS

PAGE, KEPT = Path("docs/experiments/hybrid-costs.md"), Path("docs/hybrid-costs.json")
SHOWN = (64, 256, 1280, 4096, 16384)
"""Tokens of the chunks in the table."""
MODELS = ("Qwen3.5-2B", "Qwen3.5-9B", "Qwen3.5-35B-A3B")
"""Whose chunks the table has: those of 0.8B and 4B are as those of 2B and 9B."""
MIB, GIB = 2**20, 2**30


def sections(result: Mapping[str, Any]) -> dict[str, str]:
    """Formats what the page shows of a result, by the name of its mark."""
    loop, config = result["loop"], result["config"]
    steps, window = loop["steps"], config["window"]
    phases = {"whole loop": steps, "growing": steps[:window], "sliding": steps[window:]}
    lines = [[name, *_over_ours(own)] for name, own in phases.items()]
    sizes = (
        f"{config['backbone']}, {config['dtype']}, images of {config['image_tokens']} tokens; FLOPs and time over ours:"
    )
    head = ("", "FLOPs, re-prefill", "snapshots", "seconds, re-prefill", "snapshots", "ours, seconds a step")
    ran = f"{sizes}\n\n{markdown_table(head, lines)}"

    changed = []
    for name, step in loop["variants"].items():
        new = f"{step['window']['flops'] / step['bar']:.2f}"
        changed.append([name, *_over_ours([step]), new])
    kl = {name: [step["kl"] for step in own] for name, own in phases.items()}
    varied = [step["kl"] for step in loop["variants"].values()]
    said = (
        f"at most {max(kl['growing']):.1e} nats while the window grows, where all three compute the same; "
        f"{statistics.fmean(kl['sliding']):.2g} on average behind slides and {statistics.fmean(varied):.2g} behind the "
        "changes above."
    )
    return {
        "counted": counted_table(result),
        "run": ran,
        "variants": markdown_table((*head[:-1], "ours, seconds", "ours over what is new"), changed),
        "kl": said,
        "bytes": bytes_table(result),
        "prefills": markdown_table(
            ("tokens", "TFLOPs", "temporaries, GiB", "scores, GiB"),
            [
                [f"{each['tokens']}", f"{each['flops'] / 1e12:.1f}", *_gib(each, "temporaries", "scores")]
                for each in result["prefills"]
            ],
        ),
        "compositions": markdown_table(
            ("transitions", "GFLOPs", "read, GiB", "temporaries, GiB"),
            [
                [f"{each['transitions']}", f"{each['flops'] / 1e9:.0f}", *_gib(each, "arguments", "temporaries")]
                for each in result["compositions"]
            ],
        ),
    }


def counted_table(result: Mapping[str, Any]) -> str:
    """Formats the loops that were counted at whole shapes."""
    lines = []
    for loop in result["counted"]:
        flops, window = loop["flops"], LOOP.window
        cells = [f"{loop['model']}, images of {loop['image_tokens']}"]
        for way in ("re-prefill", "snapshots"):
            for first in (0, window):
                cells.append(f"{sum(flops[way][first:]) / sum(flops['window'][first:]):.2f}")
        over = sum(flops["window"][window:]) / sum(flops["bar"][window:])
        lines.append([*cells, f"{loop['composing'] / 1e9:.1f}", f"{over:.3f}"])
    head = ("", "re-prefill", "once it slides", "snapshots", "once it slides", "GFLOPs, one composition")
    return markdown_table((*head, "over what is new, sliding"), lines)


def bytes_table(result: Mapping[str, Any]) -> str:
    """Formats the bytes of chunks by length and form, and of the full-attention models beside."""
    lines = []
    for row in result["bytes"]:
        if row["model"] not in MODELS:
            continue
        places = [row["lengths"].index(length) for length in SHOWN]
        for form, chunks in row["chunk_bytes"].items():
            even = f"{row['even_length'][form]}" if form in FORMS and "beside" in row else ""
            lines.append([row["model"], form, *(f"{chunks[place] / MIB:.4g}" for place in places), even])
        if "beside" in row:
            beside = (f"{row['beside_row_bytes'] * length / MIB:.4g}" for length in SHOWN)
            lines.append([f"{row['beside'].partition('/')[2]}", "rows", *beside, ""])
    head = ("model", "transition in", *(f"{length} tokens" for length in SHOWN), "even at")
    return markdown_table(head, lines)


def _over_ours(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = []
    for unit in ("flops", "seconds"):
        ours = sum(step["window"][unit] for step in steps)
        cells += [f"{sum(step[way][unit] for step in steps) / ours:.2f}" for way in ("re-prefill", "snapshots")]
    return [*cells, f"{statistics.fmean(step['window']['seconds'] for step in steps):.2f}"]


def _gib(described: Mapping[str, int], *names: str) -> list[str]:
    return [f"{described[name] / GIB:.2f}" for name in names]


def write(folder: Path, root: Path = ROOT) -> None:
    """Keeps a run's result, and puts it into the page."""
    result = json.loads((folder / "bench_hybrid.json").read_text(encoding="utf-8"))
    (root / KEPT).write_text(json.dumps(result) + "\n", encoding="utf-8")
    for mark, text in sections(result).items():
        (root / PAGE).write_text(block(text, root / PAGE, mark), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
