"""The modality suite: one meaning in five ways of showing it, read back by other means; and the suite end to end."""

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.modality import document, suite
from evals.modality.sound import FIRST, synthesise
from evals.modality.task import FULL, KINDS, SIZES, SMALL
from evals.modality.task_spec import MODALITIES, VOCABULARY, ClipSpec, SoundSpec
from evals.modality.training import ModalityRecipe, draw, initialise, instance, naming_loss
from evals.results.rows import Rows
from evals.rules import RULES
from evals.runner import run_recorded
from evals.sheets_task import task as sheets
from evals.sheets_task.reader import MOVED
from evals.sheets_task.task import SheetsContexts
from evals.small_task.prefix import prefix_positions
from evals.small_task.training import make_tokenizer
from evals.trained import MODALITY
from kvpatch_jax.errors import InputError
from models import ModelBackbone, load, save
from models.inputs.positions import PositionConfig, get_rope_positions

few = settings(max_examples=6, deadline=None)
seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([SMALL, FULL])
Meaning = tuple[list[list[tuple[int, int, int]]], list[tuple[int, int]]]


def sample(seed: int, size: str = FULL, count: int = 1) -> SheetsContexts:
    return MODALITIES["images"].sample(np.random.default_rng(seed), count, SIZES[size])


def meaning(contexts: SheetsContexts, index: int = 0) -> Meaning:
    """Entries (address, fill, stripe) sheet by sheet, and the page's cells (address, glyph)."""
    columns = (contexts.sheet_address[index], contexts.sheet_fill[index], contexts.sheet_stripe[index])
    entries = [list(zip(*(column.tolist() for column in sheet), strict=True)) for sheet in zip(*columns, strict=True)]
    return entries, list(zip(contexts.page_address[index].tolist(), contexts.page_glyph[index].tolist(), strict=True))


def cells_of(image: np.ndarray, side: int) -> np.ndarray:
    """Cells [n, side, side, 3] of an image in reading order."""
    height, width = image.shape[0] // side, image.shape[1] // side
    return image.reshape(height, side, width, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3).astype(float)


# ------------------------------------------------------------------------------- one meaning, read back by other means

# The letters as a reader writes them down: rows of three, from the top.
LETTERS = {
    "A": ".#.|#.#|###|#.#|#.#",
    "B": "##.|#.#|##.|#.#|##.",
    "C": ".##|#..|#..|#..|.##",
    "D": "##.|#.#|#.#|#.#|##.",
    "E": "###|#..|##.|#..|###",
    "F": "###|#..|##.|#..|#..",
    "G": ".##|#..|#.#|#.#|.##",
    "H": "#.#|#.#|###|#.#|#.#",
    "I": "###|.#.|.#.|.#.|###",
    "J": "..#|..#|..#|#.#|.#.",
    "K": "#.#|#.#|##.|#.#|#.#",
    "L": "#..|#..|#..|#..|###",
    "1": ".#.|##.|.#.|.#.|###",
    "2": "##.|..#|.#.|#..|###",
    "3": "##.|..#|.#.|..#|##.",
    "4": "#.#|#.#|###|..#|..#",
    "5": "###|#..|##.|..#|##.",
    "6": ".##|#..|###|#.#|###",
    "7": "###|..#|.#.|.#.|.#.",
    "8": "###|#.#|###|#.#|###",
}


def read_letters(cell: np.ndarray) -> str:
    """Reads the four characters of a cell by the template nearest to its pixels."""
    templates = {}
    for name, art in LETTERS.items():
        templates[name] = np.array([[mark == "#" for mark in row] for row in art.split("|")])
    said = ""
    for top in (0, 6):
        for left in (1, 7):
            seen = cell[top : top + 5, left : left + 3].mean(axis=-1) / 255
            said += min(templates, key=lambda name, seen=seen: float(np.square(templates[name] - seen).sum()))
    return said


@few
@given(seed=seeds, size=sizes)
def test_rendered_text_is_read_back_by_the_nearest_letters(seed: int, size: str):
    contexts = sample(seed, size)
    shown, pages = MODALITIES["rendered"].render(contexts)
    found = []
    for sheet in shown[0]:
        texts = [read_letters(cell) for cell in cells_of(sheet, 12)]
        found.append([(8 * (ord(a) - 65) + int(b) - 1, ord(c) - 65, ord(d) - 65) for a, b, c, d in texts])
    texts = [read_letters(cell) for cell in cells_of(pages[0], 12)]
    page = [(8 * (ord(a) - 65) + int(b) - 1, ord(c) - 65 + 8 * (int(d) - 1)) for a, b, c, d in texts]
    assert (found, page) == meaning(contexts)


@few
@given(seed=seeds, size=sizes)
def test_words_are_read_back_by_their_names(seed: int, size: str):
    contexts = sample(seed, size)
    spec = MODALITIES["words"]
    config, images = spec.instance("words")
    (ids,), arrays = spec.inputs(config, images, contexts)
    assert arrays == {}
    chunks = " ".join(spec.vocabulary.names[token] for token in ids).split("<|vision_start|> ")[1:]
    *facts, cells = [chunk.removesuffix(" ").removesuffix(" <|vision_end|>").split() for chunk in chunks]

    def address(word: str) -> int:
        row, _, column = word.removeprefix("r").partition("c")
        return 8 * int(row) + int(column)

    found = []
    for words in facts:
        assert set(words[2::3]) == {"<end>"}
        colours = [word.removeprefix("fill").split("stripe") for word in words[1::3]]
        entries = zip(map(address, words[::3]), colours, strict=True)
        found.append([(at, int(fill), int(stripe)) for at, (fill, stripe) in entries])
    glyphs = [word.removeprefix("s").split("i") for word in cells[1::3]]
    page = list(zip(map(address, cells[::3]), (int(shape) + 8 * int(ink) for shape, ink in glyphs), strict=True))
    assert (found, page) == meaning(contexts)


@few
@given(seed=seeds, size=sizes)
def test_sounds_are_read_back_by_their_spectrum(seed: int, size: str):
    """Of each attribute's tones the loudest one of every 40 ms, by a discrete Fourier transform."""
    contexts = sample(seed, size)
    *shown, page = synthesise(contexts)
    assert all(sound.rate == 16_000 for sound in (*shown, page))

    def loudest(wave: np.ndarray, attribute: str, count: int) -> np.ndarray:
        spectrum = np.abs(np.fft.rfft(wave.reshape(-1, 640), 16_000))  # a bin is 1 Hz
        tones = FIRST[attribute] + np.arange(count)
        return spectrum[:, 300 + 120 * tones].argmax(axis=1)

    def address(wave: np.ndarray) -> np.ndarray:
        return 8 * loudest(wave, "row", 9) + loudest(wave, "column", 8)

    found = []
    for sound in shown:
        wave = np.asarray(sound.source)
        columns = (address(wave), loudest(wave, "fill", 12), loudest(wave, "stripe", 12))
        found.append(list(zip(*(column.tolist() for column in columns), strict=True)))
    wave = np.asarray(page.source)
    glyph = loudest(wave, "shape", 8) + 8 * loudest(wave, "ink", 8)
    assert (found, list(zip(address(wave).tolist(), glyph.tolist(), strict=True))) == meaning(contexts)


def test_clips_show_a_sheet_or_a_row_of_the_page_a_second():
    contexts = sample(3)
    spec = MODALITIES["video"]
    assert isinstance(spec, ClipSpec)
    fronts, page = spec.clips(contexts)
    sheets_drawn, pages = MODALITIES["images"].render(contexts)
    np.testing.assert_array_equal(fronts[::2], sheets_drawn[0])
    np.testing.assert_array_equal(fronts[1::2], sheets_drawn[0])
    np.testing.assert_array_equal(np.concatenate(list(page[::2])), pages[0])

    # The tower sees the very numbers that it sees of images, but for the order of roundings.
    config, images = spec.instance("video")
    patches = spec.inputs(config, images, contexts)[1]["pixel_values_videos"]
    expected = MODALITIES["images"].inputs(config, images, contexts)[1]["pixel_values"]
    np.testing.assert_allclose(patches, expected, atol=1e-6)


def test_every_modality_asks_the_same_questions_with_the_same_answers():
    rng = lambda: np.random.default_rng(5)
    first = None
    for spec in MODALITIES.values():
        drawn = rng()
        contexts = spec.sample(drawn, 3, spec.sizes[FULL])
        questions = spec.ask(contexts, drawn, RULES.modality["questions"])
        found = [meaning(contexts, index) for index in range(3)], questions.ids.tolist(), questions.answer.tolist()
        first = first or found
        assert found == first
        # Words mean the same under the same ids.
        assert spec.vocabulary.names[: len(VOCABULARY)] == VOCABULARY.names


# --------------------------------------------------------------------------------------------------- forms, positions


def test_positions_of_clips_are_those_of_the_whole_prompt():
    """Both clips behind one another: as transformers' rule counts them, and T by seconds."""
    spec = MODALITIES["video"]
    config, images = spec.instance("video")
    form = spec.form_of(config, images, SIZES[FULL])
    assert form.chunks == 2
    whole, _ = prefix_positions(form, np.ones((1, 2), bool), np.array([MOVED]))
    rule = PositionConfig(config.image_token, config.video_token, 1, 2)
    grids = np.array([[3, 10, 1], [5, 1, 5]])
    expected, _ = get_rope_positions(form.ids, None, grids, np.ones(2, np.float32), rule)
    np.testing.assert_array_equal(whole[0], expected + MOVED)
    # A second is two positions: sheets at 1, 3, 5 behind their start; the page's rows at 1, 3, 5, 7, 9 behind theirs.
    np.testing.assert_array_equal(form.chunk_local[0][1:-1, 0], np.repeat([1, 3, 5], 10))
    np.testing.assert_array_equal(form.chunk_local[1][1:-1, 0], np.repeat([1, 3, 5, 7, 9], 5))
    np.testing.assert_array_equal(form.chunk_local[1][1:-1, 2], np.tile(np.arange(1, 6), 5))
    assert form.spans == [12, 11]


def test_a_cell_of_sound_is_one_token_and_its_marks_are_of_sounds():
    spec = MODALITIES["sound"]
    assert isinstance(spec, SoundSpec)
    config, mels = spec.instance("sound")
    form = spec.form_of(config, mels, SIZES[FULL])
    assert form.sizes == [12, 12, 12, 27]
    np.testing.assert_array_equal(form.chunk_local[-1], np.repeat(np.arange(27)[:, None], 3, axis=1))
    names = [spec.vocabulary.names[token] for token in form.chunk_ids[0]]
    assert names == ["<|audio_bos|>", *["<|AUDIO|>"] * 10, "<|audio_eos|>"]


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("modality", MODALITIES)
def test_names_say_what_every_cell_shows(modality: str):
    drawn = draw(ModalityRecipe(backbone=modality, batch=1), 0)
    names, contexts = drawn.batch["names"], drawn.contexts
    if modality == "words":
        # The last words of entries and cells, which have all of each in what precedes.
        spec = MODALITIES["words"]
        said = drawn.batch["input_ids"][:, drawn.batch["named_at"]]
        groups = [spec.vocabulary.names[token].rstrip("0123456789") for token in said[0]]
        assert [name.startswith("fill") for name in groups] == [True] * 6 + [False] * 4
        assert all(name.startswith("s") for name in groups[6:])
        assert said.shape == (len(contexts), 10)
    for index in range(len(contexts)):
        entries, page = meaning(contexts, index)
        flat = [entry for sheet in entries for entry in sheet]
        assert names[str(VOCABULARY.fill)][index].tolist() == [fill for _, fill, _ in flat] + [-1] * len(page)
        assert names[str(VOCABULARY.stripe)][index].tolist() == [stripe for *_, stripe in flat] + [-1] * len(page)
        assert names[str(VOCABULARY.glyph)][index].tolist() == [-1] * len(flat) + [glyph for _, glyph in page]
        addresses = [address for address, *_ in flat] + [address for address, _ in page]
        assert names[str(VOCABULARY.cell)][index].tolist() == addresses
        assert names[str(VOCABULARY.column)][index].tolist() == [address % 8 for address in addresses]


def test_naming_costs_nothing_where_features_are_the_words():
    model = initialise(ModalityRecipe(backbone="words"))
    table = model.decoder.embedding[...]
    numbers = jnp.array([[3, -1, 7]])
    right = table[VOCABULARY.fill + jnp.array([3, 0, 7])] * 5.0
    losses = [float(naming_loss(model, features, {str(VOCABULARY.fill): numbers})) for features in (right, -right)]
    assert losses[0] < 0.2
    assert losses[1] > 5.0


def test_words_begin_with_heads_that_look_one_token_back():
    """Scores of the first layer's heads by position, from their biases, turned as complex numbers."""
    model = initialise(ModalityRecipe(backbone="words"))
    attention = model.decoder.layers.attention
    half = 32
    frequency = 1e6 ** (-np.arange(half) / half)
    for head, group in enumerate((0, 0, 1, 1)):
        query, key = (
            np.asarray(projection.bias[...])[0].reshape(-1, 64)[which]
            for projection, which in ((attention.query, head), (attention.key, group))
        )
        assert not np.asarray(attention.query.kernel[...])[0, :, 64 * head : 64 * (head + 1)].any()
        turned = (query[:half] + 1j * query[half:]) * np.conj(key[:half] + 1j * key[half:])
        back = np.arange(-5, 60)
        scores = np.real(turned * np.exp(1j * frequency * back[:, None])).sum(axis=1) / 8
        assert back[scores.argmax()] == 1
        assert np.sort(scores)[-1] - np.sort(scores)[-2] > 2.5
    # What they find is added as it is.
    found = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float32)
    values = np.asarray(found @ attention.value.kernel[...][0]).reshape(3, 2, 1, 64)
    added = np.repeat(values, 2, axis=2).reshape(3, -1) @ np.asarray(attention.output.kernel[...])[0]
    np.testing.assert_allclose(added, found, atol=1e-5)
    other = initialise(ModalityRecipe(backbone="images"))
    assert not np.asarray(other.decoder.layers.attention.key.bias[...]).any()


def test_words_take_the_decoder_of_images_behind_their_first_layer():
    taken = initialise(ModalityRecipe(backbone="words", decoder_of="images")).decoder
    images = load(MODALITY / "images", dtype="float32").parameters["decoder"]
    for name in ("key", "value", "output"):
        found = getattr(taken.layers.attention, name).kernel[...]
        np.testing.assert_array_equal(found[1:], images["layers"]["attention"][name]["kernel"])
        assert len(found) == 5
    known = len(VOCABULARY)
    np.testing.assert_array_equal(taken.embedding[...][:known], images["embedding"])
    np.testing.assert_array_equal(taken.head.kernel[...][:, :known], images["head"]["kernel"])


# ---------------------------------------------------------------------------------------------------------- the suite


@pytest.fixture
def small_rules(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"batch": 2, "arms": ["re-prefill", "blind", "patch.rank=4", "patch.rank=16"]}.items():
        monkeypatch.setitem(RULES.modality, name, value)
    monkeypatch.setitem(RULES.modality, "questions", {"page": 2, "sheet": 2, "chain": 2, "override": 1, "list": 1})


def untrained(modality: str, folder: Path) -> Path:
    """Saves a backbone of a modality with parameters as they are drawn."""
    config, given = instance(modality)
    model = initialise(ModalityRecipe(backbone=modality))
    words = make_tokenizer(MODALITIES[modality].vocabulary.names)
    kind = "audio_config" if modality == "sound" else "image_config"
    backbone = ModelBackbone(config, nnx.to_pure_dict(nnx.state(model)), tokenizer=words, **{kind: given})
    return save(backbone, folder / modality)


@pytest.mark.parametrize(
    "modality", ["words", *(pytest.param(name, marks=pytest.mark.slow) for name in MODALITIES if name != "words")]
)
def test_the_suite_measures_untrained_instances_and_resumes(modality: str, tmp_path: Path, small_rules: None):
    untrained(modality, tmp_path / "instances")
    found = suite.instances(tmp_path / "instances")
    assert list(found) == [modality]
    # One part, then the other: what was finished is not measured again.
    first = run_recorded(suite.dataset(found, 7, 4), tmp_path / "out", 1)
    assert (first["config"]["parts_done"], first["config"]["parts"]) == (1, 2)
    lines = (tmp_path / "out" / "parts.jsonl").read_text().splitlines()
    results = run_recorded(suite.dataset(found, 7, 4), tmp_path / "out")
    assert (tmp_path / "out" / "parts.jsonl").read_text().splitlines()[: len(lines)] == lines
    assert results["config"]["parts_done"] == 2
    with pytest.raises(InputError, match="seed"):
        run_recorded(suite.dataset(found, 8, 4), tmp_path / "out")

    rows, probe = Rows(results, modality), f"modality.{modality}"
    assert rows.kinds(probe) == [kind for kind in sheets.KINDS if kind in KINDS]
    for kind in KINDS:
        assert rows.get(probe, "re-prefill", f"kl.{kind}").value == 0.0
        # The page of 27 tokens: rank 16 is nearly all of its deficit.
        kl = [rows.get(probe, arm, f"kl.{kind}").value for arm in ("blind", "patch.rank=16", suite.WITHOUT)]
        assert all(math.isfinite(value) for value in kl)
        assert kl[1] <= kl[0] + 1e-3
    mean = Rows(results, suite.mean_of(modality))
    assert mean.get(probe, "blind", "kl.chain").value == rows.get(probe, "blind", "kl.chain").value
    text = document.section(document.summary(results))
    assert "so no claim" in text
    assert document.TITLES[modality] in text


def test_reading_the_page_alone_does_not_look_at_the_sheets(small_rules: None):
    config, images = instance("words")
    model = initialise(ModalityRecipe(backbone="words"))
    backbone = ModelBackbone(config, nnx.to_pure_dict(nnx.state(model)), images)
    reader = suite.reader_of(backbone, MODALITIES["words"], 1, 0)
    cache = reader.page.cache()
    other = {name: value.at[:, :, : reader.form.page.start].set(1.0) for name, value in cache.items()}
    alone, again = (reader.read_alone(kv).log_probabilities for kv in (cache, other))
    np.testing.assert_array_equal(alone, again)
    both, changed = (reader.read(kv).log_probabilities for kv in (cache, other))
    assert np.abs(both - changed).max() > 1e-2


def test_a_folder_without_instances_of_a_known_modality_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no instance"):
        suite.instances(tmp_path)
    (tmp_path / "smell").mkdir()
    (tmp_path / "smell" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="smell"):
        suite.instances(tmp_path)


def made_up(difference: dict[str, float], eta: float = 0.99) -> dict:
    """Results of instances that lose so much, each by an interval of .01 to both sides."""
    rows = []
    for name, lost in difference.items():
        common = {"probe": f"modality.{suite.modality_of(name)}", "n": 10}
        for arm, metric, value in (("blind", "difference.chain", -lost), (document.PATCH, "eta.chain", eta)):
            own = {**common, "arm": arm, "metric": metric, "value": value, "low": value - 0.01, "high": value + 0.01}
            rows += [{**own, "model": name}, {**own, "model": suite.mean_of(suite.modality_of(name))}]
    return {"rows": rows}


def test_verdicts_follow_the_rules():
    three = {"images": 0.4, "images_seed1": 0.4, "images_seed2": 0.4}
    [said] = document.verdicts(made_up(three))
    assert said == "images: a gap of 0.400; rank 16 closes it (0.99 of the KL)."
    [said] = document.verdicts(made_up(three, eta=0.5))
    assert "does not close it" in said
    [said] = document.verdicts(made_up({**three, "images_seed1": 0.005}))
    assert "undecided" in said
    [said] = document.verdicts(made_up({"words": 0.0}))
    assert said == "words (text tokens): no gap (0.000); 1 training seed, so no claim."
    *_, said = document.verdicts(made_up({"images": 0.4, "images_no_window": 0.1}))
    assert said == "images, the control trained without a window: 0.100 [0.090, 0.110] lost by blind reuse."
    assert document.controls_of(made_up({"images": 0.4, "images_no_window": 0.1})) == ["images_no_window"]


def test_the_page_shows_the_kept_rows():
    kept = json.loads((document.ROOT / document.KEPT).read_text())
    assert document.section(kept) in (document.ROOT / document.PAGE).read_text()
    assert kept["config"]["parts_done"] == kept["config"]["parts"]
    assert kept["config"]["modality rules"] == RULES.modality


def test_recipes_differ_in_what_the_page_says_alone():
    """The seed, the control's window, and the steps: images and video take fewer."""
    recipes = {path.parent.name: json.loads(path.read_text())["recipe"] for path in MODALITY.glob("*/training.json")}
    assert set(recipes) == set(suite.instances())
    for name, recipe in recipes.items():
        expected = dataclasses.asdict(ModalityRecipe(backbone=suite.modality_of(name)))
        if suite.modality_of(name) in ("images", "video"):
            expected |= {"tiny": 300, "steps": 450}
        if suite.modality_of(name) == "words":
            own = "images" if suite.is_seed(name) else "images_no_window"
            expected |= {"tiny": 120, "steps": 320, "decoder_of": own}
        # Older recipes lack what only words have.
        differ = {field for field in expected if expected[field] != recipe.get(field, "")}
        assert differ <= ({"seed"} if suite.is_seed(name) else {"window"}), name
        assert recipe["window"] == (0.5 if suite.is_seed(name) else 0.0)
