"""Replays traces of agents' windows in every way of serving them: `python -m evals.replay --kind=all --out=out/replay`.

A trace is drawn (`--kind`), or was recorded (`--trace=FILE`, as `kvpatch_jax.session.Recorder` writes it). It is
answered by re-prefill, behind a prefix cache (also with batched eviction, and with placeholders and all texts kept),
by a window without patches, with patches at the first meeting and when all was met before, and blind.
Printed are which way is the cheapest, then forwards, tokens computed, FLOPs, bytes of KV, programs compiled,
KL and flips against what the window promises; `--out` gets them as JSON and Markdown, with figures.

`--imported` replays 200 steps of two public trace formats in all these ways, lengths divided by `--factor`, beside the
prices of every step.

`--cheapest` prices 200 steps of two public trace formats in every way by formulas, and runs no model.
"""

from . import extra as extra  # isort: split

import json
from pathlib import Path
from typing import Any

from absl import app, flags

from kvpatch_jax.errors import InputError
from models import load

from .command_line import errors_as_one_line
from .compilation import use_compilation_cache
from .console import quiet_backends
from .harness.parts import make_out
from .harness.tables import aligned_table, markdown_table
from .small_task import VOCABULARY
from .task_language import check_language
from .traces import KINDS, STEPS, generate, load_trace
from .traces.cheapest import STEPS as IMPORTED_STEPS
from .traces.cheapest import run as run_cheapest
from .traces.figures import draw
from .traces.imported_replay import FACTOR, WINDOW_CHUNKS
from .traces.imported_replay import run as run_imported
from .traces.replay_run import RANK, out_of, rank_table, replay, table, winners
from .trained import MAIN, shipped, shipped_names

_TRACE = flags.DEFINE_string("trace", None, "a trace to replay, in place of drawing one")
_KIND = flags.DEFINE_list("kind", ["all"], f"traces to draw: all, or some of {', '.join(KINDS)}")
_MODEL = flags.DEFINE_string("model", MAIN, "a shipped instance (a folder of evals/trained), or a checkpoint directory")
_OUT = flags.DEFINE_string("out", "out/replay", "folder for traces, images, results and figures")
_SEED = flags.DEFINE_integer("seed", 0, "of what is drawn")
_STEPS = flags.DEFINE_integer("steps", STEPS, "questions of a drawn trace", lower_bound=1)
_RANK = flags.DEFINE_integer("rank", RANK, "of the patches", lower_bound=1)
_CHEAPEST = flags.DEFINE_bool(
    "cheapest", False, "price both imported formats by formulas: which way is the cheapest at each step"
)
_IMPORTED = flags.DEFINE_bool("imported", False, "replay both imported formats, bounded to --window, through --model")
_WINDOW = flags.DEFINE_integer("window", WINDOW_CHUNKS, "chunks in the window of imported traces", lower_bound=1)
_FACTOR = flags.DEFINE_integer("factor", FACTOR, "tokens of an imported trace for one replayed", lower_bound=1)


def main(arguments: list[str]) -> None:
    """Parses flags, replays, writes, prints."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}; see --help")

    quiet_backends()
    out = Path(_OUT.value)
    if _CHEAPEST.value:
        with errors_as_one_line():
            make_out(out)
            print(run_cheapest(out))
        return

    if _IMPORTED.value:
        use_compilation_cache()
        with errors_as_one_line():
            make_out(out)
            backbone = load(shipped(_MODEL.value), dtype="float32")
            sizes = _steps_of_imported(), _SEED.value, _WINDOW.value, _FACTOR.value
            print(run_imported(out, backbone, Path(_MODEL.value).name, *sizes))
        return

    with errors_as_one_line():
        make_out(out)
        kinds = _kinds()
        recorded = None if _TRACE.value is None else load_trace(Path(_TRACE.value))
        path = shipped(_MODEL.value)
        # What is drawn is asked in the small task's words; a recorded trace brings its own.
        if recorded is None:
            check_language(path, VOCABULARY.names, "small", shipped_names())

    use_compilation_cache()
    with errors_as_one_line():
        backbone = load(path, dtype="float32")

    for kind in kinds if recorded is None else (recorded.kind,):
        trace = recorded
        with errors_as_one_line():
            if trace is None:
                trace = generate(kind, _SEED.value, out, steps=_STEPS.value, backbone=backbone)
            print(f"{trace.kind}: {len(trace)} events", flush=True)
            found = replay(trace, backbone, rank=_RANK.value, report=lambda text: print(f"  {text}", flush=True))

        found["model"] = Path(_MODEL.value).name
        out_of(out, trace.kind).write_text(json.dumps(found) + "\n")
        print(
            winners(found),
            aligned_table(*table(found)),
            "",
            aligned_table(*rank_table(found)),
            "",
            sep="\n",
            flush=True,
        )

    write_pages(out)


def _steps_of_imported() -> int:
    return _STEPS.value if flags.FLAGS["steps"].present else IMPORTED_STEPS


def _kinds() -> tuple[str, ...]:
    names = tuple(_KIND.value)
    unknown = [name for name in names if name not in (*KINDS, "all")]
    if unknown or not names:
        raise InputError(f"--kind: got {unknown or 'no kind'}; expected all, or some of {', '.join(KINDS)}")
    return KINDS if "all" in names else names


def write_pages(out: Path) -> None:
    """Writes tables and figures of all that the folder has results of."""
    results: dict[str, Any] = {}
    # Kinds in the order in which they are listed, then those of recorded traces by name.
    order = {f"replay_{kind}": number for number, kind in enumerate(KINDS)}
    for path in sorted(out.glob("replay_*.json"), key=lambda path: (order.get(path.stem, len(KINDS)), path.stem)):
        found = json.loads(path.read_text())
        results[found["kind"]] = found

    parts = []
    for kind, found in results.items():
        parts += [f"## {kind}", winners(found), markdown_table(*table(found)), markdown_table(*rank_table(found))]
    (out / "replay.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    figures = draw(results, out)
    print(f"{out / 'replay.md'}, {', '.join(path.name for path in figures)}")


if __name__ == "__main__":
    app.run(main)
