"""Everything that a session takes is read to one form and named by its content; what is hostile is refused."""
# pyright: reportArgumentType=false

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.errors import InputError
from tests.shared.session_cases import image_of, state

PAGE = image_of(0)


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def image_part(content: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}}


def user(*parts: Any) -> dict:
    return {"role": "user", "content": list(parts)}


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def test_an_image_is_one_input_in_every_form(backbone, tmp_path: Path):
    path, page = tmp_path / "page.png", PAGE.copy()
    path.write_bytes(encoded(PAGE))
    forms = [Image.fromarray(PAGE), path, path.read_bytes(), [path], image_part(encoded(PAGE))]
    forms += [user(image_part(encoded(PAGE))), {"type": "image", "path": str(path)}]
    with kvp.Session(backbone, lead="w5") as session:
        name = session.add(page)
        # What was read is no one's to change.
        page[:] = 0
        for form in forms:
            session.evict(name)
            assert session.recall(form) == name == chunk_id(backbone.fingerprint, PAGE)
        assert session.stats().added == 2
        assert session.add(page) != name


def test_parts_of_messages_texts_and_frames_have_their_kinds(backbone, session):
    message = user(text_part("w5"), image_part(encoded(PAGE)), text_part("w6 w7"))
    frames = np.stack([PAGE, image_of(1)])
    for item, modality, kind, tokens in (
        (message, "mixed", "chunk", 1 + 18 + 2),
        ([{"role": "system", "content": "w5"}, user(text_part("w6"))], "text", "text", 2),
        (kvp.Text("w9"), "text", "text", 1),
        ([7, 8, 9], "text", "text", 3),
        (np.array([7, 8]), "text", "text", 2),
        (frames, "images", "chunk", 36),
        ({"type": "video", "video": list(frames), "rate": 2}, "video", "chunk", None),
    ):
        session.add(item)
        entry = session.window.pieces[-1].entry
        assert (entry.modality, entry.kind) == (modality, kind)
        assert tokens in (None, entry.tokens)
    assert session.recall(message) == chunk_id(backbone.fingerprint, "w5", PAGE, "w6 w7")
    session.add("w12 w13", kind="chunk")
    assert session.window.pieces[-1].entry.kind == "chunk"


def test_inputs_beyond_the_limits_are_refused(session, tmp_path: Path):
    before = state(session)
    with (tmp_path / "large.png").open("wb") as file:
        file.write(encoded(PAGE))
        file.truncate(100 << 20)
    large = np.zeros((6000, 6000, 3), np.uint8)
    for item in (
        tmp_path / "large.png",
        large,
        [PAGE, large],
        [kvp.Video(np.broadcast_to(large, (2, *large.shape)), rate=1)],
    ):
        with pytest.raises(InputError, match="expected at most"):
            session.add(item)
    for call in (session.add, session.ask):
        with pytest.raises(InputError, match="got a text of 40000 tokens"):
            call([7] * 40_000)
    assert state(session) == before
