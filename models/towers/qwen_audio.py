"""Audio encoders of Qwen2.5-Omni and Qwen3-Omni: convolutions over log-mel frames, then attention in windows.

Source: transformers' Qwen2_5OmniAudioEncoder and Qwen3OmniMoeAudioEncoder. Audio is cut into chunks of equal size on
the host, each convolved alone. Which frames count and which tokens attend to each other travels as index arrays, so
that other audio of as many chunks never recompiles.

Axis letters: C chunks, F frames per chunk, M mel bins, N tokens, Y windows, Z tokens per window (padded), E features.
"""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from kvpatch_jax.errors import ConfigError, InputError

from ..decoder.layers import ACTIVATIONS, Linear
from .common import (
    BlockConfig,
    Convolution,
    LayerNorm,
    PlainBlock,
    attend_segments,
    check_heads,
    scan_blocks,
    segment_table,
)

CHUNKS_AT_ONCE = 64
"""Chunks that are convolved at a time: the first convolution of Qwen3-Omni makes 6 MB of one second of audio."""

FILLS = {"segments": "tokens"}
"""Of a plan's tables, that of numbers of the rows of another."""


@dataclasses.dataclass(frozen=True)
class AudioConfig:
    """Sizes of an audio encoder.

    Attributes:
      mels: bins of the log-mel features.
      chunk: frames that are convolved together (`n_window` · 2).
      attention_chunks: chunks that attend to each other (Qwen3-Omni: `n_window_infer` / chunk).
      downsampling: channels of Qwen3-Omni's convolutions; 0 for Qwen2.5-Omni's.
      positions: the most tokens of a chunk that have a position.

    Raises:
      ConfigError: sizes that the encoder's own rule for lengths does not hold for.
    """

    mels: int
    depth: int
    width: int
    heads: int
    intermediate: int
    output_width: int
    chunk: int
    positions: int
    attention_chunks: int = 1
    downsampling: int = 0
    activation: str = "gelu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads)
        if self.width % 2 or self.width < 4:
            raise ConfigError(f"audio d_model: got {self.width}; expected an even number from 4 on")
        if self.chunk_tokens > self.positions:
            raise ConfigError(
                f"audio max_source_positions: got {self.positions}; expected at least {self.chunk_tokens}, the tokens "
                "of a chunk"
            )
        # The authors' code counts 13 tokens per chunk, whatever its size.
        if self.downsampling and self.chunk_tokens != 13:
            raise ConfigError(f"audio n_window: got {self.chunk // 2}; expected 49 to 52, whose chunks are 13 tokens")
        if self.attention_chunks < 1:
            raise ConfigError(f"audio n_window_infer: got less than a chunk; expected at least {self.chunk} frames")

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a whole chunk."""
        return _halved(self.chunk, 3 if self.downsampling else 1)

    @property
    def block(self) -> BlockConfig:
        """The transformer block; Qwen2.5-Omni's keys have no bias."""
        sizes = (self.width, self.heads, self.intermediate, self.activation, 1e-5)
        return BlockConfig(*sizes, key_bias=self.downsampling > 0, dtype=self.dtype)

    def tokens(self, frames: int) -> int:
        """Returns how many tokens stand for audio of so many frames."""
        if not self.downsampling:
            return _halved(frames) // 2
        return frames // self.chunk * self.chunk_tokens + _halved(frames % self.chunk, 3)


def _halved(frames: int, times: int = 1) -> int:
    """Returns the length that convolutions of stride 2 leave."""
    for _ in range(times):
        frames = -(-frames // 2)
    return frames


def plan_audio(
    config: AudioConfig,
    input_features: Float[np.ndarray, "audio M frames"],
    feature_attention_mask: Int[np.ndarray, "audio frames"],
) -> dict[str, np.ndarray]:
    """Cuts audio into chunks, and says which tokens of them there are and which attend to each other.

    Every audio is treated as if it were alone. transformers pads the chunks of a call to the longest, which shows in
    the last token of an audio below one chunk (Qwen3-Omni); for one audio, and for several of a chunk or more, both
    agree.

    Returns:
      `inputs` float32 [C,F,M]: the frames by chunk; `lengths` int32 [C]: how many of them convolutions see; `tokens`
      int32 [N]: places among all tokens of all chunks; `segments` int32 [Y,Z]: token numbers, padded by N; for
      Qwen2.5-Omni `pairs` int32 [E], the first of the two tokens that a feature is the mean of.

    Raises:
      InputError: audio too short for a single token.
    """
    chunks, lengths, places, segments, pairs = [], [], [], [], []
    first = 0
    for number, (features, mask) in enumerate(zip(input_features, feature_attention_mask, strict=True)):
        frames = np.asarray(features, np.float32).T[np.asarray(mask, bool)]
        if not config.tokens(len(frames)):
            raise InputError(f"audio {number}: got {len(frames)} frames; expected enough for one token")

        sizes: list[int] = []
        for start in range(0, len(frames), config.chunk):
            piece = frames[start : start + config.chunk]
            size = _halved(len(piece), 3 if config.downsampling else 1)
            places.append(len(chunks) * config.chunk_tokens + np.arange(size))
            sizes.append(size)
            chunks.append(np.pad(piece, ((0, config.chunk - len(piece)), (0, 0))))
            # Qwen3-Omni's convolutions see padding behind the last chunk of longer audio, as the authors' code has it.
            whole = config.downsampling > 0 and len(frames) > config.chunk
            lengths.append(config.chunk if whole else len(piece))

        total, window = sum(sizes), sizes[0] * config.attention_chunks
        segments += [min(window, total - start) for start in range(0, total, window)]
        if not config.downsampling:
            pairs.append(first + 2 * np.arange(total // 2))
        first += total

    plan = {
        "inputs": np.stack(chunks),
        "lengths": np.array(lengths, np.int32),
        "tokens": np.concatenate(places).astype(np.int32),
        "segments": segment_table(segments),
    }
    return plan | ({"pairs": np.concatenate(pairs).astype(np.int32)} if pairs else {})


def sinusoids(length: int, channels: int) -> Float32[np.ndarray, "length channels"]:
    """Returns Whisper's fixed positions: sines of falling frequencies, then cosines."""
    step = np.float32(np.log(10000) / (channels // 2 - 1))
    frequencies = np.exp(-step * np.arange(channels // 2, dtype=np.float32))
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _silence_behind(x: Float[Array, "C places *rest"], lengths: Int[Array, " C"]) -> Float[Array, "C places *rest"]:
    """Returns `x` with zeros from place `lengths` on."""
    inside = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 2)), x, 0)


def _in_batches(
    function: Callable[[Array, Array], Array], mel: Float[Array, "C F M"], lengths: Int[Array, " C"]
) -> Float[Array, "C T D"]:
    """Applies a function of chunks to `CHUNKS_AT_ONCE` of them at a time."""
    if len(mel) <= CHUNKS_AT_ONCE:
        return function(mel, lengths)
    each = lambda at: function(at[0][None], at[1][None])[0]  # noqa: E731
    return jax.lax.map(each, (mel, lengths), batch_size=CHUNKS_AT_ONCE)


class _AudioBlocks(nnx.Module):
    """What both encoders do with convolved chunks: positions, blocks that attend in windows, the last norm."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        self.blocks = PlainBlock(config.block, rngs, (config.depth,))
        self.final_norm = LayerNorm(config.width, epsilon=1e-5, dtype=jnp.dtype(config.dtype))
        self.config = config

    def attend(
        self, chunks: Float[Array, "C T D"], places: Int[Array, " N"], segments: Int[Array, "Y Z"]
    ) -> Float[Array, "N D"]:
        """Returns the tokens at `places` of the convolved chunks, through all blocks."""
        positions = jnp.asarray(sinusoids(self.config.chunk_tokens, self.config.width))
        hidden = (chunks + positions.astype(chunks.dtype)).reshape(-1, self.config.width)[places]

        def step(block: PlainBlock, hidden: Array) -> Array:
            return block.update(hidden, attend_segments(*block.project(hidden), segments))

        return scan_blocks(self.blocks, step, hidden, 0, self.config.depth)


class Qwen25AudioTower(_AudioBlocks):
    """Log-mel frames to embeddings of the language tower, 25 per second: Qwen2.5-Omni."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        dtype = jnp.dtype(config.dtype)
        self.first = Convolution(config.mels, config.width, axes=1, bias=True, rngs=rngs, dtype=dtype)
        self.second = Convolution(config.width, config.width, axes=1, stride=2, bias=True, rngs=rngs, dtype=dtype)
        self.output = Linear(config.width, config.output_width, bias=True, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        mel: Float[Array, "C F M"],
        lengths: Int[Array, " C"],
        tokens: Int[Array, " N"],
        segments: Int[Array, "Y Z"],
        pairs: Int[Array, " E"],
    ) -> Float[Array, "E D"]:
        """Embeds chunks of frames; the index arrays come from `plan_audio`."""
        gelu = ACTIVATIONS["gelu"]

        def convolve(mel: Array, lengths: Array) -> Array:
            return gelu(self.second(_silence_behind(gelu(self.first(mel)), lengths)))

        chunks = _in_batches(convolve, mel.astype(jnp.dtype(self.config.dtype)), lengths)
        hidden = self.attend(chunks, tokens, segments)
        hidden = (hidden[pairs] + hidden[pairs + 1]) / 2
        return self.output(self.final_norm(hidden))


class Qwen3AudioTower(_AudioBlocks):
    """Log-mel frames to embeddings of the language tower, 13 per second: Qwen3-Omni."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        dtype, channels = jnp.dtype(config.dtype), config.downsampling
        widths = itertools.pairwise((1, channels, channels, channels))
        self.first, self.second, self.third = (
            Convolution(*pair, stride=2, bias=True, rngs=rngs, dtype=dtype) for pair in widths
        )
        inputs = channels * _halved(config.mels, 3)
        self.joined = Linear(inputs, config.width, bias=False, rngs=rngs, dtype=dtype)
        self.inner = Linear(config.width, config.width, bias=True, rngs=rngs, dtype=dtype)
        self.outer = Linear(config.width, config.output_width, bias=True, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        mel: Float[Array, "C F M"],
        lengths: Int[Array, " C"],
        tokens: Int[Array, " N"],
        segments: Int[Array, "Y Z"],
    ) -> Float[Array, "N D"]:
        """Embeds chunks of frames; the index arrays come from `plan_audio`."""
        gelu = ACTIVATIONS["gelu"]

        def convolve(mel: Array, lengths: Array) -> Array:
            x = mel[..., None]
            for convolution in (self.first, self.second, self.third):
                # A convolution's bias behind the end would reach the last frames through the next one.
                lengths = -(-lengths // 2)
                x = _silence_behind(gelu(convolution(x)), lengths)
            return self.joined(jnp.swapaxes(x, 2, 3).reshape(*x.shape[:2], -1))

        chunks = _in_batches(convolve, mel.astype(jnp.dtype(self.config.dtype)), lengths)
        hidden = self.final_norm(self.attend(chunks, tokens, segments))
        return self.outer(ACTIVATIONS[self.config.activation](self.inner(hidden)))
