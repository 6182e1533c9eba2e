"""Options of segment reuse: what segments are stored with, and the thresholds of one prefill."""

import dataclasses
import math

from ..errors import ConfigError
from ..utils.kinds import is_whole

LEAST_SIMILARITY = 0.5
"""Jaccard similarity that the index is laid out for: it misses segments that are less alike."""


@dataclasses.dataclass(frozen=True)
class SegmentOptions:
    """How segments are stored.

    Attributes:
      reuse_layers: L_reuse, layers from the bottom whose KV is stored and reused; those above are always computed.
      context: W, tokens of the left context that is compared (32 … 128 in the proposal).
      int8: whether KV is stored in 8 bits, with a scale per layer, head and feature, and not in the model's dtype. The
        residual is in bfloat16 then: a 255th of its largest value would drown most tokens.
      budget: bytes of a store. The segments least recently used are evicted.

    Raises:
      ConfigError: an option out of range.
    """

    reuse_layers: int
    context: int = 64
    int8: bool = False
    budget: int = 1 << 30

    def __post_init__(self) -> None:
        _check_whole(self, reuse_layers=1, context=0, budget=1)


@dataclasses.dataclass(frozen=True)
class ReuseThresholds:
    """Thresholds of retrieval and of the acceptance test.

    Attributes:
      segment: τ_seg, the least estimated Jaccard similarity of a segment and a stored one.
      context: τ_ctx, the same of their left contexts. The proposal gives no value. At 0 contexts only rank candidates,
        and the test decides.
      halo: h, tokens at each end of a run that are computed from the bottom.
      probes: tokens of each halo that are tested, those nearest the interior; 0: no test. The proposal tests all h,
        which costs more than short segments save.
      epsilon: ε, the largest KL(computed ‖ stored) of a probe that passes, in nats.
      failing: ρ, the share of a run's probes that may fail.

    Raises:
      ConfigError: a threshold out of range.
    """

    segment: float = 0.7
    context: float = 0.0
    halo: int = 8
    probes: int = 2
    epsilon: float = 0.1
    failing: float = 0.0

    def __post_init__(self) -> None:
        _check_whole(self, halo=0, probes=0)
        if self.probes > self.halo:
            raise ConfigError(f"probes: got {self.probes}; expected at most the halo's {self.halo} tokens")
        limits = {"segment": (LEAST_SIMILARITY, 1), "context": (0, 1), "failing": (0, 1), "epsilon": (0, math.inf)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (low <= value <= high and value < math.inf):
                raise ConfigError(f"{name}: got {value!r:.80}; expected {low} to {high}")


def _check_whole(options: object, **least: int) -> None:
    for name, low in least.items():
        value = getattr(options, name)
        if not is_whole(value, low):
            raise ConfigError(f"{name}: got {value!r:.80}; expected a whole number from {low}")
