"""Reading of chat messages and their parts, in the forms of OpenAI's APIs, vLLM and Hugging Face, to items of a prompt.

A part of a message says what it is, so its text is always a text (`Text`), a str in a medium's place names a file, and
data URLs are read. Nothing is downloaded: an address is refused. The parts of OpenAI's forms, which a server may pass
on from its clients, carry their bytes and cannot name files.
"""

import base64
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jax
import numpy as np

from ..errors import InputError
from ..utils.atomic_files import path_of
from .inputs import ADDRESS, Audio, Text, Video, sort_of, sort_of_suffix

_EXPECTED = (
    '{"type": "text", "text": …}, {"type": "image", "image": a path, image or data URL}, likewise "video" and "audio", '
    '{"type": "image_url", "image_url": {"url": a data URL}}, "video_url", or '
    '{"type": "input_audio", "input_audio": {"data": base64}}'
)
_ADVICE = {"uuid", "detail", "cache_control"}
"""Fields that say nothing of a part's content: a name, and advice to another service."""
_OPTIONS = {"video": {"fps", "frames", "rate", "timestamps", "sound"}, "audio": {"rate"}}
"""Fields that become options of a `Video` or `Audio`."""
_DATA_URL = re.compile(r"data:([\w.+-]+)(/[\w.+-]+)?(;[\w-]+=[^;,]*)*;base64,", re.IGNORECASE)
_LONGEST_HEAD = 300
"""Maximum number of characters of a data URL before its data."""

_MEDIA = ("image", "video", "audio")
_FIELDS = {
    **{name: ("text", "text") for name in ("text", "input_text", "output_text")},
    **{kind: (kind, kind, "url", "base64", "path") for kind in _MEDIA},
    **{f"{kind}_url": (kind, f"{kind}_url") for kind in _MEDIA},
    "input_image": ("image", "image_url"),
    "input_audio": ("audio", "input_audio"),
}
"""By type of part, the kind of its item, then the fields that may have the content, of which a part has one."""


def part_item(part: Any, where: str = "message part") -> Any:
    """Returns the item that a part of a message holds: a `Text`, a path, an image (bytes too), a `Video` or an `Audio`.

    A part without a type is what its field says (`{"image": …}`). Fields that are None are absent. A video may have the
    fields fps, frames, rate, timestamps and sound of a `Video`, and a list of images in place of a file.

    Raises:
      InputError: a part of another form or type, with other fields, or without its content; an address that is no data
      URL; damaged base64, or bytes of another kind. Messages begin with `where`.
    """
    if not isinstance(part, Mapping):
        raise InputError(f"{where}: got a part of type {type(part).__name__!r}; expected {_EXPECTED}")
    fields = {name: value for name, value in part.items() if value is not None and name not in _ADVICE}
    name = fields.pop("type", next((name for name in _FIELDS if name in fields), None))
    if not isinstance(name, str) or name not in _FIELDS:
        shown = f"a part of type {name!r:.80} with the fields {sorted(map(str, fields))!r:.80}"
        raise InputError(f"{where}: got {shown}; expected {_EXPECTED}")

    # One field has the content, and the others are options.
    kind, *keys = _FIELDS[name]
    key = next((key for key in keys if key in fields), None)
    if key is None:
        raise InputError(f"{where}: got a part of type {name!r} without its {keys[0]}; expected {_EXPECTED}")
    content = fields.pop(key)
    options = _OPTIONS.get(kind, set())
    unknown = sorted(str(field) for field in fields if field not in options)
    if unknown:
        expected = sorted({keys[0], *options})
        raise InputError(f"{where}: got a part of type {name!r} with the fields {unknown!r:.120}; expected {expected}")

    if kind == "text":
        if not isinstance(content, str):
            raise InputError(f"{where}: got a text of type {type(content).__name__}; expected a str")
        return Text(content)
    if name not in _MEDIA:
        content = _carried(content, kind, where)
    elif isinstance(content, str):
        content = _data(content, kind, where) if key == "base64" else _named(content, kind, where)
    elif kind == "video" and isinstance(content, list | tuple):
        content = [_named(frame, "image", where) if isinstance(frame, str) else frame for frame in content]

    # The content must be of the part's kind, as far as can be seen without reading a file.
    if kind == "image":
        try:
            fits = sort_of(content, where) == kind
        except InputError:
            fits = False
    elif isinstance(content, Video | Audio):
        fits = sort_of(content) == kind and not fields
    else:
        fits = not isinstance(content, os.PathLike) or sort_of_suffix(content) in (None, kind)
    if not fits:
        shown = repr(str(content)) if isinstance(content, os.PathLike) else f"a {type(content).__name__}"
        raise InputError(f"{where}: got {shown:.300}; expected {kind!r}: a path, a data URL or what it is decoded to")
    if kind == "image" or isinstance(content, Video | Audio):
        return content
    return Video(content, **fields) if kind == "video" else Audio(content, **fields)


def content_items(message: Any, where: str = "message") -> list[Any]:
    """Returns the items of a message's content: of a str that `Text`, of a list of parts each `part_item`.

    Raises:
      InputError: no mapping, a content of another form, or a part that `part_item` refuses.
    """
    if not isinstance(message, Mapping):
        raise InputError(f"{where}: got a message of type {type(message).__name__}; expected {{'role', 'content'}}")
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [Text(content)]
    if not isinstance(content, list | tuple):
        raise InputError(f"{where}: got content of type {type(content).__name__}; expected a text or a list of parts")
    return [part_item(part, f"{where}, part {number}") for number, part in enumerate(content)]


def unit_items(unit: Any, where: str) -> list[Any]:
    """Returns the items of one unit of a prompt: those of a list, of an array [F, H, W] or more of images, of a part of
    a message, or of a message (its content, then the JSON of its tool calls). Token ids are one item.

    Raises:
      InputError: as `content_items` and `part_item`; tool calls that are not JSON.
    """
    if isinstance(unit, np.ndarray | jax.Array) and unit.ndim == 4:
        return list(np.asarray(unit))
    is_list = isinstance(unit, list | tuple)
    is_tokens = is_list and len(unit) > 0 and all(isinstance(token, int | np.integer) for token in unit)
    result: list[Any] = []
    for item in unit if is_list and not is_tokens else [unit]:
        if not isinstance(item, Mapping):
            result.append(item)
        elif "role" not in item:
            result.append(part_item(item, where))
        else:
            calls = item.get("tool_calls")
            if calls is not None and not isinstance(calls, list | tuple):
                raise InputError(f"{where}: got tool_calls of type {type(calls).__name__}; expected a list")
            functions = [call.get("function", call) if isinstance(call, Mapping) else call for call in calls or ()]
            result += content_items(item, where)
            try:
                result += [Text(json.dumps(call, sort_keys=True, ensure_ascii=False)) for call in functions]
            except (TypeError, ValueError) as error:
                raise InputError(f"{where}: got a tool call that is no JSON ({error}); expected one") from None
    return result


def part_name(item: Any) -> str | None:
    """Returns the name that a part of a message carries (vLLM's `uuid`), or the only one in a message or list of parts.

    Raises:
      InputError: a uuid that is no str, or is empty.
    """
    if isinstance(item, Mapping) and "role" in item:
        item = item.get("content")
    parts = item if isinstance(item, list | tuple) else [item]
    names = [part["uuid"] for part in parts if isinstance(part, Mapping) and part.get("uuid") is not None]
    for name in names:
        if not isinstance(name, str) or not name:
            raise InputError(f"uuid: got {name!r:.80}; expected a name")
    return names[0] if len(names) == 1 else None


def _carried(content: Any, kind: str, where: str) -> bytes:
    """Returns the bytes that a part of OpenAI's forms carries, as a data URL or, in "data", as base64 alone."""
    fields = content if isinstance(content, Mapping) else {"url": content}
    data, url = fields.get("data"), fields.get("url")
    if isinstance(data, str):
        return _data(data, kind, where)
    if isinstance(url, str) and url[:5].lower() == "data:":
        return _data(url, kind, where)
    expected = f'a data URL (an address: fetch it first; a file: {{"type": {kind!r}, "path": its name}})'
    raise InputError(f"{where}: got {url!r:.60}; expected {expected}")


def _named(name: str, kind: str, where: str) -> Path | bytes:
    """Returns the file that a str names, or the bytes of a data URL."""
    if name[:5].lower() == "data:":
        return _data(name, kind, where)
    path = re.sub("^file://(localhost)?/", "/", name)
    if path != name:
        path = unquote(path)
    elif ADDRESS.match(name) or name.startswith("file://"):
        raise InputError(f"{where}: got {name[:300]!r}, an address; expected its bytes or a file: fetch it first")
    return path_of(path, where, InputError)


def _data(text: str, kind: str, where: str) -> bytes:
    """Returns the bytes of base64, whose lines may be broken, or of a data URL (`data:image/png;base64,…`) of a kind.

    Errors do not show the data.
    """
    if text[:5].lower() == "data:":
        head = _DATA_URL.match(text[:_LONGEST_HEAD])
        if head is None:
            raise InputError(f"{where}: got {text[:60]!r}; expected data:{kind}/…;base64,…")
        if head[1].lower() != kind:
            raise InputError(f"{where}: got a data URL of {head[1] + (head[2] or '')!r}; expected one of {kind}/…")
        text = text[head.end() :]
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise InputError(f"{where}: got damaged base64 ({error}); expected the bytes of a file in base64") from None
    if not content:
        raise InputError(f"{where}: got base64 of no bytes; expected the bytes of a file")
    return content
