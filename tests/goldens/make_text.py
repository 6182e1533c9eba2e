"""Make the goldens of the text families with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_text.py`, with names of models to make these alone.
It rewrites `text/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from redraw import redraw_all
from safetensors import safe_open
from safetensors.numpy import save_file

OUT = Path(__file__).parent / "text"
STEPS = 4
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
}
SHORT_MODEL = {"original_max_position_embeddings": 32, "max_position_embeddings": 256}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """`rope_parameters`; the base is low, so that every rotary pair matters within a few tokens."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


# family -> (class, what differs from SIZES, first position, number of decode steps)
FAMILIES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, **rope(1e2)}, 0, STEPS),
    "llama3_1": (
        "Llama",
        {"tie_word_embeddings": True, **rope(5e2, **LLAMA3, original_max_position_embeddings=32)},
        0,
        STEPS,
    ),
    "llama_linear": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, **rope(1e2, rope_type="linear", factor=2.0)},
        0,
        STEPS,
    ),
    "llama_yarn": ("Llama", rope(1e2, **YARN | {"factor": 4.0}), 0, STEPS),
    "llama_dynamic": ("Llama", {"max_position_embeddings": 10, **rope(1e2, rope_type="dynamic", factor=2.0)}, 0, 0),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16, **rope(1e2)}, 0, STEPS),
    "qwen2": ("Qwen2", rope(1e2), 0, STEPS),
    "qwen3": ("Qwen3", {"head_dim": 24, **rope(1e2)}, 0, STEPS),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            **rope(1e2),
        },
        0,
        STEPS,
    ),
    "glm": ("Glm", {"head_dim": 16, **rope(1e2, partial_rotary_factor=0.5)}, 0, STEPS),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True, **rope(1e2, partial_rotary_factor=0.5)}, 0, STEPS),
    "gemma3_text": (
        "Gemma3",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e1},
            },
        },
        0,
        STEPS,
    ),
    "gemma4_text": (
        "Gemma4",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "sliding_window": 5,
            "layer_types": ["full_attention" if layer in (1, 5) else "sliding_attention" for layer in range(6)],
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e1},
            },
        },
        0,
        STEPS,
    ),
    "gemma4_wide": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5e2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e1},
            },
        },
        0,
        STEPS,
    ),
    "phi3_short": ("Phi3", {**SHORT_MODEL, **rope(1e2, **LONG)}, 0, STEPS),
    "phi3_long": ("Phi3", {**SHORT_MODEL, **rope(1e2, **LONG)}, 40, STEPS),
    "deepseek_v2": (
        "DeepseekV2",
        {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, **rope(1e2)},
        0,
        STEPS,
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            **rope(1e2, **YARN, mscale=0.707, mscale_all_dim=0.707),
        },
        0,
        STEPS,
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            **rope(1e2, **YARN, mscale=1.3, mscale_all_dim=1.0),
        },
        0,
        STEPS,
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 24, "use_bias": True, "tie_word_embeddings": True, **rope(1e2)}, 0, STEPS),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_intermediate_size": 24, "moe_k": 3, "moe_num_experts": 8, "tie_word_embeddings": True, **rope(1e2)},
        0,
        STEPS,
    ),
    "kimi_vl_text": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, **rope(8e2)},
        0,
        STEPS,
    ),
}


def build_model(family: str, name: str, more: dict[str, Any]) -> Any:
    """The tiny model, every parameter redrawn under its file's name; writes `<family>.json` (config and shapes)."""
    named = f"{name}Text" if name.startswith("Gemma") else name
    config = getattr(transformers, f"{named}Config")(**SIZES | more)
    kind = getattr(transformers, f"{name}ForCausalLM")
    with tempfile.TemporaryDirectory() as directory:
        kind(config).save_pretrained(directory)
        path = Path(directory) / "model.safetensors"
        with safe_open(path, "np") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
        save_file(redraw_all(shapes), path, metadata={"format": "pt"})
        written = json.loads((Path(directory) / "config.json").read_text())
        model, report = kind.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        assert not [*report["missing_keys"], *report["unexpected_keys"]], report
    lines = [
        f'"config": {json.dumps(written)}',
        *[f"{json.dumps(name)}: {json.dumps(shapes[name])}" for name in shapes],
    ]
    (OUT / f"{family}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return model.eval()


def cached(cache: Any) -> dict[str, np.ndarray]:
    """Both channels [L,T,K,H] as transformers keeps them: keys and values, or latent and turned decoupled key.

    Of layers of unlike widths an array each, `first.<layer>`; those that read another's keep none.
    """
    of = lambda name: [
        getattr(layer, name)[0].transpose(0, 1).numpy() for layer in cache.layers if layer.is_initialized
    ]
    found = {"first": of("keys"), "second": of("values")}
    if len({value.shape for value in found["first"]}) == 1:
        return {name: np.stack(values) for name, values in found.items()}
    return {f"{name}.{layer}": value for name, values in found.items() for layer, value in enumerate(values)}


def make(family: str) -> None:
    name, more, start, steps = FAMILIES[family]
    model = build_model(family, name, more)
    hidden: list[np.ndarray] = []
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: hidden.append(output[0].numpy().copy()))
        for layer in model.model.layers
    ]
    input_ids = torch.tensor([(np.arange(14) * 37 + 11) % 290 + 3])
    positions = start + torch.arange(input_ids.shape[1])[None]
    # Layers that slide keep all of their keys too, so that every layer's can be compared.
    past = transformers.DynamicCache()
    out = model(input_ids=input_ids, position_ids=positions, past_key_values=past, use_cache=True)
    arrays = {
        "input_ids": input_ids[0].numpy().astype(np.int32),
        "position_ids": positions[0].numpy().astype(np.int32),
        "hidden": np.stack(hidden),
        "logits": out.logits[0].numpy(),
        **cached(out.past_key_values),
    }
    for hook in hooks:
        hook.remove()
    tokens, logits, cache = [], [], out.past_key_values
    token = int(out.logits[0, -1].argmax())
    for step in range(steps):
        place = positions[:, -1:] + 1 + step
        out = model(input_ids=torch.tensor([[token]]), position_ids=place, past_key_values=cache, use_cache=True)
        tokens.append(token)
        logits.append(out.logits[0, -1].numpy())
        token = int(logits[-1].argmax())
    if steps:
        arrays |= {"decode_tokens": np.array(tokens, np.int32), "decode_logits": np.stack(logits)}
    np.savez_compressed(OUT / f"{family}.npz", **arrays)
    size = (OUT / f"{family}.npz").stat().st_size / 1024
    spread = float(out.logits.std())
    print(f"{family:>18} {size:6.1f} KiB   logits std {spread:.2f}")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    OUT.mkdir(exist_ok=True)
    with torch.no_grad():
        for family in sys.argv[1:] or FAMILIES:
            make(family)


if __name__ == "__main__":
    main()
