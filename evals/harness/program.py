"""The one beginning of every evaluation program: packages, a first line, flags, typed errors as one line.

It imports nothing that takes long, and programs import what does inside `main`, so that the first line stands there at
once and a missing package is named before it is needed.
"""

import importlib.util
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

EXTRA = ("absl", "jinja2", "matplotlib", "optax", "pandas", "PIL", "tokenizers", "tqdm")
"""Packages of the extra `[evals]`, by the names that they are imported by."""
PLACES = ("out", "shard", "shards", "ray", "ray_resources", "limit")
"""Flags that say where a run is written and who shares the work; rows do not depend on them."""


def start(main: Callable[[], None], message: str = "", needs: Sequence[str] = EXTRA) -> None:
    """Starts a program: `if __name__ == "__main__": program.start(main, "…: loading libraries")`.

    Prints `message`, parses the flags that are defined, keeps compiled programs in .cache/jax, silences jax's remarks
    on missing platforms, and ends with status 1 and one line on a typed error (`KVPatchError`).

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

    def begin(arguments: list[str]) -> None:
        if len(arguments) > 1:
            raise app.UsageError(f"unexpected argument {arguments[1]!r}; see --help")
        quiet_backends()
        use_compilation_cache()
        from kvpatch_jax.errors import KVPatchError

        try:
            main()
        except KVPatchError as error:
            raise SystemExit(f"error: {error}") from None

    app.run(begin)


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


def use_compilation_cache() -> None:
    """Keeps compiled programs in the project's cache directory, .cache/jax, unless JAX_COMPILATION_CACHE_DIR is set."""
    import os

    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = Path(__file__).resolve().parents[2] / ".cache" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: other instances of an architecture run the same ones again.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def in_words(seconds: float) -> str:
    """Says a time as a person would: "50 s", "3 min", "1 h 20 min"."""
    if seconds < 90:
        return f"{5 * round(seconds / 5)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class Progress:
    """One bar over all work, with the time left by the pace so far. Threads may share it.

    Args:
      work: of all steps together, in any unit.
      expected: seconds that all of it is expected to take, which counts until a tenth is done; None: unknown.
    """

    def __init__(self, work: float, expected: float | None = None):
        from tqdm import tqdm

        self.work, self.expected, self.done = work, expected, 0.0
        self.began, self.alone = time.perf_counter(), threading.Lock()
        # A log gets a line now and then, not two a second.
        seldom = 0.5 if sys.stderr.isatty() else 20.0
        form = "{percentage:3.0f} %|{bar:24}| {desc}"
        self.bar = tqdm(total=max(work, 1e-9), bar_format=form, mininterval=seldom, file=sys.stderr)
        self.advance(0.0, "setting up")

    def advance(self, work: float, name: str) -> None:
        """Counts work as done and shows the name of the step."""
        with self.alone:
            self.done = min(self.done + work, self.work)
            self.bar.n = self.done
            left = self.left()
            time_left = "" if left is None else f"about {in_words(left)} left · "
            self.bar.set_description_str(f"{time_left}{name[:40].ljust(40)}", refresh=False)
            self.bar.update(0)

    def left(self) -> float | None:
        """Estimates the seconds left; None before anything is done where no time was expected."""
        spent, share = time.perf_counter() - self.began, self.done / max(self.work, 1e-9)
        if self.expected is None:
            return spent / share * (1 - share) if share else None
        # The expected pace counts as much as a tenth of the work.
        return (spent + 0.1 * self.expected) / (share + 0.1) * (1 - share)

    def close(self) -> None:
        """Ends the bar."""
        self.bar.close()
