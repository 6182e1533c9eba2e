"""What a repair may spend: tokens, a share of them, shares by layer, or bytes."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from ..core import KVLayout
from ..errors import InputError

NUMBER_BYTES = 2
"""Bytes of a number of KV, of factors and of embeddings, as they are served: in 16 bits, whatever dtype computes."""


@dataclasses.dataclass(frozen=True)
class RepairBudget:
    """What a repair may spend on the cached tokens of a splice. Exactly one attribute is set.

    Tokens that no cached chunk holds (new text of a prompt) are computed by every method, and count in no budget.

    Attributes:
      share: share of the cached tokens, 0 … 1, rounded half up.
      tokens: number of cached tokens per row.
      by_layer: share of the cached tokens for each layer, not increasing with depth.
      kv_bytes: bytes per row. A repair that recomputes takes as many tokens as have KV of these bytes; one that stores
        a correction stores at most these bytes.

    Raises:
      InputError: none or several are set, a value is out of range, or shares increase with depth.
    """

    share: float | None = None
    tokens: int | None = None
    by_layer: tuple[float, ...] | None = None
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        amounts = {name: value for name, value in values.items() if value is not None}
        if len(amounts) != 1:
            raise InputError(f"budget: got {amounts or 'nothing'}; expected one of {', '.join(values)}")

        if self.share is not None:
            _check_share(self.share, "share")
        for name in ("tokens", "kv_bytes"):
            value = values[name]
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise InputError(f"budget.{name}: got {value!r}; expected a whole number, at least 0")
        if self.by_layer is not None:
            object.__setattr__(self, "by_layer", tuple(self.by_layer))
            for value in self.by_layer:
                _check_share(value, "by_layer")
            check_schedule(self.by_layer, len(self.by_layer), "budget.by_layer")

    @classmethod
    def of(cls, budget: "RepairBudget | float") -> "RepairBudget":
        """Returns a budget; a float is a share of the tokens."""
        if isinstance(budget, RepairBudget):
            return budget
        if isinstance(budget, bool) or not isinstance(budget, float):
            raise InputError(f"budget: got {budget!r}; expected a RepairBudget, or a float: a share of the tokens")
        return cls(share=budget)

    def count(self, layout: KVLayout, tokens: int, what: str) -> int:
        """Computes one number of tokens for all layers, out of `tokens`.

        Raises:
          InputError: it is a schedule by layer, or more than all tokens; the message begins with `what`.
        """
        if self.by_layer is not None:
            raise InputError(f"{what}.budget: got shares by layer; expected a share, tokens or bytes")
        if self.share is not None:
            return fraction_to_count(self.share, tokens)
        if self.kv_bytes is not None:
            return min(tokens, self.kv_bytes // (NUMBER_BYTES * layout.numbers))

        assert self.tokens is not None
        if self.tokens > tokens:
            raise InputError(f"{what}.budget: got {self.tokens} tokens; expected 0 to the {tokens} that are cached")
        return self.tokens

    def counts(self, layout: KVLayout, tokens: int, what: str) -> tuple[int, ...]:
        """Computes a number of tokens for each layer; see `count`.

        Raises:
          InputError: a schedule of another number of layers, or as `count`.
        """
        if self.by_layer is None:
            return (self.count(layout, tokens, what),) * layout.layers
        check_schedule(self.by_layer, layout.layers, f"{what}.budget")
        return tuple(fraction_to_count(share, tokens) for share in self.by_layer)


def check_schedule(values: Sequence[float | int], layers: int, what: str) -> None:
    """Checks that there is one value per layer, and none that is larger than the one below it.

    Raises:
      InputError: it begins with `what`.
    """
    if len(values) != layers or not values or any(upper > lower for lower, upper in itertools.pairwise(values)):
        raise InputError(f"{what}: got {list(values)}; expected {layers}, none larger than the one below it")


def _check_share(share: float, name: str) -> None:
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not math.isfinite(share) or not 0.0 <= share <= 1.0:
        raise InputError(f"budget.{name}: got {share!r}; expected 0 to 1")


def fraction_to_count(fraction: float, tokens: int) -> int:
    """Converts a fraction of a chunk's tokens to a number of tokens, rounded half up.

    Raises:
      InputError: the fraction is outside 0 … 1, or `tokens` is negative.
    """
    if not 0.0 <= fraction <= 1.0 or tokens < 0:
        raise InputError(f"fraction: got {fraction} of {tokens} tokens; expected 0 to 1 of 0 tokens or more")
    # `round` would take halves to the even number.
    return int(fraction * tokens + 0.5)


def kv_bytes(layout: KVLayout, tokens: int) -> int:
    """Counts the bytes of some tokens' KV as it is served, and of a hybrid's transition once."""
    return NUMBER_BYTES * (layout.numbers * tokens + layout.transition_numbers)


def count_of_equal_bytes(layout: KVLayout, rank: int | Mapping[str, int], tokens: int) -> int:
    """Computes how many tokens' KV takes as many bytes as a patch of this rank over `tokens` tokens (Kamera Table 6).

    Per layer and channel of width F, a rank-m patch over n tokens takes m(n + F) numbers (at most n·F, because it is
    stored dense beyond that) and a token takes F. At width 512 and 480 tokens, rank 16 equals 31 tokens and rank 64
    equals 124.

    Args:
      rank: one for all channels, or by channel, as `form_patch` takes it (0, or no entry: no patch).

    Returns:
      The nearest whole number of tokens, at most `tokens`.

    Raises:
      InputError: a rank is out of range. LayoutError: the layout lacks a channel.
    """
    ranks = dict.fromkeys(layout.names, rank) if isinstance(rank, int) else rank
    # Layers are the same factor on both sides, and left out.
    numbers, least = 0, 1 if isinstance(rank, int) else 0
    for name, channel_rank in ranks.items():
        if channel_rank < least:
            raise InputError(f"rank: got {channel_rank} for channel {name!r}; expected at least {least}")
        features = layout.channel(name).features
        numbers += min(channel_rank * (tokens + features), tokens * features)
    return int(numbers / sum(channel.features for channel in layout.channels) + 0.5)
