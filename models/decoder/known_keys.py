"""Checking a table of `config.json` against the keys that are known (`key_tables`), and filling in absent ones.

Defaults are those of the configuration classes of transformers 5.23 (`tests/goldens/sparse` holds these tables against
the classes themselves). A key outside these tables is refused by name where it may change what a model computes
(`may_change`). Any other is warned about once, and kept.
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError

from .key_tables import AUTHORS
from .key_tables import DEFAULTS as DEFAULTS
from .key_tables import ONLY as ONLY
from .key_tables.kinds import CHANGES, DEPTHS, KIND, MOST_LAYERS, NULL, OFF
from .key_tables.kinds import INERT as INERT

ALIASES = {
    "num_local_experts": "num_experts",
    "image_token_id": "image_token_index",
    "video_token_id": "video_token_index",
    "audio_token_id": "audio_token_index",
}
"""Two names of one key, where a table knows only the second."""

_CLASS_KEYS = Path(__file__).parent / "key_tables" / "class_keys.json"
_MODELS = str(Path(__file__).parents[1])


class UnknownKeyWarning(UserWarning):
    """A key of `config.json` that no class of transformers reads. The model is read without it."""


@dataclasses.dataclass
class _Reading:
    """One reading of a file: the keys that its caller passes over, those of them that were met, and those warned of."""

    file: str
    ignore: frozenset[str] = frozenset()
    met: set[str] = dataclasses.field(default_factory=set)
    warned: set[str] = dataclasses.field(default_factory=set)


_reading: contextvars.ContextVar[_Reading | None] = contextvars.ContextVar("reading", default=None)
"""What `load` says of the file that families' readers read: they take a configuration, which these are no part of."""


@contextlib.contextmanager
def reading(file: str, ignore: Collection[str] = ()) -> Iterator[None]:
    """Names the file whose tables `complete` checks while the block runs, and keys that it passes over.

    Raises:
      ConfigError: after the block, a name in `ignore` that no table of the file has.
    """
    state = _Reading(file, frozenset(ignore))
    token = _reading.set(state)
    try:
        yield
    finally:
        _reading.reset(token)
    absent = sorted(state.ignore - state.met)
    if absent:
        raise ConfigError(f"load: got ignore {absent[0]!r}, which {file} does not have; expected keys of that file")


def passed_over(key: str) -> bool:
    """Returns whether the caller of `load` passes over a key that this library does not know."""
    state = _reading.get()
    if state is None or key not in state.ignore:
        return False
    state.met.add(key)
    return True


@functools.cache
def class_keys() -> frozenset[str]:
    """Returns every key that a class of transformers reads or declares (`tests/goldens/make_config_keys.py`)."""
    return frozenset(json.loads(_CLASS_KEYS.read_text(encoding="utf-8"))["keys"])


def may_change(kind: str, key: str, value: Any) -> bool:
    """Returns whether a key that this library does not know may change what a model computes.

    It may where a class of transformers reads it, of this family or another (whose code a file may bring along); where
    it is known to (`CHANGES`, and `OFF` while it is on); where it is a part of a model of its own; and, in authors'
    own formats, which no class of transformers reads, wherever it is not off.
    """
    if key in class_keys() or key in CHANGES or key in OFF:
        return True
    part = isinstance(value, Mapping) and key.endswith("_config")
    return part or (kind in AUTHORS and bool(value))


def complete(raw: Any, kind: str, place: str = "config.json", drop: Collection[str] | None = None) -> dict[str, Any]:
    """Checks a table of `config.json` and fills in what it leaves out.

    Args:
      raw: the table.
      kind: its `model_type`, a key of `DEFAULTS`.
      place: what errors call the table.
      drop: keys of a table around it, which may stand here too and mean nothing here (a flat configuration).

    Raises:
      ConfigError: not a table; a key that this library does not know and that may change what the model computes, one
        whose value is of another kind or not built, or one that is known and to be passed over.

    Warns:
      UnknownKeyWarning: once in a `reading`, a key that nothing reads.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{place}: got {_short(raw)}; expected a table")

    known, only, found = DEFAULTS[kind], ONLY.get(kind, {}), dict[str, Any]()
    for given, value in raw.items():
        key = given if given in known else ALIASES.get(given, given)
        ignored = passed_over(given)
        if ignored and (key in only or key in known):
            raise ConfigError(f"load: got ignore {given!r}, which is read for {kind}; expected keys that are not known")
        if key in only:
            if value != only[key] and value is not None:
                raise ConfigError(
                    f"{place}: got {key} {_short(value)}, which is not built for {kind}; expected {only[key]!r}"
                )
        elif key in known:
            wanted = KIND.get(key)
            if key in DEPTHS and isinstance(value, int) and value > MOST_LAYERS:
                raise ConfigError(f"{place}: got {key} {_short(value)}; expected at most {MOST_LAYERS} layers")
            absent = value is None and key in NULL
            if wanted is not None and not absent and not _is(wanted, value):
                raise ConfigError(f"{place}: got {key} {_short(value)}; expected {wanted}")
            found[key] = value
        elif ignored or given in INERT or given in (drop or ()) or value is None or (given in OFF and not value):
            found[given] = value
        elif may_change(kind, given, value):
            raise ConfigError(
                f"{place}: got {given!r}: {_short(value)}, which this library does not know for {kind} and which may "
                f"change what the model computes; expected one of {', '.join(sorted(known))}. If it changes nothing, "
                f"take it out of the file, or load(..., ignore=[{given!r}])"
            )
        else:
            _warn(given, value, place)
            found[given] = value

    return known | found


def _warn(key: str, value: Any, place: str) -> None:
    state = _reading.get() or _Reading(place)
    if key not in state.warned:
        state.warned.add(key)
        where = place if state.file == place else f"{state.file} ({place})"
        warnings.warn(
            f"{where}: got {key!r}: {_short(value)}, which neither this library nor a class of transformers reads; the "
            f"model is read without it. load(..., ignore=[{key!r}]) says that this is right",
            UnknownKeyWarning,
            skip_file_prefixes=(_MODELS,),
        )


def _is(kind: str, value: Any) -> bool:
    """Returns whether a value of JSON is of a kind of `kinds`."""
    # true and false are whole numbers to Python.
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind == "a positive whole number":
        return whole and value > 0
    if kind == "a whole number from 0 on":
        return whole and value >= 0
    if kind == "a positive number":
        return (whole or isinstance(value, float)) and value > 0 and math.isfinite(value)
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "a text":
        return isinstance(value, str)
    if kind == "a table":
        return isinstance(value, Mapping)
    if kind == "a positive whole number or a list":
        sizes = value if isinstance(value, list | tuple) else [value]
        return all(_is("a positive whole number", size) for size in sizes)
    if kind == "a whole number or a list":
        return whole or _is("a list", value)
    return isinstance(value, list | tuple)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
