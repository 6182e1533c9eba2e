"""The large comparison's model and prompt: a random Qwen2.5-VL, one image and a text, by a seed."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

IMAGE, VIDEO, START, END = 1, 2, 3, 4  # ids of a prompt's special tokens
PATCH, MERGE = 14, 2
MATMUL = 2048  # rows and columns of the product that speeds are held against


@dataclasses.dataclass(frozen=True)
class LargeSize:
    """A Qwen2.5-VL's sizes, and the prompt that it reads.

    Attributes:
      side: patches along each side of the image, an even number. tokens: of the prompt, the image's included.
      new_tokens: decoded behind the prompt.
    """

    name: str
    width: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    vision_width: int
    vision_intermediate: int
    vision_depth: int
    vision_heads: int
    side: int
    tokens: int
    new_tokens: int

    def config(self) -> dict[str, Any]:
        """Makes `config.json` as the released checkpoints have it."""
        heads = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
        sections = [self.width // self.heads // 8] + [self.width // self.heads * 3 // 16] * 2
        return {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            **heads,
            "hidden_act": "silu",
            "hidden_size": self.width,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 128000,
            "num_hidden_layers": self.layers,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_scaling": {"type": "mrope", "mrope_section": sections},
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "use_sliding_window": False,
            "vocab_size": self.vocabulary,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
            "vision_config": {
                "depth": self.vision_depth,
                "fullatt_block_indexes": [self.vision_depth // 2 - 1, self.vision_depth - 1],
                "hidden_act": "silu",
                "hidden_size": self.vision_width,
                "in_chans": 3,
                "intermediate_size": self.vision_intermediate,
                "num_heads": self.vision_heads,
                "out_hidden_size": self.width,
                "patch_size": PATCH,
                "spatial_merge_size": MERGE,
                "temporal_patch_size": 2,
                "tokens_per_second": 2,
                "window_size": 112,
            },
        }

    def work(self) -> dict[str, float]:
        """Counts what each part has to do: multiplications and additions, bytes of weights for a decode step."""
        merged, width = MERGE**2, self.vision_width
        patches = self.side**2
        block = 4 * width**2 + 3 * width * self.vision_intermediate
        merger = (merged * width) ** 2 + merged * width * self.width
        windows = (112 // PATCH) ** 2
        pairs = patches * (2 * patches + (self.vision_depth - 2) * windows)
        tower = (
            2.0 * patches * (block * self.vision_depth + 6 * PATCH**2 * width + merger / merged) + 4.0 * pairs * width
        )
        head = self.width // self.heads
        attention = 2 * self.width**2 + 2 * self.width * self.kv_heads * head
        layer = attention + 3 * self.width * self.intermediate
        weights = layer * self.layers + self.vocabulary * self.width
        prefill = 2.0 * self.tokens * layer * self.layers + 2.0 * self.tokens**2 * self.width * self.layers
        return {"tower": tower, "prefill": prefill, "step_bytes": 4.0 * weights}


LARGE = LargeSize(
    "3 GB",
    width=2048,
    intermediate=11008,
    layers=6,
    heads=16,
    kv_heads=2,
    vocabulary=65536,
    vision_width=1280,
    vision_intermediate=3420,
    vision_depth=8,
    vision_heads=16,
    side=124,  # 1736 x 1736 pixels
    tokens=4096,
    new_tokens=16,
)
SMALL = dataclasses.replace(
    LARGE, name="small", width=256, intermediate=512, layers=2, heads=4, vocabulary=512, vision_width=128
)
SMALL = dataclasses.replace(SMALL, vision_intermediate=256, vision_depth=4, vision_heads=4, side=16, tokens=96)
"""To see that it runs."""


def prompt_arrays(size: LargeSize, seed: int) -> dict[str, Float32[np.ndarray, "P F"] | Int32[np.ndarray, "..."]]:
    """Draws the prompt: text, the image between its marks, text; and the tokens that follow.

    Returns:
      input_ids [1,T], pixel_values [P, 3·2·14²], image_grid_thw [1,3], new_ids [new_tokens].
    """
    generator = np.random.default_rng(seed)
    image = (size.side // MERGE) ** 2
    before = (size.tokens - image - 2) // 2
    after = size.tokens - image - 2 - before
    text = lambda count: generator.integers(END + 1, size.vocabulary, count)
    ids = np.concatenate([text(before), [START], np.full(image, IMAGE), [END], text(after)])
    return {
        "input_ids": ids[None].astype(np.int32),
        "pixel_values": generator.standard_normal((size.side**2, 6 * PATCH**2), np.float32),
        "image_grid_thw": np.array([[1, size.side, size.side]], np.int32),
        "new_ids": text(size.new_tokens).astype(np.int32),
    }
