"""Rollouts of a group are those of sessions of their own, and what they share is prefilled once."""

import contextlib
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.serving import RolloutSampler
from tests.shared.session_cases import IMAGE_TOKENS, image_of, reader, state, words

PROMPTS = [words(7, 3), words(20, 5)]
SAMPLING = {"temperature": 0.9, "top_k": 8}


@pytest.fixture(scope="module")
def backbone() -> Any:
    return reader()


def alone(backbone: Any, prompt: str, seed: int) -> tuple[tuple[int, ...], list[float]]:
    """Returns the tokens of a rollout in a session of its own, and their log-probabilities token by token."""
    with kvp.Session(backbone, lead=words(5, 4)) as session:
        session.add(image_of(1))
        ids = session.ask(prompt, steps=4, seed=seed, stop=(), **SAMPLING).ids
        scores = []
        for count in range(1, len(ids) + 1):
            scores.append(float(session.log_probs(prompt, np.asarray(ids[:count]))[-1]))
    return ids, scores


def test_a_group_has_the_tokens_and_log_probabilities_of_separate_sessions(backbone: Any):
    with kvp.Session(backbone, lead=words(5, 4)) as session:
        group = RolloutSampler(session)(
            PROMPTS, 4, images=[image_of(1)], multi_sampling=3, seed=40, stop=(), **SAMPLING
        )
    assert len({tuple(tokens) for tokens in group.tokens}) > 2
    for number, (tokens, scores) in enumerate(zip(group.tokens, group.logprobs, strict=True)):
        ids, expected = alone(backbone, PROMPTS[number // 3], 40 + number)
        assert tuple(tokens) == ids
        np.testing.assert_allclose(scores, expected, atol=2e-5)
    assert (group.padded_prompt_tokens[:3, :2] == 0).all()
    assert [list(row) for row in group.padded_prompt_tokens[3:]] == 3 * [[20, 21, 22, 23, 24]]


def test_log_probabilities_are_those_of_a_forward_over_prompt_and_answer(backbone: Any):
    items = [kvp.Text(words(5, 4)), image_of(1), kvp.Text(PROMPTS[0])]
    with kvp.Session(backbone, lead=words(5, 4)) as session:
        group = RolloutSampler(session)(PROMPTS[0], 4, images=[image_of(1)], temperature=0.0, stop=())
    context, start = [], 0
    for item in items:
        tokens = backbone.embed(**backbone.prepare([item])).shift(start)
        whole = kvp.joined(*context) if context else None
        out = backbone.prefill(tokens, whole)
        context.append(kvp.to_engine(backbone.layout, out.kv, np.asarray(tokens.positions), 0))
        start = int(np.asarray(tokens.positions).max()) + 1
    logits = np.asarray(out.logits, np.float64).reshape(-1)
    assert group.tokens[0][0] == logits.argmax()
    expected = logits.max() - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(group.logprobs[0][0], expected, atol=2e-5)


@pytest.mark.parametrize("shared", [False, True], ids=["one runtime", "sessions"])
def test_images_are_prefilled_once_and_the_session_stays_as_it_is(
    backbone: Any, monkeypatch: pytest.MonkeyPatch, shared: bool
):
    lead, prefilled = words(5, 4), list[int]()
    with contextlib.ExitStack() as stack:
        sessions = stack.enter_context(kvp.Sessions(backbone, pages=64, batch=4))
        session = stack.enter_context(sessions.open(lead=lead) if shared else kvp.Session(backbone, lead=lead))
        session.add(image_of(2))
        before, costs = state(session), session.runtime.executor.costs
        prefill = type(costs).prefill

        def counted(self: Any, id: str, tokens: int, behind: int) -> Any:
            prefilled.append(tokens)
            return prefill(self, id, tokens, behind)

        monkeypatch.setattr(type(costs), "prefill", counted)
        images = [image_of(3), image_of(4)]
        group = RolloutSampler(session)(PROMPTS, 3, images=images, multi_sampling=4, stop=(), **SAMPLING)
        assert [len(tokens) for tokens in group.tokens] == 8 * [3]
        assert prefilled == 2 * [IMAGE_TOKENS], "eight rollouts, and a forward of each image"
        # Window, names, slots and provided inputs; the counts are those of the session alone.
        assert state(session) == before


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_sampled_is_refused(backbone: Any, unchecked: None):
    with kvp.Session(backbone, lead=words(5, 4)) as session:
        sampler = RolloutSampler(session)
        with pytest.raises(kvp.errors.InputError, match="got 0 prompts"):
            sampler([], 4)
        with pytest.raises(kvp.errors.InputError, match="multi_sampling 0"):
            sampler(PROMPTS, 4, multi_sampling=0)
        for ids in ([-1], [7, 10**6]):
            with pytest.raises(kvp.errors.InputError, match=r"log_probs\.ids: got"):
                session.log_probs(PROMPTS[0], ids)
        wrong: list[dict[str, Any]] = [{"input_strings": 5}, {"images": image_of(1)}, {"seed": "5"}, {"seed": True}]
        for options in wrong:
            with pytest.raises(kvp.errors.InputError, match=next(iter(options))):
                sampler(**{"input_strings": PROMPTS, "max_generation_steps": 4} | options)
