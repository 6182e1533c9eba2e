"""OpenGVLab's own InternVL checkpoints (2, 2.5, 3, 3.5): InternViT-300M with Qwen2, Qwen3, Llama or InternLM2.

Sources: InternVL's `modeling_internvl_chat.py`, `modeling_intern_vit.py` and `modeling_internlm2.py`, transformers'
`convert_internvl_weights_to_hf.py`. InternLM2 is Llama with query, key and value fused per KV head.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError

from ..checkpoints import WHOLE, Rule, TensorSelection, read_table, split_rows
from ..decoder.hf_config import need
from ..decoder.known_keys import complete
from ..inputs.images import PictureConfig
from ..inputs.qwen_images import CONFIG_FILE
from ..inputs.tokenizer_files import token_id
from . import internvl
from .authors import AuthorsFormat, Raw, expect
from .vit_family import ViTModelConfig

ARCHITECTURE = "InternVLChatModel"
CONTEXT = "<IMG_CONTEXT>"
INTERNLM2 = "InternLM2ForCausalLM"
TEXTS = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
    INTERNLM2: "llama",
}
"""`llm_config.architectures` → what transformers calls that text tower."""
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def _config(raw: Raw, root: Path) -> dict[str, Any]:
    """Turns the authors' `config.json` into that of transformers' InternVL."""
    model = complete(raw, "internvl_chat")
    expect(model, "config.json", ps_version="v2", pad2square=(False, None), image_fold=None)
    # Adapters that are not merged into the weights.
    expect(model, "config.json", use_backbone_lora=(0, None), use_llm_lora=(0, None))

    vision = _vision(need(model, "vision_config"))
    expect(model, "config.json", force_image_size=(None, vision["image_size"]))

    # Where the configuration does not name the placeholder, the tokenizer's files do.
    image = token_id(root, CONTEXT) if model["img_context_token_id"] is None else model["img_context_token_id"]
    if image is None:
        raise ConfigError(
            f"{root}: got no tokenizer file that names {CONTEXT}, the token in whose place image features are put; "
            "expected it in added_tokens.json, tokenizer_config.json or tokenizer.json, or img_context_token_id in "
            "config.json"
        )

    return {
        "architectures": [internvl.ARCHITECTURE],
        "model_type": "internvl",
        "image_token_id": image,
        "downsample_ratio": model["downsample_ratio"],
        "projector_hidden_act": "gelu",
        "vision_feature_layer": model["select_layer"],
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": bool(model["tie_word_embeddings"]),
        "text_config": _text(need(model, "llm_config")),
        "vision_config": vision,
        **{name: raw[name] for name in ("dtype", "torch_dtype") if raw.get(name) is not None},
    }


def _vision(raw: Any) -> dict[str, Any]:
    vision = complete(raw, "intern_vit_6b", "vision_config")
    expect(vision, "vision_config", norm_type="layer_norm", qk_normalization=False, use_moe=(False, None))
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    kept = {name: vision[name] for name in (*sizes, "num_channels", "hidden_act", "layer_norm_eps")}
    return kept | {"model_type": "internvl_vision", "attention_bias": vision["qkv_bias"]}


def _text(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"llm_config: got {raw!r}; expected a table")

    (name, *_) = raw.get("architectures") or [None]
    if name not in TEXTS:
        raise ConfigError(f"llm_config: got architecture {name!r}; expected one of {sorted(TEXTS)}")

    text = dict(raw)
    if name == INTERNLM2:
        text["attention_bias"] = text.pop("bias", True)
    return text | {"model_type": TEXTS[name]}


def _rules(config: ViTModelConfig, raw: Raw) -> Sequence[Rule]:
    """Returns what the authors' tensors become; a Qwen or Llama text tower's have transformers' names already."""
    ours, theirs = r"vision_tower.encoder.layer.\1", r"vision_model\.encoder\.layers\.(\d+)"
    width, attention = config.vision.width, rf"{ours}.attention"
    qkv = split_rows(**{part: width for part in "qkv"})
    rules: list[Rule] = [
        (rf"{theirs}\.attn\.qkv\.(\w+)", {rf"{attention}.{part}_proj.\2": piece for part, piece in qkv.items()}),
        (rf"{theirs}\.attn\.proj\.(\w+)", {rf"{attention}.projection_layer.\2": WHOLE}),
        (rf"{theirs}\.norm1\.(\w+)", {rf"{ours}.layernorm_before.\2": WHOLE}),
        (rf"{theirs}\.norm2\.(\w+)", {rf"{ours}.layernorm_after.\2": WHOLE}),
        (rf"{theirs}\.ls([12])", {rf"{ours}.lambda_\2": WHOLE}),
        (rf"{theirs}\.mlp\.(.*)", {rf"{ours}.mlp.\2": WHOLE}),
        (r"vision_model\.embeddings\.class_embedding", {"vision_tower.embeddings.cls_token": WHOLE}),
        (r"vision_model\.embeddings\.position_embedding", {"vision_tower.embeddings.position_embeddings": WHOLE}),
        (
            r"vision_model\.embeddings\.patch_embedding\.(\w+)",
            {r"vision_tower.embeddings.patch_embeddings.projection.\1": WHOLE},
        ),
        (r"mlp1\.0\.(\w+)", {r"multi_modal_projector.layer_norm.\1": WHOLE}),
        (r"mlp1\.1\.(\w+)", {r"multi_modal_projector.linear_1.\1": WHOLE}),
        (r"mlp1\.3\.(\w+)", {r"multi_modal_projector.linear_2.\1": WHOLE}),
    ]
    return rules + (_internlm2_rules(config) if raw["llm_config"]["architectures"][0] == INTERNLM2 else [])


def _internlm2_rules(config: ViTModelConfig) -> list[Rule]:
    """Returns what InternLM2's tensors become as Llama's."""
    text, layer = config.text, r"language_model\.model\.layers\.(\d+)"
    ours = r"language_model.model.layers.\1"

    # `wqkv` lies by KV head: its query heads, then its key, then its value.
    heads = {"q": text.heads // text.kv_heads, "k": 1, "v": 1}
    groups = split_rows(text.kv_heads, **{part: count * text.head_dim for part, count in heads.items()})
    names: dict[str, tuple[str, TensorSelection]] = {
        r"attention\.wo\.(\w+)": (r"self_attn.o_proj.\2", WHOLE),
        r"feed_forward\.w1\.(\w+)": (r"mlp.gate_proj.\2", WHOLE),
        r"feed_forward\.w3\.(\w+)": (r"mlp.up_proj.\2", WHOLE),
        r"feed_forward\.w2\.(\w+)": (r"mlp.down_proj.\2", WHOLE),
        r"attention_norm\.(\w+)": (r"input_layernorm.\2", WHOLE),
        r"ffn_norm\.(\w+)": (r"post_attention_layernorm.\2", WHOLE),
    }
    qkv = {rf"{ours}.self_attn.{part}_proj.\2": piece for part, piece in groups.items()}
    return [
        (rf"{layer}\.attention\.wqkv\.(\w+)", qkv),
        *((rf"{layer}\.{theirs}", {f"{ours}.{name}": piece}) for theirs, (name, piece) in names.items()),
        (r"language_model\.model\.tok_embeddings\.weight", {"language_model.model.embed_tokens.weight": WHOLE}),
        (r"language_model\.output\.weight", {"language_model.lm_head.weight": WHOLE}),
    ]


def _settings(raw: Raw, root: Path) -> PictureConfig:
    """Returns the tiles of `dynamic_preprocess` in the authors' examples, with the number of tiles of `config.json`."""
    # The mean and deviation are ImageNet's, unlike transformers' processor, which has CLIP's.
    model, side = complete(raw, "internvl_chat"), _vision(raw["vision_config"])["image_size"]
    tiles = model["max_dynamic_patch"] if model["dynamic_image_size"] else 1
    # The whole image follows its tiles.
    if tiles > 1:
        expect(model, "config.json", use_thumbnail=True)
    options = {"size": {"height": side, "width": side}, "crop_to_patches": tiles > 1, "resample": 3}
    options |= {"min_patches": model["min_dynamic_patch"], "max_patches": tiles, **_IMAGENET}
    given = read_table(root / CONFIG_FILE)
    return PictureConfig.from_dict(options | {name: given[name] for name in _IMAGENET if given.get(name)})


FORMAT = AuthorsFormat(ARCHITECTURE, "internvl_chat", _config, _rules, _settings)
