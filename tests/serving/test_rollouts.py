"""Rollouts of a group have the tokens and scores of separate sessions, and what they share is prefilled once."""

from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.serving import RolloutSampler
from tests.shared.session_cases import IMAGE_TOKENS, image_of, reader, state, words

PROMPTS = [words(7, 3), words(20, 5)]
LEAD = words(5, 4)
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_k": 8, "stop": ()}


@pytest.fixture(scope="module")
def backbone() -> Any:
    return reader()


def alone(backbone: Any, prompt: str, seed: int, steps: int) -> tuple[tuple[int, ...], Any]:
    """Returns the tokens of a rollout in a session of its own, and their log-probabilities token by token."""
    with kvp.Session(backbone, lead=LEAD) as session:
        session.add(image_of(1))
        ids = session.ask(prompt, steps=steps, seed=seed, **SAMPLING).ids
        return ids, session.log_probs(prompt, np.asarray(ids))


def test_a_group_is_that_of_separate_sessions_and_prefills_each_image_once(backbone: Any, monkeypatch: Any):
    prefilled, steps, count = list[int](), 2, 2
    with kvp.Session(backbone, lead=LEAD) as session:
        before, costs = state(session), session.runtime.executor.costs
        prefill = type(costs).prefill

        def counted(self: Any, id: str, tokens: int, behind: int) -> Any:
            prefilled.append(tokens)
            return prefill(self, id, tokens, behind)

        with monkeypatch.context() as patch:
            patch.setattr(type(costs), "prefill", counted)
            images = [image_of(1)]
            group = RolloutSampler(session)(PROMPTS, steps, images=images, multi_sampling=count, seed=40, **SAMPLING)
        assert prefilled == [IMAGE_TOKENS], "a forward of the image for all rollouts"
        # Window, names, slots and provided inputs; the counts are those of the session alone.
        assert state(session) == before
    assert len({tuple(tokens) for tokens in group.tokens}) > 2
    assert (group.padded_prompt_tokens[:count, :2] == 0).all()
    assert [list(row) for row in group.padded_prompt_tokens[count:]] == count * [[20, 21, 22, 23, 24]]
    for number, (tokens, scores) in enumerate(zip(group.tokens, group.logprobs, strict=True)):
        ids, expected = alone(backbone, PROMPTS[number // count], 40 + number, steps)
        assert tuple(tokens) == ids
        np.testing.assert_allclose(scores, expected, atol=2e-5)


def test_log_probabilities_are_those_of_a_forward_over_prompt_and_answer(backbone: Any):
    items = [kvp.Text(LEAD), image_of(1), kvp.Text(PROMPTS[0])]
    with kvp.Session(backbone, lead=LEAD) as session:
        sampler = RolloutSampler(session)
        group = sampler(PROMPTS[0], 3, images=[image_of(1)], temperature=0.0, stop=())
        with pytest.raises(kvp.errors.InputError, match="got 0 prompts"):
            sampler([], 3)
    context, start, logits = [], 0, np.zeros(0)
    for item in items:
        tokens = backbone.embed(**backbone.prepare([item])).shift(start)
        out = backbone.prefill(tokens, kvp.joined(*context) if context else None)
        context.append(kvp.to_engine(backbone.layout, out.kv, np.asarray(tokens.positions), 0))
        start = int(np.asarray(tokens.positions).max()) + 1
        logits = np.asarray(out.logits, np.float64).reshape(-1)
    assert group.tokens[0][0] == logits.argmax()
    expected = logits.max() - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(group.logprobs[0][0], expected, atol=2e-5)
