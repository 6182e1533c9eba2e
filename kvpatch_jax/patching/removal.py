"""Removal patches: for a chunk that stays in a window when one that precedes it leaves. Kamera §5."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ..cache import AntecedentLike, Chunk, Patch, antecedent_of
from ..core import ops
from .compress import Rank
from .factors import KVArrays, Method, arrays_of, check_conditioned, from_deficit, metadata_of


def removal_patch(
    chunk: Chunk,
    target: KVArrays,
    conditioned: KVArrays,
    rank: Rank,
    antecedent: AntecedentLike,
    base_antecedent: AntecedentLike,
    *,
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """Forms a survivor's patch when its antecedent lost A: factors of KV(C|B) − KV(C|A,B), added to conditioned KV.

    Args:
      chunk: C, one or a batch.
      target: KV(C|B), phase-free. conditioned: KV(C|A,B), phase-free, the base.
      rank: as in `form_patch`.
      antecedent: what is left in front of C (B); base_antecedent: what the base was conditioned on (A, B).

    Raises:
      As `form_patch`.
    """
    check_conditioned(chunk, target, "target KV")
    check_conditioned(chunk, conditioned)
    delta = ops.deficit(arrays_of(target), arrays_of(conditioned), jnp.int32(chunk.length))
    before = antecedent_of(base_antecedent, "base_antecedent")
    metadata = metadata_of(chunk, "conditioned", antecedent_of(antecedent), before)
    return from_deficit(chunk, delta, rank, metadata, method, key, dtype)
