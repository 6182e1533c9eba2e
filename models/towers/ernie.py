"""Ernie-4.5-VL's vision tower: Qwen2-VL's blocks on single frames, and a resampler over patches and pairs of frames.

Source: transformers' Ernie4_5_VLMoeVisionTransformerPretrainedModel and Ernie4_5_VLMoeVariableResolutionResamplerModel.
What these call convolutions are linear maps of patches that lie side by side: a merge block's, then two frames'. An
image is both frames of its pair.

Axis letters: P patches, Y frames, Z patches per frame (padded), M merge blocks, E merged tokens, D width.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvpatch_jax.errors import ShapeError

from ..checkpoints import ParamPath, TensorEntry
from ..decoder.layers import Linear, RMSNorm
from ..decoder.weights import linear_entries
from .common import BlockConfig, LayerNorm, PlainBlock, PlainMLP, axial_tables, check_heads, scan_blocks
from .qwen2 import plan_frames
from .weights import block_entries, norm_entries

FRAMES = 2
"""Frames that become one: the resampler's order of frames is written for two."""
BLOCK_NAMES = {
    **{"attention_norm": "norm1", "mlp_norm": "norm2", "qkv": "attn.qkv", "output": "attn.proj"},
    **{"mlp.inner": "mlp.fc1", "mlp.outer": "mlp.fc2"},
}


@dataclasses.dataclass(frozen=True)
class ErnieVisionConfig:
    """Sizes of tower and resampler; `merge` patches a side become one token of `output_width`.

    `output_epsilon` is of the RMS norm that ends the resampler, `norm_epsilon` of all other norms.
    """

    depth: int
    width: int
    heads: int
    intermediate: int
    output_width: int
    patch: int
    merge: int
    channels: int = 3
    activation: str = "quick_gelu"
    theta: float = 1e4
    norm_epsilon: float = 1e-6
    output_epsilon: float = 1e-5
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads, 4)

    @property
    def features(self) -> int:
        """Values per patch as the processor hands them over: channels · patch · patch."""
        return self.channels * self.patch**2

    @property
    def merged(self) -> int:
        """Width of a merge block's patches side by side."""
        return self.width * self.merge**2

    @property
    def block(self) -> BlockConfig:
        """The transformer block."""
        return BlockConfig(
            self.width, self.heads, self.intermediate, self.activation, self.norm_epsilon, fused=True, dtype=self.dtype
        )


def plan_patches(config: ErnieVisionConfig, grids: Int[np.ndarray, "grids 3"]) -> dict[str, np.ndarray]:
    """Returns index arrays for images and videos with these (time, height, width) grids of patches.

    Returns `rows`, `columns` (int32 [P], place in the frame), `frames` (int32 [Y,Z], patch numbers per frame, padded by
    P), and `first` and `second` (int32 [E], patch number of the merge block's first patch in both frames of a pair).

    Raises:
      ShapeError: a grid that is not a multiple of the merge size, or a video with a frame that has no second.
    """
    firsts, seconds, start, block = [], [], 0, config.merge**2
    for time, height, width in np.asarray(grids).tolist():
        if time != 1 and time % FRAMES:
            raise ShapeError(f"video grid: got {time} frames; expected a multiple of {FRAMES}")
        size = height * width
        # An image's one frame is its second too.
        for frame in range(0, time, FRAMES):
            for found, number in ((firsts, frame), (seconds, min(frame + 1, time - 1))):
                found.append(np.arange(start + number * size, start + (number + 1) * size, block, dtype=np.int32))
        start += time * size

    return plan_frames(config.merge, grids) | {"first": np.concatenate(firsts), "second": np.concatenate(seconds)}


class ResamplerMLP(nnx.Module):
    """Linear, GELU, linear, layer norm."""

    def __init__(self, inputs: int, width: int, epsilon: float, rngs: nnx.Rngs, dtype: DTypeLike):
        self.mlp = PlainMLP(inputs, width, width, activation="gelu", rngs=rngs, dtype=dtype)
        self.norm = LayerNorm(width, epsilon=epsilon, dtype=dtype)

    def __call__(self, x: Float[Array, "M D"]) -> Float[Array, "M _"]:
        """Applies to [M, inputs]."""
        return self.norm(self.mlp(x))


class ErnieVisionTower(nnx.Module):
    """Pixels to embeddings of the language tower, one per merge block of an image or of a pair of frames."""

    def __init__(self, config: ErnieVisionConfig, rngs: nnx.Rngs):
        dtype, merged, epsilon = jnp.dtype(config.dtype), config.merged, config.norm_epsilon
        self.patch_embedding = Linear(config.features, config.width, bias=False, rngs=rngs, dtype=dtype)
        self.blocks = PlainBlock(config.block, rngs, (config.depth,))
        self.norm = LayerNorm(config.width, epsilon=epsilon, dtype=dtype)
        self.spatial = ResamplerMLP(merged, merged, epsilon, rngs, dtype)
        self.temporal = ResamplerMLP(FRAMES * merged, merged, epsilon, rngs, dtype)
        self.map = Linear(merged, config.output_width, bias=True, rngs=rngs, dtype=dtype)
        self.output_norm = RMSNorm(config.output_width, epsilon=config.output_epsilon, dtype=dtype)
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, "P F"],
        rows: Int[Array, " P"],
        columns: Int[Array, " P"],
        frames: Int[Array, "Y Z"],
        first: Int[Array, " E"],
        second: Int[Array, " E"],
    ) -> Float[Array, "E D"]:
        """Embeds packed patches [P, channels·patch²]; the index arrays come from `plan_patches`."""
        config = self.config
        hidden = self.patch_embedding(pixel_values.astype(jnp.dtype(config.dtype)))
        tables = axial_tables(rows, columns, config.width // config.heads, config.theta, alternate=False)

        def step(block: PlainBlock, hidden: Array) -> Array:
            return block.attend(hidden, tables, "half", frames)

        hidden = scan_blocks(self.blocks, step, hidden, 0, config.depth)
        merged = self.spatial(self.norm(hidden).reshape(-1, config.merged))
        # Patches of a merge block lie together, so that its number follows from that of its first patch.
        pair = [jnp.take(merged, index // config.merge**2, axis=0, mode="clip") for index in (first, second)]
        return self.output_norm(self.map(self.temporal(jnp.concatenate(pair, axis=-1))))


def ernie_vision_entries(tower: str, resampler: str, path: ParamPath = ("visual",)) -> list[TensorEntry]:
    """Maps the tower and the resampler, which lie apart in the file."""
    entries = [
        *linear_entries(f"{tower}.patch_embed.proj", (*path, "patch_embedding"), bias=False),
        *block_entries(f"{tower}.blocks.{{layer}}", (*path, "blocks"), BLOCK_NAMES),
        *norm_entries(f"{tower}.ln", (*path, "norm")),
        *linear_entries(f"{resampler}.mlp", (*path, "map")),
        TensorEntry(f"{resampler}.after_norm.weight", (*path, "output_norm", "weight")),
    ]
    for part in ("spatial", "temporal"):
        entries += linear_entries(f"{resampler}.{part}_linear.0", (*path, part, "mlp", "inner"))
        entries += linear_entries(f"{resampler}.{part}_linear.2", (*path, part, "mlp", "outer"))
        entries += norm_entries(f"{resampler}.{part}_linear.3", (*path, part, "norm"))
    return entries
