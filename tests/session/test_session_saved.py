"""A saved session goes on with the same answers, also after a kill; damaged and hostile files are refused whole."""
# pyright: reportArgumentType=false, reportOptionalOperand=false

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import kvpatch_jax as kvp
from kvpatch_jax.errors import SessionError
from tests.shared.session_cases import QUESTION, image_of
from tests.shared.window_oracle import backbone_of


@pytest.fixture(scope="module")
def saved(backbone, tmp_path_factory) -> tuple[Path, list[Any]]:
    path = tmp_path_factory.mktemp("saved") / "session"
    with kvp.Session(backbone, keep=2, around=("w30 ", " w31")) as session:
        session.add("w5 w6 w7 w8 w9 w10", id="system")
        for step in range(4):
            session.add(image_of(step), id=f"shot {step}")
        session.save(path)
        return path, answers_before_and_after_a_recall(session)


def answers_before_and_after_a_recall(session: kvp.Session) -> list[Any]:
    first = session.ids, session.gone, session.ask(QUESTION, steps=4, stop=(), temperature=1.5, seed=3).ids
    session.recall("shot 1")
    session.replace("system", "w9 w10")
    return [*first, session.ids, session.ask(QUESTION, steps=4, stop=()).ids]


def test_a_restored_session_answers_alike(backbone, saved, tmp_path: Path):
    path, expected = saved
    with kvp.Session.restore(path, backbone) as session:
        assert [session.fidelity(name) for name in session.ids] == ["exact"] * 2 + ["survivor"] * 2
        session.save(tmp_path / "again")
        session.save(tmp_path / "again")
        assert answers_before_and_after_a_recall(session) == expected
        assert (session.keep, session.config.around) == (2, ("w30 ", " w31"))
    with kvp.Session.restore(tmp_path / "again", backbone) as session:
        with session.fork() as branch:
            branch.save(tmp_path / "branch")
        assert answers_before_and_after_a_recall(session) == expected
    with kvp.Session.restore(tmp_path / "branch", backbone) as session:
        assert answers_before_and_after_a_recall(session) == expected
        session.save(tmp_path / "bare", kv=False)
    with kvp.Session.restore(tmp_path / "bare", backbone) as session:
        # It forgot what had left.
        assert {session.fidelity(name) for name in session.ids} == {"exact"}
        assert session.ask(QUESTION, steps=3, audit=True).kl < 1e-8
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again", "bare", "branch"]


@pytest.mark.parametrize(("moment", "error"), [("fsync", OSError), ("replace", OSError), ("replace", SystemExit)])
def test_a_save_that_fails_or_is_killed_leaves_the_file_that_was_there(
    backbone, saved, tmp_path: Path, monkeypatch, moment, error
):
    """The session goes on from it with the same answers."""
    path, expected = tmp_path / "session", saved[1]
    path.write_bytes(saved[0].read_bytes())

    def fail(*_: Any, **__: Any) -> None:
        raise error("no space")

    with kvp.Session.restore(path, backbone) as session:
        session.add("w40 w41")
        monkeypatch.setattr(os, moment, fail)
        with pytest.raises(SessionError if error is OSError else error):
            session.save(path)
        monkeypatch.undo()
    assert path.read_bytes() == saved[0].read_bytes()
    with kvp.Session.restore(path, backbone) as session:
        assert answers_before_and_after_a_recall(session) == expected


def test_damaged_and_foreign_files_are_refused(backbone, saved, tmp_path: Path):
    content, bad = saved[0].read_bytes(), tmp_path / "bad"
    with pytest.raises(SessionError, match="backbone"):
        kvp.Session.restore(saved[0], backbone_of("gqa"))
    for wrong in (
        *(b"", content[:-1], content[: len(content) // 2], content.replace(b"shot 1", b"shot 7")),
        content.replace(b"kvpatch session 4", b"kvpatch session 9"),
        (2**60).to_bytes(8, "little") + content[8:],
        bytes([*content[:-3], content[-3] ^ 1, *content[-2:]]),
    ):
        bad.write_bytes(wrong)
        with pytest.raises(SessionError):
            kvp.Session.restore(bad, backbone)
    with pytest.raises(SessionError):
        kvp.Session.restore(tmp_path / "none", backbone)


WRONG = {
    "": {**dict.fromkeys(("window", "settings", "pieces", "dtype"), (None, 5, "x", [1])), "used": ([5],)},
    "settings": {"name": (5,), "keep": (-1, 1.5, "x", [2, 1]), "reuse": ("x", []), "kl": (None, -1), "chat": (1.5,),
                 "around": (-1, "x", ["a"]), "memory": (-1, "x"), "placeholder": (-1, " "), "encoding": (1, "x")},
    "pieces": {**dict.fromkeys(("id", "name", "content"), (None, 5)),
               "items": (5, [5], [{"text": 5}], [{"tokens": ["a"]}], [{"image": "x"}], [{"video": "x"}], [{}])},
}  # fmt: skip
"""Values that a foreign program may write in place of one field: of the body, its settings, or a piece."""


def hostile_bodies(text: str) -> Iterator[dict[str, Any]]:
    """Yields bodies with one wrong value each, or without the field."""
    for part, fields in WRONG.items():
        for name, values in fields.items():
            for value in (..., *values):
                body = json.loads(text)
                table = {"": body, "settings": body["settings"], "pieces": body["pieces"][2]}[part]
                table[name] = value
                if value is ...:
                    del table[name]
                yield body


@pytest.mark.usefixtures("unchecked")
def test_hostile_files_are_refused_and_nothing_is_held(backbone, saved, store, tmp_path: Path):
    """They have the right digests, as anybody may write."""
    content, path = saved[0].read_bytes(), tmp_path / "hostile"
    arrays = safetensors.numpy.load(content)
    meta = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]

    def restore(body: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        text = json.dumps(body)
        digest = hashlib.blake2b(text.encode(), digest_size=32)
        for name in sorted(set(arrays) - {"end"}):
            digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
            digest.update(arrays[name].tobytes())
        path.write_bytes(safetensors.numpy.save(arrays, {**meta, "session": text, "digest": digest.hexdigest()}))
        kvp.Session.restore(path, backbone, store, pages=64).close()

    restore(json.loads(meta["session"]), arrays)
    bodies, threads, accepted = list(hostile_bodies(meta["session"])), threading.active_count(), []
    for body in bodies:
        with contextlib.suppress(SessionError):
            restore(body, arrays)
            accepted.append(body)
    assert (accepted, len(bodies) >= 40) == ([], True)
    body = json.loads(meta["session"])
    for name in [name for name in arrays if name.startswith(("kept.2.", "item."))]:
        others = {key: value for key, value in arrays.items() if key != name}
        for changed in (others, {**others, name: arrays["end"]}, {**others, name: arrays[name][:0]}):
            with pytest.raises(SessionError):
                restore(body, changed)
    assert threading.active_count() == threads
