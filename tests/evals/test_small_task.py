"""The small task: what is dealt, drawn and asked, against independent readings of the same meaning."""

import dataclasses
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from evals import small_task
from evals.small_task import (
    CELLS,
    GLYPHS,
    KINDS,
    LEGEND_ROWS,
    LEGENDS,
    ROWS,
    VOCABULARY,
    Contexts,
    Questions,
    scenes,
    sequences,
)
from evals.small_task.instances import INSTANCES, instance
from evals.small_task.prefix import prefix_positions
from evals.small_task.sequences import QUESTION_TOKENS, Form, form_of
from evals.small_task.training import SmallTaskRecipe, initialise, make_tokenizer
from models import ModelBackbone
from models.families.family import abstract, parameters
from models.inputs.positions import PositionConfig, get_rope_positions

COUNTS = {"page": 3, "legend": 3, "chain": 6, "aggregate": 4, "override": 3}
few = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def draw(seed: int, count: int = 3) -> tuple[Contexts, np.random.Generator]:
    """Contexts whose legends stand in random orders."""
    rng = np.random.default_rng(seed)
    contexts = small_task.sample_contexts(rng, count)
    return contexts.reordered(rng.permuted(contexts.order, axis=1)), rng


def one(contexts: Contexts, index: int) -> Contexts:
    return Contexts(**{field.name: getattr(contexts, field.name)[[index]] for field in dataclasses.fields(Contexts)})


FORM = form_of(*instance("qwen2_5_vl"))


def fresh(name: str) -> ModelBackbone:
    """A small backbone with fresh parameters."""
    config, images = instance(name)
    state = nnx.split(initialise(SmallTaskRecipe(backbone=name)))[1]
    return ModelBackbone(config, nnx.to_pure_dict(state), images, make_tokenizer())


def reader(name: str) -> ModelBackbone:
    """The same with zeros for parameters, where nothing is computed: drawing them compiles dozens of programs."""
    config, images = instance(name)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameters(abstract(config)))
    return ModelBackbone(config, zeros, images, make_tokenizer())


def pack(form: Form, name: str, contexts: Contexts, questions: Questions, shown, sees, start, split="held_out"):
    """A packed batch and the processor's arrays."""
    config, settings = instance(name)
    images = config.family.vision.process(sequences.context_images(form, contexts, split), settings)
    batch = sequences.pack_questions(form, questions, shown=shown, sees_legends=sees, start=start)
    return {**batch, "pixel_values": images["pixel_values"]}, images


# ------------------------------------------------------------------------------------------------------- pixels


SPLITS = ("train", "held_out")
"""By default every other instance's of each: the drawing of a split is the same for all."""


@pytest.mark.parametrize(
    ("name", "split"),
    [
        pytest.param(name, split, marks=pytest.mark.slow if number % 2 != place else ())
        for number, name in enumerate(INSTANCES)
        for place, split in enumerate(SPLITS)
    ],
)
def test_rendered_arrays_equal_png_files(tmp_path: Path, name: str, split: str):
    """What training packs from arrays is, to the bit, what `prepare` reads from the files; ids and positions too."""
    backbone = reader(name)
    form = form_of(backbone.config, backbone.image_config)
    contexts, rng = draw(11, 4)
    questions = small_task.ask(contexts, rng, {"page": 1})
    paths = scenes.write_images(contexts, tmp_path, split, form.legend_shape)
    shown, sees = np.ones((4, LEGENDS), bool), np.ones((4, 1), bool)
    batch, images = pack(form, name, contexts, questions, shown, sees, np.zeros(4, int), split)
    pixels = []
    for index, files in enumerate(paths):
        assert [file.suffix for file in files] == [".png"] * sequences.CHUNKS
        order = [files[which] for which in [*contexts.order[index], LEGENDS]]
        text = f"{VOCABULARY.names[questions.ask[index, 0]]} {VOCABULARY.names[questions.argument[index, 0]]}"
        prompt = backbone.prepare([*order, text])
        pixels.append(prompt["pixel_values"])
        np.testing.assert_array_equal(prompt["input_ids"][0], batch["input_ids"][index])
        np.testing.assert_array_equal(prompt["position_ids"][0], batch["positions"][index])
    np.testing.assert_array_equal(np.concatenate(pixels), batch["pixel_values"])
    assert batch["pixel_values"].std() > 0.1
    if name == "qwen2_5_vl":
        np.testing.assert_array_equal(images["image_grid_thw"][:4], [[1, 14, 6]] * LEGENDS + [[1, 20, 20]])


def test_a_canvas_repeats_the_legend():
    """Cell (row, column) of a larger canvas is the legend's own cell (row mod 7, column mod 3); labels agree."""
    contexts, _ = draw(4, 2)
    (small, page), (large, same) = small_task.render(contexts), small_task.render(contexts, canvas=(ROWS, CELLS + 1))
    np.testing.assert_array_equal(same, page)
    assert large.shape == (2, LEGENDS, 100, 100, 3)
    wide = form_of(*instance("llava"))
    shown = np.ones((2, LEGENDS), bool)
    plain, repeated = (sequences.cell_labels(form, contexts, shown) for form in (FORM, wide))
    for row in range(ROWS):
        for column in range(CELLS + 1):
            own_row, own_column = row % LEGEND_ROWS, column % 3
            pixels = lambda image, r, c: image[:, :, 10 * r : 10 * r + 10, 10 * c : 10 * c + 10]
            np.testing.assert_array_equal(pixels(large, row, column), pixels(small, own_row, own_column))
            for name in ("seen", "bound"):
                for place in range(LEGENDS):
                    got = repeated[name][:, wide.cells(place).start + row * (CELLS + 1) + column]
                    expected = plain[name][:, FORM.cells(place).start + own_row * 3 + own_column]
                    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_pixels_depend_on_the_context_alone(split: str):
    """Same seed, same pixels; another batch around it or another order of the legends changes none."""
    contexts, _ = draw(3, 4)
    legends, pages = small_task.render(contexts, split)
    for got, expected in zip(small_task.render(draw(3, 4)[0], split), (legends, pages), strict=True):
        np.testing.assert_array_equal(got, expected)
    for index in (0, 3):
        alone = small_task.render(one(contexts, index), split)
        np.testing.assert_array_equal(alone[0][0], legends[index])
        np.testing.assert_array_equal(alone[1][0], pages[index])
    turned = small_task.render(contexts.reordered(np.array([2, 0, 1])), split)
    np.testing.assert_array_equal(turned[0], legends)
    np.testing.assert_array_equal(turned[1], pages)
    other = small_task.render(dataclasses.replace(contexts, ink_seed=contexts.ink_seed + 1), split)
    assert (other[1] != pages).mean() > 0.5


@pytest.mark.parametrize("count", range(LEGENDS + 1))
def test_recolour_changes_chosen_legends_only(count: int):
    """In `count` legends every fill and stripe is another one; glyph cells, other legends and the page keep pixels."""
    contexts, rng = draw(5, 6)
    after = small_task.recolour(contexts, rng, count)
    before_pixels, after_pixels = small_task.render(contexts), small_task.render(after)
    np.testing.assert_array_equal(after_pixels[1], before_pixels[1])
    np.testing.assert_array_equal(after_pixels[0][..., :10, :], before_pixels[0][..., :10, :])
    chosen = (after.legend_fill != contexts.legend_fill).all(axis=2)
    np.testing.assert_array_equal(chosen, (after.legend_stripe != contexts.legend_stripe).all(axis=2))
    np.testing.assert_array_equal(chosen.sum(axis=1), count)
    same = (after_pixels[0] == before_pixels[0]).all(axis=(2, 3, 4))
    np.testing.assert_array_equal(same, ~chosen)
    kept = ~chosen[..., None]
    assert ((after.legend_fill == contexts.legend_fill) | ~kept).all()
    assert ((after.legend_stripe == contexts.legend_stripe) | ~kept).all()


def test_handwriting_is_split():
    """No digit image is in both parts, and every class has plenty in each."""
    train, held_out = (small_task.handwriting(split) for split in ("train", "held_out"))
    for first, second in zip(train, held_out, strict=True):
        assert min(len(first), len(second)) >= 30
        assert not {image.tobytes() for image in first} & {image.tobytes() for image in second}


# ------------------------------------------------------------------------------------------------------- meaning


@few
@given(seeds)
def test_every_glyph_is_defined_and_five_are_defined_twice(seed: int):
    """Every glyph is defined; five twice, by two legends, in different fill and stripe; four are not on the page."""
    contexts, _ = draw(seed)
    for index in range(len(contexts)):
        definitions: dict[int, list[tuple[int, int, int]]] = {}
        for legend in range(LEGENDS):
            for row in range(LEGEND_ROWS):
                fill, stripe = contexts.legend_fill[index, legend, row], contexts.legend_stripe[index, legend, row]
                glyph = int(contexts.legend_glyph[index, legend, row])
                definitions.setdefault(glyph, []).append((legend, int(fill), int(stripe)))
        assert sorted(definitions) == list(range(GLYPHS))
        twice = {glyph: found for glyph, found in definitions.items() if len(found) > 1}
        assert len(twice) == small_task.DOUBLE_ON_PAGE
        for first, second in twice.values():
            assert all(a != b for a, b in zip(first, second, strict=True))
        on_page = set(contexts.page_glyph[index].ravel().tolist())
        assert len(on_page) <= GLYPHS - small_task.ABSENT
        assert len(set(range(GLYPHS)) - on_page - set(twice)) >= small_task.ABSENT
        assert contexts.clean[index].sum() == small_task.CLEAN_ROWS
        assert not set(contexts.page_glyph[index][contexts.clean[index]].ravel().tolist()) & set(twice)
        assert sorted(contexts.row_tag[index].tolist()) == list(range(ROWS))
        assert (np.sort(contexts.cell_tag[index], axis=1) == np.arange(CELLS)).all()
        assert len(np.unique(contexts.legend_fill[index])) <= small_task.ACTIVE_FILLS


class Solver:
    """Answers one context's questions from tokens' names, as a person with the images would: nothing vectorised."""

    def __init__(self, contexts: Contexts, index: int, shown: np.ndarray):
        self.contexts, self.index = contexts, index
        self.told: dict[str, list[tuple[str, str]]] = {}
        for legend in contexts.order[index]:
            for row in range(LEGEND_ROWS if shown[index, legend] else 0):
                glyph = self.glyph_name(contexts.legend_glyph[index, legend, row])
                fill, stripe = contexts.legend_fill[index, legend, row], contexts.legend_stripe[index, legend, row]
                self.told.setdefault(glyph, []).append((f"fill{fill}", f"stripe{stripe}"))

    @staticmethod
    def glyph_name(glyph: int) -> str:
        return ("a" if glyph < 8 else "b") + str(glyph % 8)

    @property
    def page(self) -> dict[str, str]:
        """Glyph name by cell address."""
        contexts, index = self.contexts, self.index
        return {
            f"r{contexts.row_tag[index, row]}t{contexts.cell_tag[index, row, cell]}": self.glyph_name(
                contexts.page_glyph[index, row, cell]
            )
            for row in range(ROWS)
            for cell in range(CELLS)
        }

    def row(self, tag: str) -> list[str]:
        """Glyphs of the row with this tag."""
        return [glyph for address, glyph in self.page.items() if address.split("t")[0] == tag]

    def colour(self, glyph: str, asked: str) -> str:
        """By the last definition."""
        return self.told[glyph][-1][("fill?", "stripe?").index(asked)]

    def answer(self, kind: str, asked: str, argument: str) -> str:
        if kind == "page":
            assert asked == "glyph?"
            return self.page[argument]
        if kind == "aggregate":
            assert asked == "most?"
            glyphs = self.row(argument)
            assert all(len(self.told[glyph]) == 1 for glyph in glyphs)
            ranked = Counter(self.colour(glyph, "fill?") for glyph in glyphs).most_common(2)
            assert len(ranked) == 1 or ranked[0][1] - ranked[1][1] >= 2
            return ranked[0][0]
        glyph = argument if kind == "legend" else self.page[argument]
        if kind == "legend":
            assert glyph not in self.page.values()
        assert (len(self.told[glyph]) > 1) == (kind == "override")
        return self.colour(glyph, asked)


@few
@given(seeds, st.lists(st.booleans(), min_size=LEGENDS, max_size=LEGENDS))
def test_answers_against_a_solver(seed: int, seen: list[bool]):
    """Every valid question is answerable from the legends shown, and its answer is what the solver reads off."""
    contexts, rng = draw(seed)
    shown = rng.permuted(np.tile(seen, (len(contexts), 1)), axis=1)
    questions = small_task.ask(contexts, rng, COUNTS, shown)
    names = VOCABULARY.names
    assert questions.kind.shape == (len(contexts), sum(COUNTS.values()))
    for index in range(len(contexts)):
        solver = Solver(contexts, index, shown)
        asked = set()
        for place in np.flatnonzero(questions.valid[index]):
            tokens = questions.ask, questions.argument, questions.answer
            ask, argument, answer = (names[table[index, place]] for table in tokens)
            kind = KINDS[questions.kind[index, place]]
            assert solver.answer(kind, ask, argument) == answer
            asked.add((kind, argument))
            row, cell = questions.row[index, place], questions.cell[index, place]
            if kind in ("page", "chain", "override"):
                assert argument == f"r{contexts.row_tag[index, row]}t{contexts.cell_tag[index, row, cell]}"
        assert len(asked) == questions.valid[index].sum()
    valid = lambda kind: questions.valid[questions.kind == KINDS.index(kind)]
    assert valid("page").all()
    if not any(seen):
        assert not any(valid(kind).any() for kind in KINDS[1:])
    if sum(seen) == 1:
        assert not valid("override").any()


def test_most_questions_are_there():
    """With all legends shown, hardly a question is padding."""
    contexts, rng = draw(0, 64)
    questions = small_task.ask(contexts, rng, COUNTS)
    for number, kind in enumerate(KINDS):
        assert questions.valid[questions.kind == number].mean() > 0.97, kind


def test_overrides_depend_on_order():
    """Reversing the legends changes the answer of every override question and of no other."""
    contexts, _ = draw(2, 16)
    turned = contexts.reordered(contexts.order[:, ::-1])
    there, here = (small_task.ask(each, np.random.default_rng(4), COUNTS) for each in (contexts, turned))
    np.testing.assert_array_equal(there.argument, here.argument)
    override = there.kind == KINDS.index("override")
    valid = there.valid
    assert (there.answer != here.answer)[override & valid].all()
    np.testing.assert_array_equal(there.answer[~override & valid], here.answer[~override & valid])
    assert (override & valid).any()


# ------------------------------------------------------------------------------------------------------- sequences


@few
@given(seeds, st.lists(st.booleans(), min_size=LEGENDS, max_size=LEGENDS), st.integers(0, 10_000))
def test_positions_equal_the_models(seed: int, seen: list[bool], start: int):
    """Positions of the chunks shown are those of a prompt of just these chunks, moved to the start."""
    here = np.array([[*seen, True]])
    positions, behind = prefix_positions(FORM, here, np.array([start]))
    keep = here[0][FORM.owner]
    contexts, rng = draw(seed, 1)
    questions = small_task.ask(contexts, rng, {"page": 1})
    sees = np.ones((1, 1), bool)
    batch, _ = pack(FORM, "qwen2_5_vl", contexts, questions, here[:, :-1], sees, np.array([start]))
    kept = np.concatenate([keep, np.ones(QUESTION_TOKENS, bool)])
    grid = np.array([[1, 14, 6]] * sum(seen) + [[1, 20, 20]])
    config = PositionConfig(VOCABULARY.image, VOCABULARY.video, small_task.MERGE)
    expected, delta = get_rope_positions(batch["input_ids"][0][kept], grid, None, None, config)
    np.testing.assert_array_equal(batch["positions"][0][kept], expected + start)
    np.testing.assert_array_equal(positions[0][keep], expected[:-QUESTION_TOKENS] + start)
    assert behind[0] - start == delta + keep.sum()


@pytest.mark.parametrize("pages", [2, 3])
def test_questions_with_first_tokens_in_common_see_the_same(pages: int):
    """Each argument sees its own first token and itself, both at the places that they have as two tokens."""
    contexts, rng = draw(5)
    questions = small_task.ask(contexts, rng, {**COUNTS, "page": pages})
    behind = np.array([7, 30, 2])
    apart, shared = (make(FORM, questions, behind) for make in (sequences.question_tokens, sequences.in_common))
    assert shared.ids.shape[1] < apart.ids.shape[1]
    for context, last in np.ndindex(*questions.answer.shape):
        token, whole = shared.asked[last], apart.asked[last]
        seen, expected = np.flatnonzero(shared.among[context, token]), np.flatnonzero(apart.among[whole])
        np.testing.assert_array_equal(shared.ids[context, seen], apart.ids[context, expected])
        np.testing.assert_array_equal(shared.positions[context, seen], apart.positions[context, expected])
        # The first token sees nothing but itself.
        assert shared.among[context, seen[0]].sum() == 1
        assert seen[-1] == token


def bare_scene(contexts: Contexts) -> scenes.Scene:
    """A scene of these contexts without any image embedded."""
    return scenes.Scene(fresh("qwen2_5_vl"), contexts, (), ())


@pytest.mark.slow
def test_hidden_legends_are_seen_by_nobody_and_questions_see_what_they_are_told():
    """Causal inside the prefix; hidden legends seen by nobody; questions see the page, legends if told, themselves."""
    contexts, rng = draw(8, 4)
    questions = small_task.ask(contexts, rng, {"page": 2, "chain": 3})
    shown = np.array([[1, 1, 1], [0, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    sees = rng.random((4, 5)) < 0.5
    batch, _ = pack(FORM, "qwen2_5_vl", contexts, questions, shown, sees, np.zeros(4, int))
    chunk_of = [place for place, piece in enumerate(FORM.slices) for _ in range(piece.start, piece.stop)]
    prefix = FORM.prefix_tokens
    total = prefix + 5 * QUESTION_TOKENS
    assert batch["mask"].shape == (4, 1, total, total)
    question_of = lambda token: (token - prefix) // QUESTION_TOKENS
    for index in range(4):
        there = lambda key, index=index: chunk_of[key] == LEGENDS or shown[index, chunk_of[key]]
        for query in range(total):
            for key in range(total):
                if query < prefix:
                    may = key <= query and there(key)
                elif key < prefix:
                    may = there(key) and (chunk_of[key] == LEGENDS or sees[index, question_of(query)])
                else:
                    may = key <= query and question_of(key) == question_of(query)
                assert batch["mask"][index, 0, query, key] == may, (index, query, key)
    scene = bare_scene(contexts)
    np.testing.assert_array_equal(scenes.prefix_mask(scene, shown)[:, 0], batch["mask"][:, 0, :prefix, :prefix])
    np.testing.assert_array_equal(batch["asked"], [prefix + 2 * number + 1 for number in range(5)])
    np.testing.assert_array_equal(batch["input_ids"][:, batch["asked"]], questions.argument)
    np.testing.assert_array_equal(batch["weight"], questions.valid)


@pytest.mark.slow
def test_a_blind_pages_mask_takes_the_legends_from_the_page_alone():
    """The 4-D-mask control takes the legends from the page and changes nothing else."""
    scene = bare_scene(draw(1, 2)[0])
    usual, blind = scenes.prefix_mask(scene)[:, 0], scenes.prefix_mask(scene, page_sees_legends=False)[:, 0]
    page = FORM.page
    assert not blind[:, page, : page.start].any()
    usual[:, page, : page.start] = False
    np.testing.assert_array_equal(blind, usual)


@few
@given(seeds, st.lists(st.booleans(), min_size=LEGENDS, max_size=LEGENDS))
def test_labels_of_cells_equal_those_read_one_by_one(seed: int, seen: list[bool]):
    """Every image token's labels, read one by one."""
    contexts, rng = draw(seed, 2)
    shown = rng.permuted(np.tile(seen, (2, 1)), axis=1)
    labels = sequences.cell_labels(FORM, contexts, shown)
    for index in range(2):
        by_storage = np.zeros((2, LEGENDS), bool)
        by_storage[index, contexts.order[index]] = shown[index]
        solver = Solver(contexts, index, by_storage)
        expected: list[dict[str, str]] = []
        for place in range(LEGENDS):
            which = contexts.order[index, place]
            tokens: list[dict[str, str]] = []
            for row in range(LEGEND_ROWS):
                glyph = solver.glyph_name(contexts.legend_glyph[index, which, row])
                fill, stripe = contexts.legend_fill[index, which, row], contexts.legend_stripe[index, which, row]
                tokens += [
                    {"seen": glyph},
                    {"seen": f"fill{fill}", "bound": glyph},
                    {"seen": f"stripe{stripe}", "bound": glyph},
                ]
            expected += [{}, *(tokens if shown[index, place] else [{}] * len(tokens)), {}]
        expected.append({})
        addresses = iter(solver.page.items())
        for row in range(ROWS):
            expected.append({"seen": f"r{contexts.row_tag[index, row]}"})
            for _ in range(CELLS):
                address, glyph = next(addresses)
                token = {"seen": glyph, "tag": "t" + address.split("t")[1], "cell": address}
                if glyph in solver.told:
                    token |= {name: solver.colour(glyph, f"{name}?") for name in ("fill", "stripe")}
                expected.append(token)
        expected.append({})
        got = [
            {name: VOCABULARY.names[table[index, token]] for name, table in labels.items() if table[index, token] >= 0}
            for token in range(FORM.prefix_tokens)
        ]
        assert got == expected


def test_vocabulary_is_one_to_one():
    """Names are distinct words, so that text and ids are the same thing."""
    tokenizer = make_tokenizer()
    assert len(set(VOCABULARY.names)) == len(VOCABULARY)
    assert tokenizer.encode(" ".join(VOCABULARY.names)).ids == list(range(len(VOCABULARY)))


def test_padding_is_marked():
    """More questions than a context has: the rest is not valid, and what is asked is asked once."""
    contexts, rng = draw(9, 2)
    questions: Questions = small_task.ask(contexts, rng, {"aggregate": ROWS})
    assert (questions.valid.sum(axis=1) <= small_task.CLEAN_ROWS).all()
    assert questions.valid.any()
    assert not questions.valid.all()
