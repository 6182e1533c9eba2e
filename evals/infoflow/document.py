"""The tables of docs/experiments/infoflow.md, written from a run: `python -m evals.infoflow.document out/infoflow`.

Keeps the rows in docs/infoflow.json. A test compares the page with that file.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.frame import Rows, rounded_row
from ..harness.intervals import Interval
from ..harness.tables import markdown_table
from ..report.documents import ROOT, block
from ..tolerance.contexts import DECODER
from .plan import GEOMETRIES, IMAGE_METHODS, METHODS, PASSAGES, REORDER, REORDERED_BASELINE, SPLITS, arm_name
from .suite import ALL, IMAGE, OURS, TEXT

PAGE, KEPT = Path("docs/experiments/infoflow.md"), Path("docs/infoflow.json")
KINDS = ("page", "chain", ALL)
"""Kinds of question about images: of the page alone, of page and legends, all."""
TEXT_METRICS = ("kl", "eta", "flips", "accuracy", "mom", "max", "near", "minus_infoflow.kl")
IMAGE_METRICS = ("count", *(f"{metric}.{kind}" for metric in ("kl", "eta", "flips", "accuracy") for kind in KINDS))
LABELS = {
    "blind": "No Recompute",
    "infoflow": "Our: InfoFlow KV, attention mass",
    "infoflow.norm": "released code: norm (language models)",
    "infoflow.head_norm": "released code: norm over heads (images)",
    "infoflow.head_entropy": "released code: entropy over heads (images)",
    REORDER: "Our + Reorder",
    REORDERED_BASELINE: "full-context prefill in that order",
    "cacheblend": "CacheBlend, one check",
    "cacheblend_gradual": "CacheBlend, gradual",
    "first_k": "EPIC (15 %)",
    "random_tokens": "random tokens",
}
Table = tuple[list[str], list[list[str]]]
Results = Mapping[str, Any]


def methods_table(results: Results) -> Table:
    """Makes the table of methods on texts, by split and task: η with its interval, and KL (their Table 3)."""
    rows, lines = Rows(results, DECODER), []
    probes = _text_probes(results)
    for split in SPLITS:
        for method in (*METHODS, REORDER, REORDERED_BASELINE):
            arm = arm_name(split, method)
            found = [(rows.get(probe, arm, "kl"), rows.get(probe, arm, "eta")) for probe in probes]
            if any(kl.n for kl, _ in found):
                minus = rows.get(f"{TEXT}.{ALL}", arm, "minus_infoflow.kl")
                versus = _signed(minus) if method != OURS else "–"
                lines.append([split, LABELS[method], *(_kl_and_eta(*cell) for cell in found), versus])
    return ["split", "method", *(probe.removeprefix(f"{TEXT}.") for probe in probes), "KL minus Our's, all"], lines


def geometry_table(results: Results) -> Table:
    """Makes the table of positions while tokens are scored (their Table 1)."""
    rows, probes = Rows(results, DECODER), _text_probes(results)
    lines = []
    for geometry in (*GEOMETRIES, "global"):
        arm = arm_name(PASSAGES, "infoflow" if geometry == "global" else f"infoflow.{geometry}")
        cells = [_kl_and_eta(rows.get(probe, arm, "kl"), rows.get(probe, arm, "eta")) for probe in probes]
        minus = rows.get(f"{TEXT}.{ALL}", arm, "minus_infoflow.kl")
        versus = "–" if geometry == "global" else _signed(minus)
        lines.append([geometry.upper().replace("_", "-"), *cells, versus])
    return ["positions", *(probe.removeprefix(f"{TEXT}.") for probe in probes), "KL minus GLOBAL's"], lines


def image_table(results: Results, probes: Sequence[str] | None = None) -> Table:
    """Makes the table of one image cut into parts (their Table 4): right answers, flips, KL and η, by backbone.

    Args:
      probes: the cuts that are shown; None: all.
    """
    models = _image_models(results)
    lines = []
    for probe in _image_probes(results) if probes is None else probes:
        for arm in ("baseline", *IMAGE_METHODS):
            cells, counts = [], []
            for model in models:
                rows = Rows(results, model)
                right, eta = rows.get(probe, arm, f"accuracy.{ALL}"), rows.get(probe, arm, f"eta.{ALL}")
                kl, flips = rows.get(probe, arm, f"kl.{ALL}"), rows.get(probe, arm, f"flips.{ALL}")
                said = f"{right.value:.1%}, {flips.value:.1%}" if right.n else "–"
                cells += [said, _kl_and_eta(kl, eta) if eta.n else "–"]
                counts.append(rows.get(probe, arm, "count"))
            if any(count.n for count in counts):
                label = "Baseline: full-context prefill" if arm == "baseline" else LABELS[arm]
                tokens = " / ".join(f"{count.value:.0f}" for count in counts)
                lines.append([probe.partition("=")[2], label, tokens, *cells])
    heads = [f"{model}, {what}" for model in models for what in ("right, flips", "KL, η")]
    return ["parts", "method", "tokens", *heads], lines


def _text_probes(results: Results) -> list[str]:
    return list(dict.fromkeys(row["probe"] for row in results["rows"] if row["probe"].startswith(f"{TEXT}.")))


def _image_probes(results: Results) -> list[str]:
    found = {row["probe"] for row in results["rows"] if row["probe"].startswith(f"{IMAGE}.")}
    return sorted(found, key=lambda probe: int(probe.partition("=")[2]))


def _shown_cuts(results: Results) -> list[str]:
    """Picks the full-context prefill, the whole image and the one in most parts."""
    probes = _image_probes(results)
    return list(dict.fromkeys([*probes[:2], *probes[-1:]]))


def _image_models(results: Results) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in results["rows"] if row["probe"].startswith(f"{IMAGE}.")))


def _kl_and_eta(kl: Interval, eta: Interval) -> str:
    """Writes KL in nats, and η with its interval."""
    if not kl.n:
        return "–"
    if not math.isfinite(eta.value):
        return f"{kl.value:.2g}"
    if not math.isfinite(eta.low):
        return f"{kl.value:.2g}; {eta.value:.2f}"
    return f"{kl.value:.2g}; {eta.value:.2f} [{eta.low:.2f}, {eta.high:.2f}]"


def _signed(found: Interval) -> str:
    return f"{found.value:+.2g} [{found.low:+.2g}, {found.high:+.2g}]" if found.n else "–"


def sections(kept: Results) -> dict[str, str]:
    """Writes the text between each pair of the page's marks."""
    return {
        "methods": markdown_table(*methods_table(kept)),
        "geometries": markdown_table(*geometry_table(kept)),
        "images": markdown_table(*image_table(kept, _shown_cuts(kept))),
    }


def summary(results: Results) -> dict[str, Any]:
    """Picks what the page shows out of results.json."""
    kept = {TEXT: TEXT_METRICS, IMAGE: IMAGE_METRICS}
    rows = [rounded_row(row) for row in results["rows"] if row["metric"] in kept[row["probe"].partition(".")[0]]]
    config = {name: results["config"][name] for name in ("model", "plan", "parts_done", "parts")}
    return {"config": config, "cpu_seconds": round(results["cpu_seconds"]), "rows": rows}


def write(folder: Path, root: Path = ROOT) -> None:
    """Puts a run into the page and docs/infoflow.json."""
    kept = summary(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    (root / KEPT).write_text(json.dumps(kept, separators=(",", ":")) + "\n", encoding="utf-8")
    for mark, text in sections(kept).items():
        (root / PAGE).write_text(block(text, root / PAGE, mark), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Writes the page from the folder of a run."""
    write(Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv)
