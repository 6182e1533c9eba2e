"""Prompts of several chunks: how they are cut and drawn, and what methods that choose by the question may read."""

import jax.numpy as jnp
import numpy as np
import pytest

from evals.bench.shapes import tiny_config
from evals.harness.methods import parse
from evals.texts import infoflow
from evals.texts.infoflow import INFOFLOW, PromptContext, SpanAnswers, fixed_parts, passage_parts
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.models.random_weights import random_backbone

ARMS = ("blind", "infoflow.budget=0.3", "cacheblend.budget=0.3", "first_k.budget=0.3", "full_reprefill.budget=1")


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    return random_backbone(tiny_config("LlamaForCausalLM"))


@pytest.fixture
def context(monkeypatch) -> PromptContext:
    """A small context in place of every one that is drawn."""
    ids = np.random.default_rng(0).integers(3, 250, 48).astype(np.int32)
    context = PromptContext(ids[:40], passage_parts((11, 19, 33, 40)), ids[40:44], ids[44:], 3)
    monkeypatch.setattr(infoflow, "draw_prompt", lambda *arguments: context)
    for name, value in {"CONTEXT": 40, "PASSAGES": 4, "FOLLOW": 4}.items():
        monkeypatch.setattr(infoflow, name, value)
    return context


class LetterTokenizer:
    """A backbone that reads four letters as one token."""

    def ids(self, text: str) -> list[int]:
        return [sum(map(ord, text[first : first + 4])) for first in range(0, len(text), 4)]


def covers_once(parts: infoflow.Parts, tokens: int) -> bool:
    return [token for first, last in parts for token in range(first, last)] == list(range(tokens))


def test_splits_cover_every_token_exactly_once():
    rng = np.random.default_rng(0)
    for _ in range(30):
        tokens, size, least = (int(value) for value in rng.integers(1, 90, 3))
        assert covers_once(fixed_parts(tokens, size), tokens)
        ends = sorted({tokens, *rng.integers(1, tokens + 1, 5).tolist()})
        parts = passage_parts(ends, least)
        assert covers_once(parts, tokens)
        assert {last for _, last in parts} <= set(ends)
        assert len(parts) == 1 or min(last - first for first, last in parts) >= least


def test_chunks_are_prefilled_as_if_alone(backbone, context):
    expected = np.zeros((5, 5), bool)
    expected[:2, :2], expected[2:, 2:] = np.tri(2, dtype=bool), np.tri(3, dtype=bool)
    assert (infoflow.block_mask(((0, 2), (2, 5))) == expected).all()
    assert infoflow.local_positions(((0, 2), (2, 5))).tolist() == [0, 1, 0, 1, 2]

    splice = infoflow.splice_parts(backbone, context.ids, context.passages, context.asked)
    first, last = context.passages[1]
    alone = backbone.prefill(backbone.embed(context.ids[None, first:last])).kv
    # Values have no positions, so those of a chunk are its own wherever it stands.
    np.testing.assert_allclose(splice.cache["v"][:, :, first:last], alone["v"], atol=1e-4)


@pytest.mark.parametrize("task", infoflow.TASKS)
def test_contexts_have_one_size_and_passages_cover_them(task: str):
    contexts = [infoflow.draw_prompt(LetterTokenizer(), task, number, seed=3) for number in range(4)]
    for context in contexts:
        assert len(context.ids) == infoflow.CONTEXT
        assert covers_once(context.passages, infoflow.CONTEXT)
        assert task == "prose" or len(context.passages) == infoflow.PASSAGES
        assert 0 < len(context.asked) <= infoflow.ASKED
        assert len(context.asked) + len(context.behind) == infoflow.ASKED + infoflow.FOLLOW
        assert 0 < context.scored <= infoflow.FOLLOW
        assert bool(context.choices) == (task == "people")
    again = infoflow.draw_prompt(LetterTokenizer(), task, 1, seed=3)
    assert (again.ids == contexts[1].ids).all()
    assert len({context.ids.tobytes() for context in contexts}) == 4


def test_an_answer_is_right_when_all_its_tokens_are_or_it_is_the_likelier_choice():
    says = lambda *ids: jnp.log(jnp.eye(6)[None, list(ids)] * 0.9 + 0.01)
    ids = np.zeros(1, np.int32)
    context = PromptContext(ids, ((0, 1),), ids, np.array([4, 2, 0]), 2)
    right = infoflow.answer_number(context.behind[:2])
    assert SpanAnswers(says(4, 2, 5), context).predicted.tolist() == [[right]]
    assert SpanAnswers(says(4, 3, 0), context).predicted.tolist() != [[right]]
    # Only the tokens that count are compared.
    assert SpanAnswers(says(4, 2, 5), context).divergence_from(SpanAnswers(says(4, 2, 1), context)) == 0
    assert SpanAnswers(says(4, 1, 5), context).divergence_from(SpanAnswers(says(4, 2, 5), context)) > 0.1
    chosen = context._replace(choices=(3, 1), scored=1)
    assert SpanAnswers(jnp.log(jnp.array([[[0.5, 0.2, 0.05, 0.05, 0.1, 0.1]]])), chosen).predicted.tolist() == [[1]]


@pytest.mark.parametrize("probe", INFOFLOW.probes)
def test_methods_repair_towards_the_reference_and_read_nothing_behind_the_prompt(backbone, context, probe, monkeypatch):
    caches, kl = [], {}
    for behind in (context.behind, context.behind[::-1].copy() + 1):
        monkeypatch.setattr(infoflow, "draw_prompt", lambda *_, behind=behind: context._replace(behind=behind))
        batch = INFOFLOW.batch(backbone, probe, 0, 1, seed=0)
        expected = batch.read(batch.reference)
        for arm in map(parse, ARMS):
            repaired = arm.repair(backbone, batch.asked() if arm.by_question else batch.splice)
            answers = batch.read_asked(repaired) if arm.by_question else batch.read(repaired.cache)
            kl[arm.method] = float(answers.divergence_from(expected)[0, 0])
            caches.append(repaired.cache)
    for first, second in zip(caches[: len(ARMS)], caches[len(ARMS) :], strict=True):
        assert all(np.array_equal(first[channel], second[channel]) for channel in first)

    # The reference has the context's own order, which reordered chunks have not.
    assert (kl["full_reprefill"] < 1e-6) == (probe != "reordered")
    assert kl["blind"] > 1e-4
    parts = fixed_parts(40, 10) if probe == "fixed" else context.passages
    sizes = sorted(last - first for first, last in batch.splice.parts)
    assert sizes == sorted(last - first for first, last in parts)
    with pytest.raises(InputError, match=r"infoflow\.batch: got 2 contexts at once"):
        INFOFLOW.batch(backbone, probe, 0, 2, seed=0)
