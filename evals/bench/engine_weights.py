"""The shipped small Qwen2.5-VL as a directory that the engine loads: the same function of its inputs, twice as wide.

tpu-inference 0.32 takes a head's width to be the model's width divided by its heads. The shipped model is 128 wide and
has four heads of 64. Here every number of its residual stream stands twice: what writes to the stream writes each
number twice, what reads it reads the first copy. A mean of squares over both copies is the mean over one, so norms
stay as they are, and no weight is rounded. Heads, caches and logits are those of the shipped model.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from ..task.vocabulary import SPECIAL

SHIPPED = Path(__file__).parents[1] / "trained" / "documents" / "qwen2_5_vl"
MOST_PIXELS = 252 * 252
"""The engine makes room for the largest image; a page of the task has 252 by 224."""

PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
"""A processor repeats an image's token without spaces between; as a special token it is found there."""

WRITES = ("self_attn.o_proj.weight", "mlp.down_proj.weight", "visual.merger.mlp.2.weight", "visual.merger.mlp.2.bias")
READS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight", "lm_head.weight")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")


def write(folder: Path, shipped: Path = SHIPPED) -> Path:
    """Writes the configuration, weights in float32, and the files of inputs; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((shipped / "config.json").read_text())
    config["hidden_size"] *= 2
    config["vision_config"]["out_hidden_size"] *= 2
    config |= {"torch_dtype": "float32", "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ends = {"eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    tokenizer = json.loads((shipped / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [
        {"id": token, "content": name, "special": True, **PLAIN} for token, name in enumerate(SPECIAL)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    # Or the tokenizer of the released model's kind is made of it, which knows none of these words.
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    images = json.loads((shipped / "preprocessor_config.json").read_text())
    images["max_pixels"] = images["size"]["longest_edge"] = MOST_PIXELS
    (folder / "preprocessor_config.json").write_text(json.dumps(images, indent=1))

    with safe_open(shipped / "model.safetensors", "np") as file:
        weights = {name: np.asarray(file.get_tensor(name), np.float32) for name in file.keys()}  # noqa: SIM118
    save_file(twice_as_wide(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def twice_as_wide(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns tensors by name, the residual stream in two copies."""
    doubled = {}
    for name, value in weights.items():
        is_text = not name.startswith("visual.")
        if name == "model.embed_tokens.weight":
            value = np.concatenate([value, value], axis=1)
        elif name.endswith(WRITES) and (is_text or "merger" in name):
            value = np.concatenate([value, value], axis=0)
        elif is_text and name.endswith(READS):
            value = np.concatenate([value, np.zeros_like(value)], axis=1)
        elif is_text and name.endswith(NORMS):
            value = np.concatenate([value, value])
        doubled[name] = np.ascontiguousarray(value)
    return doubled
