"""Configurations with values that make no sense: a typed error that names them, never one from inside."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest

from evals.task.instances import INSTANCES, instance
from kvpatch_jax.errors import ConfigError, KVPatchError
from kvpatch_jax.models import FAMILIES, UnknownKeyWarning, load
from kvpatch_jax.models.families.architectures import find_architecture
from tests.goldens.load import GOLDENS

NAMES = ("llama2", "gemma3_text", "deepseek_v3", "qwen3_moe")
"""A dense decoder, one with layers of two kinds, one with latent attention, one with experts."""
CONFIGS = {name: json.loads((GOLDENS / "text" / f"{name}.json").read_text())["config"] for name in NAMES}
CONFIGS |= {name: json.loads((GOLDENS / name / "config.json").read_text()) for name in ("qwen2_5_vl", "internvl")}
BAD: tuple[Any, ...] = (-1, 0, 1.5, 10**9 + 7, "3", [], ["a"], {}, {"a": 1}, True, None, float("nan"))


def reader(raw: dict[str, Any]) -> Any:
    """What reads a configuration, by its architecture or its model type."""
    types = {family.model_type: family for family in FAMILIES.values()}
    if not raw.get("architectures"):
        return types[raw["model_type"]].config
    return FAMILIES[find_architecture(raw, "config.json")].config


@pytest.fixture(autouse=True)
def _unchecked():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def tables(raw: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of every entry, tables inside tables included."""
    for key, value in raw.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from tables(value, (*path, key))


def changed(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    table = raw
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return raw


@pytest.mark.parametrize("name", CONFIGS)
def test_no_value_of_any_key_gives_an_untyped_error(name):
    """Every key of configurations of each kind, of each kind of nonsense: read, warned about, or refused with a typed
    error.
    """
    raw = CONFIGS[name]
    read = reader(raw)
    for path in tables(raw):
        for value in BAD:
            try:
                config = read(changed(raw, path, value), "exact", None)
            except (KVPatchError, UnknownKeyWarning):
                continue
            except Exception as error:
                pytest.fail(f"{'.'.join(path)} = {value!r}: {type(error).__name__}: {error}")
            assert config.text.layers > 0
            assert config.text.heads > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2.5}, r"num_hidden_layers 2\.5; expected a positive whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1; expected a positive whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads 0; expected a positive whole number"),
        (
            {"num_attention_heads": 65, "num_key_value_heads": 65, "head_dim": None},
            "head_dim: got 0; expected a positive whole number",
        ),
        ({"rope_parameters": None, "rope_scaling": "yarn"}, "rope_scaling 'yarn'; expected a table"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor '2'; expected a number"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear': got no 'factor'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn': got no 'factor'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type: got 'spiral'"),
        ({"layer_types": ["full_attention"]}, "layer_types: got 1 layers; expected num_hidden_layers = 3"),
        ({"attention_sinks": 4}, "got 'attention_sinks': 4, which this library does not know for llama.*take it out"),
        ({"quantization_config": {"bits": 4}}, "got weights quantised by None; expected plain ones: dequantise"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes'; expected true or false"),
        ({"architectures": "LlamaForCausalLM"}, "architectures 'LlamaForCausalLM'; expected a list of names"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama2"], **change}))
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_key_with_a_null_or_without_meaning_for_the_forward_is_passed_over():
    raw = {
        **CONFIGS["llama2"],
        "some_new_key": None,
        "torch_dtype": "float32",
        "_name_or_path": "x",
        "use_cache": False,
    }
    raw |= {"initializer_range": 0.5, "transformers_version": "6"}
    raw = {key: value for key, value in raw.items() if key != "dtype"}
    assert FAMILIES["LlamaForCausalLM"].config(raw, "exact", None).text.layers == 3


def test_every_shipped_and_small_model_is_read():
    """None of the checkpoints that come with the repository has a key that is not known."""
    shipped = sorted((GOLDENS.parents[1] / "evals" / "trained").glob("*/*/config.json"))
    assert shipped
    for path in shipped:
        raw = json.loads(path.read_text())
        assert reader(raw)(raw, "exact", None).text.layers > 0
    for name in INSTANCES:
        assert instance(name).config.text.layers > 0


@pytest.mark.parametrize(("text", "message"), [("[]", "got a list"), ("3", "got a int"), ("{", "is not JSON")])
def test_a_configuration_that_is_no_table(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_directory_without_a_configuration(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"config\.json: got no such file"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="file: got a file; expected its checkpoint directory, or a GGUF file"):
        load(tmp_path / "file")


SLIDING = ["full_attention", "sliding_attention", "sliding_attention"]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_5_vl"])
def test_layers_that_slide_must_have_the_window_switched_on(name):
    """transformers sets the window aside unless `use_sliding_window` is true, and then fails on layers that slide."""
    raw = CONFIGS[name]
    read = reader(raw)
    text = lambda more: (
        {**raw, "text_config": {**raw["text_config"], **more}} if "text_config" in raw else {**raw, **more}
    )
    plain = {"layer_types": None, "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}
    for off in (False, None):
        given = {key: value for key, value in plain.items() if off is False or key != "use_sliding_window"}
        with pytest.raises(ConfigError, match="'sliding_attention' with use_sliding_window False; expected true"):
            read(text(given | {"layer_types": SLIDING}), "exact", None)
    assert read(text(plain), "exact", None).text.window is None
    on = plain | {"use_sliding_window": True}
    assert read(text(on), "exact", None).text.window == 8
    assert read(text(on | {"layer_types": SLIDING}), "exact", None).text.window == 8
    assert read(text(on | {"max_window_layers": 3}), "exact", None).text.window == (8 if name == "qwen3_moe" else None)
