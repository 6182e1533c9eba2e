"""Certifies a backbone: `python -m evals.certify --model=DIR --images=FOLDER --out=certificate.json`.

Serves windows of chunks in every mode of reuse and asks behind them, on a user's own images, texts or data. Writes
bounds that plans hold to, tried on held-out windows, and recommends a rank. A killed run goes on where it was when the
same command is given again.
"""

from absl import flags

from ..harness import program

_MODEL = flags.DEFINE_string("model", None, "a checkpoint directory, GGUF file, shipped instance or real weights' name")
_IMAGES = flags.DEFINE_string("images", None, "a folder of images to measure on, such as screenshots of your agent's")
_TEXTS = flags.DEFINE_string("texts", None, "a folder of texts to measure on (.txt, .md, .rst)")
_QUESTIONS = flags.DEFINE_string("questions", None, "a file of questions to ask behind images or texts, a line each")
_DATA = flags.DEFINE_string("data", None, "a data set as evals.measure reads it, or your agent's log: the windows")
_OUT = flags.DEFINE_string("out", None, "the certificate's file")
_NUMBER = flags.DEFINE_integer("n", 64, "windows of every size, half of them held out")
_BATCH = flags.DEFINE_integer("batch", 16, "windows of the least size in one forward: less for large models", 1)
_CHUNKS = flags.DEFINE_list("chunks", ["4"], "chunks of a window: 3 or more, or several numbers such as 4,8,16,32")
_SKIP = flags.DEFINE_list("skip", [], "points to leave out, which are uncertified then")
_LEVEL = flags.DEFINE_float("level", 0.95, "share of the answers behind new windows that bounds hold for", 0.5, 0.999)
_KL = flags.DEFINE_float("kl", None, "nats that an answer may lose: recommends the smallest rank whose bound is within")
_RANKS = flags.DEFINE_list("ranks", ["4", "8", "16", "32", "64"], "of the patches")
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "a certificate is of the weights in one dtype")


def main() -> None:
    """Checks the flags, measures, writes the certificate and prints it."""
    import shutil
    import time
    from pathlib import Path

    from kvpatch_jax.errors import InputError
    from kvpatch_jax.models import Buckets, load

    from ..harness.environment import environment
    from ..harness.runner import model_path
    from . import certification, modes, sources
    from .scores import least_clusters

    began, out, least = time.perf_counter(), Path(_OUT.value or ""), 2 * least_clusters(_LEVEL.value)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"--out: got {out}, which is a folder, or lies in none; expected a file's name")
    if unknown := sorted(set(_SKIP.value) - set(modes.OPTIONAL_POINTS)):
        raise InputError(f"--skip: got {', '.join(unknown)}; expected any of {', '.join(modes.OPTIONAL_POINTS)}")
    if _NUMBER.value < least:
        raise InputError(f"--n: got {_NUMBER.value}; expected {least} or more at this level")
    chunks, ranks = integers(_CHUNKS, sources.LEAST_CHUNKS), integers(_RANKS, 1)
    folders = {"images": _IMAGES.value, "texts": _TEXTS.value, "data": _DATA.value}
    shown = {flag: Path(path) for flag, path in folders.items() if path is not None}
    if len(shown) > 1 or ("data" in shown and _QUESTIONS.value):
        raise InputError(f"--{', --'.join(shown)}: got them together; expected one, or --questions with a folder")

    # Images come in many sizes, which buckets keep to few programs.
    buckets = Buckets() if {"images", "data"} & set(shown) else None
    backbone = load(model_path(_MODEL.value or ""), dtype=_DTYPE.value, buckets=buckets)
    sizes = chunks, _NUMBER.value, _BATCH.value
    asked = sources.QUESTIONS if _QUESTIONS.value is None else sources.read_questions(Path(_QUESTIONS.value))
    if "data" in shown:
        windows = sources.data_windows(backbone, shown["data"], least, *sizes[1:])
    elif "images" in shown:
        windows = sources.image_windows(backbone, shown["images"], *sizes, asked)
    elif "texts" in shown:
        windows = sources.text_windows(backbone, shown["texts"], *sizes, asked)
    else:
        windows = sources.task_windows(backbone, *sizes)
    print(f"{windows.shown}: {'{} windows of a size for calibration, {} held out'.format(*windows.fewest)}", flush=True)

    served = modes.ModeSet(ranks, tuple(windows.by_size), frozenset(_SKIP.value))
    config = {
        "model": Path(_MODEL.value or "").name,
        "backbone": backbone.fingerprint,
        "windows": [windows.digest, *windows.by_size],
        "batch": _BATCH.value,
        "modes": [list(ranks), sorted(served.skip)],
        "versions": environment(("kvpatch-jax", "jax"))["versions"],
    }
    parts = out.with_name(f"{out.name}.parts")
    certificate = certification.certify(windows, served, parts, config, _LEVEL.value, _KL.value)
    certificate.write(out)
    shutil.rmtree(parts)
    print(certification.table(certificate))
    print(f"rank {certificate.recommended_rank}: {certificate.recommended.reason}")
    print(f"{time.perf_counter() - began:.0f} s; {out}, digest {certificate.digest}")


def integers(flag, least: int) -> tuple[int, ...]:
    """Reads the integers of a flag, ascending."""
    from kvpatch_jax.errors import InputError

    if not flag.value or not all(value.strip().isdecimal() and int(value) >= least for value in flag.value):
        raise InputError(f"--{flag.name}: got {','.join(flag.value)!r}; expected integers >= {least}")
    return tuple(sorted({int(value) for value in flag.value}))


if __name__ == "__main__":
    flags.mark_flags_as_required(["model", "out"])
    program.start(main, "kvpatch_jax: what modes of reuse lose, with bounds; loading libraries …")
