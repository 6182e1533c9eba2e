"""Operating points: the modes in which a piece of a window can be served. Kamera App. B."""

from typing import Literal, get_args

Point = Literal[
    "leading",
    "restored",
    "survivor",
    "kept",
    "orbit",
    "stored",
    "update",
    "fresh",
    "mean",
    "near",
    "bare",
    "repair",
    "prefill",
]
POINTS: tuple[Point, ...] = get_args(Point)

EXACT_POINTS = ("leading", "restored", "prefill")
"""Points that compute what a re-prefill computes: they lose nothing but rounding, and need no certificate."""
MEASURED_POINTS = ("survivor", "orbit", "stored", "update", "fresh", "mean", "near", "bare", "repair")
"""Points that a certificate has rows of."""

MEANING: dict[Point, str] = {
    "leading": "its KV equals a prefill of the window; at most its keys are rotated",
    "restored": "a stored prefill behind the very pieces in front",
    "survivor": "it stays as it is, conditioned on pieces that have left",
    "kept": "it stays as it is, conditioned on approximate KV, or without having seen all that precedes it",
    "orbit": "canonical plus a patch that is valid for every order of the pieces in front",
    "stored": "canonical (or its present KV) plus a patch formed behind the pieces in front",
    "update": "canonical plus a stored patch with a stored correction folded in",
    "fresh": "a forward behind the pieces in front; a patch is formed of it in the background",
    "mean": "the mean of stored prefills behind the same lead and the same nearest piece",
    "near": "a stored prefill behind the same lead and the same nearest piece, others having been farther away",
    "bare": "the canonical alone",
    "repair": "the canonical, with some of its tokens recomputed",
    "prefill": "a forward behind the pieces in front",
}
