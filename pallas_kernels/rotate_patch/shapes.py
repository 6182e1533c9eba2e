"""Shapes that tests and benchmarks share: (name, leading, tokens, heads, width, rotary, rank, layout)."""

from typing import NamedTuple


class RotateShape(NamedTuple):
    """One case: x [*leading, tokens, heads, width], rotary channels, rank, layout word."""

    name: str
    leading: tuple[int, ...]
    tokens: int
    heads: int
    width: int
    rotary: int
    rank: int
    layout: str


SMALL = (
    RotateShape("gqa", (2,), 12, 2, 16, 16, 4, "half"),
    RotateShape("pairs", (2, 3), 7, 2, 16, 16, 3, "pairs"),
    RotateShape("partial", (2,), 9, 2, 16, 8, 2, "pairs"),
    RotateShape("mla", (3,), 10, 1, 64, 64, 8, "half"),
    RotateShape("ragged", (1,), 13, 3, 20, 12, 1, "half"),
    RotateShape("plain", (2,), 11, 2, 16, 0, 5, "half"),
    RotateShape("bare", (2,), 8, 1, 16, 16, 0, "pairs"),
)

ALIGNED = (
    RotateShape("gqa", (2,), 13, 2, 32, 32, 5, "half"),
    RotateShape("wide", (1,), 9, 1, 128, 128, 0, "half"),
    RotateShape("partial", (1,), 67, 1, 96, 64, 7, "half"),
    RotateShape("latent", (2,), 10, 1, 64, 0, 17, "half"),
)
"""Shapes whose runs are 16 columns or more, as the Hopper kernels need them."""

ALIGNED_PAIRS = (
    RotateShape("pairs", (2,), 11, 1, 64, 64, 3, "pairs"),
    RotateShape("partial_pairs", (1,), 9, 2, 64, 32, 0, "pairs"),
)
"""The same in pairs: words of two channels where the result is bfloat16, swapped by a product where it is float32."""

NARROW = RotateShape("narrow", (2,), 13, 1, 128, 64, 5, "half")
"""The same with runs of 32 columns, as those kernels need them for eight bits."""

PRODUCTION = (
    RotateShape("qwen2_5_vl_7b", (28,), 1024, 4, 128, 128, 32, "half"),
    RotateShape("qwen3_vl_8b", (36,), 1024, 8, 128, 128, 32, "half"),
    RotateShape("kimi_vl_rope", (27,), 1088, 1, 64, 64, 32, "half"),
    RotateShape("kimi_vl_latent", (27,), 1088, 1, 512, 0, 32, "half"),
    RotateShape("llava_1_5_7b", (32,), 576, 32, 128, 128, 32, "half"),
)
