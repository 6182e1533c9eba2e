"""What a repair may spend: tokens, a share of them, or bytes."""

import dataclasses
import math

from ..core import KVLayout
from ..errors import InputError

NUMBER_BYTES = 2
"""Bytes of a number of KV, of factors and of embeddings, as they are served: in 16 bits, whatever dtype computes."""


@dataclasses.dataclass(frozen=True)
class RepairBudget:
    """What a repair may spend on the cached tokens of a splice. Exactly one attribute is set.

    Tokens that no cached chunk holds (new text of a prompt) are computed by every method, and count in no budget.

    Attributes:
      share: share of the cached tokens, rounded half up; of stored forms, of the bytes of the chunk's KV. 0 … 1.
      tokens: number of cached tokens per row.
      kv_bytes: bytes per row. A repair that recomputes takes as many tokens as have KV of these bytes (Kamera Table 6:
        those of a patch of rank 16 over 480 tokens at width 512 are 31); one that stores a form stores at most these.

    Raises:
      InputError: none or several are set, or a value is out of range.
    """

    share: float | None = None
    tokens: int | None = None
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        amounts = {name: value for name, value in vars(self).items() if value is not None}
        if len(amounts) != 1:
            raise InputError(f"budget: got {amounts or 'nothing'}; expected one of {', '.join(vars(self))}")
        [(name, value)] = amounts.items()
        kinds, most = (int | float, 1.0) if name == "share" else (int, math.inf)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value <= most:
            words = "0 to 1" if name == "share" else "a whole number, at least 0"
            raise InputError(f"budget.{name}: got {value!r}; expected {words}")

    @classmethod
    def of(cls, budget: "RepairBudget | float") -> "RepairBudget":
        """Returns a budget; a float is a share, and anything else raises InputError."""
        if isinstance(budget, RepairBudget):
            return budget
        if not isinstance(budget, float):
            raise InputError(f"budget: got {budget!r}; expected a RepairBudget, or a float: a share of the tokens")
        return cls(share=budget)

    def count(self, layout: KVLayout, tokens: int) -> int:
        """Computes how many of `tokens` the budget allows.

        Raises:
          InputError: more than all tokens.
        """
        if self.share is not None:
            # `round` would take halves to the even number.
            return int(self.share * tokens + 0.5)
        if self.kv_bytes is not None:
            return min(tokens, self.kv_bytes // (NUMBER_BYTES * layout.numbers))
        assert self.tokens is not None
        if self.tokens > tokens:
            raise InputError(f"budget: got {self.tokens} tokens; expected 0 to the {tokens} that are cached")
        return self.tokens


NOTHING, ALL = RepairBudget(share=0.0), RepairBudget(share=1.0)


def kv_bytes(layout: KVLayout, tokens: int) -> int:
    """Counts the bytes of some tokens' KV as it is served, and of a hybrid's transition once."""
    return NUMBER_BYTES * (layout.numbers * tokens + layout.transition_numbers)
