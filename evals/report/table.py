"""The main comparison as a short Markdown table: what the README shows, from the same results."""

from pathlib import Path

from ..results.rows import Rows
from ..results.tables import markdown_table
from ..small_task import KINDS
from .figures import Results, arm_label
from .wording import show

ARMS = (
    "re-prefill",
    "blind",
    "patch.rank=4",
    "patch.rank=8",
    "patch.rank=16",
    "first_k.bytes_of_rank=8",
    "cacheblend.bytes_of_rank=8",
    "oracle_delta.bytes_of_rank=8",
    "first_k.budget=0.5",
    "cacheblend.budget=0.5",
    "oracle_delta.budget=0.5",
)


def write_table(results: Results, path: Path, probe: str = "repair.visible") -> Path:
    """Writes accuracy with 95 % intervals per arm and kind, KL of chain questions and the share of KV bytes."""
    rows = Rows(results)
    head = ["way of reuse", "bytes", *KINDS, "KL, chain"]
    lines = []
    for arm in ARMS:
        share = rows.get(probe, arm, "bytes").value
        accuracy = [show(rows.get(probe, arm, f"accuracy.{kind}")) for kind in KINDS]
        lines.append([arm_label(arm), f"{share:.0%}", *accuracy, show(rows.get(probe, arm, "kl.chain"))])
    path.write_text(markdown_table(head, lines) + "\n", encoding="utf-8")
    return path
