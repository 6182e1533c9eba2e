"""Other harnesses that ask over reused KV get the answers of a whole prefill where reuse is exact."""

import numpy as np
import pytest

from evals.plugins import ReusedChat
from kvpatch_jax.errors import KVPatchError

STEPS = 6


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (60, 60, 3), np.uint8)


def asked(*contents, system: str | None = None) -> list[dict]:
    entries = [
        {"type": "text", "text": content} if isinstance(content, str) else {"type": "image", "image": content}
        for content in contents
    ]
    lead = [] if system is None else [{"role": "system", "content": system}]
    return [*lead, {"role": "user", "content": entries}]


@pytest.fixture(scope="module")
def backbone(loaded):
    return loaded("qwen2_5_vl")


def prefilled_answer(backbone, messages) -> str:
    """What a prefill of the whole conversation generates greedily."""
    ids = backbone.generate(backbone.embed(**backbone.chat(messages)), STEPS)[0]
    return backbone.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def test_exact_reuse_answers_as_a_prefill_of_the_conversation(backbone):
    chat = ReusedChat(backbone, approximate=False)
    for places in ((1, 2), (2, 1)):
        messages = asked(*map(picture, places), "hello", system="look")
        assert chat.answer(messages, steps=STEPS).text == prefilled_answer(backbone, messages)
    chat.close()


def test_messages_of_another_form_are_refused(backbone):
    word, link = {"type": "text", "text": "a"}, {"type": "image", "url": "https://x.org/a"}
    for messages, message in (
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "got roles"),
        ([{"role": "user", "content": [{"type": "image"}, word]}], "'image' with the fields"),
        ([{"role": "user", "content": [link, word]}], "x.org"),
    ):
        with pytest.raises(KVPatchError, match=message):
            ReusedChat(backbone).answer(messages)
