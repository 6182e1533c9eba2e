"""A part of a message is one item in the forms of OpenAI, vLLM and Hugging Face, and any other is refused by name."""
# pyright: reportArgumentType=false

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpatch_jax import Audio, Text, Video
from kvpatch_jax.cache import chunk_id, content_items, part_item, part_name, unit_items
from kvpatch_jax.errors import InputError

PAGE = np.random.default_rng(2).integers(0, 256, (16, 24, 3), np.uint8)


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


URL, FILM, SOUND = data_url(b"BM page"), data_url(b"film", "video/mp4"), data_url(b"sound", "audio/wav")
FORMS: list[tuple[Any, Any]] = [
    ({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}, b"BM page"),
    ({"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None}, b"BM page"),
    ({"type": "image", "base64": base64.encodebytes(b"BM page").decode()}, b"BM page"),
    ({"image": PAGE, "text": None}, PAGE),
    ({"type": "video_url", "video_url": {"url": FILM}, "frames": 4}, Video(b"film", frames=4)),
    ({"type": "video", "video": Video(b"film")}, Video(b"film")),
    ({"type": "video", "video": [PAGE, PAGE], "rate": 1}, Video(np.stack([PAGE, PAGE]), rate=1)),
    ({"type": "input_audio", "input_audio": {"data": SOUND.partition(",")[2], "format": "wav"}}, Audio(b"sound")),
    ({"type": "audio_url", "audio_url": {"url": SOUND}}, Audio(b"sound")),
]


def test_a_medium_is_one_item_in_every_form():
    for part, item in FORMS:
        assert chunk_id("model", part_item(part)) == chunk_id("model", item), part


def test_a_file_is_named_in_every_form(tmp_path):
    path = tmp_path / "a page.png"
    for field in ({"path": str(path)}, {"path": path}, {"url": path.as_uri()}, {"image": f"file://{path}"}):
        assert part_item({"type": "image", **field}) == path
    assert part_item({"type": "image", "path": "~/page.png"}) == Path.home() / "page.png"
    assert part_item({"image": "page 3"}) == Path("page 3")
    film = part_item({"type": "video", "video": "clip.mp4", "fps": 2})
    assert (film.source, film.options) == (Path("clip.mp4"), Video(b"", fps=2).options)


def test_a_text_is_a_text_whatever_it_looks_like():
    for part in ({"type": "text", "text": URL}, {"type": "input_text", "text": URL}, {"text": URL}):
        item = part_item(part)
        assert (type(item), item) == (Text, URL)
    assert content_items({"role": "user", "content": "shot.png"}) == ["shot.png"]


def test_a_messages_parts_come_in_their_order():
    text = {"type": "text", "text": "Before"}
    message = {"role": "user", "content": [text, {"type": "image", "image": PAGE}, {"type": "text", "text": "after"}]}
    first, image, last = unit_items(message, "here")
    assert (first, image is PAGE, last) == ("Before", True, "after")
    several = unit_items([message, text, "a text"], "here")
    assert [type(item) for item in several] == [Text, np.ndarray, Text, Text, str]
    call = {"id": "1", "type": "function", "function": {"name": "click", "arguments": '{"x": "é"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert unit_items(answer, "here") == ['{"arguments": "{\\"x\\": \\"é\\"}", "name": "click"}']
    assert content_items(answer) == []
    assert unit_items([5, 6], "here") == [[5, 6]]


def linked(url: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


REFUSED: dict[str, Any] = {
    "an address.*fetch it first": linked("https://x.org/a.png"),
    "expected a data URL": linked("file:///etc/a.png"),
    "got data:[^,]*; expected data:image": linked(FILM),
    "damaged base64": linked(URL[:-3]),
    "got a bytes; expected 'image'": linked(data_url(b"no image")),
    r"film\.mp4'; expected 'image'": {"type": "image", "image": "film.mp4"},
    "got a Video; expected 'audio'": {"type": "audio", "audio": Video(b"film")},
    r"expected fields of \['image": {"type": "image"},
    "fields .*path.*; exp": {"image": PAGE, "path": "a.png"},
    "a part of type": {"type": PAGE, "image": PAGE},
}


def test_another_part_and_another_message_are_refused_by_what_is_wrong_with_them():
    for message, part in REFUSED.items():
        with pytest.raises(InputError, match=message) as refused:
            part_item(part, "here")
        assert len(str(refused.value)) < 1000
    for message, reason in (
        ({"content": [[{"type": "text", "text": "nested"}]]}, "here, part 0: got a part of type 'list'"),
        ({"tool_calls": {"name": "click"}}, "tool_calls of type dict"),
        ({"tool_calls": [{"function": {"x": PAGE}}]}, "no JSON"),
    ):
        with pytest.raises(InputError, match=reason):
            unit_items({"role": "user", **message}, "here")


def test_a_part_may_carry_a_name():
    part = {"type": "image", "image": PAGE, "uuid": "page"}
    message = {"role": "user", "content": [{"type": "text", "text": "Look:"}, part]}
    assert part_name(part) == part_name([part]) == part_name(message) == "page"
    assert part_name([part, part]) is None
    assert part_name(PAGE) is part_name("a text") is part_name({"role": "user", "content": "a"}) is None
    for name in ("", 7):
        with pytest.raises(InputError, match="uuid"):
            part_name({**part, "uuid": name})
