"""How programs begin, and typed errors as one line on the command line."""

import contextlib
from collections.abc import Iterator, Sequence

from absl import app

from kvpatch_jax.errors import KVPatchError

from .compilation import use_compilation_cache
from .console import quiet_backends


def begin_program(arguments: Sequence[str]) -> None:
    """Refuses arguments that are no flags, silences the platforms that are not there, and keeps compiled programs.

    Raises:
      app.UsageError: there is an argument besides flags.
    """
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}; see --help")
    quiet_backends()
    use_compilation_cache()


@contextlib.contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Ends the program with a typed error's message on standard error and status 1, without a traceback.

    For the part of a program that looks at what it was asked for; later errors are the program's own.
    """
    try:
        yield
    except KVPatchError as error:
        raise SystemExit(f"error: {error}") from None
