"""Every form of an input is named by its content; an invalid call raises a typed error and changes nothing."""
# pyright: reportArgumentType=false

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.errors import InputError, KVPatchError, SessionError
from tests.shared.session_cases import QUESTION, image_of, state
from tests.shared.window_oracle import backbone_of

PAGE = image_of(0)


def encoded(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def image_part(content: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}}


def user(*parts: Any) -> dict:
    return {"role": "user", "content": list(parts)}


def test_an_image_is_one_input_in_every_form(backbone, tmp_path: Path):
    from PIL import Image

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
    message = user({"type": "text", "text": "w5"}, image_part(encoded(PAGE)), {"type": "text", "text": "w6 w7"})
    frames = np.stack([PAGE, image_of(1)])
    for item, modality, kind, tokens in (
        (message, "mixed", "chunk", 1 + 18 + 2),
        ([{"role": "system", "content": "w5"}, user({"type": "text", "text": "w6"})], "text", "text", 2),
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


def test_inputs_beyond_the_limits_are_refused(session):
    before, large = state(session), np.zeros((6000, 6000, 3), np.uint8)
    for item in ([PAGE, large], [kvp.Video(np.broadcast_to(large, (2, *large.shape)), rate=1)]):
        with pytest.raises(InputError, match="expected at most"):
            session.add(item)
    with pytest.raises(InputError, match="got a text of 40000 tokens"):
        session.ask([7] * 40_000)
    assert state(session) == before


IMAGE = image_of(5)
INPUTS = (None, 7, True, "", "\ud800", b"\x89PNG nothing", {}, {"image": 1}, [], [[]], [2**70], [-1], object(),
          Path("a\0b"), Path("/dev/zero"), np.zeros((4, 4, 3), np.float32), np.zeros((0, 4, 3), np.uint8))  # fmt: skip
NAMES = (None, 2.0, "", "no such", "\ud800", b"lead", ["lead"], {}, np.zeros(3))
COUNTS = (-1, -(2**70), 1.5, "2", True, [], np.ones(2))
NUMBERS = ("hot", [[]], float("nan"), -1.5, object())
# The values that mean nothing in place of "?": as an argument, or as an option by name.
TABLE = [
    (INPUTS, ("add", "?"), ("insert", "?", "shot"), ("replace", "shot", "?"), ("recall", "?"), ("ask", "?"),
     ("needs", "shot", "?"), ("plan", "?")),
    (("lead", *NAMES), ("evict", "?"), ("insert", IMAGE, "?"), ("replace", "?", IMAGE), ("needs", "?", QUESTION)),
    (COUNTS, ("slide", "?"), ("fork", "keep"), ("ask", QUESTION, "steps"), ("ask", QUESTION, "look"),
     ("needs", "shot", QUESTION, "steps")),
    (NUMBERS, ("ask", QUESTION, "temperature"), ("ask", QUESTION, "top_p"), ("ask", QUESTION, "top_k"),
     ("add", IMAGE, "kind"), ("reorder", "?"), ("needs", "last", QUESTION, "bound")),
    (("", "\ud800", 7, [], "shot"), ("add", IMAGE, "id"), ("replace", "shot", "w5", "name")),
    ((None, "a\0b", "/no folder/file"), ("save", "?")),
    ((["shot", "lead"], ["shot", "shot"], ["no such"], [7]), ("reorder", "?")),
]  # fmt: skip
OPTIONS = ("keep", "steps", "look", "temperature", "top_p", "top_k", "kind", "bound", "id", "name")


@pytest.mark.usefixtures("unchecked")
def test_hostile_calls_change_nothing(backbone):
    with kvp.Session(backbone, keep=2) as session:
        for number, name in enumerate(("lead", "gone", "shot", "last")):
            session.add(image_of(number), id=name)
        answer, before, wrong, count = session.ask(QUESTION, steps=2, stop=()).ids, state(session), [], 0
        for values, *calls in TABLE:
            for name, *arguments in calls:
                option = arguments[-1] if isinstance(arguments[-1], str) and arguments[-1] in OPTIONS else None
                for value in values:
                    inputs = [value if isinstance(item, str) and item == "?" else item for item in arguments]
                    outcome, count = "no error", count + 1
                    try:
                        named = {option: value} if option else {}
                        getattr(session, name)(*inputs[: len(inputs) - bool(option)], **named)
                    except KVPatchError:
                        outcome = ""
                    except Exception as error:
                        outcome = repr(error)[:80]
                    if outcome or state(session) != before:
                        wrong.append((name, arguments, f"{value!r:.40}", outcome))
                        before = state(session)
        assert not wrong, "\n".join(map(str, wrong))
        assert count >= 180
        assert session.ask(QUESTION, steps=2, stop=()).ids == answer


def test_a_closed_session_takes_no_calls(session):
    session.add(image_of(0))
    answer = session.ask(QUESTION, steps=8, stop=())
    session.close()
    session.close()
    for name, *arguments in (("add", "w5"), ("ask", QUESTION), ("slide", 1), ("fork",), ("save", "x"), ("plan",)):
        with pytest.raises(SessionError, match="was closed"):
            getattr(session, name)(*arguments)
    with pytest.raises(SessionError, match="got closed after"):
        str(answer)


@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_of_a_session_are_refused(backbone):
    linker = type("Linker", (), {"backbone": "f" * 64})()
    with kvp.Session(backbone_of("gqa")) as other:
        for name, *values in (
            *(("keep", 0, True, (2, 1), "2"), ("kl", -0.1, float("nan")), ("around", "w5", ("w5",)), ("chat", "yes")),
            *(("encoding", "k9v9"), ("placeholder", "  ", 3), ("memory", -1), ("reuse", "uncertified"), ("pages", 0)),
            *(("runtime", 5, other.runtime), ("promise", "recall"), ("audit", 1.5), ("linker", linker)),
            *((name, 5) for name in ("backbone", "store", "name", "certificate", "retriever", "config")),
            *(("rank", -1, {"nope": 4}, "four"), ("lead", b"\x89PNG nothing", -1)),
        ):
            for value in values:
                with pytest.raises(KVPatchError, match="expected"):
                    kvp.Session(**{"backbone": backbone, name: value})
        with pytest.raises(SessionError, match="got option 'kep'; expected 'keep', or another of around"):
            kvp.Session(backbone, kep=2)
