"""A checkpoint is the same model under any names of its tensors, those of a user's own family included."""

import functools
import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvpatch_jax import models
from kvpatch_jax.errors import ConfigError, WeightsError
from kvpatch_jax.models.decoder.weights import expert_layout
from tests.goldens.load import GOLDENS, golden_arrays, golden_config, golden_prompt, write_checkpoint

WRITTEN = json.loads((GOLDENS / "namings.json").read_text())
WEIGHTS = "model.safetensors"
Tensors = dict[str, np.ndarray]


def renamed(directory: Path, out: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """The same directory with these tensors."""
    out.mkdir()
    for file in directory.glob("*.json"):
        (out / file.name).write_text(file.read_text())
    save_file(dict(tensors), out / WEIGHTS, metadata={"format": "pt"})
    return out


def as_written(family: str) -> Callable[[Tensors], Tensors]:
    """Renames tensors as transformers wrote them, by its pattern → ours; experts are put together where it did."""
    number, theirs = r"(?<=\.)\d+(?=\.)", {ours: pattern for pattern, ours in WRITTEN[family].items()}

    def rename(tensors: Tensors) -> Tensors:
        patterns = {name: theirs.get(re.sub(number, "#", name)) for name in tensors}
        name_of = lambda name, pattern: pattern.replace("#", "{}").format(*re.findall(number, name))
        out = {name_of(name, pattern): tensors[name] for name, pattern in patterns.items() if pattern is not None}
        return out | (fused(tensors) if "fused" in WRITTEN[family].values() else {})

    return rename


def fused(tensors: Tensors) -> Tensors:
    """The experts of every layer as [E, 2I, D] (gate above up) and [E, D, I]."""
    out: Tensors = {}
    for name in {match[1] for match in map(re.compile(r"(.*\.experts)\.\d+\.").match, tensors) if match}:
        count = sum(other.startswith(f"{name}.") for other in tensors) // 3
        gate, up, down = (
            np.stack([tensors[f"{name}.{number}.{part}_proj.weight"] for number in range(count)])
            for part in ("gate", "up", "down")
        )
        out |= {f"{name}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{name}.down_proj": down}
    return out


def unfused(tensors: Tensors) -> Tensors:
    """The other way round: [E, 2I, D] and [E, D, I] as one tensor per expert."""
    out: Tensors = {}
    for name, value in tensors.items():
        stem, _, part = name.rpartition(".")
        parts = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(part)
        if parts is None:
            out[name] = value
            continue
        for number, expert in enumerate(value):
            halves = zip(parts, np.split(expert, len(parts)), strict=True)
            out |= {f"{stem}.{number}.{half}_proj.weight": rows.copy() for half, rows in halves}
    return out


def turned(tensors: Tensors) -> Tensors:
    """Experts' matrices the other way round."""
    turn = lambda name, value: np.ascontiguousarray(value.swapaxes(1, 2)) if ".experts." in name else value
    return {name: turn(name, value) for name, value in tensors.items()}


def assert_same_model(one: models.ModelBackbone, directory: Path) -> None:
    other = models.load(directory)
    jax.tree.map(np.testing.assert_array_equal, one.parameters, other.parameters)
    assert one.fingerprint == other.fingerprint  # chunks of the one are served to the other


def swap(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {re.sub(f"^{re.escape(old)}", new, name): value for name, value in tensors.items()}


def as_release(tensors: Tensors) -> Tensors:
    """The thinker's tensors among those of a talker and a vocoder."""
    others = ("talker.model.layers.0.self_attn.q_proj.weight", "token2wav.proj.weight", "code2wav.decoder.0.bias")
    return {f"thinker.{name}": value for name, value in tensors.items()} | {
        name: np.ones((2, 2), np.float32) for name in others
    }


def of_ocr2(tensors: Tensors) -> Tensors:
    """DeepSeek-OCR-2's tensors as its authors' files have them."""
    sam, neck = r"vision_tower\.sam_encoder\.", ("conv1", "layer_norm1", "conv2", "layer_norm2")
    rules = {
        rf"{sam}layers\.(\d+)\.layer_norm": r"sam_model.blocks.\1.norm",
        rf"{sam}layers\.": "sam_model.blocks.",
        rf"{sam}patch_embed\.projection": "sam_model.patch_embed.proj",
        **{rf"{sam}neck\.{part}": f"sam_model.neck.{n}" for n, part in enumerate(neck)},
        **{rf"{sam}proj\.conv{n}": f"sam_model.net_{n + 1}" for n in (1, 2)},
        sam: "sam_model.",
        r"vision_tower\.vision_encoder\.": "qwen2_model.model.model.",
        r"vision_tower\.query_(\d+)_resolution": r"qwen2_model.query_\1",
        "multi_modal_projector": "projector.layers",
        "view_separator": "view_seperator",
        r"language_model\.": "",
    }
    rule = lambda name: next((pair for pair in rules.items() if re.search(pair[0], name)), ("", ""))
    return {re.sub(*rule(name), name): value for name, value in tensors.items()}


# What releases and other versions of transformers write: the family, and what it makes of the names in order.
RENAMED = {
    **{f"{family} as modules": (family, as_written(family)) for family in WRITTEN},
    "llava 4": ("llava", swap("vision_tower.", "vision_tower.vision_model.")),
    "llava-next 4": (
        "llava_next", as_written("llava_next"), swap("model.vision_tower.", "model.vision_tower.vision_model.")
    ),
    "qwen2.5-omni released": ("qwen2_5_omni", as_release),
    "qwen3-omni released": ("qwen3_omni", as_release),
    "deepseek-vl 4": ("deepseek_vl", swap("model.vision_model.", "model.vision_model.vision_model.")),
    "deepseek-ocr-2 released": ("deepseek_ocr2", unfused, of_ocr2),
    "qwen3-vl-moe unfused": ("qwen3_vl_moe", unfused),
    "qwen3-vl-moe released": ("qwen3_vl_moe", turned),
}  # fmt: skip


@pytest.mark.parametrize("form", RENAMED)
def test_other_names_are_the_same_model(form, tiny_directory, tiny, tmp_path):
    family, *renames = RENAMED[form]
    tensors = functools.reduce(
        lambda value, rename: rename(value), renames, load_file(tiny_directory(family) / WEIGHTS)
    )
    assert_same_model(tiny(family, "exact"), renamed(tiny_directory(family), tmp_path / "theirs", tensors))


def test_two_names_of_one_tensor_are_refused(tiny_directory, tmp_path):
    directory = tiny_directory("llava")
    tensors = as_written("llava")(load_file(directory / WEIGHTS))
    name = "vision_tower.encoder.layers.1.mlp.fc1.bias"
    tensors[name.replace("vision_tower.", "vision_tower.vision_model.")] = tensors[f"model.{name}"]
    both = rf"tensors '\S+' and '\S+' for '{name}'; expected one of them"
    with pytest.raises(WeightsError, match=both):
        models.load(renamed(directory, tmp_path / "mixed", tensors))


def test_tensors_that_the_model_does_not_read_are_named_once(tiny_directory, tiny, tmp_path):
    directory, ones = tiny_directory("qwen2"), np.ones(3, np.float32)
    names = ("model.layers.1.self_attn.gate.weight", "model.layers.9.mlp.up_proj.weight", "logit_scale")
    others = dict.fromkeys(names, ones)
    other = renamed(directory, tmp_path / "more", load_file(directory / WEIGHTS) | others)
    with pytest.warns(models.UnknownTensorWarning) as warned:
        backbone = models.load(other)
    assert len(warned) == 1
    assert all(repr(name) in str(warned[0].message) for name in others)
    jax.tree.map(np.testing.assert_array_equal, backbone.parameters, tiny("qwen2", "exact").parameters)

    # Names and patterns pass over them; any other is refused.
    models.load(other, ignore=["model.layers.9.*", "model.layers.1.self_attn.gate.weight", "logit_scale"])
    with pytest.warns(models.UnknownTensorWarning, match=r"not read: 'logit_scale'\. "):
        models.load(other, ignore=["model.layers.*"])
    with pytest.raises(ConfigError, match=r"ignore 'no\.such\.\*'"):
        models.load(other, ignore=["no.such.*"])


def test_buffers_and_what_predicts_further_tokens_are_passed_over(tiny_directory, tiny, tmp_path):
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    names += ["mtp.layers.0.mlp.up_proj.weight", "model.mtp.fc.weight", "model.layers.79.eh_proj.weight"]
    names += [f"model.layers.3.{name}.weight" for name in ("eh_proj", "mlp.up_proj", "shared_head.head")]
    tensors = load_file(tiny_directory("deepseek_v3") / WEIGHTS) | {name: np.ones(3, np.float32) for name in names}
    assert_same_model(tiny("deepseek_v3", "exact"), renamed(tiny_directory("deepseek_v3"), tmp_path / "more", tensors))


# --------------------------------------------------------------------------------------------- embeddings and heads


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("stored", ["embedding", "head", "equal", "different"])
def test_a_tied_model_loads_whichever_of_its_tensors_are_stored(stored, tiny_directory, tiny, tmp_path):
    """A head of its own counts though the configuration ties it, as in transformers, and is saved as untied."""
    directory = tiny_directory("llama3_1")
    tensors = load_file(directory / WEIGHTS)
    table = tensors.pop(EMBEDDING)
    other = np.flip(table, 0).copy()
    pair = {
        "embedding": {EMBEDDING: table},
        "head": {HEAD: table},
        "equal": {EMBEDDING: table, HEAD: table},
        "different": {EMBEDDING: table, HEAD: other},
    }
    backbone = models.load(renamed(directory, tmp_path / stored, tensors | pair[stored]))
    np.testing.assert_array_equal(backbone.parameters["decoder"]["embedding"], table)
    assert backbone.config.text.tied_embeddings == (stored != "different")
    if stored != "different":
        assert backbone.fingerprint == tiny("llama3_1", "exact").fingerprint
        return
    saved = models.save(backbone, tmp_path / "saved")
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False
    for untied in (backbone, models.load(saved)):
        np.testing.assert_array_equal(untied.parameters["decoder"]["head"]["kernel"], other.T)


def test_a_head_of_its_own_counts_in_a_family_with_images(tmp_path):
    backbone = models.load(write_checkpoint("llava", tmp_path, tie_word_embeddings=True))
    assert not backbone.config.text.tied_embeddings
    assert backbone.config.to_dict()["tie_word_embeddings"] is False


def test_infinite_bounds_load(tiny_directory, tmp_path):
    """As transformers initialises those of Gemma 4."""
    tensors = load_file(tiny_directory("gemma4") / WEIGHTS)
    bounds = {name for name in tensors if name.endswith(("put_min", "put_max"))}
    assert len(bounds) > 8
    infinite = {name: np.full_like(tensors[name], -np.inf if "_min" in name else np.inf) for name in bounds}
    directory = renamed(tiny_directory("gemma4"), tmp_path / "infinite", tensors | infinite)
    saved = load_file(models.save(models.load(directory), tmp_path / "saved") / WEIGHTS)
    assert all(np.array_equal(saved[name], value) for name, value in infinite.items())


@pytest.mark.parametrize(("width", "inner"), [(8, 4), (8, 8)])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_fused_layouts_are_told_apart_where_one_tensor_is_as_long_as_wide(width, inner, layout):
    changes = {"hidden_size": width, "moe_intermediate_size": inner, "num_local_experts": 3, "head_dim": 4}
    raw = golden_config("qwen3_moe") | changes
    config = models.FAMILIES["Qwen3MoeForCausalLM"].config(raw, "exact", None).text
    rows = {"gate_up_proj": (3, 2 * inner, width), "down_proj": (3, width, inner)}
    shapes = {name: shape if layout == "rows" else (3, shape[2], shape[1]) for name, shape in rows.items()}
    named = {f"model.layers.{layer}.mlp.experts.{name}": shapes[name] for layer in range(3) for name in shapes}
    assert expert_layout(config, named, "model.") == layout


# -------------------------------------------------------------------------------------------------- a user's own family


HOW_TO = Path(__file__).parents[2] / "docs" / "guides" / "extending.md"
PREFIXES = {
    "language_model.model.": "llm.",
    "language_model.lm_head.": "llm.out.",
    "vision_tower.": "eyes.",
    "multi_modal_projector.": "bridge.",
}


@pytest.fixture
def toy(tmp_path):
    """The document's family, imported from a file, which registers itself."""
    (source,) = re.findall(r"^```py\n(.*?)^```$", HOW_TO.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "toy_ocr.py").write_text(source)
    before = dict(models.FAMILIES)
    spec = importlib.util.spec_from_file_location("toy_ocr", tmp_path / "toy_ocr.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    yield module
    models.FAMILIES.clear()
    models.FAMILIES.update(before)


@pytest.fixture
def directory(tmp_path):
    """The tiny Mistral Small 3.1 of the goldens under the toy's names."""
    theirs, ours = write_checkpoint("mistral3", tmp_path / "theirs"), tmp_path / "toy"
    ours.mkdir()
    raw = json.loads((theirs / "config.json").read_text())
    config = {name: raw[name] for name in ("text_config", "vision_config", "spatial_merge_size")}
    config |= {"image_token_id": raw["image_token_index"], "architectures": ["ToyOcrForConditionalGeneration"]}
    (ours / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDENS / "mistral3" / "preprocessor_config.json", ours)
    tensors = load_file(theirs / "model.safetensors")
    names = {name: next(old for old in PREFIXES if name.startswith(old)) for name in tensors}
    renamed = {PREFIXES[old] + name.removeprefix(old): tensors[name] for name, old in names.items()}
    save_file(renamed, ours / "model.safetensors")
    return ours


@pytest.mark.usefixtures("highest_precision")
def test_it_equals_transformers_and_is_saved_and_read_again(toy, directory, tmp_path):
    backbone, gold = models.load(directory, angles="float32"), golden_arrays("mistral3", "two_images")
    assert backbone.family is toy.FAMILY
    inputs = golden_prompt(backbone, "mistral3", "two_images")
    tokens = backbone.embed(inputs.pop("input_ids"), **inputs)
    logits = np.asarray(backbone.prefill(tokens, logits="all").logits)[0, gold["rows"]]
    assert np.abs(logits - gold["logits"]).max() <= 2e-5 * np.abs(gold["logits"]).max()

    again = models.load(models.save(backbone, tmp_path / "again"))
    jax.tree.map(np.testing.assert_array_equal, again.parameters, backbone.parameters)
    assert again.config.to_dict()["model_type"] == "toy_ocr"
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert set(saved) == set(load_file(directory / "model.safetensors"))
