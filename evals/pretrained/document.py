"""The page docs/experiments/pretrained.md: what the suite on real weights found, written from a run.

    python -m evals.pretrained.document out/pretrained

keeps the rows that the page shows in docs/pretrained.json, draws its figures, and writes the page from these rows.
"""

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..results.rows import Rows
from ..results.tables import markdown_table
from .arms import COSTS
from .plan import TASKS
from .report import PERCENT, counted, draw_figures, show, verdict
from .rows import EVERY_ARM

DOCS = Path(__file__).parents[2] / "docs"
SUMMARY, PAGE, PICTURES = "pretrained.json", "experiments/pretrained.md", "pictures"
PATCH = "patch.rank=16"
"""The patch that others are held against."""
FIGURES = {
    "stored": "What an arm removes of blind reuse's KL, against what it keeps: above for this place of reuse alone, "
    "below with what it needs of the canonical, which all places share. Bars: 95 %, documents resampled. What "
    "raises the KL far is below the frame.",
    "serving": "The same against FLOPs of a reuse, with what is paid once shared by 1, 3 and 10 reuses.",
    "depth": "The deficit by layer, ‖Δ‖ / ‖KV‖, of keys and of values.",
}
SHOWN = ("eta", "kl", "flips", "loss_difference", "canonical", "stored", "serving", "forming")
HEADS = {
    "eta": "η",
    "kl": "KL, nats",
    "flips": "flips, %",
    "loss_difference": "loss above re-prefill's",
    "canonical": "canonical kept, %",
    "stored": "stored beside it, %",
    "serving": "FLOPs of a reuse, %",
    "forming": "FLOPs once, %",
}
PARTS_OF_HUNDRED = (*PERCENT, "forming")
PROBES = {
    "reorder": "Other orders in front",
    "drift.dropped and doubled": "One piece in front dropped, one doubled",
    "drift.replaced 1": "One of three pieces in front replaced",
    "drift.replaced 3": "All pieces in front replaced",
    "slide": "The first piece leaves",
}


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Picks what the page shows out of results.json, numbers to five places."""
    wanted = {
        "text": {*SHOWN, "loss"},
        EVERY_ARM: {*SHOWN, "documents"},
        "deficit": {"relative_norm"},
        "greedy": {"greedy_tokens", "greedy_all"},
    }
    wanted |= {f"behaviour.{task}": {"right", "chosen", "tokens", "agrees"} for task in TASKS}
    wanted |= {probe: {"eta", "kl", "flips", "loss_difference"} for probe in PROBES}
    short = lambda value: None if value is None else round(value, 5)
    rows = [
        {**row, **{end: short(row[end]) for end in ("value", "low", "high")}}
        for row in results["rows"]
        if row["metric"] in wanted.get(row["probe"], ())
    ]
    config = {name: results["config"][name] for name in ("model", "parts_done", "parts", "plan", "licences")}
    return {"config": config, "cpu_seconds": round(results["cpu_seconds"]), "rows": rows}


def page(found: Mapping[str, Any]) -> str:
    """Writes the page from a summary."""
    rows, config = Rows(found), found["config"]
    blocks = ["# Real weights", verdict(rows), _measured(rows, config, found["cpu_seconds"]), *_arms(rows)]
    blocks += [_picture("stored"), _picture("serving"), *_plain(rows), *_depth(rows), *_others(rows)]
    packages = "; ".join(f"{name}: {licence}" for name, licence in config["licences"].items())
    blocks.append(f"Text and its licences: {packages}. Weights: {config['model']}.")
    return "\n\n".join(_filled(block) for block in blocks) + "\n"


def _filled(block: str) -> str:
    if block.startswith(("|", "#", "!", "<!--")):
        return block
    return textwrap.fill(block, 118, break_on_hyphens=False, break_long_words=False)


def _measured(rows: Rows, config: Mapping[str, Any], seconds: int) -> str:
    """How much was measured, and by which command."""
    said = (
        f"`python -m evals.run --suite=pretrained`, written by `python -m evals.pretrained.document`; {seconds} CPU s."
    )
    if config["parts_done"] < config["parts"]:
        said = (
            f"**Not finished: {config['parts_done']} of {config['parts']} parts were run**, "
            f"{rows.get('text', 'blind', 'kl').n} passages. Intervals "
            f"over so few documents are themselves uncertain. {said}"
        )
    return said


def ordered(rows: Rows) -> list[str]:
    """The arms, those that remove most of blind reuse's KL first."""
    arms = [arm for arm in rows.arms(EVERY_ARM) if arm != "re-prefill" and rows.get(EVERY_ARM, arm, "eta").n]
    return sorted(arms, key=lambda arm: -rows.get(EVERY_ARM, arm, "eta").value)


def _arms(rows: Rows) -> Iterator[str]:
    arms = ordered(rows)
    own = rows.get(EVERY_ARM, PATCH, "eta")
    ahead = [arm for arm in arms[: arms.index(PATCH)] if not arm.startswith("patch.")] if PATCH in arms else []
    clear = [arm for arm in ahead if rows.get(EVERY_ARM, arm, "eta").low > own.high]
    yield "## Every arm, what removes most first"
    documents = rows.get(EVERY_ARM, "blind", "documents").n
    yield (
        f"All arms were measured on few passages, {counted(rows)}. Intervals resample documents, and {documents} are "
        "so few that the intervals are rough themselves."
    )
    if PATCH in arms:
        names = ", ".join(f"{arm}{'' if arm in clear else ' (intervals overlap)'}" for arm in ahead) or "none"
        stored = 100 * rows.get("text", PATCH, "stored").value
        yield (
            f"The patch of rank 16 stores {stored:.0f} % of the passage's KV beside the canonical and removes η "
            f"{show(own, places=2)}. Arms of other kinds that remove more: {names}."
        )
        yield from _places(rows)
    cells = lambda arm, name: show(
        rows.get("text" if name in COSTS else EVERY_ARM, arm, name),
        *((100.0, 1) if name in PARTS_OF_HUNDRED else (1.0, 3)),
    )
    count = lambda arm: f"{rows.get(EVERY_ARM, arm, 'eta').n} ({documents})"
    lines = [[arm, *(cells(arm, name) for name in SHOWN), count(arm)] for arm in arms]
    yield markdown_table(["arm", *(HEADS[name] for name in SHOWN), "passages (documents)"], lines)
    yield (
        "Shares are of the passage's KV at 16 bits, and of re-prefilling it. A passage's tokens, from which it is run "
        "again, are ids, and count as nothing beside it. `canonical kept`: one for all places of "
        "reuse. Arms `kv.…` and `shadowkv` keep KV(B|A) of one place in its stead; `residual.layer=…` keeps the "
        "residual that entered a layer in place of the KV above it. What the arms are: "
        "[Evaluation](evaluation.md#real-weights)."
    )


def _places(rows: Rows) -> Iterator[str]:
    """From how many places of reuse on the patch and its canonical are fewer bytes than KV(B|A) at four bits."""
    bits = "kv.bits=4"
    few, patch = (rows.get("text", arm, "stored").value for arm in (bits, PATCH))
    if np.isfinite(few):
        first = (
            f"Where a passage is reused at one place alone, {bits} keeps {100 * few:.0f} % of its KV and the patch of "
            f"rank 16 with its canonical {100 * (1 + patch):.0f} %"
        )
        if few > patch:
            places = int(1 / (few - patch)) + 1
            yield f"{first}; from {places} places on, which share the canonical (16 bits), the patch keeps fewer bytes."
        else:
            yield f"{first}, and each further place takes the patch no fewer bytes."


def _picture(name: str) -> str:
    return f"![{FIGURES[name]}](../pictures/pretrained_{name}.png)"


def _plain(rows: Rows) -> Iterator[str]:
    """How small the practical loss is."""
    yield "## How little plain text loses"
    lines = []
    for arm in ("blind", "patch.rank=8", PATCH, "patch.rank=32"):
        get = lambda metric, arm=arm: rows.get("text", arm, metric)
        lines.append(
            [arm, show(get("loss")), show(get("loss_difference")), show(get("kl")), show(get("flips"), 100.0, 1)]
        )
    first = rows.get("text", "re-prefill", "loss")
    lines.insert(0, ["re-prefill", show(first), "–", "–", "–"])
    yield markdown_table(["arm", "cross-entropy, nats a token", "above re-prefill's", "KL", "flips, %"], lines)


def _depth(rows: Rows) -> Iterator[str]:
    yield "## The deficit by depth"
    layers = sorted({int(arm.removeprefix("layer=").partition(".")[0]) for arm in rows.arms("deficit", "layer=")})
    if not layers:
        return
    picked = sorted({layers[round(share * (len(layers) - 1))] for share in np.linspace(0, 1, 7)})
    lines = [
        [
            channel,
            *(show(rows.get("deficit", f"layer={layer}.{channel}", "relative_norm"), places=2) for layer in picked),
        ]
        for channel in ("k", "v")
    ]
    yield markdown_table(["‖Δ‖ / ‖KV‖", *(f"layer {layer}" for layer in picked)], lines)
    yield _picture("depth")


def _others(rows: Rows) -> Iterator[str]:
    """Greedy continuations, behaviour and windows, of what was run."""
    tables = {"Greedy continuations": ("greedy", ("greedy_tokens", "greedy_all"))}
    tables |= {f"Behaviour: {task}": (f"behaviour.{task}", ("right", "chosen", "tokens", "agrees")) for task in TASKS}
    tables |= {title: (probe, ("eta", "kl", "flips", "loss_difference")) for probe, title in PROBES.items()}
    missing = []
    for title, (probe, metrics) in tables.items():
        if not rows.arms(probe):
            missing.append(title[0].lower() + title[1:])
            continue
        yield f"## {title}"
        yield _table(rows, probe, metrics)
    if missing:
        yield f"Built, and not among the parts that were run: {'; '.join(missing)}."


def _table(rows: Rows, probe: str, metrics: Sequence[str]) -> str:
    arms = [arm for arm in rows.arms(probe) if any(rows.get(probe, arm, name).n for name in metrics)]
    used = [name for name in metrics if any(rows.get(probe, arm, name).n for arm in arms)]
    named = {"greedy_tokens": "tokens up to the first that differs", "greedy_all": "whole continuations that agree"}
    lines = []
    for arm in arms:
        found = [rows.get(probe, arm, name) for name in used]
        shown = [show(one, 100.0, 1) if name == "flips" else show(one) for name, one in zip(used, found, strict=True)]
        lines.append([arm, *shown, str(max(interval.n for interval in found))])
    return markdown_table(["arm", *(named.get(name, HEADS.get(name, name)) for name in used), "n"], lines)


def write(out: Path, docs: Path = DOCS) -> Path:
    """Writes summary, figures and page from a run's results.json; returns the page."""
    found = summary(json.loads((out / "results.json").read_text(encoding="utf-8")))
    head = {name: value for name, value in found.items() if name != "rows"}
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in found["rows"])
    text = f'{json.dumps(head, ensure_ascii=False)[:-1]}, "rows": [\n{rows}\n]}}\n'
    (docs / SUMMARY).write_text(text, encoding="utf-8")
    (docs / PICTURES).mkdir(exist_ok=True)
    draw_figures(Rows(found), docs / PICTURES, FIGURES, "pretrained_")
    (docs / PAGE).parent.mkdir(exist_ok=True)
    (docs / PAGE).write_text(page(json.loads(text)), encoding="utf-8")
    return docs / PAGE


if __name__ == "__main__":
    print(f"page: {write(Path(sys.argv[1]))}")
