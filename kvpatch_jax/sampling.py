"""Sampling options and streamed pieces of text: values that backbones and sessions share."""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from .errors import ConfigError, InputError
from .utils.kinds import is_whole

MOST_STEPS = 1 << 30
"""Maximum number of tokens of an answer, so that positions after a long context still fit int32."""


def check_steps(steps: Any) -> None:
    """Raises InputError unless `steps` is a valid number of tokens."""
    if not is_whole(steps, 0) or steps >= MOST_STEPS:
        raise InputError(f"steps: got {steps!r:.80}; expected a number of tokens, 0 or more and below 2**30")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of choosing the next token.

    Attributes:
      temperature: divisor of the logits; 0 takes the most likely token.
      top_p: samples from the smallest set of most likely tokens with at least this probability (Holtzman et al.,
        arXiv:1904.09751, section 3.1). Tokens exactly as likely as the last of them are included.
      top_k: samples from this many most likely tokens, applied before `top_p`; None: all. Ties are included, as above.

    Raises:
      ConfigError: a value is not a number, the temperature is negative or infinite, `top_p` is outside 0 < p ≤ 1, or
      `top_k` is below 1.
    """

    temperature: float | int = 0.0
    top_p: float | int = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if not hasattr(value, "__float__") or (isinstance(value, int) and abs(value) > MOST_STEPS):
                raise ConfigError(f"{name}: got {value!r:.80}; expected a number")

        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature: got {self.temperature}; expected a finite number, 0 or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: got {self.top_p}; expected more than 0 and at most 1")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ConfigError(f"top_k: got {self.top_k!r}; expected a whole number from 1 on, or None for all tokens")


class TextPiece(NamedTuple):
    """Piece of a stream: the next token of each row and, with a tokenizer, the text that it completes.

    Attributes:
      ids: [B]; a row that has ended repeats its last token.
      texts: one per row; empty while the bytes of a character are incomplete, for stop tokens, and after them.
    """

    ids: Int[np.ndarray, " B"]
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The first row's text."""
        return self.texts[0] if self.texts else ""
