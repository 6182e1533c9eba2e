"""Checking a table of `config.json` against the keys that are known (`key_tables`), and filling in absent ones.

A key outside these tables may change what a model computes, so `complete` refuses it by name. Defaults are those of the
configuration classes of transformers 5.23 (`tests/goldens/sparse` holds these tables against the classes themselves).
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from kvpatch_jax.errors import ConfigError

from .key_tables import DEFAULTS as DEFAULTS
from .key_tables import ONLY as ONLY
from .key_tables.kinds import INERT as INERT
from .key_tables.kinds import KIND, NULL, OFF

ALIASES = {
    "num_local_experts": "num_experts",
    "image_token_id": "image_token_index",
    "video_token_id": "video_token_index",
    "audio_token_id": "audio_token_index",
}
"""Two names of one key, where a table knows only the second."""


def complete(raw: Any, kind: str, place: str = "config.json", drop: Collection[str] | None = None) -> dict[str, Any]:
    """Checks a table of `config.json` and fills in what it leaves out.

    Args:
      raw: the table.
      kind: its `model_type`, a key of `DEFAULTS`.
      place: what errors call the table.
      drop: keys of a table around it, which may stand here too and mean nothing here (a flat configuration).

    Raises:
      ConfigError: not a table; a key that this library does not know, or whose value is of another kind or not built.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{place}: got {_short(raw)}; expected a table")

    known, only, found = DEFAULTS[kind], ONLY.get(kind, {}), dict[str, Any]()
    for given, value in raw.items():
        key = given if given in known else ALIASES.get(given, given)
        if key in only:
            if value != only[key] and value is not None:
                raise ConfigError(
                    f"{place}: got {key} {_short(value)}, which is not built for {kind}; expected {only[key]!r}"
                )
        elif key in known:
            wanted = KIND.get(key)
            absent = value is None and key in NULL
            if wanted is not None and not absent and not _is(wanted, value):
                raise ConfigError(f"{place}: got {key} {_short(value)}; expected {wanted}")
            found[key] = value
        elif given in INERT or given in (drop or ()) or value is None or (given in OFF and not value):
            found[given] = value
        else:
            raise ConfigError(
                f"{place}: got {given!r}: {_short(value)}, which this library does not know for {kind} and which may "
                f"change what the model computes; expected one of {', '.join(sorted(known))}. If it changes nothing, "
                "take it out of the file"
            )

    return known | found


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
