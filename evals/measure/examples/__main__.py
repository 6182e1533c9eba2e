"""Writes data sets that need nothing downloaded, for `python -m evals.measure`.

    python -m evals.measure.examples --task=documentation --out=out/documentation

Questions over pages of documentation that Python brings: items.jsonl, and elsewhere.jsonl, the same questions behind
pages that do not answer them.

    python -m evals.measure.examples --task=sheets --model=qwen2_5_vl --format=slidevqa --out=out/own

A shipped small model's own task, in a format of public data sets; prints the command that measures it, after which
`--compare` in place of the other flags says how far the numbers are from those of `evals.run`.

    python -m evals.measure.examples --task=sheets --format=episodes --contexts=24 --out=out/episodes

Trajectories of the sheets task, whose questions need what was on earlier screens; prints the command that replays them.
"""

import itertools
from pathlib import Path

from absl import app, flags

from kvpatch_jax.errors import InputError

from ...command_line import begin_program, errors_as_one_line
from ...reading.asked import READING
from ...reading.tower import PageReadingModel
from ...real_weights import checkpoint
from ...rules import RULES
from ...runner import RunSizes
from ...trained import ROOT
from ..exports import write_jsonl
from . import comparison, documentation, own_episodes
from .own_tasks import TASKS

_DOCUMENTATION = "documentation"
_TASK = flags.DEFINE_enum("task", _DOCUMENTATION, [_DOCUMENTATION, *TASKS], "what is asked")
_OUT = flags.DEFINE_string("out", "out/examples", "folder of what is written")
_CONTEXTS = flags.DEFINE_integer("contexts", 64, "contexts", lower_bound=1)
_DOCUMENTS = flags.DEFINE_integer("documents", 3, "documentation: documents of a context", lower_bound=1)
_PAGE_WORDS = flags.DEFINE_integer("page_words", 48, "documentation: words of a page", lower_bound=20)
_RENDERED = flags.DEFINE_boolean("rendered", False, "documentation: pages as images, for --model=reading")
_MODEL = flags.DEFINE_string("model", "qwen2_5_vl", "of another task: a shipped instance")
_FORMAT = flags.DEFINE_enum("format", "slidevqa", [*comparison.FORMATS, own_episodes.FORMAT], "of another task")
_BATCH = flags.DEFINE_integer("batch", 16, "of another task: contexts that are drawn at once, as in evals.run", 1)
_SEED = flags.DEFINE_integer("seed", RULES.seed, "of another task: of its contexts")
_COMPARE = flags.DEFINE_boolean("compare", False, "compare what was measured of another task with evals.run")


def main(arguments: list[str]) -> None:
    """Writes the data set that is asked for, or compares."""
    begin_program(arguments)
    out = Path(_OUT.value)
    with errors_as_one_line():
        if _COMPARE.value:
            _compare(out)
        elif _TASK.value == _DOCUMENTATION:
            kinds = documentation.PAGE_KINDS if _RENDERED.value else documentation.TEXT_KINDS
            made = documentation.questions(_CONTEXTS.value, _DOCUMENTS.value, _PAGE_WORDS.value, kinds)
            if _RENDERED.value:
                made = documentation.rendered(PageReadingModel(ROOT / READING, checkpoint(None)), made)
            paths = [
                write_jsonl(out, list(itertools.chain.from_iterable(made))),
                write_jsonl(out, documentation.behind_the_next(made), "elsewhere.jsonl"),
            ]
            print(f"{sum(map(len, made))} questions behind {len(made)} contexts: {', '.join(map(str, paths))}")
        elif _FORMAT.value == own_episodes.FORMAT:
            if _TASK.value != "sheets":
                raise InputError(f"--task: got {_TASK.value} as {own_episodes.FORMAT}; expected sheets")
            data = own_episodes.write(out, _MODEL.value, _SEED.value, _CONTEXTS.value)
            print(
                f"python -m evals.measure.trajectories --model={out / comparison.MODEL} --data={data} --frame=plain "
                f"--keep={own_episodes.KEEP} --answer_tokens=1 --blind --rank=8,16 --out={out / comparison.MEASURED}"
            )
        else:
            sizes = RunSizes(_SEED.value, _CONTEXTS.value, _BATCH.value)
            data = comparison.write(out, _TASK.value, _MODEL.value, _FORMAT.value, sizes)
            print(
                f"python -m evals.measure --model={out / comparison.MODEL} --data={data} --frame=plain "
                f"--answer_tokens=answer --arms='patch.*' --out={out / comparison.MEASURED}"
            )


def _compare(out: Path) -> None:
    numbers = comparison.compared(out)
    print("| kind | arm | of | items | evals.measure | evals.run |\n|---|---|---|---|---|---|")
    for kind, arm, metric, items, measured, run in numbers:
        print(f"| {kind} | {arm} | {metric} | {items} | {measured:.5f} | {run:.5f} |")
    for metric in comparison.METRICS:
        apart = max(abs(number.measured - number.run) for number in numbers if number.metric == metric)
        print(f"largest difference of {metric}: {apart:.2g}")


if __name__ == "__main__":
    app.run(main)
