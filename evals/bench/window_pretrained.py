"""The sliding window on real weights: SmolLM2-135M-Instruct over the standard library's documentation.

What `text_slides` measures, over 34 streams of 6 steps each, with a pinned lead and without: 204 scored windows either
way, intervals over streams. Parts of a few streams are kept as JSON lines: the same command resumes after them.
"""

import dataclasses
import hashlib
import json
import platform
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models import load

from ..pretrained.texts import documentation
from ..real_weights import checkpoint as find_checkpoint
from ..results import intervals
from ..results.environment import environment
from ..results.parts import add_part, finished_parts
from ..results.rows import measured_row as interval_row
from ..results.rows import without_nan
from .benchmark import Benchmark, Row, measured_row
from .text_slides import Record, SlideSizes, TextSlides

LEAD = "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
"""What precedes every window: SmolLM2's own system turn."""
LICENCE = "documentation strings of Python's standard library, Python Software Foundation License Version 2"
STREAMS, ROWS = 34, 2
PARTS = "window_pretrained.jsonl"
METRICS = ("kl", "flips", "loss")
REMEMBER_BAR, FORGET_BAR = 1e-4, 0.03
"""Nats: kept survivors against the banded mask, in every window; after a lead against re-prefill, on average."""


def run(
    *, out: str | None = None, checkpoint: str | None = None, parts: int = 0, quick: bool = False
) -> dict[str, Any]:
    """Measures what is missing and makes rows of all that was measured.

    Args:
      out: folder of the finished parts, which the run resumes; None keeps nothing.
      checkpoint: a file in place of SmolLM2's weights.
      parts: at most so many parts now (of 34, one or two minutes each); 0 for all.
      quick: two streams of two steps: a preview, not a measurement.

    Raises:
      ConfigError: no weights. InputError: the file in `out` is of another trial, text or model, or `out` is a file.
    """
    file = find_checkpoint(checkpoint)
    backbone = load(file, dtype="float32", angles="float32")
    sizes, count = (SlideSizes(steps=2), 2) if quick else (SlideSizes(), STREAMS)
    lead = np.asarray(backbone.prepare([LEAD])["input_ids"])[0]
    streams = library_streams(backbone, count, sizes.tokens)
    config = {
        "trial": dataclasses.asdict(sizes),
        "streams": count,
        "rows": min(ROWS, count),
        "lead": len(lead),
        "text": LICENCE,
        "text_digest": digest(streams),
        "python": platform.python_version(),
        "model": file.stem,
        "fingerprint": backbone.fingerprint,
    }
    config = json.loads(json.dumps(config))
    records = measure(backbone, streams, lead, sizes, config, None if out is None else Path(out), parts)
    return {"config": config, "environment": environment(), **summary(records, config)}


def measure(
    backbone: Any,
    streams: Mapping[str, np.ndarray],
    lead: np.ndarray,
    sizes: SlideSizes,
    config: dict[str, Any],
    folder: Path | None,
    limit: int,
) -> list[Record]:
    """Returns all records: those of parts that the folder has, and of at most `limit` further ones."""
    finished = [] if folder is None else finished_parts(folder / PARTS, config)
    records = [record for part in finished for record in part["records"]]
    done = {tuple(part["part"]) for part in finished}
    names, rows = list(streams), config["rows"]
    todo = [(front, first) for first in range(0, len(names), rows) for front in ("pinned lead", "no lead")]
    todo = [part for part in todo if part not in done]

    for front, first in todo[: limit or None]:
        chosen = names[first : first + rows]
        ids = np.stack([streams[name] for name in chosen])
        measured = []
        for record in TextSlides(backbone, ids, lead if front != "no lead" else lead[:0], sizes).run():
            stream = {"stream": chosen[record.pop("row")]} if "row" in record else {}
            measured.append({"front": front, "first": first, **stream, **record})

        records += measured
        if folder is not None:
            add_part(folder / PARTS, {"part": [front, first], "records": measured})
        print(f"{front}, streams {first} to {first + len(chosen) - 1}", flush=True)

    return records


def summary(records: Sequence[Record], config: Mapping[str, Any]) -> dict[str, Any]:
    """Makes rows with intervals over streams, rows of the bars, and CPU seconds per stream and step."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if "arm" in record:
            groups.setdefault((record["front"], record["arm"], record["against"]), []).append(record)

    rows: list[Row] = []
    judged: list[Row] = []
    for (front, arm, against), group in groups.items():
        probe, cluster = f"window, {front}, {against}", np.array([record["stream"] for record in group])
        for metric in METRICS:
            values = np.array([record[metric] for record in group])
            row = interval_row(probe, config["model"], arm, metric, intervals.mean(values, cluster))
            rows.append(row | {"largest": float(values.max())})

        labels: dict[str, Any] = {"probe": probe, "arm": arm}
        kl = [record["kl"] for record in group]
        if (arm, against) == ("kept", "remember"):
            judged.append(measured_row("largest KL", kl, at_most=REMEMBER_BAR, statistic=max, **labels))
        if (front, arm, against) == ("pinned lead", "kept", "forget"):
            mean = float(np.mean(kl))
            judged.append(measured_row("mean KL", kl, at_most=FORGET_BAR, value=mean, **labels))

    # The first step of a part compiles, or loads what was compiled.
    timed = [record for record in records if "append_seconds" in record and record["step"] > 1]
    seconds = {}
    for name in ("append_seconds", "forget_seconds"):
        if timed:
            seconds[name] = float(np.median([record[name] for record in timed])) / config["rows"]
    return {"rows": [*without_nan(rows), *judged], "cpu_seconds_per_stream_and_step": seconds}


def library_streams(backbone: Any, count: int, tokens: int) -> dict[str, np.ndarray]:
    """Cuts a stream of token ids from each of the first modules of the standard library with enough documentation.

    Args:
      backbone: whose tokenizer reads the text.
      count: streams.
      tokens: of each.

    Returns:
      {module's path below the library's folder: int32 [tokens]}.

    Raises:
      ValueError: fewer modules than `count` have so many tokens.
    """
    root = Path(sysconfig.get_path("stdlib"))
    streams: dict[str, np.ndarray] = {}
    for path in sorted([*root.glob("[a-z]*.py"), *root.glob("[a-z]*/[a-z_]*.py")]):
        if path.parts[-2] in ("site-packages", "test"):
            continue

        text = documentation(path)
        if len(text) < 2 * tokens:  # no tokenizer makes a token of fewer than two characters of prose
            continue

        ids = np.asarray(backbone.prepare([text])["input_ids"])[0]
        if len(ids) >= tokens:
            streams[str(path.relative_to(root))] = ids[:tokens].astype(np.int32)
        if len(streams) == count:
            return streams

    raise ValueError(f"text: got {len(streams)} modules below {root} with {tokens} tokens; expected {count}")


def digest(streams: Mapping[str, np.ndarray]) -> str:
    """Digests names and tokens, which identify the text: 16 hexadecimal digits."""
    total = hashlib.blake2b(digest_size=8)
    for name, ids in streams.items():
        total.update(name.encode() + b"\0" + np.ascontiguousarray(ids, np.int32).tobytes())
    return total.hexdigest()


BENCHMARK = Benchmark("window_pretrained", run, ("probe", "arm"))
