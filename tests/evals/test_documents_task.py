"""Documents: what is drawn and asked, against templates, formulas and plain reading; every chunk of them reused."""

from pathlib import Path

import jax
import matplotlib
import numpy as np
import pytest
from flax import nnx
from PIL import Image, ImageDraw, ImageFont

from evals import documents_task
from evals.documents_task import (
    DOCUMENTS,
    KINDS,
    SIZES,
    VOCABULARY,
    Documents,
    DocumentsRecipe,
    drawing,
    faces,
    picture,
    task,
)
from evals.documents_task.dataset import DOCUMENTS_DATASET
from evals.sheets_task import training
from evals.sheets_task.reader import PackedReader, class_shares, move_page
from evals.sheets_task.training import draw_batch, initialise
from evals.small_task.training import make_tokenizer
from models import ModelBackbone, load

COUNTS = {"page": 3, "sheet": 2, "chain": 4, "override": 2, "aggregate": 2, "list": 1}
BILL, CHART, SCREEN = range(3)


def draw(seed: int, size: str, count: int = 2, unseen: bool = False) -> tuple[Documents, np.random.Generator]:
    rng = np.random.default_rng(seed)
    return documents_task.sample_documents(rng, count, SIZES[size], unseen), rng


def cells(image: np.ndarray) -> np.ndarray:
    """Cells [n,28,28,3] of a document, its title row left out."""
    rows, columns = image.shape[0] // 28, image.shape[1] // 28
    return image.reshape(rows, 28, columns, 28, 3).swapaxes(1, 2)[1:].reshape(-1, 28, 28, 3).astype(float)


def of_kind(documents: Documents, kind: int) -> int:
    """The first context of a kind."""
    return int(np.flatnonzero(documents.document == kind)[0])


def templates(name: str, texts: list[str], width: int, right: bool) -> np.ndarray:
    """Each text in every size, at places where a line may begin or end: [texts, ways, 14 · width], of unit norm."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"
    anchor, begin, inwards = ("rs", width - 1, -0.5) if right else ("ls", 1, 0.5)
    fonts = [ImageFont.truetype(path, size) for size in np.arange(faces.SMALLEST, faces.LARGEST + 0.5, 0.5)]
    every = np.zeros((len(texts), len(fonts), 2, 2, 9, 14, width), np.float32)
    for (number, at, x, y), _ in np.ndenumerate(every[..., 0, 0, 0]):
        # A text stands half a pixel further in or down, and its document a pixel off.
        image = Image.new("L", (width + 2, 16))
        place = (1 + begin + x * inwards, 12 + y / 2)
        ImageDraw.Draw(image).text(place, texts[number], fill=255, font=fonts[at], anchor=anchor)
        moved = np.lib.stride_tricks.sliding_window_view(np.asarray(image), (14, width))
        every[number, at, x, y] = moved.reshape(9, 14, width)
    every = every.reshape(len(texts), -1, 14 * width)
    every -= every.mean(axis=2, keepdims=True)
    return every / np.maximum(np.sqrt(np.square(every).sum(axis=2, keepdims=True)), 1e-9)


def read(crops: np.ndarray, name: str, texts: list[str], right: bool = False) -> list[str]:
    """Reads crops [n,14,width,3]: the text whose best template correlates most."""
    dark = -crops.mean(axis=-1).reshape(len(crops), -1)
    dark -= dark.mean(axis=1, keepdims=True)
    fits = np.stack([(dark @ ways.T).max(axis=1) for ways in templates(name, texts, crops.shape[2], right)])
    return [texts[number] for number in fits.argmax(axis=0)]


@pytest.mark.slow
def test_words_and_codes_are_those_meant():
    """Templates set by Pillow directly tell which word, code, value and unit stands in each cell, in unseen faces."""
    documents, _ = draw(3, "small", 8, unseen=True)
    index = of_kind(documents, BILL)
    drawn, pages = documents_task.render(documents)
    page, name = cells(pages[index]), faces.FACES[documents.face[index, -1]]
    assert name in faces.UNSEEN
    words = [task.WORDS[item] for item in documents.page_address[index]]
    assert read(page[:, :14], name, list(task.WORDS)) == words
    letters = read(page[:, 14:, :14], name, list("ABCDEFGH"), right=True)
    digits = read(page[:, 14:, 14:], name, list("12345678"))
    assert [a + b for a, b in zip(letters, digits, strict=True)] == [
        "ABCDEFGH"[glyph // 8] + "12345678"[glyph % 8] for glyph in documents.page_glyph[index]
    ]
    sheet, name = cells(drawn[index, 1]), faces.FACES[documents.face[index, 1]]
    assert read(sheet[:, :14], name, list(task.WORDS)) == [task.WORDS[i] for i in documents.sheet_address[index, 1]]
    values = read(sheet[:, 14:, :14], name, [str(value) for value in range(1, 13)], right=True)
    assert values == [str(value + 1) for value in documents.sheet_fill[index, 1]]
    units = read(sheet[:, 14:, 14:], name, list(task.UNITS))
    assert units == [task.UNITS[unit] for unit in documents.sheet_stripe[index, 1]]


def nearest(pixels: np.ndarray) -> np.ndarray:
    """The series colour nearest to each row's mean [n,...,3]."""
    mean = pixels.reshape(len(pixels), -1, 3).mean(axis=1)
    return np.square(mean[:, None] - drawing.COLOURS).sum(axis=-1).argmin(axis=1)


def test_bars_have_their_colours():
    """The middle of a bar is its series' fill, its lower rim the edge, on charts and on their keys."""
    documents, _ = draw(4, "4", 8)
    index = of_kind(documents, CHART)
    drawn, pages = documents_task.render(documents)
    for image, address in (
        (pages[index], documents.page_address[index]),
        (drawn[index, 0], documents.sheet_address[index, 0]),
    ):
        of = cells(image)
        np.testing.assert_array_equal(nearest(of[:, 9:10, 10:18]), address // 8)
        np.testing.assert_array_equal(nearest(of[:, 12:13, 7:21]), address % 8)


def test_icons_have_their_colours_and_shapes():
    """Icons are told by formulas: discs, squares, triangles, …, each where its equation says; by the best overlap."""
    y, x = np.mgrid[:14, :28]
    x, y = (x - 13.5) / 5.5, (y - 6.5) / 5.5
    far, box = np.hypot(x, y), np.maximum(abs(x), abs(y))
    shapes = np.stack(
        [
            far < 1,
            box < 1,
            (y < 1) & (y > -1) & (abs(x) < (y + 1) / 2),
            (np.minimum(abs(x), abs(y)) < 0.36) & (box < 1),
            abs(x) + abs(y) < 1,
            (far < 1) & (far > 0.5),
            (box < 1) & ((abs(y) > 0.55) | (abs(y) < 0.25)),
            (abs(abs(x) - abs(y)) < 0.4) & (box < 1.05),
        ]
    ).astype(float)
    shapes -= shapes.mean(axis=(1, 2), keepdims=True)
    shapes /= np.sqrt(np.square(shapes).sum(axis=(1, 2), keepdims=True))
    documents, _ = draw(5, "4", 12)
    index = of_kind(documents, SCREEN)
    drawn, pages = documents_task.render(documents)
    for image, address in (
        (pages[index], documents.page_address[index]),
        (drawn[index, 2], documents.sheet_address[index, 2]),
    ):
        upper = cells(image)[:, :14]
        paper = np.median(image.reshape(-1, 3), axis=0)
        apart = np.abs(upper - paper).sum(axis=-1)
        # Neither the frame nor what a document that is a pixel off has of the line below.
        apart[:, :2], apart[:, 13:], apart[:, :, :3], apart[:, :, -3:] = 0, 0, 0, 0
        fits = []
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                moved = np.roll(shapes, (down, right), axis=(1, 2))
                fits.append(np.einsum("nhw,thw->nt", apart, moved))
        np.testing.assert_array_equal(np.max(fits, axis=0).argmax(axis=1), address % 8)
        # Thin strokes are half paper: their colour is where the ink leads, seen from the paper.
        away = ((upper - paper) * (apart > 60)[..., None]).sum(axis=(1, 2))
        towards = drawing.COLOURS - paper
        fits = away @ (towards / np.linalg.norm(towards, axis=-1, keepdims=True)).T
        np.testing.assert_array_equal(fits.argmax(axis=1), address // 8)


def test_a_context_is_drawn_alike_alone_and_in_a_batch():
    """Pixels depend on the context's own meaning alone; the faces of training are never the unseen ones."""
    documents, _ = draw(6, "small", 3)
    _, pages = documents_task.render(documents)
    _, alone = documents_task.render(documents.taken(np.array([2])))
    np.testing.assert_array_equal(alone[0], pages[2])
    assert (documents.face < len(faces.SEEN)).all()
    others, _ = draw(6, "small", 3, unseen=True)
    np.testing.assert_array_equal(others.page_address, documents.page_address)
    assert (others.face >= len(faces.SEEN)).all()
    assert not set(faces.SEEN) & set(faces.UNSEEN)


def test_answers_follow_from_what_is_shown():
    """Each question as words; its answer looked up by a reader of names, the later sheet counting."""
    documents, rng = draw(7, "4", 6)
    shown = np.ones((6, 3), bool)
    shown[0, 1] = False
    questions = documents_task.ask(documents, rng, COUNTS, shown)
    name = VOCABULARY.names
    seen = set()
    for index in range(6):
        kind = int(documents.document[index])
        known, items = {}, {}
        naming = [name[VOCABULARY.cell + 72 * kind + address] for address in range(72)]
        for sheet in np.flatnonzero(shown[index]):
            columns = (documents.sheet_address, documents.sheet_fill, documents.sheet_stripe)
            for address, value, unit in zip(*(column[index, sheet] for column in columns), strict=True):
                known[naming[address]] = str(value + 1), f"/{task.UNITS[unit]}"
        for glyph, address in zip(documents.page_glyph[index], documents.page_address[index], strict=True):
            items["ABCDEFGH"[glyph // 8] + str(glyph % 8 + 1)] = naming[address]
        for number, asked in enumerate(questions.kind):
            mine = np.flatnonzero(questions.own == number)
            words = [name[token] for token in questions.ids[index, mine]]
            said = [name[token] for token in questions.answer[index, mine] if token >= 0]
            if not said:
                continue
            seen.add(task.sheets.KINDS[asked])
            match words:
                case ["first?", code]:
                    item = items[code]
                    assert said == [(f"{item[0]}..", item.split("/")[0], f"{item.split('-')[0]}-icon")[kind]]
                case ["second?", code]:
                    item = items[code]
                    assert said == [
                        (f".{item[1]}.", f"{item.split('/')[-1]}-edged", f"{item.split('-')[-1]}-icon")[kind]
                    ]
                case ["letter?" | "digit?" as what, item]:
                    (code,) = (code for code, of in items.items() if of == item)
                    assert said == [code[0] if what == "letter?" else f"#{code[1]}"]
                case ["value?" | "unit?" as what, about]:
                    assert said == [known[items.get(about, about)][what == "unit?"]]
                case ["most?", letters]:
                    values = [known[item][0] for code, item in items.items() if code[0] == letters[0]]
                    counts = sorted((values.count(value), value) for value in set(values))
                    assert said == [counts[-1][1]]
                    assert counts[-1][0] - counts[-2][0] >= 2
                case ["values?", *codes]:
                    assert said == [known[items[code]][0] for code in codes[::2]]
                    assert codes[1::2] == said[:-1]
    assert seen == set(KINDS)


def test_variety_grows_as_the_recipe_says():
    """One face in one cut at first, all of both from `varied` on; what is drawn changes no meaning."""
    recipe = DocumentsRecipe(plain=10, varied=30)
    assert [recipe.drawn(step)["variety"] for step in (0, 10, 20, 30, 99)] == [0, 0, 0.5, 1, 1]
    plain, half, full = (
        documents_task.sample_documents(np.random.default_rng(1), 40, SIZES["tiny"], variety=variety)
        for variety in (0.0, 0.5, 1.0)
    )
    assert [int(of.face.max()) for of in (plain, half, full)] == [0, 4, len(faces.SEEN) - 1]
    np.testing.assert_array_equal(plain.page_address, full.page_address)
    _, pages = documents_task.render(plain)
    assert all((page[-1] == page[-1, 0]).all() or kind for page, kind in zip(pages, plain.document, strict=True))


def test_shares_are_asked_of_letters():
    """`proportions` is about aggregate questions alone, and the answer leads the shares."""
    recipe = DocumentsRecipe(tiny=0, small=0, batch=2)
    drawn = draw_batch(recipe, 0, DOCUMENTS)
    asked = drawn.kinds == task.sheets.KINDS.index("aggregate")
    some = drawn.batch["fills"].sum(axis=-1) > 0
    assert some[:, asked].any()
    assert not some[:, ~asked].any()
    answered = drawn.batch["answer"][some] - VOCABULARY.fill
    np.testing.assert_array_equal(drawn.batch["fills"][some].argmax(axis=-1), answered)


def test_a_step_draws_documents():
    """The same step draws the same batch; one patch is a quarter of a cell; no whole questions are asked."""
    recipe = DocumentsRecipe(tiny=1, small=1, batch=1)
    first, again = (draw_batch(recipe, 0, DOCUMENTS) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first.batch, again.batch)
    contexts = training.MORE_CONTEXTS["tiny"]
    # Two sheets of a title and three cells, a page of a row of titles and two rows of two cells.
    assert first.batch["pixel_values"].shape == (contexts * 4 * (2 * 4 + 6), 14 * 14 * 3)
    assert not (first.kinds == task.sheets.KINDS.index("whole")).any()


def fresh() -> ModelBackbone:
    """The small backbone with fresh parameters."""
    config, images = DOCUMENTS.instance()
    state = nnx.to_pure_dict(nnx.split(initialise(DocumentsRecipe(), DOCUMENTS))[1])
    return ModelBackbone(config, state, images, make_tokenizer(VOCABULARY.names))


@pytest.mark.slow
def test_every_chunk_is_reused(tmp_path: Path):
    """All patches whole: re-prefill, though every chunk moved; and a picture of it is drawn."""
    documents, rng = draw(1, "tiny", 3)
    questions = documents_task.ask(documents, rng, {"chain": 2, "page": 1})
    page = move_page(fresh(), documents, DOCUMENTS)
    reader = PackedReader("documents.4", page, questions)
    read = lambda cache: reader.read(cache).log_probabilities
    truth = read(page.reference)
    whole = page.cache_of_chunks({place: page.patch(64, place) for place in range(1, page.form.chunks)})
    np.testing.assert_allclose(read(whole), truth, atol=2e-3)
    assert np.abs(read(page.cache()) - truth).max() > 1e-3
    for by_channel in class_shares(page, DOCUMENTS).values():
        assert all((share <= 1 + 1e-5).all() and share.shape == (3, 4) for share in by_channel.values())
    path = picture.draw(documents, questions, {"re-prefill": truth.argmax(axis=-1)}, tmp_path / "picture.png")
    with Image.open(path) as image:
        assert image.width > 1000


@pytest.mark.slow
def test_the_shipped_instance_answers_by_patches_and_not_blind():
    """Chain questions about varied documents: right computed anew, wrong blind, right with a patch though all moved."""
    (path,) = DOCUMENTS_DATASET.instances("qwen2_5_vl")
    rng = np.random.default_rng(11)
    documents = documents_task.sample_documents(rng, 8)
    questions = documents_task.ask(documents, rng, {"chain": 12})
    page = move_page(load(path, dtype="float32"), documents, DOCUMENTS)
    reader = PackedReader("documents.4", page, questions)
    asked = questions.answer >= 0
    right = lambda cache: (reader.read(cache).log_probabilities.argmax(axis=-1) == questions.answer)[asked].mean()
    # Of 96 questions; the guide has the suite's 512, a few of a hundred below what the sheets task's instances do.
    truth = right(page.reference)
    assert truth >= 0.85
    assert right(page.cache()) <= 0.3
    assert right(page.cache(page.patch(16))) >= truth - 0.03
