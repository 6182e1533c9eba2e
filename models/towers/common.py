"""What the vision towers share: layer norm, MLP, a transformer block, attention in segments, table positions.

Index arrays and interpolation weights are made on the host with NumPy, so that another image of the same size never
recompiles. Axis letters: P packed patches, Y segments, Z patches per segment (padded), E merged tokens, D tower width.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from kvpatch_jax.core import rotate
from kvpatch_jax.errors import ConfigError, ShapeError

from ..attention import Mask, attention
from ..decoder.layers import (
    ACTIVATIONS,
    BLOCK_TOKENS,
    TABLE_SCALE,
    GatedMLP,
    Linear,
    RMSNorm,
    check_activation,
    in_blocks,
    normal,
    product,
)
from ..decoder.mesh_axes import auto_tensor_axes, spread, spread_tokens
from ..decoder.stacks import layers_to_scan

QK_NORM_EPSILON = 1e-6


def check_heads(width: int, heads: int, multiple: int = 1) -> None:
    """Raises ConfigError where a tower's width is not `heads` heads of a multiple of `multiple` channels each."""
    if width < 1 or heads < 1 or width % heads or (width // heads) % multiple:
        raise ConfigError(
            f"tower: got width {width} with {heads} heads; expected heads of equal width, a multiple of {multiple}"
        )


class LayerNorm(nnx.Module):
    """Layer norm over the last axis; statistics, weight and bias in float32."""

    def __init__(
        self,
        width: int,
        *,
        epsilon: float,
        lead: tuple[int, ...] = (),
        dtype: DTypeLike = jnp.float32,
        bias: bool = True,
    ):
        self.weight = nnx.Param(jnp.ones((*lead, width), dtype))
        self.bias = nnx.Param(jnp.zeros((*lead, width), dtype)) if bias else None
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        """Normalises [..., D]."""
        # The variance as the mean of squared differences: E[x²] − E[x]² cancels where a channel's mean is large.
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        wide = wide * self.weight[...].astype(jnp.float32)
        return (wide if self.bias is None else wide + self.bias[...].astype(jnp.float32)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Sizes and switches of a tower's transformer block.

    `fused` keeps query, key and value in one matrix, as the file has it; `layer_scale` multiplies both updates by a
    learned vector (InternViT); `key_bias` False leaves out the keys' alone (Whisper), `bias` False those of the other
    maps. InternViT-6B has `rms_norms` and, with `qk_norm`, RMS norms over the whole width of query and key. `gated`
    makes the MLP a gated one (Qwen2.5-VL, GLM-4V, Pixtral).
    """

    width: int
    heads: int
    intermediate: int
    activation: str
    norm_epsilon: float
    fused: bool = False
    layer_scale: bool = False
    qkv_bias: bool = True
    key_bias: bool = True
    bias: bool = True
    rms_norms: bool = False
    qk_norm: bool = False
    gated: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_activation(self.activation, "tower's hidden_act")


def count_layers_run(feature_layer: int, depth: int) -> int:
    """Returns how many blocks lie below a hidden state, as transformers numbers them: -1 the last, 0 the embeddings.

    Raises:
      ConfigError: no such hidden state.
    """
    if not isinstance(feature_layer, int):
        raise ConfigError(f"vision_feature_layer: got {feature_layer!r}; expected one layer")
    if not -depth - 1 <= feature_layer <= depth:
        raise ConfigError(f"vision_feature_layer: got {feature_layer}; expected a layer of the tower's {depth}")
    return feature_layer if feature_layer >= 0 else depth + 1 + feature_layer


def project_fused(qkv: Linear, x: Float[Array, "*lead D"], heads: int) -> tuple[Array, Array, Array]:
    """Computes query, key and value [..., N, H] by one matrix, which has all queries first, then keys, then values.

    Over a mesh each device multiplies its own heads' part of the matrix.
    """
    x = spread_tokens(x, heads)
    shape = (*x.shape[:-1], heads, -1)
    if not auto_tensor_axes():
        query, key, value = jnp.moveaxis(qkv(x).reshape(*x.shape[:-1], 3, *shape[-2:]), -3, 0)
        return query, key, value

    width = x.shape[-1]
    parts = []
    for first in range(0, 3 * width, width):
        own = slice(first, first + width)
        part = product(x, qkv.kernel[...][:, own]).astype(x.dtype)
        part = part if qkv.bias is None else part + qkv.bias[...][own].astype(x.dtype)
        parts.append(spread(part.reshape(shape), x.ndim - 1))
    return parts[0], parts[1], parts[2]


class PlainMLP(nnx.Module):
    """out(activation(in(x)))."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        *,
        activation: str,
        rngs: nnx.Rngs,
        bias: bool = True,
        lead: tuple[int, ...] = (),
        dtype: DTypeLike = jnp.float32,
    ):
        self.inner = Linear(inputs, hidden, bias=bias, rngs=rngs, lead=lead, dtype=dtype)
        self.outer = Linear(hidden, outputs, bias=bias, rngs=rngs, lead=lead, dtype=dtype)
        self.activation = activation

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead E"]:
        """Applies to [..., D]."""
        x = spread_tokens(x, self.inner.kernel.shape[-1])
        return self.outer(ACTIVATIONS[self.activation](self.inner(x)))


class PlainBlock(nnx.Module):
    """Pre-norm attention and MLP, plain or gated (or, with `lead=(depth,)`, a stack of them to scan over)."""

    def __init__(self, config: BlockConfig, rngs: nnx.Rngs, lead: tuple[int, ...] = ()):
        dtype, width = jnp.dtype(config.dtype), config.width
        norm = {"epsilon": config.norm_epsilon, "lead": lead, "dtype": dtype}
        linear = {"rngs": rngs, "lead": lead, "dtype": dtype}
        Norm = RMSNorm if config.rms_norms else LayerNorm
        self.attention_norm = Norm(width, **norm)

        if config.fused:
            self.qkv = Linear(width, 3 * width, bias=config.qkv_bias, **linear)
        else:
            bias = config.qkv_bias
            biases = (bias, bias and config.key_bias, bias)
            self.query, self.key, self.value = (Linear(width, width, bias=bias, **linear) for bias in biases)

        # Their epsilon is the class's own, whatever that of the others is.
        def qk_norm():
            return RMSNorm(width, epsilon=QK_NORM_EPSILON, lead=lead, dtype=dtype) if config.qk_norm else None

        self.query_norm, self.key_norm = qk_norm(), qk_norm()

        self.output = Linear(width, width, bias=config.bias, **linear)
        self.mlp_norm = Norm(width, **norm)
        mlp = {"activation": config.activation, "bias": config.bias, **linear}
        inner = config.intermediate
        self.mlp = GatedMLP(width, inner, **mlp) if config.gated else PlainMLP(width, inner, width, **mlp)

        def scale():
            return nnx.Param(jnp.ones((*lead, width), dtype)) if config.layer_scale else None

        self.attention_scale, self.mlp_scale = scale(), scale()
        self.config = config

    def project(self, hidden: Float[Array, "*lead D"]) -> tuple[Array, Array, Array]:
        """Computes query, key and value [..., N, H] of the normalised input."""
        x = self.attention_norm(hidden)
        if self.config.fused:
            return project_fused(self.qkv, x, self.config.heads)
        x, shape = spread_tokens(x, self.config.heads), (*x.shape[:-1], self.config.heads, -1)
        query, key = self.query(x), self.key(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return query.reshape(shape), key.reshape(shape), self.value(x).reshape(shape)

    def attend(
        self,
        hidden: Float[Array, "P D"],
        tables: tuple[Array, Array],
        pairing: Literal["half", "pairs"],
        segments: Int[Array, "Y Z"],
    ) -> Float[Array, "P D"]:
        """Runs the block over packed patches with rotary positions, full attention inside each segment.

        Args:
          tables: cosines and sines, as `axial_tables` makes them.
          pairing: which channels rotate together, "half" or "pairs".
          segments: as `attend_segments` takes them.
        """
        query, key, value = self.project(hidden)
        query, key = (rotate(x, *tables, pairing) for x in (query, key))
        return self.update(hidden, attend_segments(query, key, value, segments))

    def update(self, hidden: Float[Array, "*lead D"], mixed: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        """Returns the residual after this block, given what its attention read."""

        def scaled(x, scale):
            return x if scale is None else x * scale[...].astype(x.dtype)

        hidden = hidden + scaled(self.output(mixed), self.attention_scale)
        return hidden + scaled(in_blocks(self.mlp, self.mlp_norm(hidden)), self.mlp_scale)


def scan_blocks[Block: nnx.Module](
    blocks: Block, step: Callable[[Block, Array], Array], hidden: Array, first: int, last: int
) -> Array:
    """Runs `step(block, hidden)` over blocks first … last-1 of a stack."""
    graph, state = nnx.split(blocks)
    entries, taken = layers_to_scan(state, first, last)

    def body(carry, at):
        own, block = at
        return (step(nnx.merge(graph, taken(own, block)), carry), None)

    return jax.lax.scan(body, hidden, (entries, jnp.arange(first, last)))[0]


def attend_segments(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    segments: Int[Array, "Y Z"],
    scale: float | None = None,
) -> Float[Array, "P D"]:
    """Computes full attention inside each segment of packed patches; `segments` holds patch numbers, padded by P.

    `scale` multiplies scores in place of H^-½.
    """
    patches, heads, head_dim = query.shape

    # Over a mesh: heads, and segments over the devices that do not divide them.
    def gather(x):
        return spread(jnp.take(x, segments, axis=0, mode="fill", fill_value=0), 2, 0)

    # Padding is in a segment of its own, which nothing sees; on the way back it is out of range and dropped.
    numbers = jnp.where(segments < patches, 0, -1)
    mask = Mask(query_segments=numbers, key_segments=numbers)
    mixed = attention(gather(query), gather(key), gather(value), mask, scale=head_dim**-0.5 if scale is None else scale)
    flat = jnp.zeros((patches, heads * head_dim), query.dtype)
    return flat.at[segments.reshape(-1)].set(mixed.reshape(-1, heads * head_dim), mode="drop")


def segment_table(sizes: list[int]) -> Int32[np.ndarray, "Y Z"]:
    """Returns patch numbers of consecutive segments of these sizes, one row each, padded by their sum."""
    firsts = np.cumsum([0, *sizes])
    return pad_segments([np.arange(*edges) for edges in itertools.pairwise(firsts)], sum(sizes))


def pad_segments(segments: list[np.ndarray], fill: int) -> Int32[np.ndarray, "Y Z"]:
    """Stacks the patch numbers of each segment to one table, padded by `fill`."""
    table = np.full((len(segments), max(map(len, segments), default=0)), fill, np.int32)
    for row, patches in enumerate(segments):
        table[row, : len(patches)] = patches
    return table


def patch_places(height: int, width: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns row and column of each patch of a frame, in raster order of block×block squares (1: plain raster order).

    Raises:
      ShapeError: a frame that is not a multiple of the block.
    """
    if height < 1 or width < 1 or height % block or width % block:
        raise ShapeError(
            f"image grid: got {height}×{width} patches; expected a positive multiple of the merge size {block}"
        )
    row, column = np.meshgrid(np.arange(height, dtype=np.int32), np.arange(width, dtype=np.int32), indexing="ij")

    def order(x):
        return x.reshape(height // block, block, width // block, block).transpose(0, 2, 1, 3).reshape(-1)

    return order(row), order(column)


def axis_taps(
    place: Int[np.ndarray, " P"], size: int, side: int, mode: Literal["bilinear", "bicubic"]
) -> tuple[Int[np.ndarray, "P taps"], Float32[np.ndarray, "P taps"]]:
    """Returns where places of an axis of `size` read one of `side`, and with which weights: 2 or 4 taps, as
    `resample_taps` says.
    """
    one = np.float32
    place = place.astype(np.float32)
    if mode == "bilinear":
        source, offsets = place * one(side - 1) / one(max(size - 1, 1)), np.arange(2)
    else:
        source, offsets = (place + one(0.5)) * one(side) / one(size) - one(0.5), np.arange(-1, 3)

    # Taps beyond the table repeat its edge, with the weight that they would have there.
    floor = np.floor(source)
    taps = (floor.astype(np.int64)[:, None] + offsets).clip(0, side - 1)
    distance = np.abs(source[:, None] - floor[:, None] - offsets.astype(np.float32))

    # Linear, or Keys' cubic in Horner's form.
    if mode == "bilinear":
        return taps, np.maximum(one(1) - distance, one(0))

    a = one(-0.75)
    near = ((a + one(2)) * distance - (a + one(3))) * distance * distance + one(1)
    far = ((a * distance - one(5) * a) * distance + one(8) * a) * distance - one(4) * a
    return taps, np.where(distance <= 1, near, far)


def resample_taps(
    rows: Int[np.ndarray, " P"],
    columns: Int[np.ndarray, " P"],
    grid: tuple[int, int],
    side: int,
    mode: Literal["bilinear", "bicubic"],
) -> tuple[Int32[np.ndarray, "P taps"], Float32[np.ndarray, "P taps"]]:
    """Returns where patches read a learned side×side table, and with which weights: `torch.nn.functional.interpolate`.

    "bilinear" is with align_corners=True (Qwen3-VL), "bicubic" with a = −0.75 and align_corners=False (MoonViT). Taps
    are 4 or 16 places in the flattened table. Computed in float32 in torch's order of operations.
    """
    row_taps, row_weights = axis_taps(rows, grid[0], side, mode)
    column_taps, column_weights = axis_taps(columns, grid[1], side, mode)
    taps = row_taps[:, :, None] * side + column_taps[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return taps.reshape(len(rows), -1).astype(np.int32), weights.reshape(len(rows), -1).astype(np.float32)


def join_places(images: Iterable[tuple[np.ndarray, ...]]) -> dict[str, np.ndarray]:
    """Joins (rows, columns[, taps, weights]) of single images to index arrays of the packed row, by these names."""
    names = ("rows", "columns", "taps", "weights")
    return {name: np.concatenate(arrays) for name, arrays in zip(names, zip(*images, strict=True), strict=False)}


def learned(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param:
    """Draws learned positions, or what else is added to patches."""
    return nnx.Param(normal(rngs, shape, TABLE_SCALE, dtype))


def add_positions(
    hidden: Float[Array, "P D"], table: nnx.Param, taps: Int[Array, "P taps"], weights: Float[Array, "P taps"]
) -> Float[Array, "P D"]:
    """Adds learned positions, interpolated in float32 as `resample_taps` says, to embedded patches."""
    wide = table[...].astype(jnp.float32)

    def mix(taps, weights):
        return jnp.einsum("PtD,Pt->PD", wide[taps], weights).astype(hidden.dtype)

    if len(taps) <= BLOCK_TOKENS:
        return hidden + mix(taps, weights)

    # Many patches in blocks: each gathers up to 16 rows of the table in float32.
    def one(at):
        return mix(at[0][None], at[1][None])[0]

    return hidden + jax.lax.map(one, (taps, weights), batch_size=BLOCK_TOKENS)


def axial_tables(
    first: Int[Array, " P"],
    second: Int[Array, " P"],
    head_dim: int,
    theta: float,
    order: Literal["axes", "turns", "pairs", "between"] = "axes",
) -> tuple[Float[Array, "P R"], Float[Array, "P R"]]:
    """Computes cosines and sines of two-dimensional rotary positions, head_dim/4 frequencies per axis.

    The axes' frequencies stand one after the other ("axes", Qwen3-VL), or take turns, `first` first ("turns", "pairs",
    MoonViT). They are the same for both, but for "between" (Pixtral), where `second` has those between the first's.
    """
    # In float32 from the first step, as torch makes them: the goldens' angles carry these roundings.
    quarter = head_dim // 4
    angles = []
    for number, place in enumerate((first, second)):
        offset = np.float32(number * (order == "between"))
        exponents = (np.arange(0, head_dim // 2, 2, dtype=np.float32) + offset) / np.float32(head_dim // 2)
        angles.append(place[:, None].astype(jnp.float32) * (np.float32(1) / np.float32(theta) ** exponents))
    joined = jnp.stack(angles, axis=2 if order in ("turns", "pairs") else 1).reshape(-1, 2 * quarter)
    return jnp.cos(joined), jnp.sin(joined)


def place_features(
    values: Float[Array, "B T D"], features: Float[Array, "E D"], pads: Bool[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Returns `values` with the features put, in order, where `pads` is True."""
    flat = pads.reshape(-1)
    index = jnp.maximum(jnp.cumsum(flat) - 1, 0)
    placed = jnp.take(features.astype(values.dtype), index, axis=0, mode="clip").reshape(values.shape)
    return jnp.where(pads[..., None], placed, values)


class Convolution(nnx.Module):
    """A convolution over the places of an array, padded with zeros by half its kernel: kernel [*size, in, out]."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        axes: int = 2,
        size: int = 3,
        stride: int = 1,
        bias: bool = False,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
    ):
        scale = (inputs * size**axes) ** -0.5
        self.kernel = nnx.Param(normal(rngs, (*(size,) * axes, inputs, outputs), scale, dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None
        self.stride = stride

    def __call__(self, x: Float[Array, "B *places D"]) -> Float[Array, "B *others E"]:
        """Applies to [B, *places, in]; sums in float32."""
        kernel, axes = self.kernel[...].astype(x.dtype), x.ndim - 2
        room = [(size // 2, size // 2) for size in kernel.shape[:axes]]
        names = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}[axes]
        found = jax.lax.conv_general_dilated(
            x, kernel, (self.stride,) * axes, room, dimension_numbers=names, preferred_element_type=jnp.float32
        ).astype(x.dtype)
        return found if self.bias is None else found + self.bias[...].astype(x.dtype)
