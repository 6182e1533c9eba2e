"""Frequency scaling of ropes: linear, llama3, YaRN, and longrope and dynamic, which are pinned to one regime."""

import dataclasses
import math
import sys
from typing import Literal

import numpy as np

from ..errors import InputError, LayoutError

KINDS = ("linear", "llama3", "yarn", "longrope", "dynamic", "proportional")


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Frequency scaling of a rope. Names follow the fields of Hugging Face's `rope_parameters`.

    Attributes:
      kind: "linear", "llama3", "yarn", "longrope", "dynamic" or "proportional" (Gemma 4: the first frequencies alone
        turn, over pairs of the whole head).
      factor: how much the context was extended.
      original: context length before the extension (`original_max_position_embeddings`); for "dynamic", the model's
        `max_position_embeddings`.
      low_freq_factor, high_freq_factor: llama3.
      beta_fast, beta_slow, truncate, mscale, mscale_all_dim: YaRN.
      short_factor, long_factor: longrope, one number per frequency.
      regime: longrope only: "short" or "long", the set of frequencies that this rope uses.
      length: dynamic only: the sequence length whose frequencies this rope uses.
      attention_factor: replaces the attention scaling that the kind implies.
      share: proportional only: of the frequencies, the part that turns.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "dynamic", "proportional"]
    factor: float | int = 1.0
    original: int | None = None
    low_freq_factor: float | int = 1.0
    high_freq_factor: float | int = 4.0
    beta_fast: float | int = 32.0
    beta_slow: float | int = 1.0
    truncate: bool = True
    mscale: float | int | None = None
    mscale_all_dim: float | int | None = None
    short_factor: tuple[float | int, ...] | None = None
    long_factor: tuple[float | int, ...] | None = None
    regime: Literal["short", "long"] | None = None
    length: int | None = None
    attention_factor: float | int | None = None
    # Not in the representation, which fingerprints of other kinds are made of.
    share: float | int | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        # A list of a configuration file becomes a tuple, which can be hashed.
        for word in ("short_factor", "long_factor"):
            if isinstance(getattr(self, word), list):
                object.__setattr__(self, word, tuple(getattr(self, word)))

    def check(self, dim: int) -> None:
        """Checks that the fields define a scaling for `dim` rotary channels.

        Raises:
          LayoutError: a field is missing or out of range.
          InputError: the frequencies depend on the sequence length, and no regime is pinned.
        """
        if self.kind not in KINDS:
            raise LayoutError(f"rope scaling: got kind {self.kind!r}; expected one of {KINDS}")
        numbers = [(word, value) for word in ("short_factor", "long_factor") for value in getattr(self, word) or ()]
        for field in dataclasses.fields(self):
            if field.name not in ("kind", "truncate", "regime", "short_factor", "long_factor"):
                numbers.append((field.name, getattr(self, field.name)))
        for word, value in numbers:
            least = 0 if word in ("share", "mscale", "mscale_all_dim") else sys.float_info.min
            if value is not None and (not isinstance(value, int | float) or not least <= value < math.inf):
                raise LayoutError(f"rope scaling: got {word} {value!r:.80}; expected a positive number")
        if (self.kind == "proportional") != (self.share is not None) or not 0 <= (self.share or 0) <= 1:
            raise LayoutError(
                f"rope scaling {self.kind!r}: got share {self.share}; expected 0 to 1 for 'proportional', else None"
            )
        lengths = self.kind not in ("linear", "proportional")
        if lengths and (self.original is None or self.original < 1):
            raise LayoutError(f"rope scaling {self.kind!r}: got original {self.original}; expected a positive length")

        # Engines choose the frequencies of these two kinds by the length of the sequence that they prefill. Keys of two
        # choices cannot be related by a rotation, so one is pinned.
        if self.kind == "longrope":
            if self.regime not in ("short", "long"):
                raise InputError(
                    f"longrope: got regime {self.regime!r}; expected 'short' or 'long' to pin, because its frequencies "
                    "depend on the length"
                )

            stretch = self.stretch
            if stretch is None or len(stretch) != dim // 2:
                found = None if stretch is None else len(stretch)
                raise LayoutError(f"longrope: got {found} numbers in {self.regime}_factor; expected {dim // 2}")

        if self.kind == "dynamic" and (self.length is None or self.length < 1):
            raise InputError(
                f"dynamic rope scaling: got length {self.length!r}; expected a positive length to pin, because its "
                "frequencies depend on it"
            )

    @property
    def stretch(self) -> tuple[float | int, ...] | None:
        """The longrope factors of the pinned regime."""
        return self.long_factor if self.regime == "long" else self.short_factor

    @property
    def attention_scaling(self) -> float:
        """Factor that engines multiply cosine and sine by."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.kind == "yarn":
            if self.mscale and self.mscale_all_dim:
                return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
            return _mscale(self.factor, 1.0)
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self._original))
        return 1.0

    @property
    def _original(self) -> int:
        if self.original is None:
            raise LayoutError(f"rope scaling {self.kind!r}: got original None; expected a positive length")
        return self.original

    def theta(self, theta: float | int, dim: int) -> float | int:
        """Returns the base of the frequencies, which only "dynamic" changes."""
        if self.kind != "dynamic" or self.length is None or self.length <= self._original:
            return theta
        # NTK: the base grows with the length, which stretches low frequencies and leaves the highest as it is.
        grown = self.factor * self.length / self._original - (self.factor - 1)
        return theta * grown ** (dim / (dim - 2))

    def apply(self, plain: np.ndarray, theta: float | int, dim: int) -> np.ndarray:
        """Scales unscaled inverse frequencies, in their dtype."""
        if self.kind == "linear":
            return plain / plain.dtype.type(self.factor)
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(plain, theta, dim)
        if self.kind == "longrope":
            return plain / np.asarray(self.stretch, plain.dtype)
        if self.kind == "proportional":
            turning = np.arange(dim // 2) < int((self.share or 0) * dim // 2)
            return np.where(turning, plain / plain.dtype.type(self.factor), plain.dtype.type(0))
        return plain

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        """Divides low frequencies by the factor, keeps high ones, and interpolates in between."""
        original = self._original
        # Wavelengths in positions, compared with fractions of the original context.
        wavelength = 2 * math.pi / plain
        smooth = (original / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - smooth) * plain / self.factor + smooth * plain
        long = wavelength > original / self.low_freq_factor
        short = wavelength < original / self.high_freq_factor
        return np.where(long, plain / self.factor, np.where(short, plain, blended)).astype(plain.dtype)

    def _yarn(self, plain: np.ndarray, theta: float | int, dim: int) -> np.ndarray:
        """Blends plain and divided frequencies by a linear ramp over their indices (YaRN, "NTK-by-parts")."""

        def index_of(rotations: float) -> float:
            # Index of the frequency that completes so many rotations over the original context.
            return dim * math.log(self._original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)

        # The small span only avoids a division by zero.
        span = high - low if high != low else 0.001
        ramp = np.clip((np.arange(dim // 2, dtype=plain.dtype) - low) / span, 0, 1)
        keep = 1 - ramp
        return (plain / self.factor * (1 - keep) + plain * keep).astype(plain.dtype)

    def check_reach(self, farthest: float) -> None:
        """Raises InputError if the position `farthest` lies outside the pinned regime."""
        if self.kind == "longrope" and self.regime == "short":
            limit = self._original
        elif self.kind == "dynamic" and self.length is not None:
            limit = max(self.length, self._original)
        else:
            return

        if farthest >= limit:
            raise InputError(
                f"{self.kind}: got position {farthest:g}, outside the pinned regime; expected below {limit}"
            )


def _mscale(factor: float | int, weight: float | int) -> float:
    """Returns YaRN's attention scaling for a factor."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
