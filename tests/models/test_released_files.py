"""Configurations of releases and fine-tunes, as their files have them: the sizes that they say, and dtypes.

That each is read, or refused and why, is in `test_corpus.py`.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import FAMILIES, load
from kvpatch_jax.models.families.family import abstract, parameters
from kvpatch_jax.models.files import open_files
from kvpatch_jax.models.inputs.processors import CONFIG_FILE
from tests.goldens.load import GOLDENS, write_checkpoint

FILES = Path(__file__).parent / "released"


def released(name: str) -> dict[str, Any]:
    return json.loads((FILES / f"{name}.json").read_text())


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
