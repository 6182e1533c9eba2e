"""Windows as an agent had them, read from a file: what they showed, in order, and what was asked behind them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax.errors import InputError
from kvpatch_jax.utils import strict_json

FIELDS = ("images", "questions", "before")
EXPECTED = '{"images": ["a.png", "b.png", "c.png"], "questions": ["What changed?"]}, and perhaps "before"'


class RecordedWindow(NamedTuple):
    """One window.

    Attributes:
      images: names of the images that it showed, in order. questions: what was asked behind them.
      before: names of images that were there before and had left, the last one to leave at the end.
    """

    images: tuple[str, ...]
    questions: tuple[str, ...]
    before: tuple[str, ...] = ()


def read_windows(path: Path) -> list[RecordedWindow]:
    """Reads windows from a file of JSON, an object a line, in the order in which they were recorded.

    Raises:
      InputError: there is no such file, no window in it, or a line is none.
    """
    if not path.is_file():
        raise InputError(f"--windows: got {path}, which is no file; expected one with a line {EXPECTED}")
    windows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            what = f"--windows: line {number} of {path}"
            windows.append(_window(strict_json.object_of(line, what, InputError), what))
    if not windows:
        raise InputError(f"--windows: got {path}, which is empty; expected a line {EXPECTED}")
    return windows


def _window(found: Mapping[str, Any], what: str) -> RecordedWindow:
    unknown = sorted(found.keys() - set(FIELDS))
    if unknown or not {"images", "questions"} <= found.keys():
        raise InputError(f"{what}: got {sorted(found)!s:.80}; expected {EXPECTED}")
    values = []
    for name in FIELDS:
        value = found.get(name, [])
        is_list = isinstance(value, list) and all(isinstance(text, str) and text.strip() for text in value)
        if not is_list or (name != "before" and not value):
            raise InputError(f"{what}: got {value!r:.60} as {name!r}; expected a list of texts")
        values.append(tuple(value))
    return RecordedWindow(*values)
