"""OpenGVLab's own InternVL checkpoints (2, 2.5, 3, 3.5): InternViT (300M or 6B) with Qwen2, Qwen3, Llama or InternLM2.

Sources: InternVL's `modeling_internvl_chat.py`, `modeling_intern_vit.py` and `conversation.py`, transformers'
`convert_internvl_weights_to_hf.py`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError

from ..checkpoints import WHOLE, Rule, read_table, split_rows
from ..decoder.hf_config import need
from ..decoder.known_keys import complete
from ..inputs.images import PictureConfig
from ..inputs.qwen_images import CONFIG_FILE, ImageConfig
from ..inputs.tokenizer_files import token_id
from ..inputs.video_frames import VideoConfig
from ..towers.common import QK_NORM_EPSILON
from . import internlm2, internvl
from .authors import AuthorsFormat, Raw, expect
from .internlm2 import as_llama, internlm2_rules
from .vit_family import ViTModelConfig

ARCHITECTURE = "InternVLChatModel"
CONTEXT = "<IMG_CONTEXT>"
TEXTS = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
    internlm2.ARCHITECTURE: "llama",
}
"""`llm_config.architectures` → what transformers calls that text tower."""
SYSTEM = "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"
NEWER_SYSTEM = (
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
)
FORMATS = {
    "Hermes-2": (SYSTEM, "<|im_end|>"),
    "internlm2-chat": (SYSTEM, "<|im_end|>"),
    "internvl2_5": (NEWER_SYSTEM, "<|im_end|>\n"),
}
"""`template` of config.json → the system prompt, and what ends a message."""
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
    expect(vision, "vision_config", norm_type=("layer_norm", "rms_norm"), use_moe=(False, None))
    # The authors' norms of query and key have the layers' epsilon, transformers' one of their own.
    if vision["qk_normalization"]:
        expect(vision, "vision_config", layer_norm_eps=QK_NORM_EPSILON)
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    kept = {name: vision[name] for name in (*sizes, "num_channels", "hidden_act", "layer_norm_eps")}
    switches = {"attention_bias": "qkv_bias", "norm_type": "norm_type", "use_qk_norm": "qk_normalization"}
    return kept | {ours: vision[theirs] for ours, theirs in switches.items()} | {"model_type": "internvl_vision"}


def _text(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"llm_config: got {raw!r}; expected a table")

    (name, *_) = raw.get("architectures") or [None]
    if name not in TEXTS:
        raise ConfigError(f"llm_config: got architecture {name!r}; expected one of {sorted(TEXTS)}")

    text = as_llama(raw) if name == internlm2.ARCHITECTURE else raw
    return {**text, "model_type": TEXTS[name]}


def _rules(config: ViTModelConfig, raw: Raw) -> Sequence[Rule]:
    """Returns what the authors' tensors become; a Qwen or Llama text tower's have transformers' names already."""
    ours, theirs = r"vision_tower.encoder.layer.\1", r"vision_model\.encoder\.layers\.(\d+)"
    width, attention = config.vision.width, rf"{ours}.attention"
    qkv = split_rows(**{part: width for part in "qkv"})
    rules: list[Rule] = [
        (rf"{theirs}\.attn\.qkv\.(\w+)", {rf"{attention}.{part}_proj.\2": piece for part, piece in qkv.items()}),
        (rf"{theirs}\.attn\.proj\.(\w+)", {rf"{attention}.projection_layer.\2": WHOLE}),
        (rf"{theirs}\.attn\.([qk]_norm)\.weight", {rf"{attention}.\2.weight": WHOLE}),
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
    if raw["llm_config"]["architectures"][0] == internlm2.ARCHITECTURE:
        rules += internlm2_rules(config.text, "language_model.")
    return rules


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


def _video(raw: Raw, root: Path) -> VideoConfig:
    """Returns the settings of `load_video` in the authors' model cards: each frame is an image of one tile."""
    images = json.loads(_settings(raw, root).options)
    options = {name: images[name] for name in ("size", "resample", *_IMAGENET)} | {"frames_as_images": True}
    pixels = ImageConfig.from_dict({name: images[name] for name in ("resample", *_IMAGENET)})
    return VideoConfig(pixels, json.dumps(options, sort_keys=True))


def _template(raw: Raw) -> str | None:
    """Returns the conversation format that config.json names, images in front of a newline as in the authors' `chat`.

    Several images are the authors' to name ("Image-1: …"): a message's texts do. Of a video the frames are named.
    """
    if raw.get("template") not in FORMATS:
        return None

    system, end = FORMATS[raw["template"]]
    # Written as JSON, which Jinja reads as its own texts.
    system, end = (json.dumps(text, ensure_ascii=False) for text in (raw.get("system_message") or system, end))
    return (
        "{%- if messages[0]['role'] != 'system' -%}"
        f"{{{{ '<|im_start|>system\n' + {system} + {end} }}}}{{%- endif -%}}"
        "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{%- if message['content'] is string -%}{{ message['content'] }}"
        "{%- else -%}{%- for part in message['content'] -%}"
        f"{{{{ '{CONTEXT}\n' if part['type'] == 'image' else '<video>\n' if part['type'] == 'video' "
        "else part['text'] }}"
        f"{{%- endfor -%}}{{%- endif -%}}{{{{ {end} }}}}{{%- endfor -%}}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )


FORMAT = AuthorsFormat(ARCHITECTURE, "internvl_chat", _config, _rules, _settings, _template, _video)
