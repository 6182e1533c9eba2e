"""The arms of the suite: every repair with every budget it takes, by name."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from kvpatch_jax.repair import REPAIRS, Repair, RepairBudget, infoflow

SHARES = (0.05, 0.10, 0.15, 0.25, 0.50)
"""Of the page's tokens and, which is the same number of bytes, of its KV."""
GEOMETRY_SHARE = 0.15
"""Where InfoFlow KV's other geometries and readings are tried: the ratio that its paper reports."""
TOKEN_METHODS = ("first_k", "cacheblend", "cacheblend_gradual", "kvshare", "oracle_delta", "random_tokens")
QUESTION_METHODS = ("infoflow", "prophetkv", "quest", "prcr")
STORED = ("patched", "quantised", "low_rank", "shadowkv")
WHOLE = ("prefix_caching", "encoder_cached_reprefill", "full_reprefill")
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "infoflow.hl_hp": {"geometry": "hl_hp"},
    "infoflow.hl_tp": {"geometry": "hl_tp"},
    "infoflow.tl_tp": {"geometry": "tl_tp"},
    "infoflow.norm": {"reading": "norm"},
    "infoflow.head_norm": {"reading": "head_norm", "whole_layers": 1},
    "infoflow.head_entropy": {"reading": "head_entropy", "whole_layers": 1},
}
"""InfoFlow KV's positions while tokens are scored, and what its released code scores by."""
SERVED_BYTES = 2
"""Bytes of a number of KV where it is served."""


@dataclasses.dataclass(frozen=True)
class RepairArm:
    """One repair with its budget.

    Attributes:
      name: method and share, as rows have it.
      method: without the share.
      repair: the function, settings bound.
      budget: what it may spend.
      asks: whether it chooses by the question, so that every question has a cache of its own.
    """

    name: str
    method: str
    repair: Repair
    budget: RepairBudget
    asks: bool = False


def repair_arms(
    kv_numbers: int, layers: int, schedules: Mapping[float, Sequence[float]] | None = None
) -> list[RepairArm]:
    """Lists all arms, blind reuse first.

    Args:
      kv_numbers: of one page's KV, of whose bytes stored forms take a share.
      schedules: VLCache's shares by layer, by their mean; without them its arms are left out.
    """
    arms = [RepairArm("blind", "blind", REPAIRS["blind"], RepairBudget(tokens=0))]
    arms.append(RepairArm("attention_sink", "attention_sink", REPAIRS["attention_sink"], RepairBudget(tokens=0)))
    for share in SHARES:
        for method in TOKEN_METHODS:
            arms.append(_arm(method, share))
        for method in QUESTION_METHODS:
            arms.append(_arm(method, share, asks=True))
        for method in STORED:
            # Runs are in float32, but bytes count as KV is served, in 16 bits a number: a share of factors is the same
            # in both, a number of bits is not. If nothing of a form fits a budget, the arm is left out.
            itemsize = SERVED_BYTES if method == "quantised" else 4
            budget = RepairBudget(kv_bytes=int(share * kv_numbers * itemsize))
            arms.append(RepairArm(f"{method}.budget={share:g}", method, REPAIRS[method], budget))
        if schedules is not None and share in schedules:
            by_layer = RepairBudget(by_layer=tuple(schedules[share]))
            arms.append(RepairArm(f"vlcache.budget={share:g}", "vlcache", REPAIRS["vlcache"], by_layer))

    for name, settings in VARIANTS.items():
        repair = functools.partial(infoflow, **settings)
        arms.append(
            RepairArm(f"{name}.budget={GEOMETRY_SHARE:g}", name, repair, RepairBudget(share=GEOMETRY_SHARE), asks=True)
        )
    for boundary in range(1, layers):
        share = 1 - boundary / layers
        name = f"layer_reprefill.from={boundary}"
        arms.append(RepairArm(name, "layer_reprefill", REPAIRS["layer_reprefill"], RepairBudget(share=share)))
    for method in WHOLE:
        arms.append(RepairArm(method, method, REPAIRS[method], RepairBudget(share=1.0)))
    return arms


def _arm(method: str, share: float, *, asks: bool = False) -> RepairArm:
    return RepairArm(f"{method}.budget={share:g}", method, REPAIRS[method], RepairBudget(share=share), asks)
