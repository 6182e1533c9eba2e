"""Configurations that leave out whatever may be left out: every default is the one of transformers' class.

By default every class's defaults are compared, and the forwards of two models, without images and with them; the
others are marked slow.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvpatch_jax.models import FAMILIES, load, save
from kvpatch_jax.models.decoder.known_keys import DEFAULTS, INERT, ONLY
from tests.goldens.load import GOLDENS
from tests.goldens.redraw import redraw_all, standard_values

SPARSE = GOLDENS / "sparse"
NAMES = sorted(path.stem for path in SPARSE.glob("*.npz"))
CLASSES = json.loads((SPARSE / "class_defaults.json").read_text())
DERIVED = {
    *("layer_types", "head_dim", "qk_head_dim", "num_key_value_heads"),  # from other keys, by their own rules
    *("rope_parameters", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    "sliding_window",  # of the Qwen families, which set it aside where it is not switched on
    "_sliding_window_pattern",  # of Gemma, which writes it beside the layers' kinds, and reads these
}
OTHER_NAME = {"num_local_experts": "num_experts"}
FORWARDS = ("phi3",)


def write_sparse(name: str, directory: Path) -> Path:
    """The tiny checkpoint of a sparse configuration, with the settings of images that its family asks for."""
    directory.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, Any] = json.loads((SPARSE / f"{name}.json").read_text())
    (directory / "config.json").write_text(json.dumps(shapes.pop("config")))
    (directory / "preprocessor_config.json").write_text("{}")
    save_file(redraw_all(shapes), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def sparse_config(name: str) -> dict[str, Any]:
    return json.loads((SPARSE / f"{name}.json").read_text())["config"]


def arrays_of(name: str) -> dict[str, np.ndarray]:
    with np.load(SPARSE / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


@pytest.mark.parametrize(
    "name", [name if name in FORWARDS else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_the_sparsest_configuration_is_transformers_model(name, tmp_path):
    backbone, gold = load(write_sparse(name, tmp_path)), arrays_of(name)
    inputs = {
        key: gold[key]
        for key in ("image_grid_thw", "image_sizes", "image_position_ids", "num_local_patches")
        if key in gold
    }
    drawings = {"pixel_shape": ("pixel_values", ""), "large_shape": ("high_res_pixel_values", " large")}
    for key, (argument, more) in drawings.items():
        if key in gold:
            shape = gold[key].tolist()
            drawn = standard_values(f"sparse {name}{more}", int(np.prod(shape)))
            inputs[argument] = drawn.reshape(shape).astype(np.float32)
    if "mel_shape" in gold:
        shape = gold["mel_shape"].tolist()
        drawn = standard_values(f"sparse {name} sound", int(np.prod(shape)))
        inputs["input_features"] = drawn.reshape(shape).astype(np.float32)
        # Gemma 4's features have mel bins behind the frames.
        own = ("input_features_mask", 1) if name == "gemma4" else ("feature_attention_mask", 2)
        inputs[own[0]] = np.ones((shape[0], shape[own[1]]), np.int32)
    with jax.default_matmul_precision("highest"):
        tokens = backbone.embed(gold["input_ids"][None], **inputs)
        logits = np.asarray(backbone.prefill(tokens, logits="all").logits)[0, gold["rows"]]
    assert np.abs(logits - gold["logits"]).max() <= 2e-4 * np.abs(gold["logits"]).max()


def check_defaults(kind):
    ours, only = DEFAULTS[kind], ONLY.get(kind, {})
    for key, value in CLASSES[kind].items():
        name = OTHER_NAME.get(key, key)
        if name in only:
            assert only[name] == value, key
        elif name in ours and name not in DERIVED and ours[name] is not None:
            found = list(ours[name]) if isinstance(ours[name], tuple) else ours[name]
            if key in ("image_size", "patch_size") and isinstance(value, list):
                value = value[0]
            if key == "image_grid_pinpoints":
                found = [list(point) for point in found]
            assert found == value, key
        elif name not in ours and name not in INERT:
            pytest.fail(f"{kind}: {key} (default {value!r}) is not known")


def test_defaults_are_those_of_the_classes():
    """Every key of a class is known; what an absent one means is what the class says, or derived from other keys."""
    for kind in CLASSES:
        check_defaults(kind)


def test_windows_of_classes_hold_where_the_key_is_absent(tmp_path):
    """Mistral slides over 4096 keys unless told otherwise; nested in LLaVA too. The Qwen families must be told to."""
    configs = {
        name: FAMILIES[raw["architectures"][0]].config(raw, "exact", None)
        for name in NAMES
        if (raw := sparse_config(name))
    }
    windows = {name: config.text.window for name, config in configs.items()}
    names = ("mistral", "llava_mistral", "llava_next", "mistral3", "gemma3_text")
    sliding = dict.fromkeys(names, 4096) | {"gemma4": 512}
    assert windows == {name: sliding.get(name) for name in NAMES}
    assert configs["qwen2_5_vl"].tokens_per_second == CLASSES["qwen2_5_vl_vision"]["tokens_per_second"] == 4


def test_a_sparse_configuration_is_saved_as_it_is(tmp_path):
    backbone = load(write_sparse("internvl", tmp_path / "read"))
    again = load(save(backbone, tmp_path / "saved"))
    assert again.config.text == backbone.config.text
    jax.tree.map(np.testing.assert_array_equal, again.parameters, backbone.parameters)
