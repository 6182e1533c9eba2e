"""Released configurations and weights are read as transformers reads them, or refused by key and value."""

import copy
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from evals.real_weights import weights_file
from kvpatch_jax.errors import ConfigError, InputError, WeightsError
from kvpatch_jax.models import FAMILIES, UnknownKeyWarning, load
from kvpatch_jax.models.checkpoints import flatten_params, translate
from kvpatch_jax.models.checkpoints.entries import plan
from kvpatch_jax.models.families.architectures import find_architecture
from kvpatch_jax.models.families.family import abstract, parameters
from kvpatch_jax.models.files import open_files
from tests.goldens.load import GOLDENS, golden_config, write_checkpoint
from tests.models.released_configs import RELEASED

# ----------------------------------------------------------------------------------------------------------------- keys


IMAGES = ("qwen2_5_vl", "internvl", "kimi_vl", "qwen3_omni", "gemma4", "phi3_v", "deepseek_vl2", "llava_onevision")
TEXTS = ("deepseek_v3", "llama2", "gemma3_text", "qwen3_moe")
CONFIGS: dict[str, dict[str, Any]] = {name: golden_config(name) for name in (*TEXTS, *IMAGES)}
BAD: tuple[Any, ...] = (-1, 0, 1.5, 10**9 + 7, "3", [], ["a"], {}, {"a": 1}, True, None, float("nan"))

MOST = [pytest.param(name, marks=pytest.mark.nightly) for name in (*TEXTS[1:], *IMAGES[1:])]


def read(raw: dict[str, Any]) -> Any:
    return FAMILIES[find_architecture(raw, "config.json")].config(raw, "exact")


def changed(name: str, **change: Any) -> dict[str, Any]:
    """A configuration with these keys changed, in its text part where it has one."""
    raw = copy.deepcopy(CONFIGS[name])
    raw.get("text_config", raw).update(change)
    return raw


def written(root: Path, raw: dict[str, Any], images: dict[str, Any] | None = None) -> Path:
    """A directory with this `config.json`, settings of images, and nothing else."""
    (root / "config.json").write_text(json.dumps(raw))
    (root / "preprocessor_config.json").write_text(json.dumps(images or {"do_resize": True}))
    return root


def paths(raw: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of every entry, tables inside tables included."""
    for key, value in raw.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from paths(value, (*path, key))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", [TEXTS[0], IMAGES[0], *MOST])
def test_no_value_of_any_key_gives_an_untyped_error(name):
    """Every key, each kind of nonsense: read, warned about, or refused."""
    for path in paths(CONFIGS[name]):
        for value in BAD:
            raw = copy.deepcopy(CONFIGS[name])
            table = raw
            for key in path[:-1]:
                table = table[key]
            table[path[-1]] = value
            try:
                config = read(raw)
            except (ConfigError, UnknownKeyWarning):
                continue
            except Exception as error:
                pytest.fail(f"{'.'.join(path)} = {value!r}: {type(error).__name__}: {error}")
            assert min(config.text.layers, config.text.heads) > 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama2", {"num_hidden_layers": 2.5}, r"num_hidden_layers 2\.5; expected a positive whole number"),
        ("llama2", {"num_key_value_heads": "two"}, "num_key_value_heads.*expected int, got str.*two"),
        ("llama2", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'.*factor"),
        ("llama2", {"rope_parameters": {"rope_type": "spiral"}}, "rope type: got 'spiral'"),
        ("gemma3_text", {"sliding_window": None}, "got no 'sliding_window'"),
        ("gemma4_text", {"num_kv_shared_layers": 5}, "reads the KV of no layer below"),
        # What is legal and not built.
        ("llama2", {"is_causal": False}, "is_causal False, which is not built; expected True"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "is_causal|use_bidirectional_attention: got 'all'"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"got mlp_only_layers \[1\].*expected experts in every layer"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: got 'softmax'"),
        ("llava", {"vision_feature_layer": [-2, -5]}, r"vision_feature_layer: got \[-2, -5\]; expected one layer"),
        ("llava", {"vision_config": {"model_type": "siglip_vision_model"}}, "got type 'siglip_vision_model'"),
        ("phi3_v", {"embd_layer": {"use_hd_transform": False}}, "got embedding_cls None, which is not built"),
        ("qwen2_5_vl", {"quantization_config": {"bits": 4}}, "quantization_config.*not built"),
    ],
)
def test_what_is_wrong_or_not_built_is_refused_by_key_and_value(name, change, message):
    with pytest.raises(ConfigError, match=message):
        read({**golden_config(name), **change})


# ---------------------------------------------------------------------------------------------------- unknown keys


def warned_by(
    directory: Path, error: type[Exception] = WeightsError, message: str = "safetensors", **options: Any
) -> list[str]:
    """What `load` warns of before it finds no weights, or refuses the directory by another message."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(error, match=message):
            load(directory, **options)
    assert all(warning.category is UnknownKeyWarning for warning in found)
    return [str(warning.message) for warning in found]


def test_a_key_that_nothing_reads_is_warned_about_once_and_by_name(tmp_path):
    raw = changed("qwen2_5_vl", unsloth_fixed=True, residual_multiplier=0.2, some_new_key=None, use_cache=False)
    first, second = warned_by(written(tmp_path, {**raw, "unsloth_fixed": True}))
    assert "config.json: got 'unsloth_fixed': True, which no class of transformers reads" in first
    assert "got 'residual_multiplier': 0.2" in second


@pytest.mark.parametrize("key", ["unsloth_fixed", "is_causal"])
def test_a_key_to_ignore_is_read_as_if_it_were_not_there(key, tmp_path):
    directory = written(tmp_path, changed("qwen2_5_vl", **{key: False if key == "is_causal" else 3}))
    assert warned_by(directory, ignore=[key]) == []


# -------------------------------------------------------------------------------------------------- what means the same


def test_released_keys_mean_what_transformers_writes():
    raw = {key: value for key, value in golden_config("gemma3_text").items() if "rope" not in key}
    del raw["layer_types"]
    raw |= {"rope_theta": 5e2, "rope_local_base_freq": 3e1, "sliding_window_pattern": 2}
    raw |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert read(raw).text == read(golden_config("gemma3_text")).text


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "qwen2_vl", "glm4v", "qwen3_vl", "llava", "kimi_vl", "gemma4", "qwen2_5_omni", "qwen3_omni"]
)
def test_released_files_mean_what_transformers_writes(name):
    """Flat text fields, `rope_scaling`, `in_chans`, tower names of version 4."""
    folder = GOLDENS / name
    older, newer = (read(json.loads((folder / file).read_text())) for file in ("config_release.json", "config.json"))
    for part in ("rope", "layers", "experts", "window"):
        assert getattr(older.text, part) == getattr(newer.text, part), part
    assert older.image_token == newer.image_token


def test_windows_hold_where_the_class_has_them():
    """Mistral slides over 4096 keys unless told otherwise; Qwen must be told to."""
    raw = {key: value for key, value in golden_config("mistral").items() if key != "sliding_window"}
    assert read(raw).text.window == 4096
    assert read({**raw, "sliding_window": None}).text.window is None
    qwen = changed("qwen2_5_vl", layer_types=None, sliding_window=8, use_sliding_window=False, max_window_layers=1)
    assert read(qwen).text.window is None
    qwen["text_config"]["use_sliding_window"] = True
    assert (read(qwen).text.window, read(qwen).text.window_layers) == (8, (1, 2))


# ------------------------------------------------------------------------------------------------------ dtypes, ties


def dtyped(top: dict[str, str], text: dict[str, str]) -> str:
    raw = copy.deepcopy(CONFIGS["internvl"])
    for table, said in ((raw, top), (raw["text_config"], text)):
        for key in ("dtype", "torch_dtype"):
            table.pop(key, None)
        table |= said
    return read(raw).text.dtype


@pytest.mark.parametrize("top", ["dtype", "torch_dtype"])
def test_the_dtype_at_the_top_is_the_models(top):
    """As transformers' `dtype="auto"`; the text part's holds where the top says nothing."""
    assert dtyped({top: "bfloat16"}, {"dtype": "float32"}) == "bfloat16"
    assert dtyped({top: "float32"}, {"torch_dtype": "bfloat16"}) == "float32"
    assert dtyped({}, {top: "bfloat16"}) == "bfloat16"
    assert dtyped({}, {}) == "float32"


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_where_the_top_says_no_dtype_the_weights_do(stored, tmp_path):
    directory = write_checkpoint("qwen2_5_vl", tmp_path)
    raw = json.loads((directory / "config.json").read_text())
    for table in (raw, raw["text_config"], raw["vision_config"]):
        table.pop("dtype", None)
    tensors = load_file(directory / "model.safetensors")
    kept = {name: value if "norm" in name else value.astype(jnp.dtype(stored)) for name, value in tensors.items()}
    save_file(kept, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(raw))
    assert load(directory).config.text.dtype == stored
    assert load(directory, dtype="float32").config.text.dtype == "float32"


# ------------------------------------------------------------------------------------------------------------- releases


# One release a line, with what becomes of it: see the README there.
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.jsonl"))
RELEASES: list[dict[str, Any]] = [json.loads(line) for file in CORPUS for line in file.read_text("utf-8").splitlines()]
INDEXED = [release for release in RELEASES if "index" in release]
PUBLISHED = {name: released for name, released in RELEASED.items() if released.published is not None}
FIRST = list({released.config["architectures"][0]: name for name, released in reversed(PUBLISHED.items())}.values())
"""The first of every architecture."""
MORE = [pytest.param(name, marks=pytest.mark.nightly) for name in PUBLISHED if name not in FIRST]


def count_of(raw: dict[str, Any]) -> int:
    """Parameters of a model of this configuration."""
    return sum(leaf.size for leaf in jax.tree.leaves(parameters(abstract(read(raw)))))


@pytest.mark.parametrize("name", [*FIRST, *MORE])
def test_a_release_has_the_published_number_of_parameters(name):
    raw, published = RELEASED[name]
    assert count_of(raw) / 1e9 == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release["release"])
def test_a_release_is_read_or_refused_for_the_stated_reason(release, tmp_path):
    """Read: `load` misses nothing but the weights, and warns of the stated keys, each once."""
    error, message = (ConfigError, release["refused"]) if "refused" in release else (WeightsError, "safetensors")
    messages = warned_by(written(tmp_path, release["config"], release.get("preprocessor")), error, message)
    keys = Counter(re.search(r"got '(.*?)'", message)[1] for message in messages)  # type: ignore[index]
    assert keys == Counter(release.get("warned", ()))
    if "billions" in release:  # of parameters, in the authors' paper
        assert count_of(release["config"]) // 10**9 == release["billions"]


def without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


@pytest.mark.filterwarnings("ignore::kvpatch_jax.models.UnknownKeyWarning")
@pytest.mark.parametrize("release", INDEXED, ids=lambda release: release["release"])
def test_tensors_are_those_of_the_releases_index(release, tmp_path):
    """Their bytes, or parameters, add up to the index's total, and every name seen in it is one that is read."""
    directory = written(tmp_path, release["config"], release.get("preprocessor"))
    raw, index = open_files(directory).config, release["index"]
    config = read(raw)
    leaves = flatten_params(parameters(abstract(config)))
    count = sum(leaf.size for leaf in leaves.values())
    assert index.get("total_size", 2 * count) == 2 * count
    assert index.get("total_parameters", count) == count

    family = config.family
    asked = {without_numbers(tensor.name) for tensor in plan(family.entries(config, {}), leaves)}
    for name in index["names"]:
        ours = translate(family.knows(config), name.replace("#", "3"))
        assert without_numbers(str(ours)) in asked, name


# -------------------------------------------------------------------------------------------------------------- weights


def installed(name: str) -> Path:
    """Returns the weights in packages that are installed by hand."""
    try:
        return weights_file(name)
    except InputError as error:
        if "got no package" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.nightly
@pytest.mark.usefixtures("highest_precision")
def test_ids_logits_and_continuation_are_transformers() -> None:
    backbone = load(installed("smollm2"), dtype="float32", angles="float32")
    with np.load(GOLDENS / "smollm2.npz") as arrays:
        golden = dict(arrays)
    ids = backbone.prepare([str(golden["text"])])["input_ids"]
    assert ids[0].tolist() == golden["input_ids"].tolist()
    assert backbone.text(ids[0]) == str(golden["text"])
    prompt = backbone.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert backbone.text(prompt["input_ids"][0]) == str(golden["chat"])

    tokens = backbone.embed(ids)
    logits = np.asarray(backbone.prefill(tokens, logits="all").logits[0])
    assert np.abs(logits[:, golden["columns"]] - golden["logits"]).max() < 2e-4 * np.abs(golden["logits"]).max()
    sums = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    assert np.abs(sums - golden["log_sum"]).max() < 1e-3
    sure = golden["margin"] > 1e-2
    assert sure.mean() > 0.9
    assert np.array_equal(logits.argmax(-1)[sure], golden["best"][sure])
    continued = backbone.generate(tokens, len(golden["continued"]))
    assert np.asarray(continued)[0].tolist() == golden["continued"].tolist()


@pytest.mark.nightly
@pytest.mark.usefixtures("highest_precision")
def test_the_capital_of_france() -> None:
    gemma = load(installed("gemma3-270m"), dtype="float32", angles="float32")
    prompt = gemma.prepare(["The capital of France is called"])
    # The start token that the file asks for, then words with their spaces.
    assert prompt["input_ids"][0].tolist() == [2, 818, 5279, 529, 7001, 563, 2760]
    assert gemma.text(np.asarray(gemma.generate(gemma.embed(**prompt), 2))[0]).startswith(" Paris")
