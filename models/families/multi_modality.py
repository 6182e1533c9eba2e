"""DeepSeek's own DeepSeek-VL checkpoints: timm's SigLIP (1.3B), or SAM beside it (7B), and Llama.

Sources: DeepSeek-VL's `modeling_vlm.py`, `clip_encoder.py`, `siglip_vit.py`, `sam.py`, `projector.py`,
`image_processing_vlm.py` and `conversation.py`. Janus' further parts are not known.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError

from ..checkpoints import WHOLE, Rule, TensorSelection, read_table, split_rows
from ..decoder.hf_config import need
from ..decoder.known_keys import complete
from ..inputs.images import CLIP_MEAN, CLIP_STD, PictureConfig
from ..inputs.qwen_images import CONFIG_FILE
from ..inputs.tokenizer_files import token_id
from . import deepseek_vl, deepseek_vl_hybrid
from .authors import AuthorsFormat, Raw, expect

ARCHITECTURE = "MultiModalityCausalLM"
PLACEHOLDER = "<image_placeholder>"
HYBRID = "HybridVisionTower"
TOWERS = {
    "siglip_large_patch16_384": (1024, 4096, 24, 16, 16),
    "siglip_so400m_patch14_384": (1152, 4304, 27, 16, 14),
    "siglip_so400m_patch14_224": (1152, 4304, 27, 16, 14),
}
"""Width, inner width, blocks, heads and patch of the towers that `model_name` may be."""
SAM_TOWERS = {"sam_b_downsample": {}}
"""Keys of the large image's tower that `model_name` may be, where they are not those of transformers' SAM class."""
_MEAN, _STD = "pixel_mean", "pixel_std"
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- set role = message['role'] | lower -%}"
    "{%- set said = namespace(text='') -%}"
    "{%- if message['content'] is string -%}{%- set said.text = message['content'] -%}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- set said.text = said.text + ('" + PLACEHOLDER + "' if part['type'] == 'image' else part['text']) -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if loop.first and role != 'system' -%}{{ 'You are a helpful language and vision assistant. You are able to "
    "understand the visual content that the user provides, and assist the user with a variety of tasks using natural "
    "language.\n\n' }}{%- endif -%}"
    "{%- if role == 'system' -%}{{ said.text + '\n\n' }}"
    "{%- elif role == 'user' -%}{{ 'User: ' + said.text | trim + '\n\n' }}"
    "{%- elif role == 'assistant' -%}{{ 'Assistant: ' + said.text | trim + '<｜end▁of▁sentence｜>' }}"
    "{%- else -%}{{ raise_exception('no role ' + message['role']) }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}"
)
"""The format "deepseek" of `conversation.py`, with the processor's system prompt."""


def _config(raw: Raw, root: Path) -> dict[str, Any]:
    """Turns the authors' `config.json` into that of transformers' DeepSeek-VL, of one tower or of two."""
    model = complete(raw, "multi_modality")
    parts = {name: need(model, name) for name in ("vision_config", "aligner_config", "language_config")}

    # The parts name the authors' classes: others are other models.
    expect(parts["vision_config"], "vision_config", cls=("CLIPVisionTower", HYBRID))
    expect(parts["aligner_config"], "aligner_config", cls="MlpProjector")
    text = dict(parts["language_config"]) | {"model_type": parts["language_config"].get("model_type", "llama")}
    params, glue = (need(parts[name], "params") for name in ("vision_config", "aligner_config"))

    if _is_hybrid(raw):
        small, large = _towers(params)
        towers = {"vision_config": _vision(small, _OF_TWO), "high_res_vision_config": _sam(large)}
        kind, model_type = deepseek_vl_hybrid.ARCHITECTURE, "deepseek_vl_hybrid"
        expect(glue, "aligner_config", projector_type="low_high_hybrid_split_mlp_gelu")
    else:
        towers = {"vision_config": _vision(params, _KNOWN)}
        kind, model_type = deepseek_vl.ARCHITECTURE, "deepseek_vl"
        expect(glue, "aligner_config", projector_type="mlp_gelu")

    width = towers["vision_config"]["hidden_size"]
    expect(glue, "aligner_config", depth=2, input_dim=(width, None), n_embed=(text.get("hidden_size", 4096), None))

    # Where no file names the placeholder, transformers' default for this model holds.
    found = token_id(root, PLACEHOLDER)
    return {
        "architectures": [kind],
        "model_type": model_type,
        **({} if found is None else {"image_token_id": found}),
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
        "text_config": text,
        **towers,
        **{name: raw[name] for name in ("dtype", "torch_dtype") if raw.get(name) is not None},
    }


def _is_hybrid(raw: Raw) -> bool:
    return raw["vision_config"].get("cls") == HYBRID


def _towers(params: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns the tables of the small image's tower and of the large one's.

    Raises:
      ConfigError: features that are put together in another way, or towers that are not given.
    """
    _refuse_unknown(params, {"concat_type", "freeze_high", "freeze_low", "high_res_cfg", "low_res_cfg"})
    expect(params, "vision_config", concat_type=("tuple", None))
    small, large = need(params, "low_res_cfg"), need(params, "high_res_cfg")
    for name, tower in (("low_res_cfg", small), ("high_res_cfg", large)):
        if not isinstance(tower, dict) or not tower.get(_MEAN) or not tower.get(_STD):
            raise ConfigError(f"vision_config.{name}: got {tower!r:.80}; expected a table with {_MEAN} and {_STD}")
    return small, large


def _refuse_unknown(params: Any, known: set[str]) -> None:
    if not isinstance(params, dict):
        raise ConfigError(f"vision_config: got params {params!r}; expected a table")
    unknown = sorted(key for key in set(params) - known if params[key] is not None)
    if unknown:
        raise ConfigError(
            f"vision_config: got {unknown[0]} {params[unknown[0]]!r}, which is not built; expected {sorted(known)}"
        )


_KNOWN = {"model_name", "image_size", "select_feature", "select_layer", "ckpt_path", "select_layers"}
_OF_TWO = _KNOWN | {"output_dim", _MEAN, _STD}
"""What the tables of two towers may hold; each tower's mean and deviation are the image settings'."""


def _vision(params: Any, known: set[str]) -> dict[str, Any]:
    """Returns the tower as timm builds it: its own GELU (not the approximation of transformers' SigLIP), norms with
    1e-6.
    """
    _refuse_unknown(params, known)
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


def _sam(params: Any) -> dict[str, Any]:
    """Returns the large image's tower: the sizes of transformers' class are those of SAM-B."""
    _refuse_unknown(params, _OF_TWO)
    expect(params, "vision_config", model_name=tuple(SAM_TOWERS), select_feature="same", select_layers=None)
    sizes = {"model_type": "sam_vision_model", "image_size": need(params, "image_size")}
    return sizes | SAM_TOWERS[params["model_name"]]


def _rules(config: Any, raw: Raw) -> Sequence[Rule]:
    """Returns what the authors' tensors become."""
    model = r"language_model\.model\.(.*)", {r"model.language_model.\1": WHOLE}
    rules: list[Rule] = [model, (r"language_model\.lm_head\.weight", {"lm_head.weight": WHOLE})]
    aligner = "model.aligner"
    if not _is_hybrid(raw):
        return [
            *rules,
            *_siglip_rules(r"vision_model\.vision_tower", config.vision.width),
            (r"aligner\.layers\.0\.(\w+)", {rf"{aligner}.linear1.\1": WHOLE}),
            (r"aligner\.layers\.2\.(\w+)", {rf"{aligner}.linear2.\1": WHOLE}),
        ]

    return [
        *rules,
        *_siglip_rules(r"vision_model\.vision_tower_low\.vision_tower", config.vision.width),
        *_sam_rules(r"vision_model\.vision_tower_high\.vision_tower"),
        # The authors' forward leaves the norms out.
        (r"vision_model\.(high|low)_layer_norm\..*", {}),
        (r"aligner\.low_up_proj\.(\w+)", {rf"{aligner}.vision_proj.\1": WHOLE}),
        (r"aligner\.high_up_proj\.(\w+)", {rf"{aligner}.high_res_vision_proj.\1": WHOLE}),
        (r"aligner\.layers\.1\.(\w+)", {rf"{aligner}.proj.\1": WHOLE}),
    ]


def _siglip_rules(theirs: str, width: int) -> list[Rule]:
    tower = "model.vision_model"
    block, ours = rf"{theirs}\.blocks\.(\d+)", rf"{tower}.encoder.layers.\1"
    qkv = split_rows(**dict.fromkeys("qkv", width))
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
    ]


def _sam_rules(theirs: str) -> list[Rule]:
    large = "model.high_res_vision"
    ours = f"{large}_model.vision_encoder"
    rules: list[Rule] = [
        (rf"{theirs}\.pos_embed", {f"{ours}.pos_embed": WHOLE}),
        (rf"{theirs}\.patch_embed\.proj\.(\w+)", {rf"{ours}.patch_embed.projection.\1": WHOLE}),
        (rf"{theirs}\.blocks\.(\d+)\.norm([12])\.(\w+)", {rf"{ours}.layers.\1.layer_norm\2.\3": WHOLE}),
        (rf"{theirs}\.blocks\.(\d+)\.(attn|mlp)\.(.*)", {rf"{ours}.layers.\1.\2.\3": WHOLE}),
        (rf"{theirs}\.downsamples\.0\.weight", {f"{large}_proj.conv1.weight": WHOLE}),
        (rf"{theirs}\.downsamples\.1\.weight", {f"{large}_proj.conv2.weight": WHOLE}),
        (rf"{theirs}\.hd_alpha_downsamples", {f"{large}_alpha": WHOLE}),
    ]
    for neck, name in ((r"neck", f"{ours}.neck"), (r"neck_hd", f"{large}_neck")):
        for number, part in enumerate(("conv1", "layer_norm1", "conv2", "layer_norm2")):
            rules.append((rf"{theirs}\.{neck}\.{number}\.(\w+)", {rf"{name}.{part}.\1": WHOLE}))
    return rules


def _settings(raw: Raw, root: Path) -> PictureConfig:
    given, params = read_table(root / CONFIG_FILE), raw["vision_config"]["params"]
    kept = {name: given[name] for name in ("min_size", "rescale_factor") if given.get(name) is not None}
    options = {"min_size": 14, "round_down": True, **kept}
    if not _is_hybrid(raw):
        side = given.get("image_size", params["image_size"])
        options |= {"size": {"height": side, "width": side}, "resample": 3}
        options |= {"image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD)}
        kept = ("image_mean", "image_std", "do_normalize")
        return PictureConfig.from_dict(options | {name: given[name] for name in kept if given.get(name) is not None})

    # The processor pads with its own mean colour, and each tower normalises for itself: not the processor as well.
    small, large = _towers(params)
    expect({"do_normalize": True} | given, CONFIG_FILE, do_normalize=False)
    expect({"image_mean": list(CLIP_MEAN)} | given, CONFIG_FILE, image_mean=list(large[_MEAN]))
    expect({"image_size": large["image_size"]} | given, CONFIG_FILE, image_size=large["image_size"])
    for prefix, tower in (("", small), ("high_res_", large)):
        side = tower["image_size"]
        options |= {f"{prefix}size": {"height": side, "width": side}}
        options |= {f"{prefix}image_mean": list(tower[_MEAN]), f"{prefix}image_std": list(tower[_STD])}
    # The small image is made of the large one's numbers, by torch's antialiased bilinear filter.
    return PictureConfig.from_dict(options | {"high_res_resample": 3, "resample": 2, "resize_in_float": True})


def _template(raw: Raw) -> str:
    return TEMPLATE


FORMAT = AuthorsFormat(ARCHITECTURE, "multi_modality", _config, _rules, _settings, _template)
