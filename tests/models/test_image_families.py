"""Every family with images against transformers: positions, embeddings, hidden states, caches, logits, pixels."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvpatch_jax import models
from kvpatch_jax.core import to_engine
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load, save
from kvpatch_jax.models.inputs.pictures import kimi_size
from tests.goldens.load import GOLDENS, golden_arrays, write_checkpoint
from tests.tolerances import assert_close_to_largest

BAR = 2e-4
close = functools.partial(assert_close_to_largest, bar=BAR)
FAMILIES = [
    "qwen3_vl",
    "qwen3_vl_moe",
    "llava",
    "llava_next",
    "deepseek_vl",
    "internvl",
    "smolvlm",
    "kimi_vl",
    "gemma3",
    *("deepseek_vl_hybrid", "deepseek_ocr2", "internvl_6b", "phi3_v"),
    *("qwen2_vl", "glm4v", "glm4v_moe", "mistral3", "pixtral"),
    *("gemma4", "gemma4_moe"),
]
INPUTS = ("pixel_values", "image_grid_thw", "video_grid_thw", "image_sizes", "num_patches", "pixel_attention_mask")
INPUTS += ("high_res_pixel_values", "image_position_ids", "pixel_values_local", "num_local_patches")


DEFAULT = ("llava_next", "internvl", "gemma3", "qwen2_vl")
"""Every other family is marked slow."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in FAMILIES],
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def backbone(family, tmp_path_factory):
    return load(write_checkpoint(family, tmp_path_factory.mktemp(family)), angles="float32")


pytestmark = pytest.mark.usefixtures("highest_precision")


def embedded(backbone, gold):
    vision = {name: gold[name] for name in INPUTS if name in gold}
    return backbone.embed(gold["input_ids"][None], **vision)


def check_forward(backbone, gold):
    tokens = embedded(backbone, gold)
    assert np.array_equal(tokens.positions[0], gold["position_ids"])
    close(tokens.embeddings[0, gold.get("embedded", slice(None))], gold["inputs_embeds"], "embeddings")
    layers = backbone.layout.layers
    out = backbone.prefill(tokens, hidden_at=tuple(range(1, layers + 1)), logits="all")
    whole = gold["hidden"].shape[1] == len(gold["input_ids"])
    rows = slice(None) if whole else gold["rows"]
    for layer in range(layers):
        close(out.hidden[layer + 1][0, rows], gold["hidden"][layer], f"hidden {layer}")
    if "k_phase_free" in gold:
        close(out.kv["k"][:, 0, rows], gold["k_phase_free"], "phase-free keys")
    engine = to_engine(backbone.layout, out.kv, gold["position_ids"][None], 0)
    for channel in engine:
        # transformers' keys and values of all layers; those of a channel that lives on some of them.
        stored = gold[channel.partition("_")[0]]
        if "k_local" not in gold:
            stored = stored[np.asarray(backbone.layout.layers_of(channel))]
        elif channel in gold:
            stored = gold[channel]
        close(engine[channel][:, 0, rows], stored, f"cached {channel}")
    close(out.logits[0, gold["rows"]], gold["logits"], "logits")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, marks=() if family in DEFAULT and case == "one_image" else SLOW)
        for family in FAMILIES
        for case in ("one_image", "two_images")
    ],
    indirect=["family"],
)
def test_forward_equals_transformers(backbone, family, case):
    check_forward(backbone, golden_arrays(family, case))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_vl", "glm4v"])
def test_video_equals_transformers(family, tmp_path):
    """Frames of Qwen3-VL and GLM-4V are runs of placeholders of their own, by timestamps; Qwen2-VL's are one run."""
    check_forward(load(write_checkpoint(family, tmp_path), angles="float32"), golden_arrays(family, "video"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "kimi_vl", "deepseek_ocr2", "gemma4"], indirect=True)
def test_greedy_tokens_equal_transformers(backbone, family):
    gold = golden_arrays(family, "one_image")
    generated = backbone.generate(embedded(backbone, gold), len(gold["decode_tokens"]))
    assert np.array_equal(generated[0], gold["decode_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "kimi_vl", "deepseek_ocr2", "gemma4"], indirect=True)
def test_saved_and_loaded_again(backbone, family, tmp_path):
    again = load(save(backbone, tmp_path / "saved"), angles="float32")
    assert again.config.text == backbone.config.text
    jax.tree.map(np.testing.assert_array_equal, again.parameters, backbone.parameters)


# ---------------------------------------------------------------------------------------------- released forms


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "llava", "internvl", "gemma3", "glm4v"], scope="module")
def test_released_configuration_is_the_same_model(family, tmp_path):
    directory = write_checkpoint(family, tmp_path, "config_release.json")
    released, ours = load(directory, angles="float32"), load(write_checkpoint(family, tmp_path / "b"), angles="float32")
    assert released.config.vision == ours.config.vision
    text = released.config.text
    if family.startswith(
        "internvl"
    ):  # released with a dynamic scaling, which does nothing within the model's own length
        assert text.rope.scaling.kind == "dynamic"
        text = dataclasses.replace(text, rope=dataclasses.replace(text.rope, scaling=None))
    assert text == ours.config.text
    check_forward(released, golden_arrays(family, "one_image"))


def rewrite(directory, rename, config=None):
    """The checkpoint with its tensors renamed (None drops one) or repacked."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file(rename(tensors), path)
    if config is not None:
        shutil.copy(GOLDENS / config, directory / "config.json")
    return directory


def kimi_released(tensors):
    """transformers' names and packing of Kimi_K25 to those of Kimi-VL's released files."""
    head, out, fused = 16, {}, {}
    pairs = np.arange(head).reshape(2, -1).T.reshape(-1)  # channel 2i + j of a released head is 8j + i here
    rules = [
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head", "language_model.lm_head"),
        (r"^model\.vision_tower\.layers\.(\d+)\.norm2", r"vision_tower.encoder.blocks.\1.norm@1"),
        (r"^model\.vision_tower\.layers\.(\d+)\.norm1", r"vision_tower.encoder.blocks.\1.norm0"),
        (r"^model\.vision_tower\.layers\.(\d+)\.attn\.proj", r"vision_tower.encoder.blocks.\1.wo"),
        (r"^model\.vision_tower\.layers\.(\d+)\.mlp\.fc1", r"vision_tower.encoder.blocks.\1.mlp.fc0"),
        (r"^model\.vision_tower\.layers\.(\d+)\.mlp\.fc2", r"vision_tower.encoder.blocks.\1.mlp.fc@1"),
        (r"pos_emb\.position_embeddings", "pos_emb.weight"),
        (r"^model\.vision_tower\.final", "vision_tower.encoder.final"),
        (r"^model\.vision_tower\.", "vision_tower."),
        (r"^model\.mm_projector\.pre_norm", "multi_modal_projector.pre_norm"),
        (r"^model\.mm_projector\.in_proj", "multi_modal_projector.linear_1"),
        (r"^model\.mm_projector\.out_proj", "multi_modal_projector.linear_2"),
    ]
    for name, value in tensors.items():
        split = re.fullmatch(r"model\.vision_tower\.layers\.(\d+)\.attn\.([qkv])_proj\.(\w+)", name)
        if split:
            layer, part, leaf = split.groups()
            order = (np.arange(0, len(value), head)[:, None] + pairs).reshape(-1) if part in "qk" else slice(None)
            fused.setdefault(f"vision_tower.encoder.blocks.{layer}.wqkv.{leaf}", {})[part] = value[order]
            continue
        for pattern, target in rules:
            name = re.sub(pattern, target, name)
        name = name.replace("@", "")
        if name.endswith("experts.gate_up_proj"):
            for expert, gate_up in enumerate(value):
                for part, half in zip(("gate", "up"), np.split(gate_up, 2), strict=True):
                    out[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = half.copy()
        elif name.endswith("experts.down_proj"):
            out |= {name.replace("down_proj", f"{n}.down_proj.weight"): v.copy() for n, v in enumerate(value)}
        else:
            out[name] = value
    return out | {name: np.concatenate([parts[part] for part in "qkv"]) for name, parts in fused.items()}


@pytest.mark.slow
def test_kimis_released_names_are_the_same_function(tmp_path):
    """Kimi-VL's own names, fused and neighbouring pairs, experts one by one: the same function."""
    directory = rewrite(write_checkpoint("kimi_vl", tmp_path), kimi_released, "kimi_vl/config_release.json")
    backbone = load(directory, angles="float32")
    assert backbone.config.vision.fused
    check_forward(backbone, golden_arrays("kimi_vl", "one_image"))


@pytest.mark.slow
def test_llavas_released_names_are_the_same_function(tmp_path):
    longer = lambda tensors: {
        re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name): value for name, value in tensors.items()
    }
    directory = rewrite(write_checkpoint("llava", tmp_path), longer, "llava/config_release.json")
    check_forward(load(directory, angles="float32"), golden_arrays("llava", "one_image"))


@pytest.mark.slow
def test_qwen3_experts_of_either_orientation(tmp_path):
    """Released experts are [E, D, 2I]; transformers writes [E, 2I, D]. Told apart by shape."""
    turn = lambda tensors: {
        name: np.ascontiguousarray(value.transpose(0, 2, 1)) if "experts" in name else value
        for name, value in tensors.items()
    }
    directory = rewrite(write_checkpoint("qwen3_vl_moe", tmp_path), turn)
    check_forward(load(directory, angles="float32"), golden_arrays("qwen3_vl_moe", "one_image"))


# ------------------------------------------------------------------------------------------------ preparation


@pytest.mark.parametrize("case", ["two_images"])
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_images_become_transformers_pixels(family, case):
    """Pillow's resizing, tiles, padding and normalisation, bit for bit."""
    gold = golden_arrays(family, case)
    images = [gold[name] for name in sorted(gold) if name.startswith("image.")]
    if not images:
        pytest.skip("transformers' processor of this family needs torchvision")
    if family == "phi3_v":
        pytest.skip("its small whole image is torch's interpolation, rounded as the processor does: test_phi3_v")
    raw = json.loads((GOLDENS / family / "config.json").read_text())
    vision = models.FAMILIES[raw["architectures"][0]].config(raw, "float32", None).family.vision
    out = vision.process(images, vision.settings(GOLDENS / family))
    assert out["pixel_values"].dtype == np.float32
    for name, value in out.items():
        assert np.array_equal(value, gold[name]), name


@pytest.mark.parametrize("family", DEFAULT, indirect=True)
def test_prompt_has_one_placeholder_per_feature(backbone, family):
    image = np.arange(20 * 41 * 3, dtype=np.uint8).reshape(20, 41, 3)
    prompt = backbone.prepare([[5, 6], image, [7], image[:, :17], [8]])
    ids, plan = prompt["input_ids"], backbone.family.vision.plan
    assert plan(backbone.config, ids, prompt) is not None  # it counts placeholders and pixels
    with pytest.raises(InputError, match="input_ids: got"):
        plan(backbone.config, np.delete(ids, np.flatnonzero(ids[0] == 301)[0], axis=1), prompt)
    with pytest.raises(InputError, match="pixel_values: got shape"):
        plan(backbone.config, ids, prompt | {"pixel_values": prompt["pixel_values"][..., 1:]})


def test_kimi_images_keep_within_their_budget_of_patches():
    """Never up; within the patch budget and 512 patches a side; padded to multiples of 28."""
    assert kimi_size(100, 300, 14, 2, 4096) == ((100, 300), (112, 308))
    inner, outer = kimi_size(2000, 3000, 14, 2, 4096)
    assert outer[0] % 28 == outer[1] % 28 == 0
    assert (inner[0] // 14) * (inner[1] // 14) <= 4096
    assert kimi_size(20, 14 * 600, 14, 2, 4096)[0][1] == 14 * 512
