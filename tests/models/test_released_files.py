"""Configurations of releases and fine-tunes, as their files have them: the sizes that they say, and dtypes.

That each is read, or refused and why, is in `test_corpus.py`.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvpatch_jax.errors import ConfigError, ShapeError
from models import FAMILIES, load, save
from models.families.family import abstract, parameters
from models.files import open_files
from models.inputs.qwen_images import CONFIG_FILE
from tests.goldens.load import GOLDENS, golden_arrays, write_checkpoint
from tests.goldens.redraw import standard_values
from tests.models.test_image_families import check_forward, close, kimi_released

FILES = Path(__file__).parent / "released"


def released(name: str) -> dict[str, Any]:
    """The file's configuration, of a release with packed weights as if they were plain."""
    raw = json.loads((FILES / f"{name}.json").read_text())
    for table in (raw, raw.get("text_config", {})):
        table.pop("quantization_config", None)
    return raw


def written(root: Path, raw: dict[str, Any]) -> Path:
    """A directory with this `config.json` and the least image settings."""
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps(raw))
    (root / CONFIG_FILE).write_text("{}")
    return root


def configuration(root: Path) -> Any:
    """What `load` makes of a directory's configuration."""
    raw = open_files(root).config
    return FAMILIES[raw["architectures"][0]].config(raw, "exact", None)


def total(config: Any) -> tuple[int, int]:
    """Parameters, and their bytes."""
    leaves = jax.tree.leaves(parameters(abstract(config)))
    return sum(leaf.size for leaf in leaves), sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize(
    ("name", "billions", "bytes_per_token"),
    [
        ("internvl3_5_hf_finetune", 0.905, 114_688),  # without a head of its own, of which it says nothing
        ("kimi_k25_release", 1026.879, 70_272),
        ("kimi_k25_complete", 1026.879, 70_272),
        ("qwen25vl_4_53_finetune", 8.292, 57_344),
        ("qwen2_5_7b", 7.616, 57_344),
        ("qwen3_omni_5_7", 31.719, 98_304),  # the thinker alone
    ],
)
def test_sizes_are_the_releases(name, billions, bytes_per_token, tmp_path):
    """In bfloat16, as every one of them says at its top, whatever its text part says."""
    config = configuration(written(tmp_path / name, released(name)))
    count, size = total(config)
    assert count / 1e9 == pytest.approx(billions, abs=5e-4)
    assert config.text.layout.bytes_per_token("bfloat16") == bytes_per_token
    assert config.text.dtype == getattr(config, "vision", config.text).dtype == "bfloat16"
    assert 2 * count <= size <= 2.001 * count  # a router's correction is float32 in every model


# ------------------------------------------------------------------------------------------------------ dtypes


def dtyped(top: dict[str, str], text: dict[str, str]) -> str:
    raw = json.loads((GOLDENS / "internvl" / "config.json").read_text())
    for table, said in ((raw, top), (raw["text_config"], text)):
        for key in ("dtype", "torch_dtype"):
            table.pop(key, None)
        table |= said
    return FAMILIES[raw["architectures"][0]].config(raw, "exact", None).text.dtype


@pytest.mark.parametrize("top", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("text", ["dtype", "torch_dtype"])
def test_the_dtype_at_the_top_is_the_models(top, text):
    """As transformers' `dtype="auto"`; the text part's holds where the top says nothing."""
    assert dtyped({top: "bfloat16"}, {text: "float32"}) == "bfloat16"
    assert dtyped({top: "float32"}, {text: "bfloat16"}) == "float32"
    assert dtyped({top: "bfloat16"}, {"torch_dtype": "bfloat16", "dtype": "float32"}) == "bfloat16"
    assert dtyped({}, {text: "bfloat16"}) == "bfloat16"


def test_a_file_that_says_two_dtypes_is_loaded_in_the_one_at_its_top(tmp_path):
    """As transformers 4.53 saves Qwen2.5-VL: half the bytes of what its text part says."""
    directory = write_checkpoint("qwen2_5_vl", tmp_path)
    raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
    for table, dtype in ((raw, "bfloat16"), (raw["text_config"], "float32"), (raw["vision_config"], "float32")):
        table.pop("dtype", None)
        table["torch_dtype"] = dtype
    (directory / "config.json").write_text(json.dumps(raw))
    backbone = load(directory)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(backbone.parameters)} == {"bfloat16"}
    assert backbone.config.to_dict()["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("part", [None, "float32"])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_where_the_top_says_no_dtype_the_weights_do(part, stored, tmp_path):
    directory = write_checkpoint("qwen2_5_vl", tmp_path)
    raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
    for table in (raw, raw["text_config"], raw["vision_config"]):
        table.pop("dtype", None)
    raw["text_config"] |= {} if part is None else {"dtype": part}
    tensors = load_file(directory / "model.safetensors")
    kept = {name: value if "norm" in name else value.astype(jnp.dtype(stored)) for name, value in tensors.items()}
    save_file(kept, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(raw))
    assert load(directory).config.text.dtype == stored
    assert load(directory, dtype="float32").config.text.dtype == "float32"


# ------------------------------------------------------------------------------------------------- switches

SWITCHES = ("debug", "micro_forward", "skip_checkpoint", "use_deepep")
"""Of InternVL3.5's trainer."""


@pytest.mark.parametrize(
    ("name", "part", "key"),
    [
        *(("internvl3_5_hf_finetune", "text_config", key) for key in SWITCHES),
        ("qwen2_5_7b", None, "use_mrope"),
    ],
)
def test_a_switch_that_is_on_is_refused_by_name(name, part, key, tmp_path):
    raw = released(name)
    table = raw if part is None else raw[part]
    assert table[key] is False
    table[key] = True
    with pytest.raises(ConfigError, match=f"got '{key}': True, which this library does not know"):
        load(written(tmp_path / name, raw))


# --------------------------------------------------------------------------------------------- Kimi-K2.5 and 2.6


def tiny_kimi_k25(root: Path) -> Path:
    """The tiny model of the goldens under the names of Kimi-K2.5's release."""
    directory = write_checkpoint("kimi_vl", root)
    path = directory / "model.safetensors"
    names = {"multi_modal_projector": "mm_projector", "linear_1": "proj.0", "linear_2": "proj.2"}
    rename = lambda name: ".".join(names.get(part) or part for part in str(name).split("."))
    save_file({rename(name): value for name, value in kimi_released(load_file(path)).items()}, path)

    raw = json.loads((GOLDENS / "kimi_vl" / "config_release.json").read_text())
    tower, complete = raw["vision_config"], released("kimi_k25_complete")
    renamed = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size")
    vision = {f"vt_{key}": tower[key] for key in renamed} | {
        key: tower[key] for key in ("patch_size", "merge_kernel_size", "init_pos_emb_height", "init_pos_emb_width")
    }
    vision |= {"mm_hidden_size": tower["hidden_size"], "text_hidden_size": raw["text_config"]["hidden_size"]}
    given = {key: value for key, value in complete.items() if key != "dtype"}
    given |= {"torch_dtype": "float32", "media_placeholder_token_id": raw["media_placeholder_token_id"]}
    given |= {"text_config": raw["text_config"], "vision_config": complete["vision_config"] | vision}
    (directory / "config.json").write_text(json.dumps(given))
    media = {"in_patch_limit": 64, "patch_size": 4, "merge_kernel_size": 2, "patch_limit_on_one_side": 512}
    media |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "fixed_output_tokens": None, "sample_fps": 2.0}
    (directory / CONFIG_FILE).write_text(json.dumps({"media_proc_cfg": media, "auto_map": {}}))
    return directory


@pytest.mark.usefixtures("highest_precision")
@pytest.mark.slow
def test_kimi_k25_released_files_are_transformers_model(tmp_path):
    directory = tiny_kimi_k25(tmp_path)
    backbone = load(directory, angles="float32")
    check_forward(backbone, golden_arrays("kimi_vl", "one_image"))
    with pytest.raises(ShapeError, match=r"grid: got \(5, 2, 2\); expected 1 to 4 frames"):
        backbone.embed(np.array([[3, 4]]), video_grid_thw=np.array([[5, 2, 2]]))

    # Frames of a video have the placeholder of images here, and the features of transformers' form.
    theirs = load(write_checkpoint("kimi_vl", tmp_path / "transformers"), angles="float32")
    pixels, grid = standard_values("frames", 3 * 24 * 48).reshape(-1, 3, 4, 4).astype(np.float32), np.array([[3, 4, 6]])
    ids = np.array([[5, *[backbone.config.image_token] * 6, 7]])
    ours = backbone.embed(ids, pixel_values=pixels, image_grid_thw=grid).embeddings
    ids[ids == backbone.config.image_token] = theirs.config.video_token
    close(ours, theirs.embed(ids, pixel_values_videos=pixels, video_grid_thw=grid).embeddings, "features of frames")

    again = load(save(backbone, tmp_path / "saved"), angles="float32")
    assert again.config.text == backbone.config.text
    assert again.image_config == backbone.image_config
    saved, read = (set(load_file(path / "model.safetensors")) for path in (tmp_path / "saved", directory))
    assert saved == read


def test_kimi_k25_images_stand_between_its_own_marks(tmp_path):
    config = configuration(written(tmp_path, released("kimi_k25_complete")))
    ids = {"<|media_begin|>": 5, "image": 6, "<|media_content|>": 7, "<|media_end|>": 8}
    words = lambda text: re.findall(r"<.*?>|\w+", text)
    encode = lambda text, add_special_tokens: SimpleNamespace(ids=[ids[word] for word in words(text)])
    tokenizer = SimpleNamespace(token_to_id=ids.get, encode=encode)
    grids = {"image_grid_thw": np.array([[1, 4, 6]])}
    assert config.family.vision.tokens(config, grids, 0, tokenizer) == [5, 6, 7, *[163605] * 6, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos_emb_type": "learned"}, "pos_emb_type 'learned', which is not built"),
        ({"merge_type": "sd4"}, "merge_type 'sd4', which is not built"),
        ({"video_attn_type": "temporal"}, "video_attn_type 'temporal', which is not built"),
        ({"mm_projector_type": "patchmergerv2"}, "mm_projector_type 'patchmergerv2', which is not built"),
        ({"text_hidden_size": 4096}, "text_hidden_size: got 4096; expected the text width 7168"),
        ({"mm_hidden_size": 1024}, "mm_hidden_size: got 1024; expected the tower's width 1152"),
        ({"vt_layer_scale": 0.5}, "got 'vt_layer_scale': 0.5"),
    ],
)
def test_what_kimi_k25_has_not_built_is_refused_by_name(change, message, tmp_path):
    raw = released("kimi_k25_complete")
    raw["vision_config"] |= change
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path, raw))
