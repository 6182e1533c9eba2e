"""DeepSeek-OCR against its authors' rules, and what DeepSeek-OCR-2 has beside the other families: names of its tensors,
modes, refusals.

transformers has no DeepSeek-OCR: the goldens join its parts by the published code. `place_view` is held against a plain
transcription of that code here.
"""

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from kvpatch_jax.core import to_engine
from kvpatch_jax.errors import ConfigError, InputError
from models.families.family import abstract, parameters
from models.families.registry import AUTHORS
from models.families.view_packing import NEWLINE, SEPARATOR, place_view
from models.inputs.chat import ChatTemplate
from models.inputs.view_images import process_ocr, process_views
from tests.goldens.load import GOLDENS, golden_arrays, write_checkpoint
from tests.models.releases import RELEASES
from tests.tolerances import assert_close_to_largest

close = functools.partial(assert_close_to_largest, bar=2e-4)
pytestmark = pytest.mark.usefixtures("highest_precision")
FAMILY, SECOND = "deepseek_ocr", "deepseek_ocr2"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> models.ModelBackbone:
    return models.load(write_checkpoint(FAMILY, tmp_path_factory.mktemp(FAMILY)), angles="float32")


def images_of(gold: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [gold[name] for name in sorted(gold) if name.startswith("image.")]


def pixels_of(backbone: models.ModelBackbone, gold: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the family makes of a case's images; none for a text."""
    vision, images = backbone.family.vision, images_of(gold)
    return vision.process(images, backbone.image_config) if images and vision else {}


@pytest.mark.parametrize(
    "case", ["one_image", *(pytest.param(case, marks=pytest.mark.slow) for case in ("text", "two_images"))]
)
def test_forward_equals_the_authors_rules(backbone, case):
    gold = golden_arrays(FAMILY, case)
    tokens = backbone.embed(gold["input_ids"][None], **pixels_of(backbone, gold))
    close(tokens.embeddings[0, gold["embedded"]], gold["inputs_embeds"], "embeddings")
    out = backbone.prefill(tokens, hidden_at=(1, 2, 3), logits="all")
    for layer in range(3):
        close(out.hidden[layer + 1][0, gold["rows"]], gold["hidden"][layer], f"hidden {layer}")
    close(out.kv["k"][:, 0, gold["rows"]], gold["k_phase_free"], "phase-free keys")
    engine = to_engine(backbone.layout, out.kv, gold["position_ids"][None], 0)
    for channel in ("k", "v"):
        close(engine[channel][:, 0, gold["rows"]], gold[channel], channel)
    close(out.logits[0, gold["rows"]], gold["logits"], "logits")


@pytest.mark.slow
def test_greedy_tokens_equal_the_authors(backbone):
    gold = golden_arrays(FAMILY, "one_image")
    tokens = backbone.embed(gold["input_ids"][None], **pixels_of(backbone, gold))
    assert np.array_equal(backbone.generate(tokens, len(gold["decode_tokens"]))[0], gold["decode_tokens"])


@pytest.mark.parametrize("case", ["one_image", "two_images"])
def test_pixels_are_the_authors(backbone, case):
    """Padding by `PIL.ImageOps.pad`, tiles by `dynamic_preprocess`: every eight bits; normalised as torch does."""
    gold = golden_arrays(FAMILY, case)
    found = pixels_of(backbone, gold)
    assert np.array_equal(found["tile_grids"], gold["tile_grids"])
    assert found["tile_grids"].prod(axis=1).max() > 1
    for name in ("pixel_values", "pixel_values_local"):
        stored = np.rint((found[name] * 0.5 + 0.5) * 255).astype(np.uint8)
        assert hashlib.blake2b(stored.tobytes()).digest() == gold[f"{name}.digest"].tobytes(), name
        torchs = (stored.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
        np.testing.assert_allclose(found[name], torchs, rtol=0, atol=2.5e-7)


@pytest.mark.parametrize("mode", [(640, True), (512, True), (1024, False)])
def test_modes_without_tiles(backbone, mode):
    """Tiny and Small squash an image, Base pads it: one square, no tiles."""
    side, squashed = mode
    settings = type(backbone.image_config).from_dict(
        {**json.loads(backbone.image_config.options), "size": side, "crop_to_patches": False}
    )
    image = np.full((300, 700, 3), 200, np.uint8)
    found = process_ocr([image], settings)
    assert set(found) == {"pixel_values", "tile_grids"}
    assert found["pixel_values"].shape == (1, 3, side, side)
    grey = np.isclose(found["pixel_values"], 127 / 255 * 2 - 1, atol=1e-6).any()
    assert grey != squashed


def test_a_release_has_no_image_settings(tmp_path):
    """Its own code holds them: views of 1024 pixels, two to nine tiles of 640."""
    settings = models.FAMILIES["DeepseekOCRForCausalLM"].settings(tmp_path)["image_config"]
    found = process_ocr([np.zeros((1400, 3000, 3), np.uint8)], settings)
    assert found["pixel_values"].shape == (1, 3, 1024, 1024)
    assert found["tile_grids"].tolist() == [[2, 4]]
    assert found["pixel_values_local"].shape == (8, 3, 640, 640)


def authors_order(view: int, tile: int, rows: int, columns: int) -> list[tuple[str, int, int]]:
    """The authors' `forward`: local features, then the whole's, each row with a newline, and a separator."""
    out = []
    if rows:
        local = np.arange(rows * columns * tile**2).reshape(rows, columns, tile, tile).transpose(0, 2, 1, 3)
        for line in local.reshape(rows * tile, columns * tile):
            out += [*(("tile", int(n) // tile**2, int(n) % tile**2) for n in line), ("newline", 0, 0)]
    for line in np.arange(view**2).reshape(view, view):
        out += [*(("view", 0, int(n)) for n in line), ("newline", 0, 0)]
    return [*out, ("separator", 0, 0)]


@pytest.mark.parametrize("grid", [(0, 0), (1, 2), (3, 1), (2, 3)])
def test_features_stand_in_the_authors_order(grid):
    found = []
    for view, tile, place, kind in place_view(4, 3, grid, True).T.tolist():
        name = {NEWLINE: "newline", SEPARATOR: "separator"}.get(kind, "view" if tile < 0 else "tile")
        assert (view, tile)[name == "view"] == -1 or name in ("view", "tile")
        found.append((name, max(tile, 0), place))
    assert found == authors_order(4, 3, *grid)


def test_encoded_features_are_those_of_embedding(backbone):
    prompt = backbone.prepare([[5, 6], np.arange(150 * 90 * 3, dtype=np.uint8).reshape(150, 90, 3), [7]])
    features = backbone.encode(**prompt)
    assert features is not None
    tokens = backbone.embed(**prompt, features=features)
    assert np.array_equal(tokens.embeddings, backbone.embed(**prompt).embeddings)


@pytest.mark.slow
def test_saved_and_loaded_again(backbone, tmp_path):
    again = models.load(models.save(backbone, tmp_path / "saved"), angles="float32")
    assert again.config.text == backbone.config.text
    jax.tree.map(np.testing.assert_array_equal, again.parameters, backbone.parameters)


def test_prompts_are_plain_texts():
    """The format "plain": texts one behind the other, an image on a line of its own, no roles."""
    template = models.FAMILIES["DeepseekOCRForCausalLM"].template
    assert template is not None
    content = [{"type": "image"}, {"type": "text", "text": "Free OCR."}]
    chat = ChatTemplate(template, (("bos_token", "<s>"),))
    assert chat.render([{"role": "user", "content": content}]) == "<s><image>\nFree OCR."


# ------------------------------------------------------------------------------------------- refusals


def refuse(family: str, change: dict[str, Any]) -> None:
    raw = json.loads((GOLDENS / family / "config.json").read_text())
    for name, value in change.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) else value
    models.FAMILIES[raw["architectures"][0]].config(raw, "float32", None)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (FAMILY, {"use_mla": True, "language_config": {"use_mla": True}}, "use_mla True, which is not built"),
        (FAMILY, {"language_config": {"hidden_size": 32}}, "hidden_size 32; expected 64, as at the top"),
        (FAMILY, {"vision_config": {"model_name": "siglip"}}, "model_name 'siglip'; expected 'deeplip_b_l'"),
        (FAMILY, {"vision_config": {"width": {"sam_vit_b": {}}}}, "got clip-l-14-224 None; expected a table"),
        (FAMILY, {"projector_config": {"projector_type": "mlp_gelu"}}, "projector_type 'mlp_gelu'"),
        (FAMILY, {"projector_config": None}, "got no 'projector_config'"),
        (FAMILY, {"spam": 3}, "'spam': 3, which this library does not know for deepseek_ocr"),
        (SECOND, {"text_config": {"mlp_layer_types": ["sparse", "dense", "sparse"]}}, "expected 'dense' below"),
        (SECOND, {"text_config": {"mlp_layer_types": None}}, "got no 'mlp_layer_types'"),
        (SECOND, {"text_config": {"head_dim": 8}}, "head_dim: got 8; expected hidden_size"),
        (SECOND, {"text_config": {"norm_topk_prob": True}}, "norm_topk_prob True, which is not built"),
        (SECOND, {"text_config": {"model_type": "llama"}}, "text_config: got type 'llama'"),
    ],
)
def test_configurations_that_are_not_built(family, change, message):
    with pytest.raises(ConfigError, match=message):
        refuse(family, change)


def test_a_compressor_must_lead_to_the_next_tower():
    raw = json.loads((GOLDENS / SECOND / "config.json").read_text())
    raw["vision_config"]["sam_config"]["downsample_channels"] = [12, 16]
    with pytest.raises(ConfigError, match=r"got \(12, 16\); expected to end in the encoder's 24"):
        models.FAMILIES[raw["architectures"][0]].config(raw, "float32", None)


def test_pixels_that_do_not_match_are_refused(backbone):
    gold = golden_arrays(FAMILY, "one_image")
    ids, pixels = gold["input_ids"][None], pixels_of(backbone, gold)
    without = {name: value for name, value in pixels.items() if name != "tile_grids"}
    with pytest.raises(InputError, match="tile_grids or num_local_patches: got None"):
        backbone.embed(ids, **without)
    with pytest.raises(InputError, match="pixel_values_local: got shape None"):
        backbone.embed(ids, pixel_values=pixels["pixel_values"], tile_grids=pixels["tile_grids"])
    with pytest.raises(InputError, match="got 250 pixels a side; expected a multiple of 64"):
        backbone.embed(ids, **pixels | {"pixel_values": pixels["pixel_values"][..., :250, :250]})


# ------------------------------------------------------------------------------------------- DeepSeek-OCR-2


def authors_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """DeepSeek-OCR-2's tensors as its authors' files have them: other names, experts one by one."""
    rules = [
        (r"vision_tower\.sam_encoder\.layers\.(\d+)\.layer_norm", r"sam_model.blocks.\1.norm"),
        (r"vision_tower\.sam_encoder\.layers\.", "sam_model.blocks."),
        (r"vision_tower\.sam_encoder\.patch_embed\.projection", "sam_model.patch_embed.proj"),
        *((rf"vision_tower\.sam_encoder\.neck\.{part}", f"sam_model.neck.{n}") for n, part in enumerate(NECK)),
        (r"vision_tower\.sam_encoder\.proj\.conv1", "sam_model.net_2"),
        (r"vision_tower\.sam_encoder\.proj\.conv2", "sam_model.net_3"),
        (r"vision_tower\.sam_encoder\.", "sam_model."),
        (r"vision_tower\.vision_encoder\.", "qwen2_model.model.model."),
        (r"vision_tower\.query_(\d+)_resolution", r"qwen2_model.query_\1"),
        (r"multi_modal_projector", "projector.layers"),
        (r"view_separator", "view_seperator"),
        (r"language_model\.", ""),
    ]
    out = {}
    for name, value in tensors.items():
        for pattern, target in rules:
            name, count = re.subn(pattern, target, name)
            if count:
                break
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                for part, half in zip(("gate", "up"), np.split(both, 2), strict=True):
                    out[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = half.copy()
        elif name.endswith("experts.down_proj"):
            out |= {name.replace("down_proj", f"{n}.down_proj.weight"): v.copy() for n, v in enumerate(value)}
        else:
            out[name] = value
    return out


NECK = ("conv1", "layer_norm1", "conv2", "layer_norm2")


def test_the_authors_names_are_the_same_parameters(tmp_path):
    """transformers writes them where it is not asked for its own modules' (`save_original_format`)."""
    plain = write_checkpoint(SECOND, tmp_path / "plain")
    theirs = write_checkpoint(SECOND, tmp_path / "theirs")
    file = theirs / "model.safetensors"
    save_file(authors_names(load_file(file)), file)
    found, expected = (models.load(root).parameters for root in (theirs, plain))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_views_without_tiles_have_the_tiles_size(tmp_path):
    settings = models.FAMILIES["DeepseekOcr2ForConditionalGeneration"].settings(GOLDENS / SECOND)["image_config"]
    options = {**json.loads(settings.options), "crop_to_patches": False}
    found = process_views([np.zeros((100, 60, 3), np.uint8)], type(settings).from_dict(options))
    assert set(found) == {"pixel_values", "num_local_patches"}
    assert found["pixel_values"].shape == (1, 3, 48, 48)
    assert found["num_local_patches"].tolist() == [0]


def test_sizes_without_queries_are_refused(tmp_path: Path):
    second = models.load(write_checkpoint(SECOND, tmp_path))
    ids = np.array([[5, *[301] * 145, 6]])
    with pytest.raises(InputError, match=r"got 40 pixels a side; expected one of \[48, 64\]"):
        second.embed(ids, pixel_values=np.zeros((1, 3, 40, 40), np.float32), num_local_patches=[0])


def test_the_authors_configuration_is_transformers(tmp_path):
    """The release's file names no size of its Qwen2 encoder, and another end of the compressor than it has."""
    (release,) = [found for name, found in RELEASES.items() if name[0] == "deepseek-ai/DeepSeek-OCR-2"]
    form = AUTHORS["DeepseekOCR2ForCausalLM"]
    raw = form.config(release.config, tmp_path)
    config = models.FAMILIES[raw["architectures"][0]].config(raw, "exact", None)
    encoder, sam = config.encoder, config.vision
    assert (encoder.layers, encoder.width, encoder.heads, encoder.kv_heads) == (24, 896, 14, 2)
    assert (encoder.intermediate, encoder.rope.theta, encoder.norm_epsilon) == (4864, 1e6, 1e-6)
    assert config.compressor == (512, 896)
    assert (sam.depth, sam.width, sam.image, sam.global_layers) == (12, 768, 1024, (2, 5, 8, 11))
    assert (config.text.layers, config.text.experts.dense_layers, config.text.experts.shared) == (12, 1, 1792)
    assert config.image_token == 128815
    assert {leaf.dtype.name for leaf in jax.tree.leaves(parameters(abstract(config)))} == {"bfloat16"}
    assert form.settings(release.config, tmp_path)["tile_size"] == 768

    # Every tensor of the authors' names is asked for, once the file is seen to have them.
    asked = config.family.entries(config, {"model.sam_model.pos_embed": (1, 64, 64, 768)})
    assert {"model.qwen2_model.query_768.weight", "model.qwen2_model.model.model.norm.weight"} <= {
        entry.pattern for entry in asked
    }


def test_another_encoder_of_the_authors_is_refused(tmp_path):
    (release,) = [found for name, found in RELEASES.items() if name[0] == "deepseek-ai/DeepSeek-OCR-2"]
    vision = {**release.config["vision_config"], "model_name": "deepencoderv3"}
    with pytest.raises(ConfigError, match="model_name 'deepencoderv3'; expected 'deepencoderv2'"):
        AUTHORS["DeepseekOCR2ForCausalLM"].config({**release.config, "vision_config": vision}, tmp_path)
