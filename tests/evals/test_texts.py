"""Text as data sets: what contexts hold, what is reused, and that a whole patch answers as a re-prefill does."""

import re

import numpy as np
import pytest
import tokenizers

from evals.bench.shapes import tiny_config
from evals.harness.methods import parse
from evals.texts import corpus, dataset
from evals.texts.dataset import FACTS, PASSAGES, TWO_HOPS, draw_facts, draw_two_hops
from evals.texts.splices import start_tokens
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.models.random_weights import random_backbone

START = "<s>"


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


@pytest.mark.parametrize("documents", [2, 3])
def test_the_answer_stands_in_the_document_that_is_asked_about(documents: int):
    for seed in range(30):
        context = draw_facts(np.random.default_rng(seed), documents)
        texts = [*context.front.splitlines(), context.chunk]
        assert len(context.asked) == len(texts) == documents
        for text, (kind, prompt, answer) in zip(texts, context.asked, strict=True):
            name = text.split(".")[0].split()[-1]
            assert name in prompt
            assert f"{answer} " in text.replace(".", " ")
            assert kind == (text != context.chunk)


def test_two_hops_need_both_documents():
    for seed in range(30):
        context = draw_two_hops(np.random.default_rng(seed), 2)
        opens = dict(re.findall(r"The (\w+) key opens the (\w+)\.", context.front))
        has = dict(re.findall(r"(\w+) has the (\w+) key\.", context.chunk))
        assert len(opens) == len(has) == dataset.KEYS
        (_, prompt, room), (_, named, same) = context.asked
        name = re.findall(r"can (\w+) open", prompt)[0]
        assert f" {opens[has[name]]}" == room == same
        assert f"the {has[name]} key" in named
        assert has[name] not in prompt


@pytest.mark.parametrize(("facts", "probe"), [(FACTS, "pairs"), (TWO_HOPS, "keys")])
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


def test_words_of_several_tokens_are_refused(backbone, monkeypatch):
    monkeypatch.setattr(dataset, "NAMES", ("Anna", "Anna Maria", "Tom", "Tom Peter"))
    with pytest.raises(InputError, match="expected a tokenizer of which each word is a token"):
        FACTS.batch(backbone, "pairs", 0, 8, seed=1)


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
