"""Make `adapters/`: tiny LoRA adapters merged by peft (0.21.2) into the tiny models of the goldens.

Run it in an environment with torch, transformers (5.23) and peft: `python -m tests.goldens.make_adapters`.
See README.md beside it.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.goldens.load import GOLDENS, write_checkpoint
from tests.goldens.redraw import redraw_all, standard_values

ATTENTION = ["q_proj", "v_proj"]
CASES = {  # name → base, class, LoraConfig
    "plain": ("qwen2", "Qwen2ForCausalLM", {"r": 4, "lora_alpha": 6, "target_modules": [*ATTENTION, "down_proj"]}),
    "patterns": (
        "qwen2",
        "Qwen2ForCausalLM",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": "all-linear",
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, r"layers.\d.mlp.up_proj": 3},
            "alpha_pattern": {"v_proj": 5, "layers.2.mlp.down_proj": 16},
            "use_rslora": True,
            "bias": "lora_only",
            "fan_in_fan_out": True,
        },
    ),
    "whole": (
        "qwen2",
        "Qwen2ForCausalLM",
        {
            "r": 3,
            "lora_alpha": 4,
            "target_modules": ["embed_tokens", "k_proj"],
            "modules_to_save": ["lm_head", "norm"],
            "lora_bias": False,
            "bias": "all",
        },
    ),
    "image": (
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {"r": 2, "lora_alpha": 4, "target_modules": ["qkv", "attn.proj", "mlp.0", *ATTENTION], "lora_bias": True},
    ),
}


def merge(root: Path, base: str, architecture: str, options: dict) -> tuple[dict, dict[str, np.ndarray]]:
    """An adapter as peft saves it (configuration and shapes), and of the model with it merged every tensor's sum.

    The sum is weighted by drawn numbers; every ninth tensor that changed is there itself.
    """
    load = getattr(transformers, architecture).from_pretrained
    checkpoint, weights = write_checkpoint(base, root / "base"), root / "adapter" / "adapter_model.safetensors"
    peft.get_peft_model(load(checkpoint), peft.LoraConfig(**options)).save_pretrained(weights.parent)
    shapes = {name: list(value.shape) for name, value in load_file(weights).items()}
    save_file(redraw_all(shapes), weights)
    peft.PeftModel.from_pretrained(load(checkpoint), weights.parent).merge_and_unload().save_pretrained(root / "merged")

    merged, before = (load_file(folder / "model.safetensors") for folder in (root / "merged", checkpoint))
    changed = [name for name in sorted(merged) if not np.array_equal(merged[name], before[name])]
    config = json.loads((weights.parent / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
    config["target_modules"] = sorted(config["target_modules"])
    weighted = lambda name: merged[name].reshape(-1).astype(float) @ standard_values(name, merged[name].size)
    sums = np.array([weighted(name) for name in sorted(merged)])
    found = {"config": config, "shapes": dict(sorted(shapes.items())), "changed": changed, "tensors": sorted(merged)}
    return found, {"sums": sums, **{name: merged[name] for name in changed[::9]}}


def main() -> None:
    out = GOLDENS / "adapters"
    out.mkdir(exist_ok=True)
    for case, (base, architecture, options) in CASES.items():
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            found, values = merge(Path(directory), base, architecture, options)
        (out / f"{case}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        np.savez_compressed(out / f"{case}.npz", **values)


if __name__ == "__main__":
    main()
