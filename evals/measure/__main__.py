"""Measures what reuse costs a user's own model on the user's own data.

    python -m evals.measure --model=DIR --data=FILE --out=out/measure

Reads items (contexts in pieces, and questions behind them), caches every piece alone, serves it in every arm behind the
others, and scores the answers by the data's own rule and by their distance from re-prefill. Says how long that takes
before it starts. The same command resumes after a kill; `--shard=0/4` … `--shard=3/4` share the work, on one folder;
so do the tasks of a Ray cluster (`--ray=auto`).
"""

from . import startup_message as startup_message  # isort: split

from .. import extra as extra  # isort: split

import shlex
import sys
from pathlib import Path

from absl import app, flags

from kvpatch_jax.errors import InputError

from ..command_line import begin_program, errors_as_one_line
from ..console import in_words
from . import formats
from .arms import help_text
from .frame import FRAMES
from .on_ray import measure_on_ray
from .plan import WorkShard
from .preparation import MeasureRequest, prepare
from .report import write_results
from .shards import check_out, run_shard

_MODEL = flags.DEFINE_string(
    "model",
    None,
    "a checkpoint directory or GGUF file, a repository of the hub, or the name of a shipped small model",
)
_DATA = flags.DEFINE_string("data", None, "a file or folder of the data set")
_FORMAT = flags.DEFINE_string("format", None, "of the data, where the file does not say: --format=help lists them")
_MEDIA = flags.DEFINE_string("media", None, "folder of the images and videos, where it is not the data's own")
_CHARACTERS = flags.DEFINE_integer(
    "text_characters", 2000, "of a piece of text at most, where the format does not divide it itself", lower_bound=1
)
_FRAMES = flags.DEFINE_integer("frames", None, "sampled of a video; by default as the model's settings say", 1)
_KEEP = flags.DEFINE_integer(
    "keep", None, "screenshots that stay, where a trajectory does not say which leave; by default all", 1
)
_ARMS = flags.DEFINE_list("arms", ["*"], "patterns of arms, such as patch.*,cacheblend.*: --arms=help lists them")
_OUT = flags.DEFINE_string("out", "out/measure", "folder of answers and report; shards share one")
_LIMIT = flags.DEFINE_integer("limit", 0, "a sample of so many items; 0: all", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "of the sample")
_SHARD = flags.DEFINE_string("shard", "0/1", "which part of the work this process does: its number and how many, 0/2")
_FRAME = flags.DEFINE_enum("frame", "chat", FRAMES, "what stands around pieces and question; plain: nothing")
_ANSWER = flags.DEFINE_string(
    "answer_tokens",
    "rule",
    "tokens of an answer at most: a number; rule: as the data's scoring says; answer: as the longest right one has",
)
_MOST = flags.DEFINE_integer(
    "max_tokens", None, "of a prompt: longer ones are left out; by default what config.json says", lower_bound=1
)
_RAY = flags.DEFINE_string("ray", None, "measure on the Ray cluster of this address; local: one on this machine")
_RAY_SHARDS = flags.DEFINE_integer("ray_shards", 8, "tasks of a cluster, a few for each worker", lower_bound=1)
_RAY_RESOURCES = flags.DEFINE_string("ray_resources", None, 'what a task occupies: {"num_cpus": 4}, {"num_gpus": 1}')
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "as models.load takes it")


def main(arguments: list[str]) -> None:
    """Measures, and writes answers.jsonl, results.json, table.md, figures and report.html."""
    begin_program(arguments)
    if _ARMS.value == ["help"]:
        print(help_text())
        return
    if _FORMAT.value == "help":
        print(formats.help_text())
        return
    with errors_as_one_line():
        _measure()


def _measure() -> None:
    again = shlex.join(["python", "-m", "evals.measure", *sys.argv[1:]])
    if not _MODEL.value or not _DATA.value:
        raise InputError(f"--model, --data: got {_MODEL.value!r}, {_DATA.value!r}; expected both; see --help")
    shard, out = _shard(_SHARD.value), Path(_OUT.value)
    if _RAY.value and shard.count > 1:
        raise InputError(f"--shard: got {_SHARD.value} with --ray; expected one of them")
    request = MeasureRequest(
        model=_anywhere(_MODEL.value),
        data=_anywhere(_DATA.value),
        format=_FORMAT.value,
        media=None if _MEDIA.value is None else _anywhere(_MEDIA.value),
        text_characters=_CHARACTERS.value,
        frames=_FRAMES.value,
        keep=_KEEP.value,
        arms=tuple(_ARMS.value),
        limit=_LIMIT.value,
        seed=_SEED.value,
        frame=_FRAME.value,
        answer_tokens=_answer_tokens(_ANSWER.value),
        max_tokens=_MOST.value,
        dtype=_DTYPE.value,
        again=again,
    )
    prepared = prepare(request)
    contexts, expected = prepared.contexts, prepared.expected
    # A folder of another measurement is refused before anything is measured.
    done = check_out(out, prepared.described.config)

    pieces = sum(len(context.pieces) for context in contexts)
    items = sum(len(context.items) for context in contexts)
    data = prepared.data
    print(f"{data.source.name} ({data.format}): {items} items behind {len(contexts)} contexts of {pieces} pieces")
    print(f"pieces: {data.chunk_rule}")
    print(f"arms: {', '.join(arm.name for arm in prepared.arms)}")
    for arm in prepared.unserved:
        print(f"left out: arm {arm.name}: it serves layers of one kind alone, and this model has several")
    for refusal in prepared.left_out:
        print(f"left out: {refusal.where}: {refusal.reason}")
    share = f", of which this shard does every {shard.count}th" if shard.count > 1 else ""
    finished = f"; {len(done)} of {len(contexts)} contexts are finished" if done else ""
    print(
        f"about {expected.forwards} forwards{share}, {in_words(expected.seconds / shard.count)} and what compiling "
        f"takes, {expected.memory / 2**30:.1f} GiB of memory{finished}",
        flush=True,
    )

    if _RAY.value:
        parts = measure_on_ray(request, prepared, out, _RAY.value, _RAY_SHARDS.value, _RAY_RESOURCES.value)
    else:
        parts = run_shard(prepared.described, out, shard, prepared.pace)
    if len(parts) < len(contexts):
        print(f"{len(parts)} of {len(contexts)} contexts are finished: the last shard to finish writes the report")
        return
    unserved = [arm.name for arm in prepared.unserved]
    print(write_results(prepared.described, parts, out, prepared.left_out, unserved))
    print(f"results: {out / 'results.json'}; answers: {out / 'answers.jsonl'}; report: {out / 'report.html'}")


def _anywhere(path: str) -> str:
    """Returns a file's whole path, for processes that run elsewhere; a name that is no file stays."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def _shard(text: str) -> WorkShard:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise InputError(f"--shard: got {text!r}; expected its number from 0 and how many there are, such as 0/4")
    return WorkShard(int(index), int(count))


def _answer_tokens(text: str) -> int | str:
    if text in ("rule", "answer"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--answer_tokens: got {text!r}; expected a number from 1, rule or answer")
    return int(text)


if __name__ == "__main__":
    app.run(main)
