"""One patch for every ordering of an antecedent set: running sums of deficits, and factors of their mean. Kamera §5."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from . import ops
from .chunk import AnyArray, Chunk
from .compress import Rank
from .errors import InputError, PatchMismatchError, ShapeError
from .forming import KVArrays, Method, arrays_of, check_conditioned, from_deficit, metadata_of
from .patch_metadata import Patch
from .provenance import Antecedent, Behind, antecedent_of


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Accumulated:
    """The running sum of a chunk's deficits over orderings of an antecedent set.

    `total` is {channel: float32 [L, T, K, H]}, or [L, B, T, K, H] of a batch of chunks; `count` orderings went into
    it; `antecedent` is the sorted set, or None.
    """

    total: Mapping[str, Float[AnyArray, "L *B T _ _"]]
    count: int
    chunk: Chunk
    antecedent: Antecedent | None = None

    def __repr__(self) -> str:
        return f"Accumulated({self.count} orderings of {_named(self.antecedent)} in front of {self.chunk!r})"


def _named(members: Antecedent | None) -> str:
    return "None" if members is None else str(members.ids if members.plain else members.members)


def accumulate(
    acc: Accumulated | None, conditioned: KVArrays, chunk: Chunk, antecedent: Behind | None = None
) -> Accumulated:
    """Adds one ordering's deficit to a running sum (None starts it). Kamera §5, the orbit patch.

    Args:
      acc: what came before, of the same chunk.
      conditioned: KV(B|A) behind this ordering, phase-free.
      chunk: the canonical.
      antecedent: what stood in front; every ordering must hold the same set, of the same contents, served in the same
        way. None, then for all orderings, leaves it to `orbit_patch` to be told.

    Raises:
      PatchMismatchError: another chunk or antecedent set than before. ShapeError, NotFiniteError: bad `conditioned`.
    """
    check_conditioned(chunk, conditioned)
    members = None if antecedent is None else antecedent_of(antecedent).sorted()
    if acc is None:
        total = {name: jnp.zeros(value.shape, jnp.float32) for name, value in chunk.kv.items()}
        acc = Accumulated(total, 0, chunk, members)
    else:
        _check_same_chunk(acc.chunk, chunk)
    if members != acc.antecedent:
        raise PatchMismatchError(
            f"accumulate: antecedent {_named(members)}; expected an ordering of {_named(acc.antecedent)}"
        )
    total = ops.jitted_accumulate(dict(acc.total), arrays_of(conditioned), arrays_of(chunk.kv), jnp.int32(chunk.length))
    return Accumulated(total, acc.count + 1, acc.chunk, members)


def _check_same_chunk(first: Chunk, second: Chunk) -> None:
    for word in ("id", "backbone", "layout", "length", "content", "lead"):
        found, expected = getattr(second, word), getattr(first, word)
        known = word == "lead" or None not in (found, expected)
        if known and found != expected:
            what = "chunk" if word == "id" else f"chunk {first.id!r}: {word}"
            raise PatchMismatchError(f"accumulate: {what} {found!r}; expected {expected!r}")
    if first.tokens != second.tokens:
        raise ShapeError(f"accumulate: {second.tokens} tokens; expected the {first.tokens} of the chunk before")
    if first.batch != second.batch:
        raise ShapeError(f"accumulate: a batch of {second.batch}; expected {first.batch} as of the chunk before")


def orbit_patch(
    acc: Accumulated,
    rank: Rank,
    antecedent: Behind | None = None,
    *,
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """Forms one patch for every ordering of an antecedent set: factors of the mean deficit. Kamera §5.

    Args:
      acc: from `accumulate`.
      rank: as in `form_patch`.
      antecedent: the set, where `accumulate` was not told.

    Raises:
      RankError: as in `form_patch`. PatchMismatchError: another set than was accumulated. InputError: no set known.
    """
    members = None if antecedent is None else antecedent_of(antecedent).sorted()
    if members is not None and acc.antecedent is not None and members != acc.antecedent:
        raise PatchMismatchError(f"orbit_patch: antecedent {_named(members)}; expected {_named(acc.antecedent)}")
    members = acc.antecedent if members is None else members
    if members is None:
        raise InputError("orbit_patch: antecedent None; expected the ids of the set, here or in accumulate")
    chunk = acc.chunk
    mean = {name: jnp.asarray(value) / acc.count for name, value in acc.total.items()}
    metadata = metadata_of(chunk, "canonical", members, orbit=True)
    return from_deficit(chunk, mean, rank, metadata, method, key, dtype)
