"""DeepSeek-VL-7B: its SAM tower layer by layer, the authors' own format, their pixels and prompts, what is refused."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import models
from kvpatch_jax.errors import ConfigError, InputError, ShapeError
from models.families import multi_modality
from models.families.deepseek_vl_hybrid import ARCHITECTURE, LARGE
from models.families.family import with_parameters
from models.inputs.chat import ChatTemplate, template_with_images
from models.inputs.images import process_deepseek_hybrid
from models.towers.sam import SamBlock, SamConfig
from tests.arrays import placed
from tests.goldens.load import GOLDENS, golden_arrays, write_checkpoint
from tests.tolerances import assert_close_to_largest

FAMILY = "deepseek_vl_hybrid"
WEIGHTS = "model.safetensors"
close = functools.partial(assert_close_to_largest, bar=2e-4)
pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model under transformers' names. Read only."""
    return write_checkpoint(FAMILY, tmp_path_factory.mktemp(FAMILY) / "hf")


@pytest.fixture(scope="module")
def backbone(checkpoint: Path) -> models.ModelBackbone:
    return models.load(checkpoint)


def test_sams_layers_equal_transformers(backbone):
    """Windows that padding fills, relative positions of both lengths, global layers: each layer's residual."""
    gold = golden_arrays(FAMILY, "one_image")
    graph, state = nnx.split(with_parameters(backbone.config, backbone.parameters))
    _, kept = jax.jit(lambda state, x: nnx.merge(graph, state).high(x, (0, 1, 2, 3)))(state, gold[LARGE])
    assert len(kept) == len(gold["high_blocks"])
    for layer, (found, expected) in enumerate(zip(kept, gold["high_blocks"], strict=True)):
        close(found, expected, f"layer {layer}")


def test_scores_of_a_large_image_are_made_in_blocks(backbone):
    """At the released size a layer that sees everything holds no matrix of 4096 tokens by 4096."""
    config = SamConfig()
    block = nnx.eval_shape(lambda: SamBlock(config, nnx.Rngs(0), windowed=False))
    graph, state = nnx.split(block)
    hidden = jax.ShapeDtypeStruct((1, config.side, config.side, config.width), np.float32)
    compiled = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, hidden).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    whole = 4 * config.heads * config.side**4
    assert analysis.temp_size_in_bytes < whole / 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"high_res_vision_config": None}, "got no 'high_res_vision_config'"),
        ({"high_res_vision_config": {"global_attn_indexes": []}}, "global_attn_indexes: got none"),
        ({"high_res_vision_config": {"global_attn_indexes": [4]}}, "expected layers of the tower's 4"),
        ({"high_res_vision_config": {"image_size": [32, 16]}}, "expected equal sides"),
        (
            {"high_res_vision_config": {"residual_multiplier": 2}},
            "'residual_multiplier'.*not know for sam_",
        ),
        ({"high_res_vision_config": {"image_size": 34}}, "expected a multiple of the patch, 4"),
    ],
)
def test_configurations_that_are_not_built(change, message):
    raw = json.loads((GOLDENS / FAMILY / "config.json").read_text())
    for name, value in change.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=message):
        models.FAMILIES[ARCHITECTURE].config(raw, "float32", None)


def test_the_large_image_must_come_with_the_small_one(backbone):
    gold = golden_arrays(FAMILY, "one_image")
    ids, small, large = gold["input_ids"][None], gold["pixel_values"], gold[LARGE]
    with pytest.raises(InputError, match=r"high_res_pixel_values: got shape None; expected \(1, 3, 32, 32\)"):
        backbone.embed(ids, pixel_values=small)
    with pytest.raises(InputError, match=r"high_res_pixel_values: got shape \(1, 3, 16, 16\)"):
        backbone.embed(ids, pixel_values=small, high_res_pixel_values=small)
    with pytest.raises(InputError, match="high_res_pixel_values: got shape"):
        backbone.embed(ids, pixel_values=small, high_res_pixel_values=np.concatenate([large, large]))


def test_sam_does_not_interpolate_its_positions(backbone):
    tower = with_parameters(backbone.config, backbone.parameters).high
    with pytest.raises(ShapeError, match="expected 32×32"):
        tower(placed(np.zeros((1, 3, 40, 40), np.float32)))
    with pytest.raises(ShapeError, match="got 9 patches a side; expected 8"):
        jax.eval_shape(tower.blocks["1"], jax.ShapeDtypeStruct((1, 9, 9, 32), np.float32))


# ---------------------------------------------------------------------------------------------- the authors' format

NECK = ("conv1", "layer_norm1", "conv2", "layer_norm2")


def as_authors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as `MultiModalityCausalLM` names those of the 7B, with the parts of them that nothing reads."""
    vision, found, qkv = "vision_model.vision_tower", dict[str, np.ndarray](), dict[str, dict[str, np.ndarray]]()
    high, low = f"{vision}_high.vision_tower", f"{vision}_low.vision_tower"
    names = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.aligner.vision_proj.": "aligner.low_up_proj.",
        "model.aligner.high_res_vision_proj.": "aligner.high_up_proj.",
        "model.aligner.proj.": "aligner.layers.1.",
        "model.high_res_vision_alpha": f"{high}.hd_alpha_downsamples",
        "model.high_res_vision_proj.conv1.": f"{high}.downsamples.0.",
        "model.high_res_vision_proj.conv2.": f"{high}.downsamples.1.",
        "model.high_res_vision_model.vision_encoder.patch_embed.projection.": f"{high}.patch_embed.proj.",
        "model.high_res_vision_model.vision_encoder.layers.": f"{high}.blocks.",
        "model.high_res_vision_model.vision_encoder.pos_embed": f"{high}.pos_embed",
        "model.vision_model.embeddings.patch_embedding.": f"{low}.patch_embed.proj.",
        "model.vision_model.embeddings.position_embedding.weight": f"{low}.pos_embed",
        "model.vision_model.post_layernorm.": f"{low}.norm.",
        "model.vision_model.encoder.layers.": f"{low}.blocks.",
    }
    for number, part in enumerate(NECK):
        names[f"model.high_res_vision_model.vision_encoder.neck.{part}."] = f"{high}.neck.{number}."
        names[f"model.high_res_vision_neck.{part}."] = f"{high}.neck_hd.{number}."
    parts = {".layer_norm1.": ".norm1.", ".layer_norm2.": ".norm2.", ".self_attn.out_proj.": ".attn.proj."}
    for name, value in tensors.items():
        (old,) = [prefix for prefix in names if name.startswith(prefix)]
        theirs = names[old] + name.removeprefix(old)
        if theirs.startswith((f"{high}.blocks", f"{low}.blocks")):
            for ours, other in parts.items():
                theirs = theirs.replace(ours, other)
        stem, _, rest = theirs.partition(".self_attn.")
        if theirs.startswith(low) and rest:
            part, leaf = rest.split("_proj.")
            qkv.setdefault(f"{stem}.attn.qkv.{leaf}", {})[part] = value
        else:
            found[theirs] = value[None] if theirs == f"{low}.pos_embed" else value
    for part in ("high", "low"):
        found |= {f"vision_model.{part}_layer_norm.{leaf}": np.ones(32, np.float32) for leaf in ("weight", "bias")}
    found[f"{low}.attn_pool.latent"] = np.zeros((1, 1, 32), np.float32)
    return found | {name: np.concatenate([pieces[part] for part in "qkv"]) for name, pieces in qkv.items()}


MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def authors_config(raw: dict[str, Any]) -> dict[str, Any]:
    tower = {"ckpt_path": "", "output_dim": 32, "select_feature": "same", "select_layer": -1}
    low = {**tower, "image_size": 16, "model_name": "tiny", "pixel_mean": [0.5] * 3, "pixel_std": [0.5] * 3}
    high = {**tower, "image_size": 32, "model_name": "tiny_sam", "pixel_mean": MEAN, "pixel_std": STD}
    glue = {"depth": 2, "input_dim": 32, "n_embed": 64, "projector_type": "low_high_hybrid_split_mlp_gelu"}
    towers = {"concat_type": "tuple", "high_res_cfg": high, "low_res_cfg": low}
    return {
        "architectures": ["MultiModalityCausalLM"],
        "model_type": "multi_modality",
        "aligner_config": {"cls": "MlpProjector", "model_type": "aligner", "params": glue},
        "language_config": {name: value for name, value in raw["text_config"].items() if name != "architectures"},
        "torch_dtype": "float32",
        "vision_config": {"cls": "HybridVisionTower", "model_type": "vision", "params": towers},
    }


PROCESSOR = {"image_processor_type": "VLMImageProcessor", "image_size": 32, "min_size": 4, "do_normalize": False}
PROCESSOR |= {"image_mean": MEAN, "image_std": STD, "rescale_factor": 1 / 255}


@pytest.fixture
def tiny_towers(monkeypatch):
    monkeypatch.setitem(multi_modality.TOWERS, "tiny", (32, 48, 2, 2, 4))
    raw = json.loads((GOLDENS / FAMILY / "config.json").read_text())["high_res_vision_config"]
    sizes = ("hidden_size", "output_channels", "num_hidden_layers", "num_attention_heads", "patch_size", "mlp_dim")
    sizes += ("window_size", "global_attn_indexes")
    monkeypatch.setitem(multi_modality.SAM_TOWERS, "tiny_sam", {name: raw[name] for name in sizes})


def write(directory: Path, config: dict[str, Any], processor: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    (directory / "added_tokens.json").write_text(json.dumps({"<image_placeholder>": 301}))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, directory / WEIGHTS)
    return directory


def test_the_authors_format_is_the_same_model(checkpoint, backbone, tiny_towers, tmp_path):
    raw = json.loads((checkpoint / "config.json").read_text())
    tensors = as_authors(load_file(checkpoint / WEIGHTS))
    theirs = models.load(write(tmp_path / "theirs", authors_config(raw), PROCESSOR, tensors))
    jax.tree.map(np.testing.assert_array_equal, theirs.parameters, backbone.parameters)
    assert (theirs.config.text, theirs.config.high) == (backbone.config.text, backbone.config.high)
    assert (theirs.config.vision, theirs.config.image_token) == (backbone.config.vision, 301)

    # An image of the large size is not resized: its large pixels are transformers', to the bit.
    gold, out = golden_arrays(FAMILY, "authors"), theirs.prepare([golden_arrays(FAMILY, "authors")["image"]])
    np.testing.assert_array_equal(out[LARGE], backbone.prepare([gold["image"]])[LARGE])
    assert np.abs(out["pixel_values"][0] - gold["pixel_values"]).max() <= 1e-6  # as torch resizes float32

    saved = models.save(theirs, tmp_path / "saved")
    again = models.load(saved)
    assert again.fingerprint == theirs.fingerprint
    assert json.loads((saved / "config.json").read_text())["architectures"] == [ARCHITECTURE]
    assert again.image_config == theirs.image_config


def test_the_large_image_is_cut_off_as_the_authors_do(tiny_towers, tmp_path):
    """32 · 23 / 41 is 17.95: transformers rounds it to 18 rows, the authors cut it to 17."""
    picture = np.zeros((23, 41, 3), np.uint8)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    ours = multi_modality.FORMAT.settings(authors_config({"text_config": {}}), tmp_path)
    hf = models.FAMILIES[ARCHITECTURE].vision
    assert hf is not None
    for settings, rows in ((ours, 17), (hf.settings(GOLDENS / FAMILY), 18)):
        pixels = process_deepseek_hybrid([picture], settings)[LARGE][0, 0]
        assert (pixels[:, 0] < pixels[0, 0] - 0.1).sum() == rows


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("vision_config.params.concat_type", "add", "concat_type 'add'; expected 'tuple'"),
        ("vision_config.params.high_res_cfg.model_name", "sam_vit_l", "'sam_vit_l'; expected 'sam_b_downsample'"),
        ("vision_config.params.high_res_cfg.select_feature", "patch", "select_feature 'patch'; expected 'same'"),
        ("vision_config.params.low_res_cfg.pixel_mean", None, "low_res_cfg: got .*expected a table with pixel_mean"),
        ("vision_config.params.extra", 1, "extra 1, which is not built"),
        ("aligner_config.params.projector_type", "mlp_gelu", "expected 'low_high_hybrid_split_mlp_gelu'"),
    ],
)
def test_what_is_not_built_of_two_towers_is_refused(path, value, message, checkpoint, tiny_towers, tmp_path):
    config = authors_config(json.loads((checkpoint / "config.json").read_text()))
    *parts, key = path.split(".")
    functools.reduce(dict.__getitem__, parts, config)[key] = value
    with pytest.raises(ConfigError, match=message):
        models.load(write(tmp_path / "theirs", config, PROCESSOR, {"a": np.zeros(1, np.float32)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_normalize": True}, "do_normalize True; expected False"),
        ({"image_mean": [0.5] * 3}, "image_mean"),
        ({"image_size": 64}, "image_size 64; expected 32"),
    ],
)
def test_a_processor_that_normalises_twice_or_otherwise_is_refused(change, message, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | change))
    with pytest.raises(ConfigError, match=message):
        multi_modality.FORMAT.settings(authors_config({"text_config": {}}), tmp_path)


def template_of(raw: dict[str, Any], directory: Path) -> ChatTemplate | None:
    """What `load` gives a backbone of this configuration."""
    own = multi_modality.FORMAT.template(raw)
    return template_with_images(ChatTemplate.from_directory(directory), own, directory, "the authors' format")


SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)


def conversation(messages: list[tuple[str, str]], system: str = SYSTEM) -> str:
    """`get_prompt` of the authors' `conversation.py`, style DeepSeek, transcribed: an empty answer opens the next."""
    text = f"{system}\n\n"
    for number, (role, said) in enumerate(messages):
        end = ("\n\n", "<｜end▁of▁sentence｜>")[number % 2]
        text += f"{role}: {said.strip()}{end}" if said else f"{role}:"
    return text.strip()


def test_prompts_are_the_authors_conversations(tmp_path):
    template = template_of({}, tmp_path)
    assert template is not None
    image, text = {"type": "image"}, {"type": "text", "text": "Describe this. "}
    question = [{"role": "user", "content": [image, text]}]
    assert template.render(question) == conversation([("User", "<image_placeholder>Describe this."), ("Assistant", "")])
    more = [*question, {"role": "assistant", "content": "A page."}, {"role": "user", "content": " And this? "}]
    expected = [("User", "<image_placeholder>Describe this."), ("Assistant", "A page."), ("User", "And this?")]
    assert template.render(more) == conversation([*expected, ("Assistant", "")])
    system = [{"role": "system", "content": "Be brief."}, *question]
    assert template.render(system) == conversation(
        [("User", "<image_placeholder>Describe this."), ("Assistant", "")], "Be brief."
    )

    # A template in the tokenizer's file knows no images; one of its own in the directory holds.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    found = template_of({}, tmp_path)
    assert found is not None
    assert found.source == template.source
    (tmp_path / "chat_template.jinja").write_text("mine")
    assert template_of({}, tmp_path) == ChatTemplate.from_directory(tmp_path)
