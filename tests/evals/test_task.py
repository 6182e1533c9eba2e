"""The task: what is drawn, asked and answered, against plain reading; its layout and its batches of reused pages."""

from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from evals.harness.methods import parse
from evals.task import contexts as meaning
from evals.task import faces
from evals.task.contexts import SIZES, sample
from evals.task.dataset import DOCUMENTS, TaskBatch
from evals.task.drawing import images_of
from evals.task.instances import INSTANCES, instance
from evals.task.layout import pack, prefix_of
from evals.task.questions import KINDS, ask
from evals.task.reading import place
from evals.task.vocabulary import CODE_NAMES, UNIT_NAMES, VALUE_NAMES, make_tokenizer, vocabulary
from evals.trained import shipped
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import ModelBackbone, load
from tests.shared.examples import examples

COUNTS = {"page": 3, "sheet": 2, "chain": 4, "override": 2, "aggregate": 2, "list": 1}


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


@examples(10)
@given(seed=st.integers(0, 2**32), size=st.sampled_from(sorted(SIZES)))
def test_codes_are_unique_and_one_value_of_a_letter_leads(seed: int, size: str):
    """No page repeats an item or a code; few items are on two sheets, and differ there; a letter has one leader."""
    contexts = sample(np.random.default_rng(seed), 1, SIZES[size])
    entries = contexts.sheet_item.ravel().tolist()
    page, codes = contexts.page_item[0].tolist(), contexts.page_code[0].tolist()
    assert len(set(page)) == len(page) == len(set(codes)) == contexts.size.cells
    assert set(page) < set(entries)
    twice = [item for item, count in Counter(entries).items() if count > 1]
    assert len(twice) == max(1, contexts.size.entries // 13)
    for table in (contexts.sheet_value, contexts.sheet_unit):
        for item in twice:
            assert len(set(table.ravel()[contexts.sheet_item.ravel() == item].tolist())) == 2
    value = meaning.latest(contexts)[0][0]
    for letter in {code // 8 for code in codes} if size != "tiny" else ():
        values = [value[item] for item, code in zip(page, codes, strict=True) if code // 8 == letter]
        (_, most), *rest = Counter(values).most_common()
        assert most == (2 if size == "small" else 5)
        assert {count for _, count in rest} == {1}


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


def test_a_question_may_be_a_sentence():
    """The tokenizer leaves out what the task has no word for; names are distinct, so that text and ids are the same."""
    for kind in ("documents", "plain"):
        words = vocabulary(kind)
        tokenizer = make_tokenizer(words.names)
        assert len(set(words.names)) == len(words)
        for sentence in ("unit C6?", "What is the unit of the item in cell C6?"):
            assert tokenizer.encode(sentence).ids == [words["unit"], words["C6"]]
        assert tokenizer.encode(" ".join(words.names)).ids == list(range(len(words)))
    assert load(shipped("documents/qwen2_5_vl")).ids("most in B?") == [vocabulary()["most"], vocabulary()["B"]]


def test_packed_questions_see_the_page_and_the_sheets_shown():
    """A question sees itself, the page and, unless they slid out, the sheets shown; what is not shown takes no room."""
    rng = np.random.default_rng(3)
    contexts = sample(rng, 2)
    questions, prefix = ask(contexts, rng, COUNTS), prefix_of(*instance("qwen2_5_vl"), contexts.size)
    shown, sees = np.array([[True, False, True], [True, True, True]]), rng.random((2, len(questions.kind))) < 0.5
    packed = (questions.ids, questions.number, questions.step)
    start = np.array([5, 0])
    batch = pack(prefix, *packed, shown=shown, sees=sees[:, questions.number], start=start)
    length = len(prefix.ids)
    for index in range(2):
        here = np.append(shown[index], True)
        for row in range(0, length + len(questions.number), 3):
            for column in range(0, length + len(questions.number), 7):
                if column >= length:
                    allowed = row >= column and questions.number[row - length] == questions.number[column - length]
                else:
                    allowed = here[prefix.place[column]] and row >= column
                    if row >= length and prefix.place[column] < 3:
                        allowed = allowed and sees[index, questions.number[row - length]]
                assert batch["mask"][index, 0, row, column] == allowed
        begins = [int(batch["positions"][index, part.start].min()) for part in prefix.slices]
        assert begins[0] == start[index]
        assert begins[2] == start[index] + prefix.spans[0] * (1 + shown[index, 1])
        assert batch["positions"][index, length].tolist() == [begins[-1] + prefix.spans[-1]] * 3


@pytest.mark.parametrize("name", INSTANCES)
def test_a_prefix_is_what_the_family_makes_of_the_images(name: str, tmp_path: Path):
    """Ids and positions of a context equal those that `prepare` makes of its images' files."""
    contexts = sample(np.random.default_rng(1), 1, SIZES["tiny"])
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for file, image in zip(files, images_of(contexts), strict=True):
        Image.fromarray(image).save(file)
    config, images = instance(name)
    model = ModelBackbone(config, {}, images, make_tokenizer(vocabulary().names))
    prepared, prefix = model.prepare([*files]), prefix_of(config, images, contexts.size)
    np.testing.assert_array_equal(prepared["input_ids"][0], prefix.ids)
    positions, _ = prefix.positions(np.ones((1, 3), bool), np.zeros(1, int))
    np.testing.assert_array_equal(prepared["position_ids"][0], positions[0])


def fresh(name: str) -> ModelBackbone:
    """A small backbone with drawn parameters."""
    config, images = instance(name)
    return ModelBackbone(config, nnx.to_pure_dict(nnx.state(config.family.module(config, nnx.Rngs(0)))), images)


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("kimi_vl", marks=pytest.mark.nightly)])
def test_rows_of_questions_read_what_packed_questions_do(name: str):
    """A whole patch gives back re-prefill though all moved; a row per question answers as the packed ones."""
    rng, backbone = np.random.default_rng(2), fresh(name)
    contexts = sample(rng, 2, SIZES["tiny"])
    batch = TaskBatch(backbone, contexts, ask(contexts, rng, {"page": 1, "chain": 2, "list": 1}))
    conditioned = place(backbone.layout, batch.prefix, (*batch.alone[:-1], batch.conditioned[-1]), 37)
    for channel, value in batch.reference.items():
        np.testing.assert_array_equal(conditioned[channel][:, :, batch.prefix.page], value[:, :, batch.prefix.page])
    packed, asked = batch.read(batch.reference), batch.asked()
    rows = {channel: np.repeat(value, 4, axis=1) for channel, value in batch.reference.items()}
    single = batch.read_asked(parse("blind").repair(backbone, asked.replace(cache=rows)))
    np.testing.assert_allclose(single.log_probabilities, packed.log_probabilities, atol=1e-4)
    assert asked.question is not None
    assert asked.question.embeddings.shape[:2] == (8, 2)
    assert float(packed.divergence_from(packed).max()) == 0


def test_batches_are_numbered_and_refuse_other_models():
    """The same number is the same batch; a model without the task's words is refused by name."""
    backbone = fresh("qwen2_5_vl")
    with pytest.raises(InputError, match="words"):
        DOCUMENTS.batch(backbone, "4", 0, 1, 0)
    backbone.tokenizer = make_tokenizer(vocabulary().names)
    first, again, other = (DOCUMENTS.batch(backbone, "4", number, 2, 0) for number in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first.splice.cache, again.splice.cache)
    assert not set(first.clusters) & set(other.clusters)
    assert (first.contexts.page_item != other.contexts.page_item).any()
