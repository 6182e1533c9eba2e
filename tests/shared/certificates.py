"""Certificates with invented bounds, for tests of what a certificate allows."""

from collections.abc import Mapping
from typing import Any

from kvpatch_jax.plan import Certificate, CertifiedLoss, RankChoice

BACKBONE = "f" * 64
WORDS: dict[str, Any] = {"model": "a model", "made": "2026-11-22", "content": "texts", "asked": "questions"}
NUMBERS: dict[str, Any] = {"level": 0.95, "calibration": 10, "held_out": 10, "chunks": 12, "tokens": 999}
SHARES = {"coverage": 0.95, "coverage_low": 0.9, "coverage_high": 1.0, "flips": 0.005, "flips_high": 0.01}


def certificate(losses: Mapping[Any, Any] | None = None, **fields: Any) -> Certificate:
    """Returns a certificate with losses, such as `{("stored", 8): {0: 0.5, 3: 2.0}}`.

    Args:
      losses: bounds in nats by (point, rank) or (point, rank, promise), by others or for 0, 1, … of them.
      fields: of the certificate, in place of wide ones.
    """
    rows = []
    for (point, rank, *promises), bounds in (losses or {("stored", 8): [0.5]}).items():
        by_others = bounds if isinstance(bounds, dict) else dict(enumerate(bounds))
        for others, kl in by_others.items():
            rows += [row(point, rank, others, kl, promise) for promise in promises or ("forget", "remember")]
    defaults = {"backbone": BACKBONE, "disjoint": True, "modalities": ("text",), "spans": (1, 999), "rows": tuple(rows)}
    return Certificate(recommended=RankChoice(4, "invented"), **WORDS | NUMBERS | defaults | fields)


def row(point: str, rank: int, others: int, kl: float, promise: Any = "forget", **fields: Any) -> CertifiedLoss:
    fields = {"kl": kl / 3, "kl_low": kl / 4, "kl_high": kl / 2, "eta": 0.5, "answers": 40} | SHARES | fields
    return CertifiedLoss(point, rank, others, promise, kl_bound=kl, **fields)
