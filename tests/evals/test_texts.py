"""Contexts of texts hold what is asked, chunks are prefilled as if alone, and reported texts chose nothing."""

import itertools
import re

import numpy as np
import pytest
import tokenizers

from evals.bench.shapes import tiny_config
from evals.harness.methods import parse
from evals.texts import corpus, dataset, infoflow
from evals.texts.dataset import FACTS, PASSAGES, TWO_HOPS, draw_facts, draw_two_hops
from evals.texts.infoflow import INFOFLOW, PromptContext, SpanAnswers, fixed_parts, passage_parts
from evals.texts.splices import start_tokens
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.models.random_weights import random_backbone
from tests.shared.arrays import placed

START = "<s>"
ARMS = ("blind", "infoflow.budget=0.3", "cacheblend.budget=0.3", "first_k.budget=0.3", "full_reprefill.budget=1")


def word_tokenizer(words: list[str]) -> tokenizers.Tokenizer:
    """Makes a tokenizer of whole words that begins every prompt with a start token."""
    vocabulary = {word: number for number, word in enumerate([START, *sorted(set(words))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=START))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    """A tiny random Llama that knows every word of the facts."""
    contexts = [draw(np.random.default_rng(seed), 3) for draw in (draw_facts, draw_two_hops) for seed in range(40)]
    texts = ["text", dataset.INSTRUCTION]
    for context in contexts:
        texts += [context.front, context.chunk]
        texts += [words for _, prompt, answer in context.asked for words in (prompt, answer)]
    model = random_backbone(tiny_config("LlamaForCausalLM"))
    model.tokenizer = word_tokenizer(re.findall(r"\w+|[^\w\s]+", " ".join(texts)))
    return model


@pytest.fixture
def documents(monkeypatch) -> dict[str, list[corpus.Document]]:
    """Three random documents a domain, of small passages."""
    rng, read = np.random.default_rng(5), {}
    for domain in corpus.SOURCES:
        ids = rng.integers(3, 120, (3, 4 * 12 + 4)).astype(np.int32)
        read[domain] = [corpus.Document(f"{domain}/{place}", domain, row) for place, row in enumerate(ids)]
    monkeypatch.setattr(corpus, "documents", lambda backbone, domain, *sizes: read[domain])
    monkeypatch.setattr(dataset.PassageSet, "tokens", 12)
    monkeypatch.setattr(dataset.PassageSet, "scored", 4)
    return read


def test_texts_that_sizes_are_chosen_on_are_not_reported_on():
    """The first texts of each kind, more than any data set reads, have no name and no content in common."""
    names, texts = [], []
    for sources in (corpus.SOURCES, corpus.HELD_OUT):
        read = [pair for source in sources.values() for pair in itertools.islice(source(), 80)]
        names.append({name for name, _ in read})
        texts.append({text for _, text in read if len(text) >= corpus.LEAST_CHARACTERS})
        assert len(texts[-1]) > 50
    assert not names[0] & names[1]
    assert not texts[0] & texts[1]


def test_answers_stand_in_the_documents_that_are_asked_about():
    for seed in range(30):
        facts = draw_facts(np.random.default_rng(seed), 2 + seed % 2)
        texts = [*facts.front.splitlines(), facts.chunk]
        assert len(texts) == 2 + seed % 2
        for text, (kind, prompt, answer) in zip(texts, facts.asked, strict=True):
            assert text.split(".")[0].split()[-1] in prompt
            assert f"{answer} " in text.replace(".", " ")
            assert kind == (text != facts.chunk)

        # Two hops need both documents.
        hops = draw_two_hops(np.random.default_rng(seed), 2)
        opens = dict(re.findall(r"The (\w+) key opens the (\w+)\.", hops.front))
        has = dict(re.findall(r"(\w+) has the (\w+) key\.", hops.chunk))
        assert len(opens) == len(has) == dataset.KEYS
        (_, prompt, room), (_, named, same) = hops.asked
        key = has[re.findall(r"can (\w+) open", prompt)[0]]
        assert f" {opens[key]}" == room == same
        assert f"the {key} key" in named
        assert key not in prompt


@pytest.mark.parametrize(
    ("facts", "probe"), [pytest.param(FACTS, "pairs", marks=pytest.mark.nightly), (TWO_HOPS, "keys")]
)
def test_a_patch_of_full_rank_answers_as_a_reprefill_and_blind_reuse_does_not(backbone, facts, probe):
    batch = facts.batch(backbone, probe, 0, 3, seed=1)
    expected, blind = batch.read(batch.reference), batch.read(batch.splice.cache)
    patch = batch.read(parse("patch.rank=30").repair(backbone, batch.splice).cache)
    lost = blind.divergence_from(expected)
    assert patch.divergence_from(expected).max() < 1e-5 < 1e-3 < lost.max()
    # KL as float64 has it.
    p, q = (np.exp(np.asarray(answers.log_probabilities, np.float64)) for answers in (expected, blind))
    np.testing.assert_allclose(lost, (p * np.log(p / q)).sum(-1), rtol=1e-3, atol=1e-7)
    assert np.array_equal(blind.predicted, q.argmax(-1))
    assert batch.questions.answer.shape == lost.shape


def test_a_chunk_is_prefilled_behind_the_lead_alone(backbone):
    batch = FACTS.batch(backbone, "triples", 0, 2, seed=1)
    splice, lead = batch.splice, len(start_tokens(backbone)) + len(backbone.ids(dataset.INSTRUCTION))
    first = int(splice.slots[0, 0])
    assert start_tokens(backbone).tolist() == [0]
    assert first > lead
    # What precedes the chunk is as re-prefill leaves it; the chunk is not, but for what no other token reaches.
    for name, value in splice.cache.items():
        differences = np.abs(np.asarray(value - batch.reference[name]))
        assert differences[:, :, :first].max() == 0
        assert differences[1:, :, first:].max() > 1e-3
        assert differences[0, :, first:].max() < 1e-4


def test_passages_stand_behind_the_text_before_them_or_another_documents(backbone, documents):
    batch = PASSAGES.batch(backbone, "mixed", 5, 4, seed=0)  # the second document of the second domain
    ids, other = (documents["code"][place].ids for place in (1, 2))
    fronts = [other[:12], ids[:12], other[:12], ids[24:36]]
    for row, front in enumerate(fronts):
        tokens = backbone.embed(np.concatenate([start_tokens(backbone), front, ids[row * 12 : row * 12 + 12]])[None])
        kv = backbone.prefill(tokens).kv
        assert batch.splice.recorded is not None
        for name, value in kv.items():
            np.testing.assert_allclose(batch.splice.recorded[name][:, row], value[:, 0, 13:], atol=1e-4)
    assert batch.prompts[2, 0].tolist() == ids[36:40].tolist()
    assert batch.questions.answer[2].tolist() == ids[37:41].tolist()
    # The document ends with the last token that is read.
    assert batch.questions.answer[3].tolist() == [*ids[49:52].tolist(), -1]
    assert batch.clusters.tolist() == [5] * 4
    with pytest.raises(InputError, match="expected at most 4, the passages of a document"):
        PASSAGES.batch(backbone, "mixed", 0, 5, seed=0)
    with pytest.raises(InputError, match=r"passages\.n: got document 3 of a domain; expected fewer than 3"):
        PASSAGES.batch(backbone, "mixed", 12, 4, seed=0)


@pytest.fixture
def context(monkeypatch) -> PromptContext:
    """A small context in place of every one that is drawn."""
    ids = np.random.default_rng(0).integers(3, 250, 48).astype(np.int32)
    context = PromptContext(ids[:40], passage_parts((11, 19, 33, 40)), ids[40:44], ids[44:], 3)
    monkeypatch.setattr(infoflow, "draw_prompt", lambda *arguments: context)
    for name, value in {"CONTEXT": 40, "PASSAGES": 4, "FOLLOW": 4}.items():
        monkeypatch.setattr(infoflow, name, value)
    return context


def covers_once(parts: infoflow.Parts, tokens: int) -> bool:
    return [token for first, last in parts for token in range(first, last)] == list(range(tokens))


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
def test_prompts_have_one_size_and_passages_cover_them(task: str):
    class Letters:
        """A backbone that reads four letters as one token."""

        def ids(self, text: str) -> list[int]:
            return [sum(map(ord, text[first : first + 4])) for first in range(0, len(text), 4)]

    prompts = [infoflow.draw_prompt(Letters(), task, number, seed=3) for number in (0, 1, 2, 3, 1)]
    for prompt in prompts:
        assert len(prompt.ids) == infoflow.CONTEXT
        assert covers_once(prompt.passages, infoflow.CONTEXT)
        assert task == "prose" or len(prompt.passages) == infoflow.PASSAGES
        assert 0 < len(prompt.asked) <= infoflow.ASKED
        assert len(prompt.asked) + len(prompt.behind) == infoflow.ASKED + infoflow.FOLLOW
        assert 0 < prompt.scored <= infoflow.FOLLOW
        assert bool(prompt.choices) == (task == "people")
    assert (prompts[4].ids == prompts[1].ids).all()
    assert len({prompt.ids.tobytes() for prompt in prompts}) == 4


def test_an_answer_is_right_when_all_its_tokens_are_or_it_is_the_likelier_choice():
    says = lambda *ids: placed(np.log(np.eye(6)[None, list(ids)] * 0.9 + 0.01), np.float32)
    ids = np.zeros(1, np.int32)
    context = PromptContext(ids, ((0, 1),), ids, np.array([4, 2, 0]), 2)
    right = infoflow.answer_number(context.behind[:2])
    assert SpanAnswers(says(4, 2, 5), context).predicted.tolist() == [[right]]
    assert SpanAnswers(says(4, 3, 0), context).predicted.tolist() != [[right]]
    # Only the tokens that count are compared.
    assert SpanAnswers(says(4, 2, 5), context).divergence_from(SpanAnswers(says(4, 2, 1), context)) == 0
    assert SpanAnswers(says(4, 1, 5), context).divergence_from(SpanAnswers(says(4, 2, 5), context)) > 0.1
    chosen = context._replace(choices=(3, 1), scored=1)
    logits = placed(np.log([[[0.5, 0.2, 0.05, 0.05, 0.1, 0.1]]]), np.float32)
    assert SpanAnswers(logits, chosen).predicted.tolist() == [[1]]


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
