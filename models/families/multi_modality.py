"""DeepSeek's own DeepSeek-VL-1.3B checkpoints: timm's SigLIP, two linear maps, Llama.

Sources: DeepSeek-VL's `modeling_vlm.py`, `clip_encoder.py`, `siglip_vit.py` and `image_processing_vlm.py`. The 7B (two
towers) is not built, and Janus' further parts are not known.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError

from ..checkpoints import WHOLE, Rule, TensorSelection, read_table, split_rows
from ..decoder.hf_config import need
from ..decoder.known_keys import complete
from ..inputs.images import CLIP_MEAN, CLIP_STD, PictureConfig
from ..inputs.qwen_images import CONFIG_FILE
from ..inputs.tokenizer_files import token_id
from . import deepseek_vl
from .authors import AuthorsFormat, Raw, expect
from .vit_family import ViTModelConfig

ARCHITECTURE = "MultiModalityCausalLM"
PLACEHOLDER = "<image_placeholder>"
TOWERS = {
    "siglip_large_patch16_384": (1024, 4096, 24, 16, 16),
    "siglip_so400m_patch14_384": (1152, 4304, 27, 16, 14),
    "siglip_so400m_patch14_224": (1152, 4304, 27, 16, 14),
}
"""Width, inner width, blocks, heads and patch of the towers that `model_name` may be."""


def _config(raw: Raw, root: Path) -> dict[str, Any]:
    """Turns the authors' `config.json` into that of transformers' DeepSeek-VL."""
    model = complete(raw, "multi_modality")
    parts = {name: need(model, name) for name in ("vision_config", "aligner_config", "language_config")}

    # The parts name the authors' classes: others are other models.
    expect(parts["vision_config"], "vision_config", cls="CLIPVisionTower")
    expect(parts["aligner_config"], "aligner_config", cls="MlpProjector")
    vision = _vision(need(parts["vision_config"], "params"))
    text = dict(parts["language_config"]) | {"model_type": parts["language_config"].get("model_type", "llama")}

    glue = need(parts["aligner_config"], "params")
    expect(glue, "aligner_config", projector_type="mlp_gelu", depth=2, input_dim=(vision["hidden_size"], None))
    expect(glue, "aligner_config", n_embed=(text.get("hidden_size", 4096), None))

    # Where no file names the placeholder, transformers' default for this model holds.
    found = token_id(root, PLACEHOLDER)
    return {
        "architectures": [deepseek_vl.ARCHITECTURE],
        "model_type": "deepseek_vl",
        **({} if found is None else {"image_token_id": found}),
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
        "text_config": text,
        "vision_config": vision,
        **{name: raw[name] for name in ("dtype", "torch_dtype") if raw.get(name) is not None},
    }


def _vision(params: Any) -> dict[str, Any]:
    """Returns the tower as timm builds it: its own GELU (not the approximation of transformers' SigLIP), norms with
    1e-6.
    """
    if not isinstance(params, dict):
        raise ConfigError(f"vision_config: got params {params!r}; expected a table")

    known = {"model_name", "image_size", "select_feature", "select_layer", "ckpt_path", "select_layers"}
    unknown = sorted(key for key in set(params) - known if params[key] is not None)
    if unknown:
        raise ConfigError(
            f"vision_config: got {unknown[0]} {params[unknown[0]]!r}, which is not built; expected {sorted(known)}"
        )

    expect(params, "vision_config", model_name=tuple(TOWERS), select_layer=-1, select_layers=None)
    width, inner, depth, heads, patch = TOWERS[params["model_name"]]
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "image_size": need(params, "image_size"),
        "patch_size": patch,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "vision_use_head": False,
    }


def _rules(config: ViTModelConfig, raw: Raw) -> Sequence[Rule]:
    """Returns what the authors' tensors become."""
    theirs, tower = r"vision_model\.vision_tower", "model.vision_model"
    block, ours = rf"{theirs}\.blocks\.(\d+)", rf"{tower}.encoder.layers.\1"
    qkv = split_rows(**{part: config.vision.width for part in "qkv"})
    return [
        (rf"{block}\.attn\.qkv\.(\w+)", {rf"{ours}.self_attn.{part}_proj.\2": piece for part, piece in qkv.items()}),
        (rf"{block}\.attn\.proj\.(\w+)", {rf"{ours}.self_attn.out_proj.\2": WHOLE}),
        (rf"{block}\.norm([12])\.(\w+)", {rf"{ours}.layer_norm\2.\3": WHOLE}),
        (rf"{block}\.mlp\.(.*)", {rf"{ours}.mlp.\2": WHOLE}),
        (rf"{theirs}\.pos_embed", {f"{tower}.embeddings.position_embedding.weight": TensorSelection(lead=True)}),
        (rf"{theirs}\.patch_embed\.proj\.(\w+)", {rf"{tower}.embeddings.patch_embedding.\1": WHOLE}),
        (rf"{theirs}\.norm\.(\w+)", {rf"{tower}.post_layernorm.\1": WHOLE}),
        # The authors' forward leaves the pooling head out too.
        (rf"{theirs}\.attn_pool\..*", {}),
        (r"aligner\.layers\.0\.(\w+)", {r"model.aligner.linear1.\1": WHOLE}),
        (r"aligner\.layers\.2\.(\w+)", {r"model.aligner.linear2.\1": WHOLE}),
        (r"language_model\.model\.(.*)", {r"model.language_model.\1": WHOLE}),
        (r"language_model\.lm_head\.weight", {"lm_head.weight": WHOLE}),
    ]


def _settings(raw: Raw, root: Path) -> PictureConfig:
    given = read_table(root / CONFIG_FILE)
    side = given.get("image_size", raw["vision_config"]["params"]["image_size"])
    options = {"size": {"height": side, "width": side}, "min_size": 14, "resample": 3, "round_down": True}
    options |= {"image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD)}
    kept = ("min_size", "image_mean", "image_std", "rescale_factor", "do_normalize")
    return PictureConfig.from_dict(options | {name: given[name] for name in kept if given.get(name) is not None})


FORMAT = AuthorsFormat(ARCHITECTURE, "multi_modality", deepseek_vl.FAMILY, _config, _rules, _settings)
