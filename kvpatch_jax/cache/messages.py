"""Reading of chat messages and their parts, in the forms of OpenAI's APIs, vLLM and Hugging Face, to items of a prompt.

The text of a part is always a text, a str in a medium's place names a file, and data URLs are read. Nothing is
downloaded. Parts in OpenAI's forms, which a server may pass on from its clients, carry bytes and cannot name files.
"""

import base64
import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import jax
import numpy as np

from ..errors import InputError
from ..utils.atomic_files import path_of
from .inputs import ADDRESS, Audio, Text, Video, sort_of, sort_of_suffix

_EXPECTED = (
    '{"type": "text", "text": …}, {"type": "image", "image": a path, image or data URL}, likewise "video" and "audio", '
    '{"type": "image_url", "image_url": {"url": a data URL}}, or {"input_audio": {"data": base64}}'
)
_ADVICE = {"uuid", "detail", "cache_control"}
"""Fields that do not describe the content of a part."""
_OPTIONS = {"video": {"fps", "frames", "rate", "timestamps", "sound"}, "audio": {"rate"}}
"""Fields that become options of a `Video` or `Audio`."""
_MEDIA = ("image", "video", "audio")
_FIELDS = {
    **{name: ("text", "text") for name in ("text", "input_text", "output_text")},
    **{kind: (kind, kind, "url", "base64", "path") for kind in _MEDIA},
    **{f"{kind}_url": (kind, f"{kind}_url") for kind in _MEDIA},
    "input_image": ("image", "image_url"),
    "input_audio": ("audio", "input_audio"),
}
"""By type of part, the kind of its item, then the fields that may hold the content, of which a part has one."""
_DATA_URL = re.compile(r"data:([\w.+-]+)(?:/[\w.+-]+)?(;[\w-]+=[^;,]*)*;base64,", re.IGNORECASE)


def part_item(part: Any, where: str = "message part") -> Any:
    """Returns the item that a part of a message holds: a `Text`, a path, an image (bytes too), a `Video` or an `Audio`.

    A part without a type has the type that its field names (`{"image": …}`). Fields that are None are absent. A video
    may have the options of a `Video` as fields, and a list of images in place of a file.

    Raises:
      InputError: a part of another form or type, with other fields, or without its content; an address; damaged base64,
      or bytes of another kind. Messages begin with `where`.
    """
    # The type, the field that holds the content, and options.
    if not isinstance(part, Mapping):
        raise InputError(f"{where}: got a part of type {type(part).__name__!r}; expected {_EXPECTED}")
    fields = {name: value for name, value in part.items() if value is not None and name not in _ADVICE}
    name = fields.pop("type", next((name for name in _FIELDS if name in fields), None))
    shown = f"a part of type {name!r:.80} with the fields {sorted(map(str, fields))!r:.80}"
    if not isinstance(name, str) or name not in _FIELDS:
        raise InputError(f"{where}: got {shown}; expected {_EXPECTED}")
    kind, *keys = _FIELDS[name]
    key = next((key for key in keys if key in fields), keys[0])
    content, options = fields.pop(key, None), _OPTIONS.get(kind, set())
    if content is None or not options.issuperset(fields):
        raise InputError(f"{where}: got {shown}; expected fields of {[key, *sorted(options)]}")

    if kind == "text":
        if not isinstance(content, str):
            raise InputError(f"{where}: got a text of type {type(content).__name__}; expected a str")
        return Text(content)

    # OpenAI's forms carry bytes and name no files.
    form = "base64" if key == "base64" else "file" if name in _MEDIA else "data URL"
    if form == "data URL":
        carried = content if isinstance(content, Mapping) else {"url": content}
        form = "base64" if isinstance(carried.get("data"), str) else form
        content = str(carried.get("data") or carried.get("url"))
    if isinstance(content, str):
        content = _source(content, form, kind, where)
    elif kind == "video" and isinstance(content, list | tuple):
        content = [_source(frame, "file", "image", where) if isinstance(frame, str) else frame for frame in content]

    # The content must be of the part's kind, as far as can be seen without reading a file.
    is_item = kind == "image" or isinstance(content, Video | Audio)
    fits = not is_item
    with contextlib.suppress(InputError):
        if isinstance(content, os.PathLike):
            fits = sort_of_suffix(content) in (None, kind)
        elif is_item:
            fits = sort_of(content) == kind and not fields
    if not fits:
        shown = repr(str(content)) if isinstance(content, os.PathLike) else f"a {type(content).__name__}"
        raise InputError(f"{where}: got {shown:.300}; expected {kind!r}: a path, a data URL or what it is decoded to")
    if is_item:
        return content
    return Video(content, **fields) if kind == "video" else Audio(content, **fields)


def content_items(message: Any, where: str = "message") -> list[Any]:
    """Returns the items of a message's content: of a str that `Text`, of a list of parts each `part_item`.

    Raises:
      InputError: no mapping, a content of another form, or a part that `part_item` refuses.
    """
    content = message.get("content") if isinstance(message, Mapping) else message
    if not isinstance(message, Mapping) or not isinstance(content, str | list | tuple | None):
        expected = "{'role', 'content'} with a text or a list of parts"
        raise InputError(f"{where}: got content of type {type(content).__name__}; expected a message {expected}")
    if isinstance(content, str):
        return [Text(content)]
    return [part_item(part, f"{where}, part {number}") for number, part in enumerate(content or ())]


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
            result += content_items(item, where)
            calls = item.get("tool_calls")
            if not isinstance(calls, list | tuple | None):
                raise InputError(f"{where}: got tool_calls of type {type(calls).__name__}; expected a list")
            try:
                functions = [call.get("function", call) if isinstance(call, Mapping) else call for call in calls or ()]
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


def _source(text: str, form: Literal["base64", "data URL", "file"], kind: str, where: str) -> Path | bytes:
    """Returns the bytes of base64 (whose lines may be broken) or of a data URL of a kind, or the file that a str names.

    A data URL may stand in place of each form. Errors do not show data.
    """
    is_url = text[:5].lower() == "data:"
    if form != "base64" and not is_url:
        path = re.sub("^file://(localhost)?/", "/", text)
        if form == "data URL" or (path == text and (ADDRESS.match(text) or text.startswith("file://"))):
            expected = f'a data URL (an address: fetch it first; a file: {{"type": {kind!r}, "path": its name}})'
            raise InputError(f"{where}: got {text[:100]!r}; expected {expected}")
        return path_of(path if path == text else unquote(path), where, InputError)

    if is_url:
        head = _DATA_URL.match(text[:300])
        if head is None or head[1].lower() != kind:
            raise InputError(f"{where}: got {text.partition(',')[0]:.60}; expected data:{kind}/…;base64,…")
        text = text[head.end() :]
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise InputError(f"{where}: got damaged base64 ({error}); expected the bytes of a file in base64") from None
    if not content:
        raise InputError(f"{where}: got base64 of no bytes; expected the bytes of a file")
    return content
