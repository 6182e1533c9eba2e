"""What trained transitions keep: `python -m evals.probes.transitions --backbone=sheets_qwen3_5`.

Of every chunk of held-out contexts of the sheets task, layer by layer and head by head: how much of a state its map
lets through (the largest singular value of M), how many directions hold 99.9 % of the energy of M and of B, and how
much of the state behind it comes from what is in front. Leaves results.json and table.md in --out.
"""

from ... import extra as extra  # isort: split

from pathlib import Path
from typing import Any

from absl import app, flags

from models import load

from ...command_line import errors_as_one_line
from ...compilation import use_compilation_cache
from ...console import quiet_backends
from ...results.environment import environment
from ...results.parts import make_out
from ...results.rows import write_rows
from ...rules import RULES
from ...sheets_task.dataset import SHEETS_DATASET
from .map_statistics import SHARE, measure, table

_BACKBONE = flags.DEFINE_string("backbone", "sheets_qwen3_5", "an instance of the sheets task, or a directory")
_OUT = flags.DEFINE_string("out", "out/transitions", "folder of results.json and table.md")
_SEED = flags.DEFINE_integer("seed", RULES.seed, "of the held-out contexts")
_CONTEXTS = flags.DEFINE_integer("contexts", 16, "of each size", lower_bound=2)


def main(arguments: list[str]) -> None:
    """Measures every instance that is asked for."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}; see --help")

    quiet_backends()
    use_compilation_cache()
    folder, rows, texts = Path(_OUT.value), [], []
    with errors_as_one_line():
        paths = SHEETS_DATASET.instances(_BACKBONE.value)
        make_out(folder)
        for path in paths:
            own = measure(load(path, dtype="float32"), path.name, SHEETS_DATASET, _SEED.value, _CONTEXTS.value)
            texts.append(f"{path.name}\n\n{table(own)}")
            rows += own

    config: dict[str, Any] = {"seed": _SEED.value, "contexts": _CONTEXTS.value, "share": SHARE}
    write_rows({"config": config, "environment": environment(), "rows": rows}, folder)
    text = "\n\n".join(texts)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(f"{text}\nresults: {folder / 'results.json'}")


if __name__ == "__main__":
    app.run(main)
