"""The tables of docs/repairs.md, written from a run: `python -m evals.repairs.document out/repairs`.

Keeps the rows that the page shows in docs/repairs.json. A test compares the page with that file.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.frame import Rows, rounded_row
from ..harness.intervals import Interval
from ..harness.tables import aligned_table, markdown_table
from ..report.documents import ROOT, block
from ..small_task.reader import EVICTED, VISIBLE
from .arms import GEOMETRY_SHARE, SHARES, VARIANTS

PAGE, KEPT = Path("docs/repairs.md"), Path("docs/repairs.json")
KIND = "chain"
"""The questions that need legend and page both, which blind reuse loses."""
METRICS = (f"eta.{KIND}", f"patch_minus.kl.{KIND}")
FIRST_METRICS = (f"accuracy.{KIND}", "flops", "stored_bytes", "moved_bytes")
"""Shown of the first backbone alone, with the legends in view."""
LABELS = {
    "patched": "patch (rank by bytes)",
    "quantised": "KV in few bits (KIVI)",
    "low_rank": "KV of low rank",
    "first_k": "first k (EPIC, MPIC)",
    "vlcache": "VLCache, dynamic",
    "cacheblend": "CacheBlend, one check",
    "cacheblend_gradual": "CacheBlend, gradual",
    "kvshare": "KVShare",
    "infoflow": "InfoFlow KV",
    "prophetkv": "ProphetKV",
    "quest": "Quest's pages",
    "prcr": "PRCR",
    "random_tokens": "random tokens",
    "oracle_delta": "oracle: largest Δ",
}
Table = tuple[list[str], list[list[str]]]


def models_of(results: Mapping[str, Any]) -> list[str]:
    """Lists the backbones of a run, in its order."""
    return list(dict.fromkeys(row["model"] for row in results["rows"]))


def shares_table(results: Mapping[str, Any], probe: str = VISIBLE) -> Table:
    """Makes the table of η by budget, of the first backbone."""
    rows, lines = Rows(results, models_of(results)[0]), []
    for method, label in LABELS.items():
        cells = [_with_interval(rows.get(probe, f"{method}.budget={share:g}", f"eta.{KIND}")) for share in SHARES]
        lines.append([label, *cells])
    return ["method", *(f"{share:.0%}" for share in SHARES)], lines


def costs_table(results: Mapping[str, Any], share: float = 0.15) -> Table:
    """Makes the table of costs at one budget, of the first backbone: shares of the page's KV and of its re-prefill."""
    rows, lines = Rows(results, models_of(results)[0]), []
    named = [(f"{method}.budget={share:g}", label) for method, label in LABELS.items()]
    named += [("blind", "blind"), ("attention_sink", "attention sink"), ("prefix_caching", "prefix caching")]
    named += [("encoder_cached_reprefill", "re-prefill, features kept"), ("full_reprefill", "re-prefill, nothing kept")]
    for arm, label in named:
        found = [rows.get(VISIBLE, arm, metric) for metric in ("flops", "stored_bytes", "moved_bytes")]
        lines.append([label, *(f"{cost.value:.1%}" if cost.n else "–" for cost in found)])
    return ["method", "FLOPs of one reuse", "bytes stored", "bytes moved"], lines


def backbones_table(results: Mapping[str, Any], share: float = 0.15) -> Table:
    """Makes the table of η at one budget on every backbone."""
    models, lines = models_of(results), []
    for method, label in LABELS.items():
        cells = [
            _bare(Rows(results, model).get(VISIBLE, f"{method}.budget={share:g}", f"eta.{KIND}")) for model in models
        ]
        lines.append([label, *cells])
    return ["method", *models], lines


def versus_table(results: Mapping[str, Any]) -> Table:
    """Counts by budget, over backbones and probes, where patch or method is nearer by the interval at equal bytes."""
    settings = [(Rows(results, model), probe) for model in models_of(results) for probe in (VISIBLE, EVICTED)]
    lines = []
    for method, label in LABELS.items():
        if method == "patched":
            continue
        cells = []
        for share in SHARES:
            found = [
                rows.get(probe, f"{method}.budget={share:g}", f"patch_minus.kl.{KIND}") for rows, probe in settings
            ]
            found = [interval for interval in found if interval.n]
            patch, other = sum(own.high < 0 for own in found), sum(own.low > 0 for own in found)
            cells.append(f"{patch} : {other} : {len(found) - patch - other}" if found else "–")
        lines.append([label, *cells])
    return ["against", *(f"{share:.0%}" for share in SHARES)], lines


def infoflow_table(results: Mapping[str, Any]) -> Table:
    """Makes the table of InfoFlow KV's geometries and scores: the first backbone, and the range over all."""
    models = models_of(results)
    named = [("GLOBAL, attention mass", "infoflow"), *((name.partition(".")[2], name) for name in VARIANTS)]
    named += [(LABELS[method], method) for method in ("cacheblend", "first_k")]
    lines = []
    for label, method in named:
        arm = f"{method}.budget={GEOMETRY_SHARE:g}"
        own = [Rows(results, model).get(VISIBLE, arm, f"eta.{KIND}") for model in models]
        first = Rows(results, models[0]).get(VISIBLE, arm, f"accuracy.{KIND}")
        defined = [found.value for found in own if found.n and found.value == found.value]
        spread = f"{min(defined):.2f} to {max(defined):.2f}" if defined else "–"
        lines.append([label, _with_interval(own[0]), f"{first.value:.0%}" if first.n else "–", spread])
    return ["method", f"η, {models[0]}", "accuracy", "η over backbones"], lines


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """Writes the text between each pair of the page's marks."""
    return {
        "shares": markdown_table(*shares_table(kept)),
        "costs": markdown_table(*costs_table(kept)),
        "backbones": markdown_table(*backbones_table(kept)),
        "versus": markdown_table(*versus_table(kept)),
        "infoflow": markdown_table(*infoflow_table(kept)),
    }


def printed(results: Mapping[str, Any]) -> str:
    """Writes what the program prints: η by budget, and costs."""
    return f"{aligned_table(*shares_table(results))}\n\n{aligned_table(*costs_table(results))}"


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Picks what the page shows out of results.json."""
    first, rows = models_of(results)[0], []
    for row in results["rows"]:
        of_first = row["metric"] in FIRST_METRICS and (row["model"], row["probe"]) == (first, VISIBLE)
        if of_first or row["metric"] in METRICS:
            rows.append(row)
    config = {name: results["config"][name] for name in ("model", "plan", "seed", "questions", "parts_done", "parts")}
    return {"config": config, "rows": [rounded_row(row) for row in rows]}


def write(folder: Path, root: Path = ROOT) -> None:
    """Puts a run into the page and docs/repairs.json."""
    kept = summary(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    (root / KEPT).write_text(json.dumps(kept, separators=(",", ":")) + "\n", encoding="utf-8")
    for mark, text in sections(kept).items():
        (root / PAGE).write_text(block(text, root / PAGE, mark), encoding="utf-8")


def _with_interval(found: Interval) -> str:
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]" if found.n and found.value == found.value else "–"


def _bare(found: Interval) -> str:
    return f"{found.value:.2f}" if found.n and found.value == found.value else "–"


def main(arguments: Sequence[str]) -> None:
    """Writes the page from the folder of a run."""
    write(Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv)
