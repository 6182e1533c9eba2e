"""Other harnesses that ask over reused KV get the answers of a whole prefill where reuse is exact."""

import numpy as np
import pytest

import kvpatch_jax as kvp
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
def backbone(checkpoint):
    from kvpatch_jax.models import load

    return load(checkpoint("qwen2_5_vl"), dtype="float32")


def prefilled_answer(backbone, messages) -> str:
    """What a prefill of the whole conversation generates greedily."""
    ids = backbone.generate(backbone.embed(**backbone.chat(messages)), STEPS)[0]
    return backbone.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def test_exact_reuse_answers_as_a_prefill_of_the_conversation(backbone):
    chat = ReusedChat(backbone, approximate=False)
    first, second = picture(1), picture(2)
    for system, contents in ((None, [first, second, "hello"]), ("look", [second, first, "hi"])):
        messages = asked(*contents, system=system)
        assert chat.answer(messages, steps=STEPS).text == prefilled_answer(backbone, messages)
    chat.close()


@pytest.mark.nightly
def test_known_images_are_served_without_a_forward(backbone, tmp_path):
    first, second, third = picture(1), picture(2), picture(3)
    orders, prefilled = [(first, second, third), (third, first, second)] * 2, {}
    for approximate in (True, False):
        with kvp.ChunkStore(tmp_path / f"{approximate}") as store:
            chat = ReusedChat(backbone, store, approximate=approximate)
            counts = []
            for order in orders:
                answered = chat.answer(asked(*order, "hello"), steps=1)
                counts.append(answered.prefilled / answered.prompt_tokens)
                former = chat._session(None).runtime.former
                assert former is not None
                former.flush()
            chat.close()
        prefilled[approximate] = counts
    # The same images in the same order are there. Where approximation is allowed, so is one behind the same neighbour.
    for counts in prefilled.values():
        assert counts[0] > 0.5
        assert counts[2:] == [0, 0]
    assert prefilled[True][1] < prefilled[False][1]


def test_messages_of_another_form_are_refused(backbone):
    word, link = {"type": "text", "text": "a"}, {"type": "image", "url": "https://x.org/a"}
    for messages, message in (
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "got roles"),
        (asked(picture(1)), "the last of which is no text"),
        ([{"role": "user", "content": [{"type": "image"}, word]}], "'image' with the fields"),
        ([{"role": "user", "content": [link, word]}], "x.org"),
    ):
        with pytest.raises(KVPatchError, match=message):
            ReusedChat(backbone).answer(messages)
