"""Measures prompts of text and stored images: `python -m evals.prompt_reuse --out=DIR`.

MPIC's three insights, and VLCache's schedules on a proxy set beside static ratios. Parts are kept; the same command
resumes after them. `python -m evals.prompt_reuse.document DIR` writes the page.
"""

from . import startup_message as startup_message  # isort: split

from .. import extra as extra  # isort: split

from pathlib import Path

from absl import app, flags

from ..command_line import begin_program, errors_as_one_line
from ..results.parts import make_out
from ..results.tables import aligned_table
from ..runner import run_recorded
from .document import insights_table, schedules_table, sides_table
from .suite import FULL, QUICK, dataset

_OUT = flags.DEFINE_string("out", "out/prompt_reuse", "folder of the results")
_PARTS = flags.DEFINE_integer("parts", 0, "at most so many parts now, 0 for all", lower_bound=0)
_QUICK = flags.DEFINE_boolean("quick", False, "a preview, not a measurement")


def main(arguments: list[str]) -> None:
    """Measures, writes results.json, prints the tables."""
    begin_program(arguments)
    out = Path(_OUT.value)
    with errors_as_one_line():
        make_out(out)
        results = run_recorded(dataset(QUICK if _QUICK.value else FULL), out, _PARTS.value)
    for table in (insights_table(results), schedules_table(results), sides_table(results)):
        print(aligned_table(*table), end="\n\n")


if __name__ == "__main__":
    app.run(main)
