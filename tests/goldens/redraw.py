"""Draw the weights of a golden model again from their names, so that no weights are committed.

The same code runs where the goldens are made (with transformers) and in the tests. It uses only the raw words of a
counter-based generator and plain float64 arithmetic, so the bits depend neither on NumPy's version nor on a maths
library.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

_WORDS_PER_VALUE = 4  # four 16-bit uniforms, summed: close to normal, standard deviation 2^16 / sqrt(3)
_NORM_MARKERS = ("norm", "ln_q", "layernorm")


def standard_values(name: str, count: int, seed: int = 0) -> np.ndarray:
    """`count` nearly normal float64 values (mean 0, variance 1, |x| <= 3.5) that depend only on `name` and `seed`."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count).astype("<u8")
    parts = words.view("<u2").reshape(count, _WORDS_PER_VALUE).astype(np.int64)
    centred = 2 * parts.sum(axis=1) - _WORDS_PER_VALUE * (2**16 - 1)
    return centred.astype(np.float64) * (np.sqrt(3.0 / _WORDS_PER_VALUE) / 2**16)


def _scale(name: str, shape: Sequence[int]) -> tuple[float, float]:
    """Mean and standard deviation of a parameter, from the last words of its name and its shape."""
    owner = name.split(".")[-2] if "." in name else name
    if name.endswith("bias"):
        return 0.0, 0.2
    # A number that multiplies a whole layer hides the layers below it where it is next to nothing.
    if len(shape) == 1 and (any(marker in owner for marker in _NORM_MARKERS) or name.endswith("layer_scalar")):
        return 1.0, 0.2
    # Bounds between which a map's numbers are cut: near enough that they cut some, and in order.
    if name.endswith(("put_min", "put_max")):
        return (-1.5 if name.endswith("min") else 1.5), 0.1
    if "embed_tokens" in name.split(".") or "pos_emb" in name or "position_embedding_table" in name or len(shape) < 2:
        return 0.0, 1.0
    if "experts" in name and len(shape) == 3:  # [experts, out, in]
        return 0.0, 1.2 / float(np.sqrt(shape[2]))
    return 0.0, 1.2 / float(np.sqrt(np.prod(shape[1:])))


def redraw(name: str, shape: Sequence[int], dtype: np.typing.DTypeLike = np.float32, seed: int = 0) -> np.ndarray:
    """The parameter called `name` (Hugging Face's name and `[out, in, ...]` layout), drawn again.

    Matrices and kernels have standard deviation 1.2 / sqrt(fan in), norm weights 1 ± 0.2, biases 0 ± 0.2, embeddings
    0 ± 1: large enough that a wrong or forgotten parameter shows in every output.
    """
    mean, deviation = _scale(name, shape)
    values = mean + deviation * standard_values(name, int(np.prod(shape)), seed)
    return values.reshape(tuple(shape)).astype(dtype)


def redraw_all(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """Every parameter of `shapes` (name -> shape), drawn again in float32."""
    return {name: redraw(name, shape, seed=seed) for name, shape in shapes.items()}


def draw_image(name: str, height: int, width: int, channels: int = 3) -> np.ndarray:
    """A uint8 image [H, W, C]: waves with noise, so that neither resizing nor patch order can hide."""
    rows, columns = np.mgrid[:height, :width]
    base = 128 + 60 * np.sin(rows / 3.0)[..., None] + 40 * np.cos(columns / 2.0)[..., None] * np.arange(1, channels + 1)
    noise = standard_values(name, height * width * channels).reshape(height, width, channels)
    return np.clip(base + 25 * noise, 0, 255).astype(np.uint8)


def draw_numbers(name: str, *shape: int) -> np.ndarray:
    """float32 numbers that stand for normalised pixels or log-mel features."""
    return standard_values(name, int(np.prod(shape))).reshape(shape).astype(np.float32)


def draw_waves() -> list[np.ndarray]:
    """Two sounds of unequal lengths at 16 000 samples a second."""
    out = []
    for number, seconds in enumerate((0.93, 0.31)):
        size = int(seconds * 16000)
        times = np.arange(size) / 16000
        noise = standard_values(f"gemma4 sound {number}", size)
        out.append((0.3 * np.sin(2 * np.pi * (300 + 900 * times) * times) + 0.05 * noise).astype(np.float32))
    return out


def bits(array: np.ndarray) -> str:
    """A digest of an array's bytes."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()


def digest(array: np.ndarray) -> np.ndarray:
    """16 bytes [16] uint8 that stand for an array's shape and numbers (float32 or int32)."""
    array = np.asarray(array)
    array = array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
    text = f"{list(array.shape)} ".encode() + np.ascontiguousarray(array).tobytes()
    return np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.uint8)


def draw_frames(name: str, count: int, height: int, width: int) -> np.ndarray:
    """uint8 frames [N, H, W, 3] of squares with noise, so that neither resizing nor patch order can hide."""
    rows, columns = -(-height // 4), -(-width // 4)
    squares = standard_values(name, count * rows * columns * 3).reshape(count, rows, columns, 3)
    squares = squares.repeat(4, axis=1).repeat(4, axis=2)[:, :height, :width]
    noise = standard_values(f"{name} noise", squares.size).reshape(squares.shape)
    return np.clip(128 + 45 * squares + 15 * noise, 0, 255).astype(np.uint8)
