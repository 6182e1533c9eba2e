"""Command line: `kvpatch`, `kvpatch store …`, and from a checkout the programs of `evals`, such as `kvpatch run`."""

import contextlib
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from . import __version__
from .utils.compiling import cache_folder

PROGRAMS = {
    "run": "the evaluation on the shipped models",
    "measure": "what reuse costs on your model and data",
    "certify": "a certificate of your model",
    "bench": "times on this machine",
    "train": "the shipped models, trained again",
}
"""Programs of `evals`, which are in a checkout alone, by what they do."""
_NAME, _EXTRA = re.compile(r"([A-Za-z0-9._-]+)(\[[^]]*\])?"), re.compile(r"extra == ['\"]([^'\"]+)['\"]")
"""A requirement's name with the extras that it asks for, and the extra that it belongs to."""
USAGE = "\n".join(
    [
        "kvpatch                  this installation: version, devices, extras, caches",
        "kvpatch store COMMAND    look after a store's folder",
        *(f"kvpatch {name:<16} {words} (from a checkout)" for name, words in PROGRAMS.items()),
    ]
)


def missing_packages() -> dict[str, list[str]]:
    """Lists by extra the packages that are not installed; {} where this package itself is not."""
    with contextlib.suppress(PackageNotFoundError):
        extras = {match[1] for line in requires("kvpatch_jax") or [] if (match := _EXTRA.search(line))}
        return {extra: list(dict.fromkeys(_missing("kvpatch_jax", extra))) for extra in extras}
    return {}


def _missing(package: str, extra: str) -> Iterator[str]:
    """Yields what an extra of an installed package lacks, extras of other packages included."""
    for line in requires(package) or []:
        marker, named = _EXTRA.search(line), _NAME.match(line)
        if marker is None or marker[1] != extra or named is None:
            continue
        name, inner = named[1], named[2] or ""
        try:
            version(name)
        except PackageNotFoundError:
            yield name
            continue
        for word in filter(None, re.split(r"[\[\], ]+", inner)):
            yield from _missing(name, word)


def describe() -> str:
    """Describes this installation: versions, devices, extras with the command that adds them, and caches."""
    import jax

    lines = [f"kvpatch_jax {__version__}, jax {jax.__version__}, Python {sys.version.split()[0]}"]
    kinds = [f"{device.platform} ({device.device_kind})" for device in jax.devices()]
    lines += [f"devices   {', '.join(f'{kinds.count(kind)} × {kind}' for kind in dict.fromkeys(kinds))}"]

    lines += ["extras"]
    for extra, names in sorted(missing_packages().items()):
        more = ", …" if len(names) > 3 else ""
        words = f"missing {', '.join(names[:3])}{more}: pip install 'kvpatch_jax[{extra}]'" if names else "installed"
        lines.append(f"  {extra:<11} {words}")

    compiled = jax.config.jax_compilation_cache_dir or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    hub = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    lines += [f"compiled  {compiled or cache_folder() / 'compiled'}", f"weights   {hub}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit status: 2 where it could not be run."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        try:
            print(describe(), flush=True)
        except BrokenPipeError:  # nobody reads on, as in `kvpatch | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    command, rest = words[0], words[1:]
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command == "store":
        from .store.__main__ import main as store

        return store(rest)
    if command not in PROGRAMS:
        print(f"error: got {command!r}; expected store, {', '.join(PROGRAMS)}, or nothing", file=sys.stderr)
        return 2

    # A program of the checkout that this command is typed in.
    sys.path.insert(0, os.getcwd())
    if importlib.util.find_spec("evals") is None or importlib.util.find_spec(f"evals.{command}") is None:
        print(f"error: {command}: got {os.getcwd()}; expected the folder of a checkout of kvpatch_jax", file=sys.stderr)
        return 2
    sys.argv = [f"kvpatch {command}", *rest]
    runpy.run_module(f"evals.{command}", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
