"""Command line: `kvpatch`, `kvpatch store …`, and from a checkout the programs of `evals`, such as `kvpatch run`."""

import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Sequence
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
USAGE = "\n".join(
    [
        "kvpatch                  this installation: version, devices, extras, caches",
        "kvpatch store COMMAND    look after a store's folder",
        *(f"kvpatch {name:<16} {words} (from a checkout)" for name, words in PROGRAMS.items()),
    ]
)


def missing_packages() -> dict[str, list[str]]:
    """Lists by extra the packages that are not installed; {} where this package itself is not."""
    missing: dict[str, list[str]] = {}
    try:
        lines = requires("kvpatch_jax") or []
    except PackageNotFoundError:
        return missing
    for line in lines:
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", line)
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if extra is None or name is None:
            continue
        listed = missing.setdefault(extra[1], [])
        try:
            version(name[0])
        except PackageNotFoundError:
            listed.append(name[0])
    return missing


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
        print(describe())
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
