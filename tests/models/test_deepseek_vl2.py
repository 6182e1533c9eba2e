"""DeepSeek-VL2 against its authors' rules: both forms of its decoder, pixels, order of features, prompts, refusals.

transformers has no such class: the goldens join its parts by the published code. What the goldens do not hold (small's
routing, more than two images, the order of features, prompts) is held against plain transcriptions here.
"""

import functools
import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps
from safetensors.numpy import load_file, save_file

from kvpatch_jax import models
from kvpatch_jax.core import to_engine
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models.families.family import abstract, parameters
from kvpatch_jax.models.families.view_packing import NEWLINE, SEPARATOR, place_view
from kvpatch_jax.models.inputs.chat import ChatTemplate
from kvpatch_jax.models.inputs.pictures import process_vl2
from tests.goldens.load import GOLDENS, golden_arrays, write_checkpoint
from tests.models.releases import RELEASES
from tests.tolerances import assert_close_to_largest

close = functools.partial(assert_close_to_largest, bar=2e-4)
pytestmark = pytest.mark.usefixtures("highest_precision")
FULL, TINY = "deepseek_vl2", "deepseek_vl2_tiny"
ARCHITECTURE = "DeepseekVLV2ForCausalLM"
CANDIDATES = [[384, 384], [384, 768], [768, 384], [384, 1152], [1152, 384], [768, 768], [768, 1152], [1152, 768]]


@pytest.fixture(scope="module", params=[FULL, TINY])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def backbone(family, tmp_path_factory: pytest.TempPathFactory) -> models.ModelBackbone:
    return models.load(write_checkpoint(family, tmp_path_factory.mktemp(family)), angles="float32")


def images_of(gold: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [gold[name] for name in sorted(gold) if name.startswith("image.")]


def pixels_of(backbone: models.ModelBackbone, gold: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the family makes of a case's images; none for a text."""
    vision, images = backbone.family.vision, images_of(gold)
    return vision.process(images, backbone.image_config) if images and vision else {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "case"),
    [(FULL, "one_image"), (FULL, "two_images"), (TINY, "one_image")],
    indirect=["family"],
    scope="module",
)
def test_forward_equals_the_authors_rules(backbone, family, case):
    gold = golden_arrays(family, case)
    tokens = backbone.embed(gold["input_ids"][None], **pixels_of(backbone, gold))
    close(tokens.embeddings[0], gold["inputs_embeds"], "embeddings")
    out = backbone.prefill(tokens, hidden_at=(1, 2, 3), logits="all")
    for layer in range(3):
        close(out.hidden[layer + 1][0, gold["rows"]], gold["hidden"][layer], f"hidden {layer}")
    engine = to_engine(backbone.layout, out.kv, gold["position_ids"][None], 0)
    for channel, found in engine.items():
        rows = np.asarray(found[:, 0, gold["rows"]])
        close(rows.reshape(gold[channel].shape), gold[channel], channel)
    assert set(engine) == ({"ckv", "kpe"} if family == FULL else {"k", "v"})
    close(out.logits[0, gold["rows"]], gold["logits"], "logits")


@pytest.mark.slow
def test_greedy_tokens_equal_the_authors(backbone, family):
    gold = golden_arrays(family, "one_image")
    tokens = backbone.embed(gold["input_ids"][None], **pixels_of(backbone, gold))
    assert np.array_equal(backbone.generate(tokens, len(gold["decode_tokens"]))[0], gold["decode_tokens"])


@pytest.mark.slow
def test_saved_and_loaded_again(backbone, tmp_path):
    again = models.load(models.save(backbone, tmp_path / "saved"), angles="float32")
    parts = ("text", "vision", "fold", "inner", "image_token")
    assert [getattr(again.config, part) for part in parts] == [getattr(backbone.config, part) for part in parts]
    assert again.image_config == backbone.image_config
    jax.tree.map(np.testing.assert_array_equal, again.parameters, backbone.parameters)


@pytest.mark.parametrize("family", [FULL], indirect=True, scope="module")
def test_encoded_features_are_those_of_embedding(backbone, family):
    prompt = backbone.prepare([[5, 6], np.arange(61 * 37 * 3, dtype=np.uint8).reshape(61, 37, 3), [7]])
    features = backbone.encode(**prompt)
    assert features is not None
    tokens = backbone.embed(**prompt, features=features)
    assert np.array_equal(tokens.embeddings, backbone.embed(**prompt).embeddings)


@pytest.mark.slow
def test_smalls_decoder_has_latent_attention_and_softmax_routing(tmp_path):
    """Its decoder alone is DeepSeek-V2's, which `test_text_families.py` holds against transformers: the same tensors
    give the same logits.
    """
    text = write_checkpoint("deepseek_v2_lite", tmp_path / "text")
    theirs, raw = models.load(text, angles="float32"), json.loads((text / "config.json").read_text())
    root = write_checkpoint(FULL, tmp_path / "small")
    whole = json.loads((root / "config.json").read_text())
    inner = {name: value for name, value in raw.items() if name != "architectures"}
    whole["language_config"], whole["image_token_id"] = inner, raw["vocab_size"] - 1
    whole["projector_config"]["n_embed"] = raw["hidden_size"]
    (root / "config.json").write_text(json.dumps(whole))
    glue = {name: value for name, value in load_file(root / "model.safetensors").items() if "language" not in name}
    glue |= wide_glue(raw["hidden_size"], whole["projector_config"])
    decoder = {f"language.{name}": value for name, value in load_file(text / "model.safetensors").items()}
    save_file(glue | decoder, root / "model.safetensors", metadata={"format": "pt"})
    ours = models.load(root, angles="float32")
    ids = np.array([[5, 9, 17, 3, 40, 11, 8]])
    found, expected = (each.prefill(each.embed(ids), logits="all").logits for each in (ours, theirs))
    assert_close_to_largest(np.asarray(found), np.asarray(expected), "logits", bar=1e-5)
    assert ours.config.text.experts is not None
    assert ours.config.text.experts.router == "softmax"


def wide_glue(width: int, glue: dict[str, Any]) -> dict[str, np.ndarray]:
    """Parameters of a projector to this width, whose values no text reads."""
    inner = width * glue["mlp_ratio"]
    shapes = {"projector.layers.0.weight": (inner, 4 * glue["input_dim"]), "projector.layers.0.bias": (inner,)}
    shapes |= {"projector.layers.2.weight": (width, inner), "projector.layers.2.bias": (width,)}
    shapes |= {"image_newline": (width,), "view_seperator": (width,)}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


# ------------------------------------------------------------------------------------------- pixels


def test_pixels_are_the_authors(backbone, family):
    """Padding by `PIL.ImageOps.pad`, tiles of the best resolution, normalised as torch does: every bit."""
    gold = golden_arrays(family, "one_image")
    found = pixels_of(backbone, gold)
    assert np.array_equal(found["tile_grids"], gold["tile_grids"])
    assert found["tile_grids"].prod() > 1
    for name in ("pixel_values", "pixel_values_local"):
        if name in gold:
            assert np.array_equal(found[name], gold[name]), name
        else:
            assert hashlib.blake2b(found[name].tobytes()).digest() == gold[f"{name}.digest"].tobytes(), name


def authors_pixels(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """`ImageOps.pad` with the mean colour, ToTensor, Normalize."""
    stored = np.asarray(ImageOps.pad(image, size, color=(127, 127, 127))).transpose(2, 0, 1)
    return (stored.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)


def authors_resolution(size: tuple[int, int]) -> tuple[int, int]:
    """`select_best_resolution`."""
    best, most, least = (0, 0), 0, math.inf
    for width, height in CANDIDATES:
        scale = min(width / size[0], height / size[1])
        effective = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
        wasted = width * height - effective
        if effective > most or (effective == most and wasted < least):
            best, most, least = (width, height), effective, wasted
    return best


def settings_of(directory: Path, **changes: Any) -> Any:
    directory.mkdir(exist_ok=True)
    (directory / "processor_config.json").write_text(json.dumps({"candidate_resolutions": CANDIDATES, **changes}))
    return models.FAMILIES[ARCHITECTURE].settings(directory)["image_config"]


@pytest.mark.parametrize("sizes", [[(500, 800)], [(901, 333), (47, 1000)], [(1300, 1300), (380, 2), (384, 384)]])
def test_more_than_two_images_are_not_tiled(sizes, tmp_path):
    """The authors tile up to two images; of more, each is its view and, once more, its one tile."""
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    found = process_vl2(images, settings_of(tmp_path))
    tiles = list(found["pixel_values_local"])
    for view, grid, image in zip(found["pixel_values"], found["tile_grids"].tolist(), images, strict=True):
        picture = Image.fromarray(image)
        width, height = authors_resolution(picture.size) if len(images) <= 2 else (384, 384)
        assert grid == [height // 384, width // 384]
        assert np.array_equal(view, authors_pixels(picture, (384, 384)))
        local = authors_pixels(picture, (width, height))
        for top in range(0, height, 384):
            for left in range(0, width, 384):
                assert np.array_equal(tiles.pop(0), local[:, top : top + 384, left : left + 384])
    assert not tiles
    assert (found["tile_grids"].prod(axis=1).max() > 1) == (len(images) <= 2)


def test_resolutions_may_stand_in_the_configuration_alone(tmp_path):
    shutil.copy(GOLDENS / TINY / "config.json", tmp_path)
    settings = models.FAMILIES[ARCHITECTURE].settings(tmp_path)["image_config"]
    assert settings["candidate_resolutions"] == [[384, 384], [384, 768], [768, 384], [768, 768]]
    assert settings.length("size") == 384


def test_pixels_may_be_left_as_they_are(tmp_path):
    found = process_vl2([np.full((384, 384, 3), 255, np.uint8)], settings_of(tmp_path, normalize=False))
    assert found["pixel_values"].max() == found["pixel_values"].min() == 1


@pytest.mark.parametrize("points", [None, [], [[384]], [[384, 400]], [[0, 384]], "384"])
def test_resolutions_that_are_none(points, tmp_path):
    with pytest.raises(ConfigError, match="candidate_resolutions: got"):
        settings_of(tmp_path, candidate_resolutions=points)


# ------------------------------------------------------------------------------------------- features, prompts


def authors_order(side: int, rows: int, columns: int) -> list[tuple[str, int, int]]:
    """`prepare_inputs_embeds`: the whole's features, a separator, the tiles', each row with a newline."""
    out = []
    for row in range(side):
        out += [*(("view", 0, row * side + place) for place in range(side)), ("newline", 0, 0)]
    out.append(("separator", 0, 0))
    for row in range(rows * side):
        for column in range(columns):
            tile = row // side * columns + column
            out += [("tile", tile, row % side * side + place) for place in range(side)]
        out.append(("newline", 0, 0))
    return out


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (3, 1), (2, 3)])
def test_features_stand_in_the_authors_order(grid):
    found = []
    for _, tile, place, kind in place_view(3, 3, grid, True, view_first=True).T.tolist():
        name = {NEWLINE: "newline", SEPARATOR: "separator"}.get(kind, "view" if tile < 0 else "tile")
        found.append((name, max(tile, 0), place))
    assert found == authors_order(3, *grid)


def test_prompts_are_the_authors():
    """`format_messages_v2`: a question ends where its answer begins, an answer with the end of a sentence."""
    template = models.FAMILIES[ARCHITECTURE].template
    assert template is not None
    chat = ChatTemplate(template, (("bos_token", "<s>"), ("eos_token", "</s>")))
    content = [{"type": "text", "text": "One: "}, {"type": "image"}, {"type": "text", "text": "What is it? "}]
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": content},
        {"role": "assistant", "content": " A cat. "},
        {"role": "user", "content": "Sure?"},
    ]
    expected = "<s>Be brief.<|User|>: One: <image>\nWhat is it?\n\n<|Assistant|>:A cat.</s>"
    assert chat.render(messages) == f"{expected}<|User|>: Sure?\n\n<|Assistant|>:"


# ------------------------------------------------------------------------------------------- configurations


def release_of(name: str, directory: Path) -> Any:
    """A release's configuration, read without its tokenizer."""
    (release,) = [found for key, found in RELEASES.items() if key[0] == f"deepseek-ai/{name}"]
    return models.FAMILIES[ARCHITECTURE].config(release.config, "exact", None)


def test_tiny_is_read_as_published(tmp_path):
    """Sizes of its published configuration, and those its authors' classes have by default."""
    config = release_of("deepseek-vl2-tiny", tmp_path)
    tower, text = config.vision, config.text
    assert (tower.depth, tower.width, tower.heads, tower.intermediate) == (27, 1152, 16, 4304)
    assert (tower.image, tower.patch, tower.activation) == (384, 14, "gelu_pytorch_tanh")
    assert config.side_of(384, "pixel_values") == 14
    assert (text.layers, text.heads, text.head_dim, text.rope.theta) == (12, 10, 128, 1e4)
    assert (text.experts.experts, text.experts.chosen, text.experts.shared) == (64, 6, 1792)
    assert (text.experts.dense_layers, text.experts.router, text.latent) == (1, "softmax", None)
    assert config.image_token == 128815


@pytest.mark.parametrize(
    ("name", "layers", "heads", "router", "scaling"),
    [("deepseek-vl2-small", 27, 16, "softmax", 1.0), ("deepseek-vl2", 30, 32, "sigmoid", 2.0)],
)
def test_the_larger_releases_have_latent_attention(name, layers, heads, router, scaling, tmp_path):
    """base's file leaves out how many layers and heads it has, and both what the parts of a head are."""
    text = release_of(name, tmp_path).text
    latent, experts = text.latent, text.experts
    assert (text.layers, text.heads, text.attention) == (layers, heads, "mla")
    assert (latent.latent, latent.query_rank, latent.rope_dim, latent.plain_dim) == (512, None, 64, 128)
    assert (experts.router, experts.scaling, experts.renormalise) == (router, scaling, router == "sigmoid")


@pytest.mark.parametrize(
    ("name", "billions"), [("deepseek-vl2-tiny", 3), ("deepseek-vl2-small", 16), ("deepseek-vl2", 27)]
)
def test_releases_have_the_published_sizes(name, billions, tmp_path):
    """Parameters in whole billions, as the authors' paper has them."""
    leaves = jax.tree.leaves(parameters(abstract(release_of(name, tmp_path))))
    assert sum(math.prod(leaf.shape) for leaf in leaves) // 10**9 == billions
    assert jnp.dtype("bfloat16") in {leaf.dtype for leaf in leaves}


def test_classes_hold_what_files_leave_out():
    """The authors' DeepseekV2Config: latent attention of its sizes, no experts, 30 layers."""
    parts = {"vision_config": {}, "projector_config": {"input_dim": 1024, "n_embed": 4096}, "language_config": {}}
    config = models.FAMILIES[ARCHITECTURE].config({**parts, "image_token_id": 5}, "exact", None)
    text = config.text
    assert (text.vocabulary, text.width, text.intermediate, text.layers, text.heads) == (102400, 4096, 11008, 30, 32)
    assert (text.experts, text.norm_epsilon, text.activation) == (None, 1e-6, "silu")
    latent = text.latent
    assert latent is not None
    assert (latent.latent, latent.query_rank, latent.rope_dim, latent.plain_dim, latent.value_dim) == (
        *(512, 1536, 64, 128, 128),
    )
    assert (config.vision.depth, config.vision.width, config.vision.intermediate) == (24, 1024, 4096)
    assert (config.vision.patch, config.fold, config.inner) == (16, 2, 4096)


def test_the_placeholder_is_the_tokenizers(tmp_path):
    """No configuration names it; where neither does, the largest vocabularies' is taken, or it is refused."""
    raw = json.loads((GOLDENS / FULL / "config.json").read_text())
    del raw["image_token_id"]
    family = models.FAMILIES[ARCHITECTURE]
    assert family.amend is not None
    with pytest.raises(ConfigError, match=r"image_token_id: got 128815; expected one of 320 tokens"):
        family.config(family.amend(raw, tmp_path), "exact", None)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"3": "<image>"}}')
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: got added tokens of another form"):
        family.amend(raw, tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<image>": 311}))
    assert family.config(family.amend(raw, tmp_path), "exact", None).image_token == 311


def test_experts_need_a_routing():
    """What the authors' class has by default is none that their code knows."""
    raw = json.loads((GOLDENS / FULL / "config.json").read_text())
    del raw["language_config"]["topk_method"]
    with pytest.raises(ConfigError, match="got no 'topk_method'"):
        models.FAMILIES[ARCHITECTURE].config(raw, "float32", None)


@pytest.mark.parametrize("family", [FULL], indirect=True, scope="module")
def test_pixels_that_do_not_match_are_refused(backbone, family):
    gold = golden_arrays(family, "one_image")
    ids, pixels = gold["input_ids"][None], pixels_of(backbone, gold)
    with pytest.raises(InputError, match="tile_grids or num_local_patches: got None"):
        backbone.embed(ids, **{name: value for name, value in pixels.items() if name != "tile_grids"})
    with pytest.raises(InputError, match="pixel_values_local: got shape None"):
        backbone.embed(ids, pixel_values=pixels["pixel_values"], tile_grids=pixels["tile_grids"])
    with pytest.raises(InputError, match="expected at least one row and column"):
        backbone.embed(ids, pixel_values=pixels["pixel_values"], tile_grids=np.zeros((1, 2), np.int32))
    with pytest.raises(InputError, match="got 26 pixels a side; expected 30"):
        backbone.embed(ids, **pixels | {"pixel_values": pixels["pixel_values"][..., :26, :26]})
    with pytest.raises(InputError, match="image placeholders; expected"):
        backbone.embed(ids[:, 7:], **pixels)
