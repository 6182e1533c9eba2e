"""Typed errors as one line on the command line."""

import contextlib
from collections.abc import Iterator

from kvpatch_jax.errors import KVPatchError


@contextlib.contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Ends the program with a typed error's message on standard error and status 1, without a traceback.

    For the part of a program that looks at what it was asked for; later errors are the program's own.
    """
    try:
        yield
    except KVPatchError as error:
        raise SystemExit(f"error: {error}") from None
