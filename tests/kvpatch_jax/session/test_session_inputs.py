"""Inputs of sessions: names from contents, files and texts, and invalid ones, which change nothing."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from session_cases import QUESTION, image_of, state
from window_oracle import tiny

import kvpatch_jax as kvp
from kvpatch_jax.errors import ConfigError, ImageError, InputError, KVPatchError, PoolError, SessionError, WindowError
from kvpatch_jax.session import SessionConfig


def test_ids_come_from_content(backbone, session, tmp_path: Path):
    image = image_of(0)
    Image.fromarray(image).save(tmp_path / "shot.png")
    name = session.add(tmp_path / "shot.png")
    assert name == kvp.cache.chunk_id(backbone.fingerprint, image)
    assert session.window.piece(name).entry.content == name
    again = session.add(tmp_path / "shot.png")
    assert again == f"{name}#2"
    assert len(session) == 2
    assert session.window.piece(again).entry.content == name
    assert session.add(image_of(1), id="mine") == "mine"
    assert "mine" in session
    for taken in ("mine", name):
        with pytest.raises(SessionError, match="name of another piece"):
            session.add(image_of(2), id=taken)


def test_a_path_is_a_path_and_a_text_a_text(session, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(image_of(0)).save("shot.png")
    before = state(session)
    for name in ("shot.png", "one.JPEG"):  # whether it is there or not
        for call in (session.add, session.recall, session.ask):
            with pytest.raises(InputError, match=r"looks like a file's name.*pathlib\.Path\(.*kvpatch_jax\.Text\("):
                call(name)
    with pytest.raises(ImageError, match="no such file"):
        session.add(tmp_path / "none.png")
    assert state(session) == before
    given = (kvp.Text("w9"), "w5 w6", [7, 8, 9], [image_of(0), image_of(1)])
    for thing, kind, tokens in zip(given, ("text", "text", "text", "chunk"), (1, 2, 3, 36), strict=True):
        name = session.add(thing)
        assert (session.window.piece(name).entry.kind, session.window.piece(name).entry.tokens) == (kind, tokens)
    name = session.add("w12 w13", kind="chunk")
    assert session.window.piece(name).entry.kind == "chunk"


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has many pixels."""
    chunk = lambda kind, body: struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused_and_changes_nothing(backbone, session, tmp_path: Path):
    session.add(image_of(0))
    kept = session.add(image_of(1))
    before, stats = state(session), session.stats()
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.write(bomb(10, 10))
        file.truncate(100 << 20)
    whole = io.BytesIO()
    Image.fromarray(image_of(5)).save(whole, "PNG")
    for wrong in (
        large,
        bomb(50_000, 50_000),
        bomb(8_000, 8_000),
        whole.getvalue()[:60],
        b"\x89PNG nothing",
        np.zeros((6000, 6000, 3), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((0, 4, 3), np.uint8),
        tmp_path,
        Path("/dev/zero"),
        tmp_path / "a\0b",
    ):
        with pytest.raises(ImageError):
            session.add(wrong)
    for wrong in (None, 7, {}, [], (), "", "  ", [[]], [None], b"text", {"image": 1}, object(), [1.5], True):
        with pytest.raises(InputError):
            session.add(wrong)
    for wrong in ("", [], None, 3.5, "   "):
        with pytest.raises(InputError):
            session.ask(wrong)
    for error, how in (
        (InputError, {"steps": 2**40}),
        (InputError, {"temperature": 1, "seed": 1.5}),
        (InputError, {"temperature": 1, "seed": "7"}),
        (ConfigError, {"temperature": "hot"}),
        (ConfigError, {"temperature": None}),
        (ConfigError, {"top_p": "all"}),
    ):
        with pytest.raises(error, match="expected"):
            session.ask(QUESTION, **how)
    assert session.recall(image_of(1)) == session.recall(kept) == kept  # it is there
    for wrong in ("no such name", image_of(9)):
        with pytest.raises(SessionError):
            session.recall(wrong)
    for error, call in (
        (SessionError, lambda: session.evict("no such name")),
        (WindowError, lambda: session.evict(session.ids[0])),
        (WindowError, lambda: session.slide(-1)),
        (WindowError, lambda: session.reorder([kept, session.ids[0]])),
        (SessionError, lambda: session.needs("no such name", QUESTION)),
        (WindowError, lambda: session.needs(session.ids[0], QUESTION)),
        (KVPatchError, lambda: session.add(image_of(3), id=3)),
        (KVPatchError, lambda: session.add(image_of(3), id="")),
        (InputError, lambda: session.add(image_of(3), id="\ud800")),
        (SessionError, lambda: session.fork(keep=0)),
        (SessionError, lambda: session.fork(keep=-3)),
        (KVPatchError, lambda: session.add("w5", order_free=True, kind="text")),
        (KVPatchError, lambda: session.add(image_of(3), kind="picture")),
    ):
        with pytest.raises(error):
            call()
    assert state(session) == before
    assert session.stats() == stats


@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_of_a_session_are_refused(backbone):
    other = tiny("gqa")
    linker = type("Linker", (), {"backbone": "f" * 64})()
    with kvp.Session(other) as alien:
        for error, given in (
            (SessionError, {"backbone": "evals/trained/documents/qwen2_5_vl"}),
            (SessionError, {"store": "cache"}),
            (SessionError, {"keep": 0}),
            (SessionError, {"keep": True}),
            (SessionError, {"keep": 2.0}),
            (SessionError, {"runtime": alien.runtime}),
            (SessionError, {"linker": linker}),
            (SessionError, {"certificate": "certificate.json"}),
            (SessionError, {"goal": 0.1}),
            (WindowError, {"promise": "recall"}),
            (PoolError, {"pages": -1}),
            (ImageError, {"lead": b"\x89PNG nothing"}),
        ):
            with pytest.raises(error):
                kvp.Session(**{"backbone": backbone, **given})


@pytest.mark.usefixtures("unchecked")
def test_options_override_a_config_and_are_shared_with_forks(backbone):
    config = SessionConfig(memory="1 MiB", around=("w5 ", " w6"))
    with kvp.Session(backbone, config=config, memory=7, pages=8) as session, session.fork() as branch:
        assert (session.config.memory, session.config.around) == (7, ("w5 ", " w6"))
        assert branch.config is session.config
    assert config.memory == 1 << 20
    with pytest.raises(TypeError, match="colour"):
        kvp.Session(backbone, colour="red")
    with pytest.raises(SessionError, match="expected a SessionConfig"):
        kvp.Session(backbone, config={"memory": 7})


@pytest.mark.slow
def test_a_full_pool_refuses_and_one_without_a_size_grows(backbone):
    with kvp.Session(backbone, pages=4, page_size=16) as small:
        small.add(image_of(0))
        small.add(image_of(1))
        before = state(small)
        with pytest.raises(PoolError):
            small.add(image_of(2))
        assert state(small) == before
        small.evict(small.ids[1])
        small.add(image_of(2))
    with kvp.Session(backbone, page_size=16) as grown:
        grown.runtime.executor.books.allocator.allocate(254 * 16)
        for step in range(3):
            grown.add(image_of(step))
        assert grown.stats().pages == 512
        exact = grown.ask(QUESTION, steps=1, audit=True)
        assert exact.kl is not None
        assert exact.kl < 1e-8
