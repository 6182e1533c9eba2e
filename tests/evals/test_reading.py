"""The reading model: pieces, pages, the tower and its stages, on one font that matplotlib brings and a tiny decoder."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from evals.bench.checkpoints import random_backbone, tiny_config
from evals.pretrained.texts import Document
from evals.reading import accuracy, document, fonts, pages, suite, training
from evals.reading.pieces import GLYPHS, LETTERS, Pieces, drawn
from evals.reading.tower import PICTURES, PageReadingModel, Tower, load_tower, model_config, save_tower, vision_config
from kvpatch_jax.errors import ConfigError, InputError
from models import save
from models.inputs.images import process_smolvlm

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "Ġ")]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ", "ĉ", "Ã", "¯"]
    words = ["<end>", *letters, *("".join(merge) for merge in MERGES)]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({word: number for number, word in enumerate(words)}, MERGES))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


@pytest.fixture(scope="module")
def face():
    return fonts.find({"DejaVu": ("DejaVuSansMono",)})["DejaVu"][0]


def test_every_text_is_written_in_the_pieces_that_are_drawn(tokenizer):
    whole, few = Pieces.of(tokenizer, 400), Pieces.of(tokenizer, 101)
    assert " the" in whole.shown
    assert " the" not in few.shown
    text = "the  other\n\tthe end"
    ids = tokenizer.encode(text).ids
    for pieces in (whole, few):
        assert tokenizer.decode(pieces.split(ids).tolist()) == text
        assert set(pieces.split(ids).tolist()) <= set(pieces.ids)
    assert len(few.split(ids)) > len(whole.split(ids)) == len(ids)
    assert tokenizer.decode(whole.split(tokenizer.encode("naïve").ids).tolist()) == "nave"
    with pytest.raises(InputError, match="got 0, which is not drawn"):
        whole.rows(np.array([0]))
    assert (drawn("  \n"), drawn(" a"), drawn("ten letters"), drawn("·"), drawn("")) == ("··¶", " a", None, None, None)


def test_a_page_is_cut_into_its_cells_by_the_real_preprocessing(tokenizer, face, tmp_path):
    pieces = Pieces.of(tokenizer, 400)
    chosen = np.arange(48) % len(pieces.ids)
    style = pages.Style(str(face))
    page = pages.draw_page(pieces.letters[chosen], style)
    assert page.shape == (3 * pages.CELL, pages.COLUMNS * pages.CELL, 3)
    Image.fromarray(page).save(tmp_path / "page.png")
    found = process_smolvlm([tmp_path / "page.png"], PICTURES)["pixel_values"][0]
    assert len(found) == 49  # and the whole page, shrunk
    ink = pages.cells(pages.glyphs(str(face), style.size), pieces.letters[chosen])
    np.testing.assert_allclose(found[:48, 0], 1 - 2 * ink.astype(np.float32) / 255, atol=1e-2)
    np.testing.assert_array_equal(pages.slots_of(ink)[5], pages.glyphs(str(face), style.size)[pieces.letters[5]])
    with pytest.raises(InputError, match="17 pieces; expected 1 to 16 lines"):
        pages.draw_page(pieces.letters[chosen[:17]], style)
    with pytest.raises(InputError, match="which is not read"):
        pages.glyphs(str(tmp_path / "page.png"), 13)


def test_no_family_is_seen_and_unseen():
    assert not set(fonts.SEEN) & set(fonts.UNSEEN)
    assert not {stem for own in fonts.SEEN.values() for stem in own} & {s for own in fonts.UNSEEN.values() for s in own}
    with pytest.raises(InputError, match="apt install fonts-nowhere"):
        fonts.find({"nowhere": ("Nowhere-Regular",)})


RECIPE = training.TowerRecipe(
    pieces=400,
    width=224,
    depth=2,
    heads=2,
    intermediate=16,
    letter_steps=2,
    letter_batch=8,
    piece_steps=2,
    piece_batch=8,
    warmup=1,
    variants=1,
    fitted=2048,
    thumbnails=0.2,
)


DOCS = Path(__file__).parents[2] / "docs"


def test_the_guide_says_what_was_measured():
    found = json.loads((DOCS / "reading.json").read_text("utf-8"))
    text = (DOCS / "experiments" / "reading.md").read_text("utf-8")
    assert text.partition("<!-- run -->\n")[2].partition("<!-- /run -->")[0].strip() == document.section(found)
    shipped = json.loads((Path(training.__file__).parents[1] / "trained" / "reading" / "tower.json").read_text("utf-8"))
    assert found["config"]["tower"]["recipe"] == shipped["recipe"]  # of this tower, not of one before


def test_what_the_guide_says_follows_the_rows(tmp_path):
    def row(probe, arm, metric, value, n=4):
        return {
            "probe": probe, "model": "reading", "arm": arm, "metric": metric,
            "value": value, "low": value - 0.01, "high": value + 0.01, "n": n,
        }  # fmt: skip

    pieces = [row("pieces", arm, metric, 0.5) for arm in ("seen", "unseen") for metric in accuracy.METRICS]
    pieces += [row("pieces", "unseen.DejaVu", "nearest", 0.6), row("pieces", "unseen.STIX", "nearest", 0.4)]
    arms = [row("text", arm, "eta", eta) for arm, eta in (("blind", 0.0), ("first_k.budget=0.15", 0.3), ("patch", 0.9))]
    other = [row("behaviour.copy", "blind", "right", 0.25, 16), row("as tokens", "image", "loss", 4.0)]
    found = {"config": {"model": "reading"}, "rows": [*pieces, *arms, *other]}
    said = document.section(found)
    assert "**missed**: 0.500 [0.490, 0.510]" in " ".join(said.split())
    assert "DejaVu is read best (0.600), STIX worst (0.400)" in " ".join(said.split())
    assert said.index("| `patch` | 0.900") < said.index("| `first_k.budget=0.15`") < said.index("| `blind` | 0.000")
    assert "Questions over two pages (16)" in said
    assert "| `blind` | 0.25 | – | – |" in said
    for one in pieces[:6]:
        one.update(value=0.98)
    assert "is met: 0.980" in " ".join(document.section(found).split())

    (tmp_path / "docs" / "experiments").mkdir(parents=True)
    page = tmp_path / document.GUIDE
    page.write_text("before\n<!-- run -->\nold\n\n<!-- /run -->\nafter\n", "utf-8")
    results = {**found, "cpu_seconds": 1, "config": {"model": "reading", "tower": {"recipe": {}, "versions": {}}}}
    document.write(results, tmp_path)
    kept = json.loads((tmp_path / document.KEPT).read_text("utf-8"))
    assert document.section(kept) in page.read_text("utf-8")
    assert "old" not in page.read_text("utf-8")


@pytest.mark.parametrize("steps", [2, 3, 40, 5000])
def test_the_learning_rate_rises_and_falls_however_few_the_steps(steps):
    rate = training.schedule(training.TowerRecipe(), steps)
    rates = np.asarray([rate(step) for step in (0, min(steps // 2, 40), steps)])
    np.testing.assert_allclose(rates, [0.0, training.TowerRecipe().learning_rate, 0.0], atol=1e-9)


@pytest.fixture(scope="module")
def decoder(tokenizer, tmp_path_factory):
    made = random_backbone(tiny_config("LlamaForCausalLM"))
    folder = tmp_path_factory.mktemp("decoder")
    save(made, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return made, folder


@pytest.mark.slow
def test_stages_train_what_they_say_and_a_tower_comes_back(tokenizer, face, decoder, tmp_path):
    model, _ = decoder
    pieces = Pieces.of(tokenizer, RECIPE.pieces)
    table = np.asarray(model.parameters["decoder"]["embedding"])
    vision = vision_config(RECIPE.width, RECIPE.depth, RECIPE.heads, RECIPE.intermediate)
    slots = training.Slots(RECIPE, pieces, [face])
    config = model_config(model.config.to_dict(), vision)
    made = training.Stages(RECIPE, config, pieces, slots, table, tokenizer.encode("\n").ids[0])
    assert len([*made.letters()]) == 2
    made.address_slots()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(made.state))
    np.testing.assert_array_equal(before["visual"]["blocks"]["output"]["kernel"][0], 0)

    # What single slots are read as is what the tower's blocks make of them in a cell.
    ink = pages.cells(slots.sheets[0], pieces.letters[:4])
    tiles = np.repeat(1 - 2 * ink[:, None].astype(np.float32) / 255, 3, axis=1)
    alone = pages.slots_of(ink).reshape(-1, 1, pages.SLOT, pages.SLOT)
    alone = np.repeat(1 - 2 * alone.astype(np.float32) / 255, 3, axis=1)

    @jax.jit
    def both(state, tiles, alone):
        tower = made.tower(state)
        read = training.read_slots(tower, alone, jnp.tile(jnp.arange(LETTERS), 4)).reshape(4, LETTERS, -1)
        return tower(tiles), tower.projector(training.features(tower, read))

    np.testing.assert_allclose(*both(made.state, tiles, alone), atol=1e-4)

    bank = made.residuals()
    assert made.fit_connector(*bank)["fit.missed"] < 1  # of random features alone
    assert bank[0].shape == (len(slots.sheets), len(GLYPHS), LETTERS, RECIPE.width)
    assert len([*made.pieces_stage(*bank)]) == 2
    fitted = made.fit_connector(*bank)
    assert fitted["fit.missed"] < fitted["fit.missed_before"] / 100
    after = nnx.to_pure_dict(made.state)
    np.testing.assert_array_equal(
        before["visual"]["patch_embedding"]["kernel"], after["visual"]["patch_embedding"]["kernel"]
    )

    root = save_tower(tmp_path / "tower", after, {"vision": vision, "pieces": RECIPE.pieces})
    for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(load_tower(root)[0]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=float(np.abs(ours).max()) / 200)
    with pytest.raises(ConfigError, match=r"has no tower\.json"):
        load_tower(tmp_path)

    found = list(accuracy.records(made.tower(), pieces, table, {"DejaVu": [face]}))
    ink = pages.cells(pages.glyphs(str(face), accuracy.SIZE), pieces.letters)
    tiles = np.repeat(1 - 2 * ink[:, None].astype(np.float32) / 255, 3, axis=1)
    read = np.asarray(jax.jit(lambda state, tiles: made.tower(state)(tiles))(made.state, tiles))
    apart = np.square(read[:, None] - table[None]).sum(-1)
    assert found[0]["nearest"] == pytest.approx((apart.argmin(1) == pieces.ids).mean(), abs=0.02)
    assert found[0]["nearest"] <= found[0]["nearest_drawn"]


@pytest.mark.slow
def test_pages_meet_a_decoder_as_images_and_as_tokens(tokenizer, decoder, tmp_path):
    model, folder = decoder
    vision = vision_config(RECIPE.width, RECIPE.depth, RECIPE.heads, RECIPE.intermediate)
    config = model_config(model.config.to_dict(), vision)
    tower = nnx.to_pure_dict(nnx.state(Tower(config, nnx.Rngs(0)), nnx.Param))
    root = save_tower(tmp_path / "tower", tower, {"vision": vision, "pieces": RECIPE.pieces})
    reader = PageReadingModel(root, folder)
    ids = np.random.default_rng(0).choice(reader.pieces.ids, 300).astype(np.int32)

    # A page's embeddings are what the tower makes of its cells, and of the whole page behind them.
    page = reader.pages(ids[None, :32], suite.styles(0, 1))
    assert page.embeddings.shape[1] == reader.texts(ids[None, :32]).embeddings.shape[1] == 33
    cell = pages.cells(pages.glyphs(suite.styles(0, 1)[0].font, 13), reader.pieces.letters[reader.pieces.rows(ids[:1])])
    own = Tower(config, nnx.Rngs(0))
    read = own(jnp.asarray(np.repeat(1 - 2 * cell[:, None].astype(np.float32) / 255, 3, axis=1)))
    np.testing.assert_allclose(page.embeddings[0, :1], read, atol=0.1)

    plan = suite.PREVIEW
    least = plan.passages * plan.chunk + plan.scored
    made = list(suite.compare(reader, plan, written(ids[:least], 0), written(ids[-least:], 1), 0))
    kl = {record["as"]: record["kl"] for record in made if "as" in record and "kl" in record}
    assert kl["tokens"] == 0 < kl["image"]
    assert {"blind", "patch.rank=8", "cacheblend.budget=0.15"} <= {record.get("arm") for record in made}


def written(ids: np.ndarray, number: int) -> Document:
    return Document(f"python/{number}", "prose", ids)
