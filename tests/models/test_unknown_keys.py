"""Keys of `config.json` that this library does not know: refused, warned about once, or passed over by name."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from kvpatch_jax.errors import ConfigError, WeightsError
from kvpatch_jax.models import FAMILIES, UnknownKeyWarning, load
from kvpatch_jax.models.decoder.key_tables import AUTHORS
from kvpatch_jax.models.decoder.known_keys import DEFAULTS, class_keys, may_change
from kvpatch_jax.models.families.architectures import find_architecture
from tests.goldens.load import GOLDENS

TEXTS = GOLDENS / "text"
RELEASED = Path(__file__).parent / "released"


def written(root: Path, config: dict[str, Any]) -> Path:
    """A directory with this `config.json`, image settings, and nothing else."""
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    (root / "preprocessor_config.json").write_text("{}")
    return root


def text(name: str) -> dict[str, Any]:
    return json.loads((TEXTS / f"{name}.json").read_text())["config"]


def released(name: str) -> dict[str, Any]:
    return json.loads((RELEASED / f"{name}.json").read_text())


def warned_by(directory: Path, **options: Any) -> list[warnings.WarningMessage]:
    """What `load` warns of before it finds no weights."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(WeightsError, match="safetensors"):
            load(directory, **options)
    return found


# ------------------------------------------------------------------------------------------------ what nothing reads


@pytest.mark.parametrize("name", ["llama2", "qwen3_moe"])  # the second reads its table twice
def test_a_key_that_nothing_reads_is_warned_about_once_and_by_name(name, tmp_path):
    directory = written(tmp_path, text(name) | {"unsloth_fixed": True, "model_name": "someone/else"})
    found = warned_by(directory)
    assert [warning.category for warning in found] == [UnknownKeyWarning] * 2
    first, second = (str(warning.message) for warning in found)
    assert first.startswith(f"{directory / 'config.json'} (the text part of config.json): got 'unsloth_fixed': True")
    assert "got 'model_name': 'someone/else'" in second


# ------------------------------------------------------------------------------------------ what may change the model


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),  # Gemma 2's
        ("residual_multiplier", 0.22),  # Granite's
        ("is_causal", False),  # gte-Qwen2's own code
        ("num_kv_shared_layers", 4),  # Gemma 3n's
        ("use_mla", True),
        ("causal_attn", False),
        ("some_tower_config", {"layers": 3}),
        ("debug", True),
    ],
)
def test_a_key_that_some_class_reads_is_refused(key, value, tmp_path):
    """Whatever the architecture says: a file may bring code of its own."""
    with pytest.raises(ConfigError, match=rf"got '{key}': .*does not know for llama and which may change.*ignore="):
        load(written(tmp_path, text("llama2") | {key: value}))


def test_every_key_of_every_class_that_is_read_is_among_them():
    """The list is parsed from files; what the classes themselves give when they run is in it."""
    classes = json.loads((GOLDENS / "sparse" / "class_defaults.json").read_text())
    for kind, table in classes.items():
        missing = {key for key in set(table) - class_keys() if not key.startswith("_")}
        assert not missing, (kind, missing)


def test_authors_own_formats_are_read_strictly(tmp_path):
    """No class of transformers reads them, so nothing says that a switch which is on does nothing."""
    assert {"kimi_vl", "moonvit", "phi3_v"} <= AUTHORS <= set(DEFAULTS)
    for kind in AUTHORS:
        assert may_change(kind, "some_new_switch", True)
        assert not may_change(kind, "some_new_switch", False)


# --------------------------------------------------------------------------------------------------------- ignore


@pytest.mark.parametrize("key", ["final_logit_softcapping", "unsloth_fixed", "use_cache", "debug"])
def test_a_key_that_is_passed_over_is_read_in_silence(key, tmp_path):
    directory = written(tmp_path, text("llama2") | {key: True})
    assert warned_by(directory, ignore=[key]) == []


@pytest.mark.parametrize("key", ["num_hidden_layers", "attention_bias", "hidden_act"])
def test_a_key_that_is_read_cannot_be_passed_over(key, tmp_path):
    with pytest.raises(ConfigError, match=f"load: got ignore '{key}', which is read for llama"):
        load(written(tmp_path, text("llama2") | {"hidden_act": "silu"}), ignore=[key])


def test_a_name_that_is_not_in_the_file_is_refused(tmp_path):
    directory = written(tmp_path, text("llama2") | {"unsloth_fixed": True})
    with pytest.raises(ConfigError, match=r"load: got ignore 'unsloth', which .*config\.json does not have"):
        load(directory, ignore=["unsloth_fixed", "unsloth"])
    with pytest.raises(ConfigError, match="got ignore 'unsloth_fixed'; expected a list of keys"):
        load(directory, ignore="unsloth_fixed")


# ------------------------------------------------------------------------------------------------- architectures


def test_an_alias_is_read_as_what_it_stands_for(tmp_path):
    raw = text("llama2") | {"architectures": ["LLaMAForCausalLM"]}
    assert find_architecture(raw, "config.json") == "LlamaForCausalLM"
    assert warned_by(written(tmp_path, raw)) == []


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("Qwen2_5_VLForConditionalGenerationWithHead", "Qwen2_5_VLForConditionalGeneration"),
        ("InternVLForConditionalGenerationModel", "InternVLForConditionalGeneration"),
        ("Zzz", None),
    ],
)
def test_an_unknown_architecture_lists_the_known_ones_and_the_nearest(given, nearest, tmp_path):
    with pytest.raises(ConfigError) as refused:
        load(written(tmp_path, text("llama2") | {"architectures": [given]}))
    message = str(refused.value)
    listed = message[message.index("expected one of [") + 17 : message.index("]", message.index("expected one of"))]
    names = [name.strip("' ") for name in listed.split(",")]
    assert names == sorted(names)
    assert set(FAMILIES) == set(names)
    assert message.endswith(f"; the nearest is {nearest!r}") if nearest else "nearest" not in message
