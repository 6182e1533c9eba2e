"""Rotary position embeddings: frequencies, cached layout, sections, and cosines that stay accurate at far positions.

A rope defines the angle by which every rotary pair of a cached key is rotated at a position. There are two methods:

* ``angles="exact"``: accurate to float32 rounding at any int32 position, without 64-bit arithmetic on the device. A
  frequency is kept as a 64-bit fixed-point fraction of a revolution (computed on the host in float64), and position ×
  frequency is computed modulo one revolution in wrapping uint32 arithmetic, so far positions lose no precision.
* ``angles="float32"``: float32(position) · float32(frequency), as the original engines compute it (off by 0.06 in the
  cosine at position 1 000 000), for parity with them and with their caches. The frequency is
  1 / theta ** (arange(0, dim, 2) / dim), each step rounded to float32, the power correctly. torch's own float32 power
  may differ in the last bit, depending on the CPU.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import rotate_patch

from ..errors import InputError, LayoutError
from ..utils.kinds import expect_kind, is_whole
from .scaling import Scaling as Scaling

Angles = Literal["exact", "float32"]
Pairs = Literal["half", "pairs"]
Order = Literal["blocked", "interleaved"]
_WORDS = {"cached": get_args(Pairs), "order": get_args(Order), "angles": get_args(Angles)}

POSITION_LIMIT = 2**30
"""Concrete positions of this magnitude or more are rejected."""

_REVOLUTION = 2.0 * math.pi


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of the *cached* keys. Hashable: a static argument under jit.

    Attributes:
      theta: base of the frequencies.
      dim: number of channels that rotate, R (even).
      cached: indices of a rotary pair in the cached key: "half" (i, i + R/2) or "pairs" (2i, 2i + 1). This is the
        layout of the cache, not of the checkpoint: DeepSeek-V3 and Kimi read pairs but cache halves.
      sections: for M-RoPE, how many frequencies each axis (time, height, width) takes; they sum to R/2.
      order: "blocked" (Qwen2.5-VL: the first section's frequencies, then the next), or "interleaved" (Qwen3-VL).
      width: head width if it is larger than `dim`; only the first `dim` channels rotate.
      scaling: frequency scaling, or None.
      angles: "exact" or "float32".

    Raises:
      LayoutError: `dim` is odd, sections do not sum to dim // 2, an option is unknown, or `width` is below `dim`.
      InputError: a length-dependent scaling is not pinned to one regime.
    """

    theta: float | int
    dim: int
    cached: Pairs = "half"
    sections: tuple[int, ...] | None = None
    order: Order = "blocked"
    width: int | None = None
    scaling: Scaling | None = None
    angles: Angles = "exact"

    def __post_init__(self) -> None:
        # Channels rotate in pairs.
        if not is_whole(self.dim, 2) or self.dim % 2:
            raise LayoutError(f"rope: got dim {self.dim!r:.80}; expected a positive even number")
        if not isinstance(self.theta, int | float) or isinstance(self.theta, bool) or not 0 < self.theta < math.inf:
            raise LayoutError(f"rope: got theta {self.theta!r:.80}; expected a positive number")

        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise LayoutError(f"rope: got {name} {getattr(self, name)!r}; expected one of {words}")
        if self.width is not None and not is_whole(self.width, self.dim):
            raise LayoutError(f"rope: got width {self.width}; expected at least dim {self.dim}")

        if self.sections is not None:
            is_sequence = isinstance(self.sections, tuple | list)
            if not is_sequence or not all(is_whole(section, 0) for section in self.sections):
                raise LayoutError(f"rope: got sections {self.sections!r:.80}; expected whole numbers, or None")
            # A list of a configuration file becomes a tuple, which can be hashed.
            object.__setattr__(self, "sections", tuple(int(section) for section in self.sections))
            if sum(self.sections) != self.dim // 2 or min(self.sections) < 0:
                total, half = sum(self.sections), self.dim // 2
                raise LayoutError(f"rope: got sections {self.sections} of sum {total}; expected dim // 2 = {half}")

        if self.scaling is not None:
            expect_kind(self.scaling, Scaling, "rope: scaling", "a Scaling, or None", LayoutError)
            self.scaling.check(self.dim)

    @functools.cached_property
    def axes(self) -> int | None:
        """Number of position axes; None for a plain one-dimensional rope."""
        return None if self.sections is None else len(self.sections)

    @property
    def head_width(self) -> int:
        """Width of a cached key head, H ≥ dim."""
        return self.dim if self.width is None else self.width

    @property
    def attention_scaling(self) -> float:
        """Factor that engines multiply cosine and sine by (YaRN, longrope). Relocation never applies it."""
        return 1.0 if self.scaling is None else self.scaling.attention_scaling

    @property
    def inverse_frequencies(self) -> np.ndarray:
        """Radians per position, float64 [R/2], scaling included."""
        return _inverse_frequencies(self, np.float64)

    @property
    def axis_of_frequency(self) -> np.ndarray:
        """Position axis of each frequency, int [R/2]; zeros without sections."""
        axis = np.zeros(self.dim // 2, np.int32)
        if self.sections is None:
            return axis
        if self.order == "blocked":
            return np.repeat(np.arange(len(self.sections), dtype=np.int32), self.sections)

        # Qwen3-VL cycles through the axes until a section is full; the remaining frequencies follow axis 0.
        step = len(self.sections)
        for index in range(1, step):
            axis[index : step * self.sections[index] : step] = index
        return axis


@functools.lru_cache(maxsize=256)
def _inverse_frequencies(rope: Rope, dtype: type) -> np.ndarray:
    """Returns radians per position, [R/2], scaling included, rounded to `dtype` at every step."""
    # As engines compute them in float32: exponent, power and reciprocal are rounded one by one.
    exponent = (np.arange(0, rope.dim, 2, dtype=dtype) / dtype(rope.dim)).astype(np.float64)
    theta = rope.theta if rope.scaling is None else rope.scaling.theta(rope.theta, rope.dim)
    plain = dtype(1.0) / (np.float64(theta) ** exponent).astype(dtype)
    if rope.scaling is not None:
        plain = rope.scaling.apply(plain, rope.theta, rope.dim)
    plain = np.asarray(plain, dtype)
    # The array is cached, and handed to every caller.
    plain.flags.writeable = False
    return plain


@functools.lru_cache(maxsize=256)
def _fixed_point(rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    """Returns revolutions per position as a 64-bit fraction: high and low words, uint32 [R/2]."""
    revolutions = _inverse_frequencies(rope, np.float64) / _REVOLUTION
    # Whole revolutions change no angle. Scaling by a power of two is exact, and Python's integers hold 64 bits.
    fractions = [int((float(value) % 1.0) * 2.0**64) for value in revolutions]
    high = np.array([fraction >> 32 for fraction in fractions], np.uint32)
    low = np.array([fraction & 0xFFFFFFFF for fraction in fractions], np.uint32)
    return high, low


def _whole_and_fraction(local: Num[Array, "..."], start: Int[Array, "..."]) -> tuple[Array, Array | None]:
    """Splits start + local into an int32 and a fraction, float32 in [0, 1); the fraction of integers is None."""
    # The sum stays an integer, because a float32 holds no odd ones beyond 2²⁴.
    if jnp.issubdtype(local.dtype, jnp.integer):
        return start.astype(jnp.int32) + local.astype(jnp.int32), None
    local = local.astype(jnp.float32)
    floor = jnp.floor(local)
    return start.astype(jnp.int32) + floor.astype(jnp.int32), local - floor


def _by_frequency(rope: Rope, position: Num[Array, "..."]) -> Num[Array, "..."]:
    """Selects each frequency's axis: [..., T, A] → [..., T, R/2], or without sections [..., T] → [..., T, 1]."""
    if rope.axes is None:
        return position[..., None]
    axis = rope.axis_of_frequency
    chosen = jnp.broadcast_to(position[..., :1], (*position.shape[:-1], axis.size))
    for index in range(1, rope.axes):
        chosen = jnp.where(axis == index, position[..., index : index + 1], chosen)
    return chosen


def _phase(rope: Rope, whole: Int[Array, "..."]) -> Array:
    """Computes whole · frequency modulo one revolution, in units of 2⁻³² revolution, uint32, within 3 units.

    The product of a 32-bit position and a 64-bit fraction needs only its middle 32 bits: the bits above are whole
    revolutions, and those below are smaller than the error. The device has no 64-bit integers, so the low word is
    multiplied by halves of 16 bits.
    """
    high, low = (jnp.asarray(word) for word in _fixed_point(rope))
    # Unsigned, because shifts of signed integers keep the sign; the phase of a negative position is the negated one.
    size = jnp.abs(whole).astype(jnp.uint32)
    size_high, size_low = size >> 16, size & 0xFFFF
    low_high, low_low = low >> 16, low & 0xFFFF
    # What size · low carries into the words above 2³²; size_low · low_low is below the error.
    carried = size_high * low_high + ((size_high * low_low) >> 16) + ((size_low * low_high) >> 16)
    phase = size * high + carried
    return jnp.where(whole < 0, jnp.uint32(0) - phase, phase)


def _cos_sin_of_phase(rope: Rope, phase: Array, fraction: Array | None) -> tuple[Array, Array]:
    """Computes cosine and sine of a uint32 phase and a fraction of a position, reduced to ±1/8 of a revolution."""
    # Rounded to the nearest quarter, so that the remainder is small, where float32 cosines are most accurate.
    quadrant = (phase + jnp.uint32(1 << 29)) >> 30
    remainder = (phase - (quadrant << 30)).astype(jnp.int32)
    angle = remainder.astype(jnp.float32) * np.float32(_REVOLUTION * 2.0**-32)
    # A fraction turns by less than one frequency, so float32 is exact enough.
    if fraction is not None:
        frequencies = _inverse_frequencies(rope, np.float64).astype(np.float32)
        angle = angle + _by_frequency(rope, fraction) * jnp.asarray(frequencies)
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    # Quadrants 1 and 3 swap the two; quadrants 2 and 3 negate them.
    odd, negated = (quadrant & 1) == 1, quadrant >= 2
    new_cos, new_sin = jnp.where(odd, -sin, cos), jnp.where(odd, cos, sin)
    return jnp.where(negated, -new_cos, new_cos), jnp.where(negated, -new_sin, new_sin)


def _align(rope: Rope, local: Num[Array, "..."], start: Int[Array, "..."]) -> tuple[Array, Array]:
    """Aligns local [..., T] or [..., T, A] with a start that is a scalar, one per axis, or batched like local."""
    axes = () if rope.axes is None else (rope.axes,)
    if local.ndim <= len(axes) or (axes and local.shape[-1:] != axes):
        expected = "[..., T]" if rope.axes is None else f"[..., T, {rope.axes}] for {rope.axes} axes"
        raise InputError(f"rope: got positions of shape {local.shape}; expected {expected}")
    if start.ndim and axes and start.shape[-1:] != axes:
        raise InputError(f"rope: got start of shape {start.shape}; expected a scalar or [..., {rope.axes}]")
    return local, jnp.expand_dims(start, start.ndim - len(axes)) if start.ndim else start


def rope_tables(
    rope: Rope, positions: Num[Array | np.ndarray, "..."], start: Int[Array | np.ndarray, "..."] | int | np.integer = 0
) -> tuple[Float[Array, "*batch T half"], Float[Array, "*batch T half"]]:
    """Computes cosines and sines at start + positions, float32, without the attention scaling.

    Args:
      rope: static.
      positions: int or float [..., T] ([..., T, A] with sections); may be fractional; may be traced.
      start: int32, a scalar, one per axis [A], or batched ([...] or [..., A]); may be traced.

    Returns:
      cos, sin [..., T, R/2], within about 2e-7 with ``angles="exact"`` at every int32 position.

    Raises:
      InputError: shapes do not match the rope, or integers exceed int32.
    """
    # NumPy on the host, so that a start costs no transfer of its own.
    start = start if isinstance(start, jax.Array) else np.asarray(start, np.int32)
    return _tables(rope, _device_positions(positions), start)


# Inlined in a traced caller. Called eagerly, it is one program in place of thirty.
@functools.partial(jax.jit, static_argnames=("rope",), inline=True)
def _tables(rope: Rope, positions: Num[Array, "..."], start: Int[Array, "..."]) -> tuple[Array, Array]:
    local, start = _align(rope, positions, start.astype(jnp.int32))
    if rope.angles == "float32":
        absolute = start.astype(jnp.float32) + local.astype(jnp.float32)
        return _compute_once(*_engine_cos_sin(rope, absolute))

    whole, fraction = _whole_and_fraction(local, start)
    return _compute_once(*_cos_sin_of_phase(rope, _phase(rope, _by_frequency(rope, whole)), fraction))


def _device_positions(positions: Num[Array | np.ndarray, "..."]) -> Array:
    """Moves positions to the device; rejects integers that exceed int32, because jax would wrap them."""
    if isinstance(positions, np.ndarray) and positions.dtype.kind in "iu" and positions.dtype.itemsize >= 4:
        least, greatest = extent(positions)
        if greatest >= 2**31 or least < -(2**31):
            raise InputError(f"rope: got positions from {least:.0f} to {greatest:.0f}; expected int32")
    return jnp.asarray(positions)


def _compute_once(cos: Array, sin: Array) -> tuple[Array, Array]:
    """Returns the tables unchanged, on a CPU behind an optimisation barrier.

    Without it, XLA for CPUs fuses their computation into the loop over layers and heads that reads them, and computes
    every cosine once per layer and head. Programs for other platforms do not change.
    """
    return jax.lax.platform_dependent(
        cos, sin, cpu=lambda *tables: jax.lax.optimization_barrier(tables), default=lambda *tables: tables
    )


def _engine_cos_sin(rope: Rope, absolute: Array) -> tuple[Array, Array]:
    """Computes cosine and sine of float32 angles, as the original engines do."""
    angle = _by_frequency(rope, absolute) * jnp.asarray(_inverse_frequencies(rope, np.float32))
    return jnp.cos(angle), jnp.sin(angle)


def relocation_tables(
    rope: Rope, old: Num[Array | np.ndarray, "..."], new: Num[Array | np.ndarray, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Computes cosines and sines of R(new) · R(old)⁻¹, float32.

    `old` and `new` are positions as `rope_tables` takes them, and broadcast against each other. Exact angles are
    subtracted modulo one revolution before the cosine is computed, so the error is that of a single rotation. With
    ``"float32"`` both angles are those of the engine.
    """
    zero = jnp.zeros((), jnp.int32)
    old, _ = _align(rope, _device_positions(old), zero)
    new, _ = _align(rope, _device_positions(new), zero)

    if rope.angles == "float32":
        cos_old, sin_old = _engine_cos_sin(rope, old.astype(jnp.float32))
        cos_new, sin_new = _engine_cos_sin(rope, new.astype(jnp.float32))
        return _compute_once(cos_new * cos_old + sin_new * sin_old, sin_new * cos_old - cos_new * sin_old)

    # Phases wrap at one revolution, so their difference is exact however far both positions are.
    whole_old, fraction_old = _whole_and_fraction(old, zero)
    whole_new, fraction_new = _whole_and_fraction(new, zero)
    phase = _phase(rope, _by_frequency(rope, whole_new)) - _phase(rope, _by_frequency(rope, whole_old))
    if fraction_old is None and fraction_new is None:
        return _compute_once(*_cos_sin_of_phase(rope, phase, None))

    difference = (0.0 if fraction_new is None else fraction_new) - (0.0 if fraction_old is None else fraction_old)
    return _compute_once(*_cos_sin_of_phase(rope, phase, jnp.asarray(difference)))


def rotate(
    x: Float[Array, "*leading T K H"],
    cos: Float[Array, "..."],
    sin: Float[Array, "..."],
    cached: Pairs = "half",
    scale: float = 1.0,
) -> Float[Array, "*leading T K H"]:
    """Rotates the first R channels of x by the given cosines and sines, in float32; the result has x's dtype.

    Args:
      x: queries or keys, any leading dimensions.
      cos, sin: [..., T, R/2], broadcast over x's leading dimensions (x [B, T, K, H] takes cos [B, T, R/2] or [T, R/2]).
      cached: "half" or "pairs".
      scale: factor of the rotated channels, for engines whose keys carry an attention scaling.
    """
    return rotate_patch(x, cos, sin, layout=cached, scale=scale)


def extent(positions: Num[Array | np.ndarray, "..."]) -> tuple[float, float]:
    """Returns the minimum and maximum of concrete positions; NaN if any is NaN, and (0, 0) for an empty array."""
    values = np.asarray(positions)
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def end_position[P: (np.ndarray, Array)](positions: P) -> P:
    """Returns the position behind which each row goes on, [B] of [B,T] or [B,T,A]: that of its last token where the
    axes of that are equal (a text, or what closes an image or video), else the largest of all.

    What follows begins one past it, rounded down. The two differ only where a video's time runs ahead of what follows
    it (transformers' rule, `models/inputs/positions.py`).
    """
    if positions.ndim == 2:
        return positions.max(1)
    last = positions[:, -1]
    where: Any = jnp.where if isinstance(positions, Array) else np.where
    return where((last == last[:, :1]).all(1), last[:, 0], positions.max((1, 2)))


def check_positions(rope: Rope, local: Num[Array | np.ndarray, "..."], start: Int[Array | np.ndarray, "..."]) -> None:
    """Checks that concrete positions are in range and inside a pinned regime; traced ones pass.

    Raises:
      InputError: a position is not finite, or |start + local| ≥ 2³⁰;
      a position exceeds the pinned regime of a length-dependent scaling.
    """
    if not isinstance(local, Tracer) and local.size:
        least, greatest = extent(local)
        # A float32 holds no odd numbers beyond, and fractions only far below.
        if local.dtype.kind == "f" and max(-least, greatest) >= 2**24:
            raise InputError(
                f"rope: got float positions from {least:g} to {greatest:g}; expected integers from 2**24 on"
            )
        check_extent(rope, (least, greatest), start)


def check_extent(rope: Rope, local: tuple[float, float], start: Int[Array | np.ndarray, "..."]) -> None:
    """Checks positions whose `extent` is known, as `check_positions` does."""
    if isinstance(start, Tracer):
        return
    if not np.isfinite(local).all():
        raise InputError("rope: got a position that is not finite; expected finite positions")

    starts = np.asarray(start)
    least, greatest = (float(starts.min()), float(starts.max())) if starts.size else (0.0, 0.0)
    # A bound, not the position itself: the farthest start and the farthest token may lie on different axes or rows.
    farthest = max(-local[0], local[1]) + max(-least, greatest)
    if farthest >= POSITION_LIMIT:
        raise InputError(f"rope: got position of magnitude {farthest:.0f}; expected below {POSITION_LIMIT}")
    # Regimes depend on the longest position alone, so negative ones are not looked at.
    if rope.scaling is not None:
        rope.scaling.check_reach(local[1] + greatest)
