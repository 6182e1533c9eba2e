"""Parts of messages in the forms of OpenAI, vLLM and Hugging Face: what they hold, and what is refused."""
# pyright: reportArgumentType=false

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvpatch_jax import Audio, Text, Video
from kvpatch_jax.cache import chunk_id, content_items, part_item, part_name, unit_items
from kvpatch_jax.errors import InputError

PAGE = np.random.default_rng(2).integers(0, 256, (16, 24, 3), np.uint8)


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(PAGE).save(file, "PNG")
    return file.getvalue()


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{in_base64(content)}"


URL = data_url(png())


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL, "uuid": "page", "cache_control": {"type": "ephemeral"}},
        {"image_url": {"url": URL}},
        {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None},
        {"type": "image", "image": PAGE},
        {"type": "image", "image": Image.fromarray(PAGE), "text": None},
        {"type": "image", "image": png()},
        {"type": "image", "url": URL},
        {"type": "image", "image": f"data:image;base64,{in_base64(png())}"},
        {"type": "image", "image": f"DATA:IMAGE/PNG;name=a.png;base64,{in_base64(png())}"},
        {"type": "image", "base64": in_base64(png())},
        {"type": "image", "base64": base64.encodebytes(png()).decode()},
        {"type": "image", "base64": URL},
        {"image": PAGE},
    ],
)
def test_an_image_is_one_image_in_every_form(part):
    assert chunk_id("model", part_item(part)) == chunk_id("model", PAGE)


def test_a_file_is_named_in_every_form(tmp_path):
    path = tmp_path / "a page.png"
    path.write_bytes(png())
    names = [
        {"path": str(path)},
        {"path": path},
        {"url": str(path)},
        {"url": path.as_uri()},
        {"image": f"file://{path}"},
    ]
    assert [part_item({"type": "image", **name}) for name in names] == [path] * len(names)
    assert part_item({"type": "image", "path": "~/page.png"}) == Path.home() / "page.png"
    assert part_item({"image": "page 3"}) == Path("page 3")


def test_videos_and_sounds_in_every_form():
    film, sound = data_url(b"film", "video/mp4"), data_url(b"sound", "audio/wav")
    for part in (
        {"type": "video_url", "video_url": {"url": film}},
        {"type": "video", "video": film},
        {"type": "video", "base64": in_base64(b"film")},
        {"type": "video", "video": b"film"},
    ):
        assert chunk_id("m", part_item(part)) == chunk_id("m", Video(b"film"))
    for part in (
        {"type": "input_audio", "input_audio": {"data": in_base64(b"sound"), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": sound}},
        {"type": "audio", "audio": sound},
        {"type": "audio", "url": sound},
    ):
        assert chunk_id("m", part_item(part)) == chunk_id("m", Audio(b"sound"))
    assert part_item({"type": "video", "video": "clip.mp4", "fps": 2}).options == Video(b"", fps=2).options
    assert part_item({"type": "video_url", "video_url": {"url": film}, "frames": 4}).frames == 4
    samples = np.zeros(8, np.float32)
    assert chunk_id("m", part_item({"audio": samples, "rate": 8000})) == chunk_id("m", Audio(samples, 8000))
    shown = Video(np.stack([PAGE, PAGE]), rate=1)
    assert part_item({"type": "video", "video": shown}) is shown
    frames = part_item({"type": "video", "video": [URL, PAGE], "rate": 1})
    assert chunk_id("m", frames) == chunk_id("m", shown)


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


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}, "an address.*fetch it first"),
        ({"type": "image", "image": "http://x.org/a.png"}, "an address.*fetch it first"),
        ({"type": "video", "url": "s3://films/a.mp4"}, "an address.*fetch it first"),
        ({"type": "image", "image": "file://server/a.png"}, "an address.*fetch it first"),
        ({"type": "image", "image": "file://[server/a.png"}, "an address.*fetch it first"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/a.png"}}, "an address.*fetch it first"),
        ({"type": "image_url", "image_url": {"url": "/etc/a.png"}}, "expected a data URL"),
        ({"type": "input_image", "image_url": {"file_id": "f-1"}}, "expected a data URL"),
        ({"type": "image_url", "image_url": Path("a.png")}, "expected a data URL"),
        (
            {"type": "image_url", "image_url": {"url": "data:text/plain;base64,SGk="}},
            "got data:text.plain;base64; exp",
        ),
        (
            {"type": "image_url", "image_url": {"url": data_url(b"film", "video/mp4")}},
            "got data:video.mp4;base64; exp",
        ),
        ({"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg/>"}}, "expected data:image"),
        ({"type": "image_url", "image_url": {"url": data_url(b"Hi, I am no image")}}, "expected 'image'"),
        ({"type": "image_url", "image_url": {"url": URL[:-3]}}, "damaged base64"),
        ({"type": "image_url", "image_url": {"url": URL + "é"}}, "damaged base64"),
        ({"type": "image", "base64": "not base64!"}, "damaged base64"),
        ({"type": "image", "base64": ""}, "base64 of no bytes"),
        ({"type": "input_audio", "input_audio": {"data": "?"}}, "damaged base64"),
        ({"type": "image", "image": "film.mp4"}, r"film\.mp4'; expected 'image'"),
        ({"type": "video", "video": "page.png"}, r"page\.png'; expected 'video'"),
        ({"type": "audio", "path": "film.mp4"}, r"film\.mp4'; expected 'audio'"),
        ({"type": "audio", "audio": Video(b"film")}, "got a Video; expected 'audio'"),
        ({"type": "video", "video": Video(b"film"), "fps": 2}, "got a Video; expected 'video'"),
        ({"type": "video", "video": "a.mp4", "fps": -1}, "fps: got -1"),
        ({"type": "image", "image": [PAGE]}, "got a list; expected 'image'"),
        ({"type": "image", "image": "a\0b"}, "expected a file's name"),
        ({"type": "image"}, "fields .*; expected 'image'"),
        ({"type": "image_url", "image_url": None, "uuid": "page"}, "fields .*; expected 'image_url'"),
        ({"type": "image", "image": PAGE, "min_pixels": 4}, "with the fields .*min_pixels.*and no others"),
        ({"type": "image", "image": PAGE, "path": "a.png"}, "with the fields .*path.*and no others"),
        ({"type": "text", "text": 7}, "got a text of type int"),
        ({"type": "file", "file": {"file_data": URL}}, "a part of type 'file'"),
        ({"type": ["image"], "image": PAGE}, "a part of type"),
        ({"type": PAGE, "image": PAGE}, "a part of type"),
        ({"type": "video", "video": "a.mp4", "frames": 10**400}, "expected a positive whole number"),
        ({}, "a part of type None"),
        ("a text", "a part of type 'str'"),
        (None, "a part of type 'NoneType'"),
    ],
)
def test_another_part_is_refused_by_what_is_wrong_with_it(part, message):
    with pytest.raises(InputError, match=message) as refused:
        part_item(part, "here")
    assert len(str(refused.value)) < 1000


def test_another_message_is_refused():
    for message, reason in (
        ({"content": [[{"type": "text", "text": "nested"}]]}, "here, part 0: got a part of type 'list'"),
        ({"content": ["a text"]}, "here, part 0: got a part of type 'str'"),
        ({"content": {"type": "text", "text": "a"}}, "content of type dict"),
        ({"content": 7}, "content of type int"),
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
