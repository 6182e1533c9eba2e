"""The results in docs/experiments/reading.md, written from a run: `python -m evals.reading.document out/reading`.

Keeps the rows that the page shows in docs/reading.json and writes its tables, and the sentences that state figures,
from them. A test compares the page with that file.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..pretrained.document import kept_rows, ordered, write_kept
from ..pretrained.report import show
from ..report.documents import ROOT, block, filled
from ..results.rows import Rows, without_nan
from ..results.tables import markdown_table
from . import fonts
from .suite import TASKS_READ

GUIDE, KEPT = Path("docs/experiments/reading.md"), Path("docs/reading.json")
BAR = 0.97
"""Of pieces in unseen fonts, the least share whose nearest embedding is the right one."""
PIECES = {
    "nearest": "nearest row of the whole table is the right one",
    "nearest_drawn": "nearest among the drawn pieces' rows",
    "missed": "squared distance, as a share of the embeddings' spread",
}
READ = {
    "tokens": "as tokens",
    "tokens, blind": "as tokens, reused blind",
    "image": "as images",
    "image, blind": "as images, reused blind",
}
AGAINST = {"kl": "KL, nats", "flips": "flips", "loss": "loss on the text", "greedy_tokens": "greedy tokens that agree"}
ARMS = {"eta": "η", "kl": "KL, nats", "flips": "flips", "loss_difference": "loss above re-prefill's"}
ANSWERED = {"right": "right", "tokens": "tokens", "agrees": "re-prefill's"}

TOKENS = "as tokens"
"""The arm of questions over the same pages as tokens; its reference is a re-prefill of its own."""


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Picks what the page shows out of results.json, numbers to five places."""
    wanted = {"pieces": PIECES, "as tokens": AGAINST, "text": ARMS, "greedy": ("greedy_tokens", "greedy_all")}
    wanted |= {f"behaviour.{task}": ANSWERED for task in TASKS_READ}
    tower = {name: results["config"]["tower"][name] for name in ("recipe", "versions")}
    return {
        "config": {"model": "reading", "tower": tower},
        "cpu_seconds": round(results["cpu_seconds"]),
        "rows": kept_rows({"rows": without_nan(results["rows"])}, wanted),
    }


def section(found: Mapping[str, Any]) -> str:
    """Writes the text between the page's marks from a summary."""
    rows = Rows(found)
    return "\n\n".join((*_pieces(rows), *_against_tokens(rows), *_arms(rows), *_answers(rows)))


def _pieces(rows: Rows) -> Iterator[str]:
    lines = []
    for metric, title in PIECES.items():
        lines.append([title, *(show(rows.get("pieces", arm, metric)) for arm in ("seen", "unseen"))])
    yield markdown_table(["", "seen fonts", "unseen fonts"], lines)
    unseen = rows.get("pieces", "unseen", "nearest")
    faces = {name: rows.get("pieces", f"unseen.{name}", "nearest").value for name in fonts.UNSEEN}
    faces = {name: value for name, value in faces.items() if value == value}
    best, worst = max(faces, key=faces.__getitem__), min(faces, key=faces.__getitem__)
    met = "met" if unseen.value >= BAR else "**missed**"
    yield filled(
        f"The bar, the nearest row of the whole table right for {BAR:.0%} of pieces in unseen fonts, is {met}: "
        f"{show(unseen)}. Of unseen families {best} is read best ({faces[best]:.3f}), "
        f"{worst} worst ({faces[worst]:.3f})."
    )


def _against_tokens(rows: Rows) -> Iterator[str]:
    n = rows.get("as tokens", "image", "kl").n
    yield filled(f"Against the same pages as tokens, {n} pages:")
    lines = []
    for arm, what in READ.items():
        if rows.get("as tokens", arm, "loss").n:
            lines.append([what, *_shown(rows, "as tokens", arm, AGAINST)])
    yield markdown_table(["", *AGAINST.values()], lines)
    loss = {arm: rows.get("as tokens", arm, "loss").value for arm in READ}
    yield filled(
        f"Images in place of tokens cost {loss['image'] - loss['tokens']:.3f} nats a token of the text after them; "
        f"blind reuse costs {loss['tokens, blind'] - loss['tokens']:.3f} of tokens and "
        f"{loss['image, blind'] - loss['image']:.3f} of images. Greedy continuations after images are counted "
        "up to the first token that differs from those after tokens."
    )


def _arms(rows: Rows) -> Iterator[str]:
    n = rows.get("text", "blind", "kl").n
    yield filled(f"Pages as images, reused, against a re-prefill of the images, {n} pages, what removes most first:")
    lines = [[f"`{arm}`", *_shown(rows, "text", arm, ARMS)] for arm in ordered(rows, "text")]
    yield markdown_table(["arm", *ARMS.values()], lines)


def _shown(rows: Rows, probe: str, arm: str, metrics: Iterable[str]) -> list[str]:
    """Formats an arm's metrics with their intervals."""
    return [show(rows.get(probe, arm, metric)) for metric in metrics]


def _answers(rows: Rows) -> Iterator[str]:
    """Shows questions over two pages, a line per arm."""
    tasks = [task for task in TASKS_READ if rows.arms(f"behaviour.{task}")]
    if not tasks:
        return

    probes = [f"behaviour.{task}" for task in tasks]
    counts = [str(rows.get(probe, "blind", "right").n) for probe in probes]
    yield filled(
        f"Questions over two pages ({', '.join(counts)}): shares of answers that are right, of their tokens that are, "
        "and of answers equal to re-prefill's."
    )
    lines = []
    for arm in dict.fromkeys(itertools.chain.from_iterable(map(rows.arms, probes))):
        cells = []
        for probe, metric in itertools.product(probes, ANSWERED):
            interval = rows.get(probe, arm, metric)
            # Tokens have another reference than images.
            missing = (arm, metric) == (TOKENS, "agrees") or not interval.n
            cells.append("–" if missing else f"{interval.value:.2f}")
        lines.append([f"`{arm}`", *cells])

    columns = itertools.product(tasks, ANSWERED.values())
    yield markdown_table(["arm", *(f"{task}: {title}" for task, title in columns)], lines)


def write(results: Mapping[str, Any], root: Path = ROOT) -> None:
    """Writes a run into the page and docs/reading.json."""
    found = summary(results)
    guide = block(section(found), root / GUIDE)
    write_kept(found, root / KEPT)
    (root / GUIDE).write_text(guide, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m evals.reading.document DIR; DIR holds a run's results.json")
    write(json.loads((Path(sys.argv[1]) / "results.json").read_text(encoding="utf-8")))
