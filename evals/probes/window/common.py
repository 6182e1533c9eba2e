"""What the window's probes share: how arms are named, questions sorted, patches formed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import kvpatch_jax as kvp

from ...small_task import KINDS, Contexts, Questions
from ...small_task.scenes import Answers
from ..results_table import ResultsTable
from .image_sequence import KV, Image

RANK = 32
"""Of every patch but the orbit's and the many chunks'; as in the paper's recall."""
Step = Callable[[str], None]
"""Is told the name of what was just done."""


def setting(**values: Any) -> str:
    """Names a part of a probe: setting(gone=1, lead=0) is "gone=1.lead=0"."""
    return ".".join(f"{name}={int(value)}" for name, value in values.items())


def add(
    table: ResultsTable,
    probe: str,
    part: str,
    questions: Questions,
    clusters: np.ndarray,
    said: Mapping[str, Answers],
    *,
    kind: np.ndarray | None = None,
    kinds: Sequence[str] = KINDS,
) -> None:
    """Adds what the arms said to a part of a probe; arms are named "<arm>.<part>", "re-prefill" the reference."""
    suffix = f".{part}" if part else ""
    items = table.items(probe, part, f"re-prefill{suffix}", f"blind{suffix}")
    items.kinds = tuple(kinds)
    items.add(questions, clusters, {f"{arm}{suffix}": answers for arm, answers in said.items()}, kind)


def patch_of(image: Image, conditioned: KV, antecedent: Sequence[str], rank: int = RANK) -> kvp.Patch:
    """Forms an image's patch by a full SVD, as factors."""
    return kvp.form_patch(image.chunk, conditioned, rank, antecedent, method="exact", dense=False)


def asked_through(contexts: Contexts, questions: Questions, legends: np.ndarray) -> np.ndarray:
    """Finds which questions ask for a glyph that some of the legends define, bool [B, Q].

    Args:
      legends: bool [legends] by storage.
    """
    item = np.arange(len(contexts))[:, None]
    glyph = contexts.page_glyph[item, questions.row, questions.cell]
    defined = contexts.legend_glyph[:, np.flatnonzero(legends)].reshape(len(contexts), -1)
    return (glyph[..., None] == defined[:, None, :]).any(axis=-1)
