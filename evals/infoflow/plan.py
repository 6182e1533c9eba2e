"""Sizes of the suite, and its arms by name."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from kvpatch_jax.repair import (
    Repaired,
    blind,
    cacheblend,
    cacheblend_gradual,
    first_k,
    infoflow,
    random_tokens,
)

from ..trained import MAIN

SHARE = 0.15
"""Of the context's tokens that are recomputed: the ratio that the paper reports."""
FIXED, PASSAGES = "fixed", "passages"
SPLITS = (FIXED, PASSAGES)
RANDOM = "random_tokens"
REORDER, REORDERED_BASELINE = "infoflow.reorder", "baseline.reordered"
"""Two-stage reordering; and full-context prefill in the order that it finds, to tell its effect from the order's."""
METHODS: Mapping[str, Callable[..., Repaired]] = {
    "blind": blind,
    "infoflow": infoflow,
    "infoflow.norm": functools.partial(infoflow, reading="norm"),
    "cacheblend": cacheblend,
    "cacheblend_gradual": cacheblend_gradual,
    "first_k": first_k,
    RANDOM: random_tokens,
}
"""Compared on texts, in both splits."""
GEOMETRIES = ("hl_hp", "tl_tp", "hl_tp")
"""Beside "global", in the order of the paper's Table 1."""
IMAGE_METHODS: Mapping[str, Callable[..., Repaired]] = {
    "blind": blind,
    "infoflow": infoflow,
    "infoflow.head_norm": functools.partial(infoflow, reading="head_norm"),
    "infoflow.head_entropy": functools.partial(infoflow, reading="head_entropy"),
    "cacheblend": cacheblend,
    "cacheblend_gradual": cacheblend_gradual,
    "first_k": first_k,
    RANDOM: random_tokens,
}
"""Compared on images that were cut."""
ASKING = ("infoflow", "infoflow.head_norm", "infoflow.head_entropy")
"""Those of them that read the question, which then has a cache of its own."""


@dataclasses.dataclass(frozen=True)
class InfoFlowPlan:
    """Sizes of the suite.

    Attributes:
      texts: (task, contexts); tasks as `contexts.TASKS` has them.
      part: contexts of one part.
      context: tokens of a context.
      passages: of it; as many chunks of one size.
      asked: tokens of the prompt behind the context, at most.
      follow: tokens that are read behind the prompt, of which answers take the first.
      band: layers that score together in the sweep.
      backbones: of images.
      images, batch: contexts of each, and at a time.
      cuts: parts of an image.
      seed: of all contexts.
    """

    texts: tuple[tuple[str, int], ...] = (("codes", 24), ("people", 24), ("prose", 24))
    part: int = 4
    context: int = 320
    passages: int = 5
    asked: int = 16
    follow: int = 16
    band: int = 3
    backbones: tuple[str, ...] = (MAIN, "kimi_vl")
    images: int = 64
    batch: int = 16
    cuts: tuple[int, ...] = (1, 2, 4)
    seed: int = 20261126


FULL = InfoFlowPlan()
QUICK = InfoFlowPlan(
    texts=(("codes", 2), ("people", 2), ("prose", 2)), part=2, context=256, passages=4, images=8, batch=8
)


def bands(layers: int, width: int) -> list[tuple[int, int]]:
    """Lists bands of `width` layers over the depth, (first, last); the last band may be narrower."""
    return [(first, min(first + width, layers) - 1) for first in range(0, layers, width)]


def band_name(band: tuple[int, int]) -> str:
    """Names the arm of a band of layers."""
    return f"infoflow.layers={band[0]}-{band[1]}"


def arm_name(split: str, method: str) -> str:
    """Names the arm of a method on chunks of a split."""
    return f"{split}.{method}"
