"""The page docs/experiments/tolerance.md, written from a run: `python -m evals.tolerance.document out/tolerance`."""

from collections.abc import Mapping
from typing import Any

from ..results.rows import Rows
from .contexts import TASKS
from .histories import KINDS, MEANS


def main_table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    probes = list(dict.fromkeys(row["probe"] for row in results["rows"] if "front=" in row["probe"]))
    lines = []
    for kind in (*KINDS, *MEANS):
        line = [kind]
        for probe in probes:
            rows = Rows(results, TASKS[probe.partition(".")[0]].backbone)
            kl, within = rows.get(probe, kind, "kl"), rows.get(probe, kind, "within")
            line.append("–" if not kl.n else f"{kl.value:.4f} {within.value:.0%}")
        lines.append(line)
    return ["KV formed behind", *probes], lines
