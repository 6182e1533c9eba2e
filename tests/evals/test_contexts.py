"""Contexts follow from seed and number and hold what is asked; chunks are prefilled alone; trainings resume."""

import dataclasses
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from evals.bench.shapes import tiny_config
from evals.harness import config
from evals.harness.methods import parse
from evals.task import faces
from evals.task.contexts import SIZES, sample
from evals.task.dataset import DOCUMENTS, TaskBatch
from evals.task.drawing import images_of
from evals.task.instances import INSTANCES, instance
from evals.task.layout import prefix_of
from evals.task.preparation import NUMBER, prepared
from evals.task.questions import KINDS, ask
from evals.task.reading import place
from evals.task.recipe import Recipe
from evals.task.trainer import Trainer
from evals.task.training import draw_batch
from evals.task.vocabulary import CODE_NAMES, UNIT_NAMES, VALUE_NAMES, make_tokenizer, vocabulary
from evals.texts import corpus, dataset, infoflow
from evals.texts.dataset import PASSAGES, TWO_HOPS, draw_facts, draw_two_hops
from evals.texts.infoflow import INFOFLOW, PromptContext, SpanAnswers, fixed_parts, passage_parts
from evals.texts.splices import TextBatch, start_tokens
from evals.trained import MAIN, shipped, shipped_names
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import ModelBackbone, load
from kvpatch_jax.models.random_weights import random_backbone
from tests.shared.arrays import placed

# --------------------------------------------------------------------------------------------------------------- images

COUNTS = {"page": 3, "sheet": 2, "chain": 4, "override": 2, "aggregate": 2, "list": 1}
RECIPE = Recipe(steps=6, batch=1, tiny=3, small=2)


@pytest.mark.parametrize("kind", ["documents", "plain"])
def test_a_context_is_drawn_alike_alone_and_in_a_batch(kind: str):
    """Pixels depend on the context's own meaning; with unseen faces nothing but the faces changes."""
    contexts = sample(np.random.default_rng(6), 3, SIZES["small"], drawing=kind)
    alone = images_of(contexts.take(np.array([2])))
    for image, expected in zip(alone, images_of(contexts)[2 * len(alone) :], strict=True):
        np.testing.assert_array_equal(image, expected)
    if kind == "documents":
        others = sample(np.random.default_rng(6), 3, SIZES["small"], unseen=True)
        np.testing.assert_array_equal(others.page_item, contexts.page_item)
        assert (contexts.face < len(faces.SEEN)).all()
        assert (others.face >= len(faces.SEEN)).all()


@pytest.mark.parametrize("kind", ["documents", "plain"])
def test_answers_follow_from_the_sheets_shown(kind: str):
    """Each question as words; its answer looked up by a reader of names, the later sheet counting."""
    rng = np.random.default_rng(7)
    contexts, shown = sample(rng, 6, drawing=kind), np.ones((6, 3), bool)
    shown[0, 1] = False
    questions, words = ask(contexts, rng, COUNTS, shown), vocabulary(kind)
    seen = set()
    for index in range(6):
        document, known, items = int(contexts.document[index]), {}, {}
        naming = words.names[words.first["item"] + 72 * document :][:72]
        for sheet in np.flatnonzero(shown[index]):
            columns = (contexts.sheet_item, contexts.sheet_value, contexts.sheet_unit)
            for item, value, unit in zip(*(column[index, sheet] for column in columns), strict=True):
                known[naming[item]] = VALUE_NAMES[value], UNIT_NAMES[unit]
        for code, item in zip(contexts.page_code[index], contexts.page_item[index], strict=True):
            items[CODE_NAMES[code]] = naming[item]
        for number, columns in enumerate(questions.columns()):
            asked = [words.names[token] for token in questions.ids[index, columns]]
            answers = [words.names[token] for token in questions.answer[index, columns] if token >= 0]
            if not answers:
                continue
            seen.add(KINDS[questions.kind[number]])
            match asked:
                case ["first" | "second" as part, code] if kind == "plain":
                    _, *marks = items[code].split("-")
                    name = f"row-{marks[0]}" if part == "first" else f"column-{marks[1]}"
                    assert answers == [name]
                case ["first", code]:
                    item = items[code]
                    assert answers == [(f"{item[0]}-", item.split("/")[0], f"{item.split('-')[0]}-icon")[document]]
                case ["second", code]:
                    item = items[code]
                    names = (f"-{item[1]}-", f"{item.split('/')[-1]}-edged", f"{item.split('-')[-1]}-icon")
                    assert answers == [names[document]]
                case ["letter" | "digit" as part, item]:
                    (code,) = (code for code, there in items.items() if there == item)
                    assert answers == [code[0] if part == "letter" else f"#{code[1]}"]
                case ["value" | "unit" as part, about]:
                    assert answers == [known[items.get(about, about)][part == "unit"]]
                case ["most", letter]:
                    values = Counter(known[item][0] for code, item in items.items() if code[0] == letter)
                    (leader, most), (_, next_most), *_ = values.most_common()
                    assert answers == [leader]
                    assert most - next_most >= 2
                case ["values", *codes]:
                    assert answers == [known[items[code]][0] for code in codes[::2]]
                    assert codes[1::2] == answers[:-1]
    assert seen == set(KINDS)


@pytest.mark.parametrize("name", INSTANCES)
def test_a_prefix_is_what_the_family_makes_of_the_images(name: str):
    """Ids and positions of a context equal those that `prepare` makes of its images."""
    contexts = sample(np.random.default_rng(1), 1, SIZES["tiny"])
    config, images = instance(name)
    model = ModelBackbone(config, {}, images, make_tokenizer(vocabulary().names))
    prepared, prefix = model.prepare(list(images_of(contexts))), prefix_of(config, images, contexts.size)
    np.testing.assert_array_equal(prepared["input_ids"][0], prefix.ids)
    positions, _ = prefix.positions(np.ones((1, 3), bool), np.zeros(1, int))
    np.testing.assert_array_equal(prepared["position_ids"][0], positions[0])


def test_rows_of_questions_read_what_packed_questions_do(shipped_instance):
    """A whole patch gives back re-prefill though all moved; a row per question answers as the packed ones."""
    rng, backbone = np.random.default_rng(2), shipped_instance(MAIN)
    contexts = sample(rng, 2, SIZES["tiny"])
    batch = TaskBatch(backbone, contexts, ask(contexts, rng, {"page": 1, "chain": 2, "list": 1}))
    conditioned = place(backbone.layout, batch.prefix, (*batch.alone[:-1], batch.conditioned[-1]), 37)
    for channel, value in batch.reference.items():
        np.testing.assert_array_equal(conditioned[channel][:, :, batch.prefix.page], value[:, :, batch.prefix.page])
    packed, asked = batch.read(batch.reference), batch.asked()
    rows = {channel: np.repeat(np.asarray(value), 4, axis=1) for channel, value in batch.reference.items()}
    single = batch.read_asked(parse("blind").repair(backbone, asked.replace(cache=jax.device_put(rows))))
    np.testing.assert_allclose(single.log_probabilities, packed.log_probabilities, atol=1e-4)
    assert asked.question is not None
    assert asked.question.embeddings.shape[:2] == (8, 2)
    assert float(packed.divergence_from(packed).max()) == 0


def test_batches_are_numbered_and_settings_are_fitted_on_none_that_is_measured(shipped_instance):
    """The same number is the same batch; a model without the task's words is refused by name."""
    with pytest.raises(InputError, match="words"):
        DOCUMENTS.batch(ModelBackbone(instance("qwen2_5_vl")[0], {}), "tiny", 0, 1, 0)
    backbone = shipped_instance(MAIN)
    first, again, other = (DOCUMENTS.batch(backbone, "tiny", number, 2, 0) for number in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first.splice.cache, again.splice.cache)
    assert not set(first.clusters) & set(other.clusters)
    assert (first.contexts.page_item != other.contexts.page_item).any()

    drawn = []

    def draw(*batch: int) -> Any:
        drawn.append(batch)
        return first

    assert set(prepared(draw, backbone, ("blind", "pooled.rank=8"))) == {"pooled"}
    ((number, _),) = drawn
    runs = [config.read_config(name, variants=["all"]) for name in config.names()]
    assert number == NUMBER > max(data.n for run in runs for data in run.complete_data)


@pytest.mark.nightly
def test_a_resumed_training_equals_a_straight_one(tmp_path: Path):
    """Parameters and optimiser state to the bit, over steps of two sizes; what is saved is what was trained."""
    straight = Trainer(RECIPE, tmp_path / "straight")
    straight.train(4, every=2)
    for until in (2, 4):
        resumed = Trainer(RECIPE, tmp_path / "resumed")
        assert resumed.resume() == until - 2
        resumed.train(until)
    for name in ("state", "moments"):
        leaves = (jax.tree.leaves(getattr(trainer, name)) for trainer in (resumed, straight))
        for ours, theirs in zip(*leaves, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    lines = (straight.folder / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4]

    loaded = load(straight.export(), dtype="float32")
    assert loaded.config.text == straight.config.text
    assert loaded.answer_tokens == 1
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), straight.backbone().parameters)
    for got, expected in zip(jax.tree.leaves(loaded.parameters), jax.tree.leaves(rounded), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def test_another_recipe_is_refused(tmp_path: Path):
    """A used folder keeps its recipe; the error names the file."""
    (tmp_path / "recipe.json").write_text(json.dumps(dataclasses.asdict(RECIPE), indent=2) + "\n")
    with pytest.raises(ConfigError, match=r"recipe\.json"):
        Trainer(dataclasses.replace(RECIPE, window=0.0), tmp_path)
    assert json.loads((tmp_path / "recipe.json").read_text()) == dataclasses.asdict(RECIPE)


def test_batches_follow_from_recipe_and_step():
    """The same step draws the same batch; seeds and steps differ; sizes and variety follow the recipe."""
    first = draw_batch(RECIPE, 1)
    jax.tree.map(np.testing.assert_array_equal, draw_batch(RECIPE, 1).arrays, first.arrays)
    # Two lists of a title and three cells, a page of a row of titles and two rows of two cells; four patches a cell.
    assert first.arrays["pixel_values"].shape == (4 * 4 * (2 * 4 + 6), 14 * 14 * 3)
    for other in (draw_batch(RECIPE, 2), draw_batch(dataclasses.replace(RECIPE, seed=1), 1)):
        assert (other.arrays["pixel_values"] != first.arrays["pixel_values"]).any()
    about_sheets = first.kinds == KINDS.index("sheet")
    assert first.sees[:, about_sheets].all()
    assert [Recipe().size(step) for step in (0, 1500, 2000, 2800, 2801, 2803)] == ["tiny", "small", "4", "4", "8", "16"]
    assert [Recipe(plain=10, varied=30).variety(step) for step in (0, 10, 20, 30, 99)] == [0, 0, 0.5, 1, 1]


def test_shipped_directories_are_small_and_disclose_their_training():
    """At most 4 MB each and 25 MB together, in bf16, found by name or path, no other training than the name says."""
    total = 0
    for name in shipped_names():
        root = shipped(name)
        assert root == shipped(str(root))
        size = sum(path.stat().st_size for path in root.iterdir())
        assert size <= 4_000_000
        total += size
        training = json.loads((root / "training.json").read_text())
        backbone, _, seed = root.name.removesuffix("_no_window").partition("_seed")
        assert training["recipe"]["seed"] == int(seed or 0)
        assert training["recipe"].get("backbone", "qwen2_5_vl") == backbone
        assert (training["recipe"]["window"] == 0) == ("no_window" in name)
        assert training["steps_taken"] == training["recipe"]["steps"]
        # Rates of linear attention and corrections of routers, a number a head or an expert, are kept in float32.
        tensors = load_file(root / "model.safetensors").values()
        assert {str(tensor.dtype) for tensor in tensors if tensor.size > 64} == {"bfloat16"}
        assert all(np.isfinite(tensor.astype(np.float32)).all() for tensor in tensors)
    assert 5_000_000 < total <= 25_000_000
    with pytest.raises(InputError, match="plain/qwen3_5"):
        shipped("nowhere")


# ---------------------------------------------------------------------------------------------------------------- texts

ARMS = ("blind", "infoflow.budget=0.3", "full_reprefill.budget=1")


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    """A tiny random Llama that knows every word of the facts, behind a start token."""
    contexts = [draw(np.random.default_rng(seed), 3) for draw in (draw_facts, draw_two_hops) for seed in range(40)]
    texts = ["text", dataset.INSTRUCTION]
    for context in contexts:
        texts += [context.front, context.chunk]
        texts += [words for _, prompt, answer in context.asked for words in (prompt, answer)]
    words = ["<s>", *sorted(set(re.findall(r"\w+|[^\w\s]+", " ".join(texts))))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    model = random_backbone(tiny_config("LlamaForCausalLM"))
    model.tokenizer = tokenizer
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


@pytest.fixture(scope="module")
def hops(backbone) -> TextBatch:
    return TWO_HOPS.batch(backbone, "keys", 0, 3, seed=1)


def test_a_patch_of_full_rank_answers_as_a_reprefill_and_blind_reuse_does_not(backbone, hops):
    expected, blind = hops.read(hops.reference), hops.read(hops.splice.cache)
    patch = hops.read(parse("patch.rank=30").repair(backbone, hops.splice).cache)
    lost = blind.divergence_from(expected)
    assert patch.divergence_from(expected).max() < 1e-5 < 1e-3 < lost.max()
    # KL as float64 has it.
    p, q = (np.exp(np.asarray(answers.log_probabilities, np.float64)) for answers in (expected, blind))
    np.testing.assert_allclose(lost, (p * np.log(p / q)).sum(-1), rtol=1e-3, atol=1e-7)
    assert np.array_equal(blind.predicted, q.argmax(-1))
    assert hops.questions.answer.shape == lost.shape


def test_a_chunk_is_prefilled_behind_the_lead_alone(backbone, hops):
    lead, first = len(start_tokens(backbone)) + len(backbone.ids(dataset.INSTRUCTION)), int(hops.splice.slots[0, 0])
    assert start_tokens(backbone).tolist() == [0]
    assert first > lead
    # What precedes the chunk is as re-prefill leaves it; the chunk is not, but for what no other token reaches.
    for name, value in hops.splice.cache.items():
        differences = np.abs(np.asarray(value) - np.asarray(hops.reference[name]))
        assert differences[:, :, :first].max() == 0
        assert differences[1:, :, first:].max() > 1e-3
        assert differences[0, :, first:].max() < 1e-4


def test_passages_stand_behind_the_text_before_them_or_another_documents(backbone, documents):
    batch = PASSAGES.batch(backbone, "mixed", 5, 4, seed=0)  # the second document of the second domain
    ids, other = (documents["code"][place].ids for place in (1, 2))
    fronts, start = [other[:12], ids[:12], other[:12], ids[24:36]], start_tokens(backbone)
    rows = np.stack([[*start, *front, *ids[row * 12 : row * 12 + 12]] for row, front in enumerate(fronts)])
    assert batch.splice.recorded is not None
    for name, value in backbone.prefill(backbone.embed(rows)).kv.items():
        np.testing.assert_allclose(batch.splice.recorded[name], np.asarray(value)[:, :, 13:], atol=1e-4)
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
    context = PromptContext(ids[:40], passage_parts((11, 22, 33, 40)), ids[40:44], ids[44:], 3)
    monkeypatch.setattr(infoflow, "draw_prompt", lambda *arguments: context)
    for name, value in {"CONTEXT": 40, "PASSAGES": 4, "FOLLOW": 4}.items():
        monkeypatch.setattr(infoflow, name, value)
    return context


def test_chunks_are_prefilled_as_if_alone(backbone, context):
    expected = np.zeros((5, 5), bool)
    expected[:2, :2], expected[2:, 2:] = np.tri(2, dtype=bool), np.tri(3, dtype=bool)
    assert (infoflow.block_mask(((0, 2), (2, 5))) == expected).all()
    assert infoflow.local_positions(((0, 2), (2, 5))).tolist() == [0, 1, 0, 1, 2]

    splice = infoflow.splice_parts(backbone, context.ids, context.passages, context.asked)
    first, last = context.passages[1]
    alone = np.asarray(backbone.prefill(backbone.embed(np.roll(context.ids, -first)[None])).kv["v"])[
        :, :, : last - first
    ]
    # Values have no positions, so those of a chunk are its own wherever it stands.
    np.testing.assert_allclose(np.asarray(splice.cache["v"])[:, :, first:last], alone, atol=1e-4)


@pytest.mark.parametrize("task", infoflow.TASKS)
def test_prompts_have_one_size_and_passages_cover_them(task: str, monkeypatch):
    prose = corpus.SOURCES["prose"]
    monkeypatch.setitem(corpus.SOURCES, "prose", lambda: itertools.islice(prose(), 60))

    class Letters:
        """A backbone that reads four letters as one token."""

        def ids(self, text: str) -> list[int]:
            return [sum(map(ord, text[first : first + 4])) for first in range(0, len(text), 4)]

    prompts = [infoflow.draw_prompt(Letters(), task, number, seed=3) for number in (0, 1, 2, 3, 1)]
    for prompt in prompts:
        assert len(prompt.ids) == infoflow.CONTEXT
        covered = [token for first, last in prompt.passages for token in range(first, last)]
        assert covered == list(range(infoflow.CONTEXT))
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
