"""A progress bar in bytes, where there is somebody to see it."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

from kvpatch_jax.utils.optional_packages import require

Progress = bool | None
"""True draws a bar, False none; None draws one if stderr is a terminal and tqdm is installed."""

Advance = Callable[[int], object]
"""Told of bytes that are done."""


@contextlib.contextmanager
def progress_bar(total: int, progress: Progress = None) -> Iterator[Advance]:
    """Draws a progress bar of `total` bytes on stderr while the block runs, and gives what moves it.

    Raises:
      MissingExtraError: `progress` is True and tqdm is not installed.
    """
    if progress is None:
        progress = sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    if not progress:
        yield lambda count: None
        return
    tqdm = require("tqdm", "tqdm").tqdm
    with tqdm(total=total, desc="weights", unit="B", unit_scale=True, file=sys.stderr) as bar:
        yield bar.update
