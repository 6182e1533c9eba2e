"""Orbit patches: one patch for every order of an antecedent set, of its mean deficit over orders. Kamera §5."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..cache import Antecedent, AntecedentLike, Chunk, ChunkKey, Patch, PatchMetadata, antecedent_of
from ..core import AnyArray, arrays_of, ops
from ..errors import PatchMismatchError, ShapeError
from ..utils.kinds import expect_kind
from .form import KVArrays, Size, check_conditioned, from_deficit


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Accumulated:
    """Running sum of a chunk's deficits over orderings of an antecedent set.

    Attributes:
      total: {channel: float32 [L, T, K, H]}, or [L, B, T, K, H] of a batch of chunks; of a transition's parts likewise.
      count: the number of orderings in the sum.
      chunk: the canonical.
      antecedent: the sorted set.
    """

    total: Mapping[str, Float[AnyArray, "L *B T _ _"]]
    count: int
    chunk: Chunk
    antecedent: Antecedent

    def __repr__(self) -> str:
        return f"Accumulated({self.count} orderings of {self.antecedent.shown} before {self.chunk!r})"


def accumulate(acc: Accumulated | None, conditioned: KVArrays, chunk: Chunk, antecedent: AntecedentLike) -> Accumulated:
    """Adds one ordering's deficit to a running sum (None starts it). Kamera §5, the orbit patch.

    Args:
      acc: the sum so far, of the same chunk.
      conditioned: KV(B|A) after this ordering, phase-free.
      chunk: the canonical.
      antecedent: the chunks that precede it; every ordering must hold the same set, of the same contents, served in the
        same way.

    Raises:
      PatchMismatchError: another chunk or antecedent set than before. ShapeError, NotFiniteError: bad `conditioned`.
    """
    check_conditioned(chunk, conditioned)
    # The sums are kept sorted, so that every order of one set is equal.
    members = antecedent_of(antecedent).sorted()
    if acc is None:
        zeros = {name: jnp.zeros(value.shape, jnp.float32) for name, value in chunk.kv.items()}
        acc = Accumulated(zeros, 0, chunk, members)

    expect_kind(acc, Accumulated, "accumulate", "what accumulate returned before, or None")
    key, expected = ChunkKey.of(chunk), ChunkKey.of(acc.chunk)
    if key != expected:
        raise PatchMismatchError(f"accumulate: got {key}; expected {expected}")
    if (chunk.tokens, chunk.length, chunk.batch) != (acc.chunk.tokens, acc.chunk.length, acc.chunk.batch):
        raise ShapeError(
            f"accumulate: got {chunk.length} of {chunk.tokens} tokens, batch {chunk.batch}; expected those of the "
            f"chunk before, {acc.chunk.length} of {acc.chunk.tokens}, batch {acc.chunk.batch}"
        )
    if members != acc.antecedent:
        difference = members.difference(acc.antecedent, orbit=True)
        # A content that was not known before is another set, too.
        shown = f"{members.members}; expected {acc.antecedent.members}" if difference is None else difference
        raise PatchMismatchError(f"accumulate: got antecedent {shown}, in any order")
    total = ops.accumulate(dict(acc.total), arrays_of(conditioned), arrays_of(chunk.kv), np.int32(chunk.length))
    return Accumulated(total, acc.count + 1, acc.chunk, members)


def orbit_patch(acc: Accumulated, rank: Size, **options: Any) -> Patch:
    """Forms one patch for every ordering of an antecedent set: factors of the mean deficit. Kamera §5.

    Args:
      acc: from `accumulate`.
      rank: as in `form_patch`.
      options: keywords of `form_patch`: dense, method, key, dtype, weights.

    Raises:
      InputError: as in `form_patch`; not what `accumulate` returns.
    """
    expect_kind(acc, Accumulated, "orbit_patch", "what accumulate returns")
    # The mean minimises the summed squared error over the orders.
    mean = {name: jnp.asarray(value) / acc.count for name, value in acc.total.items()}
    layers = tuple(range(acc.chunk.layout.layers))
    metadata = PatchMetadata(ChunkKey.of(acc.chunk), acc.antecedent, layers, orbit=True)
    return from_deficit(acc.chunk, mean, rank, metadata, **options)
