"""Every tower, alone, against transformers: block outputs, features and deepstack features."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvpatch_jax.errors import ConfigError, ShapeError
from kvpatch_jax.models.checkpoints import SafetensorsSource, flatten_params, load_weights, module_entries
from kvpatch_jax.models.decoder.layers import Linear
from kvpatch_jax.models.towers import moonvit as moonvit_tower
from kvpatch_jax.models.towers import qwen3 as qwen3_tower
from kvpatch_jax.models.towers.moonvit import MoonViT, MoonViTConfig
from kvpatch_jax.models.towers.projectors import Projector, TileConfig, pack_tiles, packing_index, pixel_shuffle
from kvpatch_jax.models.towers.qwen3 import Qwen3VisionConfig, Qwen3VisionTower
from kvpatch_jax.models.towers.vit import ViT, ViTConfig, bucket_positions
from kvpatch_jax.models.towers.weights import (
    clip_entries,
    intern_vit_entries,
    moonvit_entries,
    projector_entries,
    qwen3_vision_entries,
)
from tests.arrays import placed
from tests.goldens.load import golden_arrays, write_checkpoint
from tests.goldens.redraw import redraw
from tests.tolerances import assert_close_to_largest

BAR = 2e-4
close = functools.partial(assert_close_to_largest, bar=BAR)
SLOW = pytest.mark.slow


pytestmark = pytest.mark.usefixtures("highest_precision")


class Holder(nnx.Module):
    """A tower where the families hold it."""

    def __init__(self, visual):
        self.visual = visual


def loaded(make, family, directory, entries, ignore):
    """A module holding the tensors of a tiny checkpoint that `entries` name."""
    module = nnx.eval_shape(make)
    state = nnx.state(module, nnx.Param)
    expected = flatten_params(nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(
        state, load_weights(SafetensorsSource(write_checkpoint(family, directory)), entries, expected, ignore=ignore)
    )
    nnx.update(module, state)
    return module


def run(module, pixel_values, **plan):
    """The tower, jitted over its parameters."""
    graph, state = nnx.split(module)
    return jax.jit(lambda state, pixels, plan: nnx.merge(graph, state)(pixels, **plan))(state, pixel_values, plan)


QWEN3 = Qwen3VisionConfig(
    depth=3,
    width=32,
    heads=2,
    intermediate=48,
    output_width=64,
    patch=4,
    merge=2,
    temporal=2,
    positions=25,
    deepstack_layers=(0, 2),
)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    entries = qwen3_vision_entries(QWEN3, "model.visual")
    make = lambda: Holder(Qwen3VisionTower(QWEN3, nnx.Rngs(0)))
    directory = tmp_path_factory.mktemp("qwen3")
    return loaded(make, "qwen3_vl", directory, entries, ["model.language_model.*", "lm_head.*"]).visual


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one_image", "video"])
def test_qwen3s_features_equal_transformers(qwen3, case):
    gold = golden_arrays("qwen3_vl", case)
    grids = gold["video_grid_thw"] if case == "video" else gold["image_grid_thw"]
    features, deepstack = run(qwen3, gold["pixel_values"], **qwen3_tower.plan_patches(QWEN3, grids))
    close(features, gold["vision_features"], "features")
    close(deepstack, gold["deepstack_features"], "deepstack features")


def test_qwen3_refuses():
    with pytest.raises(ShapeError, match="3×4 patches; expected a positive multiple of the merge size 2"):
        qwen3_tower.plan_patches(QWEN3, np.array([[1, 3, 4]]))
    with pytest.raises(ConfigError, match="expected a square"):
        Qwen3VisionConfig(1, 32, 2, 48, 64, 4, 2, 2, 24, ())
    with pytest.raises(ConfigError, match="deepstack layers"):
        Qwen3VisionConfig(1, 32, 2, 48, 64, 4, 2, 2, 25, (1,))


# ------------------------------------------------------------------------------------- CLIP, SigLIP, InternViT

SMALL: dict[str, Any] = {"depth": 3, "width": 32, "heads": 2, "intermediate": 48, "patch": 4}
CLIP = ViTConfig(
    **SMALL,
    image=16,
    activation="quick_gelu",
    norm_epsilon=1e-5,
    class_token=True,
    patch_bias=False,
    pre_norm=True,
    final_norm="kept",
    feature_layer=-2,
)
SIGLIP = ViTConfig(**SMALL, image=16, activation="gelu_pytorch_tanh", final_norm="applied")
SMOL = dataclasses.replace(SIGLIP, image=24)
INTERN = ViTConfig(**SMALL, image=16, class_token=True, layer_scale=True)


class TowerAndGlue(nnx.Module):
    """A plain ViT behind its projector, as the families assemble them."""

    def __init__(self, config, projector, shuffle=1):
        self.visual, self.projector, self.shuffle = ViT(config, nnx.Rngs(0)), projector(), shuffle

    def __call__(self, pixels, positions=None):
        features = self.visual(pixels, positions)
        return self.projector(features if self.shuffle == 1 else pixel_shuffle(features, self.shuffle))


def mlp_projector(inputs, **more):
    return lambda: Projector(inputs, 64, 64, rngs=nnx.Rngs(0), **more)


def vit(family, tmp_path_factory):
    """The tower and projector of a family, with its tiny weights."""
    language = ["*language_model.*", "*text_model.*", "lm_head.*", "image_newline"]
    if family in ("llava", "llava_next"):
        make = lambda: TowerAndGlue(CLIP, mlp_projector(32))
        entries = clip_entries(CLIP, "vision_tower")
        entries += projector_entries("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")
    elif family == "deepseek_vl":
        make = lambda: TowerAndGlue(SIGLIP, mlp_projector(32))
        entries = clip_entries(SIGLIP, "model.vision_model")
        entries += projector_entries("model.aligner.linear1", "model.aligner.linear2")
    elif family == "smolvlm":
        make = lambda: TowerAndGlue(SMOL, lambda: Linear(288, 64, bias=False, rngs=nnx.Rngs(0)), 3)
        entries = clip_entries(SMOL, "model.vision_model")
        entries += module_entries("model.connector", (), {"projector": "modality_projection.proj"})
    else:
        make = lambda: TowerAndGlue(INTERN, mlp_projector(128, norm_epsilon=1e-5), 2)
        entries = intern_vit_entries(INTERN, "vision_tower")
        glue = "multi_modal_projector"
        entries += projector_entries(f"{glue}.linear_1", f"{glue}.linear_2", norm=f"{glue}.layer_norm")
    return loaded(make, family, tmp_path_factory.mktemp(family), entries, language)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "llava_next", "deepseek_vl", "smolvlm", "internvl"])
def test_vits_features_equal_transformers(family, tmp_path_factory):
    tower = vit(family, tmp_path_factory)
    for case in ("one_image", "two_images"):
        gold = golden_arrays(family, case)
        pixels = gold["pixel_values"].reshape(-1, *gold["pixel_values"].shape[-3:])
        pixels = pixels[np.abs(pixels).max((1, 2, 3)) > 0]  # tiles that only fill up a batch
        positions = None
        if family == "smolvlm":
            side = pixels.shape[-1] // 4
            positions = np.tile(bucket_positions(side, side, 6), (len(pixels), 1))
        close(run(tower, pixels, positions=positions), real_tiles(gold["vision_features"][0], len(pixels)), case)


def real_tiles(features, count):
    assert len(features) >= count
    return features[:count]


def test_bucket_positions_equal_transformers():
    gold = golden_arrays("smolvlm", "buckets")
    for name, expected in gold.items():
        side, height, width = map(int, name.split("."))
        assert np.array_equal(bucket_positions(height, width, side), expected), name


def test_vits_of_invalid_configurations_are_refused():
    with pytest.raises(ConfigError, match="final_norm: got 'maybe'"):
        dataclasses.replace(CLIP, final_norm="maybe")
    with pytest.raises(ConfigError, match="vision_feature_layer: got -5; expected a layer of the tower's 3"):
        dataclasses.replace(CLIP, feature_layer=-5)
    with pytest.raises(ConfigError, match="vision activation: got 'relu'"):
        ViT(dataclasses.replace(CLIP, activation="relu"), nnx.Rngs(0))
    with pytest.raises(ShapeError, match="expected 16×16"):
        jax.eval_shape(lambda: ViT(CLIP, nnx.Rngs(0))(jnp.zeros((1, 3, 8, 8))))
    with pytest.raises(ShapeError, match="expected a square"):
        pixel_shuffle(jnp.zeros((1, 15, 8)), 2)


# ------------------------------------------------------------------------------------------- LLaVA-NeXT packing

TILES = TileConfig(16, 4, ((16, 32), (32, 16), (32, 32), (16, 48)))


@pytest.mark.parametrize("case", ["one_image", "two_images"])
def test_packing_equals_transformers(case):
    gold = golden_arrays("llava_next", case)
    newline = redraw("image_newline", [64])
    index = packing_index(TILES, gold["image_sizes"])
    features = gold["vision_features"][0]
    packed = pack_tiles(placed(features), placed(newline), placed(index))
    at = gold["input_ids"] == 301
    assert at.sum() == len(index)
    assert np.array_equal(packed, gold["inputs_embeds"][at])


# ------------------------------------------------------------------------------------------------- MoonViT

MOON = MoonViTConfig(
    depth=3, width=32, heads=2, intermediate=48, output_width=64, patch=4, merge=2, positions=5, fused=False
)


@pytest.fixture(scope="module")
def moonvit(tmp_path_factory):
    projector = ("model.mm_projector", "in_proj", "out_proj")
    entries = moonvit_entries(MOON, "model.vision_tower", projector, released=False)
    directory = tmp_path_factory.mktemp("kimi_vl")
    make = lambda: Holder(MoonViT(MOON, nnx.Rngs(0)))
    return loaded(make, "kimi_vl", directory, entries, ["model.language_model.*", "lm_head.*"]).visual


@pytest.mark.parametrize("case", ["one_image", pytest.param("two_images", marks=SLOW)])
def test_moonvits_features_equal_transformers(moonvit, case):
    gold = golden_arrays("kimi_vl", case)
    plan = moonvit_tower.plan_patches(MOON, gold["image_grid_thw"])
    close(run(moonvit, gold["pixel_values"], **plan), gold["vision_features"][0][:, 0], case)


def test_released_packing_of_moonvit_is_the_same_function(moonvit):
    """Kimi-VL's files fuse query, key, value and turn neighbouring channels; transformers splits and turns halves."""
    config = dataclasses.replace(MOON, fused=True)
    values = nnx.to_pure_dict(nnx.state(moonvit, nnx.Param))
    blocks = values["blocks"]
    pairs = np.arange(16).reshape(2, 8).T.reshape(-1)  # a head's channel 2i + j is transformers' channel 8j + i
    order = (np.arange(2)[:, None] * 16 + pairs).reshape(-1)
    parts = [blocks.pop(name) for name in ("query", "key", "value")]
    turn = lambda leaf, number: np.asarray(leaf)[..., order] if number < 2 else np.asarray(leaf)
    blocks["qkv"] = {
        leaf: np.concatenate([turn(part[leaf], number) for number, part in enumerate(parts)], axis=-1)
        for leaf in ("kernel", "bias")
    }
    released = nnx.eval_shape(lambda: MoonViT(config, nnx.Rngs(0)))
    state = nnx.state(released, nnx.Param)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, values))
    nnx.update(released, state)
    gold = golden_arrays("kimi_vl", "one_image")
    plan = moonvit_tower.plan_patches(config, gold["image_grid_thw"][:, 1:])
    close(run(released, gold["pixel_values"], **plan), gold["vision_features"][0][:, 0], "released packing")


def test_moonvit_refuses_more_frames_than_it_has():
    with pytest.raises(ShapeError, match=r"grid: got \(2, 4, 4\); expected 1 to 1 frames"):
        moonvit_tower.plan_patches(MOON, np.array([[2, 4, 4]]))
