"""Operating points: the ways in which a chunk can come to stand in a window. Kamera App. B."""

from typing import Literal, get_args

Point = Literal[
    "leading", "survivor", "kept", "orbit", "stored", "update", "fresh", "bare", "repair", "prefill", "encoded"
]
POINTS: tuple[Point, ...] = get_args(Point)

FORWARDS: frozenset[Point] = frozenset({"fresh", "prefill", "encoded"})
"""Those that run the chunk through the model behind what stands in front of it."""

PATCHED: frozenset[Point] = frozenset({"orbit", "stored", "update"})
"""Those that place a stored patch."""

MEANING: dict[Point, str] = {
    "leading": "stands as a prefill of the window has it, and nothing is done but turning its keys",
    "survivor": "stays as it is, having seen what has left",
    "kept": "stays as it is, made behind what was approximate, or with something in front that it has not seen",
    "orbit": "canonical and a patch that serves every order of those in front",
    "stored": "canonical (or what it stands as) and a patch that was formed behind those in front",
    "update": "canonical and a stored patch, with a stored correction folded in",
    "fresh": "a forward behind those in front, of which a patch is formed behind the answer's back",
    "bare": "the canonical alone",
    "repair": "the canonical, and some of its tokens recomputed",
    "prefill": "a forward behind those in front",
    "encoded": "a forward behind those in front, from the vision tower's stored output",
}
