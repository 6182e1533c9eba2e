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
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

import jax
import numpy as np

from ..errors import InputError
from ..utils.atomic_files import path_of
from .content import Text, looks_like_an_address, sort_of, sort_of_suffix
from .images import is_encoded
from .media import Audio, Video

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
"""Characters of a data URL in front of its data."""


class _Form(NamedTuple):
    """What a type of part means.

    Attributes:
      kind: of the item.
      keys: fields that may have the content, of which a part has one.
      carried: whether the part carries its bytes and may not name a file.
    """

    kind: str
    keys: tuple[str, ...]
    carried: bool = False


_FORMS = {
    **{name: _Form("text", ("text",)) for name in ("text", "input_text", "output_text")},
    **{kind: _Form(kind, (kind, "url", "base64", "path")) for kind in ("image", "video", "audio")},
    **{f"{kind}_url": _Form(kind, (f"{kind}_url",), True) for kind in ("image", "video", "audio")},
    "input_image": _Form("image", ("image_url",), True),
    "input_audio": _Form("audio", ("input_audio",), True),
}


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
    name = fields.pop("type", next((name for name in _FORMS if name in fields), None))
    form = _FORMS.get(name) if isinstance(name, str) else None
    if form is None:
        raise InputError(
            f"{where}: got a part of type {name!r:.80} with the fields {sorted(map(str, fields))!r:.80}; "
            f"expected {_EXPECTED}"
        )

    # One field has the content.
    key = next((key for key in form.keys if key in fields), None)
    if key is None:
        raise InputError(f"{where}: got a part of type {name!r} without its {form.keys[0]}; expected {_EXPECTED}")
    content = fields.pop(key)
    unknown = sorted(str(field) for field in fields if field not in _OPTIONS.get(form.kind, ()))
    if unknown:
        options = sorted({form.keys[0], *_OPTIONS.get(form.kind, ())})
        raise InputError(f"{where}: got a part of type {name!r} with the fields {unknown!r:.120}; expected {options}")

    if form.kind == "text":
        if not isinstance(content, str):
            raise InputError(f"{where}: got a text of type {type(content).__name__}; expected a str")
        return Text(content)
    if form.carried:
        content = _carried(content, form.kind, where)
    elif isinstance(content, str):
        content = _bytes_of(content, form.kind, where) if key == "base64" else _named(content, form.kind, where)
    elif form.kind == "video" and isinstance(content, list | tuple):
        content = [_named(frame, "image", where) if isinstance(frame, str) else frame for frame in content]
    return _typed(content, form.kind, fields, where)


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
      InputError: as `content_items` and `part_item`.
    """
    if isinstance(unit, np.ndarray | jax.Array) and unit.ndim == 4:
        return list(np.asarray(unit))
    several = isinstance(unit, list | tuple)
    if several and unit and all(isinstance(token, int | np.integer) for token in unit):
        several = False
    result: list[Any] = []
    for item in unit if several else [unit]:
        if not isinstance(item, Mapping):
            result.append(item)
        elif "role" in item:
            result += [*content_items(item, where), *_tool_calls(item.get("tool_calls"), where)]
        else:
            result.append(part_item(item, where))
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


def _tool_calls(calls: Any, where: str) -> list[Text]:
    """Returns the tool calls of a message, each as the JSON of its function."""
    if calls is not None and not isinstance(calls, list | tuple):
        raise InputError(f"{where}: got tool_calls of type {type(calls).__name__}; expected a list")
    functions = [call.get("function", call) if isinstance(call, Mapping) else call for call in calls or ()]
    try:
        return [Text(json.dumps(function, sort_keys=True, ensure_ascii=False)) for function in functions]
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: got a tool call that is no JSON ({error}); expected one") from None


def _typed(content: Any, kind: str, options: Mapping[str, Any], where: str) -> Any:
    """Returns content as an item of this kind, with its options."""
    shown = repr(str(content)) if isinstance(content, os.PathLike) else f"a {type(content).__name__}"
    named = sort_of_suffix(content) if isinstance(content, os.PathLike) else None
    medium = isinstance(content, Video | Audio)
    if kind == "image":
        several = isinstance(content, list | tuple)
        unknown = isinstance(content, bytes) and not is_encoded(content)
        fits = not several and not unknown and sort_of(content, where) == kind
    elif medium:
        fits = sort_of(content) == kind and not options
    else:
        fits = named in (None, kind)
    if not fits:
        raise InputError(f"{where}: got {shown:.300}; expected {kind!r}: a path, a data URL or what it is decoded to")
    if kind == "image" or medium:
        return content
    return Video(content, **options) if kind == "video" else Audio(content, **options)


def _carried(content: Any, kind: str, where: str) -> bytes:
    """Returns the bytes that a part of OpenAI's forms carries."""
    data = None
    if isinstance(content, Mapping):
        content, data = content.get("url"), content.get("data")
    if isinstance(data, str):
        return _bytes_of(data, kind, where)
    if isinstance(content, str) and _is_data_url(content):
        return _data_of(content, kind, where)
    if isinstance(content, str) and looks_like_an_address(content):
        _refuse_address(content, where)
    raise InputError(
        f'{where}: got {content!r:.60}; expected a data URL (a file is {{"type": {kind!r}, "path": its name}})'
    )


def _named(name: str, kind: str, where: str) -> Path | bytes:
    """Returns the file that a str names, or the bytes of a data URL."""
    if _is_data_url(name):
        return _data_of(name, kind, where)
    if name.startswith("file://"):
        host, _, path = name.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            _refuse_address(name, where)
        name = unquote(f"/{path}")
    elif looks_like_an_address(name):
        _refuse_address(name, where)
    return path_of(name, where, InputError)


def _refuse_address(address: str, where: str) -> NoReturn:
    raise InputError(f"{where}: got {address[:300]!r}, an address; expected its bytes or a file: fetch it first")


def _is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def _bytes_of(text: str, kind: str, where: str) -> bytes:
    """Returns the bytes of a data URL, or of base64 alone."""
    return _data_of(text, kind, where) if _is_data_url(text) else _decoded(text, where)


def _data_of(url: str, kind: str, where: str) -> bytes:
    """Returns the bytes of a data URL whose type has to be this kind's: `data:image/png;base64,…`."""
    head = _DATA_URL.match(url[:_LONGEST_HEAD])
    if head is None:
        raise InputError(f"{where}: got {url[:60]!r}; expected data:{kind}/…;base64,…")
    if head[1].lower() != kind:
        raise InputError(f"{where}: got a data URL of {head[1] + (head[2] or '')!r}; expected one of {kind}/…")
    return _decoded(url[head.end() :], where)


def _decoded(text: str, where: str) -> bytes:
    """Returns the bytes of base64, whose lines may be broken. Errors do not show the data."""
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise InputError(f"{where}: got damaged base64 ({error}); expected the bytes of a file in base64") from None
    if not content:
        raise InputError(f"{where}: got base64 of no bytes; expected the bytes of a file")
    return content
