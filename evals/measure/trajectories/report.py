"""What replayed episodes leave: steps.jsonl, table.md, and the line that says which way costs and loses what."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpatch_jax.utils.atomic_files import replace

from ...harness import intervals
from ...harness.intervals import Interval
from ...harness.tables import aligned_table, markdown_table
from ..rows import records_in
from .replayed import REFERENCE, WAYS

STEPS, TABLE = "steps.jsonl", "table.md"
HEAD = ("way", "score", "less re-prefill's", "KL of the first token", "other answers, %", "tokens a step",
        "% of re-prefill's", "steps")  # fmt: skip


class WayRow(NamedTuple):
    """One way over the steps that it answered; intervals resample episodes.

    Attributes:
      score, difference: by the data's rule, and less re-prefill's at the same steps.
      kl: KL(re-prefill of the window ‖ way) of the answer's first token, in nats.
      others: share of answers that differ from re-prefill's.
      tokens: computed a step. share: of re-prefill's at the same steps.
    """

    way: str
    score: Interval
    difference: Interval
    kl: Interval
    others: Interval
    tokens: Interval
    share: Interval


def rows_of(records: Sequence[Mapping[str, Any]]) -> list[WayRow]:
    """Makes a row for each way that answered a step."""
    steps: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for record in records:
        if "score" in record:
            steps.setdefault((record["episode"], record["step"]), {})[record["way"]] = record
    rows = []
    ways = dict.fromkeys([*WAYS, *(record["way"] for record in records if "way" in record)])
    for way in ways:
        pairs = [(own[way], own[REFERENCE]) for own in steps.values() if way in own]
        if not pairs:
            continue
        cluster = np.array([own["episode"] for own, _ in pairs])
        score, kl, agrees, tokens = (
            np.array([float(own[name]) for own, _ in pairs]) for name in ("score", "kl_first", "agrees", "tokens")
        )
        wanted, whole = (np.array([float(other[name]) for _, other in pairs]) for name in ("score", "tokens"))
        rows.append(
            WayRow(
                way,
                intervals.mean(score, cluster),
                intervals.paired_difference(score, wanted, cluster),
                intervals.mean(kl, cluster),
                intervals.mean(1 - agrees, cluster),
                intervals.mean(tokens, cluster),
                intervals.ratio(tokens, whole, cluster),
            )
        )
    return rows


def verdict(rows: Sequence[WayRow]) -> str:
    """Says in one line which way computes the fewest tokens, and which loses what beside re-prefill."""
    if not rows:
        return "no step was answered"
    least = min(rows, key=lambda row: row.share.value)
    said = [_loss(row) for row in rows if row.way != REFERENCE]
    return f"fewest tokens: {least.way}, {100 * least.share.value:.0f} % of re-prefill's; {'; '.join(said)}"


def _loss(row: WayRow) -> str:
    if row.others.value == 0 and row.difference.value == 0:
        lost = "answers as re-prefill"
    elif math.isnan(row.difference.low):
        lost = f"score {row.difference.value:+.3f} (one episode: no interval)"
    elif row.difference.low <= 0 <= row.difference.high:
        lost = f"score {row.difference.value:+.3f}, which cannot be told from 0"
    else:
        lost = f"score {row.difference.value:+.3f}"
    return f"{row.way}: {lost}, KL {row.kl.value:.2g}, {100 * row.share.value:.0f} % of the tokens"


def write_steps(finished: Sequence[Mapping[str, Any]], out: Path) -> str:
    """Writes steps.jsonl and table.md of finished episodes; returns the verdict and the table for a terminal."""
    records = records_in(finished)
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    rows = rows_of(records)
    cells = [
        [row.way, _cell(row.score), _cell(row.difference), _cell(row.kl, 1.0, 4), _cell(row.others, 100.0, 1),
         _cell(row.tokens, 1.0, 0), _cell(row.share, 100.0, 1), str(row.score.n)] for row in rows
    ]  # fmt: skip
    refused = [record for record in records if "refused" in record]
    left = "".join(f"- left out from step {own['step'] + 1} on: {own['where']}: {own['refused']}\n" for own in refused)
    said = verdict(rows)
    text = f"{said}\n\n{markdown_table(HEAD, cells)}\n"
    kinds = kind_table(records)
    if kinds is not None:
        text += f"\nScore, and KL of the first token, by kind of question:\n\n{markdown_table(*kinds)}\n"
    text += f"\n{left}" if left else ""
    for name, content in ((STEPS, lines), (TABLE, text)):
        replace(out / name, content.encode())
    return "\n".join([said, aligned_table(HEAD, cells), *([] if kinds is None else ["", aligned_table(*kinds)])])


def kinds_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists the kinds of questions that were answered, in the order in which they were asked."""
    return list(dict.fromkeys(record["kind"] for record in records if "score" in record))


def kind_table(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]] | None:
    """Returns every way's score and KL by kind: the head and the lines of a table; None of fewer than two kinds."""
    kinds = kinds_of(records)
    if len(kinds) < 2:
        return None
    lines = dict[str, list[str]]()
    for kind in kinds:
        own = rows_of([record for record in records if record.get("kind") == kind])
        for row in own:
            lines.setdefault(row.way, [row.way]).append(f"{_cell(row.score)}; {row.kl.value:.2g}")
    counts = [sum(record["kind"] == kind and record.get("way") == REFERENCE for record in records) for kind in kinds]
    head = ["way", *(f"{kind or 'others'}, {count}" for kind, count in zip(kinds, counts, strict=True))]
    return head, list(lines.values())


def _cell(interval: Interval, factor: float = 1.0, places: int = 3) -> str:
    value = f"{factor * interval.value:.{places}f}"
    if math.isnan(interval.low):
        return value
    return f"{value} [{factor * interval.low:.{places}f}, {factor * interval.high:.{places}f}]"
