"""The one beginning of every evaluation program: packages, a first line, flags, typed errors as one line.

It imports nothing that takes long, and programs import what does inside `main`, so that the first line stands there at
once and a missing package is named before it is needed.
"""

import importlib.util
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

EXTRA = ("absl", "jinja2", "matplotlib", "optax", "pandas", "PIL", "tokenizers", "tqdm")
"""Packages of the extra `[evals]`, by the names that they are imported by."""
PLACES = ("out", "shard", "ray", "shards", "ray_resources")
"""Flags that say where a run is written and who shares the work; rows do not depend on them."""


def start(main: Callable[[], None], message: str = "", needs: Sequence[str] = EXTRA) -> None:
    """Starts a program: `if __name__ == "__main__": program.start(main, "…: loading libraries")`.

    Prints `message`, parses the flags that are defined, keeps compiled programs for the next run (`keep_compiled`),
    silences jax's remarks on missing platforms, and ends with one line on a typed error (`KVPatchError`, status 1) and
    on Ctrl-C (status 130).

    Args:
      main: the program; it imports jax and the rest of the evaluation.
      message: the first line, printed unless help is asked for.
      needs: packages without which the program ends in one line.
    """
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"error: packages {', '.join(missing)} are not installed; expected the extra `evals` (in a checkout: "
            "pip install -e '.[evals]')"
        )
    if message and not any(word.lstrip("-").startswith("help") for word in sys.argv[1:]):
        print(message, flush=True)

    from absl import app
    from absl import logging as absl_logging

    # What is compiled, and other remarks, as plain lines.
    absl_logging.get_absl_handler().setFormatter(logging.Formatter("%(message)s"))

    def begin(arguments: list[str]) -> None:
        if len(arguments) > 1:
            raise app.UsageError(f"unexpected argument {arguments[1]!r}; see --help")
        quiet_backends()
        from kvpatch_jax.errors import KVPatchError
        from kvpatch_jax.utils.compiling import keep_compiled

        keep_compiled()
        try:
            _interruptibly(main)
        except KVPatchError as error:
            raise SystemExit(f"error: {error}") from None

    app.run(begin)


def _interruptibly(main: Callable[[], None]) -> None:
    """Runs a program in a thread, so that Ctrl-C ends it at once, whatever compiles or computes; parts are on disk."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            main()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        print("\nstopped; type the same command again to go on", file=sys.stderr, flush=True)
        os._exit(130)
    if errors:
        raise errors[0]


def define_sharing(shards: int) -> None:
    """Defines the flags that say who measures the parts of a run; `parts.sharing` reads them."""
    from absl import flags

    flags.DEFINE_string("shard", "0/1", "index/count: measure every count-th part, from index on")
    flags.DEFINE_string("ray", None, "address of a Ray cluster, or local: --shards are its tasks")
    flags.DEFINE_integer("shards", shards, "tasks with --ray", lower_bound=1)
    flags.DEFINE_string("ray_resources", "{}", 'what a task occupies, as JSON: {"num_gpus": 1}')


def repeated_command(name: str) -> str:
    """Returns the command that repeats a run, without flags that say where it is written and who shares the work.

    Args:
      name: of the program, "evals.run".
    """
    words, arguments = [], iter(sys.argv[1:])
    for argument in arguments:
        flag, equals, _ = argument.lstrip("-").partition("=")
        if flag not in PLACES:
            words.append(argument)
        elif not equals:
            # The value stands in a word of its own.
            next(arguments, None)
    return shlex.join(["python", "-m", name, *words])


def quiet_backends() -> None:
    """Keeps libraries' information off the terminal; warnings stay, and --verbosity brings all of it back."""
    import logging as standard

    from absl import flags, logging

    if flags.FLAGS["verbosity"].present:
        return
    standard.getLogger("jax").setLevel(standard.WARNING)
    logging.set_verbosity(logging.WARNING)


def progress_bar(work: float) -> Any:
    """Makes a bar over all work, in any unit, with the time left by the pace so far."""
    from tqdm import tqdm

    form = "{percentage:3.0f} %|{bar:24}| {remaining} left · {desc}"
    # A log gets a line now and then, not two a second.
    return tqdm(total=work or 1.0, bar_format=form, mininterval=0.5 if sys.stderr.isatty() else 20.0)
