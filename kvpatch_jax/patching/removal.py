"""Removal patches: for a chunk that stays in a window when a chunk that precedes it leaves. Kamera §5."""

from typing import Any

from ..cache import AntecedentLike, Chunk, Patch, antecedent_of
from .compress import Rank
from .factors import Factorisation, KVArrays, check_conditioned, deficit_of, from_deficit, metadata_of


def removal_patch(
    chunk: Chunk,
    target: KVArrays,
    conditioned: KVArrays,
    rank: Rank,
    antecedent: AntecedentLike,
    base_antecedent: AntecedentLike,
    **options: Any,
) -> Patch:
    """Forms the patch of a survivor whose antecedent lost A: factors of KV(C|B) − KV(C|A,B), added to conditioned KV.

    Args:
      chunk: C, one or a batch.
      target: KV(C|B), phase-free.
      conditioned: KV(C|A,B), phase-free: the base.
      rank: as in `form_patch`.
      antecedent: the chunks that precede C afterwards (B).
      base_antecedent: what the base was conditioned on (A, B).
      options: fields of `Factorisation`: method, key, dtype.

    Raises:
      As `form_patch`.
    """
    check_conditioned(chunk, target, "target KV")
    check_conditioned(chunk, conditioned)
    delta = deficit_of(target, conditioned, chunk)
    before = antecedent_of(base_antecedent, "base_antecedent")
    metadata = metadata_of(chunk, "conditioned", antecedent_of(antecedent), before)
    return from_deficit(chunk, delta, rank, metadata, Factorisation(**options))
