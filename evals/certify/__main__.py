"""Certifies a backbone: `python -m evals.certify --model=DIR --out=FILE`.

Serves windows of chunks, of one size or several, in every way of reuse and asks behind them, on the user's own images
or texts or, without any, on what every machine has. Says how long that takes before it starts; writes bounds that plans
hold to, tried on held-out windows, and recommends a rank.
"""

from . import startup_message as startup_message  # isort: split

from .. import extra as extra  # isort: split

import dataclasses
import functools
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from kvpatch_jax.errors import InputError
from models import Buckets, ModelBackbone, load

from ..command_line import begin_program, errors_as_one_line
from ..compilation import Compilations
from ..console import Progress, in_words
from ..harness.environment import environment
from ..measure import fields
from ..measure.items import DataSet
from ..trained import shipped
from .certification import certify, table
from .certification_run import CertificationRun
from .journal import Journal
from .own_images import OwnImageSource, recorded_sizes, windows_of_items
from .packed_questions import QUESTIONS
from .recorded_windows import read_windows
from .scores import least_windows
from .serving_modes import OPTIONAL_POINTS, RANKS
from .time_estimate import announcement, expected_steps, measured_pace
from .window_sizes import CertifiedSizes
from .window_sources import DrawnImageSource, TextSource, WindowSource, drawn_images_fit

SEED = 40961

_MODEL = flags.DEFINE_string("model", None, "a checkpoint directory or GGUF file, or the name of a shipped small model")
_IMAGES = flags.DEFINE_string("images", None, "a folder of images to measure on, such as screenshots of your agent's")
_TEXTS = flags.DEFINE_string("texts", None, "a folder of texts to measure on (.txt, .md, .rst)")
_QUESTIONS = flags.DEFINE_string("questions", None, "a file of questions to ask behind images or texts, a line each")
_WINDOWS = flags.DEFINE_string(
    "windows",
    None,
    "a file of JSON lines: windows as your agent had them, of the images of --images, and their questions",
)
_DATA = flags.DEFINE_string(
    "data",
    None,
    "a data set as evals.measure reads it: contexts of images and texts are the windows, its questions asked",
)
_FORMAT = flags.DEFINE_string("format", None, "of --data, where the file does not say")
_OUT = flags.DEFINE_string("out", None, "the certificate's file")
_NUMBER = flags.DEFINE_list("n", ["64"], "windows, half of them held out; of every size, or a number for each")
_BATCH = flags.DEFINE_integer(
    "batch", 32, "windows of the least size in one forward, of larger ones fewer: less for large models", lower_bound=1
)
_CHUNKS = flags.DEFINE_list("chunks", ["4"], "chunks of a window: 3 or more, or several numbers such as 4,8,16,32")
_SKIP = flags.DEFINE_list(
    "skip", [], f"methods to leave out, which are uncertified then: any of {', '.join(OPTIONAL_POINTS)}"
)
_LEVEL = flags.DEFINE_float(
    "level", 0.95, "of the bounds: the share of answers behind new windows that they are to hold for", 0.5, 0.999
)
_KL = flags.DEFINE_float("kl", None, "nats that an answer may lose: recommends the smallest rank whose bound is within")
_RANKS = flags.DEFINE_list("ranks", [str(rank) for rank in RANKS], "of the patches, at least 1")
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "as models.load takes it: a certificate is of the weights in one dtype"
)
_SEED = flags.DEFINE_integer("seed", SEED, "of what is drawn; the default was first used once all this was written")


def check_flags() -> tuple[CertifiedSizes, tuple[int, ...], frozenset[str]]:
    """Refuses contradicting flags before anything is loaded; returns sizes of windows, ranks and what is left out."""
    if _IMAGES.value is not None and _TEXTS.value is not None:
        raise InputError("--images, --texts: got both; expected one of them, or neither")

    counts, chunks = _numbers("n", _NUMBER.value, 2), _numbers("chunks", _CHUNKS.value, 3)
    least = least_windows(_LEVEL.value)
    if _DATA.value is not None:
        others = (_IMAGES, _TEXTS, _QUESTIONS, _WINDOWS)
        if any(other.value is not None for other in others) or flags.FLAGS["chunks"].present or len(counts) > 1:
            raise InputError(
                "--data: expected one --n at most, and neither images, texts, questions, windows nor chunks"
            )
        windows = windows_of_items(_data())
        sizes = recorded_sizes(windows, 2 * least, max(counts), _BATCH.value, "--data")
    elif _WINDOWS.value is not None:
        if _IMAGES.value is None or _QUESTIONS.value is not None or flags.FLAGS["chunks"].present or len(counts) > 1:
            raise InputError(
                "--windows: expected --images with it, one --n at most, and neither --questions nor --chunks"
            )
        sizes = recorded_sizes(read_windows(Path(_WINDOWS.value)), 2 * least, max(counts), _BATCH.value)
    else:
        sizes = CertifiedSizes(chunks, counts * len(chunks) if len(counts) == 1 else counts, _BATCH.value)
    if sizes.fewest[0] < least:
        raise InputError(f"--n: got {min(counts)}; expected {2 * least} or more for --level={_LEVEL.value:g}")

    out = Path(_OUT.value or "")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"--out: got {out}, which is a folder, or lies in none; expected a file's name")
    unknown = sorted(set(_SKIP.value) - set(OPTIONAL_POINTS))
    if unknown:
        raise InputError(f"--skip: got {', '.join(unknown)}; expected any of {', '.join(OPTIONAL_POINTS)}")
    return sizes, tuple(sorted(set(_numbers("ranks", _RANKS.value, 1)))), frozenset(_SKIP.value)


@functools.cache
def _data() -> DataSet:
    """Reads the data set of --data, and prints a line for what is left out of it. Images are decoded once."""
    data = fields.read(Path(_DATA.value or ""), _FORMAT.value)
    for refusal in data.refusals:
        print(f"left out: {refusal.where}: {refusal.reason}", flush=True)
    return data


def _numbers(flag: str, values: Sequence[str], least: int) -> tuple[int, ...]:
    """Reads the integers of a flag."""
    if not values or not all(value.strip().isdecimal() and int(value) >= least for value in values):
        raise InputError(f"--{flag}: got {','.join(values)!r}; expected integers >= {least}")
    return tuple(int(value) for value in values)


def source_of(backbone: ModelBackbone, sizes: CertifiedSizes) -> WindowSource:
    """Returns the windows that the flags ask for.

    Args:
      sizes: of the windows, and how many.

    Raises:
      InputError: too few images or texts, or no questions; fewer calibration windows than the level needs.
    """
    questions, seed = QUESTIONS, _SEED.value
    if _QUESTIONS.value is not None:
        path = Path(_QUESTIONS.value)
        if not path.is_file():
            raise InputError(f"--questions: got {path}, which is no file; expected one with a question a line")
        questions = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        if not questions:
            raise InputError(f"--questions: got {path}, which is empty; expected a question a line")

    if _DATA.value is not None:
        least = 2 * least_windows(_LEVEL.value)
        source = OwnImageSource.of_items(backbone, _data(), sizes, seed, windows_of_items(_data()), least=least)
    elif _IMAGES.value is not None and _WINDOWS.value is not None:
        windows = read_windows(Path(_WINDOWS.value))
        source = OwnImageSource.recorded(backbone, Path(_IMAGES.value), windows, sizes, seed)
    elif _IMAGES.value is not None:
        source = OwnImageSource.of(backbone, Path(_IMAGES.value), sizes, seed, questions)
    elif _TEXTS.value is None and drawn_images_fit(backbone):
        source = DrawnImageSource.of(sizes, seed)
    else:
        folder = None if _TEXTS.value is None else Path(_TEXTS.value)
        source = TextSource.of(backbone, folder, sizes, seed, questions)

    # A folder may have fewer texts than --n.
    calibration, held_out = source.sizes.fewest
    least = least_windows(_LEVEL.value)
    if calibration < least:
        raise InputError(
            f"certify: got {calibration} calibration windows of {source.content}; expected {least} or more for "
            f"--level={_LEVEL.value:g}"
        )
    each = " or more of each size" if len(source.sizes.chunks) > 1 else ""
    print(f"{source.content}: {calibration} windows{each} for calibration, {held_out} held out", flush=True)
    return source


def journal_of(backbone: ModelBackbone, name: str, source: WindowSource, ranks: tuple[int, ...]) -> Journal:
    """Returns the journal of an earlier run for the same certificate, and reports what it has.

    Raises:
      InputError: the earlier run measured something else.
    """
    out = Path(_OUT.value or "")
    config = {
        "model": name,
        "backbone": backbone.fingerprint,
        "content": source.content,
        "questions": None if _QUESTIONS.value is None else Path(_QUESTIONS.value).read_text(encoding="utf-8"),
        "recorded": None if _WINDOWS.value is None else Path(_WINDOWS.value).read_text(encoding="utf-8"),
        "windows": list(source.sizes.counts),
        "chunks": list(source.sizes.chunks),
        "batch": _BATCH.value,
        "seed": _SEED.value,
        "ranks": list(ranks),
        "skip": sorted(_SKIP.value),
        "versions": environment(("kvpatch-jax", "jax"))["versions"],
    }
    return Journal(out.with_name(f"{out.name}.parts"), config)


def main(arguments: list[str]) -> None:
    """Parses flags, measures, writes, prints."""
    begin_program(arguments)
    began, compilations = time.perf_counter(), Compilations()

    with errors_as_one_line(), tempfile.TemporaryDirectory() as folder:
        sizes, ranks, skip = check_flags()
        model = _MODEL.value or ""  # required: absl refuses to go on without it
        path = Path(model) if Path(model).is_file() else shipped(model)
        own = _IMAGES.value is not None or _DATA.value is not None
        buckets = Buckets() if own else None  # sizes of images differ
        backbone = load(path, dtype=_DTYPE.value, buckets=buckets)
        source = source_of(backbone, sizes)

        journal = journal_of(backbone, path.name, source, ranks)
        run = CertificationRun(backbone, source, Path(folder), ranks, journal, skip=skip)
        batches = len(source.specs)
        measured = sum(run.is_measured(number) for number in range(batches))
        if measured:
            print(f"{measured} of {batches} batches were measured by an earlier run: {journal.file}", flush=True)

        # Each step moves the progress bar by what it was expected to take.
        expected = [*expected_steps(run, measured_pace(run))]
        print(announcement(run, sum(expected)), flush=True)
        progress, pace = Progress({}, more=sum(expected)), iter(expected)
        run = dataclasses.replace(run, step=lambda name: progress(name, seconds=next(pace, 0.0)))
        certificate = certify(run, path.name, level=_LEVEL.value, goal=_KL.value, plan_seed=_SEED.value)
        progress.close()
        certificate.write(_OUT.value or "")
        journal.delete()

    print(table(certificate))
    print(f"rank {certificate.recommended_rank}: {certificate.recommended.reason}")
    took = f"{in_words(time.perf_counter() - began)}, {in_words(time.process_time())} of it on a core"
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    programs = f"{compilations.count} programs, {most:.1f} GiB at most"
    print(f"{took}; {programs}; {_OUT.value}, digest {certificate.digest}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["model", "out"])
    app.run(main)
