"""The gate in front of stored patches: which may be served, and in which order the others are worth a try.

Kamera App. D. A patch is admitted by what it was formed behind. How far that is from what is wanted is a number that
ranks candidates and admits none: in the paper a gate made of it falsely reuses 24 to 47 % at any useful coverage.
`reuse_curve` measures that rate.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from ..cache import Antecedent, AntecedentLike, Chunk, Member, Patch, antecedent_of
from ..core import AnyArray
from ..errors import InputError, ShapeError

Pooled = Mapping[str, Float[AnyArray, " D"]]
"""One vector for each chunk in front, by its content or its id, as `pooled_canonical` gives them."""


class PatchCandidate(NamedTuple):
    """A stored patch, how far what it was formed behind is from what is wanted, and in what that differs.

    `differs` is None where the patch may be served; others need `allow_stale`.
    """

    patch: Patch
    divergence: float
    differs: str | None


def candidates(
    patches: Sequence[Patch], wanted: AntecedentLike, *, allow_stale: bool = False, pooled: Pooled | None = None
) -> list[PatchCandidate]:
    """Lists the patches that may be served behind an antecedent; the rest, ranked, only where that is allowed.

    Args:
      patches: of one chunk, such as a store's.
      wanted: the antecedent.
      allow_stale: lists those of other antecedents too, by growing divergence, behind all that may be served.
      pooled: as `divergence`.
    """
    wanted = antecedent_of(wanted)
    found = []
    for patch in patches:
        behind, orbit = patch.metadata.behind, patch.metadata.orbit
        differs = behind.difference(wanted, orbit)
        if differs is None:
            found.append(PatchCandidate(patch, 0.0, None))
        elif allow_stale:
            found.append(PatchCandidate(patch, divergence(behind, wanted, orbit=orbit, pooled=pooled), differs))
    return sorted(found, key=lambda each: (each.differs is not None, each.divergence, -each.patch.nbytes))


def divergence(
    stored: AntecedentLike, wanted: AntecedentLike, *, orbit: bool = False, pooled: Pooled | None = None
) -> float:
    """Computes how far two antecedents are apart: 0 for the same, 1 where nothing of one is in the other.

    It is 1 − (1 − c)(1 − o/2)(1 − s/2). Here c is the share of chunks that are not in both (of all of both), o the
    share of pairs of common chunks that stand in another order, s the share of common chunks served otherwise. Nothing
    of it is read from KV.

    Args:
      orbit: the stored patch serves every order; o is 0.
      pooled: where every chunk of both is in it, c is one minus the cosine of the two means of their vectors instead,
        the paper's divergence: other chunks that look alike are near.
    """
    first, second = antecedent_of(stored), antecedent_of(wanted)
    pairs = _common(first, second)
    both = len(first.members) + len(second.members)
    changed = 1 - 2 * len(pairs) / both if both else 0.0
    if pooled is not None and first.members and second.members:
        one, other = (_mean(_vectors(each, pooled)) for each in (first, second))
        if one is not None and other is not None:
            changed = _cosine_divergence(one, other)
    turned = 0.0 if orbit else _discordant(pairs)
    served = sum(first.members[one].state != second.members[other].state for one, other in pairs)
    return 1 - (1 - changed) * (1 - turned / 2) * (1 - served / max(len(pairs), 1) / 2)


def _common(first: Antecedent, second: Antecedent) -> list[tuple[int, int]]:
    """Places of the chunks that are in both, each paired with the first one of its id and content that is free."""
    free = list(range(len(second.members)))
    pairs = []
    for place, member in enumerate(first.members):
        other = next((each for each in free if _same_chunk(member, second.members[each])), None)
        if other is not None:
            free.remove(other)
            pairs.append((place, other))
    return pairs


def _same_chunk(first: Member, second: Member) -> bool:
    unknown = None in (first.content, second.content)
    return first.id == second.id and (unknown or first.content == second.content)


def _discordant(pairs: list[tuple[int, int]]) -> float:
    """The share of pairs of pairs whose order is turned."""
    count = len(pairs)
    if count < 2:
        return 0.0
    turned = sum(pairs[i][1] > pairs[j][1] for j in range(count) for i in range(j))
    return turned / math.comb(count, 2)


def _vectors(antecedent: Antecedent, pooled: Pooled) -> list[np.ndarray | None]:
    found = []
    for member in antecedent.members:
        vector = pooled.get(member.id) if member.content is None else pooled.get(member.content, pooled.get(member.id))
        found.append(None if vector is None else np.asarray(vector, np.float64))
    return found


def _mean(vectors: list[np.ndarray | None]) -> np.ndarray | None:
    known = [vector for vector in vectors if vector is not None]
    return np.mean(known, axis=0) if len(known) == len(vectors) else None


def _cosine_divergence(first: np.ndarray, second: np.ndarray) -> float:
    if first.shape != second.shape:
        raise ShapeError(f"divergence: pooled vectors of shape {second.shape}; expected {first.shape}")
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(np.clip(1 - (first @ second) / norms, 0, 1)) if norms else 0.0


def pooled_canonical(chunk: Chunk) -> Float[np.ndarray, " D"]:
    """Averages a canonical over its tokens: its channels without phase, all layers one behind the other, float32.

    Raises:
      ShapeError: a batch of chunks.
    """
    if chunk.batch is not None:
        raise ShapeError(f"pooled: chunk {chunk.id!r} is a batch of {chunk.batch}; expected one chunk")
    names = [channel.name for channel in chunk.layout.channels if not channel.rotates]
    kv = jax.device_get({name: chunk.kv[name] for name in names})
    means = [np.asarray(kv[name], np.float32)[:, : chunk.length].mean(axis=1).ravel() for name in names]
    return np.concatenate(means)


class ReuseCurve(NamedTuple):
    """How a gate at each threshold would have done: rows by growing threshold, arrays [N'].

    Attributes:
      threshold: patches of at most this divergence are reused.
      coverage: the share of all that is reused.
      false_reuse: the share of the reused whose loss is beyond the bound.
      safe, unsafe: medians of the divergence within and beyond the bound; NaN where there are none.
    """

    threshold: Float[np.ndarray, " N"]
    coverage: Float[np.ndarray, " N"]
    false_reuse: Float[np.ndarray, " N"]
    safe: float
    unsafe: float

    def at(self, coverage: float | int) -> float:
        """The least rate of false reuse among thresholds that reuse at least this share.

        Raises:
          InputError: a share that is not above 0 and at most 1.
        """
        if not 0 < coverage <= 1:
            raise InputError(f"gate: coverage {coverage}; expected above 0 and at most 1")
        return float(self.false_reuse[self.coverage >= coverage].min())


def reuse_curve(divergences: Sequence[float], losses: Sequence[float], bound: float) -> ReuseCurve:
    """Measures a gate on pairs of a divergence and of the loss that reuse then had, such as the KL to re-prefill.

    Args:
      divergences, losses: one of each for every reuse, in the same order.
      bound: a loss up to which reuse was right.

    Raises:
      InputError: no pairs, unequal numbers, or numbers that are not finite.
    """
    apart, lost = np.asarray(divergences, np.float64), np.asarray(losses, np.float64)
    if apart.ndim != 1 or apart.shape != lost.shape or not apart.size:
        raise InputError(f"gate: divergences {apart.shape} and losses {lost.shape}; expected as many, at least one")
    if not (np.isfinite(apart).all() and np.isfinite(lost).all()):
        raise InputError("gate: divergences or losses that are not finite; expected finite numbers")
    wrong = lost > bound
    threshold = np.unique(apart)
    reused = np.array([(apart <= each).sum() for each in threshold])
    false = np.array([wrong[apart <= each].sum() for each in threshold])
    median = lambda values: float(np.median(values)) if values.size else math.nan
    return ReuseCurve(threshold, reused / apart.size, false / reused, median(apart[~wrong]), median(apart[wrong]))
