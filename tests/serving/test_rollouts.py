"""Rollouts of a group have the tokens and scores of separate sessions, and what they share is prefilled once."""

import contextlib
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


def alone(backbone: Any, prompt: str, seed: int, steps: int) -> tuple[tuple[int, ...], list[float]]:
    """Returns the tokens of a rollout in a session of its own, and their log-probabilities token by token."""
    with kvp.Session(backbone, lead=LEAD) as session:
        session.add(image_of(1))
        ids = session.ask(prompt, steps=steps, seed=seed, **SAMPLING).ids
        scores = []
        for count in range(1, len(ids) + 1):
            scores.append(float(session.log_probs(prompt, np.asarray(ids[:count]))[-1]))
    return ids, scores


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["session", "sessions"])
def test_a_group_is_that_of_separate_sessions_and_prefills_each_image_once(
    backbone: Any, monkeypatch: pytest.MonkeyPatch, shared: bool
):
    prefilled, steps, count = list[int](), 3, 3 if shared else 2
    with contextlib.ExitStack() as stack:
        sessions = stack.enter_context(kvp.Sessions(backbone, pages=64, batch=4))
        session = stack.enter_context(sessions.open(lead=LEAD) if shared else kvp.Session(backbone, lead=LEAD))
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
        group = RolloutSampler(session)(PROMPTS[0], 3, images=[image_of(1)], temperature=0.0, stop=())
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


def test_what_cannot_be_sampled_is_refused(backbone: Any, unchecked: None):
    with kvp.Session(backbone, lead=LEAD) as session:
        sampler = RolloutSampler(session)
        valid: dict[str, Any] = {"input_strings": PROMPTS, "max_generation_steps": 4}
        cases: list[tuple[str, Any, str]] = [
            *(("input_strings", [], "got 0 prompts"), ("multi_sampling", 0, "multi_sampling 0")),
            *(("input_strings", 5, "input_strings"), ("images", image_of(1), "images"), ("seed", "5", "seed")),
        ]
        for name, value, words in cases:
            with pytest.raises(kvp.errors.InputError, match=words):
                sampler(**valid | {name: value})
        for ids in ([-1], [7, 10**6]):
            with pytest.raises(kvp.errors.InputError, match=r"log_probs\.ids: got"):
                session.log_probs(PROMPTS[0], ids)
