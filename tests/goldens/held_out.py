"""Ten further settings of every family, chosen by chance once: options that `table.py`'s tiny models do not have.

Each family has axes, lists of changes to its configuration that are legal together; setting n takes one change of each.
"""

import copy
from typing import Any

import numpy as np

try:
    from table import FAMILIES, PINPOINTS, Picture, Row, kinds, merged
except ImportError:
    from tests.goldens.table import FAMILIES, PINPOINTS, Picture, Row, kinds, merged

COUNT = 10


def each(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def heads(*shapes: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Query heads, KV heads and width: heads divide the width where the class has no `head_dim`."""
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size")
    return [dict(zip(names, shape, strict=True)) for shape in shapes]


PLAIN = heads((4, 2, 64), (3, 1, 48), (5, 5, 80), (6, 3, 96), (4, 1, 64), (6, 2, 48))
EQUAL = heads((4, 4, 64), (3, 3, 48), (5, 5, 80), (6, 6, 96), (2, 2, 64))
WIDTHS = each("head_dim", 16, 24, 8, 32)
INNER = each("intermediate_size", 96, 40, 136)
EPSILON = each("rms_norm_eps", 1e-6, 1e-5, 1e-3)
TIED = each("tie_word_embeddings", False, True)
LAYERS = each("num_hidden_layers", 1, 2, 4)
ACTIVATION = each("hidden_act", "silu", "gelu", "gelu_pytorch_tanh")
COMMON = [INNER, EPSILON]


def ropes(*more: dict[str, Any], theta: float = 1e2, **fixed: Any) -> list[dict[str, Any]]:
    return [{"rope_parameters": {"rope_type": "default", "rope_theta": theta, **fixed, **one}} for one in ({}, *more)]


LINEAR_ROPE = {"rope_type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
FAR = {"rope_theta": 1e6}
ROPES = ropes(LINEAR_ROPE, YARN, YARN | {"attention_factor": 1.3, "beta_fast": 8}, LLAMA3, FAR)
LATENTS = [
    [{"kv_lora_rank": 24, "q_lora_rank": 20}, {"kv_lora_rank": 32, "q_lora_rank": None}, {"kv_lora_rank": 16}],
    [{"qk_rope_head_dim": 8, "qk_nope_head_dim": 12}, {"qk_rope_head_dim": 16}, {"v_head_dim": 20}, {"v_head_dim": 8}],
    [
        {"n_routed_experts": 12, "n_group": 3, "topk_group": 2},
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4},
        {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    ],
    [{"first_k_dense_replace": 0}, {"first_k_dense_replace": 2}, {"n_shared_experts": 1, "norm_topk_prob": False}],
]
EXPERTS = [each("num_experts", 5, 8), each("num_experts_per_tok", 1, 3), each("norm_topk_prob", False, True)]
WINDOWS = [{}, {"sliding_window": 3}, {"sliding_window": 9}]
QWEN_WINDOWS = [{}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}]
GEMMA_WINDOWS = [{"sliding_window": size, "layer_types": kinds(3, *full)} for size, full in ((4, (0,)), (9, (1, 2)))]
GEMMA = [*heads((4, 2, 64), (6, 3, 48), (3, 1, 48)), {"head_dim": 8}]
SHARES = ropes({"partial_rotary_factor": 1.0}, {"partial_rotary_factor": 0.25}, partial_rotary_factor=0.5)
SHARING = [each("num_kv_shared_layers", 0, 2), each("use_double_wide_mlp", False, True), each("sliding_window", 3, 8)]
CAPS = [{}, {"final_logit_softcapping": 5.0}]
DELTA = [
    [
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    ],
    [{"linear_key_head_dim": 16, "linear_value_head_dim": 8}, {"linear_key_head_dim": 4}],
    each("linear_conv_kernel_dim", 2, 3, 5),
    [{"num_attention_heads": 6, "num_key_value_heads": 3}, {"num_key_value_heads": 1}],
    [{"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}, {}],
    TIED,
    EPSILON,
]
TEXTS = {
    "llama2": [PLAIN, ROPES, TIED, LAYERS, ACTIVATION, each("attention_bias", False, True), *COMMON],
    "mistral": [PLAIN, WIDTHS, WINDOWS, TIED, ropes(LINEAR_ROPE, FAR), *COMMON],
    "qwen2": [PLAIN, QWEN_WINDOWS, TIED, ROPES, LAYERS, *COMMON],
    "qwen3": [PLAIN, WIDTHS, QWEN_WINDOWS, each("attention_bias", False, True), ROPES, *COMMON],
    "qwen3_moe": [PLAIN, WIDTHS, *EXPERTS, TIED, [{}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}], *COMMON],
    "glm": [heads((4, 2, 64), (3, 1, 48), (6, 2, 96)), each("head_dim", 16, 24), TIED, LAYERS, SHARES, *COMMON],
    "glm4": [GEMMA[:3], each("head_dim", 16, 24), each("attention_bias", False, True), SHARES, *COMMON],
    "gemma3_text": [
        GEMMA,
        GEMMA_WINDOWS,
        CAPS,
        each("query_pre_attn_scalar", 7, 256),
        each("head_dim", 12, 24),
        *COMMON,
    ],
    "gemma4_text": [GEMMA[:2], CAPS, each("hidden_size_per_layer_input", 4, 12), *SHARING, *COMMON],
    "phi3_short": [heads((4, 2, 64), (4, 4, 64), (4, 1, 64)), TIED, LAYERS, WINDOWS, *COMMON],
    "deepseek_v2": [heads((4, 4, 64), (3, 3, 48), (5, 5, 80)), *LATENTS[:3], LATENTS[3][:2], ropes(FAR), *COMMON],
    "deepseek_v3": [heads((4, 4, 64), (3, 3, 48), (5, 5, 80)), *LATENTS, each("attention_bias", False, True), *COMMON],
    "qwen3_next": [*DELTA, *EXPERTS[:2], each("norm_topk_prob", True), each("shared_expert_intermediate_size", 12, 32)],
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": [*DELTA, *EXPERTS[:2], each("shared_expert_intermediate_size", 12, 32)],
}


def inner(part: str, *axes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[{part: change} for change in axis] for axis in axes]


def mrope(part: list[int], width: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 30.0, "mrope_section": part, **more}
    return {"head_dim": width, "rope_parameters": rope}


TOWER_HEADS = [{"hidden_size": 32, "num_attention_heads": 4}, {"hidden_size": 48, "num_attention_heads": 3}, {}]
QWEN_HEADS = [{"hidden_size": 32, "num_heads": 4}, {"hidden_size": 48, "num_heads": 3}, {}]
FLAT = [{"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {"intermediate_size": 40}, {"layer_norm_eps": 1e-4}]
DEPTH = [{"depth": 2}, {"depth": 5}, {"intermediate_size": 40}]
SAME = each("num_attention_heads", 4, 2) + each("intermediate_size", 40, 136)
FEW = [{"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"num_key_value_heads": 2, "num_hidden_layers": 2}]
OWN = inner("text_config", FEW, EPSILON, INNER)
BASE = inner("text_config", EPSILON, INNER, LAYERS) + inner("vision_config", TOWER_HEADS, FLAT)
DEEP = [{"deepstack_visual_indexes": at} for at in ([1], [0, 1, 2], [1, 2])]
PLANS = [{"num_position_embeddings": 16}, {"num_position_embeddings": 49}]
QWEN3 = inner("vision_config", QWEN_HEADS, DEEP, PLANS)
SECTIONS = [mrope([2, 3, 3], 16), mrope([4, 6, 6], 32), mrope([1, 1, 2], 8)]
LEAVED = [mrope([4, 2, 2], 16, mrope_interleaved=True), mrope([6, 5, 5], 32, mrope_interleaved=True)]
WINDOWED = [{"window_size": 8, "fullatt_block_indexes": [0]}, {"window_size": 24, "fullatt_block_indexes": [2]}, {}]
SELECTED = [{"vision_feature_layer": -1}, {"vision_feature_layer": -3}, {"vision_feature_layer": 2}]
STRATEGIES = each("vision_feature_select_strategy", "default", "full")
LATENT = inner("text_config", *LATENTS[:3], LATENTS[3][:2], EPSILON)
QUADS = [
    {"hidden_size": 32, "num_attention_heads": 4},
    {"hidden_size": 48, "num_attention_heads": 3, "head_dim": 16},
    {},
]
VL2_TEXT = [{"q_lora_rank": None}, {"kv_lora_rank": 24}, {"v_head_dim": 16}, {"num_hidden_layers": 2}]
VL2_MORE = [{"n_group": 1, "topk_group": 1}, {"n_group": 4, "topk_group": 3}, {"first_k_dense_replace": 2}]
IMAGES = {
    "qwen2_vl": OWN + inner("vision_config", [{"depth": 2}, {"embed_dim": 48, "num_heads": 3}, {"mlp_ratio": 3}]),
    "qwen2_5_vl": OWN + inner("vision_config", QWEN_HEADS, WINDOWED, DEPTH[1:]),
    "qwen3_vl": OWN + QWEN3 + inner("text_config", LEAVED, each("attention_bias", False, True)),
    "qwen3_vl_moe": OWN + QWEN3 + inner("text_config", LEAVED, EXPERTS[1]),
    "qwen3_5": inner("text_config", *DELTA) + inner("vision_config", QWEN_HEADS, PLANS),
    "qwen3_5_moe": inner("text_config", *DELTA, EXPERTS[1]) + inner("vision_config", QWEN_HEADS, PLANS),
    "qwen2_5_omni": OWN + inner("vision_config", [*WINDOWED[:1], {}], DEPTH),
    "qwen3_omni": OWN + QWEN3 + inner("text_config", LEAVED, EXPERTS[1]),
    "llava": [*BASE, SELECTED, STRATEGIES, each("projector_hidden_act", "gelu", "relu")],
    "llava_next": [*BASE, SELECTED, [{"image_grid_pinpoints": PINPOINTS[:2]}, {}]],
    "llava_onevision": [*BASE, each("vision_aspect_ratio", "anyres_max_2", "anyres_max_9")],
    "deepseek_vl": BASE,
    "deepseek_vl_hybrid": BASE[:3]
    + inner("high_res_vision_config", [{"window_size": 5}, {"window_size": 8}], [{"global_attn_indexes": [0, 2]}, {}]),
    "deepseek_ocr2": inner(
        "text_config", EPSILON, INNER, each("num_experts_per_tok", 1, 2), each("n_shared_experts", 1, 3)
    ),
    "internvl": [*BASE, *inner("vision_config", each("use_qk_norm", False, True), each("norm_type", "rms_norm"))],
    "internvl_6b": [
        *BASE,
        *inner("vision_config", each("attention_bias", False, True), [{}, {"norm_type": "layer_norm"}]),
    ],
    "smolvlm": [*BASE, each("scale_factor", 2, 3, 6)],
    "glm4v": OWN + inner("vision_config", [{"depth": 3}, {"image_size": 28}, {"intermediate_size": 40}]),
    "glm4v_moe": inner(
        "text_config", FEW[:2], EPSILON, each("num_experts_per_tok", 2, 4), [{"n_group": 4, "topk_group": 2}, {}]
    )
    + inner("vision_config", each("attention_bias", False, True), [{"depth": 3}, {}]),
    "mistral3": OWN + inner("vision_config", FLAT[:3]) + [each("multimodal_projector_bias", False, True)],
    "pixtral": OWN + inner("vision_config", FLAT[:3]),
    "gemma3": inner(
        "text_config", FEW[:2], EPSILON, each("query_pre_attn_scalar", 7, 256), each("sliding_window", 4, 12)
    )
    + inner("vision_config", TOWER_HEADS, FLAT),
    "gemma4": inner("text_config", EPSILON, each("hidden_size_per_layer_input", 4, 12), each("sliding_window", 3, 50))
    + inner("vision_config", [{"num_hidden_layers": 3}, {"intermediate_size": 40}, {"use_clipped_linears": False}]),
    "gemma4_moe": inner("text_config", EPSILON, each("top_k_experts", 1, 3), each("sliding_window", 3, 100), CAPS)
    + inner("vision_config", each("standardize", False, True), [{"num_hidden_layers": 3}, {"pooling_kernel_size": 2}]),
    "kimi_vl": LATENT
    + inner("vision_config", [{"num_hidden_layers": 2}, {"intermediate_size": 40}])
    + inner("vision_config", [{"pos_emb_height": 9, "pos_emb_width": 9}, {"pos_emb_height": 4, "pos_emb_width": 4}]),
    "phi3_v": [EPSILON, INNER, LAYERS, *inner("embd_layer", each("hd_transform_order", "sub_glb", "glb_sub"))],
    "deepseek_vl2": inner("language_config", VL2_TEXT, VL2_MORE, EPSILON, INNER)
    + inner("vision_config", [{"layers": 2}, {"heads": 4}, {"mlp_ratio": 2.5}])
    + inner("projector_config", [{"mlp_ratio": 1}, {"mlp_ratio": 3}]),
}
AXES = TEXTS | IMAGES


def settings(family: str) -> list[Row]:
    """Returns the rows of a family's held-out settings, each with one case."""
    row = FAMILIES[family]
    draw = np.random.Generator(np.random.Philox(key=int.from_bytes(family.encode()[-16:])))
    found = []
    for _ in range(COUNT):
        config = copy.deepcopy(row.config)
        for axis in AXES[family]:
            config = merged(config, axis[int(draw.integers(len(axis)))])
        size = Picture(*(8 * int(side) for side in draw.integers(2, 7, 2)))
        found.append(Row(row.model, config, {"held": [5, size, 4] if family in IMAGES else [12]}, row.processor,
                         new_names=row.new_names, settings=row.settings))  # fmt: skip
    return found
