"""InternLM2, alone and before InternViT-6B (InternVL2.5-26B): a transcription of its published code is the oracle.

transformers has no InternLM2. `published` below is written after `modeling_internlm2.py`, from the fused matrices, in
float64; the tiny InternVL whose text tower transformers computes as Llama shows the same from the other side.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from kvpatch_jax.core import to_engine
from kvpatch_jax.errors import ConfigError, WeightsError
from models.families import internvl_chat
from models.families.registry import AUTHORS
from models.inputs.chat import ChatTemplate, template_with_images
from tests.goldens.load import golden_arrays, write_checkpoint
from tests.goldens.redraw import redraw_all
from tests.models.test_authors_formats import as_opengvlab, chat_config
from tests.tolerances import assert_close_to_largest

WEIGHTS = "model.safetensors"
Tensors = dict[str, np.ndarray]
close = functools.partial(assert_close_to_largest, bar=2e-4)
pytestmark = pytest.mark.usefixtures("highest_precision")

CONFIG = {
    "architectures": ["InternLM2ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
    "attn_implementation": "eager",
    "bias": False,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 10,
    "model_type": "internlm2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"factor": 3.0, "type": "dynamic"},
    "rope_theta": 100,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 300,
}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of InternLM2's tensors."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    fused = (heads + 2 * config["num_key_value_heads"]) * (width // heads)
    found: dict[str, tuple[int, ...]]
    found = {name: (config["vocab_size"], width) for name in ("model.tok_embeddings.weight", "output.weight")}
    found["model.norm.weight"] = (width,)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        found |= {f"{start}.{name}.weight": (width,) for name in ("attention_norm", "ffn_norm")}
        found |= {f"{start}.feed_forward.{name}.weight": (inner, width) for name in ("w1", "w3")}
        found[f"{start}.feed_forward.w2.weight"] = (width, inner)
        for name, rows in (("wqkv", fused), ("wo", width)):
            found[f"{start}.attention.{name}.weight"] = (rows, width)
            if config["bias"]:
                found[f"{start}.attention.{name}.bias"] = (rows,)
    return found


def published(config: dict[str, Any], tensors: Tensors, ids: np.ndarray) -> dict[str, np.ndarray]:
    """`InternLM2ForCausalLM.forward` of one prompt [T] from position 0, in float64: logits, and its cache."""
    of = {name: value.astype(np.float64) for name, value in tensors.items()}
    width, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head, groups, count = width // heads, heads // kv, len(ids)

    def rms(x, name):
        return of[name] * (x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]))

    def linear(x, name):
        return x @ of[f"{name}.weight"].T + of.get(f"{name}.bias", 0.0)

    # InternLM2DynamicNTKScalingRotaryEmbedding, at the length of this prompt.
    base, longest, scaling = float(config["rope_theta"]), config["max_position_embeddings"], config["rope_scaling"]
    if scaling is not None and count > longest:
        factor = scaling["factor"]
        base *= ((factor * count / longest) - (factor - 1)) ** (head / (head - 2))
    angles = np.arange(count)[:, None] / base ** (np.arange(0, head, 2) / head)
    cos, sin = (np.concatenate([part, part], -1)[:, None] for part in (np.cos(angles), np.sin(angles)))

    def rotate(x):
        left, right = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-right, left], -1) * sin

    hidden = of["model.tok_embeddings.weight"][ids]
    keys, values = [], []
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        qkv = linear(rms(hidden, f"{start}.attention_norm.weight"), f"{start}.attention.wqkv")
        qkv = qkv.reshape(count, kv, 2 + groups, head)
        query, key, value = qkv[:, :, :groups].reshape(count, heads, head), qkv[:, :, -2], qkv[:, :, -1]
        query, key = rotate(query), rotate(key)
        keys, values = [*keys, key], [*values, value]
        scores = np.einsum("qhd,khd->hqk", query, np.repeat(key, groups, 1)) / np.sqrt(head)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, np.repeat(value, groups, 1)).reshape(count, width)
        hidden = hidden + linear(mixed, f"{start}.attention.wo")
        x = rms(hidden, f"{start}.ffn_norm.weight")
        gate = linear(x, f"{start}.feed_forward.w1")
        inner = gate / (1 + np.exp(-gate)) * linear(x, f"{start}.feed_forward.w3")
        hidden = hidden + linear(inner, f"{start}.feed_forward.w2")

    logits = rms(hidden, "model.norm.weight") @ of["output.weight"].T
    return {"logits": logits, "k": np.stack(keys), "v": np.stack(values)}


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "added_tokens.json").write_text(json.dumps({"<IMG_CONTEXT>": 301}))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, directory / WEIGHTS)
    return directory


@pytest.mark.parametrize(
    ("change", "count"),
    [
        pytest.param({}, 14, id="past its own length, where the base has moved"),
        pytest.param({"bias": True, "rope_scaling": None}, 9, id="with biases, unscaled"),
    ],
)
def test_internlm2_equals_its_published_code(change, count, tmp_path):
    config = CONFIG | change
    tensors = redraw_all(shapes_of(config))
    ids = (np.arange(count) * 37 + 11) % 290
    gold = published(config, tensors, ids)
    regime = count if config["rope_scaling"] else None
    backbone = models.load(write(tmp_path / "internlm2", config, tensors), regime=regime)
    tokens = backbone.embed(ids[None])
    out = backbone.prefill(tokens, logits="all")
    close(out.logits[0], gold["logits"], "logits")
    engine = to_engine(backbone.layout, out.kv, tokens.positions, 0)
    for channel in ("k", "v"):
        close(engine[channel][:, 0], gold[channel], channel)

    saved = models.save(backbone, tmp_path / "saved")
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    again = models.load(saved, regime=regime)
    jax.tree.map(np.testing.assert_array_equal, again.parameters, backbone.parameters)
    assert again.fingerprint == backbone.fingerprint


def test_the_moved_base_shows():
    """The oracle's own check: without the scaling its keys are others."""
    tensors, ids = redraw_all(shapes_of(CONFIG)), np.arange(14)
    moved, plain = (published(CONFIG | {"rope_scaling": scaling}, tensors, ids)["k"][0]
                    for scaling in (CONFIG["rope_scaling"], None))  # fmt: skip
    assert np.abs(moved - plain).max() > 0.1


def test_defaults_are_its_own_and_not_llamas():
    """Biases in attention, and a vocabulary of 103168."""
    config = {key: value for key, value in CONFIG.items() if key not in ("bias", "vocab_size", "rope_scaling")}
    found = models.FAMILIES["LlamaForCausalLM"].config(
        AUTHORS["InternLM2ForCausalLM"].config(config, Path()), "exact", None
    )
    assert (found.text.vocabulary, found.text.attention_bias, found.text.output_bias) == (103168, True, True)
    assert not found.text.mlp_bias


def test_matrices_of_other_sizes_are_refused(tmp_path):
    tensors = redraw_all(shapes_of(CONFIG))
    tensors["model.layers.1.attention.wqkv.weight"] = np.zeros((120, 64), np.float32)
    with pytest.raises(WeightsError, match=r"wqkv.*shape \(120, 64\); expected 128 rows"):
        models.load(write(tmp_path / "internlm2", CONFIG, tensors))


# -------------------------------------------------------------------------------------------- before InternViT-6B


def fused(tensors: Tensors, layers: int = 3) -> Tensors:
    """A Llama text tower's tensors (4 query and 2 KV heads of 16) as InternLM2's, both behind `language_model.`."""
    start, found = "language_model", dict[str, np.ndarray]()
    names = {"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3"}
    names |= {"mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm"}
    names |= {"post_attention_layernorm": "ffn_norm"}
    for layer in range(layers):
        prefix = f"{start}.model.layers.{layer}"
        for ours, theirs in names.items():
            found[f"{prefix}.{theirs}.weight"] = tensors[f"{prefix}.{ours}.weight"]
        query, key, value = (tensors[f"{prefix}.self_attn.{part}_proj.weight"].reshape(-1, 16, 64) for part in "qkv")
        heads = [head for kv in range(2) for head in (query[2 * kv], query[2 * kv + 1], key[kv], value[kv])]
        found[f"{prefix}.attention.wqkv.weight"] = np.concatenate(heads)
    found[f"{start}.model.tok_embeddings.weight"] = tensors[f"{start}.model.embed_tokens.weight"]
    found[f"{start}.model.norm.weight"] = tensors[f"{start}.model.norm.weight"]
    return found | {f"{start}.output.weight": tensors[f"{start}.lm_head.weight"]}


def authors_tower(tensors: Tensors, blocks: int = 2) -> Tensors:
    """InternViT-6B's tensors as OpenGVLab's: norms without biases, norms of query and key, no biases before them."""
    absent = {f"vision_tower.encoder.layer.{layer}.{name}.bias": np.zeros(0, np.float32)
              for layer in range(blocks)
              for name in ("layernorm_before", "layernorm_after", *(f"attention.{part}_proj" for part in "qkv"))
              }  # fmt: skip
    found = as_opengvlab(tensors | absent, blocks)
    for layer in range(blocks):
        for part in ("q_norm", "k_norm"):
            name = f"vision_model.encoder.layers.{layer}.attn.{part}.weight"
            found[name] = tensors[f"vision_tower.encoder.layer.{layer}.attention.{part}.weight"]
    return {name: value for name, value in found.items() if value.size}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny InternVL with InternViT-6B's kind of tower, under transformers' names. Read only."""
    return write_checkpoint("internvl_6b", tmp_path_factory.mktemp("internvl_6b") / "hf")


def authors_config(checkpoint: Path, **vision: Any) -> dict[str, Any]:
    raw = json.loads((checkpoint / "config.json").read_text())
    config = chat_config(raw, "InternLM2ForCausalLM", bias=False, model_type="internlm2")
    for name in ("attention_bias", "mlp_bias", "head_dim"):
        config["llm_config"].pop(name, None)
    config["vision_config"] |= {"norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": False, **vision}
    return config


def test_internvl2_5_26b_in_the_authors_format(checkpoint, tmp_path):
    """InternLM2 and InternViT-6B, as released: transformers' arrays of the same model, Llama there."""
    tensors = load_file(checkpoint / WEIGHTS)
    vision = {name: value for name, value in authors_tower(tensors).items() if not name.startswith("language_model.")}
    directory = write(tmp_path / "chat", authors_config(checkpoint), vision | fused(tensors))
    ours, theirs = models.load(checkpoint), models.load(directory)
    jax.tree.map(np.testing.assert_array_equal, theirs.parameters, ours.parameters)
    assert (theirs.config.vision, theirs.config.text) == (ours.config.vision, ours.config.text)

    gold = golden_arrays("internvl_6b", "one_image")
    tokens = theirs.embed(gold["input_ids"][None], pixel_values=gold["pixel_values"], num_patches=gold["num_patches"])
    close(theirs.prefill(tokens, logits="all").logits[0, gold["rows"]], gold["logits"], "logits")

    again = models.load(models.save(theirs, tmp_path / "saved"))
    jax.tree.map(np.testing.assert_array_equal, again.parameters, theirs.parameters)
    assert again.image_config == theirs.image_config


def test_a_6b_tower_before_qwen2_keeps_the_text_tower(checkpoint, tmp_path):
    """InternVL2.5-38B and -78B, InternVL3-38B and -78B: the same tower, transformers' names behind it."""
    config = authors_config(checkpoint)
    config["llm_config"] |= {"architectures": ["Qwen2ForCausalLM"]}
    del config["llm_config"]["bias"]
    raw = internvl_chat.FORMAT.config(config, write(tmp_path / "chat", config, {"a": np.zeros(1, np.float32)}))
    found = models.FAMILIES["InternVLForConditionalGeneration"].config(raw, "exact", None)
    assert (found.vision.norm_type, found.vision.qk_norm, found.vision.qkv_bias) == ("rms_norm", True, False)
    assert found.text.attention_bias  # Qwen2's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps 1e-05; expected 1e-06"),
        ({"norm_type": "group_norm"}, "norm_type 'group_norm'; expected 'layer_norm' or 'rms_norm'"),
    ],
)
def test_towers_that_are_not_built(change, message, checkpoint, tmp_path):
    config = authors_config(checkpoint, **change)
    with pytest.raises(ConfigError, match=message):
        models.load(write(tmp_path / "chat", config, {"a": np.zeros(1, np.float32)}))


# ----------------------------------------------------------------------------------------------------------- prompts


def get_prompt(system: str, messages: list[tuple[str, str | None]], sep: str) -> str:
    """`Conversation.get_prompt` of OpenGVLab's `conversation.py`, style MPT, transcribed."""
    text = f"<|im_start|>system\n{system}{sep}"
    for role, said in messages:
        text += f"<|im_start|>{role}\n{said}{sep}" if said else f"<|im_start|>{role}\n"
    return text


def template_of(raw: dict[str, Any], directory: Path) -> ChatTemplate | None:
    """What `load` gives a backbone of this configuration."""
    own = internvl_chat.FORMAT.template(raw)
    return template_with_images(ChatTemplate.from_directory(directory), own, directory, "the authors' format")


@pytest.mark.parametrize("name", internvl_chat.FORMATS)
def test_prompts_are_the_authors_conversations(name, tmp_path):
    system, sep = internvl_chat.FORMATS[name]
    template = template_of({"template": name}, tmp_path)
    assert template is not None
    image, text = {"type": "image"}, {"type": "text", "text": "What is this?"}
    asked = [{"role": "user", "content": [image, text]}]
    first = ("user", "<IMG_CONTEXT>\nWhat is this?")
    assert template.render(asked) == get_prompt(system, [first, ("assistant", None)], sep)
    more = [*asked, {"role": "assistant", "content": "A 'page'."}, {"role": "user", "content": "And now?"}]
    whole = [first, ("assistant", "A 'page'."), ("user", "And now?"), ("assistant", None)]
    assert template.render(more) == get_prompt(system, whole, sep)
    assert template.render([{"role": "system", "content": "Short."}, *asked]) == get_prompt(
        "Short.", [first, ("assistant", None)], sep
    )
    own = template_of({"template": name, "system_message": 'Say "yes".'}, tmp_path)
    assert own is not None
    assert own.render(asked) == get_prompt('Say "yes".', [first, ("assistant", None)], sep)


def test_formats_that_are_not_known_leave_the_directorys_template(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "mine"}))
    found = template_of({"template": "phi3-chat"}, tmp_path)
    assert found == ChatTemplate.from_directory(tmp_path)
