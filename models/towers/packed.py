"""The towers of packed patches, told apart by switches: those of Qwen-VL 2, 2.5 and 3 and GLM-4V, MoonViT, Pixtral.

Images of a batch are packed into one row of patches. Which patches attend to each other, and where each reads learned
positions, is decided on the host (`plan_patches`) and travels as index arrays, so that other images of the same sizes
never recompile. Sources: transformers' vision models of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V, Kimi-K2.5 and Pixtral,
and the projectors of Mistral Small 3.1 and LLaVA.

Axis letters: P patches, Y segments, Z patches per segment (padded), E merged tokens, M patches per token, D width.
"""

import dataclasses
import itertools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from kvpatch_jax.errors import ConfigError, ShapeError

from ..decoder.layers import ACTIVATIONS, GatedMLP, Linear, RMSNorm, check_activation
from .common import (
    BlockConfig,
    LayerNorm,
    PlainBlock,
    PlainMLP,
    add_positions,
    axial_tables,
    check_heads,
    count_layers_run,
    join_places,
    learned,
    pad_segments,
    patch_places,
    resample_taps,
    scan_blocks,
    segment_table,
)

GATED_MERGER_EPSILON = 1e-5
"""Of its layer norm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedConfig(BlockConfig):
    """Sizes and switches of a tower and its merger, beside those of its blocks: `merge` patches a side become one token
    of `output_width`.

    Attributes:
      patch_bias: of the map of patches.
      embedding_norm, final_norm: norms in front of the blocks and behind them.
      positions: side of the square of learned positions, 0 for none; `interpolation` says how grids read it.
      rotary: rows have the first half of a head's frequencies and columns the second ("axes"); columns and rows take
        turns, rotating halves ("turns") or neighbours ("pairs", which computes the same of maps in another order); or
        rows have every other frequency, columns those between ("between").
      raster: patches come row by row, and not square by square.
      frames: the frames of a grid attend to each other, are told apart and averaged: so many at most; 0: they are alike
        and apart.
      window: in pixels; layers but the `full_layers` attend in windows. 0 for none.
      deepstack_layers: blocks whose output goes to the first language layers as well.
      feature_layer: which hidden state the features are, as transformers counts them: -1 the last.
      merger_norm, joined: patches are normed, and those of a token mixed by a map without bias, in front of the MLP.
      merger_width, merger_activation, merger_bias, merger_epsilon: of the merger's MLP, and of its norm; width and
        epsilon None: as wide as a token's patches, and the tower's own.
      gated_merger: GLM-4V's, which joins patches, and has a norm and a gated MLP of `merger_width` behind that.
    """

    depth: int
    output_width: int
    patch: int
    merge: int = 1
    temporal: int = 1
    channels: int = 3
    theta: float
    norm_epsilon: float = 1e-6
    fused: bool = True
    patch_bias: bool = False
    embedding_norm: bool = False
    final_norm: bool = False
    positions: int = 0
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    rotary: Literal["axes", "turns", "pairs", "between"] = "axes"
    raster: bool = False
    frames: int = 0
    window: int = 0
    full_layers: tuple[int, ...] = ()
    deepstack_layers: tuple[int, ...] = ()
    feature_layer: int = -1
    merger_norm: bool = True
    joined: bool = False
    merger_width: int | None = None
    merger_activation: str = "gelu"
    merger_bias: bool = True
    merger_epsilon: float | None = None
    gated_merger: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.width, self.heads, 4)
        _ = self.layers_run  # refuses a layer that is not there
        check_activation(self.merger_activation, "projector_hidden_act")
        inside = {layer for layer in self.deepstack_layers if type(layer) is int and 0 <= layer < self.depth}
        if list(self.deepstack_layers) != sorted(inside):
            raise ConfigError(
                f"deepstack layers: got {self.deepstack_layers}; expected rising layers below {self.depth}"
            )

    @property
    def features(self) -> int:
        """Values per patch as the processor hands them over: channels · temporal · patch · patch."""
        return self.channels * self.temporal * self.patch**2

    @property
    def layers_run(self) -> int:
        """Blocks up to the hidden state that is the feature."""
        return count_layers_run(self.feature_layer, self.depth)


def plan_patches(config: PackedConfig, grids: Int[np.ndarray, "images axes"]) -> dict[str, np.ndarray]:
    """Returns index arrays for images or videos with these (height, width) or (time, height, width) grids of patches.

    Returns `rows`, `columns` (int32 [P], place in the frame); `segments` (int32 [Y,Z], patch numbers per frame, or per
    grid whose frames attend to each other, padded by P) and `windows` (the same per window); `taps` and `weights`
    (int32, float32 [P,taps]) of learned positions; of patches in raster order `merged` (int32 [E,M], those of each
    token, in the first frame), and of grids of several frames told apart `times` (int32 [P], 0 in a grid of one frame,
    else the frame's number from 1), `strides` and `counts` (int32 [E], patches per frame and frames of a token's grid).

    Raises:
      ShapeError: a grid that is not a multiple of the merge size, or of more frames than the tower takes.
    """
    parts, sizes, windows, merged, frames = [], [], [], [], []
    reach = config.window // config.patch // config.merge  # merged patches per side of a window
    for *time, height, width in np.asarray(grids).tolist():
        count = time[0] if time else 1
        if config.frames and not 1 <= count <= config.frames:
            raise ShapeError(f"grid: got {(count, height, width)}; expected 1 to {config.frames} frames")
        rows, columns = squares = patch_places(height, width, config.merge)
        if config.raster:
            merged.append((sum(sizes) + squares[0] * width + squares[1]).reshape(-1, config.merge**2))
            rows, columns = patch_places(height, width, 1)
            frames.append((count, rows.size, len(merged[-1])))
        frame = (rows, columns)
        if config.positions:
            frame += resample_taps(rows, columns, (height, width), config.positions, config.interpolation)
        if reach:
            across = -(-(width // config.merge) // reach)
            window = (rows // config.merge // reach) * across + columns // config.merge // reach
            # transformers reorders patches by window and back. Here they stay in the processor's order, and a window is
            # a list of their numbers.
            inside = [np.flatnonzero(window == number) for number in np.unique(window)]
            firsts = sum(sizes) + rows.size * np.arange(count)
            windows += [first + patches for first in firsts for patches in inside]
        parts += [frame] * count
        sizes += [rows.size * count] if config.frames else [rows.size] * count

    plan = {**join_places(parts), "segments": segment_table(sizes)}
    if windows:
        plan["windows"] = pad_segments(windows, sum(sizes))
    if merged:
        plan["merged"] = np.concatenate(merged).astype(np.int32)
    if not config.frames or max(count for count, *_ in frames) == 1:
        return plan
    counts, strides, tokens = np.array(frames, np.int32).T
    numbers = [np.arange(count, dtype=np.int32) + (count > 1) for count in counts]
    times = [np.repeat(own, stride) for own, stride in zip(numbers, strides, strict=True)]
    return plan | {
        "times": np.concatenate(times).astype(np.int32),
        "strides": np.repeat(strides, tokens),
        "counts": np.repeat(counts, tokens),
    }


def frame_table(frames: int, width: int) -> Float32[np.ndarray, "rows D"]:
    """Returns what is added to patches by frame: zeros for a lone one, then sines and cosines of the number."""
    # In float32 from the first step, as torch makes them.
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    angles = np.arange(frames, dtype=np.float32)[:, None] * (np.float32(1) / np.float32(10000) ** exponents)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.concatenate([np.zeros((1, width), np.float32), table]).astype(np.float32)


class Merger(nnx.Module):
    """[norm,] [map of a token's patches to one,] linear, activation, linear; or, with `lead=(n,)`, n of them to scan
    over, whose norms are over all of a token's patches.
    """

    def __init__(self, config: PackedConfig, rngs: nnx.Rngs, lead: tuple[int, ...] = ()):
        dtype, square = jnp.dtype(config.dtype), config.width * config.merge**2
        epsilon = config.norm_epsilon if config.merger_epsilon is None else config.merger_epsilon
        Norm = RMSNorm if config.rms_norms else LayerNorm
        own = {"lead": lead, "dtype": dtype}
        self.norm = Norm(square if lead else config.width, epsilon=epsilon, **own) if config.merger_norm else None
        self.joined = Linear(square, config.width, bias=False, rngs=rngs, **own) if config.joined else None
        self.mlp = PlainMLP(
            config.width if config.joined else square,
            config.merger_width or square,
            config.output_width,
            activation=config.merger_activation,
            bias=config.merger_bias,
            rngs=rngs,
            **own,
        )

    def __call__(self, squares: Float[Array, "E *M D"]) -> Float[Array, "E W"]:
        """Applies to the patches [E,M,D] of each token, or to what is joined [E,M·D]."""
        x = squares if self.norm is None else self.norm(squares)
        if self.joined is None:
            return self.mlp(x.reshape(len(x), -1))
        # `unfold` puts a token's patches together channel by channel.
        return self.mlp(self.joined(jnp.swapaxes(x, 1, 2).reshape(len(x), -1)))


class GatedMerger(nnx.Module):
    """A map of a token's patches to one, linear, layer norm, GELU, gated MLP."""

    def __init__(self, config: PackedConfig, rngs: nnx.Rngs):
        width, dtype = config.output_width, jnp.dtype(config.dtype)
        # A convolution in the file, whose stride is its kernel.
        self.joined = Linear(config.width * config.merge**2, width, bias=True, rngs=rngs, dtype=dtype)
        self.project = Linear(width, width, bias=False, rngs=rngs, dtype=dtype)
        self.norm = LayerNorm(width, epsilon=GATED_MERGER_EPSILON, dtype=dtype)
        inner = config.merger_width or width
        self.mlp = GatedMLP(width, inner, bias=False, activation=config.activation, rngs=rngs, dtype=dtype)

    def __call__(self, squares: Float[Array, "E M D"]) -> Float[Array, "E W"]:
        """Applies to the patches of each token."""
        x = self.joined(squares.reshape(len(squares), -1))
        return self.mlp(ACTIVATIONS["gelu"](self.norm(self.project(x))))


class PackedTower(nnx.Module):
    """Pixels to embeddings of the language tower, one per square of patches, and the same for each deepstack layer."""

    def __init__(self, config: PackedConfig, rngs: nnx.Rngs):
        dtype, width = jnp.dtype(config.dtype), config.width

        def norm(wanted):
            Norm = RMSNorm if config.rms_norms else LayerNorm
            return Norm(width, epsilon=config.norm_epsilon, dtype=dtype) if wanted else None

        self.patch_embedding = Linear(config.features, width, bias=config.patch_bias, rngs=rngs, dtype=dtype)
        self.embedding_norm = norm(config.embedding_norm)
        self.position_embedding = learned(rngs, (config.positions**2, width), dtype) if config.positions else None
        self.blocks = PlainBlock(config, rngs, (config.depth,))
        self.final_norm = norm(config.final_norm)
        self.merger = GatedMerger(config, rngs) if config.gated_merger else Merger(config, rngs)
        deep = len(config.deepstack_layers)
        self.deepstack = Merger(config, rngs, (deep,)) if deep else None
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, " P *patch"],
        rows: Int[Array, " P"],
        columns: Int[Array, " P"],
        segments: Int[Array, "Y Z"],
        windows: Int[Array, "W O"] | None = None,
        taps: Int[Array, "P taps"] | None = None,
        weights: Float[Array, "P taps"] | None = None,
        merged: Int[Array, "E M"] | None = None,
        times: Int[Array, " P"] | None = None,
        strides: Int[Array, " E"] | None = None,
        counts: Int[Array, " E"] | None = None,
    ) -> Float[Array, "E D"] | tuple[Float[Array, "E D"], Float[Array, "S E D"]]:
        """Embeds packed patches [P, channels·temporal·patch²], in any shape; the index arrays come from `plan_patches`.

        Returns the features [E,D] and, of a tower with S deepstack layers, the deepstack features [S,E,D]: the s-th
        are to be added to the residual that leaves language layer s, at the image's tokens.
        """
        config = self.config
        hidden = self.patch_embedding(pixel_values.reshape(len(rows), -1).astype(jnp.dtype(config.dtype)))
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        if self.position_embedding is not None and taps is not None and weights is not None:
            hidden = add_positions(hidden, self.position_embedding, taps, weights)
        if times is not None:
            hidden = hidden + jnp.asarray(frame_table(config.frames, config.width))[times].astype(hidden.dtype)

        axes = (columns, rows) if config.rotary in ("turns", "pairs") else (rows, columns)
        tables = axial_tables(*axes, config.width // config.heads, config.theta, config.rotary)
        pairing = "pairs" if config.rotary == "pairs" else "half"

        # One scan goes through maximal runs of layers that attend alike, and ends behind each deepstack layer.
        stops, whole, taken = [layer + 1 for layer in config.deepstack_layers], set(config.full_layers), []
        edges = {layer for layer in range(1, config.depth) if (layer in whole) != (layer - 1 in whole)}
        for first, last in itertools.pairwise(sorted({0, *edges, *stops, config.layers_run})):
            reach = segments if windows is None or first in whole else windows

            def step(block: PlainBlock, hidden: Array, reach: Array = reach) -> Array:
                return block.attend(hidden, tables, pairing, reach)

            hidden = scan_blocks(self.blocks, step, hidden, first, last)
            taken += [hidden] if last in stops else []
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)

        squares = hidden.reshape(-1, config.merge**2, config.width) if merged is None else hidden[merged]
        if merged is not None and strides is not None and counts is not None:
            # The mean over frames, of which padding has none.
            for frame in range(1, config.frames):
                here = hidden[merged + frame * strides[:, None]]
                squares = squares + jnp.where((frame < counts)[:, None, None], here, 0)
            squares = squares / jnp.maximum(counts, 1)[:, None, None].astype(squares.dtype)
        features = self.merger(squares)
        if self.deepstack is None:
            return features

        graph, state = nnx.split(self.deepstack)

        def body(carry: None, item: tuple) -> tuple[None, Array]:
            return carry, nnx.merge(graph, item[0])(item[1])

        stacked = jnp.stack(taken).reshape(len(taken), len(squares), -1)
        return features, jax.lax.scan(body, None, (state, stacked))[1]
