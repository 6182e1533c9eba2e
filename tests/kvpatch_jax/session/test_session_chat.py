"""Sessions laid out by a checkpoint's chat template: the very tokens of its own prompts, images staying chunks."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from session_cases import image_of, reader

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, SessionError
from models import load
from models.inputs.chat import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, ChatTemplate
from tests.goldens.load import GOLDENS, write_checkpoint

GOLD = json.loads((GOLDENS / "chat.json").read_text())["families"]
ASKED, SYSTEM = "What is this?", "A page"


def checkpoint(family: str, folder: Path) -> Any:
    """The tiny checkpoint with transformers' tokenizer and template."""
    directory, gold = write_checkpoint(family, folder), GOLD[family]
    (directory / "tokenizer.json").write_text(json.dumps(gold["tokenizer"]))
    (directory / TEMPLATE_FILE).write_text(gold["template"])
    (directory / TOKENIZER_CONFIG_FILE).write_text(json.dumps(gold["special_tokens"]))
    return load(directory)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Any:
    return checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("chat"))


@pytest.fixture
def prepared(monkeypatch) -> Callable[[Any], list[int]]:
    """Makes a backbone keep the token ids of everything it prepares, in order."""

    def keep(backbone: Any) -> list[int]:
        ids, prepare = list[int](), backbone.prepare

        def keeping(items: Any) -> Any:
            prompt = prepare(items)
            ids.extend(int(token) for token in prompt["input_ids"][0])
            return prompt

        monkeypatch.setattr(backbone, "prepare", keeping)
        return ids

    return keep


def test_a_session_is_asked_as_the_checkpoint_was_trained(backbone, prepared, tmp_path: Path):
    """Tokens and answers are those of one message with these images: exact, for nothing has left."""
    images = [image_of(0), image_of(1, 56)]
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": ASKED}]
    own = backbone.chat([{"role": "user", "content": content}])["input_ids"][0].tolist()
    front = backbone.chat_frame().front  # the template's own, without a system prompt of ours
    assert own[: len(front)] == list(front)
    system = {"role": "system", "content": [{"type": "text", "text": SYSTEM}]}
    prompt = backbone.chat([system, {"role": "user", "content": content}])
    expected = np.asarray(backbone.generate(backbone.embed(**prompt), 4, stop=()))[0].tolist()
    ids = prepared(backbone)
    with kvp.Session(backbone, keep=2, chat=True, lead=SYSTEM) as session:
        for image in images:
            session.add(image)
        assert list(session.ask(ASKED, steps=4, stop=()).ids) == expected
        assert ids == prompt["input_ids"][0].tolist()
        assert [piece.entry.kind for piece in session.window.pieces] == ["text", "chunk", "chunk"]
        session.add(image_of(2))  # the first image leaves, the template's front stays
        assert len(session.gone) == 1
        assert session.window.pieces[0].entry.kind == "text"
        session.save(tmp_path / "session")
        answer = session.ask(ASKED, steps=4, stop=()).ids
    with kvp.Session.restore(tmp_path / "session", backbone) as again:
        assert again.config.chat
        assert again.ask(ASKED, steps=4, stop=()).ids == answer
        with again.fork() as branch:
            assert branch.ask(ASKED, steps=4, stop=()).ids == answer


def test_a_session_gives_the_template_its_names(backbone, monkeypatch):
    """Such as whether an answer opens with a thought."""
    source = "<{% for part in messages[-1].content %}{{ part.text or '<|image_pad|>' }}{% endfor %}"
    source += "{% if enable_thinking is defined and enable_thinking is false %}={% else %}?{% endif %}"
    monkeypatch.setattr(backbone, "chat_template", ChatTemplate(source))
    for chat, behind in ((True, "?"), ({"enable_thinking": False}, "="), ({}, "?")):
        with kvp.Session(backbone, keep=1, chat=chat) as session:
            assert session.config.chat is True
            assert session.config.around == ("", behind)


def test_chat_templates_that_change_images_are_refused(backbone, unchecked, tmp_path: Path):
    with pytest.raises(SessionError, match=r"got a chat template with 1 tokens between two images"):
        kvp.Session(checkpoint("llava", tmp_path), chat=True)
    plain = reader()
    with pytest.raises(InputError, match="without a chat template"):
        kvp.Session(plain, chat=True)
    plain.chat_template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(InputError, match="chat template"):
        kvp.Session(plain, chat=True)
    for wrong in ({"lead": image_of(0)}, {"lead": 0}, {"around": ("a", "b")}, {"chat": "yes"}, {"chat": {1: 2}}):
        with pytest.raises(SessionError, match="expected"):
            kvp.Session(backbone, **{"chat": True, **wrong})
    with pytest.raises(SessionError, match=r"session\.chat: got a BackboneWithoutChat"):
        kvp.Session(BackboneWithoutChat(reader()), chat=True)


class BackboneWithoutChat:
    """A backbone that knows of no chat."""

    def __init__(self, backbone: Any):
        self.backbone = backbone

    def __getattr__(self, name: str) -> Any:
        if name in ("chat_frame", "ids"):
            raise AttributeError(name)
        return getattr(self.backbone, name)
