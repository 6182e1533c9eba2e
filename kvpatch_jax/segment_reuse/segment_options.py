"""Options of segment reuse: what an index is built with, and the thresholds of one prefill."""

import dataclasses

from ..errors import ConfigError
from ..utils.kinds import expect_kind, is_whole
from .canonical_text import CanonicalRules
from .segmentation import Segmentation
from .stored_kv import STORAGES, Storage


@dataclasses.dataclass(frozen=True)
class SegmentIndexOptions:
    """Options that stored segments depend on.

    Attributes:
      reuse_layers: L_reuse, the number of layers from the bottom whose KV is stored and reused; above them all tokens
        are computed.
      segmentation, canonical: how prompts are cut and normalised.
      shingle: k, units of a shingle (6 … 10 in the proposal).
      context: W, tokens of the left context that is signed (32 … 128 in the proposal).
      permutations, seed: of MinHash.
      least_similarity: Jaccard similarity that the LSH is laid out for; `ReuseThresholds.segment` may not be below it.
      storage: precision of what is stored.
      budget: bytes of one tenant's segments.
      protected_share: share of it for segments that were used again (SLRU).
      generations: how many reuses may lie behind stored KV: 0 stores only what was computed exactly.

    Raises:
      ConfigError: an option out of range.
    """

    reuse_layers: int
    segmentation: Segmentation = dataclasses.field(default_factory=Segmentation)
    canonical: CanonicalRules = dataclasses.field(default_factory=CanonicalRules)
    shingle: int = 6
    context: int = 64
    permutations: int = 128
    seed: int = 1
    least_similarity: float = 0.5
    storage: Storage = "bfloat16"
    budget: int = 1 << 30
    protected_share: float = 0.8
    generations: int = 2

    def __post_init__(self) -> None:
        for name, least in (
            ("reuse_layers", 1),
            ("shingle", 1),
            ("context", 0),
            ("permutations", 2),
            ("seed", 0),
            ("budget", 1),
            ("generations", 0),
        ):
            value = getattr(self, name)
            if not is_whole(value, least):
                raise ConfigError(f"{name}: got {value!r:.80}; expected a whole number from {least}")

        _check_share("least_similarity", self.least_similarity)
        _check_share("protected_share", self.protected_share)
        if not self.least_similarity:
            raise ConfigError("least_similarity: got 0; expected more, for everything is similar to that degree")
        if self.storage not in STORAGES:
            raise ConfigError(f"storage: got {self.storage!r:.80}; expected one of {', '.join(STORAGES)}")
        expect_kind(self.segmentation, Segmentation, "segmentation", "a Segmentation", ConfigError)
        expect_kind(self.canonical, CanonicalRules, "canonical", "CanonicalRules", ConfigError)


@dataclasses.dataclass(frozen=True)
class ReuseThresholds:
    """Thresholds of retrieval and of the acceptance test in one prefill.

    Attributes:
      segment: τ_seg, the least estimated Jaccard similarity of a segment and a stored one.
      context: τ_ctx, the same of their left contexts. The proposal gives no value. By default 0: contexts rank
        candidates, and the test decides.
      halo: h, tokens at each end of a run that are computed from the bottom.
      probes: tokens of each halo that are tested, those nearest the interior. The proposal tests all h, which costs
        more than short segments save.
      epsilon: ε, the largest KL(computed ‖ stored) of a probe that passes, in nats.
      failing: ρ, the share of a run's probes that may fail.
      test: whether runs are tested at all.
      candidates: most similar segments that are compared token by token, per segment of the prompt.
      worthwhile: whether runs whose test would cost more than they save are left out before anything is computed.
      equal_prefix: whether a run with the same whole prefix as when it was stored needs neither halo nor test: its KV
        does not depend on what follows, so that it is the same.

    Raises:
      ConfigError: a threshold out of range, or a test without a halo to probe.
    """

    segment: float = 0.7
    context: float = 0.0
    halo: int = 8
    probes: int = 2
    epsilon: float = 0.1
    failing: float = 0.0
    test: bool = True
    candidates: int = 4
    worthwhile: bool = True
    equal_prefix: bool = True

    def __post_init__(self) -> None:
        for name in ("segment", "context", "failing"):
            _check_share(name, getattr(self, name))
        for name, least in (("halo", 0), ("probes", 1), ("candidates", 1)):
            value = getattr(self, name)
            if not is_whole(value, least):
                raise ConfigError(f"{name}: got {value!r:.80}; expected a whole number from {least}")
        if not isinstance(self.epsilon, int | float) or not 0.0 <= self.epsilon < float("inf"):
            raise ConfigError(f"epsilon: got {self.epsilon!r:.80}; expected 0 nats or more")
        if self.test and self.probes > self.halo:
            raise ConfigError(
                f"probes: got {self.probes} of a halo of {self.halo} tokens; expected no more than the halo has, or "
                "test=False"
            )


def _check_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}: got {value!r:.80}; expected 0 to 1")
