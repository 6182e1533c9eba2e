"""A part of a message is one item in the forms of OpenAI, vLLM and Hugging Face, and any other is refused by name."""
# pyright: reportArgumentType=false

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from kvpatch_jax import Audio, Text, Video
from kvpatch_jax.cache import chunk_id, content_items, part_item, part_name, unit_items
from kvpatch_jax.errors import InputError

PAGE = np.random.default_rng(2).integers(0, 256, (16, 24, 3), np.uint8)


def png() -> bytes:
    """PAGE in a file, written by hand."""
    rows = b"".join(b"\0" + row.tobytes() for row in PAGE)
    chunks = (b"IHDR", struct.pack(">IIBBBBB", 24, 16, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    framed = [struct.pack(">I", len(data)) + kind + data for kind, data in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(own + struct.pack(">I", zlib.crc32(own[4:])) for own in framed)


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{in_base64(content)}"


URL, FILM, SOUND = data_url(png()), data_url(b"film", "video/mp4"), data_url(b"sound", "audio/wav")


PAGE_PARTS = [
    {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
    {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None},
    {"type": "image", "image": PAGE, "text": None},
    {"type": "image", "image": png()},
    {"type": "image", "url": URL},
    {"type": "image", "image": f"DATA:IMAGE/PNG;name=a.png;base64,{in_base64(png())}"},
    {"type": "image", "base64": base64.encodebytes(png()).decode()},
]
FILM_PARTS = [
    {"type": "video_url", "video_url": {"url": FILM}},
    {"type": "video", "video": FILM},
    {"type": "video", "base64": in_base64(b"film")},
    {"type": "video", "video": Video(b"film")},
]
SOUND_PARTS = [
    {"type": "input_audio", "input_audio": {"data": in_base64(b"sound"), "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": SOUND}},
    {"type": "audio", "audio": SOUND},
]
FORMS = [(PAGE_PARTS, PAGE), (FILM_PARTS, Video(b"film")), (SOUND_PARTS, Audio(b"sound"))]
FORMS += [
    ([{"type": "video_url", "video_url": {"url": FILM}, "frames": 4}], Video(b"film", frames=4)),
    ([{"audio": np.zeros(8, np.float32), "rate": 8000}], Audio(np.zeros(8, np.float32), 8000)),
    ([{"type": "video", "video": [URL, PAGE], "rate": 1}], Video(np.stack([PAGE, PAGE]), rate=1)),
]


def test_a_medium_is_one_item_in_every_form():
    for parts, item in FORMS:
        for part in parts:
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


REFUSED = {
    "an address.*fetch it first": [
        linked("https://x.org/a.png"),
        linked("file:///etc/a.png"),
        {"type": "video", "url": "s3://films/a.mp4"},
        {"type": "image", "image": "file://[server/a.png"},
    ],
    "expected a data URL": [
        linked("/etc/a.png"),
        {"type": "input_image", "image_url": {"file_id": "f-1"}},
    ],
    "got data:[^,]*; expected data:image": [
        linked("data:text/plain;base64,SGk="),
        linked(FILM),
    ],
    "damaged base64": [
        linked(URL[:-3]),
        {"type": "image", "base64": "not base64!"},
    ],
    "base64 of no bytes": [{"type": "image", "base64": ""}],
    "got a (bytes|list); expected 'image'": [linked(data_url(b"no image")), {"type": "image", "image": [PAGE]}],
    r"film\.mp4'; expected 'image'": [{"type": "image", "image": "film.mp4"}],
    r"page\.png'; expected 'video'": [{"type": "video", "video": "page.png"}],
    "got a Video; expected 'audio'": [{"type": "audio", "audio": Video(b"film")}],
    "got a Video; expected 'video'": [{"type": "video", "video": Video(b"film"), "fps": 2}],
    "expected a positive whole number": [{"type": "video", "video": "a.mp4", "frames": 10**400}],
    "expected a file's name": [{"type": "image", "image": "a\0b"}],
    r"expected fields of \['image": [{"type": "image"}, {"type": "image_url", "image_url": None, "uuid": "page"}],
    "fields .*(min_pixels|path).*; exp": [{"image": PAGE, "min_pixels": 4}, {"image": PAGE, "path": "a.png"}],
    "got a text of type int": [{"type": "text", "text": 7}],
    "a part of type": [
        *({"type": "file", "file": {"file_data": URL}}, {}, "a text", None),
        *({"type": ["image"], "image": PAGE}, {"type": PAGE, "image": PAGE}),
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_another_part_is_refused_by_what_is_wrong_with_it(message):
    for part in REFUSED[message]:
        with pytest.raises(InputError, match=message) as refused:
            part_item(part, "here")
        assert len(str(refused.value)) < 1000


def test_another_message_is_refused():
    for message, reason in (
        ({"content": [[{"type": "text", "text": "nested"}]]}, "here, part 0: got a part of type 'list'"),
        ({"content": {"type": "text", "text": "a"}}, "content of type dict"),
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
