"""Sessions laid out by a checkpoint's chat template: the very tokens of its own prompts, images staying chunks."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, SessionError
from kvpatch_jax.models import load
from tests.goldens.load import write_chatting
from tests.shared.session_cases import image_of, reader

ASKED, SYSTEM = "What is this?", "A page"


def checkpoint(family: str, folder: Path) -> Any:
    """The tiny checkpoint with transformers' tokenizer and template."""
    return load(write_chatting(family, folder))


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Any:
    return checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("chat"))


def test_a_session_is_asked_as_the_checkpoint_was_trained(backbone, tmp_path: Path, monkeypatch):
    """Tokens and answers are those of one message with these images: exact, for nothing has left."""
    images = [image_of(0), image_of(1, 56)]
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": ASKED}]
    system = {"role": "system", "content": [{"type": "text", "text": SYSTEM}]}
    prompt = backbone.chat([system, {"role": "user", "content": content}])
    expected = np.asarray(backbone.generate(backbone.embed(**prompt), 4, stop=()))[0].tolist()
    ids, prepare = list[int](), backbone.prepare

    def prepared(items: Any) -> Any:
        ids.extend(prepare(items)["input_ids"][0].tolist())
        return prepare(items)

    monkeypatch.setattr(backbone, "prepare", prepared)
    with kvp.Session(backbone, keep=2, chat=True, lead=SYSTEM) as session:
        for image in images:
            session.add(image)
        assert list(session.ask(ASKED, steps=4, stop=()).ids) == expected
        assert ids == prompt["input_ids"][0].tolist()
        assert [piece.entry.kind for piece in session.window.pieces] == ["text", "chunk", "chunk"]
        session.add(image_of(2))
        assert len(session.gone) == 1
        assert session.window.pieces[0].entry.kind == "text", "the template's front stays"
        session.save(tmp_path / "session")
        answer = session.ask(ASKED, steps=4, stop=()).ids
    with kvp.Session.restore(tmp_path / "session", backbone) as again, again.fork() as branch:
        assert again.ask(ASKED, steps=4, stop=()).ids == branch.ask(ASKED, steps=4, stop=()).ids == answer


def test_chats_that_make_no_session_are_refused(backbone, unchecked, tmp_path: Path):
    with pytest.raises(SessionError, match=r"got a chat template with 1 tokens between two images"):
        kvp.Session(checkpoint("llava", tmp_path), chat=True)
    with pytest.raises(InputError, match="without a chat template"):
        kvp.Session(reader(), chat=True)
    for wrong in ({"lead": image_of(0)}, {"lead": 0}, {"around": ("a", "b")}, {"chat": "yes"}, {"chat": {1: 2}}):
        with pytest.raises(SessionError, match="expected"):
            kvp.Session(backbone, **{"chat": True, **wrong})
