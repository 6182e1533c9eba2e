"""The sliding window on real weights: SmolLM2-135M-Instruct over the standard library's documentation.

What `window_slides` measures, over 34 streams of 6 steps each, with a pinned lead and without: 204 scored windows
either way, intervals over streams. Measured in parts of a few streams, which are kept as JSON lines: the same command
goes on where it was stopped.
"""

import dataclasses
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models import load

from ..real_weights import checkpoint
from ..results import intervals
from ..results.environment import environment
from ..results.parts import add_part, finished_parts
from ..results.rows import measured_row, verdict, without_nan
from ..results.tables import markdown_table
from . import window_texts
from .window_slides import Record, Slides, Trial

LEAD = "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
"""What stands in front: SmolLM2's own system turn."""
STREAMS, ROWS = 34, 2
PARTS = "window_pretrained.jsonl"
METRICS = ("kl", "flips", "loss")
REMEMBER_BAR, FORGET_BAR = 1e-4, 0.03
"""Nats: kept survivors against the banded mask, in every window; behind a lead against re-prefill, on average."""


def run(*, out: str | None, path: str | None = None, parts: int = 0, quick: bool = False) -> dict[str, Any]:
    """Measures what is missing and makes rows of all that was measured.

    Args:
      out: folder of the finished parts, a JSON line each, which is written to and gone on from; None keeps nothing.
      path: a checkpoint in place of SmolLM2's.
      parts: at most so many parts now (of 34, one or two minutes each); 0 for all.
      quick: two streams of two steps: shows that it runs.

    Raises:
      ConfigError: no weights. InputError: the file in `out` is of another trial, text or model, or `out` is a file.
    """
    file = checkpoint(path)
    backbone = load(file, dtype="float32", angles="float32")
    trial, count = (Trial(steps=2), 2) if quick else (Trial(), STREAMS)
    lead = np.asarray(backbone.prepare([LEAD])["input_ids"])[0]
    texts = window_texts.streams(backbone, count, trial.tokens)
    config = {
        "trial": dataclasses.asdict(trial),
        "streams": count,
        "rows": min(ROWS, count),
        "lead": len(lead),
        "text": window_texts.LICENCE,
        "text_digest": window_texts.digest(texts),
        "python": platform.python_version(),
        "model": file.stem,
        "fingerprint": backbone.fingerprint,
    }
    config = json.loads(json.dumps(config))
    records = measured(backbone, texts, lead, trial, config, None if out is None else Path(out), parts)
    return {"config": config, "environment": environment(), **summary(records, config)}


def measured(
    backbone: Any,
    texts: Mapping[str, np.ndarray],
    lead: np.ndarray,
    trial: Trial,
    config: dict[str, Any],
    folder: Path | None,
    limit: int,
) -> list[Record]:
    """All records: those of parts that the folder has, and of at most `limit` further ones, written as they come."""
    finished = [] if folder is None else finished_parts(folder / PARTS, config)
    kept = [record for part in finished for record in part["records"]]
    done = {tuple(part["part"]) for part in finished}
    names, rows = list(texts), config["rows"]
    todo = [(front, first) for first in range(0, len(names), rows) for front in ("pinned lead", "no lead")]
    todo = [part for part in todo if part not in done]
    for front, first in todo[: limit or None]:
        own = names[first : first + rows]
        slides = Slides(
            backbone, np.stack([texts[name] for name in own]), lead if front != "no lead" else lead[:0], trial
        )
        found = []
        for record in slides.run():
            stream = {"stream": own[record.pop("row")]} if "row" in record else {}
            found.append({"front": front, "first": first, **stream, **record})
        kept += found
        if folder is not None:
            add_part(folder / PARTS, {"part": [front, first], "records": found})
        print(f"{front}, streams {first} to {first + len(own) - 1}", flush=True)
    return kept


def summary(records: Sequence[Record], config: Mapping[str, Any]) -> dict[str, Any]:
    """Rows with intervals over streams, verdicts on the bars, and CPU seconds per stream and step."""
    rows, judged = [], []
    for front, arm, against, own in _by_arm(records):
        cluster = np.array([record["stream"] for record in own])
        for metric in METRICS:
            values = np.array([record[metric] for record in own])
            row = measured_row(
                f"window, {front}, {against}", config["model"], arm, metric, intervals.mean(values, cluster)
            )
            rows.append(row | {"largest": float(values.max())})
        value = [record["kl"] for record in own]
        if (arm, against) == ("kept", "remember"):
            judged.append(verdict(f"kept, {front}, against the banded mask: largest KL", max(value), REMEMBER_BAR))
        if (front, arm, against) == ("pinned lead", "kept", "forget"):
            judged.append(verdict("kept, pinned lead, against re-prefill: mean KL", float(np.mean(value)), FORGET_BAR))

    # The first step of a part compiles, or loads what was compiled.
    timed = [record for record in records if "append_seconds" in record and record["step"] > 1]
    seconds = {}
    for what in ("append_seconds", "forget_seconds"):
        if timed:
            seconds[what] = float(np.median([record[what] for record in timed])) / config["rows"]
    return {"rows": without_nan(rows), "bars": judged, "cpu_seconds_per_stream_and_step": seconds}


def _by_arm(records: Sequence[Record]) -> Iterator[tuple[str, str, str, list[Record]]]:
    scored = [record for record in records if "arm" in record]
    for front, arm, against in dict.fromkeys((record["front"], record["arm"], record["against"]) for record in scored):
        own = [
            record for record in scored if (record["front"], record["arm"], record["against"]) == (front, arm, against)
        ]
        yield front, arm, against, own


def table(result: Mapping[str, Any]) -> str:
    """The result as Markdown: KL, flips and loss of every arm, and the bars."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    counts: dict[tuple[str, str], int] = {}
    for row in result["rows"]:
        key = row["probe"].removeprefix("window, "), row["arm"]
        scale, places = (100, 1) if row["metric"] == "flips" else (1, 3)
        numbers = [float("nan") if row[end] is None else row[end] * scale for end in ("value", "low", "high")]
        exact = row["metric"] == "kl" and abs(numbers[0]) < 1e-3
        show = lambda number, exact=exact, places=places: f"{number:.1e}" if exact else f"{number:.{places}f}"
        cells.setdefault(key, {})[row["metric"]] = f"{show(numbers[0])} [{show(numbers[1])}, {show(numbers[2])}]"
        counts[key] = row["n"]
    head = ("in front, reference", "served", "KL, nats", "flips, %", "loss on the text, nats", "n")
    lines = [[*key, *(found.get(metric, "") for metric in METRICS), str(counts[key])] for key, found in cells.items()]
    bars = [f"{bar['what']}: {bar['value']:.2e}, at most {bar['at_most']:g}: {bar['within']}" for bar in result["bars"]]
    return markdown_table(head, lines) + "\n\n" + "\n".join(bars) + "\n"
